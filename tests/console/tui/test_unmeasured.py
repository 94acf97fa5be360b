"""A value that was not measured is a dash or has a reason; times of ended runs do not grow."""

from __future__ import annotations

import dataclasses
import re
import time

import pytest

from console.model import EXIT_CODES, Figure
from console.status_text import status_lines
from console.tui import charts
from console.tui.feed import ScreenData
from console.tui.rows import text_of
from console.tui.views.stall import heading
from console.tui.views.stall import rank_rows as stall_rows
from console.tui.widgets.chart import chart_rows
from console.tui.widgets.figures import figure_rows
from console.tui.widgets.header import header_row
from console.tui.widgets.phases import phase_rows
from console.tui.widgets.ranks import rank_rows
from tests.console.tui import recorded
from tests.console.tui.recorded import NOW


def texts(rows):
    return [text_of(row) for row in rows]


@pytest.mark.parametrize("with_gpu", [False, True])
@pytest.mark.parametrize("state", [*EXIT_CODES])
def test_nothing_of_a_run_that_ended_counts_on(state, with_gpu):
    shown = []
    for later in (0.0, 500.0):
        ranks = tuple(recorded.rank(r, with_gpu, since_s=6 + later, age_s=6 + later)
                      for r in range(2))  # fmt: skip
        ended = recorded.running(2, with_gpu, state=state, ranks=ranks, data_age_s=6 + later,
                                 since_ts=None)  # fmt: skip
        rows = [*rank_rows(ended, 100, 9), *rank_rows(ended, 50, 9)]
        rows += stall_rows(ended, {}, 100, NOW + later)
        shown.append([*texts(rows), text_of(header_row(ScreenData(0.0, NOW + later, ended), 120))])
    assert shown[0] == shown[1]
    whole = "\n".join(shown[0])
    assert "41,208" in whole
    for measured in ("97%", "1.2G", "612", " 63", "6s"):
        assert measured not in whole, whole


@pytest.mark.parametrize(("state", "now"), [("running", "─ now 1.2G each"), ("completed", "─ –")])
def test_the_memory_of_ranks_that_have_ended_is_not_their_last_or_none(state, now):
    run = recorded.running(2, False, state=state)
    chart = next(c for c in charts.of_run(run, (), [charts.MEMORY]))
    series = dict.fromkeys(chart.names, ((NOW - 9, 1240.0), (NOW, 1240.0)))
    (title, *_) = texts(chart_rows(chart, series, (NOW - 60, 60), 60, 6, "braille"))
    assert now in title, title


@pytest.mark.parametrize(("state", "note"), [("running", "─ now 2.30"), ("halted", "─ last 2.30")])
def test_the_newest_value_of_a_run_that_ended_is_its_last(state, note):
    series = {"loss": ((NOW - 9, 2.5), (NOW, 2.3))}
    (chart,) = charts.of_run(recorded.running(state=state), series, ["loss"])
    title = text_of(chart_rows(chart, series, (NOW - 60, 60), 60, 6, "braille")[0])
    assert title.endswith(note), title


def test_ranks_without_a_supervisor_have_no_present_memory():
    ranks = tuple(recorded.rank(r, False, rss_mib=None, cpu_pct=None) for r in range(2))
    run = recorded.running(state="unsupervised", ranks=ranks)
    for chart in charts.of_run(run, (), [charts.MEMORY, charts.UTILISATION]):
        series = dict.fromkeys(chart.names, ((NOW - 9, 124.0), (NOW, 124.0)))
        (title, *_) = texts(chart_rows(chart, series, (NOW - 60, 60), 40, 6, "braille"))
        assert title.endswith("─ –"), title


@pytest.mark.parametrize(("state", "old"), [("running", ""), ("stalled", "18s old")])
def test_the_speed_of_a_stalled_run_is_not_its_present_speed(state, old):
    run = dataclasses.replace(recorded.running(), state=state)
    speed = dataclasses.replace(run.figures["toks_per_s"], at=NOW - 17.5)
    run = dataclasses.replace(run, figures={"toks_per_s": speed})
    (row,) = [text for text in texts(figure_rows(run, 28, 9, NOW)) if "tok/s" in text]
    assert row.endswith(old or "last 10")
    (chart,) = charts.of_run(run, (), ["throughput"])
    series = {"toks_per_s": ((NOW - 18.5, 9.0), (NOW - 17.5, 9.0)), "other": ((NOW, 1.0),)}
    title = text_of(chart_rows(chart, series, (NOW - 60, 60), 40, 6, "braille")[0])
    assert title.endswith(f"─ {old + ': ' * bool(old)}9"), title
    # `status` takes the time by itself.
    speed = dataclasses.replace(speed, at=time.time() - 17.5)
    run = dataclasses.replace(run, figures={"toks_per_s": speed}, data_age_s=None)
    lines = "\n".join(status_lines(run, all_figures=False))
    assert (", 18s ago" in lines) == bool(old)


def test_of_a_lost_run_the_end_is_not_known():
    lost = recorded.running(state="lost", data_age_s=None)
    row = recorded.header_of(lost)
    assert "LOST" in row
    assert "end time unknown" in row
    assert "ago" not in row


