"""Reads new records from the heartbeat, sample and event files of one run."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from console.sources import legacy, record_parts
from console.sources.record_parts import GZIP, PART, head, rotated_log
from console.sources.tail import GzipTail, Line, Place, Tail
from trainers.contract import heartbeat, jsonl, rundir

MAX_RANKS = 4096
MAX_FILES = MAX_RANKS + 64
CHUNK_BYTES = 128 << 10
"""Bytes that are read for one batch; the decoded records need about 15 times as much memory."""
MAX_PART_BYTES = 64 << 20
"""`read_line` stops after about this many unpacked bytes of a compressed part."""
HEARTBEAT, SAMPLES = re.compile(r"heartbeat_rank([0-9]{1,4})\.jsonl"), "samples_"


@dataclass(frozen=True, slots=True)
class Cursor:
    """The place up to which a file was read; `head` is the hash of the part's first line.

    `skipped` counts the lines before this place that are not records.
    """

    head: str
    place: Place
    skipped: int = 0

    def fits(self, path: Path) -> bool:
        """Returns whether a file still has the same first line, and still contains the place.

        For a compressed part, only the first line is compared. The start of a file always fits.
        """
        if not self.place.at:
            return True
        found = _part_at(path, self.place.part)
        if found is None or head(found) != self.head:
            return False
        return found.suffix == GZIP or jsonl.size_bytes(found) >= self.place.at


FILE_START = Cursor("", Place(0, 0))


def read_end(path: Path, limit_bytes: int, below: Path) -> bytes:
    """Returns the last bytes of a file; for a short file, also the end of its rotated file."""
    data = jsonl.read_bytes(path, limit_bytes, below=below)
    left = limit_bytes - len(data)
    return (jsonl.read_bytes(rotated_log(path), left, below=below) if left else b"") + data


class Batch(NamedTuple):
    """New lines of one file in their order, and the place up to which the file was read.

    `replaced` counts how often the file was replaced or truncated.
    """

    name: str
    lines: list[Line]
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


def parts(path: Path) -> dict[int, Path]:
    """Returns the older parts of a file of records by number, or {} after an error."""
    try:
        return dict(record_parts.parts(path))
    except OSError:
        return {}


def _part_at(path: Path, number: int) -> Path | None:
    """Returns the path of a part, or None; a part without its own file is in the growing file."""
    plain = record_parts.part(path, number)
    packed = plain.with_name(f"{plain.name}{GZIP}")
    # The plain file first: the compressed file is complete before the plain one is removed.
    found = [each for each in (plain, packed) if number and os.path.lexists(each)]
    return found[-1] if found else path if jsonl.size_bytes(path) else None


def read_line(path: Path, place: Place, length: int) -> dict[str, Any]:
    """Returns the record at a place, or {} if there is no such record."""
    found = _part_at(path, place.part)
    if found is None or not 0 < length <= jsonl.MAX_LINE_BYTES:
        return {}
    if found.suffix == GZIP:
        tail, lines = GzipTail(found, _any, place.at, place.part), []
        while not lines and tail.taken_bytes <= min(place.at + length, MAX_PART_BYTES):
            offset, taken = tail.offset, tail.taken_bytes
            lines = tail.poll_lines()
            if (tail.offset, tail.taken_bytes) == (offset, taken):
                break
        return lines[0].record if lines and lines[0].place == place else {}
    return jsonl.decode(jsonl.read_bytes(found, length, place.at).lstrip(b"\0")) or {}


def _any(record: dict[str, Any]) -> dict[str, Any]:
    return record


class RecordFile:
    """Follows one file of records from part to part.

    When the growing file is long, it becomes a part, and a new file continues it.
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
        later = [path for number, path in parts(self.path).items() if number > tail.part]
        return behind + sum(map(jsonl.size_bytes, (*later, self.path)))

    def cursor(self) -> Cursor:
        """Returns how far the file was read."""
        if not self._head or self.tail.generation != self._of:
            self._head, self._of = head(self.tail.path), self.tail.generation
        return Cursor(self._head, Place(self.tail.part, self.tail.line_at), self.skipped)

    def poll(self, limit_bytes: int) -> tuple[list[Line], int]:
        """Returns two values: new records, and the number of bytes read (0 at the end)."""
        left, found = limit_bytes, list[Line]()
        if self.tail.part and self.tail.path == self.path and self.tail.part in parts(self.path):
            self._next_part()  # the growing file became this part before it was read to its end
        while left > 0:
            taken, offset = self.tail.taken_bytes, self.tail.offset
            found += self.tail.poll_lines(left)
            left -= self.tail.taken_bytes - taken
            ended = (self.tail.taken_bytes, self.tail.offset) == (taken, offset)
            if ended and not (self.tail.part and self._next_part()):
                break
        return found, limit_bytes - left

    def _next_part(self) -> bool:
        """Opens another file if reading continues there; returns whether a file was opened."""
        if self.tail.unread:
            return False
        there, part = parts(self.path), self.tail.part
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
        return GzipTail(path, _any, begin_at, part)
    return Tail(path, _any, begin_at=begin_at, stays=True, part=part)


