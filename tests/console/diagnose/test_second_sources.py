"""A strong action needs two sources that agree; else it is withheld and said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from console.diagnose.readings import Readings
from console.diagnose.rules import HALTING, RULES
from console.diagnose.stall import Seen, diagnose, disagreement
from console.diagnose.watch import Watchdog
from console.sources.pace import progress_of
from trainers.contract.plan import Watch

WATCH = Watch(stall_floor_s=10, startup_s=60, stall_act_s=20)
decision = pytest.mark.decision


def acts(make, seconds=200, actions=None):
    """Returns what a watchdog that halts does in moments made second by second."""
    dog = Watchdog(WATCH, actions or dict.fromkeys(
        ("stall", "throughput_drop", "non_finite", "zero_gradient", "gate_collapse"), "halt"
    ))  # fmt: skip
    found = []
    for second in range(1, seconds):
        now = Readings(mono=float(second), ts=1e9 + second, **make(second))
        found += [(c.kind, c.rule.name, c.text) for c in dog.look(now)]
    return found


def kinds(found, rule):
    return [kind for kind, name, _ in found if name == rule]


# --- act-on-stall ----------------------------------------------------------------------------


def rank(still, records=None, **more):
    given = {"state": "S", "step": 50, "phase": "forward"} | more
    return Seen(0, 100, still_s=still, records_s=records, **given)


def stands(records):
    def make(second):
        ranks = (rank(float(second), records(second)),)
        return {"seen": ranks, "stall_doubt": disagreement(ranks, WATCH)}

    return make


@decision("act-on-stall", "true")
def test_a_stall_that_records_confirm_is_acted_upon():
    assert kinds(acts(stands(float)), "stall") == ["raise", "act"]


@decision("act-on-stall", "lie")
def test_a_pulse_that_stands_still_while_records_show_new_steps_is_not_acted_upon():
    found = acts(stands(lambda second: 1.0))
    assert kinds(found, "stall") == ["raise", "withhold"]
    assert "the records of rank 0 show a new step 1 s ago" in found[-1][2]


@decision("act-on-stall", "absent")
@pytest.mark.parametrize(
    ("lacking", "says"),
    [
        ({"records": None}, "rank 0 has no record that could confirm it"),
        ({"phase": "", "step": 0}, "rank 0 has no pulse"),
    ],
)
def test_a_stall_with_one_source_is_said_and_not_acted_upon(lacking, says):
    def make(second):
        ranks = (rank(second + 60.0, **{"records": second + 60.0} | lacking),)
        return {"seen": ranks, "stall_doubt": disagreement(ranks, WATCH)}

    found = acts(make)
    assert kinds(found, "stall") == ["raise", "withhold"]
    assert says in found[-1][2]


@decision("act-on-stall", "absent")
def test_a_rank_that_records_rarely_confirms_nothing_before_its_record_is_overdue():
    def make(second):
        ranks = (replace(rank(float(second), float(second)), records_gap_s=60.0),)
        return {"seen": ranks, "stall_doubt": disagreement(ranks, WATCH)}

    assert kinds(acts(make, 119), "stall") == ["raise", "withhold"]
    assert kinds(acts(make, 200), "stall") == ["raise", "withhold", "act"]


def test_records_that_came_late_once_do_not_hold_an_action_up_for_ever():
    found = acts(stands(lambda second: max(0.0, second - 12.0)))
    assert kinds(found, "stall") == ["raise", "act"]


def test_an_action_that_was_withheld_follows_when_the_second_source_agrees():
    found = acts(stands(lambda second: 1.0 if second < 100 else float(second)))
    assert kinds(found, "stall") == ["raise", "withhold", "act"]


def test_a_rank_whose_pulse_says_nothing_is_not_blamed_and_makes_the_verdict_unsure():
    lost = replace(rank(500.0), rank=1, doubt="lost")
    assert diagnose((rank(1.0), lost), WATCH, 1e9) is None
    assert diagnose((lost,), WATCH, 1e9) is None
    verdict = diagnose((rank(12.0, 12.0), lost), WATCH, 1e9)
    assert (verdict.sure, verdict.rank) == ("low", 0)
    assert verdict.sentence.endswith("; rank 1 has no pulse that can be read")


# --- act-on-figure ---------------------------------------------------------------------------

BAD = {"non_finite": {"loss": "nan"}, "zero_gradient": {"grad_norm": 0.0},
       "gate_collapse": {"gate_max_gate": 0.95}}  # fmt: skip
GOOD = {"loss": 2.0, "grad_norm": 1.0, "gate_max_gate": 0.5}


def figures(step, first, second=None, csv=None):
    own = progress_of({"rank": 0, "step": step} | GOOD | first)
    found = {0: own}
    if second is not None:
        found[1] = progress_of({"rank": 1, "step": step} | GOOD | second)
    row = None if csv is None else progress_of({"step": step} | csv)
    return {"fresh": (own,), "progress": found, "csv": row}


@decision("act-on-figure", "true")
@pytest.mark.parametrize("rule", BAD)
def test_a_figure_that_two_ranks_record_is_acted_upon(rule):
    found = acts(lambda step: figures(step, BAD[rule], BAD[rule]), 300)
    assert kinds(found, rule) == ["raise", "act"]


@decision("act-on-figure", "true")
@pytest.mark.parametrize("rule", ["non_finite", "zero_gradient"])
def test_in_a_run_of_one_rank_its_csv_confirms_the_figure(rule):
    found = acts(lambda step: figures(step, BAD[rule], csv=BAD[rule]))
    assert kinds(found, rule) == ["raise", "act"]


@pytest.mark.parametrize(("count", "kind"), [(3, "act"), (0, "withhold"), (-1, "withhold")])
def test_in_a_run_of_one_rank_without_csv_its_pulse_confirms_a_loss(count, kind):
    def make(step):
        seen = (rank(0.0, 0.0, step=step, nonfinite_steps=count),)
        return figures(step, BAD["non_finite"]) | {"seen": seen}

    assert kinds(acts(make), "non_finite") == ["raise", kind]


@decision("act-on-figure", "lie")
@pytest.mark.parametrize("rule", BAD)
def test_a_figure_that_the_other_rank_records_otherwise_is_not_acted_upon(rule):
    found = acts(lambda step: figures(step, BAD[rule], {}), 300)
    assert kinds(found, rule) == ["raise", "withhold"]
    assert "rank 1 records it otherwise" in found[-1][2]


@decision("act-on-figure", "lie")
def test_a_figure_that_the_csv_contradicts_is_not_acted_upon():
    found = acts(lambda step: figures(step, {"loss": "nan"}, csv={"loss": 2.0}))
    assert kinds(found, "non_finite") == ["raise", "withhold"]
    assert "training.csv says otherwise" in found[-1][2]


@decision("act-on-figure", "absent")
@pytest.mark.parametrize("rule", BAD)
def test_a_figure_that_one_rank_alone_records_is_said_and_not_acted_upon(rule):
    found = acts(lambda step: figures(step, BAD[rule]), 300)
    assert kinds(found, rule) == ["raise", "withhold"]
    assert "neither another rank nor training.csv records it" in found[-1][2]


def paced(rate_by_records, pace_by_pulses):
    """A run whose records say that it lost its throughput at second 600; its pulses say theirs."""
    steps = 0.0

    def make(second):
        nonlocal steps
        slow = second > 600
        steps += pace_by_pulses if slow and pace_by_pulses else 1.0
        record = progress_of({"rank": 0, "step": int(steps), "toks_per_s": rate_by_records
                              if slow else 1000.0 + second % 3})  # fmt: skip
        seen = () if pace_by_pulses is None else (rank(0.0, 0.0, step=int(steps)),)
        return {"fresh": (record,), "progress": {0: record}, "seen": seen}

    return make


@decision("act-on-figure", "true")
def test_throughput_that_is_gone_by_records_and_by_pulses_is_acted_upon():
    assert "act" in kinds(acts(paced(10.0, 0.01), 1500), "throughput_drop")


@decision("act-on-figure", "lie")
def test_throughput_that_only_the_records_say_is_gone_is_not_acted_upon():
    found = acts(paced(10.0, 1.0), 1500)
    assert kinds(found, "throughput_drop")[:2] == ["raise", "withhold"]
    assert "the ranks step at 100% of their own pace before" in found[-2][2]


@decision("act-on-figure", "absent")
def test_throughput_whose_pulses_nobody_sees_is_not_acted_upon():
    found = acts(paced(10.0, None), 1500)
    assert "act" not in kinds(found, "throughput_drop")
    assert "the pulses do not show a pace yet" in found[1][2]


def test_each_rule_that_the_runbooks_let_halt_has_a_second_source():
    assert all(RULES[name].second for name in HALTING)


# --- verdicts --------------------------------------------------------------------------------


def ranks(*given):
    return tuple(replace(seen, rank=number) for number, seen in enumerate(given))


def sure(*given):
    verdict = diagnose(ranks(*given), WATCH, 1e9)
    return None if verdict is None else (verdict.cause, verdict.sure)


@decision("verdict-stopped", "true")
def test_a_stopped_process_whose_pulse_stands_still_is_named():
    assert sure(rank(4.0), rank(4.0, state="T")) == ("stopped", "high")


@decision("verdict-stopped", "lie")
def test_a_stopped_process_whose_pulse_moves_is_not():
    assert sure(rank(0.1), rank(0.1, state="T")) is None


@decision("verdict-stopped", "absent")
def test_a_stopped_process_without_a_pulse_that_can_be_read_is_not():
    assert sure(rank(0.1), rank(9.0, state="T", doubt="lost")) is None


@decision("verdict-gone", "true")
def test_a_dead_process_is_named():
    assert sure(rank(4.0), rank(4.0, state="Z")) == ("gone", "high")


@decision("verdict-gone", "lie")
def test_a_process_that_lives_is_not_gone_whatever_its_records_say():
    assert sure(rank(4.0), rank(4.0, state="S", code=7)) is None


@decision("verdict-gone", "absent")
def test_a_process_whose_state_nobody_knows_is_not_gone():
    assert sure(rank(4.0), rank(4.0, state="?")) is None


LEFT = {"phase": "exit", "step": 49}


@decision("verdict-left", "true")
def test_a_rank_that_has_exited_before_the_others_is_named():
    assert sure(rank(12.0), rank(12.0, state="gone", **LEFT)) == ("left", "high")


@decision("verdict-left", "lie")
def test_a_rank_that_only_says_that_it_left_is_not_sure():
    assert sure(rank(12.0), rank(12.0, state="S", **LEFT)) == ("left", "medium")


@decision("verdict-left", "absent")
def test_a_rank_that_has_exited_while_the_other_moves_is_not_blamed():
    assert sure(rank(0.1), rank(12.0, state="gone", **LEFT)) is None


def test_one_rank_behind_is_never_sure_its_pulse_alone_says_so():
    assert sure(rank(12.0, phase="backward"), rank(12.0)) == ("behind", "medium")
    assert sure(rank(0.1, phase="backward"), rank(12.0)) == ("behind", "medium")
    found = sure(rank(12.0, phase="backward"), rank(12.0), rank(12.0, doubt="lost"))
    assert found == ("behind", "low")


@decision("verdict-alone", "true")
def test_the_only_rank_that_stands_still_by_pulse_and_records_is_named():
    assert sure(rank(12.0, 12.0)) == ("level", "high")


@decision("verdict-alone", "lie")
def test_the_only_rank_whose_records_go_on_is_not_sure():
    assert sure(rank(12.0, 1.0)) == ("level", "low")
    assert sure(rank(12.0, 1.0, doubt="ahead")) is None


@decision("verdict-alone", "absent")
def test_the_only_rank_without_records_is_not_sure():
    assert sure(rank(12.0)) == ("level", "low")
