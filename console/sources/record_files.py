"""Names the parts of the record files of one run, and reads new records from these files.

A record file is a heartbeat, sample or event file.
"""

from __future__ import annotations

import hashlib
import os
import re
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from console.sources import legacy
from console.sources.tail import PACKED_BYTES, GzipTail, Record, Tail, is_missing
from trainers.contract import heartbeat, jsonl, rundir

MAX_RANKS = 4096
MAX_FILES = MAX_RANKS + 64
CHUNK_BYTES = 128 << 10
"""The most bytes that are read for one batch; the decoded records need more memory."""
AGAIN_BYTES, WARM_UP_BYTES = 8 << 10, 256 << 10
"""Bytes before a heartbeat's cursor that are read again, because they have the newest records. A
reader that learns how long steps usually take needs `WARM_UP_BYTES`."""
HEAD_BYTES = 4096
HEARTBEAT, SAMPLES = re.compile(r"heartbeat_rank([0-9]{1,4})\.jsonl"), "samples_"
GZIP, PART = ".gz", re.compile(r"\.([0-9]{4,9})(\.gz)?")


@dataclass(frozen=True, slots=True)
class Cursor:
    """The place up to which a file was read; `head` is the hash of the part's first line.

    `at` is in bytes, and `part` is the number of the part, or 0 for a file without parts. `skipped`
    counts the lines before this place that are not records.
    """

    head: str = ""
    part: int = 0
    at: int = 0
    skipped: int = 0

    def fits(self, path: Path) -> bool:
        """Returns whether a file still has the same first line, and still contains the place.

        For a compressed part, only the first line is compared. The start of a file always fits.
        """
        if not self.at:
            return True
        found = _parts(path).get(self.part, path)
        if head(found) != self.head:
            return False
        return found.suffix == GZIP or jsonl.size_bytes(found) >= self.at


def head(path: Path) -> str:
    """Returns a hash of a file's first line, or "" if the line is incomplete or cannot be read.

    The hash covers at most `HEAD_BYTES`. It identifies a file of records, also a copy or a renamed
    file.
    """
    if path.suffix == GZIP:
        unpacker = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        try:
            data = unpacker.decompress(jsonl.read_bytes(path, PACKED_BYTES, 0), HEAD_BYTES)
        except zlib.error:
            return ""
    else:
        data = jsonl.read_bytes(path, HEAD_BYTES, 0)
    first, end, _ = data.partition(b"\n")
    return hashlib.sha256(first).hexdigest()[:16] if end or len(data) == HEAD_BYTES else ""


def rotated_log(log: Path) -> Path:
    """Returns the path of the rotated file of a log or of a history file."""
    return log.with_name(f"{log.name}.1")


def read_end(path: Path, limit_bytes: int, below: Path) -> bytes:
    """Returns the last bytes of a file; for a short file, also the end of its rotated file."""
    data = jsonl.read_bytes(path, limit_bytes, below=below)
    left = limit_bytes - len(data)
    return (jsonl.read_bytes(rotated_log(path), left, below=below) if left else b"") + data


class Batch(NamedTuple):
    """New records of one file in their order, and the place up to which the file was read.

    `replaced` counts how often the file was replaced or truncated.
    """

    name: str
    records: list[Record]
    cursor: Cursor
    replaced: int = 0


def rank_of(name: str) -> int | None:
    """Returns the rank whose heartbeat file has this name, or None for another file."""
    found = HEARTBEAT.fullmatch(name)
    return int(found[1]) if found else None


def whole_name(name: str) -> str:
    """Returns the name of the record file that a part belongs to; other names are unchanged."""
    base, found, part = name.partition(".jsonl")
    is_part = found and base.startswith(SAMPLES) and PART.fullmatch(part)
    return base + found if is_part else name


def part(path: Path, number: int) -> Path:
    """Returns the path of part `number` of a record file while the part is not compressed."""
    return path.with_name(f"{path.name}.{number:04d}")


def parts(path: Path) -> list[tuple[int, Path]]:
    """Returns the older parts of a record file with their numbers, the oldest first.

    If a part exists both compressed and plain, the compressed file is returned. Raises OSError.
    """
    found: dict[int, Path] = {}
    for name in sorted(os.listdir(path.parent)):
        match = PART.fullmatch(name.removeprefix(path.name)) if name.startswith(path.name) else None
        if match:
            found[int(match[1])] = path.with_name(name)
    return sorted(found.items())


