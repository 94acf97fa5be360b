"""Injects random faults into a launch, and detects when the launch has recovered from a fault."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.supervisor import memory_mib
from console import actions
from console.model import RunState
from console.sources import process
from console.sources.run import RunSource
from tests.launches import Started
from trainers import manifest
from trainers.contract import rundir

EVERY = 80
"""Number of steps from one checkpoint to the next."""
DISK_MIB = 2048
LOOK_S, GUARD_S = 0.05, 180.0
FIRST, LAST = 0.02, 0.92
"""Faults become due between these shares of the time; the time after `LAST` is for recovery."""
UNDONE = ("fetch", "forward", "backward", "optimizer")
"""A rank whose pulse shows one of these phases has not finished the step of the pulse."""


@dataclass
class Chaos:
    """The launch under test, with its state now and before the newest fault."""

    started: Started
    rng: random.Random
    disk: Path | None
    source: RunSource = field(init=False)
    now: RunState = field(init=False)
    before: RunState = field(init=False)
    injected: float = 0.0
    met: int = 0
    """The last finished step when the fault was injected."""
    furthest: int = 0
    """The last finished step at the fault or its `undo`, or at the end of the attempt."""
    most_mib: float = 0.0

    def __post_init__(self) -> None:
        self.source = RunSource(self.started.path)
        self.look()
        self.before = self.now

    def look(self) -> RunState:
        self.now = self.source.poll()
        return self.now

    @property
    def run(self) -> Path:
        return self.started.run()

    @property
    def step(self) -> int:
        """The highest step that a rank has finished, according to the pulses."""
        pulses = [rank.pulse for rank in self.now.ranks if rank.pulse is not None]
        return max((p.step - (p.phase in UNDONE) for p in pulses), default=0)

    @property
    def saved(self) -> int:
        return manifest.step_of(Path(self.now.checkpoint)) or 0

    @property
    def since_s(self) -> float:
        return time.monotonic() - self.injected

    @property
    def agent(self) -> int | None:
        """The pid of torchrun, or None if torchrun is not alive."""
        held = self.started.state().get("torchrun") or {}
        ticks = held.get("start_ticks")
        return held["pid"] if ticks and rundir.start_ticks(held["pid"]) == ticks else None

    @property
    def supervisor(self) -> int:
        return self.started.plan_state["supervisor"]["pid"]

    def memory_mib(self) -> float:
        """Returns the memory of both processes of the supervisor in MiB, or 0 after their end."""
        try:
            found = memory_mib(psutil.Process(self.supervisor))
        except psutil.NoSuchProcess:
            return 0.0
        self.most_mib = max(self.most_mib, found)
        return found

    def signal_rank(self, number: signal.Signals) -> None:
        os.kill(self.rng.choice(sorted(self.started.pids().values())), number)

    def kill_both(self) -> None:
        """Kills the supervisor, and then a rank."""
        os.kill(self.supervisor, signal.SIGKILL)
        self.signal_rank(signal.SIGKILL)

    @property
    def filler(self) -> Path:
        if self.disk is None:
            raise FileNotFoundError("the run has no disk of its own to fill")
        return self.disk / "filler"

    def fill(self) -> None:
        """Fills the run's disk."""
        with self.filler.open("wb") as stream:
            step = DISK_MIB << 20
            while step >= 4096:
                try:
                    os.posix_fallocate(stream.fileno(), stream.seek(0, os.SEEK_END), step)
                except OSError:
                    step //= 2

    def spray(self) -> None:
        """Sends SIGUSR1 for a second to all processes of the run, and to their process groups."""
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            for pid in process.with_token(self.started.token()):
                for send in (os.kill, os.killpg):
                    with contextlib.suppress(ProcessLookupError):
                        send(pid, signal.SIGUSR1)
            time.sleep(0.02)


def moves(chaos: Chaos) -> bool:
    """Returns whether the run is running, and has finished more than 5 steps after `furthest`."""
    return chaos.now.state == "running" and chaos.step > chaos.furthest + 5


def saves(chaos: Chaos) -> bool:
    """Returns whether `moves` holds, and a step above `met` + `EVERY` was saved."""
    return moves(chaos) and chaos.saved > chaos.met + EVERY


def restarted(chaos: Chaos) -> bool:
    """Returns whether a later attempt runs past step `furthest`, and a new checkpoint exists."""
    again = chaos.now.attempt > chaos.before.attempt and chaos.now.state == "running"
    return again and chaos.saved > saved_before(chaos) and chaos.step > chaos.furthest


def saved_before(chaos: Chaos) -> int:
    return manifest.step_of(Path(chaos.before.checkpoint)) or 0


