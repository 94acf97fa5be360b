"""The charts of the Dashboard: which charts are shown, the zoom, and the operator's choice."""

from __future__ import annotations

import dataclasses
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console import settings_file
from console.model import LogLine
from console.sources.run import RunSource
from console.tui import chartmath, charts
from console.tui.feed import ScreenData
from console.tui.rows import text_of, width_of
from console.tui.views.dashboard import LEAST_CHART, shape
from console.tui.widgets.chart import chart_rows, zoomed_rows
from tests.console.sources import directory
from tests.console.tui import recorded
from tests.console.tui.recorded import (
    NOW,
    SIZES,
    app_on,
    charted,
    driven,
    lines,
    picture,
    play,
    see,
    settled,
    until,
)

CPU = ["utilisation CPU %", "throughput tok/s", "memory RSS", "gate entropy nats"]
GPU = ["utilisation GPU %", "throughput tok/s", "memory GPU", "gate entropy nats"]
RUNS = {
    "cpu": (recorded.running, CPU),
    "gpus": (lambda: recorded.running(8, True), GPU),
    "foreign": (recorded.foreign, ["utilisation CPU %", "memory RSS", "loss"]),
}


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kind", RUNS)
async def test_the_first_screen_has_the_charts_that_the_records_allow(kind, size):
    make, titles = RUNS[kind]
    async with driven(app_on(make()), size) as (app, pilot):
        shown = await charted(pilot)
        for title in titles:
            assert re.search(rf"{re.escape(title)} \[2 ?m", shown), shown
        assert ("gate entropy" in shown) == (kind != "foreign")
        assert kind != "foreign" or "nats" not in shown
        assert any(line.startswith("1 ") for line in lines(app))
        later = "loss nats/token" in shown and re.search(r"step time \[2", shown) is not None
        assert later == (size == SIZES[1]) or kind == "foreign"


@pytest.mark.parametrize("size", SIZES, ids=str)
async def test_charts_have_one_time_axis_and_old_values_have_their_age(size):
    app = app_on(recorded.running())
    series, now = app.feed._open(None).series, time.time()
    for second in range(0, 100, 2):
        series.add("", now + second, {"cpu_pct:0": 96.0, "rss_mib:0": 1240.0})
    async with driven(app, size) as (_, pilot):
        shown = await charted(pilot)
        assert re.search(r"utilisation CPU % \[5m] ─* 96%", shown), shown
        assert re.search(r"throughput tok/s \[5m] ─* 2m old: 41.0k", shown), shown
        assert re.search(r"gate entropy nats \[5m] ─* 2m old: 0.93\n?", shown), shown


async def test_a_mark_shows_the_selected_chart_also_without_colour():
    async with driven(app_on(recorded.running())) as (_, pilot):
        await play(pilot, "…gate entropy", "right", "…› utilisation CPU %", "right")
        shown = await charted(pilot)
        assert re.findall("› .*", shown)[0].startswith("› throughput tok/s"), shown
        assert "› utilisation" not in shown


async def test_z_zooms_the_selected_chart_and_arrows_read_values_in_it():
    async with driven(app_on(recorded.running())) as (app, pilot):
        await play(pilot, "…gate entropy", "right", "left", "z", "…layer 2")
        shown = await charted(pilot)
        assert "gate entropy nats [2 min]" in shown
        assert "now mean 0.93, lowest 0.41 in layer 1" in shown
        assert "throughput" not in shown
        assert re.search(r"layer 1 .* 0\.410 nats ◂", shown), shown
        await play(pilot, "left", "left", "left", "…ago   mean 0.930 nats, lowest layer 0.410 nats")
        assert sum("│" in line for line in lines(app)) > 3
        await play(pilot, "escape", "…throughput")


