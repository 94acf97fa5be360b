"""The series of a run: figures over steps and time, in bounded memory and time."""

from __future__ import annotations

import statistics
import time
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console import status_text
from console.sources import series as series_module
from console.sources.run import RunSource
from console.sources.run_records import progress_figures
from console.sources.series import MAX_SERIES, RAW_RECORDS, SPANS_S, STEP_WINDOW, Series
from tests.console.sources import directory
from trainers.contract import rundir
from trainers.run_records import FETCHES_KEPT

SHORTENED = "steps since the record before"


@pytest.mark.parametrize(
    ("more", "window"),
    [({}, "last 20 steps"), ({"cut": "steps_dt_s"}, SHORTENED),
     ({"cut": "other figures"}, "last 20 steps"), ({"steps_dt_s": None}, SHORTENED)],
)  # fmt: skip
def test_a_figure_names_the_steps_that_it_covers(more, window):
    record = {"step": 100, "ts": 1.0, "steps_dt_s": [0.1] * 20, "loss": 2.0, "toks_per_s": 9.0}
    means = dict.fromkeys(("dt_fetch_s", "dt_forward_s", "dt_backward_s", "dt_optimizer_s"), 0.5)
    shown = progress_figures({0: record | means | {"fetch_p95_ms": 9.0} | more}, "")
    windows = {name: figure.window for name, figure in shown.items()}
    assert windows == dict.fromkeys(("toks_per_s", *means), window) | {
        "loss": "step 100", "fetch_p95_ms": f"newest {FETCHES_KEPT} fetches",
    }  # fmt: skip


def test_one_poll_reads_a_bounded_part_and_counts_the_rest(launch, run):
    for step in range(1, 400):
        directory.beat(run, 0, step, loss=1.0)
    directory.event(run, "alert", alert="a", level="crit", text="rank 1 is stopped")
    size = rundir.heartbeat(run, 0).stat().st_size
    source = RunSource(launch, size // 4)
    state = source.poll()
    assert size // 2 < state.behind_bytes < size
    assert [alert.id for alert in state.alerts] == ["a", "behind"]
    for _ in range(5):
        state = source.poll()
    assert (state.behind_bytes, state.step) == (0, 399)
    assert [alert.id for alert in state.alerts] == ["a"]
    assert len(source.series.points("loss")) == 399
    assert RunSource(launch).poll().step == 399


@pytest.mark.parametrize("stalled", [2, 10, 40])
def test_one_stall_hardly_changes_the_eta(stalled):
    series, at = Series(), 1e9
    for step in range(1, 51):
        at += 3600.0 if step == stalled else 2.0
        series.add_steps(at, step, [2.0])
        if step == 1:
            assert series.eta_s(step, 100) is None
    assert series.eta_s(50, 100) == pytest.approx(100.0, rel=0.1)
    assert series.eta_s(50, 50) == 0.0


@given(st.lists(st.floats(0.001, 100.0), min_size=1, max_size=STEP_WINDOW))
def test_p50_is_the_median_and_at_most_one_step_in_a_hundred_exceeds_p99(steps):
    series = Series()
    series.add_steps(1e9, len(steps), steps)
    p50, p99, count = series.step_percentiles_s()
    assert (p50, count) == (statistics.median(steps), len(steps))
    assert sum(step > p99 for step in steps) <= len(steps) / 100
    assert sum(step >= p99 for step in steps) > len(steps) / 100


def test_a_file_that_names_a_million_ranks_costs_bounded_memory():
    series = Series()
    names = [f"rss_mib:{rank}" for rank in range(MAX_SERIES + 100)]
    for name in names:
        series.add("samples_here.jsonl", 1.0, {name: 2.0})
    assert sum(bool(series.points(name)) for name in names) == MAX_SERIES


def test_a_sample_of_no_known_rank_or_gpu_makes_no_series(launch, run):
    gpu, rank = {"index": None, "util_pct": 9.0}, {"rank": "x", "rss_mib": 9.0, "cpu_pct": 9.0}
    directory.sample(run, gpus=[gpu], ranks=[rank])
    source = RunSource(launch)
    source.poll()
    assert not [name for name in source.series.names if ":" in name]


def test_numbers_that_are_too_large_are_left_out(launch, run):
    """A figure, an ETA or a date from these numbers would raise an error."""
    huge = 10**400
    directory.change(run / rundir.RUN, settings={"train.steps": {"value": huge}})
    directory.beat(run, 0, 1, loss=5.0, ts=time.time() - 5, steps_dt_s=[0.2])
    directory.beat(run, 0, 2, loss=4.0, ts=1e300, steps_dt_s=[huge, 0.2])
    source = RunSource(launch)
    state = source.poll()
    assert state.steps_planned is None
    assert state.figures["step_p50_s"].window == "last 2 steps"
    assert [value for _, value in source.series.points("loss")] == [5.0]
    assert list(status_text.status_lines(state))


def test_a_clock_that_was_ahead_at_the_start_hides_no_older_point():
    series = Series()
    for second in range(4200):
        ahead_s = 7200 if second < RAW_RECORDS else 0
        series.add("heartbeat_rank0.jsonl", 1.7e9 + second + ahead_s, {"loss": 2.0})
    points = series.points("loss")
    assert points[0][0] <= 1.7e9 + RAW_RECORDS
    assert points[-1][0] == 1.7e9 + 4199


def test_newest_records_are_points_and_older_ones_bands():
    series = Series()
    for second in range(4000):
        series.add("x", 1e6 + second, {"a": float(second % 10)})
    points = series.points("a")
    newest = [value for at, value in points if at >= 1e6 + 4000 - RAW_RECORDS]
    assert newest == [float(second % 10) for second in range(4000 - RAW_RECORDS, 4000)]
    assert [points[0], points[1]] == [(1e6, 0.0), (1e6, 9.0)]
    assert len(points) == RAW_RECORDS + 2 * (4000 - RAW_RECORDS) / SPANS_S[0]


RECORDS = st.lists(
    st.tuples(st.integers(0, 300), st.sampled_from(["a", "a", "ab", "abc", "c"]), st.booleans()),
    max_size=30,
)
"""Records: seconds since the first, the quantities, and whether the points are read afterwards."""


def series_of(records):
    series = Series()
    for number, (second, names, _) in enumerate(records):
        series.add("x", 1e6 + second, dict.fromkeys(names, float(number)))
    return series


@given(RECORDS)
def test_points_do_not_depend_on_when_they_were_read_before(records):
    """The clock may be set back, and a quantity may be absent from many records."""
    with patch.object(series_module, "RAW_RECORDS", 3):
        often = Series()
        for number, (second, names, is_read) in enumerate(records):
            often.add("x", 1e6 + second, dict.fromkeys(names, float(number)))
            if is_read:
                once = series_of(records[: number + 1])
                assert [often.points(n) for n in "abc"] == [once.points(n) for n in "abc"]
