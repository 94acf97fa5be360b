"""The attention layers: Native Sparse Attention (arXiv 2502.11089) and its dense control."""

import functools
import warnings
from collections import Counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsa.attend import allowed_kernels, attend, attend_causal
from nsa.backends import BRANCHES, FLASH_ATTN_INSTALLED, Case, Route, Switches, effective
from nsa.cache import Cache, DenseCache
from nsa.chunked import attend_chunked
from nsa.compress import BlockMean, BlockMLP, attend_compressed, to_blocks
from nsa.config import ModelConfig, compressed_blocks
from nsa.decode import attend_token
from nsa.flash import attend_flash_attn
from nsa.gate import Gate
from nsa.precision import has_autocast, upcast_fp32
from nsa.profiler_ranges import mark
from nsa.rope import rotate
from nsa.select import attend_ranges, attend_selected, block_scores, top_blocks
from nsa.stats import gate_stats, selection_stats
from nsa.window import attend_window

GATED_TOKENS = 512
"""Tokens in a chunk of the gates' backward on the CPU."""
_WINDOW = {"causal": attend_window, "banded": attend_window, "flash-attn": attend_flash_attn}


def project(x: Tensor, *layers: nn.Linear) -> Tensor:
    """Applies several linear layers without bias to `x` as one product; concatenates the results.

    One large product is faster than several narrow products. It also sums the gradient of `x`
    inside the product instead of rounding the gradient after each layer.
    """
    return F.linear(x, torch.cat([layer.weight for layer in layers]))


