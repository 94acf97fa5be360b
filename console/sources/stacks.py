"""Finds and parses the stack dumps of faulthandler and `trainers.contract.dumps`.

Any text is accepted.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from console.sources.sanitize import clean
from trainers.contract import jsonl

MAX_DUMP_BYTES = 1 << 20
MAX_FRAMES = 200
MAIN = "main"
"""The name of the first thread of a dump."""
_FRAME = re.compile(r'\s*File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_THREAD = re.compile(r"(?:Current t|T)hread (?P<name>.+?)(?: \(most recent call first\))?:?\s*$")
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python3|^<")
_NAME = re.compile(r"stackdump_rank(?P<rank>\d+)_(?P<ms>\d+)\.txt")


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
    """The dump of one rank for one request, the main thread first."""

    rank: int
    ts: float
    path: str
    threads: tuple[Thread, ...]


def parse(text: str) -> tuple[Thread, ...]:
    """Returns the threads of a dump; if the text has several dumps, those of the last dump."""
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
    """Returns the newest requested dump of each rank from `since_ts` to `until_ts` (unix s)."""
    newest: dict[int, int] = {}
    wanted = set(ranks)
    try:
        names = os.listdir(run)
    except OSError:
        return {}
    for name in names:
        match = _NAME.fullmatch(name)
        in_time = match and since_ts <= int(match["ms"]) / 1000 <= until_ts
        if match and in_time and (rank := int(match["rank"])) in wanted:
            newest[rank] = max(newest.get(rank, 0), int(match["ms"]))
    stacks = {}
    for rank, ms in sorted(newest.items()):
        path = run / f"stackdump_rank{rank}_{ms}.txt"
        text = jsonl.read_bytes(path, MAX_DUMP_BYTES).decode("utf-8", "replace")
        if text:
            stacks[rank] = Stack(rank, ms / 1000, str(path), parse(text))
    return stacks
