"""The transformer: embedding, pre-norm blocks, norm, head."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsa.attention import DenseAttention, NSAttention
from nsa.compress import BlockMLP
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
    """One layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attn = NSAttention(config) if config.attention == "nsa" else DenseAttention(config)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = SwiGLU(config.dim, config.mlp_hidden)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, S, dim]` → `[B, S, dim]`."""
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """A decoder-only language model on tokens."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise all weights from a normal distribution of mean 0.

        Standard deviation `init_std`; divided by sqrt(2 · n_layers) where a layer writes to the
        residual stream (GPT-2), so that the stream's variance does not grow with depth;
        1 / sqrt(fan-in) inside phi, whose input is a whole block. Norms start at 1, the gate's bias
        and phi's positions at 0.
        """
        std = self.config.init_std
        residual_std = std / math.sqrt(2 * self.config.n_layers)
        for module in self.modules():
            match module:
                case nn.Linear() | nn.Embedding():
                    module.weight.normal_(std=std)
                case nn.RMSNorm():
                    module.weight.fill_(1.0)
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()
        for module in self.modules():
            match module:
                case Block():
                    module.attn.out.weight.normal_(std=residual_std)
                    module.mlp.down.weight.normal_(std=residual_std)
                case BlockMLP():
                    module.reset_parameters()

    @contextmanager
    def collect_stats(self) -> Iterator[None]:
        """Make forwards inside the context leave statistics for `read_stats`; the last one counts.

        Outside it nothing is computed or kept. Inside it nothing waits for the device.
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
        """Statistics of the last forward inside `collect_stats`, as tensors on its device.

        Names as in `nsa.stats`: `gate_entropy_mean`, `gate_entropy_min`, `gate_entropy_layers`
        `[L]` (nats), `gate_max_gate`, `gate_collapse_frac`, `gate_branch_shares` `[3]` (cmp, slc,
        win), and `sel_*`, of which those that the sequence is too short for are left out. Reading
        their values is what waits for the device. Empty before such a forward, and for dense
        attention.
        """
        found = [layer.stats for layer in self._sparse_layers() if layer.stats]
        return over_layers(found) if found else {}

    def _sparse_layers(self) -> list[NSAttention]:
        return [module for module in self.modules() if isinstance(module, NSAttention)]

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 `[B, S]` → logits `[B, S, V]`."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
