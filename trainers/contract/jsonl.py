"""Reads and writes JSON lines: opens files safely, reads typed fields, follows growing files.

One `os.write` on an O_APPEND descriptor writes a whole line. A reader buffers the unfinished last
line, skips and counts lines that it cannot parse, detects truncation and replacement, and reads a
limited number of bytes at a time.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

MAX_HEARTBEAT_BYTES = 4096
MAX_LINE_BYTES = 1 << 18
READ_CHUNK_BYTES = 1 << 20
GZIP = ".gz"
PACKED_BYTES = 1 << 16
NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def _plain(value: Any) -> Any:
    """Returns the value with each non-finite float as text, because JSON has no such numbers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def _foreign(value: Any) -> Any:
    """Returns the number in a value of another type (for example a tensor), or else its text."""
    try:
        return _plain(float(value))
    except (TypeError, ValueError, RuntimeError):
        return str(value)[:200]


def encode(record: Mapping[str, Any]) -> bytes:
    """Returns one line with its newline; non-finite floats become "nan", "inf", "-inf".

    No value raises an error, because the thread that writes records must survive unknown types.
    """
    try:
        text = json.dumps(record, separators=(",", ":"), allow_nan=False, default=_foreign)
    except ValueError:
        text = json.dumps(_plain(record), separators=(",", ":"), allow_nan=False, default=_foreign)
    return text.encode("ascii") + b"\n"


def decode(line: bytes) -> dict[str, Any] | None:
    """Returns the object on one line, or None for any other content."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def number(record: Mapping[str, Any], key: str) -> float | None:
    """Returns `record[key]` as a float, also for "nan" and "inf"; None for any other value."""
    value = record.get(key)
    return value if type(value) is float else _number(value)


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    return NONFINITE.get(value) if isinstance(value, str) else None


def integer(record: Mapping[str, Any], key: str) -> int | None:
    """Returns `record[key]` if it is an integer that fits 64 bits, or else None."""
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 1 << 63:
        return None
    return value


def text(record: Mapping[str, Any], key: str, default: str = "") -> str:
    """Returns `record[key]` if it is a string, or else `default`."""
    value = record.get(key)
    return value if isinstance(value, str) else default


def numbers(record: Mapping[str, Any], key: str) -> list[float]:
    """Returns the numbers in the list `record[key]`, or [] for any other value."""
    value = record.get(key)
    found = map(_number, value) if isinstance(value, list) else ()
    return [each for each in found if each is not None]


def integers(record: Mapping[str, Any], key: str) -> list[int]:
    """Returns the integers in the list `record[key]`, or [] for any other value."""
    value = record.get(key)
    found = (integer({"": each}, "") for each in value) if isinstance(value, list) else ()
    return [each for each in found if each is not None]


def mapping(record: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Returns `record[key]` if it is an object, or else {}."""
    value = record.get(key)
    return value if isinstance(value, dict) else {}


