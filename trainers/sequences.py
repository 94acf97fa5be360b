"""The interface of a source of training sequences, with its position for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainers import changes
from trainers.failures import DataError

RankRows = tuple[Tensor, Tensor | None]
State = dict[str, Any]
"""The position in a source, as JSON data of bounded size, with `fingerprint` and `position`.

For documents it also has `epoch`, the number of complete passes over all of them."""


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
        """Continues from a position. Raises DataError if the position belongs to another stream."""
        try:
            different = changes.stream_differences(state["fingerprint"], self.fingerprint)
            if different:
                raise DataError(
                    f"the checkpoint belongs to other data than {self.about}: "
                    f"{', '.join(different)}; restore these, or start a new run"
                )
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
    """Returns sequences of the same length as one tensor `[B, length]` of `kind`."""
    if not sequences:
        return torch.empty(0, length, dtype=kind)
    flat = torch.frombuffer(bytearray().join(sequences), dtype=kind)
    return flat.view(len(sequences), length)
