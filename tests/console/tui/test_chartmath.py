"""The maths of the charts, without an app."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from console.sources.series import bins
from console.tui import chartmath
from console.tui.rows import text_of, width_of
from console.tui.widgets.chart import Chart, chart_rows, part_rows, zoomed_rows

reals = st.floats(allow_nan=False, allow_infinity=False)
sane = st.floats(-1e150, 1e150)
spans = st.sampled_from(chartmath.SPANS_S)


@given(st.floats(0, 1e6), st.floats(0, 1e6), spans)
def test_the_window_holds_now_and_is_at_least_three_quarters_full_once_it_jumped(first, past, span):
    start = chartmath.window_start(first, first + past, span)
    shown = first + past - start
    assert -1e-6 <= shown <= span + 1e-6
    if past > span:
        assert shown >= 0.75 * span - 1e-6


@given(st.lists(st.tuples(st.floats(0, 600), reals), max_size=200), st.integers(1, 120))
@example([(600.0, 0.0)], 55)
def test_bins_hold_every_point_and_nothing_else(points, count):
    points.sort()
    held = bins(points, 0.0, 600.0, count)
    assert len(held) == count
    shown = [v for at, v in points if at < 600.0]
    known = [b for b in held if b is not None]
    if shown:
        assert min(b[0] for b in known) == min(shown)
        assert max(b[1] for b in known) == max(shown)
    else:
        assert known == []


@given(
    st.lists(st.tuples(st.floats(0, 700), sane), min_size=3, max_size=80), st.integers(1, 70),
    st.booleans(), st.data(),
)  # fmt: skip
def test_curves_that_grow_are_those_of_all_points(points, count, is_band, data):
    points.sort()
    half = len(points) // 2
    begin, ends = 0, sorted(data.draw(st.lists(st.integers(1, half), min_size=1, max_size=6)))
    if data.draw(st.booleans()):  # the reader reads older points later
        begin, ends = half, [half + end for end in ends]
    curves = chartmath.Curves()
    for first, end in [*((begin, end) for end in ends), (0, len(points))]:
        held = [points[first:end], points[first : first + (end - first + 1) // 2]]
        held = held[: data.draw(st.integers(1, 2))]  # the second series is shorter or missing
        whole = [bins(each, 0.0, 600.0, count) for each in held]
        expected = [tuple(chartmath.merge(whole))] if is_band else whole
        assert list(curves.of(("x", "y"), held, is_band, 0.0, 600.0, count)) == expected
    other = [(points[0][0], 7.0), *points[1:]]
    renamed = curves.of(("z",), [other], is_band, 0.0, 600.0, count)
    assert renamed == (bins(other, 0.0, 600.0, count),)


@given(st.lists(st.one_of(st.none(), st.tuples(sane, sane)), max_size=50), st.booleans())
def test_bounds_enclose_all_values_and_are_not_empty(held, from_zero):
    ordered = [None if b is None else (min(b), max(b)) for b in held]
    low, high = chartmath.bounds(ordered, from_zero)
    assert low < high
    for b in ordered:
        if b is not None:
            slack = max(1e-100, 1e-6 * max(abs(low), abs(high)))
            assert low - slack <= b[0]
            assert b[1] <= high + slack


def test_bounds_are_round_and_do_not_move_with_every_sample():
    assert chartmath.bounds([(3.0, 41_020.0)], True) == (0.0, 50_000.0)
    assert chartmath.bounds([(3.0, 41_700.0)], True) == (0.0, 50_000.0)


@given(
    st.lists(st.one_of(st.none(), st.tuples(reals, reals)), min_size=1, max_size=80),
    st.integers(1, 12),
    st.sampled_from(["braille", "block"]),
)
def test_a_drawing_has_exactly_its_size_and_only_its_alphabet(held, height, mode):
    ordered = [None if b is None else (min(b), max(b)) for b in held]
    low, high = chartmath.bounds(ordered, False)
    drawn = chartmath.draw((tuple(ordered),), low, high, height, mode)
    width = math.ceil(len(held) / 2) if mode == "braille" else len(held)
    assert [len(line) for line in drawn] == [width] * height
    if mode == "braille":
        assert all(c == " " or 0x2800 < ord(c) <= 0x28FF for line in drawn for c in line)


def test_the_highest_value_is_on_the_top_line_and_the_lowest_at_the_bottom():
    held = [(0.0, 0.0)] * 20 + [None] * 20 + [(1.0, 1.0)] * 2
    drawn = chartmath.draw((tuple(held),), 0.0, 1.0, 3, "braille")
    assert drawn[0].strip()
    assert drawn[0][0] == " "
    assert drawn[2][0] != " "


def test_a_new_sample_changes_only_columns_at_the_right_edge():
    points = [(float(s), 50.0 + s % 5) for s in range(400)]
    chart = Chart("tok/s", ("x",), "", from_zero=True)
    before = chart_rows(chart, {"x": tuple(points)}, chartmath.window(0.0, 399.0), 60, 8,
                        "braille")  # fmt: skip
    points += [(float(s), 52.0) for s in range(400, 410)]
    after = chart_rows(chart, {"x": tuple(points)}, chartmath.window(0.0, 409.0), 60, 8,
                       "braille")  # fmt: skip
    for old, new in zip(before[1:], after[1:], strict=True):
        pairs = zip(text_of(old), text_of(new), strict=False)
        differs = [i for i, (a, b) in enumerate(pairs) if a != b]
        assert all(36 <= i <= 44 for i in differs), differs


def test_a_chart_has_labels_unit_and_window_and_fits():
    points = tuple((float(s), 41_000.0) for s in range(60))
    for width, height in ((38, 6), (58, 9), (20, 4)):
        rows = chart_rows(Chart("tok/s", ("x",), ""), {"x": points},
                          chartmath.window(0.0, 60.0, 600), width, height, "braille")  # fmt: skip
        text = "\n".join(map(text_of, rows))
        assert len(rows) == height
        assert all(width_of(row) <= width for row in rows)
        assert "tok/s" in text
    assert "10 min" in text or width == 20
    empty = chart_rows(Chart("loss", ("y",), ""), {}, chartmath.window(0.0, 60.0), 40, 6, "braille")
    assert "no data yet" in text_of(empty[0])


def test_an_older_point_that_is_read_later_is_drawn_also_among_equal_points():
    curves, newest = chartmath.Curves(), [(21.0, 0.0)] * 3
    for held in (newest[1:], [(0.0, 0.0), *newest]):
        found = curves.of(("x",), [held], False, 0.0, 600.0, 58)
        assert found == (bins(held, 0.0, 600.0, 58),)


def test_a_stall_stays_a_gap_and_rare_samples_are_joined():
    point = (3, 3)
    often = [point] * 20 + [None] * 12 + [point] * 5
    assert chartmath.bridge(often)[20:32] == [None] * 12
    rare = [point, *[None] * 9] * 4
    assert None not in chartmath.bridge(rare)[:31]


@given(st.integers(40, 240))
def test_the_values_below_a_zoomed_chart_fit_the_width(width):
    names = tuple(f"gpu_util_pct:{index}" for index in range(8))
    chart = Chart("utilisation", names, "%", each="GPU", parts=names)
    rows = part_rows(chart, {name: [(1.0, 51.0)] for name in names}, 1.0, width, 9)
    assert all(width_of(row) <= width for row in rows)


@pytest.mark.parametrize("at", [-1.0, 1.0, 4.0])
def test_the_crosshair_reads_the_lowest_and_the_highest_value_of_an_older_time(at):
    points = ((0.0, 1.7), (0.0, 11.0), (10.0, 1.7), (10.0, 2.2))
    chart = Chart("loss", ("loss",), "nats/token")
    window = chartmath.window(0.0, 60.0)
    rows = zoomed_rows(chart, {"loss": points}, window, 80, 12, "braille", at, 70.0)
    assert text_of(rows[-1]).endswith("70s ago   1.700 to 11.000 nats/token")
    chart = Chart("utilisation", ("x:0",), "%", each="GPU", parts=("x:0",))
    rows = zoomed_rows(chart, {"x:0": points}, window, 80, 12, "braille", at, 70.0)
    assert "2% to 11%" in text_of(rows[-1])
