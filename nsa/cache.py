"""The decoding cache of a layer: stored keys and values, so that a new token costs one query."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from nsa.config import NSAConfig


class Cache:
    """The cached keys and values of one layer, `[B, G, T, D]` each."""

    def __init__(self, config: NSAConfig) -> None:
        self.config = config
        self.length = 0
        self.kv: list[Tensor] = []
        """In the order of `NSAttention.project`: raw for the incomplete compressed block, rotated
        for the other branches; rows that no later token can use are dropped."""
        self.blocks: list[Tensor] = []
        """Keys and values of the complete compressed blocks."""

    def hold(self, kv: Iterable[Tensor], length: int) -> None:
        """Replaces the cached keys and values with those of all `length` tokens."""
        nsa = self.config
        keep = (nsa.block_size, nsa.block_size, length, length, nsa.window, nsa.window)
        self.kv = [x[:, :, -rows:] for x, rows in zip(kv, keep, strict=True)]
        self.length = length

    def append(self, kv: Sequence[Tensor]) -> None:
        """Appends the keys and values of the next tokens."""
        self.hold(joined(self.kv, kv), self.length + kv[0].shape[2])

    def append_blocks(self, *kv: Tensor) -> None:
        """Appends the compressed blocks that the last tokens completed."""
        self.blocks = joined(self.blocks, kv)


class DenseCache:
    """The decoding cache of a layer with dense attention."""

    def __init__(self) -> None:
        self.length = 0
        self.kv: list[Tensor] = []

    def append(self, *kv: Tensor) -> list[Tensor]:
        """Appends the rotated keys and values of new tokens. Returns those of all tokens."""
        self.kv = joined(self.kv, kv)
        self.length += kv[0].shape[2]
        return self.kv


def joined(cached: list[Tensor], more: Iterable[Tensor]) -> list[Tensor]:
    """Returns each cached tensor followed by its new rows; an empty cache has no tensors yet."""
    if not cached:
        return list(more)
    return [torch.cat(pair, dim=2) for pair in zip(cached, more, strict=True)]
