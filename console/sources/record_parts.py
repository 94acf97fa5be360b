"""Names the older parts of record files and logs, and identifies record files by a hash."""

from __future__ import annotations

import hashlib
import os
import re
import zlib
from pathlib import Path

from trainers.contract import jsonl

GZIP = ".gz"
PACKED_BYTES, HEAD_BYTES = 1 << 16, 4096
PART = re.compile(r"\.([0-9]{4,9})(\.gz)?")


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


def rotated_log(log: Path) -> Path:
    """Returns the path of the rotated file of a log."""
    return log.with_name(f"{log.name}.1")


def head(path: Path) -> str:
    """Returns a hash of a file's first line, or "" if the line is incomplete or cannot be read.

    The hash covers at most `HEAD_BYTES`. It identifies a file of records, also in a copy and under
    another name.
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
