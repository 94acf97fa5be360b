"""The window branch: causal attention to the last w tokens, including the query."""

import importlib

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa.attend import attend, attend_folded, attend_last, causal_mask

CHUNK_ROWS = 384
"""Preferred number of rows (tokens times heads of a group) in a chunk."""


def attend_window(q: Tensor, k: Tensor, v: Tensor, window: int, folded: bool = False) -> Tensor:
    """Returns the attention to the window: the last w tokens, including the query.

    `q` is `[B, H, S, Dk]`, for the last S of T tokens. `k` is `[B, G, T, Dk]`, and `v` is
    `[B, G, T, Dv]`. The keys begin at position 0, or include at least w - 1 tokens before the first
    query. Queries with fewer than w earlier tokens see all earlier tokens. The other queries are
    cut into chunks of c tokens (16 to 128). A chunk reads w + c keys instead of T. If S = 1, only
    the last w keys are read. With `folded` and T = S, `attend_folded` computes all queries.
    """
    count, past = q.shape[2], k.shape[2] - q.shape[2]
    if folded and not past:
        return attend_folded(q, k, v, window)
    if count == 1:
        return attend_last(q, k[:, :, -window:], v[:, :, -window:])
    start = min(max(window - past, 0), count)
    if start == count:
        return attend_last(q, k, v, folded)
    seen, band = past + start, past + start - window
    q_start, q_rest = q.split([start, count - start], dim=2)
    rest = attend_band(q_rest, k[:, :, band:], v[:, :, band:], window)
    if start == 0:
        return rest
    begin = attend_last(q_start, k[:, :, :seen], v[:, :, :seen], folded)
    # In the layout [B, S, H, D], merging the heads needs no copy.
    return torch.cat((begin.transpose(1, 2), rest.transpose(1, 2)), dim=1).transpose(1, 2)


def attend_band(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Attention to the window; the first query is token w of the keys.

    The shapes are as in `attend_window`. One product has as rows all tokens of a chunk and all
    heads of a group, because the CPU's kernel is faster with more rows.
    """
    batch, heads, rest, _ = q.shape
    groups = k.shape[1]
    # A larger chunk gives the kernel more rows, but with chunks of c tokens each query reads c
    # keys beyond its window.
    chunk = min(max(window, 16), max(CHUNK_ROWS * groups // heads, 16), 128)
    spare = -rest % chunk
    if spare:
        q, k, v = (F.pad(x, (0, 0, 0, spare)) for x in (q, k, v))
    q = q.unflatten(2, (-1, chunk)).unflatten(1, (groups, -1)).permute(0, 3, 1, 4, 2, 5)
    k, v = (x.unfold(2, window + chunk, chunk).permute(0, 2, 1, 4, 3).flatten(0, 1) for x in (k, v))
    bias = causal_mask(window, chunk, window + chunk, q, heads=heads // groups, window=window)
    out = attend(q.flatten(3, 4).flatten(0, 1), k, v, bias)
    out = out.unflatten(0, (batch, -1)).unflatten(3, (chunk, -1)).transpose(2, 3)
    return out.flatten(3, 4).flatten(1, 2)[:, :rest].transpose(1, 2)


def attend_flash_attn(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Computes `attend_window` for T = S with the package flash-attn (CUDA, bf16, fp16).

    flash-attn expects `[B, S, H, D]`, and expands key heads itself. Its window excludes the query,
    so (w - 1, 0) means w tokens. Raises ImportError if the package is missing.
    """
    flash_attn_func = importlib.import_module("flash_attn").flash_attn_func
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return flash_attn_func(q, k, v, causal=True, window_size=(window - 1, 0)).transpose(1, 2)
