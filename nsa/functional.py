"""Native Sparse Attention (arXiv 2502.11089) as one function: training, prefill and decoding."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from nsa.attend import allowed_kernels, attend_last
from nsa.backends import BRANCHES, FLASH_ATTN_INSTALLED, Case, Route, Switches, effective
from nsa.cache import Cache
from nsa.chunked import attend_chunked
from nsa.compress import BlockMean, Phi, attend_compressed, summaries
from nsa.config import N_BRANCHES, ModelConfig, NSAConfig, compressed_blocks
from nsa.documents import each_document, lengths_of
from nsa.gate import fixed_gates
from nsa.precision import upcast_fp32
from nsa.profiler_ranges import mark
from nsa.rope import rotate
from nsa.select import attend_ranges, attend_selected, block_scores, top_blocks
from nsa.window import attend_flash_attn, attend_window

SELECTED = {"masked": attend_selected, "ranges": attend_ranges}
"""Functions of the selected branch with the same parameters, by route."""
Routes = Callable[[Tensor, int], Mapping[str, Route]]
"""Returns a route per branch, from queries `[B, H, S, Dk]` and the first query's position."""


@dataclass(frozen=True, slots=True)
class Execution:
    """The way to compute `nsa_attention`.

    Only the switches `force_branch` and `uniform_gate` change the result by more than rounding.
    These two replace the gates. `observe` gets the rotated queries and compressed keys of each call
    with queries and with `first` = 0. Of packed documents, it gets only the longest ones. `nvtx`
    marks the branches as ranges for Nsight Systems. `routes` replaces the table in `nsa.backends`.
    """

    switches: Switches = field(default_factory=Switches)
    routes: Routes | None = None
    observe: Callable[[Tensor, Tensor], None] | None = None
    nvtx: bool = False


def nsa_attention(
    q: Tensor, k: Sequence[Tensor], v: Sequence[Tensor], gates: Tensor, config: NSAConfig, *,
    phi: tuple[Phi, Phi] = (BlockMean(), BlockMean()), rope_base: float = 10000.0, first: int = 0,
    cu_seqlens: Sequence[int] | None = None, cache: Cache | None = None,
    how: Execution = Execution(),
) -> Tensor:  # fmt: skip
    """Returns the gated sum of the three branches (eq. 5) for S queries, `[B, H, S, Dv]`.

    Each branch is attention to its own keys and values (eq. 3, 4). `q` is `[B, H, S, Dk]`. `k` and
    `v` have one tensor for each branch, in the order compressed, selected, window (section 3.3.3).
    A tensor of keys is `[B, G, T, Dk]`, and a tensor of values is `[B, G, T, Dv]`. All have the
    dtype of `q`. Head h belongs to group h // (H/G). `gates` is `[B, S, H, 3]`, with the branches
    in this order. Queries and keys are not rotated yet.

    Compressed branch: `phi` maps each block of l unrotated keys to one key, and each block of l
    values to one value (eq. 7). The default is the mean; `nsa.compress.make_phi` makes the modules
    for an MLP. The configuration's `compress`, `gate` and `gate_hidden` do not change the result;
    they are for the layer `NSAttention`. Keys are compressed before they are rotated, because
    averaging or mixing rotated keys would cancel their fast components. A compressed key is then
    rotated to the position of its block's last token. Queries from this position on see the key.
    Selected branch: each query attends to at most n blocks of l' tokens. These are the first block,
    two local blocks, and the blocks with the highest scores (eq. 11, 12). The attention weights of
    the compressed keys (eq. 8) give the scores of the blocks (eq. 9). The heads of a group select
    together: their scores are summed (eq. 10). Window branch: each query attends to the last w
    tokens, including itself.

    `first` is the position of the first query. Without a `cache`, T = first + S. With a `cache`,
    T = S: the cache already has the `first` tokens before the queries, and the call appends the S
    tokens. Training passes all tokens without a cache, a prefill passes several tokens with a
    cache, and decoding passes one token with a cache.

    `cu_seqlens` are the offsets 0, …, S of documents packed in the sequence. Each document is
    computed as if it were alone. With a cache, the first document continues the cached document,
    and the last document stays in the cache. If the offsets begin with 0, 0 (an empty document),
    the cached document ends.

    Raises ValueError if the shapes, dtypes, lengths or the cache do not fit. Raises RuntimeError if
    a cache would have to store gradients. Such a call appends nothing to the cache.
    """
    _check_shapes(q, k, v, gates)
    _check_positions(q.shape[2], k[0].shape[2], first, cu_seqlens is not None, cache)
    if how.routes is None:
        how = replace(how, routes=_usual_routes(q, k[1], v[1], config, how.switches))
    if cu_seqlens is not None:
        alone = partial(nsa_attention, config=config, phi=phi, rope_base=rope_base, cache=cache)
        parts, lengths = (q, gates.transpose(1, 2), *k, *v), lengths_of(cu_seqlens, q.shape[2])
        return _documents(alone, parts, lengths, how, cache)
    if how.switches.fixed_gate is not None:
        gates = fixed_gates(gates, how.switches.fixed_gate)
    q, k_sel, k_win = (
        rotate(x, rope_base, first + q.shape[2] - x.shape[2]) for x in (q, k[1], k[2])
    )
    kv = [k_sel, v[1], k_win, v[2]]
    if cache is None:
        blocks = summaries(k[0], v[0], phi, config, rope_base)
    else:
        kv, blocks = _extended(cache, [k[0], v[0], *kv], config, phi, rope_base)
    if how.observe is not None and q.shape[2] > first == 0:
        how.observe(q, blocks[0])
    return gated_sum(gates, *_branches(q, blocks, kv, config, first, how))


