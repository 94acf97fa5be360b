"""Prints the table in keys.md: `python -m docs.keys`."""

from __future__ import annotations

import sys

from console.tui.keys import NAMES, TABLE, VIEWS


def as_markdown() -> str:
    """Returns the table of keys in Markdown."""
    lines = ["| key | does | where |", "| --- | --- | --- |"]
    for key in TABLE:
        names = " ".join(f"`{NAMES.get(name, name)}`" for name in key.keys)
        where = "everywhere" if key.views == VIEWS else ", ".join(key.views)
        asks = f" (asks; {key.asks})" if key.asks else ""
        lines.append(f"| {names} | {key.help}{asks} | {where} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(as_markdown())
