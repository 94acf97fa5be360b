"""The window branch: causal attention to the last w tokens, the query itself among them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa.attend import attend, attend_causal
from nsa.tables import cached_table


def attend_window(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """`q` `[B, G, R, S, Dk]`, `k` `[B, G, S, Dk]`, `v` `[B, G, S, Dv]` → `[B, G, R, S, Dv]`."""
    groups = q.shape[:2]
    q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    out = attend_causal(q, k, v) if q.shape[2] <= window else attend_band(q, k, v, window)
    return out.unflatten(0, groups)


def attend_band(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """The window of a longer sequence, at a cost of 2 · w keys per query instead of S.

    The queries are cut into chunks of w tokens; a chunk sees its own keys and those of the chunk
    before. `q` `[N, R, S, Dk]`, `k` `[N, S, Dk]`, `v` `[N, S, Dv]` → `[N, R, S, Dv]`.
    """
    seq_len = q.shape[2]
    chunks = -(-seq_len // window)
    spare = chunks * window - seq_len
    q = F.pad(q, (0, 0, 0, spare)).unflatten(2, (chunks, window)).transpose(1, 2)
    k, v = (
        F.pad(x, (0, 0, window, spare)).unfold(1, 2 * window, window).mT.flatten(0, 1)
        for x in (k, v)
    )
    bias = band(chunks, window, q.device, q.dtype).expand(q.shape[0], -1, -1, -1, -1)
    out = attend(q.flatten(0, 1), k, v, bias.flatten(0, 1))
    return out.unflatten(0, (-1, chunks)).transpose(1, 2).flatten(2, 3)[:, :, :seq_len]


@cached_table
def band(chunks: int, window: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Additive mask `[chunks, 1, w, 2w]`: a query sees the w keys that end with its own, and none
    before the first token of the sequence."""
    query = torch.arange(chunks * window, device=device).view(chunks, 1, window, 1)
    first = torch.arange(-1, chunks - 1, device=device).view(chunks, 1, 1, 1) * window
    key = first + torch.arange(2 * window, device=device)
    hidden = (key > query) | (key <= query - window) | (key < 0)
    return torch.zeros(hidden.shape, device=device, dtype=dtype).masked_fill_(hidden, -torch.inf)
