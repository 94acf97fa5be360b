"""Computes the selected branch for long sequences, one chunk of tokens at a time.

From token 2 · l' on, every query selects block 0, its current block and the block before the
current block. The keys of these three blocks are the near keys of the query. The other pairs of a
query and a selected block are sorted by block, and cut into tiles. All queries of a tile selected
the same block, so the attention of a tile is a product of dense matrices. The near keys of a query
give one part of the query's output, and each tile with this query gives another part. The parts are
combined by their log-sum-exps. The backward computes the probabilities again from the saved inputs
and log-sum-exps.

A tile may have more slots than queries. After the rows of its queries, a chunk has one spare row,
which belongs to no query. The slots without a query refer to this row.

Tokens t < n · l' select every block that has begun, so they use plain causal attention.

Shapes are as in `nsa.attend`, with C queries in a chunk. A row has R heads. Each row except the
spare row belongs to one sequence, group and token.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa.attend import attend_last, causal_mask
from nsa.config import INITIAL_BLOCKS, LOCAL_BLOCKS, NSAConfig, selection_blocks
from nsa.partial import attend_part, attend_part_backward
from nsa.precision import no_autocast, upcast_fp32
from nsa.select import attend_selected

CHUNK = 8192
"""Most tokens in a chunk of whole blocks; a larger block is a chunk of its own."""
TILE_ROWS = 768
"""Most slots of a tile with more than 8 slots, times the heads of a group. A lower number makes the
products slow, and a higher number leaves more slots empty."""
PART_BYTES = 32 << 20
"""Approximate memory of the queries and outputs of one `_Tiles`, and of their gradients. On a CPU,
sizes from 32 to 256 MiB were equally fast; smaller sizes were slower, because of more calls."""
FARTHEST_AHEAD = 40.0
"""Largest distance of a log-sum-exp above its reference (`_Joined`); exp overflows above 88."""


def attend_chunked(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, config: NSAConfig, flash: bool = True,
    folded: bool = False,
) -> Tensor:  # fmt: skip
    """Causal attention to the selected blocks (eq. 12); shapes as in `nsa.select.attend_selected`.

    `blocks` may lack the tokens t < n · l' of the sequence. `flash` allows torch's flash kernel for
    the parts. The first chunk begins with the first token of a block. For the queries before that,
    plain causal attention suffices if they select all blocks; otherwise a mask is used.
    """
    size, (count, total) = config.select_block_size, (q.shape[2], k.shape[2])
    past, all_seen = total - count, config.n_select * size
    start = min(max(all_seen, -(-past // size) * size) - past, count)
    q_head, q_rest = q.split([start, count - start], dim=2)
    found = []
    if start:
        end = past + start
        seen = k[:, :, :end], v[:, :, :end]
        if end <= all_seen:
            head = attend_last(q_head, *seen, folded)
        else:
            own = blocks[:, :, :start].clamp_max(selection_blocks(config, end))
            head = attend_selected(q_head, *seen, own, config)
        found.append(head.transpose(1, 2))
    if start < count:
        with no_autocast(q.device):
            found.append(_tiled(q_rest, k, v, blocks[:, :, start - count :], size, flash)[0])
    return torch.cat(found, dim=1).transpose(1, 2)


@torch.library.custom_op("nsa::selected", mutates_args=())
def _tiled(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, size: int, flash: bool
) -> tuple[Tensor, Tensor]:
    """Returns the output `[B, S, H, Dv]`, and the log-sum-exp `[B, S, H]` in float32 or wider.

    This is a custom operator, because torch.compile cannot trace it: on a CPU, the number of tiles
    depends on the data.
    """
    keys, values = _Blocks.cut(k, size), _Blocks.cut(v, size)
    batch, heads, seq_len, _ = q.shape
    out = q.new_empty(batch, seq_len, heads, v.shape[-1])
    lse = keys.data.new_empty(batch, seq_len, heads, 1)
    for chunk in _chunks(q, k, blocks, size):
        queries = chunk.rows(q)
        near, near_lse = attend_part(
            chunk.fold(queries), keys.near(chunk), values.near(chunk), chunk.bias, flash
        )
        joined = _Joined(chunk.unfold(near), chunk.unfold(near_lse))
        for tiles in chunk.tiles(keys, values):
            far, far_lse = attend_part(
                tiles.queries(queries), keys.far(tiles), values.far(tiles), None, flash
            )
            joined.add(tiles, far, far_lse)
        for rows, whole in zip(joined.result(), (out, lse), strict=True):
            chunk.write(rows, whole)
    return out, lse.squeeze(-1)


@torch.library.custom_op("nsa::selected_backward", mutates_args=())
def _tiled_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, out: Tensor, lse: Tensor,
    size: int, flash: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of q `[B, H, S, Dk]`, k and v from the gradient of the output."""
    keys, values = _Blocks.cut(k, size), _Blocks.cut(v, size)
    grad_keys, grad_values = (_Blocks(torch.zeros_like(x.data)) for x in (keys, values))
    grad_q = q.new_empty(q.transpose(1, 2).shape)
    for chunk in _chunks(q, k, blocks, size):
        rows = [chunk.rows(x) for x in (grad.transpose(1, 2), q, out.transpose(1, 2))]
        rows.append(chunk.rows(lse.mT.unsqueeze(-1), spare=torch.inf))
        near, near_k, near_v = attend_part_backward(
            [chunk.fold(x) for x in rows], keys.near(chunk), values.near(chunk), chunk.bias, flash
        )
        grad_keys.add_near(chunk, near_k)
        grad_values.add_near(chunk, near_v)
        total = chunk.unfold(near)
        for tiles in chunk.tiles(keys, values):
            far_rows = [tiles.queries(x) for x in rows]
            far_q, far_k, far_v = attend_part_backward(
                far_rows, keys.far(tiles), values.far(tiles), None, flash
            )
            tiles.add(total, far_q)
            grad_keys.add_far(tiles, far_k)
            grad_values.add_far(tiles, far_v)
        chunk.write(total, grad_q)
    return grad_q.transpose(1, 2), grad_keys.joined(k), grad_values.joined(v)


