"""Softmax attention of grouped heads through torch's SDPA: H query heads share G key heads.

The attention is computed in the dtype of its inputs. Autocast is suspended, because autocast would
round wider inputs.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsa.backends import Switches
from nsa.precision import no_autocast
from nsa.tables import cached_table

FOLDED_TOKENS = 64
"""Tokens per fold of `attend_causal`."""

_ALL_BUT_FLASH = [
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
]


def allowed_kernels(switches: Switches, refused: bool) -> AbstractContextManager[object]:
    """Returns a context that limits SDPA's kernels; `refused` if flash cannot compute this case."""
    if switches.no_flash:
        return sdpa_kernel(_ALL_BUT_FLASH)
    if switches.flash_only and not refused:
        return sdpa_kernel(SDPBackend.FLASH_ATTENTION)
    return nullcontext()


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """Attention with an additive mask; every query must see at least one key.

    `q` is `[N, H, S, Dk]`, `k` is `[N, G, T, Dk]`, `v` is `[N, G, T, Dv]`; the result is `[N, H, S,
    Dv]`. `bias` has the values 0 and -inf, and broadcasts to `[N, H, S, T]`.
    """
    k, v, native = expand_kv(q, k, v)
    with no_autocast(q.device):
        return F.scaled_dot_product_attention(q, k, v, bias, enable_gqa=native)


def attend_causal(q: Tensor, k: Tensor, v: Tensor, folded: bool = False) -> Tensor:
    """Attention of each token to itself and all earlier tokens; shapes as in `attend`, with T = S.

    With `folded`, the heads of a group are rows of one product, which is faster for few tokens (see
    `Route.folded`).
    """
    if k.shape[2] != q.shape[2]:
        # is_causal aligns queries and keys at their first token, which is right for equal lengths.
        raise ValueError(f"causal attention needs as many keys as queries, got {k.shape[2]} keys.")
    if folded:
        return _attend_folded(q, k, v)
    k, v, native = expand_kv(q, k, v)
    with no_autocast(q.device):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=native)


def attend_last(q: Tensor, k: Tensor, v: Tensor, folded: bool = False) -> Tensor:
    """Causal attention of the last S of T tokens to all T tokens."""
    count, total = q.shape[2], k.shape[2]
    if count == total:
        return attend_causal(q, k, v, folded)
    # A single query sees all keys.
    bias = causal_mask(total - count, count, total, q) if count > 1 else None
    return attend(q, k, v, bias)


def _attend_folded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`attend_causal` for few tokens on the CPU; the heads of a group are rows of one product.

    If a head has few rows, the kernel works on blocks of 32 or 64 rows, which are a third slower
    than blocks of 256.
    """
    groups, pieces = k.shape[1], []
    heads = q.shape[1] // groups
    for begin in range(0, q.shape[2], FOLDED_TOKENS):
        rows = q[:, :, begin : begin + FOLDED_TOKENS].unflatten(1, (groups, heads)).transpose(2, 3)
        count = rows.shape[2]
        end = begin + count
        bias = causal_mask(begin, count, end, q, heads=heads)
        out = attend(rows.flatten(2, 3), k[:, :, :end], v[:, :, :end], bias)
        pieces.append(out.unflatten(2, (count, heads)).transpose(1, 2).flatten(2, 3))
    # Joined as [N, S, H, D], the layout in which heads are merged.
    return torch.cat(pieces, dim=1).transpose(1, 2)


def causal_mask(
    first: int, count: int, n_keys: int, like: Tensor, heads: int = 1, window: int = 0,
    stride: int = 1,
) -> Tensor:  # fmt: skip
    """Returns an additive mask `[count · heads, n_keys]` with the dtype and device of `like`.

    The queries have the positions first, first + 1, …, each for `heads` rows; the keys have the
    positions 0, `stride`, 2 · `stride`, …. A query sees the keys up to its own position; with a
    `window`, only those that are less than `window` positions before the query.
    """
    return _causal_mask(first, count, n_keys, heads, window, stride, like.device, like.dtype)


@cached_table
def _causal_mask(
    first: int, count: int, n_keys: int, heads: int, window: int, stride: int,
    device: torch.device, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    query = first + torch.arange(count, device=device).repeat_interleave(heads)[:, None]
    age = query - torch.arange(n_keys, device=device) * stride
    hidden = (age < 0) | (age >= window) if window else age < 0
    return additive(hidden, dtype)


def additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns an additive mask: -inf where a key is `hidden`, otherwise 0."""
    zeros = torch.zeros(hidden.shape, device=hidden.device, dtype=dtype)
    return zeros.masked_fill_(hidden, -torch.inf)


def expand_kv(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Returns three values: keys and values for SDPA, and whether SDPA expands both to all heads.

    SDPA's CPU flash kernel expands keys and values without a copy, also in the backward. On other
    devices, the kernels that accept a mask do not expand keys and values.
    """
    if q.shape[1] == k.shape[1] or (q.device.type == "cpu" and q.shape[-1] == v.shape[-1]):
        return k, v, q.shape[1] != k.shape[1]
    heads = q.shape[1] // k.shape[1]
    return k.repeat_interleave(heads, 1), v.repeat_interleave(heads, 1), False
