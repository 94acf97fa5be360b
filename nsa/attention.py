"""The attention layers: Native Sparse Attention (arXiv 2502.11089) and its dense control."""

import functools
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from nsa.attend import allowed_kernels, attend_last
from nsa.backends import Route, Switches
from nsa.cache import Cache
from nsa.compress import make_phi
from nsa.config import ModelConfig
from nsa.documents import each_document, lengths_of
from nsa.functional import Execution, nsa_attention, routes_of
from nsa.gate import Gate, fixed_gates
from nsa.precision import has_autocast, upcast_fp32
from nsa.profiler_ranges import mark
from nsa.projection import Projection
from nsa.rope import rotate
from nsa.select import block_scores, top_blocks
from nsa.stats import gate_stats, selection_stats


def split_heads(x: Tensor, n_heads: int) -> Tensor:
    """`[B, S, H·D]` → `[B, H, S, D]`."""
    return x.unflatten(-1, (n_heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """`[B, H, S, D]` → `[B, S, H·D]`."""
    return x.transpose(1, 2).flatten(-2)


class NSAttention(nn.Module):
    """A layer of `nsa_attention`, with projections of the input and of the output.

    `fallbacks` counts by reason the calls that chose a route with a fallback (`Route.fallback`),
    except calls that torch.compile traces. `nvtx` marks the branches as ranges for Nsight Systems.
    """

    nvtx = False

    def __init__(self, config: ModelConfig, switches: Switches | None = None) -> None:
        super().__init__()
        self.config = config = replace(config, attention="nsa")
        self.switches = switches or Switches()
        self.collecting = False
        self.stats: dict[str, Tensor] = {}
        self.fallbacks: Counter[str] = Counter()
        keys, values = config.n_kv_groups * config.d_k, config.n_kv_groups * config.d_v
        widths = {"q": config.n_heads * config.d_k, "k_cmp": keys, "k_sel": keys, "k_win": keys}
        widths |= {"v_cmp": values, "v_sel": values, "v_win": values}
        self.qkv = Projection(config.dim, widths)
        self.phi_k, self.phi_v = (make_phi(config.nsa, d) for d in (config.d_k, config.d_v))
        self.gate = Gate(config.dim, config.n_heads, config.nsa.gate, config.nsa.gate_hidden)
        self.out = nn.Linear(config.n_heads * config.d_v, config.dim, bias=False)

    def forward(
        self, x: Tensor, cache: Cache | None = None, cu_seqlens: Sequence[int] | None = None
    ) -> Tensor:
        """`[B, S, dim]` → `[B, S, dim]`. With a `cache`, the tokens follow the cached tokens.

        `cu_seqlens` has the same meaning as in `nsa_attention`.
        """
        q, k, v = self.project(x)
        gates, logits = self.gate(x)
        observe = functools.partial(self.collect, logits) if self.collecting else None
        out = nsa_attention(
            q, k, v, gates, self.config.nsa,
            phi=(self.phi_k, self.phi_v), rope_base=self.config.rope_base,
            first=0 if cache is None else cache.length, cu_seqlens=cu_seqlens, cache=cache,
            how=Execution(self.switches, self.routes, observe, self.nvtx),
        )  # fmt: skip
        return self.out(merge_heads(out.to(x.dtype)))

    def new_cache(self, capacity: int = 0) -> Cache:
        return Cache(self.config.nsa, capacity)

    def routes(self, x: Tensor, first: int = 0) -> Mapping[str, Route]:
        """Returns the route of each branch for the tokens `[B, …, S, D]`.

        `first` is the position of the first token. The call counts the fallbacks, and warns once
        of each. While torch.compile traces, it does neither.
        """
        dtype = x.dtype
        kind = x.device.type
        if has_autocast(kind) and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        routes = routes_of(
            self.config, x.shape[-2], x.device, dtype, self.switches, first, x.shape[0]
        )
        if not torch.compiler.is_compiling():
            for branch, route in routes.items():
                if route.fallback:
                    self.fallbacks[route.fallback] += 1
                    _warn_once(f"branch {branch} uses the route {route.name}: {route.fallback}")
        return routes

    def project(self, x: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Returns three values: the queries, the keys and the values, none of them rotated.

        The queries are `[B, H, S, Dk]`. The keys are three tensors `[B, G, S, Dk]`, and the values
        three tensors `[B, G, S, Dv]`: for the compressed, the selected and the window branch.
        """
        y = self.qkv(x)
        if x.device.type == "cpu":
            # On a CPU, the attention has at least float32, because each rounding costs accuracy.
            y = upcast_fp32(y)
        q, *kv = self.qkv.split(y)
        kv = [split_heads(part, self.config.n_kv_groups) for part in kv]
        return split_heads(q, self.config.n_heads), kv[:3], kv[3:]

    @torch.no_grad()
    def collect(self, logits: Tensor, q: Tensor, k_blocks: Tensor) -> None:
        """Computes `stats` from gate logits, queries and compressed keys of a forward."""
        nsa, fixed = self.config.nsa, self.switches.fixed_gate
        if fixed:  # for both kinds of gate, these logits give the fixed weights as branch shares
            logits = fixed_gates(logits, fixed).log().clamp_min(-1e4)
        p_sel = block_scores(q, k_blocks, nsa)
        found = selection_stats(p_sel, top_blocks(p_sel, nsa), nsa)
        self.stats = gate_stats(logits, nsa.gate) | found


class DenseAttention(nn.Module):
    """The control for comparisons: dense causal attention with the same heads and groups."""

    nvtx = False

    def __init__(self, config: ModelConfig, switches: Switches | None = None) -> None:
        super().__init__()
        self.config = config = replace(config, attention="dense")
        self.switches = switches or Switches()
        groups = config.n_kv_groups
        self.qkv = Projection(
            config.dim,
            {"q": config.n_heads * config.d_k, "k": groups * config.d_k, "v": groups * config.d_v},
        )
        self.out = nn.Linear(config.n_heads * config.d_v, config.dim, bias=False)

    def new_cache(self, capacity: int = 0) -> Cache:
        return Cache(None, capacity)

    def forward(
        self, x: Tensor, cache: Cache | None = None, cu_seqlens: Sequence[int] | None = None
    ) -> Tensor:
        """`[B, S, dim]` → `[B, S, dim]`. With a `cache`, the tokens follow the cached tokens.

        `cu_seqlens` has the same meaning as in `nsa_attention`. Raises ValueError for an input
        without a batch.
        """
        if x.dim() != 3:
            raise ValueError(f"the input must be [B, S, dim]; got the shape {list(x.shape)}.")
        config = self.config
        heads, groups = config.n_heads, config.n_kv_groups
        q, k, v = self.qkv.split(self.qkv(x))
        parts = split_heads(q, heads), split_heads(k, groups), split_heads(v, groups)
        attend = functools.partial(self.attend, cache=cache)
        with mark("all", "causal", self.nvtx):
            if cu_seqlens is None:
                out = attend(*parts)
            else:
                out = each_document(attend, parts, lengths_of(cu_seqlens, x.shape[1]), cache)
        return self.out(merge_heads(out))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cache: Cache | None) -> Tensor:
        """Returns the attention to the cached and the new tokens, `[B, H, S, Dv]`."""
        config, first = self.config, 0 if cache is None else cache.length
        q, k = (rotate(part, config.rope_base, first) for part in (q, k))
        if cache is not None:
            cache.check_config(None)
            k, v = cache.append((k, v))
        route = routes_of(
            config, q.shape[2], q.device, q.dtype, self.switches, first, q.shape[0]
        )["all"]  # fmt: skip
        with allowed_kernels(self.switches, route.no_flash):
            return attend_last(q, k, v, route.folded)


@functools.cache
def _warn_once(sentence: str) -> None:
    warnings.warn(sentence, stacklevel=2)
