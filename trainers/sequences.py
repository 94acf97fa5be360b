"""Sources of training sequences: their interface, random bytes, and bytes with a repeated span."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainers.failures import DataError
from trainers.schema import DataSettings

RankRows = tuple[Tensor, Tensor | None]
State = dict[str, Any]
"""The position in a source, as JSON data of bounded size, with `fingerprint` and `position`.

For documents it also has `lanes`, `waits` (see `Stream`), and `epoch`, the number of complete
passes over all documents."""


class Source:
    """An endless stream of sequences of S + 1 tokens; sequence i belongs to rank i % world."""

    about: str
    """The description of the source, for error messages and env.json."""
    fingerprint: str
    """The conditions under which a position is valid, as `key=value` words."""
    scored: int
    """Number of predicted tokens per sequence whose loss is used."""
    position = 0
    """Sequences read so far, over all ranks."""
    end_token: int | None = None
    """The token after each document if attention must not cross documents, else None."""
    notes: Sequence[str] = ()
    """Sentences for the operator about the selected data."""

    def read(self, count: int, rank: int, world: int) -> RankRows:
        """Returns this rank's part of the next `count` sequences.

        The tokens are uint8 or uint16 `[B, S + 1]`. If not all predictions are scored, a bool mask
        `[B, S]` is returned too. Raises DataError.
        """
        raise NotImplementedError

    def state(self) -> State:
        """Returns the position after the last `read`, the same on every rank of any world size."""
        return {"fingerprint": self.fingerprint, "position": self.position}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a position of this stream. Raises DataError if the position is invalid."""
        try:
            self.seek(state)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DataError(
                "the data position in the checkpoint is invalid "
                f"({type(error).__name__}: {error}); resume from another checkpoint"
            ) from error

    def seek(self, state: Mapping[str, Any]) -> None:
        """Moves to a position in this stream. Raises KeyError, TypeError or ValueError."""
        self.position = int(state["position"])


def stack(sequences: Sequence[bytes | bytearray], length: int, kind: torch.dtype) -> Tensor:
    """Joins sequences into one tensor `[B, length]` of `kind`; each sequence is a row."""
    if not sequences:
        return torch.empty(0, length, dtype=kind)
    flat = torch.frombuffer(bytearray().join(sequences), dtype=kind)
    return flat.view(len(sequences), length)


class Synthetic(Source):
    """Uniform random bytes, from which nothing can be learned; the loss approaches ln 256.

    A sequence depends only on seed, index and length, so a position is one number. The held-out
    part has another seed.
    """

    name = "synthetic"

    def __init__(self, data: DataSettings, seed: int, held_out: bool = False):
        self.seq_len = self.scored = data.seq_len
        self._seed = f"{'held-out/' if held_out else ''}{seed}"
        self.about = "synthetic random bytes"
        self.fingerprint = f"source={self.name} seed={self._seed} seq_len={data.seq_len}"

    def read(self, count: int, rank: int, world: int) -> RankRows:
        first = self.position
        mine = range(first + (rank - first) % world, first + count, world)
        mask = torch.zeros(len(mine), self.seq_len, dtype=torch.bool)
        sequences = []
        for index, scored in zip(mine, mask, strict=True):
            generator = random.Random(f"{self._seed}/{index}")
            sequences.append(bytearray(generator.randbytes(self.seq_len + 1)))
            self.repeat(sequences[-1], generator, scored)
        self.position += count
        tokens = stack(sequences, self.seq_len + 1, torch.uint8)
        return tokens, None if self.scored == self.seq_len else mask

    def repeat(self, sequence: bytearray, generator: random.Random, scored: Tensor) -> None:
        """Repeats a span and marks its predictions in `scored` (bool `[S]`); here, does nothing."""


class Recall(Synthetic):
    """Random bytes in which a random span is repeated `recall_distance` bytes later.

    Only the repeated span is scored, without its first byte, which cannot be predicted. With NSA
    the distance exceeds the window, so only attention that reaches further can predict the span.
    """

    name = "recall"

    def __init__(self, data: DataSettings, seed: int, held_out: bool = False):
        super().__init__(data, seed, held_out)
        self.span, self.distance = data.recall_span, data.recall_distance
        self.scored = data.recall_span - 1
        self.about = f"recall of {self.span} bytes over a distance of {self.distance}"
        self.fingerprint += f" span={self.span} distance={self.distance}"

    def repeat(self, sequence: bytearray, generator: random.Random, scored: Tensor) -> None:
        origin = generator.randint(0, self.seq_len + 1 - self.distance - self.span)
        back = origin + self.distance
        sequence[back : back + self.span] = sequence[origin : origin + self.span]
        # Position t predicts byte t + 1.
        scored[back : back - 1 + self.span] = True