def second(chaos: Chaos) -> bool:
    return chaos.since_s >= 1


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of fault. `undo`, if there is one, is called when `holds` returns true.

    Without `undo`, or after its call, `recovered` is polled. A fault with `ends` ends the attempt.
    A `harmless` fault is not counted as disruptive.
    """

    name: str
    act: Callable[[Chaos], object]
    recovered: Callable[[Chaos], bool] = moves
    undo: Callable[[Chaos], object] | None = None
    holds: Callable[[Chaos], bool] = second
    ends: bool = False
    harmless: bool = False


KILLED = Fault("a rank SIGKILL", lambda c: c.signal_rank(signal.SIGKILL), restarted, ends=True)
AGENT = Fault("torchrun SIGKILL", lambda c: os.kill(c.agent or 0, signal.SIGKILL))
FULL = Fault(
    "full disk, until a save failed", Chaos.fill, saves, lambda c: c.filler.unlink(),
    lambda c: c.step > c.met + EVERY + 5, harmless=True,
)  # fmt: skip
DISRUPTIVE = (
    KILLED,
    Fault("a rank SIGSEGV", lambda c: c.signal_rank(signal.SIGSEGV), restarted, ends=True),
    Fault("a rank SIGSTOP, for good", lambda c: c.signal_rank(signal.SIGSTOP), restarted,
          ends=True),
    AGENT,
    Fault("supervisor SIGKILL, adopted after 1 s",
          lambda c: os.kill(c.supervisor, signal.SIGKILL), moves,
          lambda c: actions.adopt(c.started.path)),
    Fault("supervisor and a rank SIGKILL, adopted after 1 s", Chaos.kill_both, restarted,
          lambda c: actions.adopt(c.started.path), ends=True),
)  # fmt: skip
"""The numbers of scheduled injections of any two of these faults differ by at most one."""
HARMLESS = (
    Fault("a rank SIGSTOP, CONT after 2 s", lambda c: c.signal_rank(signal.SIGSTOP), moves,
          lambda c: [os.kill(pid, signal.SIGCONT) for pid in c.started.pids().values()],
          lambda c: c.since_s >= 2, harmless=True),
    Fault("working process of the supervisor SIGKILL",
          lambda c: os.kill(c.started.child(), signal.SIGKILL), moves, harmless=True),
    Fault("SIGUSR1 to all for 1 s", Chaos.spray, harmless=True),
    FULL,
)  # fmt: skip


@dataclass
class Injected:
    """The result of one fault. `lost_s` ends at the injection; the other seconds begin there."""

    fault: Fault
    ts: float
    attempt: int
    furthest: int = 0
    seen_s: float | None = None
    recovered: bool = False
    attempt_after: int = 0
    back_s: float | None = None
    lost: int = 0
    lost_s: float = 0.0
    words: str = ""
    over_s: float = 0.0
    """The time until the run had recovered, the plan had ended, or `GUARD_S` was over."""


def schedule(
    rng: random.Random, count: int, span_s: float, full: bool
) -> list[tuple[float, Fault]]:
    """Returns `count` disruptive faults and some harmless faults in random order, with times.

    With a count of 0 there is no fault. Without `full`, the fault `FULL` is left out.
    """
    order: list[Fault] = []
    while len(order) < count:
        order += rng.sample(DISRUPTIVE, min(len(DISRUPTIVE), count - len(order)))
    harmless = [fault for fault in HARMLESS if full or fault is not FULL]
    order += harmless * (max(1, count // 6) if count else 0)
    rng.shuffle(order)
    times = sorted(rng.uniform(FIRST, LAST) * span_s for _ in order)
    return list(zip(times, order, strict=True))


def inject(chaos: Chaos, fault: Fault) -> Injected:
    """Injects a fault; waits at most `GUARD_S` for the recovery of the run or the plan's end."""
    chaos.before = chaos.look()
    chaos.met = chaos.furthest = chaos.step
    known = {alert.id for alert in chaos.now.alerts}
    found = Injected(fault, time.time(), chaos.now.attempt)
    chaos.injected, undone = time.monotonic(), fault.undo is None
    fault.act(chaos)
    while chaos.since_s < GUARD_S:
        state = chaos.look()
        news = [alert.text for alert in state.alerts if alert.id not in known]
        if found.seen_s is None and (state.state != "running" or news):
            found.seen_s, found.words = chaos.since_s, state.why or next(iter(news), "")
        if fault.ends and state.attempt == found.attempt:
            chaos.furthest = max(chaos.furthest, chaos.step)
        if not undone and fault.holds(chaos):
            assert fault.undo is not None
            fault.undo(chaos)
            undone, chaos.furthest = True, chaos.step
        if undone and fault.recovered(chaos):
            found.recovered = True
            break
        if chaos.started.plan_state.get("state") == "ended":
            break
        chaos.memory_mib()
        time.sleep(LOOK_S)
    found.furthest, found.attempt_after = chaos.furthest, chaos.now.attempt
    found.over_s = chaos.since_s
    return found
