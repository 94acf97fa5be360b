"""The pulse of a rank: 256 bytes of memory with its present step and phase.

Layout (little endian): sequence number, magic, rank, pid, step, phase, since, beat, collectives,
device step, device phase, records, non-finite steps, padding, sequence number. `Pulse` explains the
fields. A writer writes from the first byte to the last. A reader reads the sequence number at the
end first, and the one at the start last. It accepts the bytes only if both are equal.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from trainers.contract import jsonl

SIZE_BYTES, TRIES = 256, 3
LATEST_S = 1e10
"""Upper limit of `since` and `beat`; valid values are lower."""
MAGIC = 0x4E534150
PHASES = (
    "boot", "load", "fetch", "forward", "backward", "optimizer", "log", "eval", "save", "halt",
    "exit", "step",
)  # fmt: skip
"""The code of a phase is its index; "step" is a step whose phase the program has not reported."""
CODES = {phase: code for code, phase in enumerate(PHASES)}
ORDER = {p: place for place, p in enumerate((*PHASES[:2], "step", *PHASES[2:-1]))}
"""The order of the phases; "step" (not reported) comes before "fetch"."""
_BODY = struct.Struct("<IIqqqddqqqqq152x")
_SEQUENCE = struct.Struct("<Q")
_END = SIZE_BYTES - _SEQUENCE.size


@dataclass(frozen=True, slots=True)
class Pulse:
    """The position of one rank. `since` and `beat` are CLOCK_MONOTONIC seconds of its host.

    `records` is the number of the newest heartbeat record. `nonfinite_steps` is the number of steps
    with a non-finite loss in this process, or -1 if these steps are not counted.
    """

    rank: int
    pid: int
    step: int
    phase: str
    since: float
    beat: float
    collectives: int
    device_step: int
    device_phase: str
    records: int
    nonfinite_steps: int


def mapped(path: Path, size: int) -> mmap.mmap:
    """Maps `size` bytes of a file; creates or extends the file if needed. Raises OSError.

    The bytes are allocated, because a store into a hole raises SIGBUS if the memory is full.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "r+b", buffering=0):
        os.posix_fallocate(fd, 0, size)
        return mmap.mmap(fd, size)


class PulseWriter:
    """Writes this rank's pulse into `path`, or into private memory if `path` is None.

    If the file is in memory, `set` waits for no disk. The bytes are written as slices, because
    `struct.pack_into` would first clear its target, and readers could see zeros.
    """

    def __init__(self, path: Path | None, rank: int):
        self._rank = rank
        self._pid = os.getpid()
        self._sequence = 0
        self._since = self._beat = time.monotonic()
        self.step = 0
        self.phase = "boot"
        self.collectives = self.records = 0
        self.nonfinite_steps = -1
        """Steps with a non-finite loss; -1 while they are not counted."""
        self._lock = threading.Lock()
        """Held while writing, because several threads write."""
        self._device: tuple[int, str] = (-1, "")
        self.memory: mmap.mmap | bytearray
        self.memory = bytearray(SIZE_BYTES) if path is None else mapped(path, SIZE_BYTES)
        self.set(0, "boot")

    def set(self, step: int, phase: str, device_step: int = -1, device_phase: str = "") -> None:
        """Marks the start of `phase` in `step`.

        The device step is `step` unless given, and the device phase is `phase` unless given.
        """
        self._since, self.step, self.phase = time.monotonic(), step, phase
        self._device = device_step, device_phase
        self._write(self._since)

    def count_collective(self) -> None:
        """Counts one more collective."""
        self.collectives += 1
        self._write(time.monotonic())

    def next_record_number(self) -> int:
        """Returns the next record's number, which the pulse shows before the record is queued."""
        self.records += 1
        self._write(self._beat)
        return self.records

    def _write(self, now: float) -> None:
        with self._lock:
            self._sequence += 1
            self._beat = now
            code, (device_step, device_phase) = CODES[self.phase], self._device
            body = _BODY.pack(
                MAGIC, self._rank, self._pid, self.step, code, self._since, now, self.collectives,
                self.step if device_step < 0 else device_step,
                CODES[device_phase] if device_phase else code,
                self.records, self.nonfinite_steps,
            )  # fmt: skip
            sequence = _SEQUENCE.pack(self._sequence)
            self.memory[:8] = sequence
            self.memory[8:_END] = body
            self.memory[_END:] = sequence


def unpack(data: bytes) -> Pulse | None:
    """Returns the pulse in 256 bytes, or None if the bytes are torn or invalid."""
    if len(data) != SIZE_BYTES:
        return None
    (magic, rank, pid, step, code, since, beat, collectives, device_step, device_code, records,
     nonfinite) = _BODY.unpack(data[8:_END])  # fmt: skip
    known = range(len(PHASES))
    if data[:8] != data[_END:] or magic != MAGIC or code not in known or device_code not in known:
        return None
    if step < 0 or collectives < 0 or not (0 <= since < LATEST_S and 0 <= beat < LATEST_S):
        return None
    return Pulse(
        rank, pid, step, PHASES[code], since, beat, collectives, device_step, PHASES[device_code],
        records, nonfinite,
    )  # fmt: skip


def is_blank(fd: int) -> bool:
    """Returns whether an open file consists of 256 zero bytes, as before the first pulse."""
    try:
        return os.pread(fd, SIZE_BYTES + 1, 0) == bytes(SIZE_BYTES)
    except OSError:
        return False


def read(path: Path) -> Pulse | None:
    """Returns the pulse in a file, or None if it has no valid pulse."""
    with contextlib.suppress(OSError), jsonl.opened(path) as fd:
        return read_open(fd)
    return None


def read_open(fd: int) -> Pulse | None:
    """Returns the pulse in an open file, or None if it has no valid pulse.

    The file is read with `pread`, because a mapping raises SIGBUS if the file shrinks.
    """
    with contextlib.suppress(OSError):
        for _ in range(TRIES):
            last = os.pread(fd, 8, _END)
            body = os.pread(fd, _BODY.size, 8)
            first = os.pread(fd, 8, 0)
            pulse = unpack(first + body + last)
            if pulse is not None:
                return pulse
    return None