async def test_the_operator_chooses_the_charts_and_the_settings_file_keeps_them(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    settings_file.path().parent.mkdir(mode=0o700)
    text = "hook: [notify]  # by phone\ncharts:\n  - loss\nhook_every_s: 5\n"
    settings_file.path().write_text(text)
    settings_file.path().chmod(0o600)
    async with driven(app_on(recorded.running())) as (app, pilot):
        await until(pilot, lambda: app.dashboard.choice == ("loss",))
        await until(pilot, lambda: "throughput" not in picture(app))
        await play(pilot, "c", "…1 loss", "space", "enter")
        await until(pilot, lambda: settings_file.charts() == ("loss", "utilisation"))
        await see(pilot, "utilisation CPU %")
    kept = settings_file.path().read_text()
    assert kept.startswith("hook: [notify]  # by phone\nhook_every_s: 5\n")
    assert settings_file.load().hook == ("notify",)
    settings_file.save_charts(())
    assert "charts" not in settings_file.path().read_text()


@pytest.mark.parametrize("count", [2, 8])
async def test_few_ranks_leave_room_for_the_log_below_them(count):
    async with driven(app_on(recorded.running(count)), SIZES[1]) as (app, pilot):
        lines_ = tuple(LogLine("r0", f"step {step}") for step in range(40))
        app.book.take(ScreenData(0.0, NOW, log=lines_))
        app.repaint_view()
        await settled(pilot)
        shown = lines(app)
        heading = next(i for i, line in enumerate(shown) if line.startswith("log ──"))
        charts = next(i for i, line in enumerate(shown) if line.startswith("utilisation"))
        newest = next(i for i, line in enumerate(shown) if "r0    step 39" in line)
        assert (heading < newest < charts) == (count == 2)
        assert sum("log ──" in line for line in shown) == 1
        assert newest - heading >= 4
        await play(pilot, "z", "…z or esc all charts")
        assert "log ──" not in picture(app)


@given(st.integers(20, 300), st.integers(4, 80), st.integers(0, 2000), st.integers(1, 8))
def test_the_dashboard_fills_its_height_whatever_it_is(width, height, ranks, available):
    now = shape(width, height, ranks, available)
    assert now.top >= 2
    assert now.top + now.log <= height
    assert now.beside == 0 or now.top - now.beside >= ranks + 1
    assert now.below == 0 or now.top - now.below >= ranks + 1
    rows = -(-now.charts // now.per_row) if now.charts else 0
    assert height - now.top - now.log >= rows * LEAST_CHART


@pytest.mark.parametrize(("state", "note"), [("running", "16m old: 2.30"), ("halted", "last 2.30")])
def test_a_zoomed_chart_shows_the_age_of_its_newest_value(state, note):
    series = {"loss": ((NOW - 990, 2.5), (NOW - 960, 2.3))}
    (chart,) = charts.of_run(recorded.running(state=state), series, ["loss"])
    window = chartmath.window(NOW - 990, NOW - 960)
    title = text_of(zoomed_rows(chart, series, window, 80, 20, "braille", None, NOW)[0])
    assert title.endswith(f"─ {note}"), title


def test_a_lost_gpu_has_no_present_value_and_none_at_a_later_time():
    (chart,) = charts.of_run(recorded.lost_gpu(), (), [charts.UTILISATION])
    times = (*range(0, 300, 100), *range(300, 900))  # older spans are longer
    series = {name: tuple((NOW - 900 + t, 97.0) for t in times) for name in chart.names}
    series["gpu_util_pct:5"] = tuple((NOW - 900 + t, 31.0) for t in range(300))
    window = chartmath.window(NOW - 900, NOW, 1800)
    for at, words in ((None, ""), (NOW - 60, "97 %"), (NOW - 750, "31 % to 97 %")):
        rows = [*map(text_of, zoomed_rows(chart, series, window, 120, 30, "braille", at, NOW))]
        assert rows[0].endswith("─ now 97% each"), rows[0]
        assert any(row.endswith(f"ago   {words}") for row in rows) == bool(words), rows
        (part,) = [row for row in rows if "GPU 5" in row]
        present = re.search(r"GPU 5 +(\S*) +31 %", part) is not None
        assert present == ("31" in words), part
        assert present or re.search(r"GPU 5 +–", part), part
        assert any(re.search(r"GPU 4 +\S+ +97 %", row) for row in rows)


@pytest.mark.parametrize("size", [(20, 5), (80, 20), (200, 50)])
@pytest.mark.parametrize("chart", charts.CATALOG, ids=lambda chart: chart.title)
def test_a_zoomed_chart_fits_its_size_with_any_number_of_parts(chart, size):
    names = tuple(f"x:{index}" for index in range(64))
    chart = dataclasses.replace(chart, names=chart.names or names, parts=names, each="layer")
    series = dict.fromkeys((*chart.names, *names), ((NOW - 9, 1.0), (NOW, 2.0)))
    window = chartmath.window(NOW - 9, NOW)
    rows = zoomed_rows(chart, series, window, *size, "braille", NOW - 5, NOW)
    assert len(rows) == size[1] or size[0] == 20
    assert all(width_of(row) <= size[0] for row in rows[:1])


@pytest.mark.parametrize("width", [39, 80])
@pytest.mark.parametrize(
    ("ranks", "has_gpus", "shown"),
    [(16, True, "GPU %"), (17, True, "GPU 0–15 %"), (32, False, "CPU r0–15 %")],
)
def test_a_chart_of_some_ranks_or_gpus_says_which(ranks, has_gpus, shown, width):
    name = "gpu_util_pct" if has_gpus else "cpu_pct"
    series = {f"{name}:{i}": ((NOW - 9, 97.0), (NOW, 97.0 - (i == 15))) for i in range(ranks)}
    chart = charts.of_run(recorded.running(ranks, has_gpus), series, ())[0]
    title = text_of(chart_rows(chart, series, (NOW - 9, 60), width, 8, "braille")[0])
    assert title.startswith(f"utilisation {shown}")
    assert title.endswith("96% to 97%")


def test_the_history_keeps_the_series_of_every_chart(tmp_path):
    run, names = directory.run(tmp_path), {n for chart in charts.CATALOG for n in chart.names}
    figures = dict.fromkeys(names, 1.0) | {"steps_dt_s": [1.0], "gate_entropy_layers": [1.0]}
    directory.beat(run, 0, 1, "progress", n=1, **figures)
    source = RunSource(run)
    source.poll()
    assert source.series.names >= names


def test_mean_and_lowest_layer_are_two_curves():
    chart = next(chart for chart in charts.CATALOG if chart.title == charts.ENTROPY)
    values = {"gate_entropy_mean": 1.0, "gate_entropy_lowest": 0.0}
    series = {name: tuple((float(s), v) for s in range(60)) for name, v in values.items()}
    body = chart_rows(chart, series, (0.0, 60), 40, 6, "braille")[1:]
    drawn = [text_of(row)[8:].strip() != "" for row in body]
    assert drawn == [True, False, False, False, True]


def test_eight_ranks_leave_room_for_four_charts_on_the_smallest_screen():
    assert (shape(80, 20, 8, 8).charts, shape(80, 18, 8, 8).charts) == (4, 4)


async def test_charts_whose_series_begin_at_different_times_have_one_time_axis():
    app = app_on(recorded.running())
    series, now = app.feed._open(None).series, time.time()
    for second in range(-400, 0, 2):
        series.add("", now + second, {"cpu_pct:0": 96.0, "rss_mib:0": 1240.0})
    async with driven(app) as (_, pilot):
        await charted(pilot)
        shown = [panel for panel in app.dashboard.panels if panel.display]
        assert len(shown) == 4
        assert len({panel.window for panel in shown}) == 1