def _parts(path: Path) -> dict[int, Path]:
    """Returns the older parts of a record file by number, or {} after an error."""
    try:
        return dict(parts(path))
    except OSError:
        return {}


class RecordFile:
    """Follows one file of records from part to part.

    A long sample file becomes a part, and a new file continues the records.
    """

    def __init__(self, path: Path, tail: Tail, skipped: int = 0, left_out_bytes: int = 0):
        self.path, self.tail = path, tail
        self._head, self._of = "", 0
        self._skipped = skipped
        self._left_out_bytes = left_out_bytes
        self._replaced = 0

    @property
    def replaced(self) -> int:
        """The number of times that the file was replaced or truncated."""
        return self._replaced + max(0, self.tail.generation - 1)

    @property
    def skipped(self) -> int:
        """The number of lines that are not records."""
        return self._skipped + self.tail.skipped

    @property
    def left_out_bytes(self) -> int:
        """The number of bytes before the start of reading, or 0 if reading started at a cursor."""
        return self._left_out_bytes + self.tail.left_out_bytes

    @property
    def behind_bytes(self) -> int:
        """The number of bytes left to read; for a compressed part, the compressed bytes."""
        tail = self.tail
        size_bytes = tail.size_bytes if tail.generation else jsonl.size_bytes(tail.path)
        # The `line_at` of a compressed part counts unpacked bytes.
        has_begun = tail.generation or tail.path.suffix == GZIP
        behind = max(0, size_bytes - max(tail.offset, 0 if has_begun else tail.line_at))
        if tail.path == self.path:
            return behind
        later = [path for number, path in _parts(self.path).items() if number > tail.part]
        return behind + sum(map(jsonl.size_bytes, (*later, self.path)))

    def cursor(self) -> Cursor:
        """Returns how far the file was read."""
        if not self._head or self.tail.generation != self._of:
            self._head, self._of = head(self.tail.path), self.tail.generation
        at = max(self.tail.line_at, self.tail.counts_from)
        return Cursor(self._head, self.tail.part, at, self.skipped)

    def poll(self, limit_bytes: int) -> tuple[list[Record], int]:
        """Returns two values: new records, and the number of bytes read (0 at the end)."""
        left, found = limit_bytes, list[Record]()
        if self.tail.part and self.tail.path == self.path and self.tail.part in _parts(self.path):
            self._next_part()  # the growing file became this part before it was read to its end
        while left > 0:
            taken, offset = self.tail.taken_bytes, self.tail.offset
            found += self.tail.poll(left)
            left -= self.tail.taken_bytes - taken
            ended = (self.tail.taken_bytes, self.tail.offset) == (taken, offset)
            if ended and not (self.tail.part and self._next_part()):
                break
        return found, limit_bytes - left

    def _next_part(self) -> bool:
        """Opens another file if reading continues there; returns whether a file was opened."""
        if self.tail.unread:
            return False
        there, part = _parts(self.path), self.tail.part
        own = there.get(part)
        if own is None and self.tail.path == self.path:
            replaced = self.tail.is_replaced
            if replaced:
                self._replaced += 1
                self._replace(open_part(self.path, part))
            return replaced
        if own is not None and own != self.tail.path:  # the part was renamed or compressed
            self._replace(open_part(own, part, self.tail.line_at))
            return True
        newest = max(there, default=part) + 1
        part = min((each for each in there if each > part), default=newest)
        self._replace(open_part(there.get(part, self.path), part))
        return True

    def _replace(self, tail: Tail) -> None:
        self._skipped += self.tail.skipped
        self._replaced += max(0, self.tail.generation - 1)
        tail.left_out_bytes = self.tail.left_out_bytes
        self.tail, self._head = tail, ""


def open_part(path: Path, part: int, begin_at: int = 0) -> Tail:
    """Returns a `Tail` of one part of a file of records."""
    if path.suffix == GZIP:
        return GzipTail(path, begin_at, part)
    return Tail(path, begin_at=begin_at, stays=True, part=part)


