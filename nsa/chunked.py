"""The selected branch at a cost of the selected blocks, and in memory for one chunk of tokens.

The queries of a chunk are sorted by the blocks that they selected and cut into tiles: rows (queries
times heads of a group) that share one block, so that a tile is one product of dense matrices. The
current block and the one before it are contiguous and need no sorting. The parts of a query are
joined by their log-sum-exps; the backward computes them again from the saved indices.

Tokens t < n · l' select every block that has begun: theirs is plain causal attention.

Letters of shapes: S queries, which are the last of T tokens; C of them in a chunk; R heads in each
of G groups; rows are (sequence, token, group).
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa.attend import attend_causal
from nsa.config import LOCAL_BLOCKS, NSAConfig
from nsa.partial import attend_part, attend_part_backward
from nsa.precision import no_autocast, widen
from nsa.tables import cached_table

CHUNK = 8192
"""Tokens whose selected keys are worked on at a time."""
TILE_ROWS = 768
"""Rows of a tile at most: enough for an efficient product, few enough to be filled."""
PART_PAIRS = 2048
"""Selected blocks of tokens whose tiles are computed at a time, so that they stay in a cache."""
FARTHEST_AHEAD = 40.0
"""How far a log-sum-exp may be above its query's reference: float32 overflows at 88."""


def attend_chunked(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, config: NSAConfig, flash: bool = True
) -> Tensor:
    """Shapes and result as of `nsa.select.attend_selected`. `flash`: whether torch's flash kernel
    may compute the parts."""
    start = min(config.n_select * config.select_block_size, q.shape[2])
    q_first, q_rest = q.split([start, q.shape[2] - start], dim=2)
    first = attend_causal(q_first, k[:, :, :start], v[:, :, :start])
    if start == q.shape[2]:
        return first
    with no_autocast(q.device):
        rest, _ = _selected(q_rest, k, v, blocks[:, :, start:], config.select_block_size, flash)
    return torch.cat((first.transpose(1, 2), rest), dim=1).transpose(1, 2)


@torch.library.custom_op("nsa::selected", mutates_args=())
def _selected(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, size: int, flash: bool
) -> tuple[Tensor, Tensor]:
    """Output `[B, S, H, Dv]`, and log-sum-exp `[B, S, H]` in float32 at least.

    An operator of its own because its number of tiles depends on the data: torch.compile does not
    look inside.
    """
    keys, values = _Blocks.cut(k, size), _Blocks.cut(v, size)
    outs, lses = [], []
    for chunk in _chunks(q, k, blocks, size):
        queries = chunk.rows(q)
        near, near_lse = attend_part(
            chunk.fold(queries), keys.near(chunk), values.near(chunk), chunk.bias, flash
        )
        near, near_lse = chunk.unfold(near), chunk.unfold(near_lse.unsqueeze(-1))
        plan = chunk.plan(keys.count)
        joined = _Joined(plan, near, near_lse)
        for part in plan.parts:
            far, far_lse = attend_part(
                plan.queries(queries, part), keys.far(plan, part), values.far(plan, part), None,
                flash,
            )  # fmt: skip
            joined.add(part, far, far_lse)
        out, lse = joined.whole()
        outs.append(out.flatten(2, 3).to(q.dtype))
        lses.append(lse.flatten(2, 4))
    return torch.cat(outs, dim=1), torch.cat(lses, dim=1)


