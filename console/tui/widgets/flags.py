"""The list of flags, with their values in this phase and in the next phase.

The values may differ, because a running process keeps the environment of its start.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from console.tui.rows import Row, columns, labelled, wrap
from trainers.contract.flags import FLAGS, Flag, Key, expected
from trainers.contract.values import TRUE

UNSET = "–"
GROUP, NAME = 9, 26
BETWEEN = Flag(
    "wait for L after a phase", Key(bool, True, 0, 0, "wait for L: 0 = no"), "launch.between"
)
"""The choice `between` of a launch, the first flag of a draft: 1 means ask, 0 means go."""


@dataclass(frozen=True, slots=True)
class Item:
    """One line of the list: a flag and its values."""

    flag: Flag
    now: str
    planned: str | None
    """The planned value in the next phase; None without a next phase or without known values."""
    held: str | None = None
    """The value that the operator set for the next phase, or None."""
    lasts: bool = False
    """True if that value is also set for all later phases."""

    @property
    def following(self) -> str | None:
        """The value in the next phase, or None if it is not known."""
        return self.planned if self.held is None else self.held

    @property
    def changed(self) -> bool:
        return self.held not in (None, self.planned)


def items(
    now: Mapping[str, str], coming: Mapping[str, str] | None, changed: Mapping[str, str],
    flags: Iterable[Flag] = FLAGS.values(), lasting: Collection[str] = (),
) -> list[Item]:  # fmt: skip
    """Returns flags, each with its present and its next value.

    `coming` has the planned values of the next phase. It is None if there is no next phase, or if
    its values are not known. `changed` has the values that the operator set for that phase, and
    `lasting` the names of those that are set for all later phases too.
    """
    return [
        Item(flag, now.get(flag.name, ""), None if coming is None else coming.get(flag.name, ""),
             changed.get(flag.name), flag.name in lasting)
        for flag in flags
    ]  # fmt: skip


def item_rows(found: list[Item], when: str, width: int) -> list[Row]:
    """Returns the rows of the list; only the first row of a group shows the name of the group.

    A row shows now → next value and, in a wide list, when a changed value takes effect: in the
    phase `when`, or in all later phases.
    """
    room = width - GROUP - NAME - len("→*") - 6
    when_width = min(14, room - 18) if room >= 24 else 0
    value = max(4, (room - when_width) // 2)
    rows, group = [], ""
    for item in found:
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
            cells.append((("all later" if item.lasts else when) * item.changed, when_width, "dim"))
        rows.append(columns(cells))
    return rows


def whole_rows(found: list[Item], width: int) -> list[Row]:
    """Returns the flags with their whole values, what each flag accepts, and its whole help."""
    rows: list[Row] = []
    for item in found:
        values = item.now or UNSET
        if item.following is not None:
            values += f" → {item.following or UNSET}{' *' * item.changed}"
        text = f"{expected(item.flag)}.  {item.flag.key.help}"
        rows.append(((f"{item.flag.name} ", "strong"), (values, "warn" if item.changed else "")))
        rows += labelled(("    ", ""), wrap(text, width - 5), "dim")
    return rows


def next_value(flag: Flag, planned: str, held: str | None) -> tuple[bool, str | None]:
    """Returns two values: whether the space key can change a flag, and the new value.

    The key goes through all values except the planned value. Then follows None, which undoes the
    change. A value of another kind than a bool or a choice must be typed.
    """
    if flag.key.kind is bool:
        choices, planned = ("1", "0"), planned and str(int(planned.lower() in TRUE))
    elif isinstance(flag.key.kind, tuple):
        choices = flag.key.kind
    else:
        return False, None
    cycle = [None, *(choice for choice in choices if choice != planned)]
    index = cycle.index(held) if held in cycle else 0
    return True, cycle[(index + 1) % len(cycle)]
