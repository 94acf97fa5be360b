"""The list of flags, with their values in this phase and in the next phase.

The values may differ, because a running process keeps the environment of its start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from console.tui.rows import Row, columns
from trainers.contract.flags import TABLE, Flag
from trainers.contract.values import TRUE

UNSET = "–"
GROUP, NAME = 9, 26


@dataclass(frozen=True, slots=True)
class Item:
    """One line of the list: a flag, or (if `flag` is None) the choice `between` of the launch."""

    flag: Flag | None
    now: str
    following: str | None
    """The value in the next phase, or None if there is no next phase or the value is unknown."""
    changed: bool

    @property
    def help(self) -> str:
        """A sentence about the flag or choice."""
        if self.flag is not None:
            return self.flag.help
        return "after each phase: wait for L, or start the next phase if all gates passed"


def items(
    now: Mapping[str, str], coming: Mapping[str, str] | None, changed: Mapping[str, str],
    between: str | None = None, foreign: bool = False,
) -> list[Item]:  # fmt: skip
    """Returns the flags of the registry, each with its present and its next value.

    `coming` has the values of the next phase, or None if there is no next phase or the values are
    unknown; `changed` has the values that the operator set for that phase. `between` comes first,
    unless it is None. For a foreign program, our flags are left out unless they have a value.
    """
    found = [] if between is None else [Item(None, between, between, False)]
    for flag in TABLE:
        if foreign and flag.setting and flag.name not in {*now, *(coming or ()), *changed}:
            continue
        here = now.get(flag.name, "")
        planned = None if coming is None else coming.get(flag.name, "")
        found.append(Item(flag, here, changed.get(flag.name, planned), flag.name in changed))
    return found


def item_rows(found: list[Item], when: str, width: int) -> list[Row]:
    """Returns the rows of the list; only the first row of a group shows the name of the group.

    A row shows the present value → the next value, and `when` a changed value takes effect.
    """
    room = width - GROUP - NAME - len("→*") - 6
    when_width = min(14, room - 18) if room >= 24 else 0
    value = max(4, (room - when_width) // 2)
    rows, group = [], ""
    for item in found:
        if item.flag is None:
            words = "wait for L" if item.following == "ask" else "go if gates passed"
            name = ("between phases", NAME, "strong")
            rows.append(columns([("", GROUP, ""), name, (words, 24, "")]))
            continue
        name = "" if item.flag.group == group else item.flag.group
        group = item.flag.group
        style = "warn" if item.changed else "" if item.following else "dim"
        cells = [
            (name, GROUP, "dim"),
            (item.flag.name, NAME, "strong" if item.changed else ""),
            (item.now or UNSET, value, "" if item.now else "dim"),
            ("" if item.following is None else "→", 1, "dim"),
            ("" if item.following is None else item.following or UNSET, value, style),
            ("*" if item.changed else " ", 1, "warn"),
        ]
        if when_width:
            cells.append((when * item.changed, when_width, "dim"))
        rows.append(columns(cells))
    return rows


def next_value(flag: Flag, now: str, changed: str | None) -> tuple[bool, str | None]:
    """Returns two values: whether the space key can change a flag, and the new value.

    The value None undoes the change. A bool changes to its other value, then to its present value,
    then to None. A choice goes through its choices, then to None. Any other value must be typed.
    """
    if flag.kind is bool:
        other = "0" if now.lower() in TRUE else "1"
        cycle: list[str | None] = [None, other, "1" if other == "0" else "0"]
    elif isinstance(flag.kind, tuple):
        cycle = [None, *flag.kind]
    else:
        return False, None
    index = cycle.index(changed) if changed in cycle else 0
    return True, cycle[(index + 1) % len(cycle)]
