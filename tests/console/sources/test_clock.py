"""The ages, states and charts that a reader shows after a clock was set back."""

from __future__ import annotations

import os
import time

from console import status_text
from console.sources import liveness
from console.sources.run import RunSource
from tests.console.sources import directory
from trainers.contract import rundir


def test_a_clock_that_was_set_back_leaves_a_series_in_order_that_ends_with_its_newest(launch, run):
    now = time.time()
    times = now, now + 86_400, now + 86_401, now + 1, now - 3600, now + 2
    for step, at in enumerate(times, 1):
        directory.beat(run, 0, step, loss=1.0, ts=at)
    source = RunSource(launch)
    source.poll()
    points = source.series.points("loss")
    assert [at for at, _ in points] == [now - 3600, now, now + 1, now + 2]


def test_a_time_in_the_future_is_no_evidence_that_data_are_fresh(launch):
    """For example, the clock was set back after a rank's last record and sample."""
    run, later_ts = launch / "0-first", time.time() + 3600
    pulse = {"step": 7, "phase": "forward", "since_s": 1.0, "device_step": 7}
    rank = {"rank": 0, "pid": directory.DEAD["pid"], "state": "R", "cpu_pct": 9.0, "pulse": pulse}
    news = directory.ELSEWHERE | {"workers": [], "updated_ts": later_ts}
    directory.change(run / rundir.SUPERVISOR, **news)
    directory.beat(run, 0, 7, ts=later_ts)
    directory.sample(run, ts=later_ts, ranks=[rank])
    os.utime(run / rundir.SUPERVISOR, (later_ts, later_ts))
    source = RunSource(launch)
    state = source.poll()
    [rank] = state.ranks
    assert (state.data_age_s, rank.age_s, rank.cpu_pct, rank.state) == (None, None, None, "")
    assert rank.pulse
    assert (rank.pulse.step, rank.pulse.age_s, rank.pulse.since_s) == (7, None, None)
    assert state.state == "unsupervised"
    assert "its time is in the future" in " ".join(status_text.status_lines(state))

    directory.change(run / rundir.SUPERVISOR, updated_ts=later_ts + 1)
    os.utime(run / rundir.SUPERVISOR, (later_ts, later_ts))
    directory.event(run, "state", attempt=1, state="stalled", ts=later_ts + 2)
    assert source.poll().state == "running"  # this reader saw the document change


def test_a_supervisor_is_silent_also_if_the_clock_was_set_back():
    later_ts = time.time() + 3600
    status = {"ts": later_ts, "mono": time.monotonic() - 30}
    supervisor = rundir.identity() | {"updated_ts": later_ts}
    [alert] = liveness.supervisor_alerts(supervisor, status)
    assert "has written nothing for 30 s" in alert.text
    assert not liveness.supervisor_alerts(supervisor, status | {"mono": time.monotonic()})
