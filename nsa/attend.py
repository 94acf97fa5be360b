"""Softmax attention of grouped heads through torch's SDPA: R query heads share a key head."""

import torch.nn.functional as F
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Attention with an additive mask, in which every query must see at least one key.

    `q` `[N, R, S, Dk]`, `k` `[N, T, Dk]`, `v` `[N, T, Dv]`, `bias` `[N or 1, 1, S, T]`, of 0 and
    -inf, → `[N, R, S, Dv]`.
    """
    k, v = share(k, q.shape[1]), share(v, q.shape[1])
    return F.scaled_dot_product_attention(q, k, v, bias.expand(q.shape[0], -1, -1, -1))


def attend_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of each token to itself and all before it; shapes as in `attend`, T = S."""
    if k.shape[1] != q.shape[2]:
        # is_causal aligns queries and keys at their first token, which is right for equal lengths.
        raise ValueError(f"causal attention needs as many keys as queries, got {k.shape[1]} keys.")
    k, v = share(k, q.shape[1]), share(v, q.shape[1])
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def share(x: Tensor, heads: int) -> Tensor:
    """`[N, T, D]` → `[N, heads, T, D]`, without a copy."""
    return x.unsqueeze(1).expand(-1, heads, -1, -1)
