"""The time that an operator waits for an answer: `python -m benchmarks.answers`.

A time runs from the key or the signal until the screen of an 80×24 terminal shows the answer. Only
the time of the halt runs until the files of the run show the halt. The run has two CPU ranks.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.common import ROOT, median, publish, table
from console.sources.run import RunSource
from tests.terminal import Terminal
from trainers.contract import rundir

PLAN = ROOT / "tests" / "e2e" / "main_job.yaml"
BUDGETS_S = {
    "launch key to the first live figures": 15.0,
    "one rank stopped (SIGSTOP) to its rank and phase named": 20.0,
    "the rank resumes (SIGCONT) to the alert cleared": 20.0,
    "dump key to both ranks' stacks": 5.0,
    "halt key to both ranks halted with a checkpoint": 15.0,
}
"""The measured waits, with the budget of each in seconds."""


def once() -> list[float]:
    """Plays one operator's session and returns its waits in the order of `BUDGETS_S`."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        words = [sys.executable, "-m", "console", "--root", str(root), "--plan", str(PLAN)]
        with Terminal(words, ROOT) as terminal:
            terminal.wait("main_job")
            terminal.press("L")
            terminal.wait("Launch main_job?")
            times = [_timed(terminal, lambda: terminal.press("y"), _figures)]
            terminal.wait("plumbing", 60)
            source = RunSource(next(root.glob("*/*")))
            _until(terminal, lambda _: _waits(source))
            terminal.press("L")
            terminal.wait("Start phase plumbing?")
            terminal.press("y")
            _until(terminal, lambda _: (source.poll().step or 0) > 20)
            state = source.poll()
            pid = next(rank.pid for rank in state.ranks if rank.rank == 1)
            assert pid is not None
            times += [
                _timed(terminal, lambda: os.kill(pid, signal.SIGSTOP), _named),
                _timed(terminal, lambda: os.kill(pid, signal.SIGCONT), lambda t: not _named(t)),
            ]
            terminal.press("3", "D")
            terminal.wait("Dump the stacks")
            times.append(_timed(terminal, lambda: terminal.press("y"), _stacks))
            terminal.press("1", "H")
            terminal.wait("Halt this run")
            times.append(
                _timed(terminal, lambda: terminal.press("y"), lambda _: _halted(Path(state.path)))
            )
            terminal.press("q")
            terminal.wait_exit()
    return times


def _figures(terminal: Terminal) -> bool:
    text = terminal.text
    return "tok/s" in text and "loss" in text and "5." in text


def _named(terminal: Terminal) -> bool:
    return "rank 1" in terminal.text and "stopped" in terminal.text


def _waits(source: RunSource) -> bool:
    launch = source.poll().launch
    return launch is not None and launch.state == "waiting"


def _stacks(terminal: Terminal) -> bool:
    return terminal.text.count(".py:") >= 6


def _halted(run: Path) -> bool:
    supervisor = rundir.read_json(run / rundir.SUPERVISOR) or {}
    latest = run / rundir.CHECKPOINTS / rundir.LATEST
    return supervisor.get("state") == "halted" and latest.exists()


def _timed(
    terminal: Terminal, act: Callable[[], object], seen: Callable[[Terminal], bool]
) -> float:
    began = time.monotonic()
    act()
    _until(terminal, seen)
    return time.monotonic() - began


def _until(
    terminal: Terminal, seen: Callable[[Terminal], bool], hang_guard_s: float = 120.0
) -> None:
    end = time.monotonic() + hang_guard_s
    while not seen(terminal):
        if time.monotonic() > end:
            raise TimeoutError(f"the console gave no answer:\n{terminal.text}")
        terminal.pump(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    sessions = [once() for _ in range(repeats)]
    rows = [
        (what, f"{median(times):.1f}", f"{max(times):.1f}", f"≤ {budget:g}")
        for (what, budget), times in zip(
            BUDGETS_S.items(), zip(*sessions, strict=True), strict=True
        )
    ]
    publish(
        "answers",
        "Time until an operator sees the answer",
        table(("from … to …", "median s", "worst s", "budget s"), rows),
        f"{repeats} sessions by keyboard in an 80×24 terminal, each on a two-rank CPU run.",
    )


if __name__ == "__main__":
    main()