def entries(record: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Returns the objects in the list `record[key]`, or [] for any other value."""
    value = record.get(key)
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def open_regular(path: Path, below: Path | None = None) -> int | None:
    """Opens a regular file for reading; returns None for a link, fifo, directory or missing file.

    With `below`, the directories between `below` and the file must not be links either.
    """
    fd = open_inside(path, below)
    if fd is None:
        return None
    try:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
    except OSError:  # the type is not available
        pass
    os.close(fd)
    return None


def open_inside(path: Path, below: Path | None) -> int | None:
    """Opens `path`, following no links below `below`; returns None if that fails."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    at, names = None, [str(path)]
    if below is not None:
        first, *rest = path.relative_to(below).parts
        names = [str(below / first), *rest]
    try:
        for name in names:
            before, at = at, os.open(name, flags, dir_fd=at)
            if before is not None:
                os.close(before)
    except (OSError, ValueError):
        if at is not None:
            os.close(at)
        return None
    return at


@contextlib.contextmanager
def opened(path: Path, below: Path | None = None) -> Iterator[int]:
    """Yields the descriptor of a file opened with `open_regular`. Raises OSError."""
    fd = open_regular(path, below)
    if fd is None:
        raise FileNotFoundError(errno.ENOENT, "no regular file", str(path))
    try:
        yield fd
    finally:
        os.close(fd)


def read_bytes(
    path: Path, limit: int, offset: int | None = None, below: Path | None = None
) -> bytes:
    """Returns at most `limit` bytes from `offset` on, or b"" after an error.

    If `offset` is None, returns the last bytes. `below` has the same meaning as in `open_regular`.
    """
    with contextlib.suppress(OSError), opened(path, below) as fd:
        start = max(0, os.fstat(fd).st_size - limit) if offset is None else offset
        return os.pread(fd, limit, start)
    return b""


def size_bytes(path: Path) -> int:
    """Returns the size of a regular file in bytes, or 0 if it cannot be read."""
    with contextlib.suppress(OSError), opened(path) as fd:
        return os.fstat(fd).st_size
    return 0


HEAD_BYTES = 4096


def head(path: Path) -> str:
    """Returns a hash of a file's first line, or "" while that line is incomplete.

    The hash identifies a file of records, also in a copy and under another name.
    """
    if path.suffix == GZIP:
        unpacker = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        try:
            data = unpacker.decompress(read_bytes(path, PACKED_BYTES, 0), HEAD_BYTES)
        except zlib.error:
            return ""
    else:
        data = read_bytes(path, HEAD_BYTES, 0)
    first, end, _ = data.partition(b"\n")
    return hashlib.sha256(first).hexdigest()[:16] if end or len(data) == HEAD_BYTES else ""


class Line(NamedTuple):
    """One record, with the offset and the length of its line in bytes."""

    at: int
    length: int
    record: dict[str, Any]


def is_missing(path: Path) -> bool:
    """Returns whether nothing exists at a path; False if this is unknown."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


class Tail:
    """Follows one growing file of JSON lines.

    `accept` returns the record of a decoded object, or None if the line is to be skipped.
    `poll` returns the new records, and `poll_lines` also returns their places. To reach the end of
    a long file, call `poll` until `offset` no longer changes. Reading starts at `begin_at`; with
    `recent_bytes`, it starts that many bytes before the end. Holes are skipped. A replaced file is
    read from its start, unless `stays` is set.
    """

    def __init__(
        self, path: Path, accept: Callable[[dict[str, Any]], dict[str, Any] | None],
        recent_bytes: int | None = None, begin_at: int = 0, stays: bool = False,
    ):  # fmt: skip
        self.path = path
        self._stays = stays
        self.generation = 0
        """Number of times reading started; a replaced or truncated file is read again."""
        self.is_replaced = False
        """True if `stays` is set and another file is at the path; that file is not read."""
        self.line_at = self._begin_at = begin_at
        """`line_at` is the offset of the next line; all lines before it were returned."""
        self.left_out_bytes = 0
        """Bytes before the place where reading started."""
        self._recent_bytes = recent_bytes
        self.skipped = 0
        self.unread = False
        """True if the last poll could not read the file, although it exists or may exist."""
        self.size_bytes = 0
        self.offset = 0
        self.taken_bytes = 0
        """Number of bytes that were read; it is less than `offset` if a part was left out."""
        self._accept = accept
        self._identity: tuple[int, int] | None = None
        self._carry = b""
        self._overlong = False

    def poll(self, limit_bytes: int = READ_CHUNK_BYTES) -> list[dict[str, Any]]:
        """Returns the records since the last call; one call reads at most 1 MiB."""
        return [line.record for line in self.poll_lines(limit_bytes)]

    def poll_lines(self, limit_bytes: int = READ_CHUNK_BYTES) -> list[Line]:
        """Returns the records as `poll` does, each with its place in the file."""
        data = self._read(min(limit_bytes, READ_CHUNK_BYTES))
        if not data:
            return []
        found = []
        for at, line in self._complete_lines(data):
            # Zeros before a record come from a hole, or from a crash of the host.
            text = line.lstrip(b"\0")
            record = decode(text) if len(text) <= MAX_LINE_BYTES else None
            record = self._accept(record) if record is not None else None
            if record is not None:
                found.append(Line(at, len(line) + 1, record))
            elif line.strip():
                self.skipped += 1
        return found

    def _complete_lines(self, data: bytes) -> list[tuple[int, bytes]]:
        """Returns the complete lines with their offsets, and buffers the rest up to a limit."""
        *lines, self._carry = (self._carry + data).split(b"\n")
        placed = []
        for line in lines:
            placed.append((self.line_at, line))
            self.line_at += len(line) + 1
        if self._overlong and placed:
            placed, self._overlong = placed[1:], False
        if len(self._carry) > MAX_LINE_BYTES and self._carry[0] == 0:
            text = self._carry.lstrip(b"\0")
            self.line_at += len(self._carry) - len(text) - 1
            self._carry = b"\0" + text
        if len(self._carry) > MAX_LINE_BYTES:
            self.skipped += not self._overlong
            self.line_at += len(self._carry)
            self._carry, self._overlong = b"", True
        return placed

    def _read(self, limit_bytes: int) -> bytes:
        try:
            with opened(self.path) as fd:
                status = os.fstat(fd)
                identity = (status.st_dev, status.st_ino)
                other = self._identity is not None and identity != self._identity
                self.is_replaced = self._stays and other
                if self.is_replaced:
                    return b""
                if identity != self._identity or status.st_size < self.offset:
                    self._begin(identity, status.st_size)
                self.size_bytes = status.st_size
                if status.st_size - self.offset > MAX_LINE_BYTES:
                    self._skip_hole(fd, status.st_size)
                data = os.pread(fd, min(limit_bytes, status.st_size - self.offset), self.offset)
        except OSError:
            self.unread = not is_missing(self.path)
            return b""
        self.unread = False
        self.offset += len(data)
        self.taken_bytes += len(data)
        return data

    def _skip_hole(self, fd: int, size_bytes: int) -> None:
        """Continues reading after a hole. Raises OSError."""
        try:
            data_at = os.lseek(fd, self.offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno not in (errno.ENXIO, errno.EINVAL):
                raise
            data_at = size_bytes if error.errno == errno.ENXIO else self.offset
        if data_at > self.offset:
            self.skipped += bool(self._carry)
            self.offset = self.line_at = data_at
            self._carry, self._overlong = b"", False

    def _begin(self, identity: tuple[int, int], size_bytes: int) -> None:
        """Starts reading a new file at the path; a partial first line is left out.

        Reading begins one byte early, because a newline there shows that the first line is
        complete.
        """
        recent = size_bytes if self._recent_bytes is None else self._recent_bytes + 1
        self._identity, self._carry = identity, b""
        self.generation += 1
        self._begin_at = self._begin_at if self._begin_at <= size_bytes else 0
        self.left_out_bytes = 0 if self._begin_at else max(0, size_bytes - recent)
        self.offset = self.line_at = self._begin_at or self.left_out_bytes
        self._overlong = self.left_out_bytes > 0
        self._begin_at = 0


class GzipTail(Tail):
    """Reads a complete gzip file of JSON lines; `offset` is in compressed bytes.

    `begin_at` and the places of lines are in uncompressed bytes. Reading ends at damaged data, and
    `skipped` then increases by one.
    """

    def __init__(
        self, path: Path, accept: Callable[[dict[str, Any]], dict[str, Any] | None],
        begin_at: int = 0,
    ):  # fmt: skip
        super().__init__(path, accept, begin_at=begin_at)
        self._left, self._is_damaged = begin_at, False
        self._unpacker = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)

    def _read(self, limit_bytes: int) -> bytes:
        if self._unpacker.eof or self._is_damaged or limit_bytes <= 0:
            return b""
        try:
            with opened(self.path) as fd:
                self.size_bytes = os.fstat(fd).st_size
                packed = os.pread(fd, PACKED_BYTES, self.offset)
        except OSError:
            self.unread = not is_missing(self.path)
            return b""
        self.unread = False
        try:
            data = self._unpacker.decompress(packed, limit_bytes)
        except zlib.error:
            data = b""
            self._is_damaged = True
        self.offset += len(packed) - len(self._unpacker.unconsumed_tail)
        self._is_damaged |= not (data or self._unpacker.eof or self.offset < self.size_bytes)
        if self._unpacker.eof or self._is_damaged:
            self.offset, self.skipped = self.size_bytes, self.skipped + self._is_damaged
        self.taken_bytes += len(data)
        before, self._left = self._left, max(0, self._left - len(data))
        return data[before:]
