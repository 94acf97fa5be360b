"""The attention layers: Native Sparse Attention (arXiv 2502.11089) and its dense control."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsa.attend import attend_causal
from nsa.compress import BlockMean, BlockMLP, attend_compressed, to_blocks
from nsa.config import ModelConfig
from nsa.gate import Gate
from nsa.rope import rotate
from nsa.select import attend_selected, importance, top_blocks
from nsa.stats import gate_stats, selection_stats
from nsa.window import attend_window


def project(x: Tensor, *layers: nn.Linear) -> list[Tensor]:
    """Apply several linear layers without bias to `x` as one product.

    One large product is faster than many narrow ones, and the gradient of `x` is summed inside it
    instead of being rounded after each layer.
    """
    weight = torch.cat([layer.weight for layer in layers])
    return list(F.linear(x, weight).split([layer.out_features for layer in layers], dim=-1))


def split_heads(x: Tensor, n_heads: int) -> Tensor:
    """`[B, S, H·D]` → `[B, H, S, D]`."""
    return x.unflatten(-1, (n_heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """`[B, H, S, D]` → `[B, S, H·D]`."""
    return x.transpose(1, 2).flatten(-2)


class NSAttention(nn.Module):
    """Three branches over their own keys and values, and their gated sum (eq. 5).

    Head h belongs to group h // (H/G). Keys are compressed before they are rotated: averaging or
    mixing rotated keys would cancel their fast components. A compressed key is then rotated to the
    position of its block's last token, the position at which it becomes visible: a query's distance
    to it starts at 0, like its distance to an ordinary key, and a cache can rotate it on arrival.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.collecting = False
        self.stats: dict[str, Tensor] = {}
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
        self.gate = Gate(config.dim, config.n_heads, config.nsa.gate)
        self.out = nn.Linear(config.n_heads * config.d_v, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, S, dim]` → `[B, S, dim]`."""
        nsa = self.config.nsa
        q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win = self.project(x)
        out_cmp, p_slc = self.compressed(q, k_cmp, v_cmp)
        blocks = top_blocks(p_slc, nsa)
        out_slc = attend_selected(q, k_slc, v_slc, blocks, nsa)
        out_win = attend_window(q, k_win, v_win, nsa.window)
        gates, logits = self.gate(x)
        if self.collecting:
            self.stats = gate_stats(logits, nsa.gate) | selection_stats(p_slc, blocks, nsa)
        return self.out(merge_heads(gated_sum(gates, out_cmp, out_slc, out_win).to(q.dtype)))

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries `[B, G, H/G, S, Dk]`, then keys `[B, G, S, Dk]` and values `[B, G, S, Dv]` of the
        compressed, selected and window branch; all rotated but the values and `k_cmp`."""
        config, base = self.config, self.config.rope_base
        q, *kv = project(
            x, self.q, self.k_cmp, self.v_cmp, self.k_slc, self.v_slc, self.k_win, self.v_win
        )
        q = rotate(split_heads(q, config.n_heads), base).unflatten(1, (config.n_kv_groups, -1))
        k_cmp, v_cmp, k_slc, v_slc, k_win, v_win = (split_heads(y, config.n_kv_groups) for y in kv)
        return q, k_cmp, v_cmp, rotate(k_slc, base), v_slc, rotate(k_win, base), v_win

    def compressed(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The compressed branch `[B, G, H/G, S, Dv]`, and p_slc `[B, G, S, blocks]`, from what
        `project` gives."""
        nsa = self.config.nsa
        size, stride = nsa.block_size, nsa.block_stride
        k = self.phi_k(to_blocks(k, size, stride))
        v = self.phi_v(to_blocks(v, size, stride))
        k = rotate(k, self.config.rope_base, first=size - 1, step=stride)
        out, p_cmp = attend_compressed(q, k, v, size, stride)
        return out, importance(p_cmp, nsa)

    def selected_blocks(self, x: Tensor) -> Tensor:
        """The blocks that `forward(x)` selects, `[B, G, S, n]` as from `top_blocks`."""
        q, k_cmp, v_cmp, *_ = self.project(x)
        return top_blocks(self.compressed(q, k_cmp, v_cmp)[1], self.config.nsa)


def gated_sum(gates: Tensor, *branches: Tensor) -> Tensor:
    """Eq. 5: gates `[B, S, H, 3]`, branches `[B, G, H/G, S, Dv]` each → `[B, H, S, Dv]`."""
    weights = gates.transpose(1, 2).unsqueeze(-1).unbind(-2)
    cmp, slc, win = (
        weight * branch.flatten(1, 2) for weight, branch in zip(weights, branches, strict=True)
    )
    return cmp + slc + win


class DenseAttention(nn.Module):
    """Causal attention to all keys, with the same heads and groups: the control."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.q = nn.Linear(config.dim, config.n_heads * config.d_k, bias=False)
        self.k = nn.Linear(config.dim, config.n_kv_groups * config.d_k, bias=False)
        self.v = nn.Linear(config.dim, config.n_kv_groups * config.d_v, bias=False)
        self.out = nn.Linear(config.n_heads * config.d_v, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, S, dim]` → `[B, S, dim]`."""
        config = self.config
        q, k, v = project(x, self.q, self.k, self.v)
        q = rotate(split_heads(q, config.n_heads), config.rope_base)
        k = rotate(split_heads(k, config.n_kv_groups), config.rope_base)
        v = split_heads(v, config.n_kv_groups)
        q = q.unflatten(1, (config.n_kv_groups, -1)).flatten(0, 1)
        out = attend_causal(q, k.flatten(0, 1), v.flatten(0, 1))
        return self.out(merge_heads(out.unflatten(0, (len(x), -1)).flatten(1, 2)))
