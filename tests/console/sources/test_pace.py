"""The stall limit of a rank without a pulse follows from the gaps between its records."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.diagnose.rank_evidence import (
    SAFETY,
    RankEvidence,
    by_records,
    limit_s,
    why_unconfirmed,
    with_records,
)
from console.plan import Watch
from console.sources.pace import Pace
from console.sources.reducer import LatestRecords

WATCH = Watch(stall_floor_s=180, startup_s=900)
LEAST_S = WATCH.startup_s / SAFETY


def take(head, step, at, mono, ts, msg="progress"):
    record = {"step": step, "msg": msg, "ts": at, "pid": 1, "rank": 0}
    head.pace.add(record, 1, mono, ts)
    head.add(record)


def told(steps, step_s, boot_s=10.0):
    """Returns the latest records of a rank that records these steps; a step takes `step_s`."""
    head = LatestRecords(pace=Pace())
    for step in (0, *steps):
        at = boot_s * (step > 0) + step * step_s
        take(head, step, at, at, at)
    return head


@given(st.floats(0.01, 600), st.integers(1, 50), st.integers(0, 12))
def test_a_run_that_keeps_its_rhythm_is_never_late(step_s, every, records):
    """The first five steps have a record, then each `every`-th step, up to `records` records."""
    steps = [s for s in range(1, 5 * every + 6) if s <= 5 or s % every == 0][:records]
    head = told(steps, step_s)
    due = next(s for s in range(1, 10_000) if (s <= 5 or s % every == 0) and s not in steps)
    last = head.last["ts"]
    if steps:
        late_s = head.pace.age_s(last + (due - steps[-1]) * step_s)
        assert late_s <= limit_s(by_records(0, head, WATCH), WATCH)


def test_a_known_rhythm_makes_the_limit_short():
    assert told((1, 20, 40, 60), 3.0).pace.usual_gap_s(LEAST_S) == pytest.approx(60)
    assert told((1, 2, 3, 4, 5), 3.0).pace.usual_gap_s(LEAST_S) == pytest.approx(150)
    assert told(range(1, 20), 3.0).pace.usual_gap_s(LEAST_S) == pytest.approx(3)


def test_before_the_first_step_the_startup_limit_counts():
    head = told((), 1.0)
    assert limit_s(by_records(0, head, WATCH), WATCH) == 900
    assert head.pace.age_s(899.0) == 899


def test_a_rank_without_a_pulse_has_the_step_of_its_record_and_the_limit_of_its_rhythm():
    for steps in ((1,), (1, 2, 3)):
        found = by_records(0, told(steps, 60.0), WATCH)
        assert found.step == steps[-1]
        assert limit_s(found, WATCH) == SAFETY * found.p99_s


def test_the_records_of_a_background_save_do_not_move_its_rank_back():
    head, only_saved = told(range(10, 140, 10), 1.0), LatestRecords(pace=Pace())
    usual_s = head.pace.usual_gap_s(LEAST_S)
    for msg in ("checkpoint", "note"):
        take(head, 100, 141.0, 141.0, 141.0, msg)
    assert by_records(0, head, WATCH).step == 130
    take(head, 140, 150.0, 150.0, 150.0)
    assert head.pace.usual_gap_s(LEAST_S) == usual_s
    take(only_saved, 100, 1.0, 1.0, 1.0, "checkpoint")
    assert by_records(0, only_saved, WATCH).step == 100


def test_a_host_whose_clock_is_behind_has_made_the_step_that_has_just_been_read():
    head, behind_s, now = LatestRecords(pace=Pace()), 4000.0, time.monotonic()
    head.pace.mark_old(now - 100)
    for age_s in (60, 40, 20):
        take(head, 10 - age_s // 20, 9e5 - behind_s - age_s, now - age_s, 9e5 - age_s)
    assert head.pace.age_s(now) > behind_s
    assert by_records(0, head, WATCH).unchanged_s == pytest.approx(20, abs=5)


def test_a_clock_that_jumps_makes_no_record_older():
    head = told((), 1.0)
    take(head, 40, 1e9, 50.0, 1e9 + 2)
    assert head.pace.age_s(60.0) == pytest.approx(12)
    take(head, 60, 2e9, 70.0, 1e9)
    assert head.pace.age_s(71.0) == pytest.approx(1)


def test_the_phase_in_the_pulse_shows_a_save():
    head = LatestRecords(pace=Pace(0.0))
    for step in range(1, 4):
        for phase in ("forward", "save", "forward"):
            seen = with_records(RankEvidence(0, 1, "S", step, phase, 0.0), head)
            time.sleep(0.5 if phase == "save" else 0.0)
        take(head, step, 0.0, time.monotonic(), 0.0)
    assert seen.records_gap_s < 0.4


@pytest.mark.parametrize("saves", [(60,), range(0, 64, 4), range(64)])
def test_a_save_does_not_count_for_the_usual_gap_between_records(saves):
    head, now, step_s, save_s = LatestRecords(pace=Pace(0.0)), 0.0, 20.0, 1500.0
    for step in range(65):
        take(head, step, now, now, now)
        if step in saves:
            head.pace.note_pause(now + 1, is_paused=True)
            now += save_s
            head.pace.note_pause(now, is_paused=False)
        now += step_s
    assert step_s <= head.pace.gap_s() <= step_s + 1
    assert head.pace.usual_gap_s(LEAST_S) >= (save_s if len(saves) > 2 else step_s)


@pytest.mark.parametrize(("phase", "is_confirmed"), [("forward", False), ("save", True)])
def test_a_save_makes_the_next_record_overdue_only_while_it_lasts(phase, is_confirmed):
    head, now = LatestRecords(pace=Pace(0.0)), time.monotonic()
    for step in range(1, 4):
        at = now - 570 - 200 * (3 - step)
        take(head, step, at, at, at)
    head.pace.note_pause(now - 565, is_paused=True)
    head.pace.note_pause(now - 65, is_paused=False)
    found = with_records(RankEvidence(0, 1, "S", 4, phase, 60.0), head)
    assert (why_unconfirmed([found], WATCH) == "") == is_confirmed


def test_a_record_from_the_future_is_no_sign_of_progress_until_a_stall_limit_has_passed():
    """After the clock was set back, the age of a record is unknown, and a stall is still found."""
    head = told(range(1, 20), 3.0)
    now = time.monotonic()
    take(head, 20, 2e9, now, 1e9)
    assert by_records(0, head, WATCH).doubt == "future"
    take(head, 21, 2e9, now - 2 * WATCH.stall_floor_s, 1e9)
    assert by_records(0, head, WATCH).doubt == ""
    take(head, 22, 1e9, now, 1e9)
    assert by_records(0, head, WATCH).doubt == ""
