"""Defines the table of actions, from which requests, keys, buttons, commands and help are made.

`check` converts a request's arguments. A new action with a mailbox needs one row here, and a method
of `console.supervisor.launch.Launch` that executes the action.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from trainers.contract import flags
from trainers.contract.errors import UsageError, did_you_mean
from trainers.contract.values import TRUE

Mailbox = Literal["run", "launch"]
Phases = Literal["next", "all"]
PHASES: tuple[Phases, ...] = get_args(Phases)
"""The phases to which a changed flag applies: the next phase, or the next and all later phases."""
OTHER_PHASE = "reject the request if another phase is next"


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of an action. An argument without a `metavar` is a switch.

    On the screen, the confirmation of an action sets all switches of the action. For a wrong value,
    `convert` raises UsageError, or ValueError with the accepted values.
    """

    name: str
    metavar: str
    convert: Callable[[Any], Any]
    help: str
    required: bool = True


@dataclass(frozen=True, slots=True)
class Action:
    """One action of the operator. `console.actions` executes each action without `mailboxes`."""

    name: str
    help: str
    mailboxes: tuple[Mailbox, ...] = ()
    """The mailboxes that accept this action. An error for a wrong mailbox shows the first."""
    args: tuple[Argument, ...] = ()
    cost: tuple[str, str] = ("keeps", "all work")
    """A line of the confirmation: "keeps" or "loses", and what is kept or lost. On the screen, the
    operator confirms a loss by typing the name of the run."""
    key: str = ""
    """The key on the screen; several actions may have the same key."""
    weight: int = 0
    """The footer shows keys with a weight above 0; a narrow footer keeps the highest weights."""
    button: bool = False
    neutral: bool = False
    """True if a drill does not count this action as the operator's reaction."""
    title: str = ""
    """The title of the confirmation, or "" if no confirmation is made from this row."""
    verb: str = ""
    """The command made from this row, perhaps with an option ("stop --kill"); "" for no command."""
    examples: tuple[str, ...] = ()


def clause(sentence: str) -> str:
    """Returns a sentence with a lower-case first letter and without a full stop."""
    return sentence[0].lower() + sentence[1:].rstrip(".")


def _text(limit: int) -> Callable[[Any], str]:
    def convert(value: Any) -> str:
        if not isinstance(value, str) or not value.strip() or len(value) > limit:
            raise ValueError(f"a text of at most {limit} characters")
        return value.strip()

    return convert


def _rank(value: Any) -> int:
    text = str(value)
    if isinstance(value, bool) or not text.isdecimal() or len(text) > 6:
        raise ValueError("the number of a rank, from 0")
    return int(text)


def _yes(value: Any) -> bool:
    if value is True or (isinstance(value, str) and value.lower() in TRUE):
        return True
    raise ValueError("true, which confirms that all ranks end without a checkpoint")


def _flag_name(value: Any) -> str:
    return flags.lookup(str(value)).name


def _flag_value(value: Any) -> str | None:
    """Returns a flag's value as text, or None (undo the change) for null or an empty text."""
    if value is None or value == "":
        return None
    return flags.format_value(value) if isinstance(value, bool | int | float) else str(value)


def _phases(value: Any) -> Phases:
    if value not in PHASES:
        raise ValueError("next or all")
    return value


