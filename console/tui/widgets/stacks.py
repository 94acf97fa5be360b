"""Shows the stacks of all ranks as a tree or side by side, the stacks that differ first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

from console.diagnose.stack_classes import Node, Where, is_of_torch, merge, where
from console.diagnose.stall import spans
from console.sources.stacks import Frame, Stack, innermost_own
from console.tui import format as fmt
from console.tui.rows import Row, clip, columns, fill, flowed, rule

LEAST_WIDTH = 36
LABEL_WIDTH = 14
MAX_INDENT = 8


def grouped(stacks: Mapping[int, Stack]) -> list[list[Stack]]:
    """Returns groups of stacks with the same dump time and the same frames of the main thread.

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
    """Returns ranks in the shortest form: `0–2,4–7`."""
    return ",".join(spans(ranks, "–"))


def top_frame(stack: Stack | None) -> Frame | None:
    """Returns the innermost frame of the rank's own code, or else the innermost frame."""
    return innermost_own(_frames(stack)) if stack else None


def stack_rows(
    stacks: Mapping[int, Stack], ranks: Sequence[int], odd: int | None, width: int, height: int,
    now: float, first: int = 0,
) -> list[Row]:  # fmt: skip
    """Returns one column per rank, innermost frames on top; `first` is the leftmost column.

    Ranks that differ from the majority come first, and `odd` before all others. Only stacks of the
    newest dump are compared.
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
    return [rule("stacks", width, f"innermost first{more}  enter: whole"), *rows[: height - 1]]


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
        f"  {age}, not in newest dump" if old
        else f" ◂ differs  {age}" if differs
        else f"  same as {rank_list(others)}  {age}" if others
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


def needs_tree(stacks: Mapping[int, Stack], ranks: Sequence[int], width: int) -> bool:
    """Returns whether there are too many ranks to show their stacks side by side."""
    return len(stacks) > 2 or (bool(stacks) and len(ranks) * LEAST_WIDTH > width)


def tree_rows(
    stacks: Mapping[int, Stack], ranks: Sequence[int], odd: int | None, width: int, height: int,
    now: float,
) -> list[Row]:  # fmt: skip
    """Returns the frames that ranks have in common, and the place where each group of ranks waits.

    Only stacks of the newest dump are merged. If not all frames fit, each waiting group has one row
    with the innermost frame of its own code.
    """
    newest = max(stack.ts for stack in stacks.values())
    merged = {rank: stack for rank, stack in stacks.items() if stack.ts == newest}
    silent = [rank for rank in ranks if rank not in stacks]
    old = sorted(set(stacks) - set(merged))
    apart = ((silent, "no dump: the rank did not respond", "crit" if odd in silent else "strong"),
             (old, "an older dump only", "warn"))  # fmt: skip
    head = [
        ((fill(rank_list(which), LABEL_WIDTH), style), (f" {text}", "dim"))
        for which, text, style in apart if which
    ]  # fmt: skip
    groups = list(_groups(merge(merged), merged, 0, odd, "strong"))
    rows = head + [row for group in groups for row in _group_rows(*group, width)]
    if len(rows) > height - 1:
        ends = [(ranks, style, at) for ranks, _, style, at, _ in groups if at]
        rows = head + [_short_row(*end, width) for end in ends]
    if len(rows) > height - 1:
        left = len(rows) - height + 2
        rows = [*rows[: max(0, height - 2)], ((f"and {left} more groups", "dim"),)]
    note = f"{fmt.age(now - newest)} ago  outermost first  → by rank  enter whole"
    return [rule("stacks", width, note), *rows][:height]


Group = tuple[tuple[int, ...], int, str, Where | None, list[Frame]]
"""Ranks, depth, style, the class of their stacks if these end here, and the shared frames."""


def _groups(
    node: Node, stacks: Mapping[int, Stack], depth: int, odd: int | None, style: str
) -> Iterator[Group]:
    """Yields the groups of a tree; ranks that end where others continue are a separate group."""
    frames = [node.frame] if node.frame else []
    while len(node.children) == 1 and node.children[0].ranks == node.ranks:
        node = node.children[0]
        frames += [node.frame] if node.frame else []
    continued = {rank for child in node.children for rank in child.ranks}
    ends: dict[Where, list[int]] = {}
    for rank in node.ranks:
        if rank not in continued:
            ends.setdefault(where(stacks[rank]), []).append(rank)
    if len(ends) == 1 and not continued:
        yield node.ranks, depth, style, next(iter(ends)), frames
        return
    if frames:
        yield node.ranks, depth, style, None, frames
        depth += 1
    sizes = [len(held) for held in (*ends.values(), *(each.ranks for each in node.children))]

    def styled(ranks: Sequence[int]) -> str:
        if odd in stacks:
            return "crit" if odd in ranks else "strong"
        return "crit" if style == "crit" or len(ranks) < max(sizes) else "strong"

    for at, held in ends.items():
        yield tuple(held), depth, styled(held), at, []
    for child in sorted(node.children, key=lambda child: odd not in child.ranks):
        yield from _groups(child, stacks, depth, odd, styled(child.ranks))


def _group_rows(
    ranks: Sequence[int], depth: int, style: str, at: Where | None, frames: Sequence[Frame],
    width: int,
) -> list[Row]:  # fmt: skip
    label = fill(rank_list(ranks), LABEL_WIDTH) + " " * min(1 + 2 * depth, MAX_INDENT)
    parts: list[Row] = [((at.text, _text_style(style, at)),)] if at else []
    for number, frame in enumerate(frames):
        mark = " › " if number else "  " if at else ""
        parts.append(((mark, "dim"), (frame.short, _frame_style(frame))))
    lines = flowed(parts, width - len(label), 0)
    blank = " " * len(label)
    return [((blank if number else label, style), *line) for number, line in enumerate(lines)]


def _short_row(ranks: Sequence[int], style: str, at: Where, width: int) -> Row:
    label = (fill(rank_list(ranks), LABEL_WIDTH) + " ", style)
    place = f"  {at.own.short}" if at.own and at.own.short not in at.text else ""
    return clip((label, (at.text, _text_style(style, at)), (place, "")), width)


def _text_style(style: str, at: Where) -> str:
    return "warn" if at.kind == "native" else style if style == "crit" else ""


def _frame_style(frame: Frame) -> str:
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
