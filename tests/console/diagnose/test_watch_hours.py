"""A short form of benchmarks/watch_hours.py: no healthy run is stopped, each sick run is halted."""

from __future__ import annotations

import pytest

from benchmarks.simulated_runs import CASES
from benchmarks.watch_hours import replay, seen_after_s
from console.diagnose.rules import HALTING

HOURS = {1.0: 1.0, 10.0: 5.0, 60.0: 8.0}
"""Simulated hours by the median step time; an hour with short steps needs the most CPU time."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_healthy_run_of_uneven_steps_is_never_stopped(case):
    counts = replay(case, HOURS[case.median_s], seed=7, every_s=5)
    assert counts.looks == HOURS[case.median_s] * 720
    assert not counts.acted
    assert not counts.said["high"]


@pytest.mark.parametrize("name", HALTING)
def test_a_sick_run_is_halted(name):
    raised, acted = seen_after_s(name, sick_at_s=900)
    assert raised is not None
    assert acted is not None