@torch.library.custom_op("nsa::selected_backward", mutates_args=())
def _selected_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, out: Tensor, lse: Tensor,
    size: int, flash: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q `[B, H, S, Dk]`, k and v from that of the output `[B, S, H, Dv]`."""
    keys, values = _Blocks.cut(k, size), _Blocks.cut(v, size)
    grad_keys, grad_values = keys.zeros(), values.zeros()
    grad_q = []
    for chunk in _chunks(q, k, blocks, size):
        heads_first = (grad.transpose(1, 2), q, out.transpose(1, 2), lse.mT.unsqueeze(-1))
        rows = [chunk.rows(x) for x in heads_first]
        near, near_k, near_v = _part_backward(
            [chunk.fold(x) for x in rows], keys.near(chunk), values.near(chunk), chunk.bias, flash
        )
        grad_keys.add_near(chunk, near_k)
        grad_values.add_near(chunk, near_v)
        plan = chunk.plan(keys.count)
        total = plan.sums(chunk.unfold(near))
        for part in plan.parts:
            grad_t, q_t, out_t, lse_t = (plan.queries(x, part) for x in rows)
            lse_t = lse_t.masked_fill_(plan.spare(part).unsqueeze(-1), torch.inf)
            far_q, far_k, far_v = _part_backward(
                [grad_t, q_t, out_t, lse_t],
                keys.far(plan, part),
                values.far(plan, part),
                None,
                flash,
            )
            plan.add(total, part, far_q)
            grad_keys.add_far(plan, part, far_k)
            grad_values.add_far(plan, part, far_v)
        grad_q.append(total[:-1].view(*q.shape[:1], -1, *q.shape[1::2]).to(q.dtype))
    q_grad = torch.cat(grad_q, dim=1).transpose(1, 2).contiguous()
    return q_grad, grad_keys.joined(k), grad_values.joined(v)


@_selected.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, size: int, flash: bool):
    batch, heads, seq_len, _ = q.shape
    lse = widen(q.new_empty(0)).new_empty(batch, seq_len, heads)
    return q.new_empty(batch, seq_len, heads, v.shape[-1]), lse


@_selected_backward.register_fake
def _(grad, q, k, v, blocks, out, lse, size, flash):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _keep(ctx, inputs, output) -> None:
    q, k, v, blocks, ctx.size, ctx.flash = inputs
    ctx.save_for_backward(q, k, v, blocks, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad: Tensor, _grad_lse):
    found = _selected_backward(grad, *ctx.saved_tensors, ctx.size, ctx.flash)
    return *found, None, None, None


_selected.register_autograd(_backward, setup_context=_keep)


def _part_backward(
    rows: list[Tensor], k: Tensor, v: Tensor, bias: Tensor | None, flash: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`attend_part_backward` of rows of the output's gradient, queries, outputs and lse."""
    grad, q, out, lse = rows
    return attend_part_backward(grad, q, k, v, out, lse.squeeze(-1), bias, flash)


