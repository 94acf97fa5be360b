"""The window branch: causal attention to the last w tokens, the query itself among them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa.attend import attend, attend_causal
from nsa.tables import cached_table

LARGEST_CHUNK = 128
SMALLEST_CHUNK = 16


def attend_window(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """`q` `[B, H, S, Dk]`, `k` `[B, G, S, Dk]`, `v` `[B, G, S, Dv]` → `[B, H, S, Dv]`.

    The first w tokens see all before them. The rest is cut into chunks of c tokens, c from 16 to
    128, and each chunk sees w + c keys: a cost of w + c keys per query instead of S.
    """
    if q.shape[2] <= window:
        return attend_causal(q, k, v)
    q_start, q_rest = q.split([window, q.shape[2] - window], dim=2)
    start = attend_causal(q_start, k[:, :, :window], v[:, :, :window])
    rest = attend_band(q_rest, k, v, window)
    # Joined as [B, S, H, D], the layout in which the heads are merged.
    return torch.cat((start.transpose(1, 2), rest.transpose(1, 2)), dim=1).transpose(1, 2)


def attend_band(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """The window of queries that begin at token w of the keys; shapes as in `attend_window`."""
    batch, heads, rest, width = q.shape
    chunk = min(max(window, SMALLEST_CHUNK), LARGEST_CHUNK)
    spare = -rest % chunk
    if spare:
        q, k, v = (F.pad(x, (0, 0, 0, spare)) for x in (q, k, v))
    q = q.unflatten(2, (-1, chunk)).transpose(1, 2).reshape(-1, heads, chunk, width)
    k, v = (x.unfold(2, window + chunk, chunk).permute(0, 2, 1, 4, 3).flatten(0, 1) for x in (k, v))
    out = attend(q, k, v, band(chunk, window, q.device, q.dtype))
    out = out.unflatten(0, (batch, -1)).permute(0, 1, 3, 2, 4).flatten(1, 2)
    return out[:, :rest].transpose(1, 2)


@cached_table
def band(chunk: int, window: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Additive mask `[chunk, w + chunk]`: of keys that begin w tokens before the first query, a
    query sees the w that end with its own."""
    age = window + torch.arange(chunk, device=device)[:, None]
    age = age - torch.arange(window + chunk, device=device)
    hidden = (age < 0) | (age >= window)
    return torch.zeros(hidden.shape, device=device, dtype=dtype).masked_fill_(hidden, -torch.inf)
