"""Cuts, wraps, aligns and compares rows of styled text; a row is plain data without Textual."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from operator import ne

from rich.cells import cell_len as measured
from rich.cells import set_cell_size

Span = tuple[str, str]
"""A piece of text and the name of its style (`styles.STYLES`)."""
Row = tuple[Span, ...]
BLANK: Row = ()


def cell_len(text: str) -> int:
    """Returns the width of text in cells; fast for ASCII."""
    return len(text) if text.isascii() else measured(text)


def text_of(row: Row) -> str:
    """Returns the row without its styles."""
    return "".join(text for text, _ in row)


def width_of(row: Row) -> int:
    """Returns the width of the row in cells."""
    return cell_len(text_of(row))


def cut(text: str, width: int) -> str:
    """Returns at most `width` cells of `text`; an ellipsis marks a cut."""
    if width <= 0:
        return ""
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, width - 1).rstrip() + "…"


def fill(text: str, width: int, right: bool = False) -> str:
    """Returns the text cut or padded to `width` cells; with `right`, padded on the left."""
    text = cut(text, width)
    blank = " " * (width - cell_len(text))
    return blank + text if right else text + blank


def safe(row: Row) -> Row:
    """Returns a row with `�` for each unprintable character, for example of an escape sequence."""
    if all(text.isprintable() for text, _ in row):
        return row
    return tuple(
        ("".join(c if c.isprintable() else "�" for c in text), style) for text, style in row
    )


def clip(row: Row, width: int) -> Row:
    """Returns at most `width` cells of a row; an ellipsis marks a cut."""
    if width_of(row) <= width:
        return row
    kept: list[Span] = []
    left = width
    for text, style in row:
        if cell_len(text) >= left:
            kept.append((cut(text + "……", left), style))
            break
        kept.append((text, style))
        left -= cell_len(text)
    return tuple(kept)


def labelled(label: Span, lines: Iterable[str], style: str = "") -> list[Row]:
    """Returns one row per line: the label before the first line, spaces before the others."""
    blank = (" " * cell_len(label[0]), "")
    return [(blank if index else label, (line, style)) for index, line in enumerate(lines)]


def spread(left: Row, right: Row, width: int) -> Row:
    """Returns a row with `left` and `right` at its ends; leaves `right` out if both do not fit."""
    gap = width - width_of(left) - width_of(right)
    if gap < 1:
        return clip(left, width)
    return (*left, (" " * gap, ""), *right)


def rule(title: str, width: int, right: str = "", focused: bool = False, detail: str = "") -> Row:
    """Returns the heading of a panel: a rule with a title, a detail, and a note at its end."""
    head: Row = ((f"{title} ", "focus" if focused else "title"),) if title else ()
    head = (*head, (f"{detail} ", "dim")) if detail else head
    right = cut(right, width - width_of(head) - 2)
    tail = f" {right}" if right else ""
    room = width - width_of(head) - cell_len(tail)
    if room < 1:
        return clip(head, width)
    return (*head, ("─" * room, "line"), (tail, "dim"))


def wrap(text: str, width: int, limit: int = 99) -> list[str]:
    """Returns at most `limit` lines of at most `width` cells, broken at spaces if possible."""
    text = " ".join(text.split())
    if not text:
        return []
    *lines, last = chop(text, max(2, width), limit, 0)
    whole_words, blank, _ = last.rpartition(" ")
    return [*lines, f"{whole_words} …" if blank and not text.endswith(last) else last]


def chop(text: str, width: int, limit: int = 20, first: int | None = None) -> list[str]:
    """Breaks text into at most `limit` lines of at most `width` cells, if possible at spaces.

    Unlike `wrap`, keeps the spacing within a line, because logs are often tables. Does not break at
    a space before index `first` (by default the middle of the line).
    """
    lines: list[str] = []
    while cell_len(text) > width and len(lines) < limit - 1:
        reach = len(set_cell_size(text, width + 1))
        space = text.rfind(" ", width // 2 if first is None else first, reach)
        head = text[:space] if space > 0 else set_cell_size(text, width).rstrip()
        lines.append(head or text[:1])
        text = text[len(lines[-1]) :].lstrip(" ")
    return [*lines, cut(text, width)]


Part = tuple[int, Sequence[Row]]
"""A priority (the highest stays longest) and the forms of one part of a line, longest first."""


def fit(parts: Sequence[Part], width: int, gap: int = 2) -> Row:
    """Joins parts with `gap` blanks; if not all fit, the least important parts are shortened first.

    If the shortest forms do not fit either, the least important parts are left out first.
    """
    chosen = [0] * len(parts)
    order = sorted(range(len(parts)), key=lambda i: parts[i][0])

    def build() -> Row:
        joined: list[Span] = []
        for (_, forms), level in zip(parts, chosen, strict=True):
            if level < len(forms) and forms[level]:
                joined += [(" " * gap, "")] if joined else []
                joined += forms[level]
        return tuple(joined)

    row = build()
    for away in (0, 1):
        for index in order:
            while width_of(row) > width and chosen[index] < len(parts[index][1]) - 1 + away:
                chosen[index] += 1
                row = build()
    return clip(row, width)


def changed(old: Row, new: Row, width: int) -> tuple[int, int] | None:
    """Returns where the cells that differ begin and end, or None if all cells are equal.

    If the numbers of cells and characters differ in one of two different rows, returns the range of
    the whole row.
    """
    if old == new:
        return None
    texts = text_of(old), text_of(new)
    if any(cell_len(text) != len(text) for text in texts):
        return 0, width
    a: Sequence[object]
    a, b = texts
    if [(len(text), style) for text, style in old] != [(len(text), style) for text, style in new]:
        a, b = _cells(old, width), _cells(new, width)
    differs = list(map(ne, a[:width], b[:width]))
    if not any(differs):
        return None
    return differs.index(True), len(differs) - differs[::-1].index(True)


def _cells(row: Row, width: int) -> list[Span]:
    """Returns the character and the style of each cell, with blanks up to `width`."""
    held = list(chain.from_iterable(zip(text, repeat(style)) for text, style in row))
    return held + [(" ", "")] * (width - len(held))


def columns(cells: Iterable[tuple[str, int, str]], gap: str = " ") -> Row:
    """Returns a table row; a cell is (text, width, style), and a negative width aligns right."""
    row: list[Span] = []
    for text, width, style in cells:
        if row:
            row.append((gap, ""))
        row.append((fill(text, abs(width), width < 0), style))
    return tuple(row)
