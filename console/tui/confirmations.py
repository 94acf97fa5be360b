"""The questions that are asked before an action, as plain data.

The target is frozen when the question opens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from console.model import LIVE_STATES, LaunchState, RunState
from console.status_text import counted

Fact = tuple[str, str]


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
    facts: tuple[Fact, ...]
    target: Target
    choices: tuple[Choice, ...]
    typed: str = ""


class CannotAsk(Exception):
    """There is nothing to act on; the message says what to do instead."""


def _shown(state: RunState | None) -> RunState:
    """Returns the run on the screen. Raises CannotAsk when there is none."""
    if state is None:
        raise CannotAsk("there is no run; L launches one")
    return state


def _living(state: RunState | None) -> RunState:
    state = _shown(state)
    if state.state not in LIVE_STATES:
        raise CannotAsk(f"{state.id} has ended ({state.state}); there is nothing to act on")
    return state


def _target(state: RunState, launch: LaunchState | None = None) -> Target:
    of = launch or state
    pids = tuple(rank.pid for rank in state.ranks if rank.pid and not rank.exit)
    return Target(of.path, of.id, state.host, pids)


def _about(
    target: Target, title: str, loses: str, *choices: Choice, more: tuple[Fact, ...] = (),
    typed: str = "",
) -> Question:  # fmt: skip
    """Returns a question that names the run, its host, its processes and what is lost."""
    pids = ", ".join(map(str, target.pids[:8])) + (", …" if len(target.pids) > 8 else "")
    facts = (("run", target.name), ("host", target.host or "unknown"),
             ("pids", pids or "none known"), ("loses", loses))  # fmt: skip
    return Question(title, (*facts, *more), target, choices, typed)


def dump(state: RunState | None) -> Question:
    target = _target(_living(state))
    title = f"Dump the stacks of {counted(len(target.pids), 'rank')}?"
    loses = "nothing; ranks that do not catch the signal are left out"
    return _about(target, title, loses, Choice("Dump", "dump"))


def halt(state: RunState | None) -> Question:
    state = _shown(state)
    launch = state.launch
    rest = ", ".join(phase.name for phase in launch.rest) if launch else ""
    if launch is not None and launch.state == "waiting":
        target = _target(state, launch)
        facts = (
            ("launch", target.name), ("loses", "nothing that has run"), ("not run", rest or "none"),
        )  # fmt: skip
        return Question("End this launch here?", facts, target, (Choice("End it", "halt"),))
    target = _target(_living(state))
    step = f" (now at {state.step:,})" if state.step is not None else ""
    loses, more = "nothing: all ranks stop at the same step and save", ()
    if state.state == "stalled":
        verdict, stands = state.verdict, "they stand"
        if verdict and verdict.rank is not None:
            stands = f"rank {verdict.rank} stands in {verdict.phase}"
        loses = f"ranks obey at the end of a step, and {stands}: nothing happens before all step"
        more = (("else", "K ends a run that stands"),)
    if rest:
        more = (*more, ("after", f"the plan ends; not run: {rest}"))
    return _about(target, f"Halt this run{step}?", loses, Choice("Halt", "halt"), more=more)


def checkpoint(state: RunState | None) -> Question:
    state = _living(state)
    saved = f"; the last is {state.checkpoint}" if state.checkpoint else ""
    loses = f"nothing: all ranks save after their step and go on{saved}"
    return _about(_target(state), "Save a checkpoint now?", loses, Choice("Save", "checkpoint"))


def adopt(state: RunState | None) -> Question:
    state = _shown(state)
    launch = state.launch
    if launch is None or "unsupervised" not in (launch.state, state.state):
        raise CannotAsk(f"{state.id} is {state.state}; only a lost supervisor is replaced")
    rest = ", ".join(phase.name for phase in launch.rest) or "none"
    more = (("then", f"as planned, phases after this one: {rest}"),)
    loses = "nothing: ranks that live go on and are watched again"
    title = "Give this launch a new supervisor?"
    return _about(_target(state, launch), title, loses, Choice("Take over", "adopt"), more=more)


def kill(state: RunState | None) -> Question:
    """Returns the question before a stop or kill; typed is the run's name without the launch's.

    Between phases nothing runs that could be killed: the launch is ended as by `halt`.
    """
    if (launch := _shown(state).launch) is not None and launch.state == "waiting":
        return halt(state)
    state = _living(state)
    saved = f"the last is {state.checkpoint}" if state.checkpoint else "none is saved"
    loses = f"the steps since the last checkpoint; {saved}"
    choices = (Choice("Stop", "stop"), Choice("Kill", "kill", {"yes": True}))
    more = (("means", "Stop: TERM, a grace, then KILL.  Kill: KILL at once"),)
    name = state.id.rpartition("/")[2]
    title = "Stop or kill this run?"
    return _about(_target(state), title, loses, *choices, more=more, typed=name)


def acknowledge(state: RunState | None, alert: str, text: str) -> Question:
    target = _target(_shown(state))
    if not alert:
        stays = "this cannot be acknowledged: it goes when its cause goes"
        raise CannotAsk(stays if text else "there is no alert to acknowledge")
    facts = (("run", target.name), ("alert", text), ("loses", "nothing; it stays as a note"))
    choice = Choice("Acknowledge", "ack", {"alert": alert})
    return Question("Acknowledge this alert?", facts, target, (choice,))


def proceed(state: RunState) -> Question:
    launch = state.launch
    if launch is not None and launch.state == "running":
        name = launch.current or "a phase"
        raise CannotAsk(f"{name} still runs; H halts it, then L launches again")
    if launch is None or launch.state != "waiting":
        raise CannotAsk(f"{state.id} is {state.state}; nothing waits for L")
    target = _target(state, launch)
    following = launch.rest[0] if launch.rest else None
    name = following.name if following else "the next"
    changed = ", ".join(f"{flag.name}={flag.value}" for flag in launch.next_flags) or "none changed"
    facts = (("launch", target.name), ("flags", changed),
             ("proves", following.proves if following else ""), ("loses", "nothing"))  # fmt: skip
    start = Choice("Start", "proceed", {"phase": name} if following else {})
    return Question(f"Start phase {name}?", facts, target, (start,))