class RecordFiles:
    """Reads heartbeats, samples and events of one run, a bounded number of bytes at each poll.

    With `recent_bytes` only the end of each heartbeat and sample file is read. A file in `cursors`
    is read from its cursor; a heartbeat file from some bytes before (see `AGAIN_BYTES`).
    """

    def __init__(
        self, run: Path, recent_bytes: int | None = None,
        cursors: Mapping[str, Cursor] | None = None, again_bytes: int = AGAIN_BYTES,
    ):  # fmt: skip
        self.run, self._recent_bytes = run, recent_bytes
        self._cursors: Mapping[str, Cursor] = {} if cursors is None else cursors
        self._again_bytes = again_bytes
        self._followed: dict[str, RecordFile] = {}
        self._turns: list[str] = []
        self._unlisted = False
        self.behind: deque[str] = deque()
        """The files that the last poll did not read to their ends, because of its limit."""
        self.is_legacy = False
        """True for a legacy run directory."""

    @property
    def skipped(self) -> int:
        return sum(follower.skipped for follower in self._followed.values())

    @property
    def has_all_records(self) -> bool:
        """True if no heartbeat record was left out.

        In that case, reading began at the start of each heartbeat file, or at its cursor.
        """
        return not any(
            each.left_out_bytes
            for name, each in self._followed.items()
            if rank_of(name) is not None
        )

    @property
    def left_out_bytes(self) -> int:
        """Bytes that are not read at the start of files; bytes before a cursor do not count."""
        return sum(each.left_out_bytes for each in self._followed.values())

    @property
    def unread(self) -> str:
        """Why the directory or a heartbeat file cannot be read although it exists, or ""."""
        if self._unlisted:
            return "the run directory cannot be listed"
        beats = {name: rank for name in self._followed if (rank := rank_of(name)) is not None}
        ranks = sorted(rank for name, rank in beats.items() if self._followed[name].tail.unread)
        return f"the heartbeat of rank {ranks[0]} cannot be read" if ranks else ""

    @property
    def behind_bytes(self) -> int:
        """The number of bytes left to read."""
        return sum(follower.behind_bytes for follower in self._followed.values())

    def poll(self, limit_bytes: int, world: int = MAX_RANKS) -> Iterator[Batch]:
        """Yields about `limit_bytes` of new records; starts where the last poll stopped.

        The files are read in turns, so that a long file does not delay the others. Heartbeat files
        of ranks beyond `world` are ignored.
        """
        self._discover(world)
        left, self.behind, ended = limit_bytes, deque(self._turns), list[str]()
        while left > 0 and self.behind:
            name, part_bytes = self.behind.popleft(), min(left, CHUNK_BYTES)
            follower = self._followed[name]
            records, taken = follower.poll(part_bytes)
            left -= taken
            if records:
                yield Batch(name, records, follower.cursor(), follower.replaced)
            (ended if taken < part_bytes else self.behind).append(name)
        self._turns = [*self.behind, *ended]

    def _discover(self, world: int) -> None:
        names = rundir.names(self.run)
        self._unlisted = names is None and not is_missing(self.run)
        for name in map(whole_name, names or []):
            if name in self._followed or len(self._followed) >= MAX_FILES:
                continue
            if (follower := self._open(name, world)) is not None:
                self._followed[name] = follower
                self._turns.append(name)

    def _open(self, name: str, world: int) -> RecordFile | None:
        """Returns a record file to follow, or None for another file or a rank beyond `world`."""
        path, rank, cursor = self.run / name, rank_of(name), self._cursors.get(name, Cursor())
        if name.endswith(".jsonl") and name.startswith(SAMPLES):
            return self._parted(name)
        if name == rundir.EVENTS:
            return RecordFile(path, Tail(path, begin_at=cursor.at), cursor.skipped)
        if rank is None or rank >= world:
            return None
        if legacy.is_legacy(self.run):
            self.is_legacy = True
            return RecordFile(path, legacy.tail(self.run, rank, self._recent_bytes))
        again_bytes = self._again_bytes
        if b"progress" not in jsonl.read_bytes(path, again_bytes, max(0, cursor.at - again_bytes)):
            again_bytes = WARM_UP_BYTES  # the newest progress record is further back
        tail = Tail(path, heartbeat.accept, self._recent_bytes, cursor.at, again_bytes=again_bytes)
        return RecordFile(path, tail, cursor.skipped)

    def _parted(self, name: str) -> RecordFile:
        path, cursor = self.run / name, self._cursors.get(name)
        there = _parts(path)
        if cursor is not None:
            tail = open_part(there.get(cursor.part, path), cursor.part, cursor.at)
            return RecordFile(path, tail, cursor.skipped)
        if self._recent_bytes is None and there:
            return RecordFile(path, open_part(there[min(there)], min(there)))
        tail = Tail(
            path, recent_bytes=self._recent_bytes, stays=True, part=max(there, default=0) + 1
        )
        return RecordFile(path, tail, left_out_bytes=sum(map(jsonl.size_bytes, there.values())))
