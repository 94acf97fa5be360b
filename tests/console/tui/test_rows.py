"""Rows: how their parts fit a width, how values are written, and which cells have changed."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len

from console.status_text import rank_line
from console.tui import format as fmt
from console.tui import rows, styles
from console.tui.terminal import Terminal, detect
from console.tui.widgets.chart import LABEL, scale_label
from console.tui.widgets.ranks import place_cells
from tests.console.tui import recorded

visible = st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Mn", "Me", "Cf"))
texts = st.text(visible, max_size=60)
row = st.lists(st.tuples(texts, st.sampled_from(["", "dim", "crit"])), max_size=5).map(tuple)


@given(row, row, st.integers(1, 60))
def test_what_is_outside_the_changed_cells_is_equal(old, new, width):
    old, new = rows.clip(old, width), rows.clip(new, width)
    span = rows.changed(old, new, width)
    a, b = rows._cells(old, width), rows._cells(new, width)
    if span is None:
        assert a == b
    elif any(cell_len(text) != len(text) for text in map(rows.text_of, (old, new))):
        assert span == (0, width)
    else:
        first, end = span
        assert a[:first] == b[:first]
        assert a[end:] == b[end:]
        assert a[first] != b[first]


def test_the_least_important_part_is_shortened_first():
    parts = [
        (9, [(("the run", ""),)]),
        (2, [(("on a host", ""),), (("host", ""),)]),
        (5, [(("step 4", ""),)]),
    ]
    assert rows.text_of(rows.fit(parts, 40)) == "the run  on a host  step 4"
    assert rows.text_of(rows.fit(parts, 24)) == "the run  host  step 4"
    assert rows.text_of(rows.fit(parts, 16)) == "the run  step 4"
    assert rows.text_of(rows.fit(parts, 9)) == "the run"


@given(texts, st.integers(4, 40))
def test_wrapped_and_chopped_lines_fit_and_lose_no_word(text, width):
    for broken in (rows.wrap(text, width), rows.chop(text, width, 999)):
        assert all(cell_len(line) <= width for line in broken)
        assert "".join("".join(broken).split()) == "".join(text.split())


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "1s"), (0.9, "1s"), (1.2, "2s"), (74, "74s"), (600, "10m"), (3 * 3600 + 300, "3h05"),
     (3 * 86400, "3d"), (None, "–"), (float("nan"), "–"), (float("inf"), "–"), (-1, "1s"),
     (-5, "–")],
)  # fmt: skip
def test_ages(seconds, text):
    assert fmt.age(seconds) == text


def test_a_time_below_a_second_in_a_phase_is_not_shown_as_a_second():
    fast, slow = recorded.rank(0, since_s=0.2), recorded.rank(0, since_s=1.2)
    assert [place_cells(each, "", "")["for"][0] for each in (fast, slow)] == ["<1s", "2s"]
    assert "forward for <1s" in rank_line(fast)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.91, "0.91"), (2.4e-4, "2.4e-4"), (41_020.0, "41.0k"), (1.3e6, "1.3M"), (0.0, "0"),
     (float("nan"), "nan"), (float("inf"), "inf"), (812, "812"), (1e18, "1000000T")],
)  # fmt: skip
def test_short_numbers(value, text):
    assert fmt.short(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.077, "7.7 %"), (0.9994, "99.9 %"), (0.9995, "100 %"), (1.0, "100 %"), (1.59, "159.0 %")],
)
def test_a_share_above_one_is_not_shown_as_one(value, text):
    """The MFU by the usual count may be above 1 for long sequences."""
    assert fmt.figure(value, "share") == text


@given(st.floats(0, 1e4), st.sampled_from(["", "GiB", "s"]))
@example(7.5e-4, "GiB")
@example(7.5e-11, "")
def test_an_axis_label_fits_the_room_beside_the_chart(value, unit):
    assert len(scale_label(value, unit)) <= LABEL


@given(st.floats())
def test_no_number_breaks_a_format(value):
    for text in (fmt.short(value), fmt.age(value), fmt.eta(value), fmt.whole(value, "W"),
                 fmt.gib(value),
                 fmt.short_gib(value), fmt.figure(value, "s"),
                 fmt.figure(value, "share"), fmt.figure(value, "MiB"),
                 fmt.figure(value, "")):  # fmt: skip
        assert text
    assert sum(map(len, fmt.bar(value, 10))) == 10


def test_the_mouse_is_off_over_ssh_unless_asked_for():
    local, remote = {"TERM": "xterm"}, {"TERM": "xterm", "SSH_CONNECTION": "a b"}
    assert detect(local, None).mouse
    assert not detect(remote, None).mouse
    assert detect(remote, True).mouse
    assert not detect(local, False).mouse


def test_terminals_without_utf8_or_cursor_control_are_known():
    assert detect({"TERM": "dumb"}, None).dumb
    assert detect({"TERM": "xterm", "LANG": "C"}, None).ascii_only
    assert detect({"TERM": "linux", "LANG": "C.UTF-8"}, None).chart_mode == "block"
    assert detect({"TERM": "xterm", "LANG": "de_DE.UTF-8"}, None) == Terminal(mouse=True)


@given(texts)
def test_plain_text_is_ascii_and_as_long(text):
    with patch.object(styles, "ascii_only", True):
        plain = styles.drawn(text)
    assert plain.isascii()
    assert len(plain) == len(text)


def test_plain_text_keeps_the_sign_of_a_bound():
    with patch.object(styles, "ascii_only", True):
        assert styles.drawn("≥ 3 · ≤ 70 % · a ÷ b") == "> 3 . < 70 % . a / b"
