"""The three branches of one token, computed from a decoding cache."""

import torch
from torch import Tensor

from nsa.attend import attend
from nsa.backends import Switches
from nsa.cache import Cache
from nsa.compress import attend_compressed
from nsa.config import NSAConfig
from nsa.select import attend_by_group, attend_ranges, block_scores, top_blocks


def attend_token(q: Tensor, cache: Cache, switches: Switches) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the outputs of the compressed, selected and window branch for one token.

    The token is the last one in `cache`; its query `q` is `[B, H, 1, Dk]`. Each output is `[B, H,
    1, Dv]`.
    """
    nsa, first = cache.config, cache.length - 1
    _, _, k_slc, v_slc, k_win, v_win = cache.kv
    k_blocks, v_blocks = cache.blocks
    out_cmp = attend_compressed(q, k_blocks, v_blocks, nsa.block_size, nsa.block_stride, first)
    blocks = top_blocks(block_scores(q, k_blocks, nsa, first), nsa, first)
    selected = attend_ranges if switches.sel_ranges else _selected_by_index
    out_slc = selected(q, k_slc, v_slc, blocks, nsa, first)
    return out_cmp, out_slc, attend(q, k_win, v_win, None)


def _selected_by_index(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, config: NSAConfig, first: int
) -> Tensor:
    """Attention to the gathered tokens of the selected blocks."""
    size = config.select_block_size
    token = blocks.squeeze(2).unsqueeze(-1) * size + torch.arange(size, device=q.device)
    token = token.flatten(2)
    bias = torch.zeros(token.shape, dtype=q.dtype, device=q.device)
    bias = bias.masked_fill_(token > first, -torch.inf).unsqueeze(2)
    token = token.clamp_max(first).unsqueeze(-1)
    k, v = (x.gather(2, token.expand(-1, -1, -1, x.shape[-1])) for x in (k, v))
    return attend_by_group(q, k, v, bias)
