"""Follows growing files of JSON lines, and reads complete compressed files.

A `Tail` buffers the unfinished last line, skips and counts lines that are not records, detects
truncation and replacement, and reads a limited number of bytes at a time.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainers.contract import jsonl

READ_CHUNK_BYTES = 1 << 20
PACKED_BYTES = 1 << 16
"""The most compressed bytes that are read at a time."""
Record = dict[str, Any]


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

    `accept` turns a decoded object into a record, or returns None to skip the line. By default the
    object is the record. To reach the end of a long file, call `poll` until `offset` no longer
    changes. Reading starts at most `again_bytes` before the line at `begin_at`. If `begin_at` is 0,
    reading starts at the start, or with `recent_bytes` at most this many bytes before the end. Long
    holes are skipped. A replaced or truncated file is read as if `begin_at` were 0. With `stays`, a
    replaced file is not read.
    """

    def __init__(
        self, path: Path, accept: Callable[[Record], Record | None] = lambda record: record,
        recent_bytes: int | None = None, begin_at: int = 0, stays: bool = False, part: int = 0,
        again_bytes: int = 0,
    ):  # fmt: skip
        self.path, self.part, self._again_bytes = path, part, again_bytes
        self._stays = stays
        self.generation = 0
        """Number of times that reading started."""
        self.is_replaced = False
        """True if `stays` is set and another file is at the path; that file is not read."""
        self.counts_from = begin_at
        """Lines before this place were counted by an earlier reader."""
        self.line_at = self._begin_at = begin_at
        """`line_at` is the offset of the next line; earlier lines were returned or skipped."""
        self.left_out_bytes = 0
        """Bytes before the place where reading started, or 0 if reading started at `begin_at`."""
        self._recent_bytes = recent_bytes
        self.skipped = 0
        self.unread = False
        """True if the last poll could not read the file, although it exists or may exist."""
        self.size_bytes = 0
        self.offset = 0
        self.taken_bytes = 0
        """Number of bytes that were read; for a compressed file, the unpacked bytes."""
        self._accept = accept
        self._identity: tuple[int, int] | None = None
        self._carry = b""
        self._overlong = False

    def poll(self, limit_bytes: int = READ_CHUNK_BYTES) -> list[Record]:
        """Returns the next records; one call reads at most 1 MiB."""
        data = self._read(min(limit_bytes, READ_CHUNK_BYTES))
        if not data:
            return []
        found = []
        for at, line in self._complete_lines(data):
            # Zeros before a record come from a hole, or from a crash of the host.
            text = line.lstrip(b"\0")
            record = jsonl.decode(text) if len(text) <= jsonl.MAX_LINE_BYTES else None
            record = self._accept(record) if record is not None else None
            if record is not None:
                found.append(record)
            elif line.strip():
                self.skipped += at >= self.counts_from
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
        if len(self._carry) > jsonl.MAX_LINE_BYTES and self._carry[0] == 0:
            text = self._carry.lstrip(b"\0")
            self.line_at += len(self._carry) - len(text) - 1
            self._carry = b"\0" + text
        if len(self._carry) > jsonl.MAX_LINE_BYTES:
            self.skipped += not self._overlong
            self.line_at += len(self._carry)
            self._carry, self._overlong = b"", True
        return placed

    def _read(self, limit_bytes: int) -> bytes:
        try:
            with jsonl.opened(self.path) as fd:
                status = os.fstat(fd)
                identity = (status.st_dev, status.st_ino)
                other = self._identity is not None and identity != self._identity
                self.is_replaced = self._stays and other
                if self.is_replaced:
                    return b""
                if identity != self._identity or status.st_size < self.offset:
                    self._begin(identity, status.st_size)
                self.size_bytes = status.st_size
                if status.st_size - self.offset > jsonl.MAX_LINE_BYTES:
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
        """Skips a hole at the offset, if there is one. Raises OSError."""
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
        """Starts reading the file at the path; a partial first line is left out.

        Reading begins one byte early, because a newline there shows that the first line is
        complete.
        """
        recent = size_bytes if self._recent_bytes is None else self._recent_bytes + 1
        self._identity, self._carry = identity, b""
        self.generation += 1
        begin_at = self._begin_at if self._begin_at <= size_bytes else 0
        self.left_out_bytes = 0 if begin_at else max(0, size_bytes - recent)
        again_at = max(0, begin_at - self._again_bytes - 1)
        self.offset = self.line_at = again_at or self.left_out_bytes
        self._overlong = self.offset > 0
        self._begin_at, self.counts_from = 0, begin_at


class GzipTail(Tail):
    """Reads a complete gzip file of JSON lines; `offset` is in compressed bytes.

    `begin_at` and the places of lines are in uncompressed bytes. Reading ends at damaged data, and
    `skipped` then increases by one.
    """

    def __init__(self, path: Path, begin_at: int, part: int):
        super().__init__(path, begin_at=begin_at, part=part)
        self._left, self._is_damaged = begin_at, False
        self._unpacker = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)

    def _read(self, limit_bytes: int) -> bytes:
        if self._unpacker.eof or self._is_damaged or limit_bytes <= 0:
            return b""
        try:
            with jsonl.opened(self.path) as fd:
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
