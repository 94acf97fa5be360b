"""Recorded evidence: without a part of it, no wrong verdict has the confidence high.

The files in `recorded/` come from `benchmarks.drills --record`; their flight records are shorter.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from benchmarks import drill_evidence
from benchmarks.drill_cases import Case
from benchmarks.drill_without import KINDS, OF_ONE, marks

PAIRS = tuple(itertools.combinations((
    "states of processes and threads", "system call and wchan", "descriptors",
    "the process evidence of the culprit", "the process evidence of one other rank",
), 2))  # fmt: skip
"""Pairs of kinds of evidence. If both were missing, earlier rules gave wrong verdicts with high
confidence."""
RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.json"))


def known(path: Path) -> tuple[Case, drill_evidence.Inputs]:
    record, inputs = drill_evidence.read(path)
    return Case(
        **{key: record["case"][key] for key in ("fault", "world", "rank", "phases")}
    ), inputs


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_evidence_reads_back_as_it_was_and_gives_the_verdict_again(path, tmp_path):
    record, inputs = drill_evidence.read(path)
    drill_evidence.write(tmp_path / "again.json", inputs, **record)
    assert drill_evidence.read(tmp_path / "again.json") == (record, inputs)
    found = drill_evidence.explained(inputs)
    said = {key: record["said"][key] for key in ("cause", "rank", "phase", "sure")}
    assert said == {key: getattr(found, key) for key in said}


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_missing_evidence_makes_no_verdict_wrong_and_sure(path):
    case, inputs = known(path)
    for some in (*((kind,) for kind in (*KINDS, *OF_ONE)), *PAIRS):
        found = marks(case, some, inputs)
        assert not (found.sure == "high" and found.score.wrong_high), (some, found)


def test_each_kind_of_evidence_that_is_removed_was_there_and_is_used():
    """Without a change to any recorded evidence, the removal of a kind would test nothing."""
    cases = [known(path) for path in RECORDED]
    for kind in [*KINDS, *OF_ONE]:
        change = OF_ONE[kind] if kind in OF_ONE else (lambda of, _, kind=kind: KINDS[kind](of))
        changed = [change(inputs, case.rank or 0) != inputs for case, inputs in cases]
        assert any(changed) == (kind != "nothing"), kind
