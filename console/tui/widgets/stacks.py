"""Stacks of all ranks side by side, the odd one first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from console.diagnose.stall import spans
from console.sources.stacks import Frame, Stack, own
from console.tui import format as fmt
from console.tui.rows import Row, columns, rule

LEAST_WIDTH = 36


def grouped(stacks: Mapping[int, Stack]) -> list[list[Stack]]:
    """Returns the stacks grouped by the place of the main thread in one dump.

    The smallest group comes first.
    """
    by_place: dict[tuple[object, ...], list[Stack]] = {}
    for _, stack in sorted(stacks.items()):
        place = (stack.ts, *(frame.short for frame in _frames(stack)))
        by_place.setdefault(place, []).append(stack)
    return sorted(by_place.values(), key=lambda group: (len(group), group[0].rank))


def _frames(stack: Stack) -> tuple[Frame, ...]:
    return stack.threads[0].frames if stack.threads else ()


def rank_list(ranks: Sequence[int]) -> str:
    """Returns `0–2,4–7`: ranks in the shortest form."""
    return ",".join(spans(ranks, "–"))


def top_frame(stack: Stack | None) -> Frame | None:
    """Returns the innermost frame of the rank's own code, else the innermost one."""
    return own(_frames(stack)) if stack else None


def stack_rows(
    stacks: Mapping[int, Stack], ranks: Sequence[int], odd: int | None, width: int, height: int,
    now: float, first: int = 0,
) -> list[Row]:  # fmt: skip
    """Returns one column a rank, innermost frames on top; `first` is the leftmost column.

    Ranks that differ from the majority come first, `odd` before all. Only stacks of the newest dump
    are compared.
    """
    groups = grouped(stacks)
    if not groups:
        return [rule("stacks", width), (("no dump yet; D dumps the stacks of all ranks", "dim"),)]
    newest = max(stack.ts for stack in stacks.values())
    groups.sort(key=lambda group: (all(s.rank != odd for s in group), group[0].ts < newest))
    alike = [group for group in groups if group[0].ts == newest]
    held = [_column(stack, group, alike, odd, now) for group in groups for stack in group]
    held += [_silent(rank, odd) for rank in ranks if rank not in stacks]
    count = max(1, min(len(held), width // LEAST_WIDTH))
    first = min(first, len(held) - count)
    more = f"  {first + 1}–{first + count} of {len(held)} ← →" if count < len(held) else ""
    each = (width - 2 * (count - 1)) // count
    lines = zip_longest(*held[first : first + count], fillvalue=("", ""))
    rows = [columns(((text, each, style) for text, style in cells), "  ") for cells in lines]
    return [rule("stacks", width, f"innermost first{more}  enter whole"), *rows[: height - 1]]


def _column(
    stack: Stack, group: list[Stack], alike: list[list[Stack]], odd: int | None, now: float
) -> list[tuple[str, str]]:
    rank, most = stack.rank, max(map(len, alike))
    old = group not in alike
    alone = len(group) == 1 and odd is None
    differs = not old and len(alike) > 1 and (rank == odd or alone or len(group) < most)
    others = [other.rank for other in group if other is not stack]
    age = f"{fmt.age(now - stack.ts)} ago"
    note = (
        f"  {age}, no stack since" if old
        else f" ◂ differs  {age}" if differs
        else f"  as {rank_list(others)}  {age}" if others
        else f"  {age}"
    )  # fmt: skip
    lines = [(f"rank {rank}{note}", "crit" if differs else "warn" if old else "strong")]
    if not _frames(stack):
        return [*lines, ("no frame in the dump", "dim")]
    dimmed = ((frame.short, frame.is_of_library or old) for frame in _frames(stack))
    return lines + [(text, "dim" if is_dim else "") for text, is_dim in dimmed]


def _silent(rank: int, odd: int | None) -> list[tuple[str, str]]:
    style = "crit" if rank == odd else "strong"
    return [(f"rank {rank}", style), ("no dump: the rank did not respond", "dim")]


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