class RecordFiles:
    """Reads heartbeats, samples and events of one run, a bounded number of bytes at each poll.

    With `recent_bytes` only the end of each heartbeat and sample file is read. A file in `cursors`
    is read from its cursor on.
    """

    def __init__(
        self, run: Path, recent_bytes: int | None = None,
        cursors: Mapping[str, Cursor] | None = None,
    ):  # fmt: skip
        self.run, self._recent_bytes = run, recent_bytes
        self._cursors: Mapping[str, Cursor] = {} if cursors is None else cursors
        self._followed: dict[str, RecordFile] = {}
        self._turns: deque[str] = deque()
        self.has_more = False
        """True if the last poll stopped at its limit."""
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
        """A sentence on a heartbeat file that exists and cannot be read, or "" if there is none."""
        beats = {name: rank for name in self._followed if (rank := rank_of(name)) is not None}
        ranks = sorted(rank for name, rank in beats.items() if self._followed[name].tail.unread)
        return f"the heartbeat of rank {ranks[0]} cannot be read" if ranks else ""

    @property
    def behind_bytes(self) -> int:
        """The number of bytes left to read."""
        return sum(follower.behind_bytes for follower in self._followed.values())

    def poll(self, limit_bytes: int, world: int = MAX_RANKS) -> Iterator[Batch]:
        """Yields about `limit_bytes` of new lines; starts where the last poll stopped.

        Heartbeat files of ranks beyond `world` are ignored.
        """
        self._discover(world)
        left, ended = limit_bytes, 0
        while left > 0 and ended < len(self._turns):
            follower = self._followed[self._turns[0]]
            lines, taken = follower.poll(min(left, CHUNK_BYTES))
            left -= taken
            if lines:
                yield Batch(self._turns[0], lines, follower.cursor(), follower.replaced)
            if taken < min(left + taken, CHUNK_BYTES):
                self._turns.rotate(-1)
                ended += 1
        self.has_more = left <= 0

    def _discover(self, world: int) -> None:
        names = rundir.names(self.run)
        if names is None:  # the files that every run has are tried
            names = [rundir.EVENTS] if world < MAX_RANKS else []
            names += [rundir.heartbeat(self.run, rank).name for rank in range(world) if names]
        for name in map(whole_name, names):
            if name in self._followed or len(self._followed) >= MAX_FILES:
                continue
            rank = rank_of(name)
            if name == rundir.EVENTS:
                self._followed[name] = self._plain(name, _any, None)
            elif name.endswith(".jsonl") and name.startswith(SAMPLES):
                self._followed[name] = self._parted(name)
            elif rank is not None and rank < world:
                self._followed[name] = self._heartbeats(name, rank)
            else:
                continue
            self._turns.append(name)

    def _plain(self, name: str, accept: Any, recent_bytes: int | None) -> RecordFile:
        cursor = self._cursors.get(name, FILE_START)
        tail = Tail(self.run / name, accept, recent_bytes, cursor.place.at)
        return RecordFile(self.run / name, tail, cursor.skipped)

    def _heartbeats(self, name: str, rank: int) -> RecordFile:
        if legacy.is_legacy(self.run):
            self.is_legacy = True
            return RecordFile(self.run / name, legacy.tail(self.run, rank, self._recent_bytes))
        return self._plain(name, heartbeat.accept, self._recent_bytes)

    def _parted(self, name: str) -> RecordFile:
        path, cursor = self.run / name, self._cursors.get(name)
        there = parts(path)
        if cursor is not None:
            part, at = cursor.place
            return RecordFile(path, open_part(there.get(part, path), part, at), cursor.skipped)
        if self._recent_bytes is None and there:
            return RecordFile(path, open_part(there[min(there)], min(there)))
        tail = Tail(path, _any, self._recent_bytes, stays=True, part=max(there, default=0) + 1)
        return RecordFile(path, tail, left_out_bytes=sum(map(jsonl.size_bytes, there.values())))
