"""Prints keys.md: `python -m docs.keys > docs/keys.md`."""

from __future__ import annotations

import sys

from console.action_table import KEYS
from console.tui.keys import NAMES, TABLE, VIEWS

TEXT = f"""\
# Keys

This page is generated from the tables in `console/action_table.py` and `console/tui/keys.py`. The
keys `{" ".join(KEYS)}` are for actions. The screen asks for confirmation before an action; the
default answer is No. The row of a key with several actions has one sentence per action. The
brackets say what each action keeps or loses.
"""
WORDS = "The words and abbreviations of the screen are in [words.md]"
WORDS += "(words.md#abbreviations-on-the-screen)."


def as_markdown() -> str:
    """Returns the page on the keys, in Markdown."""
    lines = [TEXT, "| key | does | where |", "| --- | --- | --- |"]
    for key in TABLE:
        names = " ".join(f"`{NAMES.get(name, name)}`" for name in key.keys)
        where = "everywhere" if key.views == VIEWS else ", ".join(key.views)
        lines.append(f"| {names} | {key.full_help} | {where} |")
    return "\n".join((*lines, "", WORDS)) + "\n"


if __name__ == "__main__":
    sys.stdout.write(as_markdown())
