"""The reference of the tests: an NSA layer in float64, one query and one head at a time.

The reference shares only `nsa.config` with the package and uses other methods. It gathers the
visible keys instead of masking hidden keys, and rotates with complex numbers. To score selection
blocks, it spreads the weight of each compressed block over the tokens of that block, and then adds
up the tokens of each selection block.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.config import ModelConfig


@dataclass(frozen=True)
class Reference:
    """The results of the reference. Keys of the dicts are (batch, group, query)."""

    out: Tensor
    """`[B, S, dim]`, float64, with its autograd graph."""
    selected: dict[tuple[int, int, int], list[int]]
    """The selected blocks, ascending: the given blocks, or else the reference's own choice."""
    scores: dict[tuple[int, int, int], list[float]]
    """p_sel of each selection block that begins at the query or before."""


def nsa_layer(
    params: Mapping[str, Tensor],
    x: Tensor,
    config: ModelConfig,
    selected: Tensor | None = None,
) -> Reference:
    """Returns the results of `NSAttention(config)` with `params` (by name) for `x` `[B, S, dim]`.

    `selected` `[B, G, S, n]` replaces the reference's own choice of blocks; indices past the
    block of the query are ignored. Gradients flow to `params` and `x` if these require gradients.
    """
    params = {name: p.double() for name, p in params.items()}
    rows, picks, scores = [], {}, {}
    for b in range(x.shape[0]):
        sequence = _Sequence(params, x[b].double(), config)
        for t in range(x.shape[1]):
            heads = []
            for g in range(config.n_kv_groups):
                scores[b, g, t] = sequence.block_scores(g, t)
                given = None if selected is None else selected[b, g, t].tolist()
                picks[b, g, t] = sequence.pick(scores[b, g, t], t, given)
                heads += sequence.attend(g, t, picks[b, g, t])
            rows.append(params["out.weight"] @ torch.cat(heads))
    return Reference(torch.stack(rows).view_as(x), picks, scores)


