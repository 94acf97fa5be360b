"""Silence is judged by the rhythm of the records, and not before there is one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.diagnose.cadence import Cadence
from console.diagnose.stall import limit_s
from trainers.contract.plan import Watch

WATCH = Watch(stall_floor_s=180, startup_s=900)


def told(steps, step_s, boot_s=10.0):
    """A rank that records these steps and takes so long for each."""
    cadence = Cadence(WATCH.startup_s)
    for step in (0, *steps):
        at = boot_s * (step > 0) + step * step_s
        cadence.take({"step": step, "msg": "progress", "ts": at, "pid": 1}, at, at)
    return cadence


@given(st.floats(0.01, 600), st.integers(1, 50), st.integers(0, 12))
def test_no_run_that_keeps_its_rhythm_is_ever_late(step_s, every, records):
    """First steps are recorded one by one, then every so many: no gap between them is a stall."""
    steps = [s for s in range(1, 5 * every + 6) if s <= 5 or s % every == 0][:records]
    cadence = told(steps, step_s)
    due = next(s for s in range(1, 10_000) if (s <= 5 or s % every == 0) and s not in steps)
    last = cadence.record["ts"]
    if steps:
        seen = cadence.seen(0, last + (due - steps[-1]) * step_s)
        assert seen.still_s <= limit_s(seen, WATCH)


def test_a_known_rhythm_makes_the_limit_short():
    assert told((1, 20, 40, 60), 3.0).usual_s() == pytest.approx(60)
    assert told((1, 2, 3, 4, 5), 3.0).usual_s() == pytest.approx(150)
    assert told(range(1, 20), 3.0).usual_s() == pytest.approx(3)


def test_before_the_first_step_the_budget_of_the_start_holds():
    seen = told((), 1.0).seen(0, 899.0)
    assert limit_s(seen, WATCH) == 900
    assert seen.still_s == 899


def test_a_clock_that_jumps_makes_no_record_older():
    cadence = Cadence(WATCH.startup_s)
    cadence.take({"step": 40, "msg": "progress", "ts": 1e9, "pid": 1}, 50.0, 1e9 + 2)
    assert cadence.seen(0, 60.0).still_s == pytest.approx(12)
    cadence.take({"step": 60, "msg": "progress", "ts": 2e9, "pid": 1}, 70.0, 1e9)
    assert cadence.seen(0, 71.0).still_s == pytest.approx(1)
