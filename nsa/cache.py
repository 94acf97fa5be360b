"""The cache of a layer for the tokens that it has seen: the next one costs one query."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from nsa.config import NSAConfig


class Cache:
    """One layer's keys and values of the tokens before the next, `[B, G, T, D]` each."""

    def __init__(self, config: NSAConfig) -> None:
        self.config = config
        self.length = 0
        self.kv: list[Tensor] = []
        """In the order of `NSAttention.project`: rotated where attention wants them rotated, raw
        for the compressed block that is not complete; without what no later token can use."""
        self.blocks: list[Tensor] = []
        """Keys and values of the compressed blocks that are complete."""

    def hold(self, kv: Iterable[Tensor], length: int) -> None:
        """Take the keys and values of all `length` tokens in the place of those held."""
        nsa = self.config
        keep = (nsa.block_size, nsa.block_size, length, length, nsa.window, nsa.window)
        self.kv = [x[:, :, -rows:] for x, rows in zip(kv, keep, strict=True)]
        self.length = length

    def append(self, kv: Sequence[Tensor]) -> None:
        """Take the keys and values of the next tokens."""
        self.hold(joined(self.kv, kv), self.length + kv[0].shape[2])

    def append_blocks(self, *kv: Tensor) -> None:
        """Take the compressed blocks that the last tokens completed."""
        self.blocks = joined(self.blocks, kv)


class DenseCache:
    """The same for a layer of dense attention."""

    def __init__(self) -> None:
        self.length = 0
        self.kv: list[Tensor] = []

    def append(self, *kv: Tensor) -> list[Tensor]:
        """Take the tokens' rotated keys and values. Returns those of all tokens."""
        self.kv = joined(self.kv, kv)
        self.length += kv[0].shape[2]
        return self.kv


def joined(held: list[Tensor], more: Iterable[Tensor]) -> list[Tensor]:
    """What is held with what comes behind it; nothing is held at first."""
    if not held:
        return list(more)
    return [torch.cat(pair, dim=2) for pair in zip(held, more, strict=True)]
