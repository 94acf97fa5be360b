"""Styles by name, in the terminal's own sixteen colours."""

from __future__ import annotations

from rich.style import Style

STYLES: dict[str, Style] = {
    "": Style.null(),
    "dim": Style(dim=True),
    "line": Style(color="bright_black"),
    "title": Style(bold=True),
    "focus": Style(bold=True, color="cyan"),
    "strong": Style(bold=True),
    "ok": Style(color="green"),
    "warn": Style(color="yellow"),
    "crit": Style(color="red", bold=True),
    "info": Style(color="cyan"),
    "alarm": Style(color="red", bold=True, reverse=True),
    "caution": Style(color="yellow", bold=True, reverse=True),
    "key": Style(color="cyan"),
    "now": Style(color="cyan", bold=True),
    "data": Style(color="blue"),
    "cursor": Style(reverse=True),
    "found": Style(color="yellow", reverse=True),
    "stale": Style(color="red", dim=True),
}

STATE_STYLE = {
    "running": "ok", "completed": "ok", "halted": "warn", "halting": "warn", "stopping": "warn",
    "stopped": "warn", "waiting": "warn", "queued": "dim", "starting": "info",
    "restarting": "warn", "unsupervised": "caution", "stalled": "alarm", "failed": "alarm",
    "crashed": "alarm", "killed": "alarm", "lost": "alarm",
}  # fmt: skip
LEVEL_STYLE = {"info": "info", "warn": "warn", "crit": "crit"}

PLAIN = str.maketrans(
    "─│…–·×→←↓↑↻◂▸›✓✗○●▏▎▍▌▋▊▉█°▁▂▃▄▅▆▇≥≤÷", "-|~-.x><v^@<>>+x.*::::####o_.-:=+*></"
)  # fmt: skip
"""An ASCII character for each of these characters, for a terminal without UTF-8.

Such a terminal shows other non-ASCII characters as "?".
"""
ascii_only = False
"""True for a terminal without UTF-8."""


def drawn(text: str) -> str:
    """Returns text as the terminal can display it, with the same number of characters."""
    if not ascii_only or text.isascii():
        return text
    return "".join(c if c.isascii() else "?" for c in text.translate(PLAIN))
