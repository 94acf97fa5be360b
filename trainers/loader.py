"""Loads batches in a thread from a global stream of sequences that the ranks divide.

Sequence i belongs to rank i % world. So neither the order of the sequences nor a position in the
stream depends on the number of ranks. A thread reads ahead into a bounded queue; the training waits
for a batch for a limited time.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from trainers import changes
from trainers.changes import SEQUENCES
from trainers.contract import jsonl
from trainers.failures import DataError
from trainers.manifest import Manifest
from trainers.parallel import Single
from trainers.rejected_settings import DRAWN, step_range
from trainers.schema import DataSettings, Settings
from trainers.sequences import Recall, Source, State, Synthetic

Result = TypeVar("Result")
CLOSE_TIMEOUT_S = 5.0
FAILED = "failed"
"""The fingerprint of a source that cannot be opened."""
SKIP = "skip"
"""The key of the skipped data in the state."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch of this rank. `tokens_scored` is the sum over all ranks."""

    inputs: Tensor
    """int64 `[B, S]`; with `cu_seqlens`, one sequence `[1, B · S]`."""
    targets: Tensor
    """int64, of the same shape."""
    scored: Tensor | None
    """bool `[B, S]`; None: every position is scored."""
    tokens_scored: int
    tokens: Tensor
    """The tokens `[B, S + 1]` on the CPU, as the source returned them."""
    cu_seqlens: tuple[int, ...] | None = None
    """The offsets of the documents in `inputs`; None: attention crosses their ends."""

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of the model's forward."""
        return (self.inputs,) if self.cu_seqlens is None else (self.inputs, (), self.cu_seqlens)

    def crc32(self) -> str:
        """Returns a checksum of this rank's tokens in hexadecimal digits, or "" without tokens."""
        return f"{zlib.crc32(self.tokens.numpy().data):08x}" if self.tokens.numel() else ""

    def to(self, device: torch.device) -> Batch:
        """Returns the batch on `device`; a copy from pinned memory overlaps the previous step."""
        scored = None if self.scored is None else self.scored.to(device, non_blocking=True)
        inputs = self.inputs.to(device, non_blocking=True)
        targets = self.targets.to(device, non_blocking=True)
        return replace(self, inputs=inputs, targets=targets, scored=scored)


class Loader:
    """Reads batches ahead in a thread; `fetch` raises DataError if no batch comes in time.

    If the thread left out batches (`data.skip`) within the time limit, `fetch` waits again. `state`
    is the position of the training in the source, without the batches that were read ahead. A
    checkpoint stores this position as `data`; the loader continues from the `data` of `resumed`.
    """

    def __init__(
        self, source: Source, settings: Settings, rank: int, world: int, device: torch.device,
        resumed: Manifest | None = None,
    ):  # fmt: skip
        self.source = source
        state = resumed.data if resumed else {}
        self.state: State = dict(state) or source.state()
        self._data, self._rank, self._world, self._device = settings.data, rank, world, device
        self._count = settings.train.batch_size * world
        skip = to_skip(settings.data.skip, self._count * settings.train.accumulate, resumed)
        self._ready: queue.Queue[tuple[Batch, State] | BaseException] = queue.Queue(
            settings.data.prefetch
        )
        self._first: tuple[Batch, State] | None = None
        self._left_out = 0
        """Number of batches that were read and left out."""
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._read_ahead, args=(state, skip), name="nsa-loader", daemon=True
        )
        self._thread.start()

    def wait_for_first(self) -> None:
        """Waits for the first batch, so that a broken source fails before the first step."""
        self._first = self._wait()

    def fetch(self, count: int = 1) -> list[Batch]:
        """Returns the next `count` micro-batches on the device. Raises DataError."""
        return [self._next() for _ in range(count)]

    def close(self) -> None:
        """Stops the thread; a thread that hangs in a read continues."""
        self._stop.set()
        with contextlib.suppress(queue.Empty):  # makes room, because the thread may wait for it
            self._ready.get_nowait()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _wait(self) -> tuple[Batch, State]:
        item = None
        while item is None:
            left_out = self._left_out
            try:
                item = self._ready.get(timeout=self._data.timeout_s)
            except queue.Empty:
                if self._left_out == left_out:
                    raise DataError(_late("no batch", self.source.about, self._data)) from None
        if isinstance(item, BaseException):
            raise item
        return item

    def _next(self) -> Batch:
        (batch, self.state), self._first = self._first or self._wait(), None
        return batch.to(self._device)

    def _read_ahead(self, state: Mapping[str, Any], skip: Mapping[str, Any]) -> None:
        try:
            if state:
                self.source.restore(state)
            while not self._stop.is_set():
                begin = self.source.position
                batch = read_batch(self.source, self._count, self._rank, self._world, self._device)
                if skip and begin < skip["stop"] and self.source.position > skip["start"]:
                    self._left_out += 1
                else:
                    self._ready.put((batch, self.source.state() | ({SKIP: skip} if skip else {})))
        except BaseException as error:  # a panic in a Rust library is no Exception
            is_error = isinstance(error, Exception)
            self._ready.put(error if is_error else DataError(_broken(self.source.about, error)))


