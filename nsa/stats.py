"""Statistics of the attention gate and the selection, computed without waiting for the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nsa.config import FORCED_BLOCKS, NSAConfig
from nsa.gate import branch_shares, gate_entropy
from nsa.select import block_mask, block_status

COLLAPSED_ENTROPY_NATS = 0.1
COLLAPSED_SHARE = 0.95


@torch.no_grad()
def gate_stats(logits: Tensor, kind: str) -> dict[str, Tensor]:
    """Returns statistics of one layer's gate logits `[B, S, H, 3]` over all tokens and heads.

    `gate_entropy` (mean) and `gate_entropy_min` (lowest) are in nats. `gate_max_gate` is the mean
    of the largest share. `gate_collapse_frac` is the fraction of tokens and heads with an entropy
    below 0.1 nats and one share above 0.95. `gate_branch_shares` `[3]` has the mean shares of cmp,
    sel and win.
    """
    shares = branch_shares(logits, kind)
    entropy, largest = gate_entropy(shares), shares.amax(-1)
    collapsed = (entropy < COLLAPSED_ENTROPY_NATS) & (largest > COLLAPSED_SHARE)
    return {
        "gate_entropy": entropy.mean(),
        "gate_entropy_min": entropy.min(),
        "gate_max_gate": largest.mean(),
        "gate_collapse_frac": collapsed.float().mean(),
        "gate_branch_shares": shares.mean((0, 1, 2)),
    }


@torch.no_grad()
def selection_stats(p_sel: Tensor, blocks: Tensor, config: NSAConfig) -> dict[str, Tensor]:
    """Returns statistics of one layer's selection from p_sel `[B, G, S, blocks]` and block indices.

    Two statistics are means over the queries that see a compressed block. They are absent if the
    sequence is shorter than a compressed block:

    - `sel_entropy`: entropy of p_sel over the blocks, in nats;
    - `sel_forced_share`: fraction of p_sel on the forced blocks, which are always selected.

    Three statistics describe the picks: selected blocks that are not forced, of queries that have
    more than n blocks to select from. They are absent with fewer than two such queries, or if n
    allows no pick:

    - `sel_distance_mean`: mean number of tokens from the end of the block to the query;
    - `sel_distance_hist`: fractions of picks that are 2-3, 4-7, 8-15, … blocks before the query's;
    - `sel_overlap`: fraction of the picks after the first query that the query before selected too.
    """
    found = {}
    seq_len, n_blocks = p_sel.shape[-2:]
    status = block_status(0, seq_len, config, p_sel.device, p_sel.dtype)
    forced = status == torch.inf
    if seq_len >= config.block_size:
        first = config.block_size - 1
        mass = p_sel[..., first:, :]
        p = mass / mass.sum(-1, keepdim=True)
        found["sel_entropy"] = -(p * p.clamp_min(1e-30).log()).sum(-1).mean()
        found["sel_forced_share"] = (p * forced[first:]).sum(-1).mean()
    first = config.n_select * config.select_block_size
    if seq_len < first + 2 or config.n_select == FORCED_BLOCKS:
        return found
    chosen = block_mask(blocks[..., first:, :], n_blocks)
    free = chosen & ~forced[first:]
    picks = free.sum(dtype=torch.float32)
    token = torch.arange(first, seq_len, device=blocks.device)[:, None]
    block = torch.arange(n_blocks, device=blocks.device)[None, :]
    distance = token - (block + 1) * config.select_block_size + 1
    age = token // config.select_block_size - block
    found["sel_distance_mean"] = (free * distance).sum() / picks
    octaves = range(1, (n_blocks - 1).bit_length())
    per_octave = [(free & (age >= 2**i) & (age < 2 ** (i + 1))).sum() for i in octaves]
    found["sel_distance_hist"] = torch.stack(per_octave) / picks
    kept = free[..., 1:, :] & chosen[..., :-1, :]
    found["sel_overlap"] = kept.sum() / free[..., 1:, :].sum()
    return found


@torch.no_grad()
def over_layers(layers: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Returns a model's statistics: the means over its layers.

    The result has three values of the entropy: the mean, the mean of each layer, and the lowest.
    """
    together = {name: torch.stack([layer[name] for layer in layers]) for name in layers[0]}
    entropy = together.pop("gate_entropy")
    lowest = together.pop("gate_entropy_min")
    merged = {name: values.mean(0) for name, values in together.items()}
    over_all = {"gate_entropy_mean": entropy.mean(), "gate_entropy_layers": entropy}
    return over_all | {"gate_entropy_min": lowest.min()} | merged