class _Sequence:
    """One sequence `[S, dim]`, and the projections of its tokens and blocks."""

    def __init__(self, params: Mapping[str, Tensor], x: Tensor, config: ModelConfig) -> None:
        self.params, self.x, self.config = params, x, config
        self.length = len(x)
        self.blocks: list[list[int]] = []
        start = 0
        while start + config.nsa.block_size <= self.length:
            self.blocks.append(list(range(start, start + config.nsa.block_size)))
            start += config.nsa.block_stride
        groups = range(config.n_kv_groups)
        self.k_slc = [self._keys("k_sel", g) for g in groups]
        self.v_slc = [self._values("v_sel", g) for g in groups]
        self.k_win = [self._keys("k_win", g) for g in groups]
        self.v_win = [self._values("v_win", g) for g in groups]
        self.k_cmp = [self._summaries("k", g) for g in groups]
        self.v_cmp = [self._summaries("v", g) for g in groups]

    def project(self, name: str, head: int, width: int, t: int) -> Tensor:
        return self.params[f"{name}.weight"][head * width : (head + 1) * width] @ self.x[t]

    def query(self, head: int, t: int) -> Tensor:
        q = self.project("q", head, self.config.d_k, t)
        return rotated(q, t, self.config.rope_base)

    def group_heads(self, g: int) -> range:
        per_group = self.config.n_heads // self.config.n_kv_groups
        return range(g * per_group, (g + 1) * per_group)

    def visible_summaries(self, t: int) -> list[int]:
        return [i for i, tokens in enumerate(self.blocks) if tokens[-1] <= t]

    def block_scores(self, g: int, t: int) -> list[float]:
        """Returns p_sel of query t for each selection block that begins at token t or before."""
        size = self.config.nsa.select_block_size
        scores = [0.0] * (t // size + 1)
        visible = self.visible_summaries(t)
        for head in self.group_heads(g):
            q = self.query(head, t)
            for i, p in zip(
                visible, probabilities(q, [self.k_cmp[g][i] for i in visible]), strict=True
            ):
                for token in self.blocks[i]:
                    scores[token // size] += p.item() / len(self.blocks[i])
        return scores

    def pick(self, scores: list[float], t: int, given: list[int] | None) -> list[int]:
        if given is not None:
            return sorted(j for j in given if j < len(scores))
        current = t // self.config.nsa.select_block_size
        always = {j for j in (0, current - 1, current) if j >= 0}
        others = sorted(set(range(current)) - always, key=lambda j: (-scores[j], j))
        return sorted([*always, *others[: self.config.nsa.n_select - len(always)]])

    def attend(self, g: int, t: int, picks: list[int]) -> list[Tensor]:
        """Returns the gated sum of each head of group g."""
        nsa = self.config.nsa
        visible = self.visible_summaries(t)
        chosen = [token for token in range(t + 1) if token // nsa.select_block_size in picks]
        recent = range(max(0, t - nsa.window + 1), t + 1)
        outputs = []
        for head in self.group_heads(g):
            q = self.query(head, t)
            gates = self._gates(head, t)
            branches = (
                (visible, self.k_cmp[g], self.v_cmp[g]),
                (chosen, self.k_slc[g], self.v_slc[g]),
                (recent, self.k_win[g], self.v_win[g]),
            )
            total = self.x.new_zeros(self.config.d_v)
            for gate, (seen, keys, values) in zip(gates, branches, strict=True):
                for i, p in zip(seen, probabilities(q, [keys[i] for i in seen]), strict=True):
                    total = total + gate * p * values[i]
            outputs.append(total)
        return outputs

    def _keys(self, name: str, g: int) -> list[Tensor]:
        base, width = self.config.rope_base, self.config.d_k
        return [rotated(self.project(name, g, width, t), t, base) for t in range(self.length)]

    def _values(self, name: str, g: int) -> list[Tensor]:
        return [self.project(name, g, self.config.d_v, t) for t in range(self.length)]

    def _summaries(self, kind: str, g: int) -> list[Tensor]:
        width = self.config.d_k if kind == "k" else self.config.d_v
        found = []
        for tokens in self.blocks:
            block = [self.project(f"{kind}_cmp", g, width, t) for t in tokens]
            summary = self._phi(f"phi_{kind}", block)
            if kind == "k":
                summary = rotated(summary, tokens[-1], self.config.rope_base)
            found.append(summary)
        return found

    def _phi(self, name: str, block: list[Tensor]) -> Tensor:
        if self.config.nsa.compress == "mean":
            return sum(block[1:], start=block[0]) / len(block)
        width = len(block[0])
        weight = self.params[f"{name}.hidden.weight"]
        hidden = self.x.new_zeros(width)
        for m, vector in enumerate(block):
            placed = vector + self.params[f"{name}.position"][m]
            hidden = hidden + weight[:, m * width : (m + 1) * width] @ placed
        return self.params[f"{name}.out.weight"] @ (hidden / (1 + torch.exp(-hidden)))

    def _gates(self, head: int, t: int) -> list[Tensor]:
        rows = slice(3 * head, 3 * head + 3)
        x = self.x[t]
        if self.config.nsa.gate_hidden:
            x = self.params["gate.hidden.weight"] @ x
            x = x / (1 + torch.exp(-x))
        z = self.params["gate.proj.weight"][rows] @ x + self.params["gate.proj.bias"][rows]
        if self.config.nsa.gate == "sigmoid":
            return [1 / (1 + torch.exp(-value)) for value in z]
        return [torch.exp(value) / torch.exp(z).sum() for value in z]


def probabilities(q: Tensor, keys: list[Tensor]) -> list[Tensor]:
    """Returns the softmax of the scaled products of `q` with `keys`; [] without keys."""
    if not keys:
        return []
    scores = torch.stack([q.dot(k) for k in keys]) / math.sqrt(len(q))
    powers = torch.exp(scores - scores.detach().max())
    return list(powers / powers.sum())


def rotated(vector: Tensor, position: int, base: float) -> Tensor:
    """Rotates a vector: entries i and i + D/2 are one complex number, rotated by its own angle."""
    half = len(vector) // 2
    angles = [position / base ** (2 * i / len(vector)) for i in range(half)]
    turn = torch.tensor([complex(math.cos(a), math.sin(a)) for a in angles], dtype=torch.complex128)
    turned = torch.complex(vector[:half], vector[half:]) * turn
    return torch.cat((turned.real, turned.imag))
