"""What every source of training sequences offers, and how a position in it is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from trainers.failures import DataError

Share = tuple[Tensor, Tensor | None]
State = dict[str, Any]
"""Plain JSON data of bounded size; every source's has `fingerprint` and `position`.

That of documents also has `epoch`, how often all of them have been read."""


class Source(Protocol):
    """An endless stream of sequences of S + 1 tokens; sequence i belongs to rank i % world."""

    position: int
    """Sequences read so far, over all ranks."""

    @property
    def about(self) -> str:
        """What it is, for an error message and env.json."""
        ...

    @property
    def fingerprint(self) -> str:
        """What a position in this stream depends on, as `key=value` words."""
        ...

    @property
    def scored(self) -> int:
        """Predicted tokens per sequence that count in the loss."""
        ...

    def read(self, count: int, rank: int, world: int) -> Share:
        """Returns this rank's share of the next `count` sequences.

        uint8 or uint16 `[B, S + 1]` and, where not all predictions count, bool `[B, S]`. Raises
        DataError.
        """
        ...

    def state(self) -> State:
        """Returns the position after the last `read`, the same on every rank of any world."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes to a position. Raises DataError where it belongs to another stream."""
        ...


def stack(sequences: Sequence[bytes | bytearray], length: int, kind: torch.dtype) -> Tensor:
    """Returns `[B, length]` of equally long sequences of `kind`."""
    if not sequences:
        return torch.empty(0, length, dtype=kind)
    flat = torch.frombuffer(bytearray().join(sequences), dtype=kind)
    return flat.view(len(sequences), length)


def check(state: Mapping[str, Any], source: Source) -> None:
    """Raises DataError that says what changed unless `state` is a position in `source`."""
    try:
        kept, now = _words(state["fingerprint"]), _words(source.fingerprint)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise unreadable(error) from error
    changed = [
        f"{key} was {kept.get(key, 'not there')} and is {now.get(key, 'not there')}"
        for key in now | kept
        if kept.get(key) != now.get(key)
    ]
    if changed:
        raise DataError(
            f"the checkpoint's position is one in other data than {source.about}: "
            f"{', '.join(changed)}; set that back, or begin a new run"
        )


def unreadable(error: Exception) -> DataError:
    """Returns the error for a state that no source has written."""
    return DataError(
        f"the data position in the checkpoint makes no sense ({type(error).__name__}: {error}); "
        "resume from another one"
    )


def _words(fingerprint: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in fingerprint.split())  # pyright: ignore[reportReturnType]
