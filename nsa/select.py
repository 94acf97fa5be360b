"""The selected branch: scores blocks, selects some, and attends to these (eq. 9, 11, 12).

The branch is named `sel` here and `slc` in the paper; `p_sel` is the paper's p^slc.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa.attend import additive, attend, causal_mask
from nsa.compress import weights_in_chunks
from nsa.config import INITIAL_BLOCKS, LOCAL_BLOCKS, NSAConfig, selection_blocks
from nsa.precision import upcast_fp32
from nsa.tables import cached_table


@cached_table
def overlap_weights(
    n_cmp: int, n_blocks: int, config: NSAConfig, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns two values: the compressed blocks that overlap each selection block, and weights.

    Both are `[terms, n_blocks]`, with blocks in ascending order. A weight is the fraction of the
    compressed block that lies inside the selection block, or 0 for an unused term. With l=32, d=16,
    l'=64, selection block j overlaps the compressed blocks 4j-1 … 4j+3 with the weights 1/2, 1, 1,
    1, 1/2. The double sum in eq. 9 counts them 1, 2, 2, 2, 1 times; the constant factor d/l does
    not change the choice. Eq. 9 is printed with the index 4j - m - n, which would select earlier
    tokens; the index used here is 4j + m - n. This function works for any l, d and l'.
    """
    size, stride, wide = config.block_size, config.block_stride, config.select_block_size
    begin = torch.arange(n_blocks, device=device) * wide
    terms = (size + wide - 2) // stride + 1 if n_cmp else 0
    term = torch.arange(terms, device=device)[:, None]
    block = term - (size - 1 - begin).div(stride, rounding_mode="floor")
    start = block * stride
    shared = torch.minimum(start + size, begin + wide) - torch.maximum(start, begin)
    outside = (block < 0) | (block >= n_cmp) | (shared < 0)
    weight = shared.masked_fill(outside, 0).to(dtype) / size
    return block.clamp(0, n_cmp - 1), weight