class _Joined:
    """The parts' outputs, weighted and summed as they come.

    Each query's weights are relative to a reference near its log-sum-exp, which at first is that
    of the near keys; it is raised where a part is so far above it that a weight could overflow.
    To see that waits for the device once a part.
    """

    def __init__(self, plan: "_Plan", near: Tensor, near_lse: Tensor) -> None:
        """`near` `[B, C, G, R, Dv]`, `near_lse` `[B, C, G, R, 1]`."""
        self._plan, self._shape = plan, near.shape
        self._out, self._reference = plan.sums(near), plan.sums(near_lse)
        self._mass = torch.ones_like(self._reference)

    def add(self, part: slice, out: Tensor, lse: Tensor) -> None:
        """Output `[tiles, share · R, Dv]` and log-sum-exp `[tiles, share · R]` of a part."""
        plan = self._plan
        ahead = lse - plan.of_rows(self._reference, part)
        if bool((ahead > FARTHEST_AHEAD).any()):
            self._raise(part, lse)
            ahead = lse - plan.of_rows(self._reference, part)
        weight = ahead.exp_().unsqueeze(-1)
        plan.add(self._mass, part, weight)
        plan.add(self._out, part, out.mul_(weight))

    def _raise(self, part: slice, lse: Tensor) -> None:
        before = self._reference
        row, heads = self._plan.row[part].flatten(), before.shape[1]
        lse = lse.reshape(-1, heads)
        self._reference = before.index_reduce(0, row, lse, "amax")
        scale = (before - self._reference).exp_()
        self._mass *= scale
        self._out.unflatten(1, (heads, -1)).mul_(scale.unsqueeze(-1))

    def whole(self) -> tuple[Tensor, Tensor]:
        """Output `[B, C, G, R, Dv]` and log-sum-exp `[B, C, G, R, 1]` over all keys."""
        mass = self._mass[:-1].view(*self._shape[:-1], 1)
        reference = self._reference[:-1].view_as(mass)
        return self._out[:-1].view(self._shape) / mass, reference + mass.log()


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The tokens begin … end of the queries. `first` is the block of the first of them."""

    begin: int
    end: int
    first: int
    size: int
    blocks: Tensor
    """`[B, G, C, n - 2]`: the selected blocks but the two local ones."""
    bias: Tensor
    """`[l' · R, 2 · l']`: which keys of two neighbouring blocks a query of the latter sees."""

    def rows(self, x: Tensor) -> Tensor:
        """`[B, H, S, X]` → `[B, C, G, R, X]`, contiguous and wide."""
        x = widen(x[:, :, self.begin : self.end]).transpose(1, 2)
        return x.unflatten(2, (self.blocks.shape[1], -1)).contiguous()

    def fold(self, x: Tensor) -> Tensor:
        """`[B, C, G, R, X]` → `[B · blocks · G, l' · R, X]`, filled up to whole blocks."""
        spare = -x.shape[1] % self.size
        if spare:
            x = F.pad(x, (0, 0, 0, 0, 0, 0, 0, spare))
        x = x.unflatten(1, (-1, self.size)).transpose(2, 3)
        return x.flatten(3, 4).flatten(0, 2)

    def unfold(self, x: Tensor) -> Tensor:
        """The reverse of `fold`."""
        batch, groups, tokens, _ = self.blocks.shape
        x = x.view(batch, -1, groups, self.size, x.shape[1] // self.size, x.shape[2])
        return x.transpose(2, 3).flatten(1, 2)[:, :tokens]

    def plan(self, n_blocks: int) -> "_Plan":
        """Which queries share a tile, for `n_blocks` blocks in each sequence and group."""
        batch, groups, tokens, picks = self.blocks.shape
        device = self.blocks.device
        heads = len(self.bias) // self.size
        share = max(8, min(TILE_ROWS // heads, tokens * picks // n_blocks))
        owner = torch.arange(batch * groups, device=device).view(batch, groups, 1, 1)
        block = (owner * n_blocks + self.blocks).transpose(1, 2).flatten()
        count = torch.bincount(block, minlength=batch * groups * n_blocks)
        tiles = (count + share - 1) // share
        order = block.argsort(stable=True)
        before, tiles_before = count.cumsum(0) - count, tiles.cumsum(0) - tiles
        place = torch.arange(len(block), device=device) - before[block[order]]
        slot = tiles_before[block[order]] * share + place
        tile_block = torch.arange(len(count), device=device).repeat_interleave(tiles)
        row = order.new_full((len(tile_block) * share,), batch * tokens * groups)
        row[slot] = order // picks
        parts = -(-tokens * picks // PART_PAIRS)
        return _Plan(row.view(-1, share), tile_block, batch * tokens * groups, heads, parts)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Tiles of `share` slots, each a query or spare."""

    row: Tensor
    """`[tiles, share]`: of each slot its row of the chunk, one past the last where it is spare."""
    block: Tensor
    """Of each tile: its block."""
    rows: int
    heads: int
    n_parts: int

    @property
    def parts(self) -> list[slice]:
        """The tiles in equal parts that stay in a cache; how many does not depend on the data."""
        count = min(self.n_parts, len(self.block))
        ends = [len(self.block) * i // count for i in range(count + 1)]
        return [slice(*pair) for pair in pairwise(ends)]

    def spare(self, part: slice) -> Tensor:
        """`[tiles, share · R]`, true where a slot is no query."""
        return (self.row[part] == self.rows).repeat_interleave(self.heads, 1)

    def queries(self, x: Tensor, part: slice) -> Tensor:
        """`[B, C, G, R, X]` → `[tiles, share · R, X]`."""
        row = self.row[part].clamp_max(self.rows - 1).flatten()
        rows = x.flatten(3, 4).flatten(0, 2).index_select(0, row)
        return rows.view(len(self.row[part]), -1, x.shape[-1])

    def sums(self, x: Tensor) -> Tensor:
        """`[B, C, G, R, X]` → `[rows + 1, R · X]`: begins with `x` and takes what `add` brings,
        that of spare slots into the row past the last."""
        return F.pad(x.flatten(3, 4).flatten(0, 2), (0, 0, 0, 1))

    def of_rows(self, sums: Tensor, part: slice) -> Tensor:
        """`[rows + 1, R]` → `[tiles, share · R]`."""
        return sums.index_select(0, self.row[part].flatten()).view(len(self.row[part]), -1)

    def add(self, sums: Tensor, part: slice, x: Tensor) -> None:
        """Adds `[tiles, share · R, X]` to their rows."""
        row = self.row[part].flatten()
        sums.index_add_(0, row, x.reshape(len(row), -1))


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Keys or values (or their gradients) as whole blocks `[B, G, blocks, l', D]`, wide."""

    data: Tensor

    @classmethod
    def cut(cls, x: Tensor, size: int) -> "_Blocks":
        """From `[B, G, T, D]`; the last block is filled up with zeros."""
        spare = -x.shape[2] % size
        wide = F.pad(widen(x), (0, 0, 0, spare)) if spare else widen(x)
        return cls(wide.unflatten(2, (-1, size)).contiguous())

    @property
    def count(self) -> int:
        return self.data.shape[2]

    def zeros(self) -> "_Blocks":
        return _Blocks(torch.zeros_like(self.data))

    def near(self, chunk: _Chunk) -> Tensor:
        """`[B · blocks · G, 2 · l', D]`: each block of the chunk after the one before it."""
        n = -(-(chunk.end - chunk.begin) // chunk.size)
        before, own = (self.data[:, :, i : i + n] for i in (chunk.first - 1, chunk.first))
        return torch.cat((before, own), dim=3).transpose(1, 2).flatten(0, 2)

    def far(self, plan: _Plan, part: slice) -> Tensor:
        """`[tiles, l', D]`."""
        rows = self.data.flatten(3, 4).flatten(0, 2).index_select(0, plan.block[part])
        return rows.view(-1, *self.data.shape[3:])

    def add_near(self, chunk: _Chunk, grad: Tensor) -> None:
        batch, groups, _, size, width = self.data.shape
        grad = grad.view(batch, -1, groups, 2, size, width).transpose(1, 2)
        for i, part in enumerate(grad.unbind(3)):
            begin = chunk.first - 1 + i
            self.data[:, :, begin : begin + part.shape[2]].add_(part)

    def add_far(self, plan: _Plan, part: slice, grad: Tensor) -> None:
        # Rows of one dimension: index_add_ is slow on the CPU for rows of two.
        self.data.view(-1, grad[0].numel()).index_add_(0, plan.block[part], grad.flatten(1))

    def joined(self, like: Tensor) -> Tensor:
        """As `[B, G, T, D]`, in the dtype of `like`."""
        whole = self.data.flatten(2, 3)[:, :, : like.shape[2]]
        return whole.to(like.dtype).contiguous()


def _chunks(q: Tensor, k: Tensor, blocks: Tensor, size: int) -> list[_Chunk]:
    """The chunks of the queries `[B, H, S, D]`, the first of which begins a block."""
    seq_len, heads = q.shape[2], q.shape[1] // k.shape[1]
    first = (k.shape[2] - seq_len) // size
    bias = two_blocks(size, heads, q.device, torch.promote_types(q.dtype, torch.float32))
    step = max(CHUNK // size, 1) * size
    return [
        _Chunk(
            begin, min(begin + step, seq_len), first + begin // size, size,
            blocks[:, :, begin : begin + step, :-LOCAL_BLOCKS], bias,
        )
        for begin in range(0, seq_len, step)
    ]  # fmt: skip


@cached_table
def two_blocks(size: int, heads: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Additive mask `[l' · heads, 2 · l']`: queries of the second of two blocks, causal."""
    query = torch.arange(size, device=device).repeat_interleave(heads)[:, None] + size
    hidden = torch.arange(2 * size, device=device) > query
    return torch.zeros(hidden.shape, device=device, dtype=dtype).masked_fill_(hidden, -torch.inf)
