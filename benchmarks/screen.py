"""The cost of the screen in a real pseudo-terminal, with the fixed workload of trace.py.

    python -m benchmarks.screen [--runs 5] [--idle 20] [--json]

The times of a start are CPU and wall times until the frame and until the data are on the terminal.
After the last start, bytes, CPU time and memory are measured while the screen idles, and then the
times of keys. A bare Textual program (bare.py) is measured in turn with the screen. Some
budgets are multiples of the times of the bare program, because these show how fast the machine is.
Bytes and memory are valid on a busy machine too; times only on a quiet machine.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import re
import select
import struct
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pyte

from benchmarks.common import median, publish, quantile, table
from benchmarks.trace import Trace
from trainers.contract import environ

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = ("console", "bare", "ratio")
PRESSES = 10
Figures = dict[str, float]
Key = tuple[str, str, bool]
"""A key, a text, and whether the key shows the text or removes it."""


@dataclass(frozen=True)
class Program:
    """A program to measure: its arguments and its keys.

    `frame` is a text of its first picture, and `data` is a text that appears with its data.
    """

    argv: tuple[str, ...]
    frame: str
    data: str
    keys: tuple[Key, ...]


BARE = Program(
    (sys.executable, "-m", "benchmarks.bare"), "q leave", "first even",
    (("r", "first odd", True), ("r", "first even", True), ("s", "second even", True),
     ("r", "second odd", True), ("r", "second even", True), ("s", "first even", True)),
)  # fmt: skip
OURS = Program(
    (sys.executable, "-m", "console", "watch"), "q leave", "RUNNING",
    (("3", "VERDICT", True), ("1", "tok/s", True), ("?", "Keys in", True), ("?", "Keys in", False),
     ("D", "y yes", True), ("n", "y yes", False)),
)  # fmt: skip
LIMITS = {"bytes_per_s": 3000, "cpu_pct": 1.5, "rss_mib": 48, "key_p99_ms": 50}
RATIOS = {"cpu_to_frame_ms": 1.4, "key_p50_ms": 2}
"""The absolute budgets, and the budgets as multiples of the bare Textual program."""
QUIET_S = 0.15
"""Seconds without output after which the answer to a key is complete."""
_UNKNOWN = re.compile(rb"\x1b\[[<>=][0-9;:]*[A-Za-z]|\x1b\[\?[0-9;]*\$p|\x1bP[^\x1b]*\x1b\\")


class Terminal:
    """One program in a pty with an emulated screen."""

    def __init__(self, argv: Sequence[str], columns: int, rows: int):
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)
        self.bytes = 0
        self.started = time.perf_counter()
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            variables = environ.snapshot()
            variables.pop("PYTHONDONTWRITEBYTECODE", None)
            variables |= {"TERM": "xterm-256color", "COLORTERM": "truecolor", "LC_ALL": "C.UTF-8"}
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
            os.chdir(ROOT)
            os.execve(argv[0], list(argv), variables)
        self.process = psutil.Process(self.pid)
        self.read_at, self.read_cpu_s = self.started, 0.0
        """The time of the newest read, and the CPU time that the program had used by then."""

    def pump(self, wait_s: float) -> bool:
        if not select.select([self.fd], [], [], wait_s)[0]:
            return False
        try:
            data = os.read(self.fd, 1 << 16)
        except OSError:
            return False
        self.read_at, self.read_cpu_s = time.perf_counter(), self.cpu_s()
        self._draw(data)
        return True

    def _draw(self, data: bytes) -> None:
        self.bytes += len(data)
        self._stream.feed(_UNKNOWN.sub(b"", data))

    def shows(self, text: str) -> bool:
        return any(text in line for line in self.screen.display)

    def wait(self, text: str, shown: bool = True, limit_s: float = 20.0) -> float:
        """Returns the seconds until `text` is (or is no longer) on the screen."""
        begin = time.perf_counter()
        while self.shows(text) != shown:
            if time.perf_counter() - begin > limit_s:
                raise TimeoutError("\n".join(self.screen.display))
            self.pump(0.05)
        return time.perf_counter() - begin

    def press(self, key: Key, limit_s: float = 5.0) -> float:
        """Returns the seconds from a key to its answer on the screen.

        The bytes are read with their times first and drawn on the emulated screen afterwards, so
        that the emulator's own time does not count.
        """
        name, text, shown = key
        begin = time.perf_counter()
        self.send(name)
        while time.perf_counter() - begin < limit_s:
            read: list[tuple[float, bytes]] = []
            while select.select([self.fd], [], [], QUIET_S)[0]:
                data = os.read(self.fd, 1 << 16)
                read.append((time.perf_counter() - begin, data))
            answered = None
            for at, data in read:
                self._draw(data)
                if answered is None and self.shows(text) == shown:
                    answered = at
            if answered is not None:
                return answered
        raise TimeoutError(f"no answer to {name!r}: {text!r} {'not' if shown else 'still'} shown")

    def drain(self, seconds: float) -> None:
        end = time.perf_counter() + seconds
        while (left := end - time.perf_counter()) > 0:
            self.pump(min(left, 0.2))

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return times.user + times.system

    def send(self, keys: str) -> None:
        os.write(self.fd, keys.encode())

    def leave(self) -> None:
        self.send("q")
        while self.pump(0.5):
            pass
        os.waitpid(self.pid, 0)
        os.close(self.fd)


def start_once(program: Program, size: tuple[int, int]) -> tuple[Terminal, dict[str, float]]:
    """Starts a program; returns its terminal, and the times until its frame and its data."""
    terminal = Terminal(program.argv, *size)
    found = {}
    for name, text in (("frame", program.frame), ("data", program.data)):
        terminal.wait(text)
        found[f"{name}_ms"] = (terminal.read_at - terminal.started) * 1000
        found[f"cpu_to_{name}_ms"] = terminal.read_cpu_s * 1000
    return terminal, found


def idle(terminal: Terminal, seconds: float) -> dict[str, float]:
    terminal.drain(4.0)
    sent, used, begin = terminal.bytes, terminal.cpu_s(), time.perf_counter()
    terminal.drain(seconds)
    span = time.perf_counter() - begin
    return {"bytes_per_s": (terminal.bytes - sent) / span,
            "cpu_pct": (terminal.cpu_s() - used) / span * 100,
            "rss_mib": terminal.process.memory_info().rss / 2**20}  # fmt: skip


def key_times(waits: Sequence[float]) -> dict[str, float]:
    return {"key_p50_ms": quantile(waits, 0.5) * 1000, "key_p99_ms": quantile(waits, 0.99) * 1000,
            "keys": float(len(waits))}  # fmt: skip


def measure(size: tuple[int, int], runs: int, idle_s: float, launch: Path) -> list[Figures]:
    """Returns the figures of the screen and of the bare program, which run in turn.

    The figures of the start are medians over `runs` starts. The idle and key figures are those of
    the last start. An additional first start is not counted, because it compiles modules.
    """
    programs = (replace(OURS, argv=(*OURS.argv, str(launch))), BARE)
    starts: tuple[list[Figures], ...] = ([], [])
    last: list[Terminal] = []
    for number in range(runs + 1):
        for program, held in zip(programs, starts, strict=True):
            terminal, found = start_once(program, size)
            if number:
                held.append(found)
            if number == runs:
                last.append(terminal)
            else:
                terminal.drain(0.5)
                terminal.leave()
    figures = [{name: median([s[name] for s in held]) for name in held[0]} for held in starts]
    for terminal, found in zip(last, figures, strict=True):
        found |= idle(terminal, idle_s)
    waits: tuple[list[float], ...] = ([], [])
    for _ in range(PRESSES):
        for terminal, program, held in zip(last, programs, waits, strict=True):
            terminal.drain(QUIET_S)
            held += map(terminal.press, program.keys)
    for terminal, found, held in zip(last, figures, waits, strict=True):
        found |= key_times(held)
        terminal.leave()
    return figures


def rows(results: dict[str, list[Figures]]) -> list[tuple[str, ...]]:
    """Returns a row per figure: name; ours, bare and ratio for each size; budget."""
    found = []
    for name in next(iter(results.values()))[0]:
        cells = [cell for pair in results.values() for cell in _cells(name, *pair)]
        budget = f"≤ {LIMITS[name]:g}" if name in LIMITS else "–"
        budget = f"≤ {RATIOS[name]:g} × bare" if name in RATIOS else budget
        found.append((name.replace("_", " "), *cells, budget))
    return found


def _cells(name: str, ours: Figures, bare: Figures) -> tuple[str, str, str]:
    ratio = f"{ours[name] / bare[name]:.2f}" if name.endswith("_ms") else "–"
    return f"{ours[name]:,.1f}", f"{bare[name]:,.1f}", ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--idle", type=float, default=20.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    results: dict[str, list[Figures]] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        trace = Trace(Path(folder) / "bench" / "20260101-000000")
        trace.write_documents()
        trace.write_backlog(60)
        threading.Thread(target=trace.play, args=(36_000.0,), daemon=True).start()
        for size in ((80, 24), (120, 40)):
            name = f"{size[0]}×{size[1]}"
            results[name] = measure(size, options.runs, options.idle, trace.launch)
    if options.json:
        print(json.dumps(results, indent=1))
        return
    publish(
        "screen",
        "What the screen costs",
        table(
            ("what", *(f"{size} {each}" for size in results for each in COLUMNS), "budget"),
            rows(results),
        ),
        f"Medians of {options.runs} starts; idle over {options.idle:g} s; {6 * PRESSES} key "
        f"presses each. Load before: {load:.1f}. `bare` is benchmarks/bare.py, a Textual program "
        "with header, text and footer that reads nothing, measured in turn with the console; four "
        "of its six keys change the text, two the screen. Budgets with `×` are ratios to `bare`. "
        "`frame` is the first picture, `data` the first with the state of the run. Bytes and "
        "memory are valid on a busy machine too, times only on a quiet machine.",
    )


if __name__ == "__main__":
    main()
