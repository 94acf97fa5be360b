"""Finds and parses stack dumps, and makes a dump of a process with py-spy.

faulthandler and `trainers.contract.dumps` write dumps in the same form. Text that is not a dump
causes no error. py-spy is used if the operator has installed it. With `--nonblocking`, it reads the
memory of the process and does not pause the process. The kernel must allow this, as it must for a
debugger.
"""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from console.sources.sanitize import clean
from trainers.contract import environ, jsonl, rundir

T = TypeVar("T")
MAX_DUMP_BYTES = 1 << 20
MAX_TRIES = 8
"""The most files of one rank that are tried until a file can be read."""
MAX_FRAMES = 200
MAIN = "main"
"""The name of the main thread or current thread of a dump."""
_FRAME = re.compile(r'\s*File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_THREAD = re.compile(r"(?:Current t|T)hread (?P<name>.+?)(?: \(most recent call first\))?:?\s*$")
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python3|^<")
_PID = re.compile(r"^=== .{0,20}\bpid (\d{1,9})", re.MULTILINE)
BY_PY_SPY = "_pyspy.txt"
"""The end of the name of a dump that py-spy made."""
COMMAND = '"$0" dump --nonblocking --json --pid "$1" | head -c 4194304'
MAX_THREADS, LEAST_S = 100, 0.05
ENOUGH_BYTES = MAX_DUMP_BYTES // 3
"""No further thread is added to a longer dump of py-spy; a thread has at most twice this size."""
_NAME = re.compile(r"stackdump_rank(?P<rank>[0-9]{1,9})_(?P<ms>[0-9]{1,16})(?:_pyspy)?\.txt")


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a stack."""

    file: str
    line: int
    function: str

    @property
    def place(self) -> str:
        """File name and line: "train.py:41"."""
        return f"{self.file.rpartition('/')[2]}:{self.line}"

    @property
    def short(self) -> str:
        """File name, line and function, for a table."""
        return f"{self.place} {self.function}"

    @property
    def is_of_library(self) -> bool:
        return bool(_LIBRARY.search(self.file))


@dataclass(frozen=True, slots=True)
class Thread:
    """One thread of a dump, its innermost frame first."""

    name: str
    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True)
class Stack:
    """One dump of one rank."""

    rank: int
    ts: float
    path: str
    threads: tuple[Thread, ...]
    pid: int = 0
    """The process of the dump, or 0 if the dump has no pid."""


def parse(text: str) -> tuple[Thread, ...]:
    """Returns the threads of the last dump in a text."""
    threads: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        frame = _FRAME.match(line)
        if frame is not None:
            if threads and len(threads[-1][1]) < MAX_FRAMES:
                threads[-1][1].append(
                    Frame(
                        clean(frame["file"], 400),
                        int(frame["line"][:9]),
                        clean(frame["function"], 200),
                    )
                )
        elif line.startswith(("Stack (most recent", "Current thread")):
            threads = [(MAIN, [])]
        elif (thread := _THREAD.match(line)) is not None:
            threads.append((clean(thread["name"], 100), []))
    return tuple(Thread(name, tuple(frames)) for name, frames in threads)


def innermost_own(frames: Sequence[Frame]) -> Frame | None:
    """Returns the innermost frame outside the libraries, or else the innermost frame of all."""
    top = frames[0] if frames else None
    return next((frame for frame in frames if not frame.is_of_library), top)


def latest(
    run: Path, ranks: Iterable[int], since_ts: float = 0.0, until_ts: float = math.inf
) -> dict[int, Stack]:
    """Returns the newest readable dump of each rank from `since_ts` to `until_ts` (unix s)."""

    def read(path: Path, rank: int, ts: float) -> Stack | None:
        text = jsonl.read_bytes(path, MAX_DUMP_BYTES).decode("utf-8", "replace")
        pid = int((_PID.findall(text) or [0])[-1])  # the last, as in `parse`
        return Stack(rank, ts, str(path), parse(text), pid) if text else None

    return newest_of(_NAME, read, run, ranks, since_ts, until_ts)


def newest_of(
    name: re.Pattern[str], read: Callable[[Path, int, float], T | None], run: Path,
    ranks: Iterable[int], since_ts: float, until_ts: float,
) -> dict[int, T]:  # fmt: skip
    """Returns the content of the newest readable file of each rank, in a span of time.

    `name` matches the rank and the time (ms); `read` returns the content, or None. At most
    `MAX_TRIES` files of a rank are tried.
    """
    left, found = dict.fromkeys(ranks, MAX_TRIES), dict[int, T]()
    names = filter(None, map(name.fullmatch, rundir.names(run) or []))
    for each in sorted(names, key=lambda each: -int(each["ms"])):
        rank, ts = int(each["rank"]), int(each["ms"]) / 1000
        if rank not in found and since_ts <= ts <= until_ts and left.get(rank, 0) > 0:
            left[rank] -= 1
            if (content := read(run / each[0], rank, ts)) is not None:
                found[rank] = content
    return found


# --- py-spy ------------------------------------------------------------------------------------


def py_spy_dump(pid: int, start_ticks: int | None, limit_s: float) -> str:
    """Returns the stacks of a process in the form of a dump, or "" if they are not available.

    The stacks are not available if the process with this pid did not start at `start_ticks`.
    """
    path = environ.get("PATH") or ""
    program = shutil.which("py-spy", path=path)
    is_known = start_ticks is not None and rundir.start_ticks(pid) == start_ticks
    if not (program and is_known) or limit_s < LEAST_S:
        return ""
    words = ["timeout", "--signal=KILL", f"{limit_s:.2f}", "sh", "-c", COMMAND, program, str(pid)]
    try:
        done = subprocess.run(
            words, env={"PATH": path}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True, check=False,
        )  # fmt: skip
    except OSError:
        return ""
    text = as_dump(done.stdout) if rundir.start_ticks(pid) == start_ticks else ""
    return text and f"=== pid {pid}, read by py-spy\n{text}"


def as_dump(output: bytes) -> str:
    """Returns the JSON output of py-spy in the form of a dump, or "" if it has no main thread."""
    threads = jsonl.entries(jsonl.decode(b'{"threads":%b}' % output) or {}, "threads")
    names = [jsonl.text(each, "thread_name") for each in threads]
    if "MainThread" not in names:
        return ""
    threads.insert(0, threads.pop(names.index("MainThread")))
    lines = list[str]()
    for each in threads[:MAX_THREADS]:
        if sum(len(line.encode()) for line in lines) > ENOUGH_BYTES:
            break
        name = clean(jsonl.text(each, "thread_name"), 100) or "0x"
        lines.append(f"{f'Thread {name}' if lines else 'Stack'} (most recent call first):")
        for frame in jsonl.entries(each, "frames")[:MAX_FRAMES]:
            file, function = (clean(jsonl.text(frame, key), 400) for key in ("filename", "name"))
            line = jsonl.integer(frame, "line") or 0
            lines.append(f'  File "{file}", line {line} in {function}')
    return "\n".join([*lines, ""])
