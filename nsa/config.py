"""Model configuration, and the numbers of parameters and FLOPs that follow from it.

This module uses only the standard library, so that the console can import it without torch.
"""

import math
from dataclasses import dataclass
from typing import Literal

INITIAL_BLOCKS = 1
LOCAL_BLOCKS = 2
FORCED_BLOCKS = INITIAL_BLOCKS + LOCAL_BLOCKS
N_BRANCHES = 3


@dataclass(frozen=True, kw_only=True)
class NSAConfig:
    """The settings of Native Sparse Attention (arXiv 2502.11089).

    Lengths are in tokens; their defaults are those of the paper.
    """

    block_size: int = 32
    """l: tokens per compressed block."""
    block_stride: int = 16
    """d: tokens between the starts of neighbouring compressed blocks."""
    select_block_size: int = 64
    """l': tokens per selection block."""
    n_select: int = 16
    """n: most blocks that a query selects, including the first and two local blocks."""
    window: int = 512
    """w: most tokens that a query sees in the window branch, including the query."""
    compress: Literal["mlp", "mean"] = "mlp"
    """phi: "mlp" (learnable, with intra-block position) or "mean"."""
    gate: Literal["sigmoid", "softmax"] = "sigmoid"
    """Branch weights: "sigmoid" of each branch (the paper), or "softmax" over all branches."""
    gate_hidden: int = 0
    """Hidden width of the attention gate, an MLP in the paper; 0: the gate is linear."""

    def __post_init__(self) -> None:
        least = min(self.block_size, self.block_stride, self.select_block_size, self.window)
        if least < 1 or self.compress not in ("mlp", "mean"):
            raise ValueError(
                f"all lengths must be at least 1, and compress 'mlp' or 'mean'; got {self}."
            )
        if self.gate not in ("sigmoid", "softmax") or self.gate_hidden < 0:
            raise ValueError(
                "gate must be 'sigmoid' or 'softmax', and gate_hidden at least 0; got "
                f"{self.gate!r:.40} and {self.gate_hidden}."
            )
        if self.block_stride > self.block_size:
            raise ValueError(
                f"block_stride must not exceed block_size ({self.block_size}), or tokens fall "
                f"between the compressed blocks; got {self.block_stride}, lower it."
            )
        if self.n_select < FORCED_BLOCKS:
            raise ValueError(
                f"n_select must be at least {FORCED_BLOCKS}, because it includes the first and two "
                f"local blocks, which are always selected; got {self.n_select}, raise it."
            )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer. Its fields are the keys of the YAML section `model:`."""

    dim: int
    """Width of the residual stream."""
    n_layers: int
    n_heads: int
    """H: query heads."""
    n_kv_groups: int
    """G: key/value heads; H/G query heads share one key/value head."""
    d_k: int
    """Width of one query or key head. It must be even, because rotary embedding turns pairs."""
    d_v: int
    """Width of one value head."""
    mlp_hidden: int
    """Hidden width of the SwiGLU MLP."""
    vocab_size: int = 256
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    init_std: float = 0.02
    """Standard deviation of most initial weights; see `Transformer.reset_parameters`."""
    attention: Literal["nsa", "dense"] = "nsa"
    """Either "nsa", or "dense" (causal, same heads and groups) as the control."""
    nsa: NSAConfig = NSAConfig()

    def __post_init__(self) -> None:
        sizes = self.dim, self.n_layers, self.n_heads, self.n_kv_groups, self.d_k, self.d_v
        if min(*sizes, self.mlp_hidden, self.vocab_size) < 1:
            raise ValueError(f"all sizes of a model must be at least 1; got {self}.")
        if not all(0 < x < math.inf for x in (self.rope_base, self.norm_eps, self.init_std)):
            raise ValueError(
                "rope_base, norm_eps and init_std must be positive and finite; got "
                f"{self.rope_base}, {self.norm_eps} and {self.init_std}."
            )
        if self.attention not in ("nsa", "dense"):
            raise ValueError(f"attention must be 'nsa' or 'dense'; got {self.attention!r:.40}.")
        if self.n_heads % self.n_kv_groups:
            raise ValueError(
                f"n_heads ({self.n_heads}) must be a multiple of n_kv_groups "
                f"({self.n_kv_groups}), since each group has the same number of heads; "
                "change one of them."
            )
        if self.d_k % 2:
            raise ValueError(
                f"d_k must be even, since rotary embedding turns pairs; got {self.d_k}, "
                f"use {self.d_k + 1}."
            )


def compressed_blocks(config: NSAConfig, seq_len: int) -> int:
    """Returns the number of complete compressed blocks in `seq_len` tokens."""
    if seq_len < config.block_size:
        return 0
    return (seq_len - config.block_size) // config.block_stride + 1


def selection_blocks(config: NSAConfig, seq_len: int) -> int:
    """Returns the number of selection blocks of `seq_len` tokens; the last may be partial."""
    return -(-seq_len // config.select_block_size)


def parameter_count(config: ModelConfig) -> int:
    """Returns the exact number of trainable parameters of `nsa.model.Transformer(config)`."""
    per_layer = _layer_matmul_weights(config) + 2 * config.dim
    if config.attention == "nsa":
        per_layer += N_BRANCHES * config.n_heads  # biases of the attention gate
        if config.nsa.compress == "mlp":  # positions of phi
            per_layer += config.nsa.block_size * (config.d_k + config.d_v)
        per_layer += _phi_weights(config)
    embedding_and_head = 2 * config.vocab_size * config.dim
    return embedding_and_head + config.n_layers * per_layer + config.dim


def flops_per_token(config: ModelConfig, seq_len: int, causal: bool) -> float:
    """Returns the training FLOPs (forward and backward) per token of a sequence.

    A multiply-add is 2 operations; the backward pass has twice the operations of the forward pass.
    Embedding look-up, norms, rotary embedding, softmax, the optimizer and recomputation are not
    counted. The result is the sum of these terms:

        6 · weights that multiply each token, with the output head
        6 · phi's weights · G · compressed blocks / seq_len, per layer          (NSA, phi = mlp)
        6 · (d_k + d_v) · keys, per layer and head                              (attention)
        2 · d_k · compressed keys, per layer and head                           (NSA, causal=True)

    With causal=False, `keys` is `seq_len` for any kind of attention: the usual figure (PaLM, App.
    B). With causal=True, `keys` is the exact mean over the queries of the keys that a query sees in
    all branches; `compressed keys` is this mean for the compressed branch alone. The last term is
    the score pass of the selection, which has no backward.
    """
    weights = config.n_layers * _layer_matmul_weights(config) + config.vocab_size * config.dim
    total = 6.0 * weights
    per_pair = 6 * (config.d_k + config.d_v)
    pairs = seq_len * (seq_len + 1) // 2 if causal else seq_len * seq_len
    score = 0
    if config.attention == "nsa":
        phi_uses = config.n_kv_groups * compressed_blocks(config.nsa, seq_len)
        total += 6.0 * config.n_layers * _phi_weights(config) * phi_uses / seq_len
        if causal:
            branches = attended_pairs(config.nsa, seq_len)
            pairs = sum(branches.values())
            score = 2 * config.d_k * branches["cmp"]
    return total + config.n_layers * config.n_heads * (per_pair * pairs + score) / seq_len


def attended_pairs(config: NSAConfig, seq_len: int) -> dict[str, int]:
    """Returns the exact number of (query, key) pairs per head and sequence, for each branch.

    The sum over the branches is N_t of eq. 6, summed over the tokens t. The keys of the result are
    `cmp`, `sel` and `win`.
    """
    n_cmp = compressed_blocks(config, seq_len)
    first_end = config.block_size - 1
    cmp_pairs = n_cmp * (seq_len - first_end) - config.block_stride * n_cmp * (n_cmp - 1) // 2
    sel_pairs = 0
    for block in range(selection_blocks(config, seq_len)):
        rows = min(config.select_block_size, seq_len - block * config.select_block_size)
        whole = min(config.n_select, block + 1) - 1
        sel_pairs += rows * whole * config.select_block_size + rows * (rows + 1) // 2
    short = min(config.window, seq_len)
    win_pairs = short * (short + 1) // 2 + (seq_len - short) * config.window
    return {"cmp": cmp_pairs, "sel": sel_pairs, "win": win_pairs}


def _layer_matmul_weights(config: ModelConfig) -> int:
    """Returns the number of weights of one layer that multiply every token."""
    branches = N_BRANCHES if config.attention == "nsa" else 1
    query_and_output = config.dim * config.n_heads * (config.d_k + config.d_v)
    keys_and_values = config.dim * branches * config.n_kv_groups * (config.d_k + config.d_v)
    gate, hidden = 0, config.nsa.gate_hidden
    if config.attention == "nsa":
        gate = config.dim * hidden + (hidden or config.dim) * N_BRANCHES * config.n_heads
    mlp = 3 * config.dim * config.mlp_hidden
    return query_and_output + keys_and_values + gate + mlp


def _phi_weights(config: ModelConfig) -> int:
    """Returns the number of weights in a layer's two MLPs phi, without positions."""
    if config.nsa.compress == "mean":
        return 0
    return (config.nsa.block_size + 1) * (config.d_k**2 + config.d_v**2)
