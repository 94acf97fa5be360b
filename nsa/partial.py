"""Attention to a part of the keys, forward and backward, for callers that combine the parts.

The forward of a part returns its output and its log-sum-exp (lse); the lse gives the weight of the
part. The backward of a part computes the probabilities again, as exp(score - lse). Besides its
queries, keys and values, it needs the output over *all* keys, with its gradient and lse. On a CPU
with Dk = Dv, both directions use torch's flash kernels, if torch has them and the caller allows
them. All other cases use plain matrix products.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def _operator(name: str) -> Any:
    """Returns a private operator of torch, or None if the operator or its mask is missing."""
    found = getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention_for_cpu{name}", None)
    if found is None or "attn_mask" not in {x.name for x in found.default._schema.arguments}:
        return None
    return found


_flash, _flash_backward = _operator(""), _operator("_backward")
_HAS_FLASH = _flash is not None and _flash_backward is not None


def attend_part(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, flash: bool
) -> tuple[Tensor, Tensor]:
    """Returns two values: the output `[N, G, M, Dv]` and the log-sum-exp `[N, G, M, 1]`.

    The shapes are `q` `[N, G, M, Dk]`, `k` `[N, G, T, Dk]`, `v` `[N, G, T, Dv]`, `bias` `[M, T]`.
    Each query must see at least one key.
    """
    if flash and _flash_serves(q, v):
        out, lse = _flash(q, k, v, attn_mask=bias)
        return out, lse.unsqueeze(-1)
    scores = _scores(q, k, bias)
    lse = scores.logsumexp(-1, keepdim=True)
    return scores.sub_(lse).exp_() @ v, lse


def attend_part_backward(
    rows: Sequence[Tensor], k: Tensor, v: Tensor, bias: Tensor | None, flash: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what this part of the keys contributes to the gradients of q, k and v.

    `rows` are four tensors: the output's gradient, the queries, the output and the log-sum-exp. The
    output, its gradient and the log-sum-exp are those over all keys. A query whose log-sum-exp is
    +inf contributes nothing.
    """
    grad, q, out, lse = rows
    if flash and _flash_serves(q, v):
        return _flash_backward(grad, q, k, v, out, lse.squeeze(-1), 0.0, False, attn_mask=bias)
    p = _scores(q, k, bias).sub_(lse).exp_()
    grad_scores = (grad @ v.mT).sub_((grad * out).sum(-1, keepdim=True)).mul_(p)
    grad_scores.mul_(q.shape[-1] ** -0.5)
    return grad_scores @ k, grad_scores.mT @ q, p.mT @ grad


def _flash_serves(q: Tensor, v: Tensor) -> bool:
    return _HAS_FLASH and q.device.type == "cpu" and q.shape[-1] == v.shape[-1]


def _scores(q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    return scores if bias is None else scores.add_(bias)
