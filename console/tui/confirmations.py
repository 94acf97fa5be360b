"""The confirmations of actions, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from console.action_table import ACTIONS, Action
from console.model import CONTINUED, LIVE_STATES, OWN_DIRECTORY, LaunchState, RunState
from console.sources.process import command
from console.status_text import checkpoint_text, is_unjoined
from console.stop_cost import completed_of, lost_steps

Fact = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Choice:
    """One button of a question: its label, the action and the arguments of the action."""

    word: str
    action: str
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Question:
    """The confirmation of one or more actions. The screen adds the button No.

    If `typed` is not empty, a choice works only after the operator has typed this text. A choice
    acts on the run or launch at `path`, even if the screen shows another run by then. For a new
    launch, `path` is only the place of its directory.
    """

    title: str
    facts: tuple[Fact, ...]
    path: str
    choices: tuple[Choice, ...]
    typed: str = ""


class CannotAsk(Exception):
    """The action is not possible now; the message says why, or what to do instead."""


def question(state: RunState | None, *actions: Action) -> Question:
    """Returns the confirmation of actions on the displayed run, with one button per action.

    The buttons for adopt and resume exclude each other: only the possible action has one. While the
    launch waits between two phases, halt, stop and kill offer only a halt of the launch. Raises
    CannotAsk.
    """
    state, first = _shown(state), actions[0]
    launch = state.launch
    if ACTIONS["resume"] in actions:
        if launch is not None and state.can_resume:
            return _resume(state, launch)
        actions = (first,)
    if launch is not None and launch.state == "waiting" and "launch" in first.mailboxes:
        return _end(launch)
    if first.mailboxes and state.state not in LIVE_STATES:
        raise CannotAsk(f"{state.id} has ended ({state.state}); {first.name} needs a live run")
    moved = next((alert for alert in state.alerts if alert.id == OWN_DIRECTORY), None)
    if first.mailboxes and moved is not None:
        raise CannotAsk(moved.text)
    facts = FACTS.get(first.name, lambda _: {})(state)
    target = state if first.mailboxes or launch is None else launch
    kind = "run" if target is state else "launch"
    live = [str(rank.pid) for rank in state.ranks if rank.pid and not rank.exit]
    pids = ", ".join(live[:8]) + (", …" if len(live) > 8 else "")
    shown = {kind: target.id, "host": state.host or "unknown", "pids": pids or "none known"}
    return Question(
        first.title, tuple((shown | dict((first.cost,)) | facts).items()), target.path,
        tuple(_choice(action) for action in actions),
        typed=state.id.rpartition("/")[2] if first.cost[0] == "loses" else "",
    )  # fmt: skip


def _choice(action: Action, **args: Any) -> Choice:
    """Returns the button of an action; the button sets each switch of the action."""
    switches = {each.name: True for each in action.args if not each.metavar}
    return Choice(action.name.capitalize(), action.name, switches | args)


def _shown(state: RunState | None) -> RunState:
    """Returns the displayed run. Raises CannotAsk if there is no run."""
    if state is None:
        raise CannotAsk("there is no run; L launches one")
    return state


def _end(launch: LaunchState) -> Question:
    """Returns the confirmation to end a launch that waits between two phases."""
    rest = ", ".join(phase.name for phase in launch.rest) or "none"
    then = f"the launch ends; not started: {rest}"
    facts = (("launch", launch.id), ("keeps", "completed phases"), ("then", then))
    before = f" before phase {launch.rest[0].name}" if launch.rest else ""
    return Question(f"Halt this launch{before}?", facts, launch.path, (_choice(ACTIONS["halt"]),))


def _resume(state: RunState, launch: LaunchState) -> Question:
    """Returns the confirmation to launch the rest of a launch that has ended."""
    action, phase = ACTIONS["resume"], state.own_phase or launch.phases[launch.phase]
    begins = f"{phase.name} from the checkpoint of step {state.saved_step:,}"
    if launch.has_passed:
        begins, phase = f"{launch.rest[0].name}, because {phase.name} passed", launch.rest[0]
    if sweep := phase.sweep:
        begins = f"the sweep {sweep} with its first run"
    later = launch.phases[phase.index + 1 :]
    rest = ", ".join(each.name for each in later if not sweep or each.sweep != sweep) or "none"
    facts = (("launch", launch.id), ("begins", begins), ("then", f"next phases: {rest}"),
             action.cost)  # fmt: skip
    return Question("Resume this launch, in a new launch?", facts, launch.path, (_choice(action),))


# --- facts of single actions, in addition to run, host, processes and cost -----------------------


def _of_halt(state: RunState) -> dict[str, str]:
    """Returns facts about a halt, for example the phases that are not started."""
    saves = "all work (every rank stops at the same step and saves a checkpoint)"
    facts = {"keeps": saves if state.decided else "only what the program saves itself"}
    if state.step is None and not state.decided:
        facts["else"] = "K stops a program that does not call join, because it ignores a halt"
    if state.state == "stalled":
        verdict, rank = state.verdict, "a rank"
        if verdict and verdict.rank is not None:
            rank = f"rank {verdict.rank}"
        stalled = f"{rank} is stalled" + (
            f" in {verdict.phase}" if verdict and verdict.phase else ""
        )
        then = "no rank halts before every rank completes its step; K stops the run"
        if verdict and verdict.may_save(bool(state.decided)):
            then = "the run halts when the save ends; K loses the checkpoint"
        facts["stalled"] = f"{stalled}, and {then}"
    if state.launch and state.launch.rest:
        rest = ", ".join(phase.name for phase in state.launch.rest)
        facts["then"] = f"the launch ends; not started: {rest}"
    return facts


def _of_checkpoint(state: RunState) -> dict[str, str]:
    note = "it is not known whether this program saves a checkpoint on request"
    return ({} if state.decided else {"keeps": "all work", "note": note}) | _last_checkpoint(state)


def _of_dump(state: RunState) -> dict[str, str]:
    note = "no rank has called join, so no rank is signalled"
    return {"note": note} if is_unjoined(state) else {}


def _last_checkpoint(state: RunState) -> dict[str, str]:
    """Returns a fact: the newest checkpoint."""
    return {"saved": checkpoint_text(state) or "no checkpoint in the run directory"}


def _of_stop(state: RunState) -> dict[str, str]:
    """Returns facts about a stop: the newest checkpoint, and the steps that may be lost."""
    lost = lost_steps(completed_of(state), state.saved_step, bool(state.decided))
    if not (lost or state.decided):
        lost = "all steps that the program has not saved itself"
    elif lost and state.decided and state.state != "stalled":
        lost = f"Kill: {lost}; Stop: none, if all ranks save within the grace time"
    ways = {"Stop": "TERM; after the grace time, KILL", "Kill": "KILL at once"}
    return ways | ({"loses": lost} if lost else {}) | _last_checkpoint(state)


def _of_adopt(state: RunState) -> dict[str, str]:
    """Returns a fact: the phases that follow an adoption. Raises CannotAsk."""
    launch = state.launch
    if launch is None:
        raise CannotAsk(f"{state.id} belongs to no launch, so no supervisor can adopt it")
    if launch.state == "ended" and state.state not in LIVE_STATES:
        raise CannotAsk(f"{state.id} has ended ({state.state}); {_no_resume(state, launch)}")
    if "unsupervised" not in (launch.state, state.state):
        why = "R resumes an ended launch, or starts a supervisor for an unsupervised one"
        raise CannotAsk(f"{launch.id} is {launch.state}; {why}")
    return {"then": f"next phases: {', '.join(phase.name for phase in launch.rest) or 'none'}"}


def _no_resume(state: RunState, launch: LaunchState) -> str:
    """Returns why R cannot resume a launch that has ended, and what else is possible."""
    if found := next((alert.text for alert in state.alerts if alert.id == CONTINUED), ""):
        return found
    if any(each.result == "pass" for each in launch.phases[launch.phase :]):
        return "R has nothing to resume; L launches a plan"
    name, own = launch.current or "the run", state.own_phase
    if own is not None and own.index != launch.phase:
        return f"the launch ended in {name}; open the launch with o, and press R"
    if state.state == "completed":
        then = f"2 shows them, and {command('override')} accepts one"
        return f"R cannot resume it: not all gates of {name} passed; {then}"
    why = f"R cannot resume it: {name} has no usable checkpoint"
    whole = "L starts the whole plan; " if launch.phase else ""
    return f"{why}; {whole}to start {name} again: {command('resume', launch.path)}"


FACTS = {
    "halt": _of_halt, "dump": _of_dump, "checkpoint": _of_checkpoint, "stop": _of_stop,
    "adopt": _of_adopt,
}  # fmt: skip
"""Additional facts of a confirmation, by action. A fact replaces a fact with the same label."""


# --- questions of actions without a title --------------------------------------------------------


def acknowledge(state: RunState | None, alert: str, text: str) -> Question:
    """Returns the confirmation of `ack` for the alert with this id and text. Raises CannotAsk."""
    state, action = _shown(state), ACTIONS["ack"]
    if not alert:
        stays = "this notice cannot be acknowledged; it remains while its condition lasts"
        raise CannotAsk(stays if text else "there is no alert to acknowledge")
    facts = (("run", state.id), ("alert", text), action.cost)
    return Question("Acknowledge this alert?", facts, state.path, (_choice(action, alert=alert),))


def proceed(state: RunState) -> Question:
    """Returns the confirmation to start the next phase of a waiting launch. Raises CannotAsk."""
    launch, action = state.launch, ACTIONS["proceed"]
    if launch is not None and launch.state == "running":
        name = launch.current or "a phase"
        now, ends = ("stalled", "K stops") if state.state == "stalled" else (
            "still running", "H halts")  # fmt: skip
        raise CannotAsk(f"{name} is {now}; L starts nothing until it has ended; {ends} it")
    if launch is None or launch.state != "waiting":
        raise CannotAsk(f"{state.id} is {state.state}; no launch waits for you")
    following = launch.rest[0] if launch.rest else None
    title = f"Start phase {following.name}?" if following else "Start the next phase?"
    changed = ", ".join(f"{flag.name}={flag.value}" for flag in launch.next_flags) or "none changed"
    facts = (("launch", launch.id), ("flags", changed),
             ("will prove", following.proves if following else ""), action.cost)  # fmt: skip
    args = {"phase": following.name} if following else {}
    return Question(title, facts, launch.path, (Choice("Start", action.name, args),))
