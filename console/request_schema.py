"""The table of the actions that a request can name, and the check of a request's arguments.

Nothing happens for a request whose action or arguments this table does not allow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trainers.contract import flags
from trainers.contract.errors import UsageError, did_you_mean
from trainers.contract.values import TRUE

Mailbox = Literal["run", "launch"]


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of an action. `convert` raises ValueError with what it takes, or UsageError."""

    name: str
    convert: Callable[[Any], Any]
    help: str
    required: bool = True


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that an operator can ask for."""

    name: str
    mailboxes: tuple[Mailbox, ...]
    help: str
    args: tuple[Argument, ...] = ()


def _text(limit: int) -> Callable[[Any], str]:
    def convert(value: Any) -> str:
        if not isinstance(value, str) or not value.strip() or len(value) > limit:
            raise ValueError(f"a text of at most {limit} characters")
        return value.strip()

    return convert


def _rank(value: Any) -> int:
    text = str(value)
    if isinstance(value, bool) or not text.isdecimal() or len(text) > 6:
        raise ValueError("the number of a rank")
    return int(text)


def _yes(value: Any) -> bool:
    if value is True or (isinstance(value, str) and value.lower() in TRUE):
        return True
    raise ValueError("yes=true: it ends all ranks without a checkpoint")


def _flag_name(value: Any) -> str:
    return flags.lookup(str(value)).name


def _flag_value(value: Any) -> str | None:
    """A null, or an empty text, takes the change back."""
    if value is None or value == "":
        return None
    return flags.format_value(value) if isinstance(value, bool | int | float) else str(value)


TABLE: tuple[Action, ...] = (
    Action("dump", ("run",), "Write the stacks of all ranks, or of one.",
           (Argument("rank", _rank, "only this rank", required=False),)),
    Action("halt", ("run", "launch"), "All ranks stop at the same step and save; the plan ends."),
    Action("checkpoint", ("run",), "All ranks save after the step that they are in, and go on."),
    Action("profile", ("run",), "All ranks profile their next steps, into `profiles/`."),
    Action("stop", ("run", "launch"), "TERM, the grace time, then KILL; the plan ends."),
    Action("kill", ("run",), "KILL the whole tree now, without a checkpoint.",
           (Argument("yes", _yes, "yes=true means it"),)),
    Action("ack", ("run",), "Take note of an alert.",
           (Argument("alert", _text(80), "the alert's id"),)),
    Action("note", ("run", "launch"), "Write a sentence into the record.",
           (Argument("text", _text(1000), "the sentence"),)),
    Action("set-flag", ("launch",), "Set a flag for the next phase; without a value: undo.",
           (Argument("name", _flag_name, "the flag"),
            Argument("value", _flag_value, "its value", required=False))),
    Action("proceed", ("launch",), "Start the next phase of a plan that waits.",
           (Argument("phase", _text(80), "its name, to be sure", required=False),)),
)  # fmt: skip

ACTIONS: dict[str, Action] = {action.name: action for action in TABLE}


def check(action: str, args: Mapping[str, Any], mailbox: Mailbox | None = None) -> dict[str, Any]:
    """Returns the converted arguments. Raises UsageError that says what would be right."""
    row = ACTIONS.get(action)
    if row is None:
        raise UsageError(f"there is no action {action[:80]!r}{did_you_mean(action[:80], ACTIONS)}")
    if mailbox is not None and mailbox not in row.mailboxes:
        raise UsageError(f"{action} is asked of a {row.mailboxes[0]}, not of a {mailbox}")
    known = {argument.name: argument for argument in row.args}
    for name in args:
        if name not in known:
            takes = did_you_mean(str(name)[:80], known) if known else "; it takes none"
            raise UsageError(f"{action} has no argument {str(name)[:80]!r}{takes}")
    found = {}
    for name, argument in known.items():
        if name not in args and argument.required:
            raise UsageError(f"{action} needs {name}: {argument.help}")
        if name in args:
            try:
                found[name] = argument.convert(args[name])
            except ValueError as error:
                raise UsageError(f"{action}: {name} takes {error}") from None
    return found
