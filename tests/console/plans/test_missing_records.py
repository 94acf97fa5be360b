"""Gates over records that are missing, repeated or wrong."""

from __future__ import annotations

import time

import pytest

from console.plans import gates
from console.plans.gates import evaluate
from tests.console.plans.histories import (
    EVERY_BOUND,
    attempt,
    killed_then_resumed,
    result,
    saved,
    summed,
    whole,
    with_files,
)


@pytest.mark.parametrize(
    ("name", "key"),
    [("gpu_mem_below_mib", "gpu_mem_reserved"), ("fetch_below_s", "dt_fetch_s"),
     ("gpu_mem_growth_below_mib", "gpu_mem_reserved"), ("grad_norm_above", "grad_norm")],
)  # fmt: skip
def test_a_figure_that_some_records_lack_is_unknown(name, key):
    written = saved()
    del written.records[20][key]
    gate = result(with_files(written), **{name: EVERY_BOUND[name]})
    assert (gate.result, "rank 0: 1 of 60 records without" in gate.why) == ("unknown", True), gate
    written.records[21] |= {key: 1e9 if name != "grad_norm_above" else -1.0}
    certain = gates.RULES[name].certain
    found = result(with_files(written), **{name: EVERY_BOUND[name]}).result
    assert found == ("fail" if certain else "unknown")


def test_a_number_of_ranks_that_no_run_has_does_not_block_a_reader():
    found = with_files(saved(), whole(2))
    found.world, before = 10**9, time.monotonic()
    found.take_end(1, 1, None)  # rank 1 died before its first record
    gated = {gate.name: gate for gate in evaluate(found, EVERY_BOUND)}
    assert not gates.reached(found, {"fetch_below_s": {"bound": 5, "at": [100]}})
    assert time.monotonic() - before < 60
    assert gated["fetch_below_s"].why == "rank 3, attempt 1: no record"
    assert gated["entropy_above"].result == "pass"


def test_last_records_that_the_pulse_counts_are_missing():
    first, second = killed_then_resumed(grad_norm=1.0)
    pulse = first.pulse(26, 0)
    del first.records[-2:]
    found = summed(first, second)
    found.take_end(1, 0, pulse)
    gate = result(found, grad_norm_above=0)
    assert (gate.result, gate.why) == ("unknown", "rank 0, attempt 1: records 25 to 26 are missing")
    assert result(found, loss_finite=True).result == "pass", "the pulse has the count"
    assert result(found, steps_done=30).result == "pass", "the next attempt repeated those steps"


def test_a_checkpoint_that_all_ranks_loaded_proves_the_steps_of_missing_last_records_only():
    first = attempt(1, range(1, 26), exit_code=None, grad_norm=1.0)
    pulse = first.pulse(26, 0)
    del first.records[-2:]
    found = summed(first)
    found.take_end(1, 0, pulse)
    gates_now = {"steps_done": 26, "loss_finite": True, "grad_norm_above": 0}
    assert [gate.result for gate in evaluate(found, gates_now)] == ["unknown", "pass", "unknown"]
    found.loaded_step = 26
    assert [gate.result for gate in evaluate(found, gates_now)] == ["pass", "pass", "unknown"]
    assert result(found, steps_done=27).result == "fail"


def test_a_gap_in_repeated_steps_matters_to_all_attempts_only():
    for numbers, survives in (((24, 25), False), ((10, 11), True)):
        first, second = killed_then_resumed()
        pulse = first.pulse(26, 0)
        first.records = [r for r in first.records if r["n"] not in numbers]
        found = summed(first, second)
        found.take_end(1, 0, pulse)
        assert result(found, steps_done=30).result == ("unknown" if survives else "pass")
        assert result(found, loss_finite=True).result == "unknown"


def test_one_absurd_step_passes_no_gate():
    """The absurd step is in the newest progress record, the exit record, or an earlier record."""
    for place, expected in ((-2, "unknown"), (-1, "unknown"), (10, "pass")):
        written = whole()
        pulse = written.pulse(60, 0)
        written.records[place]["step"] = 10**12
        found = summed(written)
        found.take_end(1, 0, pulse)
        assert result(found, steps_done=60).result == expected, place


def test_a_lost_count_of_stalls_or_attempts_leaves_gates_unknown():
    found = summed(whole())
    found.stalls = None
    gate = result(found, no_stall=True)
    assert (gate.result, "some stalls may not have been counted" in gate.why) == (
        "unknown",
        True,
    )
    found.count_stall(1.0)
    assert result(found, no_stall=True).result == "fail"
    found = summed(whole())
    found.attempts = None
    assert result(found, restarts_at_most=5).result == "unknown"
    found = summed(whole(), attempt(2, range(21, 31)), attempts=1)
    assert "the supervisor counts 1" in result(found, restarts_at_most=5).why
    absurd = whole()
    absurd.records[7]["attempt"] = 10**6
    assert result(summed(absurd, attempts=1), restarts_at_most=5).result == "unknown"


def test_ranks_that_resume_at_different_steps_leave_the_surviving_steps_unknown():
    parts = [attempt(1, range(1, 31), rank) for rank in (0, 1)]
    parts += [attempt(2, range(21 + rank, 41), rank) for rank in (0, 1)]
    gate = result(summed(*parts), steps_done=40)
    assert gate.why == "the ranks started attempt 2 at different steps: rank 0 at 21, rank 1 at 22"


def test_two_records_with_the_same_number_are_unknown():
    first, other = whole(), whole()
    assert "exists twice" in result(summed(first, other), loss_finite=True).why


def test_a_rank_that_died_before_it_joined_leaves_no_gap():
    found = summed(attempt(2, range(1, 31)))
    assert result(found, no_stall=True).why == "rank 0, attempt 1: no record"
    found.take_end(1, 0, None)
    assert result(found, no_stall=True).result == "pass"


@pytest.mark.parametrize(
    ("lost", "without"),
    [(range(0), "0%"), (range(700, 800), "6%"), (range(1230, 1290), "25%"),
     (range(1150, 1210), "26%")],
    ids=["no sample is lost", "within a step", "at the begin of a step", "at the end of a step"],
)  # fmt: skip
def test_a_step_is_without_a_sample_if_samples_between_it_and_other_work_are_lost(lost, without):
    """Three steps of 600 s with a sample each second; before the third, 60 s of evaluation."""
    gpus = [{"index": 0, "state": "ok", "util_pct": 96.0}]
    found = summed(attempt(1, range(1, 4), steps_dt_s=[600.0]))
    for at in range(-5, 1860):
        phase = "load" if at < 0 else "eval" if 1200 <= at < 1260 else "forward"
        step = 0 if at < 0 else (at - 60 * (at >= 1260)) // 600 + (phase != "eval")
        pulses = [{"pulse": {"phase": phase, "step": step}}]
        if at not in lost:
            found.gpus.add({"mono": float(at), "attempt": 1, "gpus": gpus, "ranks": pulses})
    gate = result(found, gpu_util_above_pct=80)
    assert f"{without} of it without a sample" in gate.window
    assert (gate.value > 95) == (without == "0%")