@pytest.mark.parametrize(("state", "says"), [("restarting", "no data yet"), ("halted", "ended 2m")])
def test_a_live_run_without_data_has_not_ended(state, says):
    run = recorded.running(state=state, data_age_s=None, since_ts=NOW - 100)
    row = recorded.header_of(run)
    assert says in row


def test_a_rank_without_samples_has_dashes():
    rank = recorded.rank(0, False, cpu_pct=None, rss_mib=None)
    assert "0%" not in texts(rank_rows(recorded.running(ranks=(rank,)), 100, 9))[1]
    found = recorded.rank(0, gpu=recorded.gpu(0, util_pct=None, power_w=None, mem_used_mib=None,
                                              temp_c=None))  # fmt: skip
    row = texts(rank_rows(recorded.running(1, True, ranks=(found,)), 100, 9))[1]
    assert "0%" not in row
    assert " 0W" not in row
    assert "–/80" in row


def test_a_phase_that_ended_unseen_has_neither_steps_nor_a_duration():
    held = recorded.phases()
    lost = dataclasses.replace(held[1], state="lost")
    shown = []
    for later in (0.0, 500.0):
        rows = phase_rows((held[0], lost, held[2]), 1, "ask", 100, 20, NOW + later)
        shown.append(next(text for text in texts(rows) if "1-plumbing" in text))
    assert shown[0] == shown[1]
    assert "–/100" in shown[0]
    rows = texts(phase_rows(held, 1, "ask", 100, 20, NOW))
    assert "0/100" in next(text for text in rows if "2-recall" in text)


@pytest.mark.parametrize("width", [28, 40])
def test_the_entropy_of_a_gate_that_collapses_has_its_lowest_layer(width):
    lowest = Figure(0.04, "nats", "", NOW)
    mean = dataclasses.replace(recorded.figures()["gate_entropy_mean"], window="step 41")
    entropies = {"gate_entropy_mean": mean, "gate_entropy_min": lowest}
    state = recorded.running(figures=recorded.figures() | entropies)
    rows = [text_of(row) for row in figure_rows(state, width, 12, NOW)]
    assert "entropy       0.931 min 0.04" in rows


@pytest.mark.parametrize(("skipped", "shown"), [(0.0, False), (1.0, True)])
def test_skipped_steps_are_shown_in_the_few_rows_of_a_small_screen(skipped, shown):
    figures = recorded.figures() | {"skipped_steps": Figure(skipped, "steps", "this run", NOW)}
    rows = texts(figure_rows(recorded.running(figures=figures), 28, 6, NOW))
    assert any(row.startswith("skipped") for row in rows) is shown


def test_the_figures_of_a_run_that_ended_are_not_those_of_now():
    figures = {"toks_per_s": Figure(7.0, "tok/s", "last 5 steps", NOW - 660),
               "disk_free_gib": Figure(76.9, "GiB", "newest sample", NOW - 720)}  # fmt: skip
    ended = recorded.running(state="halted", data_age_s=None, figures=figures)
    heading, speed, disk = texts(figure_rows(ended, 40, 12, NOW))
    assert heading.startswith("last ──")
    assert heading.endswith("11m ago")
    assert speed.endswith("last 5 steps")
    assert disk.endswith("12m old")


@pytest.mark.parametrize("width", [28, 40, 52])
def test_speed_and_step_time_name_their_windows(width):
    windows = {"toks_per_s": "last 5 steps", "step_p50_s": "last 200 steps"}
    figures = recorded.figures()
    figures |= {n: dataclasses.replace(figures[n], window=w) for n, w in windows.items()}
    rows = figure_rows(recorded.running(figures=figures), width, 20, time.time())
    speed, step_time = [text_of(row) for row in rows][1:3]
    assert "last 5" in speed
    assert "last 200" in step_time


def test_of_a_rank_that_ended_in_a_live_run_nothing_counts_on():
    ended = recorded.rank(1, False, exit="exit 0", state="gone", since_s=70.0, age_s=70.0)
    rows = texts(rank_rows(recorded.running(ranks=(recorded.rank(0, False), ended)), 100, 9))
    assert "70s" not in rows[2]
    assert "97%" not in rows[2]
    assert "97%" in rows[1]


@pytest.mark.parametrize("count", [0, None])
def test_a_program_that_counts_no_collectives_shows_a_dash(count):
    rank = recorded.rank(0, False)
    rank = dataclasses.replace(rank, pulse=dataclasses.replace(rank.pulse, collectives=count))
    state = recorded.running(ranks=(rank,))
    at = heading(state).index("coll.")
    assert texts(stall_rows(state, {}, 100, NOW))[0][at : at + 6].strip() == "–"


def test_a_rank_without_a_pulse_has_no_step_no_phase_and_no_time():
    for width in (50, 100):
        state = recorded.running(ranks=(recorded.rank(0, False, pulse=None),))
        assert re.search(r"1\.2 ?Gi?B? +– +– +– ", texts(rank_rows(state, width, 9))[1])


def test_the_mfu_says_which_formula_it_is():
    shares = {"mfu": Figure(0.41, "share", "", NOW), "mfu_exact": Figure(0.077, "share", "", NOW)}
    state = recorded.running(figures=recorded.figures() | shares)
    rows = [text_of(row) for row in figure_rows(state, 40, 12, NOW)]
    assert "MFU 6ND      41.0 % exact 7.7 %" in rows