TABLE: tuple[Action, ...] = (
    Action(
        "dump", "Dump the Python stacks of all instrumented ranks.", ("run",),
        (Argument("rank", "R", _rank, "dump only this rank, counted from 0", required=False),),
        key="D", weight=8, button=True, neutral=True, verb="dump",
        title="Dump the stacks of all instrumented ranks?",
        examples=("dump latest", "dump latest --rank 1"),
    ),
    Action(
        "halt",
        "Halt all ranks at the same step, and end the launch; trainers of this project save a "
        "checkpoint.", ("run", "launch"),
        cost=("keeps", "all work if a checkpoint is saved"),
        key="H", weight=8, button=True, title="Halt this run?",
        verb="halt", examples=("halt latest",),
    ),
    Action(
        "checkpoint", "Save a checkpoint after the next finite step; all ranks continue.",
        ("run",), cost=("keeps", "all work (every rank saves and continues)"),
        key="C", neutral=True, title="Save a checkpoint now?", examples=("do latest checkpoint",),
    ),
    Action("profile", "Profile the next three steps of all ranks, into `profiles/`.", ("run",),
           neutral=True),
    Action(
        "stop",
        "Stop all ranks, and end the launch: TERM, the grace time to save a checkpoint, then KILL.",
        ("run", "launch"), cost=("loses", "at most the steps since the last checkpoint"),
        key="K", title="Stop or kill this run?", verb="stop", examples=("stop latest",),
    ),
    Action(
        "kill", "Kill all ranks at once, without a checkpoint, and end the launch.", ("run",),
        (Argument("yes", "", _yes, "confirm --kill"),),
        cost=("loses", "the steps since the last checkpoint"), key="K",
        verb="stop --kill", examples=("stop latest --kill --yes",),
    ),
    Action(
        "adopt", "Replace a dead supervisor with a new one.",
        cost=("keeps", "all work (ranks that are alive continue under the new supervisor)"),
        key="R", title="Start a new supervisor for this launch?",
    ),
    Action(
        "resume",
        "Launch the rest of an ended launch: from its newest checkpoint, or, after a phase that "
        "passed, from the next phase.",
        cost=("keeps", "all other launches, also the one that has ended"), key="R",
    ),
    Action(
        "launch", "Launch a plan.", cost=("keeps", "all other launches"),
        key="L", weight=5, button=True,
    ),
    Action(
        "proceed", "Start the next phase of a launch that waits for you.", ("launch",),
        (Argument("phase", "PHASE", _text(80), OTHER_PHASE, required=False),),
        cost=("keeps", "completed phases"), key="L",
    ),
    Action(
        "override",
        "Accept a gate that failed or is unknown; it keeps its result, but no longer ends the "
        "launch.",
        ("launch",),
        (Argument("phase", "PHASE", _text(80), "name of the phase"),
         Argument("gate", "GATE", _text(80), "name of the gate, as `check` prints it"),
         Argument("reason", "TEXT", _text(200), "why, at most 200 characters; for the report")),
        cost=("keeps", "all work (the gate no longer ends the launch)"), verb="override",
        examples=("override latest --phase smoke --gate loss_falls --reason 'noisy'",),
    ),
    Action(
        "ack", "Acknowledge an alert.", ("run",),
        (Argument("alert", "ID", _text(80), "id of the alert, from `status --json`"),),
        cost=("keeps", "all work (the alert stays, marked as acknowledged)"), key="A", weight=2,
        neutral=True,
    ),
    Action(
        "note", "Write a sentence into the events of the run or launch.", ("run", "launch"),
        (Argument("text", "TEXT", _text(1000), "the sentence, at most 1000 characters"),),
        neutral=True, examples=("do latest note text='disk was full'",),
    ),
    Action(
        "set-flag",
        "Set a flag for the next phase, or for all later phases.", ("launch",),
        (Argument("name", "NAME", _flag_name, "name of the flag, see `flags`"),
         Argument("value", "VALUE", _flag_value, "new value; without it, the value of the plan",
                  required=False),
         Argument("phases", "PHASES", _phases, "next (default), or all: the next and all later "
                  "phases", required=False),
         Argument("phase", "PHASE", _text(80), OTHER_PHASE, required=False)),
        examples=("do latest set-flag name=NSA_LR value=0.0005",
                  "do latest set-flag name=NSA_LR value=0.0005 phases=all"),
    ),
)  # fmt: skip

ACTIONS: dict[str, Action] = {action.name: action for action in TABLE}
NEUTRAL = frozenset(action.name for action in TABLE if action.neutral)
KEYS = tuple(dict.fromkeys(action.key for action in TABLE if action.key))
"""The keys of actions, in the order of the table."""


def check(action: str, args: Mapping[str, Any], mailbox: Mailbox | None = None) -> dict[str, Any]:
    """Returns the converted arguments of a request. Raises UsageError for a wrong request."""
    requests = [row.name for row in TABLE if row.mailboxes]
    if action not in requests:
        raise UsageError(f"there is no action {action[:80]!r}{did_you_mean(action[:80], requests)}")
    row = ACTIONS[action]
    if mailbox is not None and mailbox not in row.mailboxes:
        raise UsageError(f"send {action} to a {row.mailboxes[0]}, not to a {mailbox}")
    known = {argument.name: argument for argument in row.args}
    for name in args:
        if name not in known:
            takes = did_you_mean(str(name)[:80], known) if known else "; it has no arguments"
            raise UsageError(f"{action} has no argument {str(name)[:80]!r}{takes}")
    found = {}
    for name, argument in known.items():
        if name in args:
            try:
                found[name] = argument.convert(args[name])
            except ValueError as error:
                raise UsageError(f"{action}: {name} takes {error}") from None
        elif argument.required:
            if not argument.metavar:
                switch = f"add --{name} (with `do`: {name}=true) to confirm"
                raise UsageError(f"{action} needs {name}: {switch}")
            raise UsageError(f"{action} needs {name}={argument.metavar}: {argument.help}")
    return found
