"""`nsa-console drill`: launches a small run with one fault; scores verdict and reaction."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from console import actions, status_text
from console.action_table import NEUTRAL
from console.actions import LaunchOptions
from console.commands.output import Changes, is_terminal, print_error, print_line, show
from console.plans import catalog
from console.sources import launches, verdicts
from console.sources.process import command, program
from console.sources.run import RunSource
from console.sources.sanitize import clean
from trainers.contract import jsonl, rundir
from trainers.contract.drill_kinds import KINDS, Drill, Truth
from trainers.contract.errors import ContractError, UsageError, did_you_mean

PLAN = catalog.PROJECT / "configs" / "drill.yaml"
FOLDER = "drills"
"""The folder of drills in the root; its launches are too deep for `latest` to find them."""
POLL_S = 0.5
FAULT_STEP = 10
"""The step in which the fault begins."""
MAX_PROCESSES = 16
READ_BYTES = 1 << 20
"""The most bytes of a file that are read. The fault is at the beginning of the heartbeat."""
MAX_VERDICTS = 256
STARTUP_S, ENDED_S, ANSWER_S = 300.0, 60.0, 15.0
BY = "drill"
"""The sender of the drill's own requests begins with this word and a space."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Score:
    """The results that the files of a drill show so far.

    `fault_ts` is in unix seconds. The other times are in seconds after the fault.
    """

    drill: Drill
    truth: Truth
    fault_ts: float | None = None
    said: str = ""
    """The text of the verdict, alert or end of the run that is scored, or "" if there is none."""
    shown_s: float | None = None
    right_rank: bool = False
    right_phase: bool = False
    right_cause: bool = False
    actions: tuple[tuple[str, float], ...] = ()
    over: bool = False

    @property
    def reaction(self) -> tuple[str, float] | None:
        """The first action that is not neutral, with its time, or None."""
        return next((each for each in self.actions if each[0] not in NEUTRAL), None)

    @property
    def right_reaction(self) -> bool:
        return not self.truth.right or (
            self.reaction is not None and self.reaction[0] in self.truth.right
        )

    @property
    def right_verdict(self) -> bool:
        return self.right_rank and self.right_phase and self.right_cause

    @property
    def passed(self) -> bool:
        return self.right_verdict and self.right_reaction

    @property
    def done(self) -> bool:
        return self.over or (self.right_verdict and (not self.truth.right or bool(self.reaction)))

    def lines(self) -> Iterator[str]:
        """Yields the score as lines of text."""
        yes = {True: "yes", False: "no"}
        if self.fault_ts is None:
            yield "fault     did not happen"
            return
        yield f"fault     {self.drill} at {status_text.clock(self.fault_ts)}"
        after = "not correct" if self.shown_s is None else f"correct after {self.shown_s:.1f} s"
        yield f"verdict   {after}: {self.said or 'none'}"
        yield (f"correct   rank: {yes[self.right_rank]}, phase: {yes[self.right_phase]}, "
               f"cause: {yes[self.right_cause]}")  # fmt: skip
        if not self.truth.right:
            yield "reaction  not needed"
        else:
            found = (
                f"{self.reaction[0]} after {self.reaction[1]:.1f} s" if self.reaction else "none"
            )
            wanted = " or ".join(self.truth.right)
            result = "correct" if self.right_reaction else f"not correct; correct: {wanted}"
            yield f"reaction  {found}: {result}"
        yield f"score     {'passed' if self.passed else 'failed'}"


