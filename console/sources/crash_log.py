"""Finds the cause of a crash in a log: an exception, and the place in faulthandler's dump.

The module also reads torchrun's summary of the ranks that failed.

All functions are pure. The log may contain anything; each text of a `Crash` is one clean line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from console.sources import stacks
from console.sources.sanitize import clean
from console.sources.stacks import MAIN, Frame

MAX_LINE = 2000
MAX_ERROR = 300
_RANK = re.compile(r"\[rank(\d{1,6})\]: ?")
_HEAD = "Traceback (most recent call last):"
_FRAME = re.compile(r'\s+File "(?P<file>[^"]*)", line (?P<line>\d{1,9})(?:, in .*)?')
_RAISED = re.compile(r"[A-Za-z_][\w.]*(?::(?: .*)?)?$")
_WITHOUT_TRACEBACK = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception): .*$")
_USAGE = re.compile(r"[\w.\-]+: error: .*$")
"""The last line of a usage error of argparse, for example for an unknown torchrun option."""
_USES = "usage: "
"""The start of argparse's usage text, which comes before the usage error."""
_NOT_FATAL = ("Exception ignored in", "Exception in thread")
"""Markers of a traceback that is printed without ending the process."""
_OF_TORCHRUN = ("ChildFailedError", "SignalException")
_CXX_TYPE = re.compile(r"terminate called after throwing an instance of '(.*)'")
_CXX_TEXT = re.compile(r"\s+what\(\): +(.*)")
_FATAL = "Fatal Python error: "
_FAILED = re.compile(
    rb"rank\s*:\s*(\d{1,6}) \(local_rank: \d+\)\s+exitcode\s*:\s*(-?\d{1,4}) \(pid: (\d{1,10})\)"
)
_ROOT_CAUSE = b"Root Cause (first observed failure):"


@dataclass(frozen=True, slots=True)
class Crash:
    """The error that probably ended a process; a field is "" if the log does not show it.

    `raised_at` is the place of the exception, for example "train.py:41". `crashed_in` is the place
    of a native crash according to faulthandler, for example "forward (model.py:88)". Both are the
    innermost place outside the libraries, or the innermost place if all are in libraries.
    """

    error: str = ""
    raised_at: str = ""
    crashed_in: str = ""


class _Raised(NamedTuple):
    error: str
    place: str = ""
    is_fatal: bool = True


class FailedRank(NamedTuple):
    """A rank in torchrun's summary; `is_root` is True if the summary calls it the root cause."""

    rank: int
    code: int
    pid: int
    is_root: bool


def failed_ranks(log: bytes) -> list[FailedRank]:
    """Returns the ranks in the summary that torchrun writes at the end of its log."""
    root, found = log.rfind(_ROOT_CAUSE), []
    for match in _FAILED.finditer(log):
        rank, code, pid = (int(group) for group in match.groups())
        found.append(FailedRank(rank, code, pid, match.start() > root >= 0))
    return found


def read(log: bytes, rank: int | None = None) -> Crash:
    """Returns the error in a log; with `rank`, lines with another rank as prefix are ignored."""
    lines = [
        line for raw in log.decode("utf-8", "replace").splitlines()
        if (line := _without_prefix(raw[:MAX_LINE], rank)) is not None
    ]  # fmt: skip
    found = _last_exception(lines)
    return Crash(clean(found.error, MAX_ERROR).strip(), found.place, _native_crash(lines))


def _without_prefix(line: str, rank: int | None) -> str | None:
    """Returns a line without its prefix "[rank1]: ", or None for a line of another rank."""
    prefix = _RANK.match(line)
    if prefix is None:
        return line
    return line[prefix.end() :] if rank is None or int(prefix[1]) == rank else None


def _last_exception(lines: list[str]) -> _Raised:
    """Returns a C++ exception, or else the last fatal exception, or else the last exception."""
    if thrown := _cxx_exception(lines):
        return thrown
    found = list(_exceptions(lines))
    fatal = [each for each in found if each.is_fatal]
    return (fatal or found or [_Raised("")])[-1]


def _cxx_exception(lines: Iterable[str]) -> _Raised | None:
    """Returns the first uncaught C++ exception that has a text, or None if there is none."""
    kind = ""
    for line in lines:
        if thrown := _CXX_TYPE.match(line):
            kind = thrown[1]
        elif kind and (text := _CXX_TEXT.match(line)):
            return _Raised(f"{kind}: {text[1]}")
    return None


def _exceptions(lines: Iterable[str]) -> Iterator[_Raised]:
    """Yields the Python exceptions and usage errors in a log, except exceptions of torchrun."""
    frames: list[Frame] | None = None
    """The frames of the traceback that is being read; None outside a traceback."""
    is_fatal, follows_usage = True, False
    for line in lines:
        is_indented = line[:1].isspace()
        is_usage = follows_usage and _USAGE.match(line)
        follows_usage = line.startswith(_USES) or (follows_usage and is_indented)
        if not is_indented and any(name in line for name in _OF_TORCHRUN):
            frames, is_fatal = None, True
        elif line.startswith(_NOT_FATAL):
            is_fatal = False
        elif line.startswith(_HEAD):
            frames = []
        elif frames is None:
            if _WITHOUT_TRACEBACK.match(line) or is_usage:
                yield _Raised(line)
        elif frame := _FRAME.match(line):
            frames.append(Frame(frame["file"], int(frame["line"]), ""))
        elif not is_indented and _RAISED.match(line):
            yield _Raised(line, _place(frames), is_fatal)
            frames, is_fatal = None, True


def _place(frames: list[Frame]) -> str:
    """Returns the value of `Crash.raised_at` for a traceback, for example "train.py:41"."""
    top = stacks.innermost_own(frames[::-1])
    return clean(top.place, 90) if top else ""


def _native_crash(lines: list[str]) -> str:
    """Returns the value of `Crash.crashed_in`, or "" without a stack of the crashed thread."""
    at = max((i for i, line in enumerate(lines) if line.startswith(_FATAL)), default=len(lines))
    threads = stacks.parse("\n".join(lines[at:]))
    top = stacks.innermost_own(threads[0].frames) if threads and threads[0].name == MAIN else None
    return f"{clean(top.function, 80)} ({clean(top.place, 90)})" if top else ""
