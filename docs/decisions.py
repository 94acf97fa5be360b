"""Prints the table of decisions that stands in decisions.md: `python -m docs.decisions`."""

from __future__ import annotations

import sys

from console.decisions import TABLE


def as_markdown() -> str:
    """Returns the table for the documents."""
    lines = ["| decision | what | needs | a source is missing | sources disagree |",
             "| --- | --- | --- | --- | --- |"]  # fmt: skip
    for row in TABLE:
        needs = "; and ".join(row.sources)
        lines.append(f"| `{row.name}` | {row.says} | {needs} | {row.absent} | {row.disagree} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(as_markdown())
