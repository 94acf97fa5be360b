"""The selected branch: which blocks matter to a query (paper, eq. 8-12), and attention to them."""

import torch
from torch import Tensor

from nsa.attend import attend
from nsa.config import INITIAL_BLOCKS, LOCAL_BLOCKS, NSAConfig
from nsa.precision import no_autocast
from nsa.tables import cached_table


@cached_table
def overlap(
    n_cmp: int, n_slc: int, config: NSAConfig, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """`[n_cmp, n_slc]`: the part of each compressed block that lies in each selection block.

    This is eq. 9 read as overlap, as every public kernel does (with l=32, d=16, l'=64 the weights
    are 1/2, 1, 1, 1, 1/2 for blocks 4j-1 … 4j+3; taken literally the indices of eq. 9 point to
    earlier tokens), and it holds for any l, d and l'.
    """
    start = torch.arange(n_cmp, device=device)[:, None] * config.block_stride
    block = torch.arange(n_slc, device=device)[None, :] * config.select_block_size
    end = torch.minimum(start + config.block_size, block + config.select_block_size)
    shared = (end - torch.maximum(start, block)).clamp_min(0)
    return shared.to(dtype) / config.block_size


@cached_table
def block_status(
    seq_len: int, config: NSAConfig, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Additive `[S, blocks]`: +inf for the forced blocks of a query, -inf for blocks that start
    after it, 0 for the rest."""
    n_slc = -(-seq_len // config.select_block_size)
    current = torch.arange(seq_len, device=device)[:, None] // config.select_block_size
    block = torch.arange(n_slc, device=device)[None, :]
    forced = (block < INITIAL_BLOCKS) | (block > current - LOCAL_BLOCKS)
    status = torch.zeros(forced.shape, device=device, dtype=dtype)
    return status.masked_fill_(forced, torch.inf).masked_fill_(block > current, -torch.inf)


@cached_table
def causal_in_blocks(
    seq_len: int, config: NSAConfig, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Additive mask `[S, blocks, l']`: a query sees the tokens of each block up to itself."""
    n_slc = -(-seq_len // config.select_block_size)
    token = torch.arange(n_slc * config.select_block_size, device=device)
    hidden = token[None, :] > torch.arange(seq_len, device=device)[:, None]
    mask = torch.zeros(hidden.shape, device=device, dtype=dtype).masked_fill_(hidden, -torch.inf)
    return mask.unflatten(1, (n_slc, config.select_block_size))


@torch.no_grad()
def importance(p_cmp: Tensor, config: NSAConfig) -> Tensor:
    """p_slc (eq. 9, 10): `p_cmp` `[B, G, S, N]` → `[B, G, S, blocks]`."""
    seq_len, n_cmp = p_cmp.shape[-2:]
    n_slc = -(-seq_len // config.select_block_size)
    with no_autocast(p_cmp.device):
        return p_cmp @ overlap(n_cmp, n_slc, config, p_cmp.device, p_cmp.dtype)


@torch.no_grad()
def top_blocks(p_slc: Tensor, config: NSAConfig) -> Tensor:
    """The blocks each query attends to (eq. 11, 12): `[B, G, S, blocks]` → int64 `[B, G, S, n]`.

    Block 0, the current block and the one before it are always in and count among the n. Of equal
    scores the lower index wins. Indices ascend; where fewer than n blocks have begun, the rest are
    the sentinel `blocks`, one past the last. n is at most the number of blocks.
    """
    seq_len, n_slc = p_slc.shape[-2:]
    ranked = p_slc + block_status(seq_len, config, p_slc.device, p_slc.dtype)
    values, order = ranked.sort(dim=-1, descending=True, stable=True)
    n = min(config.n_select, n_slc)
    chosen = order[..., :n].masked_fill(values[..., :n] == -torch.inf, n_slc)
    return chosen.sort(dim=-1).values


def attend_selected(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, config: NSAConfig) -> Tensor:
    """Causal attention to the tokens of the selected blocks.

    `q` `[B, G, R, S, Dk]`, `k` `[B, G, S, Dk]`, `v` `[B, G, S, Dv]`, `blocks` `[B, G, S, n]` as
    from `top_blocks` → `[B, G, R, S, Dv]`. The current block, part of it in the future, is masked
    inside.
    """
    seq_len = q.shape[3]
    causal = causal_in_blocks(seq_len, config, q.device, q.dtype)
    chosen = block_mask(blocks, causal.shape[1])
    bias = torch.where(chosen, 0.0, -torch.inf).to(q.dtype).unsqueeze(-1) + causal
    bias = bias.flatten(-2)[..., :seq_len].flatten(0, 1).unsqueeze(1)
    out = attend(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), bias)
    return out.unflatten(0, q.shape[:2])


def block_mask(blocks: Tensor, n_slc: int) -> Tensor:
    """Indices `[..., n]` (sentinel `n_slc`) → bool `[..., n_slc]`."""
    mask = torch.zeros((*blocks.shape[:-1], n_slc + 1), dtype=torch.bool, device=blocks.device)
    return mask.scatter_(-1, blocks, True)[..., :n_slc]
