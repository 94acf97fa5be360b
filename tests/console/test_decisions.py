"""The table of decisions is in the documentation, and a test proves each case of each row."""

from __future__ import annotations

import re
from pathlib import Path

from docs.decisions import CASES, DECISIONS, FACT, TABLE, as_markdown

ROOT = Path(__file__).parents[2]
MARK = re.compile(r'decision\(\s*"([\w-]+)",\s*"(\w+)"\s*\)')


def test_the_document_holds_the_table():
    assert as_markdown() in (ROOT / "docs/decisions.md").read_text()


def test_each_row_names_two_sources_or_a_fact():
    assert len(DECISIONS) == len(TABLE)
    for row in TABLE:
        assert len(row.sources) >= 2 or FACT in row.sources[0] or row.name == "stop", row.name


def test_each_row_is_proven_for_each_case():
    text = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    proven = set(MARK.findall(text))
    wanted = {(row.name, case) for row in TABLE for case in CASES}
    assert proven == wanted
