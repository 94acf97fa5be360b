"""Softmax attention of grouped heads, through torch's SDPA or `nsa.partial` (eq. 1, 2).

Letters in the shapes, here and in the other modules:
    B sequences, S queries, T keys, Dk width of a query or key, Dv width of a value,
    H query heads, G key heads, R = H/G query heads in the group of a key head

Around SDPA, autocast is suspended, because autocast would round float32 inputs.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsa.backends import Switches
from nsa.partial import attend_part, attend_part_backward
from nsa.precision import no_autocast
from nsa.tables import cached_table

FOLDED_TOKENS = 128
"""Most tokens in a fold of `attend_folded`."""

_ALL_BUT_FLASH = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]


def allowed_kernels(switches: Switches, refused: bool) -> AbstractContextManager[object]:
    """Returns a context that limits SDPA to the kernels that the switches allow.

    With `refused`, `flash_only` has no effect: the flash kernel might not support this case.
    """
    if switches.no_flash:
        return sdpa_kernel(_ALL_BUT_FLASH)
    if switches.flash_only and not refused:
        return sdpa_kernel(SDPBackend.FLASH_ATTENTION)
    return nullcontext()


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """Attention (eq. 1, 2) with an additive mask; every query must see at least one key.

    The shapes are `q` `[N, H, S, Dk]`, `k` `[N, G, T, Dk]`, `v` `[N, G, T, Dv]` → `[N, H, S, Dv]`.
    `bias` broadcasts to `[N, H, S, T]`: -inf hides a key, 0 does not. None hides no key.
    """
    k, v, native = expand_kv(q, k, v)
    with no_autocast(q.device):
        return F.scaled_dot_product_attention(q, k, v, bias, enable_gqa=native)


def attend_last(q: Tensor, k: Tensor, v: Tensor, folded: bool = False) -> Tensor:
    """Causal attention of the last S of T tokens to the T tokens; shapes as in `attend`.

    If `folded` and S = T, the heads of a group are rows of one product (see `Route.folded`).
    """
    count, total = q.shape[2], k.shape[2]
    if count < total:
        # A single query sees all keys. SDPA's is_causal aligns the first query with the first key.
        bias = causal_mask(total - count, count, total, q) if count > 1 else None
        return attend(q, k, v, bias)
    if folded:
        return attend_folded(q, k, v)
    k, v, native = expand_kv(q, k, v)
    with no_autocast(q.device):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=native)


def attend_folded(q: Tensor, k: Tensor, v: Tensor, window: int = 0) -> Tensor:
    """Computes `attend_last` with T = S on the CPU, for equal Dk and Dv.

    A `window` above 0 hides the tokens before the window. The tokens are cut into folds. In a fold,
    all heads of a group are rows of one product, which reads only the keys that `_cut` yields.
    """
    return _Folded.apply(q, k, v, window)[0]


class _Folded(torch.autograd.Function):
    """Computes `attend_folded` and its log-sum-exp, with a backward for all folds together.

    Autograd would allocate a gradient of the size of all tokens for each fold, and sum these.
    Queries and outputs are rows `[B, G, S · R, D]`, with a log-sum-exp `[B, G, S · R, 1]`. A fold
    is a slice of these rows.
    """

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, window: int) -> tuple[Tensor, Tensor]:
        rows, found = _rows(q, k.shape[1]), []
        for fold, seen, bias in _cut(q, k, window):
            found.append(attend_part(rows[:, :, fold], k[:, :, seen], v[:, :, seen], bias, True))
        out, lse = zip(*found, strict=True)
        return _heads(out, q), torch.cat(lse, dim=2)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        *qkv, ctx.window = inputs
        ctx.save_for_backward(*qkv, *output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, *grads: Tensor):
        q, k, v, out, lse = ctx.saved_tensors
        rows = [*(_rows(x, k.shape[1]) for x in (grads[0], q, out)), lse]
        grad_q, grad_k, grad_v = [], torch.zeros_like(k), torch.zeros_like(v)
        for fold, seen, bias in _cut(q, k, ctx.window):
            keys, values, own = k[:, :, seen], v[:, :, seen], [x[:, :, fold] for x in rows]
            of_q, of_k, of_v = attend_part_backward(own, keys, values, bias, flash=True)
            grad_q.append(of_q)
            grad_k[:, :, seen].add_(of_k)
            grad_v[:, :, seen].add_(of_v)
        return _heads(grad_q, q), grad_k, grad_v, None


def _cut(q: Tensor, k: Tensor, window: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yields three values for each fold: its rows, its keys, and the mask.

    The keys are those that at least one row of the fold sees. With a window, one key before these
    may be added, which the mask hides from all rows. Then for w = 512, a whole fold has a multiple
    of 64 keys.
    """
    heads = q.shape[1] // k.shape[1]
    for begin in range(0, q.shape[2], FOLDED_TOKENS):
        end = min(begin + FOLDED_TOKENS, q.shape[2])
        start = max(begin - window, 0) if window else 0
        own = window if window < end else 0  # 0: all tokens of the fold see all earlier tokens
        bias = causal_mask(begin - start, end - begin, end - start, q, heads, own)
        yield slice(begin * heads, end * heads), slice(start, end), bias


def _rows(x: Tensor, groups: int) -> Tensor:
    """`[B, H, S, D]` → `[B, G, S · R, D]`; the heads of a token are neighbouring rows."""
    return x.unflatten(1, (groups, -1)).transpose(2, 3).flatten(2, 3)


def _heads(rows: Sequence[Tensor], like: Tensor) -> Tensor:
    """Joins pieces of the result of `_rows` to `[B, H, S, D]`; H is the number of heads of `like`.

    The layout in memory is [B, S, H, D], so that merging the heads needs no copy.
    """
    heads = like.shape[1] // rows[0].shape[1]
    pieces = [x.unflatten(2, (-1, heads)).transpose(1, 2) for x in rows]
    return torch.cat(pieces, dim=1).flatten(2, 3).transpose(1, 2)


def causal_mask(
    first: int, count: int, n_keys: int, like: Tensor, heads: int = 1, window: int = 0,
    stride: int = 1,
) -> Tensor:  # fmt: skip
    """Returns an additive mask `[count · heads, n_keys]` with the dtype and device of `like`.

    Query i has the position first + i, and `heads` rows. Key j has the position j · `stride`.
    Positions count from any token that the caller chooses. A query sees the keys up to its own
    position. With a `window`, it does not see keys that are `window` or more positions before it.
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

    On a CPU with Dk = Dv, SDPA expands keys and values; its flash kernel needs no copy for this. In
    other cases with fewer key heads, this function copies keys and values.
    """
    if q.shape[1] == k.shape[1] or (q.device.type == "cpu" and q.shape[-1] == v.shape[-1]):
        return k, v, q.shape[1] != k.shape[1]
    heads = q.shape[1] // k.shape[1]
    return k.repeat_interleave(heads, 1), v.repeat_interleave(heads, 1), False
