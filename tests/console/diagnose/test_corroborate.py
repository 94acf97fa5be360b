"""The second source that a strong action or a verdict of high confidence needs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from console.diagnose.rank_evidence import RankEvidence, why_unconfirmed
from console.diagnose.rules import HALTING, RULES
from console.diagnose.verdict import diagnose
from console.plan import Watch
from console.sources.pace import progress_of
from tests.console.diagnose.watched import Watched
from trainers.contract import rundir
from trainers.run_records import CSV_COLUMNS

WATCH = Watch(stall_floor_s=10, startup_s=60, stall_act_s=20)
decision = pytest.mark.decision


def changes(make, rule, seconds=200):
    """Updates a watchdog once a second; returns kind and text of each change of the rule."""
    run = Watched(WATCH, rule, "halt")
    return [each for second in range(1, seconds) for each in run.texts(**make(second))]


def kinds(found):
    return [kind for kind, _ in found]


# --- act-on-stall ----------------------------------------------------------------------------


def rank(unchanged, records=None, **more):
    given = {"state": "S", "step": 50, "phase": "forward"} | more
    return RankEvidence(0, 100, unchanged_s=unchanged, records_s=records, **given)


def stalled(records=float, **more):
    """Returns a function that makes the readings of a rank without progress since second 0.

    `records` returns the age of the newest step in the records.
    """

    def make(second):
        ranks = (replace(rank(float(second), records(second)), **more),)
        return {"ranks": ranks, "stall_doubt": why_unconfirmed(ranks, WATCH)}

    return make


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        pytest.param(float, "raise act", marks=decision("act-on-stall", "true")),
        pytest.param(lambda second: 1.0, "raise withhold", marks=decision("act-on-stall", "lie")),
        (lambda second: max(0.0, second - 12.0), "raise act"),
        (lambda second: 1.0 if second < 100 else float(second), "raise withhold act"),
    ],
    ids=["confirmed", "records show new steps", "one late record", "confirmed later"],
)
def test_a_stall_is_acted_upon_when_the_records_confirm_it(records, expected):
    found = changes(stalled(records), "stall")
    assert kinds(found) == expected.split()
    for kind, text in found:
        assert kind != "withhold" or "the records of rank 0 show a new step 1 s ago" in text


@decision("act-on-stall", "absent")
@pytest.mark.parametrize(
    ("lacking", "text"),
    [
        ({"records_s": None}, "rank 0 has no record that confirms the stall"),
        ({"phase": "", "step": 0}, "rank 0 has no pulse"),
    ],
)
def test_a_stall_with_one_source_is_reported_and_not_acted_upon(lacking, text):
    found = changes(stalled(**lacking), "stall")
    assert kinds(found) == ["raise", "withhold"]
    assert found[-1][1] == f"halt withheld, no second source confirms it: {text}"


@decision("act-on-stall", "absent")
def test_a_rank_that_records_rarely_confirms_nothing_before_its_record_is_overdue():
    rare = stalled(records_gap_s=60.0)
    assert kinds(changes(rare, "stall", 119)) == ["raise", "withhold"]
    assert kinds(changes(rare, "stall", 200)) == ["raise", "withhold", "act"]


# --- act-on-figure ---------------------------------------------------------------------------

BAD = {"non_finite": {"loss": "nan"}, "zero_gradient": {"grad_norm": 0.0},
       "gate_collapse": {"gate_max_gate": 0.95}}  # fmt: skip
GOOD = {"loss": 2.0, "grad_norm": 1.0, "gate_max_gate": 0.5}
FIGURES = [
    pytest.param(rule, second, csv, text, marks=mark)
    for rule, bad in BAD.items()
    for second, csv, text, mark in (
        (bad, None, "", decision("act-on-figure", "true")),
        ({}, None, "rank 1 records another value", decision("act-on-figure", "lie")),
        (None, None, "neither another rank nor training.csv records the value",
         decision("act-on-figure", "absent")),
    )
] + [
    pytest.param(rule, None, csv, text, marks=mark)
    for rule, csv, text, mark in (
        ("non_finite", {"loss": "nan"}, "", decision("act-on-figure", "true")),
        ("zero_gradient", {"grad_norm": 0.0}, "", decision("act-on-figure", "true")),
        ("gate_collapse", {"gate_max_gate": 0.95}, "", decision("act-on-figure", "true")),
        ("non_finite", {"loss": 2.0}, "training.csv has another value at step",
         decision("act-on-figure", "lie")),
        ("zero_gradient", {"grad_norm": 0.0, "step": 0}, "nor training.csv records the value",
         decision("act-on-figure", "lie")),
    )
]  # fmt: skip


@decision("act-on-figure", "lie")
def test_a_loss_that_is_nan_on_another_rank_raises_an_alert_and_no_action():
    found = changes(lambda step: figures(step, {}, BAD["non_finite"]), "non_finite", 300)
    assert kinds(found) == ["raise", "withhold"]
    assert found[0][1].startswith("the loss of rank 1 was not finite")
    assert "rank 0 records another value" in found[-1][1]


def figures(step, first, second=None, csv=None):
    own = progress_of({"rank": 0, "step": step} | GOOD | first)
    found = {0: own}
    if second is not None:
        found[1] = progress_of({"rank": 1, "step": step} | GOOD | second)
    row = None if csv is None else progress_of({"step": step} | csv)
    return {"fresh": tuple(found.values()), "progress": found, "csv": row}


@pytest.mark.parametrize(("rule", "second", "csv", "text"), FIGURES)
def test_a_figure_is_acted_upon_when_another_rank_or_the_csv_confirms_it(rule, second, csv, text):
    found = changes(lambda step: figures(step, BAD[rule], second, csv), rule, 300)
    assert kinds(found) == ["raise", "withhold" if text else "act"]
    assert text in found[-1][1]


@pytest.mark.parametrize(
    ("count", "world", "csv", "kind"),
    [
        (3, 1, None, "act"), (3, 1, {"grad_norm": 1.0}, "act"), (0, 1, None, "withhold"),
        (-1, 1, None, "withhold"), (3, 1, {"loss": 2.0}, "withhold"), (3, 2, None, "withhold"),
    ],
)  # fmt: skip
def test_a_pulse_confirms_a_loss_only_in_a_run_of_one_rank_whose_csv_has_no_loss(
    count, world, csv, kind
):
    def make(step):
        one = rank(0.0, 0.0, step=step, nonfinite_steps=count)
        ranks = tuple(replace(one, rank=number) for number in range(world))
        return figures(step, BAD["non_finite"], csv=csv) | {"ranks": ranks}

    assert kinds(changes(make, "non_finite")) == ["raise", kind]


def paced(pace_by_pulses):
    """Returns a function that makes readings; after second 600 the recorded throughput is lower.

    From then on, the pulses show `pace_by_pulses` steps a second; with None there are no pulses.
    """
    steps = 0.0

    def make(second):
        nonlocal steps
        slow = second > 600
        steps += pace_by_pulses if slow and pace_by_pulses else 1.0
        record = progress_of({"rank": 0, "step": int(steps), "toks_per_s": 10.0
                              if slow else 1000.0 + second % 3})  # fmt: skip
        ranks = () if pace_by_pulses is None else (rank(0.0, 0.0, step=int(steps)),)
        return {"fresh": (record,), "progress": {0: record}, "ranks": ranks}

    return make


@pytest.mark.parametrize(
    ("pace", "text"),
    [
        pytest.param(0.01, "", marks=decision("act-on-figure", "true")),
        pytest.param(1.0, "the steps of the ranks show 100% of the earlier pace",
                     marks=decision("act-on-figure", "lie")),
        pytest.param(None, "the steps of the ranks do not show a pace yet",
                     marks=decision("act-on-figure", "absent")),
    ],
)  # fmt: skip
def test_lost_throughput_is_acted_upon_when_the_pulses_confirm_it(pace, text):
    found = changes(paced(pace), "throughput_drop", 1500)
    assert kinds(found)[:2] == ["raise", "withhold" if text else "act"]
    assert text in found[1][1]


def test_each_rule_that_halts_has_a_second_source():
    assert all(RULES[name].corroborate for name in HALTING)


def test_the_second_source_of_a_single_rank_has_the_figures_of_the_rules():
    figures = {"loss", "grad_norm", "gate_entropy_mean", "gate_max_gate", "gate_collapse_frac"}
    assert figures <= set(CSV_COLUMNS[rundir.TRAINING_CSV])


# --- verdicts --------------------------------------------------------------------------------

MOVES, RESTS, STALLS = rank(0.1), rank(4.0), rank(12.0)
EXITED = replace(STALLS, phase="exit", step=49, state="gone")
SURE = {
    (MOVES, replace(MOVES, state="T")): (None, decision("verdict-stopped", "lie")),
    (RESTS, replace(RESTS, state="T")): (("stopped", "high"), decision("verdict-stopped", "true")),
    (MOVES, replace(STALLS, state="T", doubt="lost")):
        (None, decision("verdict-stopped", "absent")),
    (RESTS, replace(RESTS, state="Z")): (("exited", "high"), decision("verdict-exited", "true")),
    (RESTS, replace(RESTS, code=7)): (None, decision("verdict-exited", "lie")),
    (RESTS, replace(RESTS, state="?")): (None, decision("verdict-exited", "absent")),
    (STALLS, EXITED): (("exited-early", "high"), decision("verdict-exited-early", "true")),
    (STALLS, replace(EXITED, state="S")):
        (("exited-early", "medium"), decision("verdict-exited-early", "lie")),
    (MOVES, EXITED): (None, decision("verdict-exited-early", "absent")),
    (rank(12.0, 12.0),): (("all-ranks", "medium"), ()),
    (rank(12.0, 1.0),): (("all-ranks", "low"), ()),
    (rank(12.0, 1.0, doubt="ahead"),): (None, ()),
    (STALLS,): (("all-ranks", "low"), ()),
}  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [pytest.param(ranks, found, marks=mark) for ranks, (found, mark) in SURE.items()],
)
def test_a_verdict_is_sure_when_two_sources_agree(ranks, expected):
    assert judged(*ranks) == expected


def judged(*given):
    ranks = [replace(each, rank=number) for number, each in enumerate(given)]
    verdict = diagnose(ranks, WATCH, 1e9)
    return None if verdict is None else (verdict.cause, verdict.sure)


def test_the_slowest_rank_is_never_sure_its_pulse_alone_says_so():
    slow, fast = rank(12.0, phase="backward"), rank(12.0)
    assert judged(slow, fast) == ("slowest-rank", "medium")
    assert judged(rank(0.1, phase="backward"), fast) == ("slowest-rank", "medium")
    assert judged(slow, fast, rank(12.0, doubt="lost")) == ("slowest-rank", "low")


def test_a_rank_without_a_usable_pulse_is_not_named_and_makes_the_verdict_unsure():
    lost = replace(rank(500.0), rank=1, doubt="lost")
    verdict = diagnose((rank(12.0, 12.0), lost), WATCH, 1e9)
    assert (verdict.sure, verdict.rank) == ("low", 0)
    assert verdict.sentence.endswith("; rank 1 has no readable pulse")
