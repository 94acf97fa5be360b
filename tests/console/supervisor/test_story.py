"""Stall limits follow from the records; hostile records raise no error in the watchdog."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from console.diagnose.rank_evidence import (
    RankEvidence,
    by_records,
    limit_s,
    why_unconfirmed,
    with_records,
)
from console.diagnose.rules import HALTING
from console.diagnose.verdict import diagnose
from console.diagnose.watchdog import Watchdog
from console.plan import Watch
from console.plans import gates
from console.sources.reducer import NO_RECORDS
from console.sources.summary import Summary
from console.supervisor.sampling import readings
from tests.console.sources.recorded import Recorded
from trainers.contract import heartbeat, jsonl


def record(step, **fields):
    return {"v": 1, "attempt": 1, "rank": 0, "step": step, "ts": 1.0, "msg": "progress"} | fields


def story(*records):
    told = Recorded()
    told.take(record(2, steps_dt_s=[90.0, 30.0]))
    for step, fields in enumerate(records, 3):
        told.take(record(step, **fields))
    return told


def test_a_phase_has_its_own_percentile_and_others_that_of_the_steps():
    told = story({"steps_dt_s": [10.0], "dt_fetch_s": 0.5, "dt_forward_s": 6.0})
    assert told.heads[0].pace.p99_s("fetch") == 0.5
    assert told.heads[0].pace.p99_s("forward") == 6.0
    assert told.heads[0].pace.p99_s("log") == told.heads[0].pace.p99_s() == 10.0


def test_of_many_steps_a_phase_is_as_long_as_it_can_have_been_in_one():
    told = story({"steps_dt_s": [1.0] * 19 + [21.0], "dt_fetch_s": 1.0, "dt_forward_s": 2.0})
    assert told.heads[0].pace.p99_s("fetch") == 20.0
    assert told.heads[0].pace.p99_s("forward") == 21.0


def test_phases_that_a_gpu_was_timed_in_do_not_bound_the_host():
    told = story({"steps_dt_s": [9.0], "dt_fetch_s": 0.1, "dt_forward_s": 1.0,
                  "gpu_mem_reserved": 5})  # fmt: skip
    assert told.heads[0].pace.p99_s("fetch") == 0.1
    assert told.heads[0].pace.p99_s("forward") == 9.0


def test_evaluation_and_saving_have_budgets_of_their_own():
    watch = Watch(stall_floor_s=10, startup_s=120, eval_s=40, save_s=50)

    def limit(phase, p99_s=1.0):
        return limit_s(RankEvidence(0, 1, "S", 9, phase, 0.0, 0, p99_s), watch)

    assert [limit(phase) for phase in ("eval", "save", "halt", "forward")] == [40, 50, 50, 10]
    assert limit("eval", 20.0) == 100
    assert limit("eval", None) == 120
    assert limit_s(RankEvidence(0, 1, "S", 9, "save", 0.0), Watch(startup_s=77)) == 77


EXTREME = st.sampled_from([
    1e308, -1e308, 5e-324, 1e300, 2**62, 2**63, -(2**62), 10**400, 0, -1, True, None, "nan", "inf",
    "-inf", "x", [], {}, [1e308, 1e308], [[1e308]], ["nan"], [10**400],
])  # fmt: skip
FIGURES = (
    "loss", "grad_norm", "toks_per_s", "steps_dt_s", "dt_fetch_s", "dt_forward_s", "dt_backward_s",
    "dt_optimizer_s", "gate_entropy_mean", "gate_entropy_max", "gate_max_gate", "gpu_mem_reserved",
    "gate_collapse_frac", "bytes_right", "exit_code", "error", "reason", "mono", "pid", "ts", "n",
    "nonfinite_loss_steps", "overflow_steps", "scale_lowered_steps",
)  # fmt: skip
RECORDS = st.lists(
    st.tuples(
        st.sampled_from(["progress", "exit", "halt", "error", "resume", "checkpoint", "boot"]),
        st.integers(0, 2), st.integers(0, 60) | st.sampled_from([2**62, 10**12]),
        st.dictionaries(st.sampled_from(FIGURES), EXTREME | st.floats() | st.integers()),
    ),
    max_size=40,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(RECORDS)
def test_no_record_raises_in_what_watches(drawn):
    told, summed = Recorded(), Summary(3)
    dog = Watchdog(Watch(), dict.fromkeys(HALTING, "halt"))
    for msg, rank, step, fields in drawn:
        line = json.dumps({"v": 1, "attempt": 1, "ts": 1.0, "rank": rank, "step": step, "msg": msg}
                          | fields)  # fmt: skip
        given_record = jsonl.decode(line.encode())
        accepted = heartbeat.accept(given_record) if given_record is not None else None
        if accepted is not None:
            told.take(accepted)
            summed.add(accepted)
    seen = tuple(
        with_records(
            RankEvidence(rank, 1, "S", 3, "forward", 1e6), told.heads.get(rank, NO_RECORDS)
        )
        for rank in range(3)
    )
    diagnose(seen, Watch(), 1.8e9)
    for rank, head in told.heads.items():
        diagnose((by_records(rank, head, Watch()),), Watch(), 1.8e9)
    for _ in range(3):
        dog.update(
            readings(told.heads, seen, {}, (), {}, stall_doubt=why_unconfirmed(seen, Watch()))
        )
    gates.evaluate(summed, {rule.name: 1 for rule in gates.TABLE if rule.bound != "yes"})


def test_one_absurd_step_does_not_stick():
    told = story({})
    told.take(record(10**12))
    told.take(record(5))
    assert told.heads[0].step == 5
    told.take(record(3, msg="checkpoint"))
    assert told.heads[0].step == 5, "the record of a checkpoint may have an earlier step"
    resumed = Recorded()
    resumed.take(record(10**12, msg="resume"))
    resumed.take(record(20, msg="resume"))
    assert resumed.heads[0].first_step == 21


def test_a_halt_or_an_error_that_further_steps_follow_is_none():
    told = story()
    told.take(record(3, msg="halt", reason="forged"))
    told.take(record(3, msg="error", error="ModuleNotFoundError: forged"))
    head = told.heads[0]
    assert (head.halt, head.error_words) == (3, "ModuleNotFoundError: forged")
    told.take(record(4))
    assert (head.halt, head.error_words) == (None, "")


def test_records_of_attempts_that_are_none_do_not_replace_what_is_known_of_the_present_one():
    told = Recorded()
    told.take(record(3, msg="checkpoint"))
    told.take(record(7))
    for attempt in range(5, 15):
        told.take(record(1, attempt=attempt))
    head = told.heads[0]
    assert (head.step, head.saved, head.records) == (7, 3, 2)


def at(told, step):
    return with_records(RankEvidence(0, 1, "S", step, "forward", 99.0), told.heads[0])


def test_the_first_record_after_a_take_over_counts_though_its_steps_began_before():
    late = Recorded()
    late.reducer.mark_old()
    late.take(record(100, steps_dt_s=[1.0] * 100))
    assert late.heads[0].pace.p99_s() == 1.0


def test_a_resume_that_the_pulse_disproves_is_not_the_first_step():
    told = Recorded(live=True)
    told.take(record(1_000_000, msg="resume"))
    for step in (7, 8, 9):
        told.take(record(step))
    assert at(told, 10).first_step == 1
    assert told.heads[0].pace.gap_s() > 0, "the pace of the records is known"
    resumed = Recorded(live=True)
    resumed.take(record(6, msg="resume"))
    assert at(resumed, 7).first_step == 7
    resumed.take(record(8))
    resumed.take(record(20, msg="resume"))
    assert at(resumed, 20).first_step == 7


@pytest.mark.parametrize(("step_s", "limit"), [(105.0, 525.0), (1.0, 60.0)])
@pytest.mark.parametrize(
    ("first", "begins"),
    [
        (1, {"msg": "boot", "step": 0}),
        (5001, {"msg": "resume", "step": 5000}),
        (5001, {"msg": "boot", "step": 0}),  # a foreign program does not record a resume
    ],
)
def test_a_step_has_the_limit_of_the_start_until_the_time_of_the_first_step_is_known(
    step_s, limit, first, begins
):
    told, watch, limits = Recorded(), Watch(), []
    told.take(record(**begins))
    for step in range(first, first + 4):
        limits.append(limit_s(at(told, step), watch))
        told.take(record(step, steps_dt_s=[step_s]))
    assert limits == [300.0, limit, limit, limit]


def test_a_second_start_by_hand_has_the_limit_of_the_start_in_its_first_step():
    """A program with `join` that continues its own checkpoint may compile in this step."""
    told, watch = Recorded(), Watch()
    for step in range(4):
        told.take(record(step, msg="progress" if step else "boot", steps_dt_s=[0.5]))
    assert limit_s(at(told, 4), watch) == 60.0
    told.take(record(0, msg="boot"))
    assert limit_s(at(told, 4), watch) == 300.0


def test_a_stall_right_after_a_resume_is_found():
    told, watch = Recorded(), Watch()
    told.take(record(5000, msg="resume"))
    for step, limit in ((5001, 300.0), (5002, 100.0)):
        found = at(told, step)
        assert diagnose([replace(found, unchanged_s=limit - 1)], watch, 1.8e9) is None
        verdict = diagnose([replace(found, unchanged_s=limit + 1)], watch, 1.8e9)
        assert (verdict.rank, verdict.step) == (0, step)
        told.take(record(step, steps_dt_s=[20.0]))


def test_records_ahead_of_a_pulse_are_a_doubt_but_not_where_it_was_sampled_before():
    told = Recorded()
    told.take(record(30))
    assert at(told, 7).doubt == "ahead"
    sampled = with_records(RankEvidence(0, 1, "S", 7, "forward", 1.0), told.heads[0], lagging=True)
    assert not sampled.doubt


def test_steps_that_begin_anew_are_not_ahead_of_a_pulse_that_shows_the_newest_record():
    told = Recorded()
    told.take(record(100, n=101))
    doubts = {
        records: with_records(
            RankEvidence(0, 1, "S", 1, "step", 1.0, records=records), told.heads[0]
        ).doubt
        for records in (100, 101, 102)
    }
    assert doubts == {100: "ahead", 101: "", 102: ""}
