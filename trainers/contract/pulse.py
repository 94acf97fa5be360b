"""The pulse: 256 bytes a rank in shared memory that say where the rank is right now.

Layout (little endian): sequence number, magic, rank, pid, step, phase, since (monotonic s), beat
(monotonic s), collectives, device step, device phase, records, non-finite steps, …, sequence number
again. The writer goes from the first byte to the last; a reader takes the last sequence number
first and the first one last, and believes what lies between only if both are equal.
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

SIZE_BYTES = 256
LATEST_S = 1e10
"""No host is up for so long: a later time is none."""
MAGIC = 0x4E534150
PHASES = (
    "boot", "load", "fetch", "forward", "backward", "optimizer", "log", "eval", "save", "halt",
    "exit",
)  # fmt: skip
CODES = {phase: code for code, phase in enumerate(PHASES)}
_BODY = struct.Struct("<IIqqqddqqqqq152x")
_SEQUENCE = struct.Struct("<Q")
_END = SIZE_BYTES - _SEQUENCE.size


@dataclass(frozen=True, slots=True)
class Pulse:
    """One rank's position. `since` and `beat` are CLOCK_MONOTONIC seconds of its host.

    `records` is the number of the newest heartbeat that was queued, `nonfinite_steps` the number of
    steps with a non-finite loss in this process, -1 where it does not count them.
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
    """Maps a file of at least `size` bytes; makes it where there is none. Raises OSError.

    Its room is taken here: a store into a file with holes is SIGBUS when the memory is full.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)


class PulseWriter:
    """Writes this rank's pulse into `path`, or into private memory when `path` is None.

    One `set` is three copies into mapped memory: no system call, nothing that can block as long
    as the file is memory-backed. Three, because `struct.pack_into` clears its target first, from
    either end, and a reader saw that.
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
        """Steps with a non-finite loss; -1 while nobody counts them."""
        self._lock = threading.Lock()
        """A record may come from another thread than the one that steps."""
        self._device: tuple[int, str] = (-1, "")
        self.memory: mmap.mmap | bytearray
        self.memory = bytearray(SIZE_BYTES) if path is None else mapped(path, SIZE_BYTES)
        self.set(0, "boot")

    def set(self, step: int, phase: str, device_step: int = -1, device_phase: str = "") -> None:
        """Says that `phase` of `step` begins now; without device figures the host's stand in."""
        self._since, self.step, self.phase = time.monotonic(), step, phase
        self._device = device_step, device_phase
        self._write(self._since)

    def count(self) -> None:
        """Says that one more collective was reached, in the phase that this rank is in."""
        self.collectives += 1
        self._write(time.monotonic())

    def number(self) -> int:
        """Returns the number of the next record; it is in the pulse before the record is queued."""
        self.records += 1
        self._write(self._beat)
        return self.records

    def _write(self, now: float) -> None:
        with self._lock:
            self._pack(now)

    def _pack(self, now: float) -> None:
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
    """Returns the pulse in 256 bytes, None if they are torn or no pulse."""
    if len(data) != SIZE_BYTES:
        return None
    (magic, rank, pid, step, code, since, beat, count, device_step, device_code, records,
     nonfinite) = _BODY.unpack(data[8:_END])  # fmt: skip
    known = range(len(PHASES))
    if data[:8] != data[_END:] or magic != MAGIC or code not in known or device_code not in known:
        return None
    if step < 0 or count < 0 or not (0 <= since < LATEST_S and 0 <= beat < LATEST_S):
        return None
    return Pulse(
        rank, pid, step, PHASES[code], since, beat, count, device_step, PHASES[device_code],
        records, nonfinite,
    )  # fmt: skip


def is_blank(fd: int) -> bool:
    """Says whether nobody has written yet into an open file that has room for a pulse."""
    try:
        return os.pread(fd, SIZE_BYTES + 1, 0) == bytes(SIZE_BYTES)
    except OSError:
        return False


def read(path: Path, tries: int = 3) -> Pulse | None:
    """Returns the pulse in a file, None where there is none to believe."""
    with contextlib.suppress(OSError), jsonl.opened(path) as fd:
        return read_open(fd, tries)
    return None


def read_open(fd: int, tries: int = 3) -> Pulse | None:
    """Returns the pulse in an open file, None where there is none to believe.

    Reads with `pread` and not through a mapping: a hostile file that shrinks cannot harm.
    """
    try:
        for _ in range(tries):
            last = os.pread(fd, 8, _END)
            body = os.pread(fd, _BODY.size, 8)
            first = os.pread(fd, 8, 0)
            pulse = unpack(first + body + last)
            if pulse is not None:
                return pulse
    except OSError:
        return None
    return None