def split_heads(x: Tensor, n_heads: int) -> Tensor:
    """`[B, S, H·D]` → `[B, H, S, D]`."""
    return x.unflatten(-1, (n_heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """`[B, H, S, D]` → `[B, S, H·D]`."""
    return x.transpose(1, 2).flatten(-2)


class NSAttention(nn.Module):
    """Three branches with separate keys and values, and their gated sum (eq. 5).

    Head h belongs to group h // (H/G). Keys are compressed before the rotary embedding: averaging
    or mixing rotated keys would cancel their fast components. A compressed key is then rotated to
    the position of its block's last token, the position from which it is visible: the distance of a
    query to it starts at 0, as for an ordinary key, and a cache can rotate it on arrival.

    `fallbacks` counts, by cause, the forwards that could not follow a switch; `nvtx` marks the
    branches as ranges for Nsight Systems.
    """

    nvtx = False

    def __init__(self, config: ModelConfig, switches: Switches | None = None) -> None:
        super().__init__()
        self.config = config
        self.switches = switches or Switches()
        self.collecting = False
        self.stats: dict[str, Tensor] = {}
        self.fallbacks: Counter[str] = Counter()
        keys, values = config.n_kv_groups * config.d_k, config.n_kv_groups * config.d_v
        self.q = nn.Linear(config.dim, config.n_heads * config.d_k, bias=False)
        self.k_cmp = nn.Linear(config.dim, keys, bias=False)
        self.v_cmp = nn.Linear(config.dim, values, bias=False)
        self.k_slc = nn.Linear(config.dim, keys, bias=False)
        self.v_slc = nn.Linear(config.dim, values, bias=False)
        self.k_win = nn.Linear(config.dim, keys, bias=False)
        self.v_win = nn.Linear(config.dim, values, bias=False)
        if config.nsa.compress == "mlp":
            self.phi_k = BlockMLP(config.nsa.block_size, config.d_k)
            self.phi_v = BlockMLP(config.nsa.block_size, config.d_v)
        else:
            self.phi_k = BlockMean()
            self.phi_v = BlockMean()
        fixed = self.switches.fixed_gate
        self.gate = Gate(config.dim, config.n_heads, config.nsa.gate, fixed)
        self.out = nn.Linear(config.n_heads * config.d_v, config.dim, bias=False)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """`[B, S, dim]` → `[B, S, dim]`. With a `cache`, the tokens follow those in it."""
        if cache is not None and cache.length:
            return torch.cat([self.step(token, cache) for token in x.split(1, dim=1)], dim=1)
        routes = self.routes(x)
        if routes["win"].name == "sequential":
            return self.sequential(x, cache or self.new_cache())
        q, *kv = self.project(x)
        k_cmp, v_cmp, k_slc, v_slc, k_win, v_win = kv
        k_blocks, v_blocks = self.summaries(k_cmp, v_cmp)
        gates, logits = self.gate(x)
        nsa = self.config.nsa
        cmp, sel, win = (routes[branch] for branch in BRANCHES)
        with mark("cmp", cmp.name, self.nvtx), self.kernels(cmp):
            out_cmp = attend_compressed(q, k_blocks, v_blocks, nsa.block_size, nsa.block_stride)
        with mark("sel", sel.name, self.nvtx), self.kernels(sel):
            out_slc = self.selected(q, k_slc, v_slc, k_blocks, sel.name)
        with mark("win", win.name, self.nvtx), self.kernels(win):
            out_win = _WINDOW[win.name](q, k_win, v_win, nsa.window)
        if self.collecting:
            self.collect(q, k_blocks, logits)
        if cache is not None:
            cache.append(kv)
            cache.append_blocks(k_blocks, v_blocks)
        return self.out(merge_heads(gated_sum(gates, out_cmp, out_slc, out_win).to(x.dtype)))

    def step(self, x: Tensor, cache: Cache) -> Tensor:
        """`forward` for the one token after those in the cache: `[B, 1, dim]` → `[B, 1, dim]`."""
        nsa, first = self.config.nsa, cache.length
        q, *kv = self.project(x, first)
        cache.append(kv)
        if compressed_blocks(nsa, first + 1) > compressed_blocks(nsa, first) or first == 0:
            # The first token sets the shape of the empty list of blocks.
            cache.append_blocks(*self.summaries(*cache.kv[:2], first=first))
        branches = attend_token(q, cache, self.switches)
        return self.out(merge_heads(gated_sum(self.gate(x)[0], *branches).to(x.dtype)))

    def sequential(self, x: Tensor, cache: Cache) -> Tensor:
        """`forward`, but the attention is computed for one token after the other.

        In float32 or wider: the gradient of a key is summed token by token.
        """
        nsa = self.config.nsa
        q, *kv = self.project(x)
        k_blocks, v_blocks = self.summaries(kv[0], kv[1])
        gates, logits = self.gate(x)
        if self.collecting:
            self.collect(q, k_blocks, logits)
        q, *kv = (upcast_fp32(y) for y in (q, *kv))
        steps = []
        for t in range(x.shape[1]):
            cache.hold((y[:, :, : t + 1] for y in kv), t + 1)
            n = compressed_blocks(nsa, t + 1)
            cache.blocks = [k_blocks[:, :, :n], v_blocks[:, :, :n]]
            steps.append(attend_token(q[:, :, t : t + 1], cache, self.switches))
        branches = (torch.cat(branch, dim=2) for branch in zip(*steps, strict=True))
        return self.out(merge_heads(gated_sum(gates, *branches).to(x.dtype)))

    def new_cache(self) -> Cache:
        return Cache(self.config.nsa)

    def routes(self, x: Tensor) -> dict[str, Route]:
        """Returns the route of each branch in `forward(x)`; counts the fallbacks."""
        dtype = x.dtype
        kind = x.device.type
        if has_autocast(kind) and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        routes = routes_of(self.config, x.shape[1], x.device, dtype, self.switches)
        if not torch.compiler.is_compiling():
            for branch, route in routes.items():
                if route.fallback:
                    self.fallbacks[route.fallback] += 1
                    _warn_once(f"branch {branch} uses the route {route.name}: {route.fallback}")
        return routes

    def kernels(self, route: Route):
        """Returns the context in which a branch calls SDPA."""
        return allowed_kernels(self.switches, refused=bool(route.fallback))

    def project(self, x: Tensor, first: int = 0) -> tuple[Tensor, ...]:
        """Returns the queries, and the keys and values of the three branches.

        The queries are `[B, H, S, Dk]`; the keys `[B, G, S, Dk]` and values `[B, G, S, Dv]` are
        those of the compressed, selected and window branch. All are rotated except the values and
        `k_cmp`. `first` is the position of the first token.
        """
        config, base = self.config, self.config.rope_base
        y = project(
            x, self.q, self.k_slc, self.k_win, self.k_cmp, self.v_slc, self.v_win, self.v_cmp
        )
        if x.device.type == "cpu":
            # CPU kernels are no faster in low precision, and each rounding costs accuracy.
            y = upcast_fp32(y)
        heads, groups = config.n_heads, config.n_kv_groups
        widths = [heads * config.d_k, *[groups * config.d_k] * 3, *[groups * config.d_v] * 3]
        counts = [heads, *[groups] * 6]
        parts = map(split_heads, y.split(widths, dim=-1), counts)
        q, k_slc, k_win, k_cmp, v_slc, v_win, v_cmp = parts
        q, k_slc, k_win = (rotate(part, base, first) for part in (q, k_slc, k_win))
        return q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win

    def summaries(self, k: Tensor, v: Tensor, first: int | None = None) -> tuple[Tensor, Tensor]:
        """Returns keys and values of the complete compressed blocks (eq. 7), `[B, G, N, D]`.

        They are in float32 or wider, and the keys are rotated. `first` is the position of the first
        block's last token.
        """
        size, stride = self.config.nsa.block_size, self.config.nsa.block_stride
        k_blocks = self.phi_k(to_blocks(k, size, stride))
        v_blocks = self.phi_v(to_blocks(v, size, stride))
        first = size - 1 if first is None else first
        return rotate(k_blocks, self.config.rope_base, first, stride), v_blocks

    def selected(self, q: Tensor, k: Tensor, v: Tensor, k_blocks: Tensor, route: str) -> Tensor:
        """The selected branch, `[B, H, S, Dv]`."""
        if route == "causal":
            return attend_causal(q, k, v)
        nsa = self.config.nsa
        blocks = top_blocks(block_scores(q, k_blocks, nsa), nsa)
        if route == "chunked":
            return attend_chunked(q, k, v, blocks, nsa, not self.switches.no_flash)
        attend_blocks = attend_ranges if route == "ranges" else attend_selected
        return attend_blocks(q, k, v, blocks, nsa)

    @torch.no_grad()
    def collect(self, q: Tensor, k_blocks: Tensor, logits: Tensor) -> None:
        """Stores the statistics of this forward in `stats`."""
        nsa = self.config.nsa
        p_slc = block_scores(q, k_blocks, nsa)
        found = selection_stats(p_slc, top_blocks(p_slc, nsa), nsa)
        self.stats = gate_stats(logits, nsa.gate) | found


def gated_sum(gates: Tensor, *branches: Tensor) -> Tensor:
    """Eq. 5: gates `[B, S, H, 3]` and three branches `[B, H, S, Dv]` → `[B, H, S, Dv]`."""
    return _GatedSum.apply(gates, *branches)


class _GatedSum(torch.autograd.Function):
    """The gated sum; its backward works in chunks of tokens that fit the processor's cache."""

    @staticmethod
    def forward(gates: Tensor, *branches: Tensor) -> Tensor:
        weights = gates.transpose(1, 2).unsqueeze(-1).unbind(-2)
        total = weights[0] * branches[0]
        for weight, branch in zip(weights[1:], branches[1:], strict=True):
            total = total.addcmul_(weight, branch)
        return total

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        (grad,) = grads
        gates, *branches = ctx.saved_tensors
        weights = gates.transpose(1, 2).unsqueeze(-1).unbind(-2)
        tokens = GATED_TOKENS if grad.device.type == "cpu" else grad.shape[2]
        chunks = grad.split(tokens, dim=2)
        grad_weights = [
            torch.cat([(g * b).sum(-1) for g, b in zip(chunks, cut, strict=True)], dim=2)
            for cut in (branch.split(tokens, dim=2) for branch in branches)
        ]
        grad_gates = torch.stack(grad_weights, dim=-1).transpose(1, 2).to(gates.dtype)
        return grad_gates, *((grad * w).to(b.dtype) for w, b in zip(weights, branches, strict=True))


class DenseAttention(nn.Module):
    """Causal attention to all keys, with the same heads and groups: the control."""

    nvtx = False

    def __init__(self, config: ModelConfig, switches: Switches | None = None) -> None:
        super().__init__()
        self.config = config
        self.switches = switches or Switches()
        self.q = nn.Linear(config.dim, config.n_heads * config.d_k, bias=False)
        self.k = nn.Linear(config.dim, config.n_kv_groups * config.d_k, bias=False)
        self.v = nn.Linear(config.dim, config.n_kv_groups * config.d_v, bias=False)
        self.out = nn.Linear(config.n_heads * config.d_v, config.dim, bias=False)

    def new_cache(self) -> DenseCache:
        return DenseCache()

    def forward(self, x: Tensor, cache: DenseCache | None = None) -> Tensor:
        """`[B, S, dim]` → `[B, S, dim]`. With a `cache`, the tokens follow those in it."""
        if cache is not None and cache.length and x.shape[1] > 1:
            return torch.cat([self(token, cache) for token in x.split(1, dim=1)], dim=1)
        config = self.config
        first = cache.length if cache is not None else 0
        heads, groups = config.n_heads, config.n_kv_groups
        turning, v = project(x, self.q, self.k, self.v).split(
            [(heads + groups) * config.d_k, groups * config.d_v], dim=-1
        )
        turned = rotate(split_heads(turning, heads + groups), config.rope_base, first)
        q, k = turned.split([heads, groups], dim=1)
        v = split_heads(v, groups)
        if cache is not None:
            k, v = cache.append(k, v)
        kernels = allowed_kernels(self.switches, refused=config.d_k != config.d_v)
        with mark("all", "causal", self.nvtx), kernels:
            out = attend(q, k, v, None) if first else attend_causal(q, k, v)
        return self.out(merge_heads(out))


@functools.cache
def _warn_once(sentence: str) -> None:
    warnings.warn(sentence, stacklevel=2)


def routes_of(
    config: ModelConfig, seq_len: int, device: torch.device, dtype: torch.dtype, switches: Switches
) -> dict[str, Route]:
    """Returns the route of each branch of a model on a device."""
    name = str(dtype).removeprefix("torch.")
    return effective(Case(config, seq_len, device.type, name, switches, FLASH_ATTN_INSTALLED))
