"""The cost of the screen in a real pseudo-terminal, over the fixed workload of trace.py.

    python -m benchmarks.screen [--runs 5] [--idle 20] [--json]

Each start: processor time and wall time until the frame and until the data are on the terminal.
The last one continues: bytes, processor time and memory while it idles, then keys to repaint.
Processor time, bytes and memory are valid on a busy machine too; wall times only on a quiet one.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import re
import select
import statistics
import struct
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pyte

from benchmarks.common import publish, table
from benchmarks.trace import Trace
from trainers.contract import environ

ROOT = Path(__file__).resolve().parents[1]
FRAME, DATA = "q leave", "RUNNING"
KEYS = (
    ("3", b"VERDICT"),
    ("1", b"tok/s"),
    ("?", b"Keys in"),
    ("?", b"tok/s"),
    ("D", b"y yes"),
    ("n", b"tok/s"),
)
"""A key, and a part of the bytes that it causes."""
BUDGETS = {
    "cpu_to_frame_ms": 260, "frame_ms": 350, "bytes_per_s": 3000, "cpu_pct": 1.5, "rss_mib": 48,
    "key_p50_ms": 15, "key_p99_ms": 50,
}  # fmt: skip
_UNKNOWN = re.compile(rb"\x1b\[[<>=][0-9;:]*[A-Za-z]|\x1b\[\?[0-9;]*\$p|\x1bP[^\x1b]*\x1b\\")


class Terminal:
    """One program in a pty with an emulated screen."""

    def __init__(self, argv: Sequence[str], columns: int, rows: int):
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)
        self.bytes = 0
        self.newest = b""
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

    def pump(self, wait_s: float) -> bool:
        if not select.select([self.fd], [], [], wait_s)[0]:
            return False
        try:
            data = os.read(self.fd, 1 << 16)
        except OSError:
            return False
        self.bytes += len(data)
        self.newest += data
        self._stream.feed(_UNKNOWN.sub(b"", data))
        return True

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

    def press(self, key: str, answer: bytes, limit_s: float = 5.0) -> float:
        """Returns the seconds from a key to its answer, read from the bytes themselves."""
        self.newest = b""
        begin = time.perf_counter()
        self.send(key)
        while time.perf_counter() - begin < limit_s:
            if not select.select([self.fd], [], [], 0.05)[0]:
                continue
            data = os.read(self.fd, 1 << 16)
            self.newest += data
            self.bytes += len(data)
            if answer in self.newest:
                return time.perf_counter() - begin
        raise TimeoutError(f"{key!r} was not answered by {answer!r}")

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


def start_once(argv: Sequence[str], size: tuple[int, int]) -> tuple[Terminal, dict[str, float]]:
    """Starts the screen; returns it with its times to paint."""
    terminal = Terminal(argv, *size)
    terminal.wait(FRAME)
    found = {"frame_ms": (time.perf_counter() - terminal.started) * 1000,
             "cpu_to_frame_ms": terminal.cpu_s() * 1000}  # fmt: skip
    terminal.wait(DATA)
    found["data_ms"] = (time.perf_counter() - terminal.started) * 1000
    found["cpu_to_data_ms"] = terminal.cpu_s() * 1000
    return terminal, found


def idle(terminal: Terminal, seconds: float) -> dict[str, float]:
    terminal.drain(4.0)
    sent, used, begin = terminal.bytes, terminal.cpu_s(), time.perf_counter()
    terminal.drain(seconds)
    span = time.perf_counter() - begin
    return {"bytes_per_s": (terminal.bytes - sent) / span,
            "cpu_pct": (terminal.cpu_s() - used) / span * 100,
            "rss_mib": terminal.process.memory_info().rss / 2**20}  # fmt: skip


def keys(terminal: Terminal, presses: int) -> dict[str, float]:
    waits = []
    for _ in range(presses):
        for key, answer in KEYS:
            terminal.drain(0.15)
            waits.append(terminal.press(key, answer) * 1000)
    waits.sort()
    return {"key_p50_ms": waits[len(waits) // 2], "key_p99_ms": waits[int(0.99 * (len(waits) - 1))],
            "keys": float(len(waits))}  # fmt: skip


def measure(size: tuple[int, int], runs: int, idle_s: float, launch: Path) -> dict[str, float]:
    """Returns medians over the starts, and the idle and key figures of the last.

    A first start is not counted: it compiles modules once per machine.
    """
    argv = [sys.executable, "-m", "console", "watch", str(launch)]
    starts = []
    start_once(argv, size)[0].leave()
    for number in range(runs):
        terminal, found = start_once(argv, size)
        starts.append(found)
        if number < runs - 1:
            terminal.drain(0.5)
            terminal.leave()
    figures = {name: statistics.median(s[name] for s in starts) for name in starts[0]}
    figures |= idle(terminal, idle_s) | keys(terminal, 10)
    terminal.leave()
    return figures


def rows(results: dict[str, dict[str, float]]) -> list[tuple[str, ...]]:
    """Returns one row a figure: its name, the values at each size, the budget."""
    found = []
    for name in next(iter(results.values())):
        values = [f"{figures[name]:,.1f}" for figures in results.values()]
        budget = f"≤ {BUDGETS[name]:g}" if name in BUDGETS else "–"
        found.append((name.replace("_", " "), *values, budget))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--idle", type=float, default=20.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    results = {}
    with tempfile.TemporaryDirectory() as folder:
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
        table(("what", *results, "budget"), rows(results)),
        f"Medians of {options.runs} cold starts; idle over {options.idle:g} s; 60 key presses. "
        f"Load before: {load:.1f}. `frame` is the first picture, `data` the first figures of the "
        "run in it. Processor time, bytes and memory hold on a busy machine too, wall times and "
        "keys only on a quiet one.",
    )


if __name__ == "__main__":
    main()
