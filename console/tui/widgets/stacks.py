"""Shows the stacks of all ranks side by side: one column per group of ranks with the same stack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from console.diagnose.stack_classes import is_of_torch, where
from console.sources.stacks import Frame, Stack, innermost_own
from console.status_text import spans
from console.tui import format as fmt
from console.tui.rows import Row, columns, rule, wrap

LEAST_WIDTH = 36
Group = tuple[tuple[int, ...], Stack | None]
"""Ranks with the same stack, and this stack, or None for ranks without a dump."""


def frames_of(stack: Stack) -> tuple[Frame, ...]:
    """Returns the frames of the main thread."""
    return stack.threads[0].frames if stack.threads else ()


def top_frame(stack: Stack | None) -> Frame | None:
    """Returns the innermost frame of the rank's own code, or else the innermost frame."""
    return innermost_own(frames_of(stack)) if stack else None


def grouped(stacks: Mapping[int, Stack], ranks: Sequence[int], odd: int | None) -> list[Group]:
    """Returns groups of ranks whose main threads have the same frames in the same dump.

    The group of the blamed rank `odd` comes first, then ranks without a dump, then the other
    groups, the smallest first; groups of an older dump come last.
    """
    held: dict[tuple[object, ...], list[int]] = {}
    for rank, stack in sorted(stacks.items()):
        place = (stack.ts, *(frame.short for frame in frames_of(stack)))
        held.setdefault(place, []).append(rank)
    groups: list[Group] = [(tuple(alike), stacks[alike[0]]) for alike in held.values()]
    if silent := tuple(rank for rank in ranks if rank not in stacks):
        groups.append((silent, None))
    newest = max((stack.ts for stack in stacks.values()), default=0.0)
    return sorted(groups, key=lambda group: (
        odd not in group[0], group[1] is not None, group[1] and group[1].ts < newest,
        len(group[0]), group[0],
    ))  # fmt: skip


def stack_rows(
    groups: Sequence[Group], odd: int | None, width: int, height: int, now: float, first: int = 0
) -> list[Row]:
    """Returns one column per group from the group `first` on, innermost frames on top.

    Only stacks of the newest dump are compared; if they are all the same, no group is marked. The
    group of the blamed rank `odd` is marked. If no rank is blamed, each group that is smaller than
    the largest is marked, or every group if each has only one rank.
    """
    newest = max(stack.ts for _, stack in groups if stack)
    sizes = [len(ranks) for ranks, stack in groups if stack and stack.ts == newest]
    most = max(sizes)
    shown = groups[first : first + max(1, width // LEAST_WIDTH)]
    each = (width - 2 * (len(shown) - 1)) // len(shown)
    held = []
    for ranks, stack in shown:
        differs = odd in ranks if odd is not None else len(ranks) < most or most == 1
        is_marked = differs and len(sizes) > 1
        is_old = stack is not None and stack.ts < newest
        held.append(_column(ranks, stack, is_old, is_marked, each, now))
    more = f"  {first + 1}–{first + len(shown)} of {len(groups)} ← →"
    note = f"innermost first{more * (len(shown) < len(groups))}  enter: whole"
    lines = zip_longest(*held, fillvalue=("", ""))
    rows = [columns(((text, each, style) for text, style in cells), "  ") for cells in lines]
    return [rule("stacks", width, note), *rows[: height - 1]]


def _column(
    ranks: Sequence[int], stack: Stack | None, is_old: bool, is_marked: bool, width: int, now: float
) -> list[tuple[str, str]]:
    """Returns text and style of each cell: the ranks, what they do, and their frames."""
    head = f"rank{'s' * (len(ranks) > 1)} {','.join(spans(ranks, '–'))}"
    if stack is None:
        return [(head, "crit"), ("no dump of this group", "dim")]
    age = f"{fmt.age(now - stack.ts)} ago"
    if is_old:
        head, style = f"{head}  {age}, not in newest dump", "warn"
    else:
        head, style = f"{head}{' ◂ differs' * is_marked}  {age}", "crit" if is_marked else "strong"
    at = where(stack)
    frames = [(frame.short, "dim" if is_old else _style(frame)) for frame in frames_of(stack)]
    waits = [(line, "warn" if at.kind == "native" else "") for line in wrap(at.text, width)]
    return [(head, style), *waits, *frames]


def _style(frame: Frame) -> str:
    return "data" if is_of_torch(frame) else "dim" if frame.is_of_library else ""


def whole_rows(stack: Stack, width: int) -> list[Row]:
    """Returns rows for all threads of one rank."""
    rows: list[Row] = []
    for thread in stack.threads:
        rows.append(((f"thread {thread.name}", "strong"),))
        for frame in thread.frames:
            where = f"{frame.file}:{frame.line} "
            room = width - 2 - len(frame.function)
            where = where if len(where) <= room else "…" + where[1 - room :]
            rows.append((("  ", ""), (where, "dim"), (frame.function, "")))
    return rows