@cached_table
def block_status(
    first: int, end: int, config: NSAConfig, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Returns an additive mask `[end - first, blocks]` for the tokens first … end - 1.

    The value is +inf for a block that the query must select, -inf for a block that starts after the
    query, and otherwise 0.
    """
    current = torch.arange(first, end, device=device)[:, None] // config.select_block_size
    block = torch.arange(selection_blocks(config, end), device=device)[None, :]
    forced = (block < INITIAL_BLOCKS) | (block > current - LOCAL_BLOCKS)
    status = torch.zeros(forced.shape, device=device, dtype=dtype)
    return status.masked_fill_(forced, torch.inf).masked_fill_(block > current, -torch.inf)


@torch.no_grad()
def importance(p_cmp: Tensor, config: NSAConfig, n_blocks: int) -> Tensor:
    """Returns p_sel (eq. 9) `[..., n_blocks]` from `p_cmp` `[..., n]`.

    The sum is computed term by term, so that blocks with equal terms have exactly equal scores. A
    matrix product could round them differently.
    """
    blocks, weights = overlap_weights(p_cmp.shape[-1], n_blocks, config, p_cmp.device, p_cmp.dtype)
    p_sel = p_cmp.new_zeros(*p_cmp.shape[:-1], n_blocks)
    for block, weight in zip(blocks, weights, strict=True):
        p_sel += p_cmp.index_select(-1, block) * weight
    return p_sel


@torch.no_grad()
def block_scores(q: Tensor, k_cmp: Tensor, config: NSAConfig, first: int = 0) -> Tensor:
    """Returns p_sel (eq. 9, 10) `[B, G, S, blocks]` of tokens first, first + 1, ….

    `q` is `[B, H, S, Dk]`, `k_cmp` is `[B, G, N, Dk]`. p_sel is 0 for a block that a query does not
    see.
    """
    n_blocks = selection_blocks(config, first + q.shape[2])
    p_sel = upcast_fp32(q).new_zeros(q.shape[0], k_cmp.shape[1], q.shape[2], n_blocks)
    size, stride = config.block_size, config.block_stride
    for rows, p_cmp in weights_in_chunks(q, k_cmp, size, stride, first):
        begun = selection_blocks(config, first + rows.stop)
        p_sel[:, :, rows, :begun] = importance(p_cmp, config, begun)
    return p_sel


@torch.no_grad()
def top_blocks(p_sel: Tensor, config: NSAConfig, first: int = 0) -> Tensor:
    """Returns the blocks that tokens first, first + 1, … attend to (eq. 11).

    `p_sel` is `[B, G, S, blocks]`. The result is int64 `[B, G, S, n]`, in ascending order; n is at
    most the number of blocks. The n blocks always include block 0, the query's block, and the block
    before the query's block. Of equal scores the lower index is selected. If fewer than n blocks
    have begun, the index `blocks`, one past the last block, fills the rest.
    """
    n_blocks = p_sel.shape[-1]
    status = block_status(first, first + p_sel.shape[2], config, p_sel.device, p_sel.dtype)
    values, order = (p_sel + status).sort(dim=-1, descending=True, stable=True)
    n = min(config.n_select, n_blocks)
    chosen = order[..., :n].masked_fill(values[..., :n] == -torch.inf, n_blocks)
    return chosen.sort(dim=-1).values


def attend_selected(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, config: NSAConfig) -> Tensor:
    """Causal attention to the tokens of the selected blocks, by a mask. Returns `[B, H, S, Dv]`.

    `q` is `[B, H, S, Dk]`, for the last S of T tokens. `k` is `[B, G, T, Dk]`, and `v` is
    `[B, G, T, Dv]`. `blocks` `[B, G, S, n]` is a result of `top_blocks`. Tokens after the query are
    masked. A single query loads only the tokens of its own blocks.
    """
    size, (count, total) = config.select_block_size, (q.shape[2], k.shape[2])
    if count == 1:
        token = blocks.squeeze(2).unsqueeze(-1) * size + torch.arange(size, device=q.device)
        token = token.flatten(2)
        bias = additive(token >= total, q.dtype).unsqueeze(2)
        token = token.clamp_max(total - 1).unsqueeze(-1)
        k, v = (x.gather(2, token.expand(-1, -1, -1, x.shape[-1])) for x in (k, v))
        return attend_by_group(q, k, v, bias)
    n_blocks = selection_blocks(config, total)
    causal = causal_mask(total - count, count, n_blocks * size, q).unflatten(1, (n_blocks, size))
    bias = additive(~block_mask(blocks, n_blocks), q.dtype).unsqueeze(-1) + causal
    return attend_by_group(q, k, v, bias.flatten(-2)[..., :total])


def attend_ranges(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, config: NSAConfig) -> Tensor:
    """Computes `attend_selected` with a mask from merged ranges of tokens."""
    first, total = k.shape[2] - q.shape[2], k.shape[2]
    seen = tokens_in(merged_ranges(blocks, config, first), total)
    return attend_by_group(q, k, v, additive(~seen, q.dtype))


def attend_by_group(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Attention with a mask for each group, `bias` `[B, G, S, T]`; other shapes as in `attend`."""
    groups = k.shape[1]
    q = q.unflatten(1, (groups, -1)).flatten(0, 1)
    k, v = (x.flatten(0, 1).unsqueeze(1) for x in (k, v))
    out = attend(q, k, v, bias.flatten(0, 1).unsqueeze(1))
    return out.unflatten(0, (-1, groups)).flatten(1, 2)


def block_mask(blocks: Tensor, n_blocks: int) -> Tensor:
    """Block indices `[..., n]` → bool `[..., n_blocks]`; the index `n_blocks` means no block."""
    mask = torch.zeros((*blocks.shape[:-1], n_blocks + 1), dtype=torch.bool, device=blocks.device)
    return mask.scatter_(-1, blocks, True)[..., :n_blocks]


@torch.no_grad()
def merged_ranges(blocks: Tensor, config: NSAConfig, first: int) -> Tensor:
    """Returns the ranges of visible tokens for the selected blocks; neighbouring blocks are merged.

    `blocks` `[B, G, S, n]` has ascending indices for the queries first, first + 1, …. The result is
    `[B, G, S, n, 2]`: begin and end of n ranges. Unused ranges are empty. No range contains a token
    after its query. A range is stored at the place of its last block, so no shape depends on the
    data.
    """
    size = config.select_block_size
    end = first + torch.arange(1, blocks.shape[2] + 1, device=blocks.device)[:, None]
    # Index minus place is constant within a run of neighbouring blocks, and changes after it.
    place = torch.arange(blocks.shape[-1], device=blocks.device)
    run = blocks - place
    last = F.pad(run[..., 1:] != run[..., :-1], (0, 1), value=True)
    opens = F.pad(run[..., 1:] != run[..., :-1], (1, 0), value=True)
    began = torch.where(opens, blocks, 0).cummax(-1).values
    begin = torch.minimum(began * size, end)
    stop = torch.minimum((blocks + 1) * size, end)
    empty = ~last | (begin >= stop)
    return torch.stack((begin, stop), dim=-1).masked_fill(empty.unsqueeze(-1), 0)


def tokens_in(ranges: Tensor, seq_len: int) -> Tensor:
    """Ranges `[..., n, 2]` that do not overlap → bool `[..., seq_len]`, true inside a range."""
    steps = torch.zeros(*ranges.shape[:-2], seq_len + 1, dtype=torch.int32, device=ranges.device)
    ones = torch.ones_like(ranges[..., 0], dtype=torch.int32)
    steps = steps.scatter_add(-1, ranges[..., 0], ones).scatter_add(-1, ranges[..., 1], -ones)
    return steps.cumsum(-1)[..., :seq_len] > 0