def drill(options: argparse.Namespace) -> int:
    """Lists the faults; or launches a run with one fault, stops the run and prints the score."""
    if options.fault is None:
        rows = [{"name": name, "about": kind.about, "truth": asdict(kind.truth)}
                for name, kind in KINDS.items()]  # fmt: skip
        show(options.json, rows, (f"{name:<9} {kind.about}" for name, kind in KINDS.items()))
        return 0
    fault = _chosen(options)
    launch_options = LaunchOptions(
        plan=str(PLAN), flags={"NSA_DRILL": str(fault)}, nproc=options.nproc,
        root=options.root / FOLDER,
    )  # fmt: skip
    prepared = actions.prepare(launch_options)
    _on_signals(_ignore)
    path = actions.begin(prepared, f"{BY} {actions.who()}")
    try:
        with contextlib.suppress(KeyboardInterrupt):
            _on_signals(_interrupt)
            _practise(path, fault, options)
        _on_signals(_ignore)
        score = read_score(path, fault)
    finally:
        _on_signals(_ignore)
        _end(path)
    record = asdict(score) | {
        "drill": str(fault), "id": launches.launch_id(path), "path": str(path),
        "reaction": score.reaction and score.reaction[0], "passed": score.passed,
        "right_reaction": score.right_reaction, "exit_code": int(not score.passed),
    }  # fmt: skip
    show(options.json, record, map(clean, score.lines()))
    return int(not score.passed)


def _interrupt(*_: object) -> None:
    """Ends the drill. Later signals are ignored, so that the drill can end its run."""
    _on_signals(_ignore)
    raise KeyboardInterrupt


def _ignore(*_: object) -> None:
    """Ignores a signal. Unlike SIG_IGN, this handler is not inherited by started processes."""


def _on_signals(handler: Callable[..., None]) -> None:
    for number in SIGNALS:
        signal.signal(number, handler)


def _chosen(options: argparse.Namespace) -> Drill:
    """Returns the fault that the options select. Raises UsageError."""
    kind = KINDS.get(options.fault)
    if kind is None:
        raise UsageError(f"there is no drill {options.fault!r}{did_you_mean(options.fault, KINDS)}")
    rank = options.nproc - 1 if options.rank is None else options.rank
    if not kind.least_ranks <= options.nproc <= MAX_PROCESSES or rank >= options.nproc:
        raise UsageError(
            f"drill {options.fault} --rank {rank} --nproc {options.nproc}: --nproc must be "
            f"{kind.least_ranks} to {MAX_PROCESSES}, and --rank must be below --nproc"
        )
    if not (options.plain or options.json or is_terminal()):
        raise UsageError("the screen needs a terminal; use drill FAULT --plain")
    return Drill(options.fault, FAULT_STEP, rank, kind.amount)


def _practise(path: Path, fault: Drill, options: argparse.Namespace) -> None:
    """Follows the drill as text, or on a screen in a child process whose exit code is ignored."""
    if not options.json:
        print_line(f"drill {fault} is launched in {path}")
    if options.plain or options.json:
        _follow(path, fault, options)
        return
    words = [*shlex.split(program()), "--root", str(options.root), "watch", str(path)]
    with subprocess.Popen(words) as screen:
        try:
            screen.wait()
        except KeyboardInterrupt:
            screen.terminate()  # the screen then restores the terminal


def _follow(path: Path, fault: Drill, options: argparse.Namespace) -> None:
    """Prints changes (not with --json) until the score is complete, the run ends or time is up."""
    source, changes = RunSource(path), Changes()
    until, reached = time.monotonic() + STARTUP_S, 0
    while True:
        state = source.poll()
        for sentence in changes.sentences(state, time.monotonic()) if not options.json else ():
            print_line(sentence)
        score = read_score(path, fault)
        stage = (score.fault_ts is not None) + score.right_verdict
        if stage > reached:
            reached, until = stage, time.monotonic() + options.wait + score.truth.after_s
        if score.done or time.monotonic() >= until:
            return
        time.sleep(POLL_S)


# --- the score -----------------------------------------------------------------------------------


