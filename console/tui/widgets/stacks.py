"""Stacks side by side: equal ones grouped, the odd one first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from console.sources.stacks import Frame, Stack
from console.tui import format as fmt
from console.tui.rows import Row, cut, fill, rule

LEAST_WIDTH = 36
_LIBRARY = ("/site-packages/", "/dist-packages/", "/lib/python", "<frozen")


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks whose main threads stand at the same place."""

    ranks: tuple[int, ...]
    frames: tuple[Frame, ...]
    newest: float


def grouped(stacks: Mapping[int, Stack]) -> list[Group]:
    """Returns the groups, the smallest first: who differs from the many stands out."""
    by_place: dict[tuple[str, ...], list[Stack]] = {}
    for rank in sorted(stacks):
        stack = stacks[rank]
        frames = stack.threads[0].frames if stack.threads else ()
        by_place.setdefault(tuple(frame.short for frame in frames), []).append(stack)
    groups = [
        Group(
            tuple(stack.rank for stack in held),
            held[0].threads[0].frames if held[0].threads else (),
            max(stack.ts for stack in held),
        )
        for held in by_place.values()
    ]
    return sorted(groups, key=lambda group: (len(group.ranks), group.ranks))


def rank_list(ranks: Sequence[int]) -> str:
    """Returns `0–2,4–7`: ranks as short as they can be written."""
    parts: list[str] = []
    start = before = None
    for rank in [*sorted(ranks), None]:
        if start is not None and before is not None and rank != before + 1:
            parts.append(str(start) if start == before else f"{start}–{before}")
            start = None
        if start is None:
            start = rank
        before = rank
    return ",".join(parts)


def top_frame(stack: Stack | None) -> Frame | None:
    """Returns the innermost frame of the rank's own code, else the innermost one."""
    if stack is None or not stack.threads or not stack.threads[0].frames:
        return None
    frames = stack.threads[0].frames
    own = (frame for frame in frames if not any(part in frame.file for part in _LIBRARY))
    return next(own, frames[0])


def stack_rows(
    stacks: Mapping[int, Stack], odd: int | None, width: int, height: int, now: float,
    first: int = 0,
) -> list[Row]:  # fmt: skip
    """Returns the groups in columns, innermost frames on top; `first` is the leftmost group."""
    groups = grouped(stacks)
    groups.sort(key=lambda group: odd not in group.ranks)
    if not groups:
        return [rule("stacks", width), (("no dump yet; D dumps the stacks of all ranks", "dim"),)]
    age = fmt.age(now - max(group.newest for group in groups))
    count = max(1, min(len(groups), width // LEAST_WIDTH))
    first = min(first, max(0, len(groups) - count))
    shown = groups[first : first + count]
    hidden = f"  {first + 1}–{first + count} of {len(groups)} ← →" if count < len(groups) else ""
    rows = [rule("stacks", width, f"innermost first  {age} ago{hidden}  enter whole")]
    each = (width - 2 * (count - 1)) // count
    columns = [_column(group, odd, each, height - 1, len(groups) > 1) for group in shown]
    for lines in zip(*columns, strict=True):
        row: list[tuple[str, str]] = []
        for index, (text, style) in enumerate(lines):
            row += [("  ", "")] if index else []
            row.append((fill(text, each), style))
        rows.append(tuple(row))
    return rows


def _column(
    group: Group, odd: int | None, width: int, height: int, differ: bool
) -> list[tuple[str, str]]:
    is_odd = odd in group.ranks or (odd is None and differ and len(group.ranks) == 1)
    name = f"{'rank' if len(group.ranks) == 1 else 'ranks'} {rank_list(group.ranks)}"
    if len(group.ranks) > 1:
        name += f" ({len(group.ranks)})"
    lines = [(f"{name}{' ◂ differs' if is_odd and differ else ''}", "crit" if is_odd else "strong")]
    if not group.frames:
        lines.append(("no frame in the dump", "dim"))
    for frame in group.frames[: height - 1]:
        library = any(part in frame.file for part in _LIBRARY)
        lines.append((cut(frame.short, width), "dim" if library else ""))
    lines += [("", "")] * (height - len(lines))
    return lines[:height]


def whole_rows(stack: Stack, width: int) -> list[Row]:
    """Returns all threads of one rank."""
    rows: list[Row] = []
    for thread in stack.threads:
        rows.append(((f"thread {thread.name}", "strong"),))
        for frame in thread.frames:
            where = f"{frame.file}:{frame.line} "
            room = width - 2 - len(frame.function)
            where = where if len(where) <= room else "…" + where[1 - room :]
            rows.append((("  ", ""), (where, "dim"), (frame.function, "")))
    return rows
