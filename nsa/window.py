"""The window branch: causal attention to the last w tokens, including the query."""

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa.attend import attend, attend_causal
from nsa.tables import cached_table

CHUNK_ROWS = 384
"""Preferred number of rows (tokens times heads of a group) in a chunk."""
SMALLEST_CHUNK, LARGEST_CHUNK = 16, 128
"""Limits of the tokens in a chunk; each token costs every query one key more."""


def attend_window(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Returns the attention to the window: the last w tokens, including the query.

    `q` `[B, H, S, Dk]`, `k` `[B, G, S, Dk]`, `v` `[B, G, S, Dv]` → `[B, H, S, Dv]`. The first w
    tokens see all tokens before them. The others are cut into chunks of c tokens (16 to 128), and
    each chunk sees w + c keys, so a query costs w + c keys instead of S.
    """
    if q.shape[2] <= window:
        return attend_causal(q, k, v)
    q_start, q_rest = q.split([window, q.shape[2] - window], dim=2)
    start = attend_causal(q_start, k[:, :, :window], v[:, :, :window])
    rest = attend_band(q_rest, k, v, window)
    # Joined as [B, S, H, D], the layout in which the heads are merged.
    return torch.cat((start.transpose(1, 2), rest.transpose(1, 2)), dim=1).transpose(1, 2)


def attend_band(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """The window of queries that begin at token w of the keys; shapes as in `attend_window`.

    The heads of a group are rows of one product, like its tokens: the CPU's kernel is faster with
    more rows.
    """
    batch, heads, rest, _ = q.shape
    groups = k.shape[1]
    chunk = chunk_tokens(window, heads // groups)
    spare = -rest % chunk
    if spare:
        q, k, v = (F.pad(x, (0, 0, 0, spare)) for x in (q, k, v))
    q = q.unflatten(2, (-1, chunk)).unflatten(1, (groups, -1)).permute(0, 3, 1, 4, 2, 5)
    k, v = (x.unfold(2, window + chunk, chunk).permute(0, 2, 1, 4, 3).flatten(0, 1) for x in (k, v))
    bias = band(chunk, heads // groups, window, q.device, q.dtype)
    out = attend(q.flatten(3, 4).flatten(0, 1), k, v, bias)
    out = out.unflatten(0, (batch, -1)).unflatten(3, (chunk, -1)).transpose(2, 3)
    return out.flatten(3, 4).flatten(1, 2)[:, :rest].transpose(1, 2)


def chunk_tokens(window: int, heads: int) -> int:
    """Returns the number of tokens in a chunk if `heads` heads share the keys."""
    wanted = min(max(CHUNK_ROWS // heads, SMALLEST_CHUNK), LARGEST_CHUNK)
    return min(max(window, SMALLEST_CHUNK), wanted)


@cached_table
def band(chunk: int, heads: int, window: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Returns an additive mask `[chunk · heads, w + chunk]`.

    The keys begin w tokens before the first query. A query sees the last w keys up to its own.
    """
    age = window + torch.arange(chunk, device=device).repeat_interleave(heads)[:, None]
    age = age - torch.arange(window + chunk, device=device)
    hidden = (age < 0) | (age >= window)
    return torch.zeros(hidden.shape, device=device, dtype=dtype).masked_fill_(hidden, -torch.inf)
