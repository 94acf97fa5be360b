"""The gates over the largest memory of a rank, and over its growth."""

from __future__ import annotations

import pytest

from console.plans import gates
from tests.console.plans.histories import attempt, result, summed


def test_the_largest_memory_is_never_too_low_after_a_resume():
    for steps, exact in ((60, True), (500, False)):
        rising = attempt(1, range(1, 2), exit_code=None, gpu_mem_reserved=1)
        for step in range(2, steps):
            rising.add("progress", step, gpu_mem_reserved=step, nonfinite_loss_steps=0)
        for start in (3, 30, 50, 400):
            found = summed(rising, attempt(2, range(start, start + 3), gpu_mem_reserved=1))
            found.take_end(1, 0, rising.pulse(steps, 0))
            gate = result(found, gpu_mem_below_mib=1e9)
            largest = min(start, steps) - 1
            assert gate.value == largest if exact else gate.value >= largest
            assert gate.result == "pass"


def test_a_memory_above_its_bound_is_not_final_because_a_restart_can_repeat_the_step():
    bounds, high = {"gpu_mem_below_mib": 8_000}, attempt(1, range(1, 100), gpu_mem_reserved=7_000)
    high.add("progress", 100, gpu_mem_reserved=9_000)
    repeated = attempt(2, range(80, 90), gpu_mem_reserved=7_000)
    for found, value in ((summed(high), 9_000), (summed(high, repeated), 7_000)):
        (gate,) = gates.evaluate(found, bounds, is_live=True)
        assert (gate.value, gate.result == "fail") == (value, False)
        assert not gates.reached(found, bounds)
    assert result(summed(high), **bounds).result == "fail", "at the end, no restart follows"


@pytest.mark.parametrize("rises", [30, 60, 200, 1_000])
def test_the_growth_of_a_memory_that_creeps_up_is_known_and_never_too_low(rises):
    creeping, each = attempt(1, range(1, 2), exit_code=None, gpu_mem_reserved=500), 2_000 // rises
    for step in range(2, 2_001):
        creeping.add("progress", step, gpu_mem_reserved=1_000 + 2 * (step // each))
    gate = result(summed(creeping), gpu_mem_growth_below_mib=1e9)
    assert rises <= gate.value <= 1.1 * rises + 2


def test_a_memory_that_rose_often_in_the_first_half_of_the_steps_and_is_flat_did_not_grow():
    for rises in (100, 400, 1_000):
        rising = attempt(1, range(1, 2), exit_code=None, gpu_mem_reserved=500)
        for step in range(2, 2_001):
            rising.add("progress", step, gpu_mem_reserved=1_000 + 20 * min(step, rises))
        assert result(summed(rising), gpu_mem_growth_below_mib=0).value == 0, rises


@pytest.mark.parametrize("start", range(30, 40))
def test_the_growth_of_memory_is_never_too_low_after_a_resume_before_the_largest_values(start):
    rising = attempt(1, range(1, 2), exit_code=None, gpu_mem_reserved=1)
    for step in range(2, 500):
        rising.add("progress", step, gpu_mem_reserved=step)
    again = attempt(2, range(start, start + 1), exit_code=None, gpu_mem_reserved=1)
    for step in range(start + 1, 1_001):
        again.add("progress", step, gpu_mem_reserved=start if step > 900 else 1)
    assert result(summed(rising, again), gpu_mem_growth_below_mib=0).value >= 1
