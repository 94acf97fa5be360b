"""Batches of byte sequences: one global stream, of which every rank keeps its share.

Sequence i belongs to rank i % world, so what is trained on in a step depends on the global batch
only, not on how many ranks share it, and a position is one number. A thread reads ahead through a
bounded queue; every wait has a time limit.
"""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from trainers.failures import DataError
from trainers.settings import DataSettings, Settings

CLOSE_TIMEOUT_S = 5.0
PUT_POLL_S = 0.1
Share = tuple[Tensor, Tensor | None]


class Source(Protocol):
    """A stream of sequences of S + 1 bytes."""

    @property
    def about(self) -> str:
        """What it is, for an error message and env.json."""
        ...

    @property
    def fingerprint(self) -> str:
        """What a position in this stream depends on, for the checkpoint."""
        ...

    @property
    def scored(self) -> int:
        """Predicted bytes per sequence that count in the loss."""
        ...

    def read(self, first: int, count: int, rank: int, world: int) -> Share:
        """Returns this rank's share of sequences `first` … `first + count - 1`.

        uint8 `[B, S + 1]` and, where not all predictions count, bool `[B, S]`. Sources that read
        files want `first` to ascend.
        """
        ...


class Synthetic:
    """Uniform random bytes: nothing can be learned, the loss stays at ln 256."""

    fingerprint = "synthetic"

    def __init__(self, seq_len: int, seed: int):
        self.seq_len, self.seed = seq_len, seed
        self.scored = seq_len
        self.about = "synthetic random bytes"

    def read(self, first: int, count: int, rank: int, world: int) -> Share:
        mine = range(first + (rank - first) % world, first + count, world)
        return stack([self.sequence(index)[0] for index in mine], self.seq_len + 1), None

    def sequence(self, index: int) -> tuple[bytearray, random.Random]:
        """Returns S + 1 bytes that follow from seed and index, and the generator after them."""
        generator = random.Random(f"{self.seed}/{index}")
        return bytearray(generator.randbytes(self.seq_len + 1)), generator


def stack(sequences: Sequence[bytes | bytearray], length: int) -> Tensor:
    """Returns uint8 `[B, length]` of equally long sequences."""
    if not sequences:
        return torch.empty(0, length, dtype=torch.uint8)
    flat = torch.frombuffer(bytearray().join(sequences), dtype=torch.uint8)
    return flat.view(len(sequences), length)


