"""Checks the action and the arguments of a request against the table of actions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from console import action_table
from console.action_table import Action, Mailbox
from trainers.contract.errors import UsageError, did_you_mean

TABLE: tuple[Action, ...] = tuple(action for action in action_table.TABLE if action.mailboxes)
ACTIONS: dict[str, Action] = {action.name: action for action in TABLE}


def check(action: str, args: Mapping[str, Any], mailbox: Mailbox | None = None) -> dict[str, Any]:
    """Returns the converted arguments. Raises UsageError with the accepted values."""
    row = ACTIONS.get(action)
    if row is None:
        raise UsageError(f"there is no action {action[:80]!r}{did_you_mean(action[:80], ACTIONS)}")
    if mailbox is not None and mailbox not in row.mailboxes:
        raise UsageError(f"send {action} to a {row.mailboxes[0]}, not to a {mailbox}")
    known = {argument.name: argument for argument in row.args}
    for name in args:
        if name not in known:
            takes = did_you_mean(str(name)[:80], known) if known else "; it takes none"
            raise UsageError(f"{action} has no argument {str(name)[:80]!r}{takes}")
    found = {}
    for name, argument in known.items():
        if name in args:
            try:
                found[name] = argument.convert(args[name])
            except ValueError as error:
                raise UsageError(f"{action}: {name} takes {error}") from None
        elif argument.required:
            switch = f"add --{name} (with `do`: {name}=true) to confirm"
            text = argument.help if argument.metavar else switch
            raise UsageError(f"{action} needs {name}: {text}")
    return found
