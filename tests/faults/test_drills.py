"""The cases and the scores of `make drills`, and one whole case."""

from __future__ import annotations

import random
import tempfile
import threading
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.drill_cases import BY_NAME, CASES, EITHER, OTHER_PHASES, Case, Truth, chosen, truth
from benchmarks.drill_faults import AUTHORS, CAUSES, FAULTS
from benchmarks.drill_inject_more import INJECT, PREPARE
from benchmarks.drill_score import Result, Said, Score, confusion, report, said_by, score
from benchmarks.drills import drill, ended_by
from tests.launches import PROGRAMS

ROOT = Path(__file__).parents[2]
SLEEP = Case("sleep-forward", 2, 1, True)


def said(cause: str, rank: int | None, phase: str = "forward", sure: str = "medium") -> Said:
    return Said(cause, rank, phase, sure, 5.0, 6.0)


def test_the_cases_are_many_and_distinct_and_cover_every_cause_rank_and_kind_of_program():
    assert len(set(CASES)) == len(CASES) >= 320
    for author in AUTHORS:
        cases = chosen("", 0, 1, author)
        assert len(cases) >= 150
        assert {truth(case).cause for case in cases} == set(CAUSES)
        assert {case.world for case in cases} == {2, 4}
        assert 0.3 <= sum(not case.phases for case in cases) / len(cases) <= 0.4
    assert all(case.rank in (None, *range(case.world)) for case in CASES)


def test_every_fault_has_a_mechanism_in_the_program_and_every_mechanism_a_fault():
    text = "".join(path.read_text() for path in PROGRAMS.glob("drilled_*.py"))
    mechanisms = {fault.mechanism for fault in FAULTS}
    assert all(f'"{name}"' in text for name in mechanisms)
    assert mechanisms >= EITHER
    assert BY_NAME.keys() >= OTHER_PHASES.keys()
    assert {*INJECT, *PREPARE} <= mechanisms
    assert len(BY_NAME) == len(FAULTS)


def test_a_verdict_is_right_in_each_part_that_agrees_with_the_truth():
    right = truth(SLEEP)
    assert score(right, said("sleep", 1)) == Score(True, True, True)
    marks = score(right, said("sleep", 1, "backward"))
    assert (marks.rank, marks.phase, marks.cause) == (True, False, True)
    assert marks.wrong_high
    marks = score(right, said("sleep", 0))
    assert (marks.rank, marks.phase, marks.cause) == (False, True, True)


@pytest.mark.parametrize("nothing", [None, said("unknown", 1), said_by({"rank": 1}, 1, 1)])
def test_no_verdict_and_an_unknown_cause_are_wrong_in_everything(nothing):
    marks = score(truth(SLEEP), nothing)
    assert (marks.rank, marks.phase, marks.cause) == (False, False, False)
    assert marks.wrong_high


def test_the_truth_is_the_rank_of_the_fault_and_a_connection_may_have_none():
    assert truth(Case("swap-log", 2, 1, True)).ranks == {1}
    assert truth(Case("swap-log", 4, 3, True)).ranks == {3}
    assert truth(Case("filter-log", 2, 1, True)).ranks == {1, None}
    assert truth(Case("filter-backward", 2, None, True)).ranks == {None}
    assert "" in truth(Case("sleep-early", 2, 1, True)).phases


@pytest.mark.parametrize(
    ("why", "cause", "rank", "phase"),
    [
        ("rank 0: ValueError: no column (train.py:176) at step 6 (code 1); ranks 1, 3 ended "
         "because of it", "exited", 0, ""),
        ("rank 3 crashed in native code (SIGABRT) at step 6 in backward, in f (a.py:2); rank 1 "
         "ended because of it", "exited", 3, "backward"),
        ("rank 1 exited first (code 0) at step 6, while the others continued", "exited", 1, ""),
        ("halted at step 6 by an operator", "unknown", None, ""),
    ],
)  # fmt: skip
def test_the_reason_of_an_end_gives_the_blame_as_an_operator_reads_it(why, cause, rank, phase):
    found = ended_by(why)
    assert (found["cause"], found["rank"], found["phase"]) == (cause, rank, phase)


@given(
    st.dictionaries(
        st.sampled_from(["cause", "rank", "phase", "sure", "sentence"]),
        st.none() | st.booleans() | st.text() | st.lists(st.integers()),
    )
)
def test_a_document_of_any_shape_gives_a_verdict_that_can_be_scored(document):
    found = said_by(document, 1.0, 2.0)
    assert found.rank is None
    assert score(Truth(frozenset({0}), frozenset(), "sleep"), found).rank is False


def test_the_report_counts_wrong_sure_verdicts_and_names_what_did_not_run():
    results = [
        Result(SLEEP, said("sleep", 1, "forward", "high")),
        Result(Case("sleep-log", 2, 1, False), said("lock", 1, "forward", "high")),
        Result(Case("mutex-forward", 2, 0, True)),
        Result(Case("disk-save", 2, 0, True), not_run="no loop device"),
    ]
    text = report(results)
    assert "| both | rank | 2/3 | 67 % |" in text
    assert "| 1 | of these right | 1/2 | 50 % |" in text
    assert "| 2 | cause | 0/0 |" in text
    assert "| all | rank | 2/3 | 67 % |" in text
    assert "| phases | phase | 1/2 | 50 % |" in text
    assert "| of these wrong | 1/2 = 50 % |" in text
    assert "- disk-save 0/2 phases: no loop device" in text
    rows = confusion(results[:3]).splitlines()
    assert rows[0] == "| true cause ↓ verdict → | lock | sleep | none |"
    assert rows[2:] == ["| native |  |  | 1 |", "| sleep | 1 | 1 |  |"]


def test_a_seed_draws_the_same_sample_and_every_cause_before_a_second_of_one():
    found = chosen("", 16, 7)
    assert found == chosen("", 16, 7)
    assert Counter(truth(case).cause for case in found) == dict.fromkeys(CAUSES, 1)
    assert found != chosen("", 16, random.Random(8).randrange(1000))
    assert [case.name for case in chosen("^sleep-forward.*phases$", 0, 1)] == [
        "sleep-forward 1/2 phases", "sleep-forward 0/4 phases",
    ]  # fmt: skip


def test_one_case_runs_from_its_launch_to_its_marks_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = drill(SLEEP, threading.Event())
    assert not result.not_run
    assert result.said is not None, "no verdict"
    marks = score(truth(SLEEP), result.said)
    assert (marks.rank, marks.phase) == (True, True)
    assert result.said.first_s <= result.said.final_s
    assert not processes(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_fault_that_this_machine_does_not_permit_is_named_and_has_no_verdict(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    result = drill(Case("inspect-optimizer", 4, 1, True), threading.Event())
    assert (result.said, result.not_run) == (None, "needs gdb")
    assert "- inspect-optimizer 1/4 phases: needs gdb" in report([result])


def processes(folder: Path) -> list[str]:
    """Returns the processes with an argument that is a path in a `drill-` folder of `folder`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode("utf-8", "replace").split("\0")
        except OSError:
            continue
        if any(word.startswith(f"{folder}/drill-") for word in words):
            found.append(" ".join(words))
    return found
