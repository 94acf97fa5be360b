"""The transformer: embedding, pre-norm blocks, norm, head."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nsa.attention import DenseAttention, NSAttention
from nsa.backends import Switches
from nsa.cache import Cache
from nsa.compress import BlockMLP, Draw, draw_normal
from nsa.config import ModelConfig
from nsa.stats import over_layers


class SwiGLU(nn.Module):
    """The gated MLP of arXiv 2002.05202."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., dim]` → `[..., dim]`."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer: first x = x + attention(norm(x)), then x = x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, switches: Switches | None = None) -> None:
        super().__init__()
        attention = NSAttention if config.attention == "nsa" else DenseAttention
        self.attn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attn = attention(config, switches)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = SwiGLU(config.dim, config.mlp_hidden)

    def forward(
        self, x: Tensor, cache: Cache | None = None, cu_seqlens: Sequence[int] | None = None
    ) -> Tensor:
        """`[B, S, dim]` → `[B, S, dim]`; `cache` and `cu_seqlens` as in `nsa_attention`."""
        x = x + self.attn(self.attn_norm(x), cache, cu_seqlens)
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """A decoder-only language model.

    The activations of the blocks in `recompute` are not stored; the backward computes them again.
    """

    def __init__(self, config: ModelConfig, switches: Switches | None = None) -> None:
        super().__init__()
        self.config = config
        self.recompute = range(0)
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config, switches) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, draw: Draw = draw_normal) -> None:
        """Initialises all parameters; `draw` fills a weight from a normal distribution of mean 0.

        The standard deviation is `init_std`. As in GPT-2, it is divided by sqrt(2 · n_layers) in
        `attn.out` and `mlp.down`, which add to the residual stream. Inside phi, it is
        1 / sqrt(fan-in). Norms start at 1; the gate's bias and phi's positions start at 0.
        """
        std = self.config.init_std
        residual_std = std / math.sqrt(2 * self.config.n_layers)
        for module in self.modules():
            match module:
                case nn.Linear() | nn.Embedding():
                    draw(module.weight, std)
                case nn.RMSNorm():
                    module.weight.fill_(1.0)
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()
        for module in self.modules():
            match module:
                case Block():
                    draw(module.attn.out.weight, residual_std)
                    draw(module.mlp.down.weight, residual_std)
                case BlockMLP():
                    module.reset_parameters(draw)

    @contextmanager
    def collect_stats(self) -> Iterator[None]:
        """Makes the NSA layers store statistics of forwards that begin at position 0.

        `read_stats` returns the statistics. Outside the context, no statistics are computed. The
        computation of statistics does not wait for the device.
        """
        layers = self._sparse_layers()
        for layer in layers:
            layer.collecting = True
        try:
            yield
        finally:
            for layer in layers:
                layer.collecting = False

    def read_stats(self) -> dict[str, Tensor]:
        """Returns the statistics of the last forward that `collect_stats` covered.

        The result is empty before such a forward, and for dense attention. `nsa.stats` explains the
        keys: `gate_entropy_mean`, `gate_entropy_min`, `gate_entropy_layers` `[L]`, `gate_max_gate`,
        `gate_collapse_frac`, `gate_branch_shares` `[3]`, and the keys of `selection_stats`. The
        values are on the device of the model, so reading a value waits for the device.
        """
        found = [layer.stats for layer in self._sparse_layers() if layer.stats]
        return over_layers(found) if found else {}

    def attention_layers(self) -> list[NSAttention | DenseAttention]:
        return [cast(Block, block).attn for block in self.blocks]

    def _sparse_layers(self) -> list[NSAttention]:
        return [module for module in self.modules() if isinstance(module, NSAttention)]

    def caches(self, capacity: int = 0) -> list[Cache]:
        """Returns an empty decoding cache for each layer; `capacity` is that of `Cache`."""
        return [layer.new_cache(capacity) for layer in self.attention_layers()]

    def fallbacks(self) -> Counter[str]:
        """Returns the number of fallbacks in all NSA layers by reason (`Route.fallback`)."""
        return sum((layer.fallbacks for layer in self._sparse_layers()), Counter())

    def forward(
        self, tokens: Tensor, caches: Sequence[Cache] = (), cu_seqlens: Sequence[int] | None = None
    ) -> Tensor:
        """int64 `[B, S]` → logits `[B, S, V]`. With `caches`, the tokens follow the cached tokens.

        `cu_seqlens` are the offsets of documents packed in each sequence, as in `nsa_attention`.
        Raises ValueError if the caches have different lengths, or an append to one failed.
        """
        if any(not 0 <= cache.length == caches[0].length for cache in caches):
            raise ValueError(
                "the caches have different or invalid lengths, because an earlier forward with "
                "them failed or was interrupted; make new caches."
            )
        x = self.embed(tokens)
        cached = caches or [None] * len(self.blocks)
        for number, (block, cache) in enumerate(zip(self.blocks, cached, strict=True)):
            # Pass the block as an argument, because a closure over the loop variable would
            # recompute the last block.
            if number in self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, cache, cu_seqlens, use_reentrant=False)
            else:
                x = block(x, cache, cu_seqlens)
        return self.head(self.norm(x))