class Recall(Synthetic):
    """Random bytes in which a random span returns, `distance` bytes later; the return is scored.

    The distance is beyond the window, so only attention that reaches further can predict it. The
    first byte of the return is not scored: nothing before it tells that the return begins.
    """

    def __init__(self, seq_len: int, seed: int, span: int, distance: int):
        super().__init__(seq_len, seed)
        self.span, self.distance = span, distance
        self.scored = span - 1
        self.about = f"recall of {span} bytes over a distance of {distance}"
        self.fingerprint = f"recall span={span} distance={distance}"

    def read(self, first: int, count: int, rank: int, world: int) -> Share:
        room = self.seq_len + 1 - self.distance - self.span
        sequences: list[bytearray] = []
        mine = range(first + (rank - first) % world, first + count, world)
        scored = torch.zeros(len(mine), self.seq_len, dtype=torch.bool)
        for index in mine:
            sequence, generator = self.sequence(index)
            origin = generator.randint(0, room)
            back = origin + self.distance
            sequence[back : back + self.span] = sequence[origin : origin + self.span]
            # Position t predicts byte t + 1.
            scored[len(sequences), back : back - 1 + self.span] = True
            sequences.append(sequence)
        return stack(sequences, self.seq_len + 1), scored


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch of this rank. `tokens_scored` counts over all ranks."""

    inputs: Tensor
    """int64 `[B, S]`."""
    targets: Tensor
    """int64 `[B, S]`."""
    scored: Tensor | None
    """bool `[B, S]`; None: every position."""
    tokens_scored: int

    def to(self, device: torch.device) -> Batch:
        """Returns the batch on `device`; pinned memory lets the copy run beside the step before."""
        scored = None if self.scored is None else self.scored.to(device, non_blocking=True)
        inputs = self.inputs.to(device, non_blocking=True)
        targets = self.targets.to(device, non_blocking=True)
        return Batch(inputs, targets, scored, self.tokens_scored)


class Loader:
    """Reads ahead of the training in one thread, and gives batches on time or says why not.

    `position` is the number of sequences, over all ranks, that training has taken.
    """

    def __init__(
        self, source: Source, settings: Settings, rank: int, world: int, device: torch.device,
        position: int = 0,
    ):  # fmt: skip
        self.source, self.position = source, position
        self._data, self._rank, self._world, self._device = settings.data, rank, world, device
        self._count = settings.train.batch_size * world
        self._ready: queue.Queue[Batch | BaseException] = queue.Queue(settings.data.prefetch)
        self._first: Batch | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read_ahead, name="nsa-loader", daemon=True)
        self._thread.start()

    def ready(self) -> None:
        """Waits for the first batch, so that a broken source is told before step 1."""
        self._first = self._wait()

    def fetch(self, count: int = 1) -> list[Batch]:
        """Returns the next `count` micro-batches on the device. Raises DataError."""
        return [self._next() for _ in range(count)]

    def close(self) -> None:
        """Stops the thread; one that hangs in a read is left behind."""
        self._stop.set()
        while not self._ready.empty():
            self._ready.get_nowait()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _wait(self) -> Batch:
        try:
            batch = self._ready.get(timeout=self._data.timeout_s)
        except queue.Empty:
            raise DataError(
                f"no batch of {self.source.about} came within {self._data.timeout_s:g} s; "
                "look at the disk, or raise data.timeout_s"
            ) from None
        if isinstance(batch, BaseException):
            raise batch
        return batch

    def _next(self) -> Batch:
        batch, self._first = self._first or self._wait(), None
        self.position += self._count
        return batch if self._device.type == "cpu" else batch.to(self._device)

    def _read_ahead(self) -> None:
        first = self.position
        while not self._stop.is_set():
            try:
                item: Batch | BaseException = self._read(first)
            except Exception as error:
                item = _explained(error, self.source.about)
            while not self._stop.is_set():
                try:
                    self._ready.put(item, timeout=PUT_POLL_S)
                    break
                except queue.Full:
                    continue
            if isinstance(item, BaseException):
                return
            first += self._count

    def _read(self, first: int) -> Batch:
        tokens, mask = self.source.read(first, self._count, self._rank, self._world)
        pinned = self._device.type == "cuda"
        wide = tokens.long()
        parts = [wide[:, :-1].contiguous(), wide[:, 1:].contiguous()]
        if mask is not None:
            parts.append(mask)
        if pinned:
            parts = [part.pin_memory() for part in parts]
        return Batch(
            parts[0], parts[1], parts[2] if mask is not None else None,
            self.source.scored * self._count,
        )  # fmt: skip


def _explained(error: Exception, about: str) -> Exception:
    """Returns what `fetch` raises: a sentence for a broken source, a bug as it is."""
    broken = ("DatasetsError", "ArrowException")
    named = any(cls.__name__ in broken for cls in type(error).__mro__)
    if isinstance(error, OSError | EOFError | UnicodeError) or named:
        return DataError(f"{about} cannot be read: {error}")
    return error


def open_source(settings: Settings, run: Path) -> Source:
    """Returns the source that the settings name. Raises DataError when there is nothing in it."""
    return _SOURCES[settings.data.source](settings.data, settings.train.seed, run)


def _text(data: DataSettings, seed: int, run: Path) -> Source:
    # datasets takes a second to import, so only a run on text pays for it.
    from trainers.text import TextFiles

    return TextFiles(data, seed, run)


_SOURCES = {
    "synthetic": lambda data, seed, _run: Synthetic(data.seq_len, seed),
    "recall": lambda data, seed, _run: Recall(
        data.seq_len, seed, data.recall_span, data.recall_distance
    ),
    "text": _text,
}
