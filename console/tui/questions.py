"""What is asked before something acts, as plain data.

The target is frozen when the question opens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from console.model import LIVE_STATES, LaunchState, RunState
from console.tui import format as fmt


@dataclass(frozen=True, slots=True)
class Target:
    """The run (or launch) that an answer will act on, whatever the screen shows by then."""

    path: str
    name: str
    host: str
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One button of a question: its word, the action and what it is sent with."""

    word: str
    action: str
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Question:
    """A question. The first button is always No; `typed` must be typed before another counts."""

    title: str
    facts: tuple[tuple[str, str], ...]
    target: Target
    choices: tuple[Choice, ...]
    typed: str = ""


class CannotAsk(Exception):
    """There is nothing to act on; the message says what to do instead."""


def run_target(state: RunState | None) -> Target:
    """Returns the run on the screen. Raises CannotAsk when there is none."""
    if state is None:
        raise CannotAsk("there is no run; L launches one")
    pids = tuple(rank.pid for rank in state.ranks if rank.pid and not rank.exit)
    return Target(state.path, state.id, state.host, pids)


def launch_target(launch: LaunchState, state: RunState | None) -> Target:
    pids = tuple(rank.pid for rank in state.ranks if rank.pid) if state else ()
    return Target(launch.path, launch.id, state.host if state else "", pids)


def _live_target(state: RunState | None) -> Target:
    target = run_target(state)
    assert state is not None
    if state.state not in LIVE_STATES:
        raise CannotAsk(f"{target.name} has ended ({state.state}); there is nothing to act on")
    return target


def _facts(target: Target, loses: str) -> tuple[tuple[str, str], ...]:
    pids = ", ".join(map(str, target.pids[:8])) + (", …" if len(target.pids) > 8 else "")
    return (
        ("run", target.name),
        ("host", target.host or "unknown"),
        ("pids", pids or "none known"),
        ("loses", loses),
    )


def dump(state: RunState | None) -> Question:
    target = _live_target(state)
    facts = _facts(target, "nothing; ranks that do not catch the signal are left out")
    title = f"Dump the stacks of {_ranks(len(target.pids))}?"
    return Question(title, facts, target, (Choice("Dump", "dump"),))


def halt(state: RunState | None) -> Question:
    target = _live_target(state)
    assert state is not None
    if state.launch is not None and state.launch.state == "waiting":
        return _end_launch(state.launch, state)
    step = f" (now at {state.step:,})" if state.step is not None else ""
    facts = _facts(target, "nothing: all ranks stop at the same step and save")
    launch = state.launch
    if launch is not None and launch.phase + 1 < len(launch.phases):
        rest = ", ".join(phase.name for phase in launch.phases[launch.phase + 1 :])
        facts = (*facts, ("after", f"the plan ends; not run: {rest}"))
    return Question(f"Halt this run{step}?", facts, target, (Choice("Halt", "halt"),))


def _end_launch(launch: LaunchState, state: RunState) -> Question:
    target = launch_target(launch, state)
    rest = ", ".join(phase.name for phase in launch.phases[launch.phase + 1 :])
    facts = (
        ("launch", target.name), ("loses", "nothing that has run"), ("not run", rest or "none"),
    )  # fmt: skip
    return Question("End this launch here?", facts, target, (Choice("End it", "halt"),))


def kill(state: RunState | None) -> Question:
    target = _live_target(state)
    assert state is not None
    saved = f"the last is {state.checkpoint}" if state.checkpoint else "none is saved"
    facts = _facts(target, f"the steps since the last checkpoint; {saved}")
    choices = (Choice("Stop", "stop"), Choice("Kill", "kill", {"yes": True}))
    note = ("means", "Stop: TERM, a grace, then KILL.  Kill: KILL at once")
    name = kill_name(state)
    return Question("Stop or kill this run?", (*facts, note), target, choices, typed=name)


def kill_name(state: RunState) -> str:
    """Returns what must be typed: the run's name without the launch's."""
    return state.id.rpartition("/")[2]


def acknowledge(state: RunState | None, alert: str, text: str) -> Question:
    target = run_target(state)
    if not alert:
        raise CannotAsk("there is no alert to acknowledge")
    facts = (("run", target.name), ("alert", text), ("loses", "nothing; it leaves the second line"))
    return Question(
        "Acknowledge this alert?", facts, target, (Choice("Acknowledge", "ack", {"alert": alert}),)
    )


def proceed(state: RunState) -> Question:
    launch = state.launch
    if launch is None or launch.state != "waiting":
        raise CannotAsk(_why_not(state))
    target = launch_target(launch, state)
    following = launch.phases[launch.phase + 1 :]
    name = following[0].name if following else "the next"
    changed = ", ".join(f"{flag.name}={flag.value}" for flag in launch.next_flags) or "none changed"
    proves = following[0].proves if following else ""
    facts = (("launch", target.name), ("flags", changed), ("proves", proves),
             ("loses", "nothing"))  # fmt: skip
    start = Choice("Start", "proceed", {"phase": name} if following else {})
    return Question(f"Start phase {name}?", facts, target, (start,))


def _why_not(state: RunState) -> str:
    if state.launch is not None and state.launch.state == "running":
        name = state.launch.phases[state.launch.phase].name if state.launch.phases else "a phase"
        return f"{name} still runs; H halts it, then L launches again"
    return f"{state.id} is {state.state}; nothing waits for L"


def launch(plan: str, ranks: int, phases: Sequence[str], where: str, host: str,
           flags: Mapping[str, str], between: str) -> Question:  # fmt: skip
    """Returns the question before a launch."""
    words = {"ask": "asks before each next phase", "go": "goes on while the gates pass"}
    facts = (
        ("plan", f"{plan}: {', '.join(phases)}"),
        ("host", host),
        ("starts", f"{_ranks(ranks)} by torchrun, {words.get(between, between)}"),
        ("flags", ", ".join(f"{k}={v}" for k, v in flags.items()) or "as in the plan"),
        ("writes", where),
        ("loses", "nothing"),
    )
    target = Target(where, plan, host, ())
    return Question(f"Launch {plan}?", facts, target, (Choice("Launch", "launch"),))


def _ranks(count: int) -> str:
    return f"{fmt.count(count)} rank" + ("" if count == 1 else "s")