def read_batch(source: Source, count: int, rank: int, world: int, device: torch.device) -> Batch:
    """Returns a rank's part of the next `count` sequences, in pinned memory for a GPU."""
    tokens, mask = source.read(count, rank, world)
    wide = tokens.long()
    inputs, targets, offsets = wide[:, :-1].contiguous(), wide[:, 1:].contiguous(), None
    if source.end_token is not None:
        offsets = document_offsets(inputs, source.end_token)
        inputs, targets = inputs.view(1, -1), targets.view(1, -1)
    if device.type == "cuda":
        inputs, targets = inputs.pin_memory(), targets.pin_memory()
        mask = None if mask is None else mask.pin_memory()
    return Batch(inputs, targets, mask, source.scored * count, tokens.contiguous(), offsets)


def to_skip(steps: str, sequences: int, resumed: Manifest | None) -> Mapping[str, Any]:
    """Returns the positions `start` and `stop` (excluded) of the data that `data.skip` selects.

    `steps` are steps of the training that wrote the checkpoint; its number of sequences per step
    may differ from `sequences`. The result is part of the state, so that a later resume with the
    same `steps` skips the same data. The result is {} if `steps` is empty.
    """
    named = step_range(steps)
    if named is None:
        return {}
    done, position = 0, 0
    if resumed:
        known = jsonl.mapping(resumed.data, SKIP)
        if known.get("steps") == steps:
            return known
        done, position = resumed.step, jsonl.integer(resumed.data, "position") or 0
        sequences = changes.compared(resumed.settings, resumed.world, "").get(SEQUENCES, sequences)
    start, stop = (position + max(0, n - 1 - done) * sequences for n in (named.start, named.stop))
    return {"steps": steps, "start": start, "stop": stop}


def document_offsets(inputs: Tensor, end_token: int) -> tuple[int, ...]:
    """Returns the offsets of documents in `[B, S]` tokens, one row after the other.

    A document ends with its end token or with its row.
    """
    last = inputs == end_token
    last[:, -1] = True
    return (0, *(last.flatten().nonzero().flatten() + 1).tolist())


def open_source(settings: Settings, held_out: bool = False) -> Source:
    """Returns the source that the settings name, or its held-out part.

    Raises DataError if the source is empty or cannot be opened within data.timeout_s.
    """
    about = f"{settings.data.source} {settings.data.path}".rstrip()
    open_it = partial(_source, settings, held_out)
    return within_limit(open_it, "no answer", about, settings.data)


def within_limit(work: Callable[[], Result], what: str, about: str, data: DataSettings) -> Result:
    """Returns the result of `work`, which a thread executes.

    Raises DataError if `work` takes longer than data.timeout_s. A thread that hangs, for example on
    a dead mount, then continues.
    """
    result = Future[Result]()

    def run() -> None:
        try:
            result.set_result(work())
        except Exception as error:
            result.set_exception(error)
        except BaseException as error:  # a panic in a Rust library
            result.set_exception(DataError(_broken(about, error)))

    threading.Thread(target=run, name="nsa-data", daemon=True).start()
    if not wait([result], data.timeout_s).done:
        raise DataError(_late(what, about, data))
    return result.result()


def open_on_all_ranks(settings: Settings, parallel: Single, held_out: bool = False) -> Source:
    """Opens the source; all ranks must call this function.

    If a rank cannot open the source, that rank raises its error, and the others raise DataError.
    All ranks raise DataError if the files of a rank differ from those of rank 0.
    """
    try:
        source = open_source(settings, held_out)
    except Exception:  # any error: the other ranks wait for this rank
        parallel.gather(FAILED)
        raise
    prints = parallel.gather(source.fingerprint)
    for rank, fingerprint in enumerate(prints):
        if fingerprint == FAILED:
            raise DataError(f"rank {rank} cannot open the data")
        if fingerprint != prints[0]:
            raise DataError(f"rank {rank} finds other files than rank 0; use the same data on both")
    return source


def _broken(about: str, error: BaseException) -> str:
    return f"{about} cannot be read: {type(error).__name__}: {error}"


def _late(what: str, about: str, data: DataSettings) -> str:
    return (
        f"{what} from {about} within {data.timeout_s:g} s; "
        "check the disk or the network, or raise data.timeout_s"
    )


def _source(settings: Settings, held_out: bool) -> Source:
    data, seed = settings.data, settings.train.seed
    if data.source in DRAWN:
        return (Recall if data.source == "recall" else Synthetic)(data, seed, held_out)
    # Imported here because only runs on documents need pyarrow, which imports slowly.
    from trainers.stream import Stream

    return Stream(data, seed, held_out)