@_tiled.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, size: int, flash: bool):
    batch, heads, seq_len, _ = q.shape
    lse = upcast_fp32(q.new_empty(0)).new_empty(batch, seq_len, heads)
    return q.new_empty(batch, seq_len, heads, v.shape[-1]), lse


@_tiled_backward.register_fake
def _(grad, q, k, v, blocks, out, lse, size, flash):
    grad_k, grad_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v))
    return q.new_empty(q.transpose(1, 2).shape).transpose(1, 2), grad_k, grad_v


def _keep(ctx, inputs, output) -> None:
    q, k, v, blocks, ctx.size, ctx.flash = inputs
    ctx.save_for_backward(q, k, v, blocks, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad: Tensor, _grad_lse):
    with no_autocast(grad.device):
        found = _tiled_backward(grad, *ctx.saved_tensors, ctx.size, ctx.flash)
    return *found, None, None, None


_tiled.register_autograd(_backward, setup_context=_keep)


class _Joined:
    """Sums the weighted outputs of the parts of each query, one `_Tiles` after the other.

    A weight is exp(log-sum-exp of the part - reference of the query). The best reference, the
    largest log-sum-exp of the query, is known only at the end. So the reference begins as the
    log-sum-exp of the near keys, and is raised to a larger log-sum-exp of a later part. On a CPU,
    `add` does this only if a part is more than `FARTHEST_AHEAD` above its reference. On a GPU,
    `add` always does this, because the host would have to wait for the comparison.
    """

    def __init__(self, near: Tensor, near_lse: Tensor) -> None:
        """Starts with the output `near` `[rows, R, Dv]` and its log-sum-exp `[rows, R, 1]`.

        The memory of `near` is reused.
        """
        self._out, self._reference = near, near_lse
        self._mass = torch.ones_like(near_lse)

    def add(self, tiles: "_Tiles", out: Tensor, lse: Tensor) -> None:
        """Adds parts: `out` `[tiles, 1, slots · R, Dv]` and `lse` `[tiles, 1, slots · R, 1]`."""
        ahead = lse - tiles.queries(self._reference)
        if not _host_may_wait(lse) or bool((ahead > FARTHEST_AHEAD).any()):
            self._raise(tiles, lse)
            ahead = lse - tiles.queries(self._reference)
        weight = ahead.exp_()
        tiles.add(self._mass, weight)
        tiles.add(self._out, out.mul_(weight))

    def _raise(self, tiles: "_Tiles", lse: Tensor) -> None:
        before, row = self._reference, tiles.row.flatten()
        lse = lse.reshape(len(row), -1, 1)
        self._reference = before.index_reduce(0, row, lse, "amax")
        scale = (before - self._reference).exp_()
        self._mass *= scale
        self._out *= scale

    def result(self) -> tuple[Tensor, Tensor]:
        """Returns the output and the log-sum-exp over all parts, in the memory of the sums."""
        return self._out.div_(self._mass), self._mass.log_().add_(self._reference)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk of the queries `begin` to `end - 1`; `first` is the block of the first query."""

    begin: int
    end: int
    first: int
    size: int
    blocks: Tensor
    """`[B, G, C, n - 3]`: the selected blocks except the three blocks of the near keys."""
    bias: Tensor
    """Additive mask `[l' · R, 3 · l']` for the queries of a block and their near keys: first the
    keys of block 0, then of the block before, then of the block itself."""

    def rows(self, x: Tensor, spare: float = 0.0) -> Tensor:
        """Returns the rows of the chunk, and then the spare row.

        The shapes are `[B, H, S, X]` → `[B · G · C + 1, R, X]`. The rows are in float32 or wider.
        The values of the spare row are `spare`.
        """
        x = x[:, :, self.begin : self.end].unflatten(1, (self.blocks.shape[1], -1)).transpose(2, 3)
        wide = upcast_fp32(x[:0])
        rows = wide.new_empty(self.blocks.shape[:3].numel() + 1, *x.shape[3:])
        rows[:-1].view(x.shape).copy_(x)
        rows[-1] = spare
        return rows

    def fold(self, rows: Tensor) -> Tensor:
        """Groups the rows of the chunk by block, without the spare row.

        `[B · G · C + 1, R, X]` → `[B · G · blocks, 1, l' · R, X]`. The last block is padded with
        zeros.
        """
        x, spare = rows[:-1], -self.blocks.shape[2] % self.size
        if spare:
            x = F.pad(x.unflatten(0, (-1, self.blocks.shape[2])), (0, 0, 0, 0, 0, spare))
        return x.view(-1, 1, self.size * rows.shape[1], rows.shape[2])

    def unfold(self, x: Tensor) -> Tensor:
        """Reverses `fold`, and adds a spare row of zeros."""
        batch, groups, tokens, _ = self.blocks.shape
        x = x.reshape(batch * groups, -1, x.shape[2] // self.size, x.shape[3])[:, :tokens]
        return F.pad(x.flatten(0, 1), (0, 0, 0, 0, 0, 1))

    def write(self, rows: Tensor, whole: Tensor) -> None:
        """Writes `rows` to the tokens of the chunk in `whole` `[B, S, H, X]`."""
        part = whole[:, self.begin : self.end].unflatten(2, (self.blocks.shape[1], -1))
        part.transpose(1, 2).copy_(rows[:-1].view(part.transpose(1, 2).shape))

    def tiles(self, keys: "_Blocks", values: "_Blocks") -> "list[_Tiles]":
        """Returns the tiles of all (query, block) pairs that are not near, in groups.

        A group needs at most about `PART_BYTES` of memory. Each block has enough tiles for its
        pairs.
        For example, the queries a … e selected block 3, and f, g, h selected block 5. With 4 slots
        in a tile, `row` is

            a b c d (block 3)   e spare spare spare (block 3)   f g h spare (block 5)
        """
        batch, groups, tokens, picks = self.blocks.shape
        if not picks:
            return []
        n_blocks, device = keys.data.shape[2], self.blocks.device
        owner = torch.arange(batch * groups, device=device).view(batch, groups, 1, 1)
        block, order = (owner * n_blocks + self.blocks).flatten().sort(stable=True)
        all_blocks, mean = batch * groups * n_blocks, tokens * picks // n_blocks
        slots = max(8, min(TILE_ROWS * self.size // len(self.bias), mean))
        # For each block of all sequences and groups: first pair, number of tiles, first tile.
        begin = torch.searchsorted(block, torch.arange(all_blocks + 1, device=device))
        n_tiles = (begin.diff() + slots - 1) // slots
        most = (len(order) + all_blocks * (slots - 1)) // slots
        tile_block = _block_of(n_tiles, most)
        first_tile = n_tiles.cumsum(0) - n_tiles
        # For each pair, in the order of the blocks: its index among the slots of all tiles.
        slot = (first_tile * slots - begin[:-1])[block] + torch.arange(len(block), device=device)
        row = order.new_full((len(tile_block) * slots,), batch * groups * tokens)  # the spare row
        row.scatter_(0, slot, order // picks)
        width = len(self.bias) // self.size * (keys.data.shape[-1] + values.data.shape[-1])
        parts = -(-len(order) * 2 * width * keys.data.element_size() // PART_BYTES)
        return _Tiles.cut(row.view(-1, slots), tile_block, parts)


def _host_may_wait(x: Tensor) -> bool:
    """Returns whether the host may wait for a value of `x`: on a CPU only.

    On a GPU, the host prepares the next kernels while a kernel runs.
    """
    return x.device.type == "cpu"


def _block_of(tiles: Tensor, most: int) -> Tensor:
    """Returns the block of each tile. `tiles` `[blocks]` has the number of tiles of each block.

    On a GPU, the host does not wait for the sum of `tiles`. The result then has `most` tiles; the
    surplus tiles have only spare slots.
    """
    end = tiles.cumsum(0)
    count = int(end[-1]) if _host_may_wait(end) else most
    tile = torch.arange(count, device=tiles.device)
    return torch.searchsorted(end, tile, right=True).clamp_max(len(tiles) - 1)


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Tiles with `slots` slots each."""

    row: Tensor
    """`[tiles, slots]`: the chunk's row of each slot."""
    block: Tensor
    """`[tiles]`: the block of each tile."""

    @classmethod
    def cut(cls, row: Tensor, block: Tensor, parts: int) -> "list[_Tiles]":
        """Returns the tiles in at most `parts` groups of nearly equal size."""
        count = min(parts, len(block))
        ends = [len(block) * i // count for i in range(count + 1)] if count else []
        return [cls(row[i:j], block[i:j]) for i, j in pairwise(ends)]

    def queries(self, x: Tensor) -> Tensor:
        """Returns the rows in the slots: `[rows, R, X]` → `[tiles, 1, slots · R, X]`."""
        rows = x.flatten(1).index_select(0, self.row.flatten())
        return rows.view(len(self.row), 1, -1, x.shape[-1])

    def add(self, sums: Tensor, x: Tensor) -> None:
        """Adds `x` `[tiles, 1, slots · R, X]` to the rows of the tiles in `sums` `[rows, R, X]`."""
        row = self.row.flatten()
        sums.flatten(1).index_add_(0, row, x.reshape(len(row), -1))


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Keys, values or their gradients as blocks `[B, G, blocks, l', D]`, in float32 or wider."""

    data: Tensor

    @classmethod
    def cut(cls, x: Tensor, size: int) -> "_Blocks":
        """Returns the blocks of `x` `[B, G, T, D]`; the last block is padded with zeros."""
        spare = -x.shape[2] % size
        wide = F.pad(upcast_fp32(x), (0, 0, 0, spare)) if spare else upcast_fp32(x)
        return cls(wide.unflatten(2, (-1, size)).contiguous())

    def near(self, chunk: _Chunk) -> Tensor:
        """Returns the near keys of each block of the chunk: block 0, the previous and the own
        block.

        The shape is `[B · G · blocks, 1, 3 · l', D]`.
        """
        n = -(-(chunk.end - chunk.begin) // chunk.size)
        before, own = (self.data[:, :, i : i + n] for i in (chunk.first - 1, chunk.first))
        initial = self.data[:, :, :1].expand_as(own)
        return torch.cat((initial, before, own), dim=3).flatten(0, 2).unsqueeze(1)

    def far(self, tiles: _Tiles) -> Tensor:
        """Returns the block of each tile, `[tiles, 1, l', D]`."""
        rows = self.data.flatten(3, 4).flatten(0, 2).index_select(0, tiles.block)
        return rows.view(-1, 1, *self.data.shape[3:])

    def add_near(self, chunk: _Chunk, grad: Tensor) -> None:
        batch, groups, _, size, width = self.data.shape
        initial, *local = grad.reshape(batch, groups, -1, 3, size, width).unbind(3)
        self.data[:, :, 0].add_(initial.sum(2))
        for begin, part in enumerate(local, chunk.first - 1):
            self.data[:, :, begin : begin + part.shape[2]].add_(part)

    def add_far(self, tiles: _Tiles, grad: Tensor) -> None:
        # The rows are flattened, because index_add_ on the CPU is slow for rows of two dimensions.
        self.data.view(-1, grad[0].numel()).index_add_(0, tiles.block, grad.flatten(1))

    def joined(self, like: Tensor) -> Tensor:
        """Returns the blocks as `[B, G, T, D]`, with the length and dtype of `like`."""
        whole = self.data.flatten(2, 3)[:, :, : like.shape[2]]
        return whole.to(like.dtype).contiguous()


def _chunks(q: Tensor, k: Tensor, blocks: Tensor, size: int) -> list[_Chunk]:
    """Returns the chunks of the queries `[B, H, S, Dk]`; the first query begins a block."""
    seq_len, heads = q.shape[2], q.shape[1] // k.shape[1]
    first = (k.shape[2] - seq_len) // size
    # The queries are in the third of three blocks, so they see all keys of the first two.
    bias = causal_mask(2 * size, size, 3 * size, upcast_fp32(q[:, :, :0]), heads=heads)
    step = max(CHUNK // size, 1) * size
    far = blocks[..., INITIAL_BLOCKS:-LOCAL_BLOCKS].split(step, dim=2)
    return [
        _Chunk(begin, begin + x.shape[2], first + begin // size, size, x, bias)
        for begin, x in zip(range(0, seq_len, step), far, strict=True)
    ]