def read_score(path: Path, fault: Drill) -> Score:
    """Returns the score of a drill, read from the files of its launch."""
    source = RunSource(path)
    state, run, truth = source.poll(), source.run_path, KINDS[fault.kind].truth
    over = status_text.is_over(state)
    rank = fault.rank or 0
    beats = _records(rundir.heartbeat(run, rank), offset=0) if run else []
    fault_ts = next((ts for each in beats if each.get("state") == "fires"
                     and (ts := jsonl.number(each, "ts"))), None)  # fmt: skip
    if run is None or fault_ts is None:
        return Score(fault, truth, over=over)
    events = [each for each in (*_records(path / rundir.EVENTS), *_records(run / rundir.EVENTS))
              if (jsonl.number(each, "ts") or 0.0) >= fault_ts]  # fmt: skip
    given = tuple(sorted(_actions(events, fault_ts), key=lambda each: each[1]))
    score = Score(fault, truth, fault_ts, actions=given, over=over)
    said, shown_ts, right = "", None, (False, False, False)
    if truth.cause:
        until_s = score.reaction[1] if score.reaction else math.inf
        for found in verdicts.stored(run, MAX_VERDICTS):  # returns the newest first
            if 0 <= found.ts - fault_ts <= until_s:
                named = (found.rank == rank, found.phase == truth.phase, found.cause == truth.cause)
                said, right = (said, right) if said else (found.sentence, named)
                shown_ts = found.ts if all(named) else shown_ts
    elif truth.ends and over:
        said, is_named = status_text.with_word(state.state, state.why), _names(state.why, rank)
        right = (is_named, is_named, state.state == truth.ends)
        shown_ts = state.since_ts if all(right) else None
    elif truth.alert:
        alerts = [each for each in events if each.get("kind") == "alert"
                  and each.get("alert") == truth.alert]  # fmt: skip
        for each in alerts[:1]:
            said = jsonl.text(each, "text")
            right = (not truth.ranked or _names(said, rank), True, True)
            shown_ts = jsonl.number(each, "ts") if all(right) else None
    marks = dict(zip(("right_rank", "right_phase", "right_cause"), right, strict=True))
    return replace(score, said=said, shown_s=shown_ts and max(0.0, shown_ts - fault_ts), **marks)


def _names(text: str, rank: int) -> bool:
    return re.search(rf"\brank {rank}\b", text) is not None


def _records(path: Path, offset: int | None = None) -> list[dict[str, Any]]:
    """Returns the records in the last `READ_BYTES` of a file, or in the first from `offset` on."""
    lines = jsonl.read_bytes(path, READ_BYTES, offset, below=path.parent).splitlines()
    return [record for line in lines if (record := jsonl.decode(line)) is not None]


def _actions(events: list[dict[str, Any]], fault_ts: float) -> Iterator[tuple[str, float]]:
    """Yields the operator's actions with their times after the fault.

    If the ranks step again after a stall, this counts as the action "resume".
    """
    for each in events:
        after_s = (jsonl.number(each, "ts") or 0.0) - fault_ts
        kind, name = each.get("kind"), clean(jsonl.text(each, "action"), 40)
        cleared = jsonl.text(each, "text") * ((kind, each.get("alert")) == ("clear", "stall"))
        if kind == "request" and name and not jsonl.text(each, "by").startswith(f"{BY} "):
            yield name, after_s
        elif "step again" in cleared:
            yield "resume", after_s


# --- the end -------------------------------------------------------------------------------------


def _end(path: Path) -> None:
    """Stops the run of a drill; waits at most `ENDED_S` for the end of its supervisor."""
    until = time.monotonic() + ENDED_S
    if not status_text.is_over(RunSource(path).poll()):
        with contextlib.suppress(ContractError, OSError):
            actions.answer(path, actions.send(path, "stop", {}, f"{BY} {actions.who()}"), ANSWER_S)
    while _has_supervisor(path):
        if time.monotonic() >= until:
            stop = command("stop", path, "--kill", "--yes")
            print_error(f"the run of the drill has not ended within {ENDED_S:g} s; run {stop}")
            return
        time.sleep(POLL_S)


def _has_supervisor(path: Path) -> bool:
    state = rundir.read_json(path / rundir.PLAN_STATE) or {}
    return rundir.is_alive(jsonl.mapping(state, "supervisor"))
