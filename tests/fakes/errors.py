"""Builds the library that makes calls on files fail, and selects the calls that fail."""

from __future__ import annotations

import errno
import re
import struct
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.fakes import compiled

SOURCE = Path(__file__).with_name("errors.c")
CONTROL = struct.Struct("=6i32s256s")
"""The layout of `struct control` in errors.c."""
CHANGING = re.compile(r"(?<![A-Za-z])[0-9a-f]{8,}(?![A-Za-z])|\d+")
"""Numbers and random words that differ from run to run."""
HANGS = "HANGS"
"""Used as an error: while the control is armed, each call waits, except on live files."""
SHORT = "SHORT"
"""Used as an error: a write writes only half of its data, and the next write gets ENOSPC."""
FULL = ("create", "write", "sync", "mkdir", "rename", "allocate", "send")
OPENING = ("open", "create", "list")
NUMBERS: Mapping[str, tuple[str, ...]] = {
    name: (
        "EIO", *["ENOSPC"] * (name in FULL), *["EMFILE"] * (name in OPENING),
        *[SHORT] * (name == "write"),
    )
    for name in (
        "open", "create", "read", "write", "send", "sync", "truncate", "allocate", "map", "stat",
        "fstat", "statvfs", "access", "rename", "unlink", "mkdir", "utime", "chmod", "list",
        "readdir",
    )
}  # fmt: skip
"""The errors of each call: EIO, those of a full disk or table of files, and half a write."""


def build(folder: Path) -> Path:
    """Compiles the library into `folder`."""
    return compiled(SOURCE, folder / "errors.so")


@dataclass(frozen=True, slots=True)
class Failure:
    """The `at`-th call of this name and file pattern fails; if `lasting`, later calls fail too."""

    call: str
    file: str
    number: str
    at: int = 1
    lasting: bool = False

    def __str__(self) -> str:
        which = f"{self.at}{' and all after it' if self.lasting else ''}"
        return f"{self.number} for {self.call} {self.file}, call {which}"


def environment(library: Path, control: Path, below: Path, record: Path) -> dict[str, str]:
    """Returns the variables of a process whose calls on files below a directory may fail."""
    return {
        "LD_PRELOAD": str(library), "ERRORS_CONTROL": str(control), "ERRORS_BELOW": str(below),
        "ERRORS_RECORD": str(record),
    }  # fmt: skip


def write(control: Path, failure: Failure | None, armed: bool = False) -> None:
    """Writes the next failure into `control`; until `armed`, no call fails or is recorded."""
    given = failure or Failure("", "", "")
    number = {HANGS: -1, SHORT: -2}.get(given.number) or getattr(errno, given.number, 0)
    data = CONTROL.pack(
        armed, 0, 0, number, given.at, given.lasting, given.call.encode(), given.file.encode()
    )
    control.touch()
    with control.open("r+b") as stream:
        stream.write(data)


def is_armed(control: Path) -> bool:
    return control.read_bytes()[:1] != b"\0"


def counts(control: Path) -> tuple[int, int]:
    """Returns the number of calls with the name and pattern in `control`, and of failures."""
    _, seen, failed, *_ = CONTROL.unpack(control.read_bytes())
    return seen, failed


def sites(record: Path) -> dict[tuple[str, str], int]:
    """Returns the number of calls in a record by call and file; `*` replaces `CHANGING`."""
    found: Counter[tuple[str, str]] = Counter()
    for line in record.read_text().splitlines():
        call, _, name = line.partition("\t")
        found[call, CHANGING.sub("*", name)] += 1
    return dict(sorted(found.items()))


def failures(
    of: Mapping[tuple[str, str], int], known: Collection[tuple[str, str]] = (), few: bool = False
) -> list[Failure]:
    """Returns each site with each of its errors: the first call, the second, the last, and all.

    A site in `known` gets only EIO: in the first call, the last, and all. With `few`, the sites in
    `known` are left out, and the other sites get their errors in the first call, and in all.
    """
    found: list[Failure] = []
    for (call, name), count in of.items():
        is_known = (call, name) in known
        if few and is_known:
            continue
        for number in NUMBERS[call][: 1 if is_known else None]:
            places = sorted({1, count} if is_known else {1, min(2, count), count})
            places = [1] if few else places
            found += [Failure(call, name, number, at) for at in places]
            found.append(Failure(call, name, number, lasting=True))
    return found
