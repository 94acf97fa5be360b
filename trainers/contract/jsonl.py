"""Encodes and decodes JSON lines, opens files safely, and reads typed fields."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

MAX_HEARTBEAT_BYTES = 4096
MAX_LINE_BYTES = 1 << 18
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
    """Returns a value that JSON cannot encode (for example a tensor) as a number, or as text."""
    try:
        return _plain(float(value))
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return str(value)[:200]


def encode(record: Mapping[str, Any]) -> bytes:
    """Returns one line with its newline; non-finite floats become "nan", "inf", "-inf".

    A value of an unknown type becomes a number or text, so that the writing thread continues.
    """
    try:
        text = json.dumps(record, separators=(",", ":"), allow_nan=False, default=_foreign)
    except (TypeError, ValueError):  # TypeError for a key of an unknown type
        text = json.dumps(_plain(record), separators=(",", ":"), allow_nan=False, default=_foreign)
    return text.encode("ascii") + b"\n"


def decode(line: bytes) -> dict[str, Any] | None:
    """Returns the JSON object in some bytes, or None for any other content."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def number(record: Mapping[str, Any], key: str) -> float | None:
    """Returns `record[key]` as a float if it is a number or a text in `NONFINITE`, or else None."""
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
    """Returns `record[key]` if it is an integer above -2^63 and below 2^63, or else None."""
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
    """Opens a regular file for reading; returns None for anything else, or on error.

    With `below`, the directories between `below` and the file must not be links either.
    """
    fd = open_inside(path, below)
    if fd is None:
        return None
    with contextlib.suppress(OSError):  # an error of fstat: the type is not available
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
    os.close(fd)
    return None


def open_inside(path: Path, below: Path | None) -> int | None:
    """Opens `path`; returns None if that fails, or if `path` is a link.

    With `below`, the directories between `below` and `path` must not be links either.
    """
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