def _extended(
    cache: Cache, new: Sequence[Tensor], config: NSAConfig, phi: tuple[Phi, Phi], rope_base: float
) -> tuple[list[Tensor], list[Tensor]]:
    """Appends the next tokens to the cache.

    Returns two values: keys and values of the selected and the window branch, and the compressed
    blocks. Before and after the call, the cache has all complete compressed blocks, and the rows of
    the compressed branch from the first token of the next block on. It may have some rows before
    that token. Raises ValueError for the cache of another configuration.
    """
    cache.check_config(config)
    old, length = compressed_blocks(config, cache.length), cache.length + new[0].shape[2]
    blocks: Sequence[Tensor] = ()
    # The first call stores blocks even if there are 0, because that makes the buffers.
    if compressed_blocks(config, length) > old or cache.length == 0:
        needed = length - old * config.block_stride  # rows from the start of block `old` on
        keys, values = (x[:, :, x.shape[2] - needed :] for x in cache.joined(new[:2]))
        blocks = summaries(keys, values, phi, config, rope_base, old)
    return cache.append(new, blocks)[2:], cache.blocks


def _check_shapes(q: Tensor, k: Sequence[Tensor], v: Sequence[Tensor], gates: Tensor) -> None:
    """Raises ValueError unless shapes and dtypes are those that `nsa_attention` names."""
    found, wanted, groups = [list(x.shape) for x in (q, *k, *v, gates)], None, 0
    if len(k) == len(v) == N_BRANCHES and {len(shape) for shape in found} == {4}:
        (batch, heads, count, width), groups, total = found[0], *found[1][1:3]
        keys, values = ([batch, groups, total, d] for d in (width, found[-2][-1]))
        wanted = [found[0], *[keys] * N_BRANCHES, *[values] * N_BRANCHES, [batch, count, heads, 3]]
    kinds = {x.dtype for x in (q, *k, *v)}
    if found != wanted or not q.shape[0] * groups or q.shape[1] % groups or len(kinds) > 1:
        raise ValueError(
            "q must be [B, H, S, Dk], k and v three tensors [B, G, T, D] each, gates [B, S, H, 3], "
            "B and G at least 1, H a multiple of G, and q, k and v of one dtype; got the shapes "
            f"{found} and the dtypes {kinds}."
        )


def _check_positions(count: int, keys: int, first: int, packed: bool, cache: Cache | None) -> None:
    """Raises ValueError unless the numbers of queries and keys fit, as `nsa_attention` says."""
    known = 0 if cache is None else cache.length
    own_keys = packed or cache is not None
    if first < 0 or keys + known != first + count or (own_keys and keys != count):
        raise ValueError(
            f"{count} queries from position {first} need keys from 0 on, and with packed documents "
            f"or a cache one key for each query; got {keys} keys and {known} in the cache."
        )


def _documents(
    alone: Callable[..., Tensor], parts: Sequence[Tensor], lengths: list[int], how: Execution,
    cache: Cache | None,
) -> Tensor:  # fmt: skip
    """Calls `alone`, a partial `nsa_attention`, and returns the results of all documents.

    `parts` are the queries, the gates `[B, H, S, 3]`, three keys and three values. `observe` gets
    only the longest documents.
    """

    def attend(q: Tensor, gates: Tensor, *kv: Tensor) -> Tensor:
        own = how if q.shape[2] == max(lengths) else replace(how, observe=None)
        first = 0 if cache is None else cache.length
        return alone(q, kv[:3], kv[3:], gates.transpose(1, 2), first=first, how=own)

    return each_document(attend, parts, lengths, cache)


