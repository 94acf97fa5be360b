"""The table of faults is complete, and each row has a test."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.faults.scene import ROOT
from tests.faults.table import BY_NUMBER, ROWS

BEYOND_ONE_MACHINE, STRETCH = {"36", "37", "38"}, {"39", "40", "41"}


def marked() -> set[str]:
    """Returns the rows in the marks of the tests of this folder."""
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    return set(re.findall(r'mark\.fault\("(\w+)"', text))


def test_every_row_of_grade_a_and_b_is_there_once():
    numbers = [row.number for row in ROWS]
    assert len(set(numbers)) == len(numbers)
    wanted = {str(number) for number in range(1, 42)} - BEYOND_ONE_MACHINE - STRETCH
    assert {number for number in numbers if number.isdecimal()} == wanted
    assert {row.grade for row in ROWS} == {"A", "B"}


def test_every_row_has_a_proof():
    assert marked() <= set(BY_NUMBER)
    for row in ROWS:
        assert row.number in marked() or row.elsewhere, row


def test_the_proofs_elsewhere_are_there():
    for row in ROWS:
        for node in row.elsewhere:
            path, _, name = node.partition("::")
            tree = ast.parse((ROOT / path).read_text())
            kinds = ast.FunctionDef | ast.AsyncFunctionDef
            assert name in {n.name for n in tree.body if isinstance(n, kinds)}, node
