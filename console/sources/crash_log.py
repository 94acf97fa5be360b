"""Reads the last traceback, or faulthandler's text, at the end of a process's log.

Pure functions over the end of a log. The text may be anything: what comes out is one clean line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from console.sources import stacks
from console.sources.sanitize import clean
from console.sources.stacks import MAIN, Frame

MAX_LINE = 2000
MAX_ERROR = 300
_RANK = re.compile(r"\[rank(\d{1,6})\]: ?")
_HEAD = "Traceback (most recent call last):"
_FRAME = re.compile(r'\s+File "(?P<file>[^"]*)", line (?P<line>\d{1,9})(?:, in .*)?')
_RAISED = re.compile(r"[A-Za-z_][\w.]*(?::(?: .*)?)?$")
_ALONE = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception): .*$")
_ASIDE = ("Exception ignored in", "Exception in thread")
"""Before tracebacks that end nothing."""
_OF_TORCHRUN = ("ChildFailedError", "SignalException")
_THROWN = re.compile(r"terminate called after throwing an instance of '(.*)'")
_WHAT = re.compile(r"\s+what\(\): +(.*)")
_FATAL = "Fatal Python error: "


@dataclass(frozen=True, slots=True)
class LastWords:
    """The last error in a log; every field is "" when the log has none.

    `at` is "train.py:41", where the exception was raised; `fatal_at` is "forward (model.py:88)",
    where faulthandler saw the process end. Both are the innermost place that is not in a library,
    or the innermost of all.
    """

    error: str = ""
    at: str = ""
    fatal_at: str = ""


def read(log: bytes, rank: int | None = None) -> LastWords:
    """Returns the last words in a log; of a shared log only what `rank` or nobody signed."""
    lines = [
        line for raw in log.decode("utf-8", "replace").splitlines()
        if (line := _own(raw[:MAX_LINE], rank)) is not None
    ]  # fmt: skip
    error, at = _last_exception(lines)
    return LastWords(clean(error, MAX_ERROR).strip(), at, _fatal(lines))


def _own(line: str, rank: int | None) -> str | None:
    signed = _RANK.match(line)
    if signed is None:
        return line
    return line[signed.end() :] if rank is None or int(signed[1]) == rank else None


def _last_exception(lines: Iterable[str]) -> tuple[str, str]:
    """Returns the last exception and where it was raised; one that was ignored only alone.

    What C++ threw and nobody caught ends the process: nothing after it counts.
    """
    last = aside = ("", "")
    frames: list[Frame] | None = None
    ignored, thrown = False, ""
    for line in lines:
        if not line[:1].isspace() and any(word in line for word in _OF_TORCHRUN):
            frames, ignored = None, False
        elif line.startswith(_ASIDE):
            ignored = True
        elif line.startswith(_HEAD):
            frames = []
        elif frames is not None and (frame := _FRAME.match(line)):
            frames.append(Frame(frame["file"], int(frame["line"]), ""))
        elif frames is not None and not line[:1].isspace() and _RAISED.match(line):
            if ignored:
                aside = line, _place(frames)
            else:
                last = line, _place(frames)
            frames, ignored = None, False
        elif thread := _THROWN.match(line):
            thrown = thread[1]
        elif thrown and (what := _WHAT.match(line)):
            return f"{thrown}: {what[1]}", ""
        elif frames is None and _ALONE.match(line):
            last = line, ""
    return last if last[0] else aside


def _place(frames: list[Frame]) -> str:
    """Returns the innermost place of a traceback that is not in a library: "train.py:41"."""
    top = stacks.own(frames[::-1])
    return clean(top.place, 90) if top else ""


def _fatal(lines: list[str]) -> str:
    """Returns where the thread was that died, as faulthandler says it; "" where it does not."""
    at = max((i for i, line in enumerate(lines) if line.startswith(_FATAL)), default=len(lines))
    threads = stacks.parse("\n".join(lines[at:]))
    top = stacks.own(threads[0].frames) if threads and threads[0].name == MAIN else None
    return f"{clean(top.function, 80)} ({clean(top.place, 90)})" if top else ""