def _branches(
    q: Tensor, blocks: Sequence[Tensor], kv: Sequence[Tensor], config: NSAConfig, first: int,
    how: Execution,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the outputs of the compressed, selected and window branch, `[B, H, S, Dv]` each.

    The S queries have the positions first, first + 1, …. `kv` are the keys (rotated) and values of
    the selected branch, then of the window branch. Both end at the last query. The keys of the
    selected branch begin at position 0.
    """
    k_sel, v_sel, k_win, v_win = kv
    assert how.routes is not None
    routes = how.routes(q, first)
    cmp, sel, win = (routes[branch] for branch in BRANCHES)
    if win.name == "sequential":
        return _sequential(q, blocks, kv, config, first, how)
    size, stride, switches = config.block_size, config.block_stride, how.switches
    with mark("cmp", cmp.name, how.nvtx), allowed_kernels(switches, cmp.no_flash):
        out_cmp = attend_compressed(q, blocks[0], blocks[1], size, stride, first)
    with mark("sel", sel.name, how.nvtx), allowed_kernels(switches, sel.no_flash):
        out_sel = _selected_branch(q, k_sel, v_sel, blocks[0], config, first, sel, switches)
    with mark("win", win.name, how.nvtx), allowed_kernels(switches, win.no_flash):
        if win.name == "flash-attn":
            out_win = attend_flash_attn(q, k_win, v_win, config.window)
        else:
            out_win = attend_window(q, k_win, v_win, config.window, win.folded)
    return out_cmp, out_sel, out_win


def _sequential(
    q: Tensor, blocks: Sequence[Tensor], kv: Sequence[Tensor], config: NSAConfig, first: int,
    how: Execution,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Computes `_branches` for one query after the other, in float32 or wider.

    A lower precision would not suffice, because the gradient of a key is summed query by query.
    """
    q, *kv = (upcast_fp32(x) for x in (q, *kv))
    steps = []
    for t in range(q.shape[2]):
        later = q.shape[2] - t - 1
        done = compressed_blocks(config, first + t + 1)
        seen = [x[:, :, : x.shape[2] - later] for x in kv]
        one = [x[:, :, :done] for x in blocks]
        steps.append(_branches(q[:, :, t : t + 1], one, seen, config, first + t, how))
    cmp, sel, win = (torch.cat(branch, dim=2) for branch in zip(*steps, strict=True))
    return cmp, sel, win


def _selected_branch(
    q: Tensor, k: Tensor, v: Tensor, k_blocks: Tensor, config: NSAConfig, first: int, route: Route,
    switches: Switches,
) -> Tensor:  # fmt: skip
    """Returns the output of the selected branch (eq. 8 to 12), `[B, H, S, Dv]`."""
    if route.name == "causal":
        return attend_last(q, k, v, route.folded)
    skip = 0
    if route.name == "chunked":  # needs no indices for tokens that select all blocks
        skip = min(max(config.n_select * config.select_block_size - first, 0), q.shape[2])
    scores = block_scores(q[:, :, skip:], k_blocks, config, first + skip)
    blocks = top_blocks(scores, config, first + skip)
    if route.name == "chunked":
        return attend_chunked(q, k, v, blocks, config, not switches.no_flash, route.folded)
    return SELECTED[route.name](q, k, v, blocks, config)


def _usual_routes(q: Tensor, k: Tensor, v: Tensor, config: NSAConfig, switches: Switches) -> Routes:
    shape = ModelConfig(
        dim=1, n_layers=1, n_heads=q.shape[1], n_kv_groups=k.shape[1], d_k=q.shape[3],
        d_v=v.shape[3], mlp_hidden=1, nsa=config,
    )  # fmt: skip
    return lambda q, first: routes_of(
        shape, q.shape[2], q.device, q.dtype, switches, first=first, batch=q.shape[0]
    )


def routes_of(
    config: ModelConfig, seq_len: int, device: torch.device, dtype: torch.dtype, switches: Switches,
    first: int = 0, batch: int = 1,
) -> dict[str, Route]:  # fmt: skip
    """Returns the route of each branch of a model on a device."""
    name = str(dtype).removeprefix("torch.")
    # torch.compile does not know the number of threads.
    threads = 0 if torch.compiler.is_compiling() else torch.get_num_threads()
    return effective(
        Case(config, seq_len, device.type, name, switches, FLASH_ATTN_INSTALLED, first, batch,
             threads)
    )  # fmt: skip


def gated_sum(gates: Tensor, cmp: Tensor, sel: Tensor, win: Tensor) -> Tensor:
    """Returns the gated sum (eq. 5) of branches `[B, H, S, Dv]`; `gates` is `[B, S, H, 3]`."""
    return _GatedSum.apply(gates, cmp, sel, win)


class _GatedSum(torch.autograd.Function):
    """Computes the gated sum in three passes, and saves no product for the backward.

    `forward` has one parameter per branch, because without gradients torch.compile cannot trace
    `*branches`.
    """

    @staticmethod
    def forward(gates: Tensor, cmp: Tensor, sel: Tensor, win: Tensor) -> Tensor:
        first, second, third = gates.transpose(1, 2).unsqueeze(-1).unbind(-2)
        return (first * cmp).addcmul_(second, sel).addcmul_(third, win)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        (grad,) = grads
        gates, *branches = ctx.saved_tensors
        weights = gates.transpose(1, 2).unsqueeze(-1).unbind(-2)
        grad_gates = torch.stack([(grad * b).sum(-1) for b in branches], -1).transpose(1, 2)
        return grad_gates.to(gates.dtype), *(
            (grad * w).to(b.dtype) for w, b in zip(weights, branches, strict=True)
        )
