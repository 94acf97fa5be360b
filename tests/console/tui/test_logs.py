"""The logs on the screen: following, searching, holding, and hostile lines."""

from __future__ import annotations

import dataclasses
import re

import pytest

from console.model import LogLine
from console.tui.widgets.loglines import BACKLOG
from tests.console.tui import recorded
from tests.console.tui.recorded import SIZES, app_on, driven, lines, picture, play, see, until
from trainers.contract import rundir


@pytest.fixture
def logged(tmp_path):
    folder = tmp_path / "logs" / "attempt1"
    folder.mkdir(parents=True)
    (folder / "rank0.log").write_text("".join(f"zero line {i} loss 2.3\n" for i in range(60)))
    (folder / "rank1.log").write_text("one [red]markup[/red] needle\nWARN one\n")
    return tmp_path


@pytest.mark.parametrize("size", SIZES, ids=str)
async def test_logs_follow_filter_and_find(logged, size):
    async with driven(app_on(recorded.running(), run=logged), size) as (app, pilot):
        await until(pilot, lambda: app.book.total == 63)
        await pilot.press("4")
        await see(pilot, "following new lines", "[red]markup[/red]")
        await play(pilot, "g", "…zero line 0 ")
        assert "following" not in lines(app)[2].replace("G: to the end", "")
        await pilot.press("slash", *"NEEDLE", "enter")
        await see(pilot, "one [red]markup[/red] needle", "find 'NEEDLE'")
        await play(pilot, "n", "…no later line with 'NEEDLE'", "G", "right", "right")
        await until(pilot, lambda: "[r1]" in lines(app)[2])
        assert "no later line" not in picture(app), "the message is about another log"
        assert "zero line" not in picture(app)


async def test_a_search_in_a_part_of_a_long_log_does_not_say_that_the_log_has_no_such_line(logged):
    with (logged / "logs" / "attempt1" / "rank0.log").open("a") as stream:
        stream.writelines(f"zero line {i} loss 2.3\n" for i in range(60, 20_000))
    async with driven(app_on(recorded.running(), run=logged)) as (app, pilot):
        await until(pilot, lambda: app.book.total > 9000)
        count = f"{app.book.total:,}"
        await play(pilot, "4", "…following", "slash", *"wanted", "enter")
        await see(pilot, f"no earlier line with 'wanted' in the {count} lines of this view")
        await play(pilot, "g", "… KiB of this log skipped]")


async def test_found_and_first_lines_are_shown_among_lines_of_several_rows(tmp_path):
    log = rundir.rank_log(tmp_path, 1, 0)
    log.parent.mkdir(parents=True)
    long = [f"long {i} {'x y z ' * 60}" for i in range(60)]
    long[30] = f"the needle {long[30]}"
    log.write_text("\n".join([*long, *(f"short {i}" for i in range(100))]) + "\n")
    async with driven(app_on(recorded.running(), run=tmp_path)) as (app, pilot):
        await play(pilot, "4", "…short 99", "slash", *"needle", "enter", "…find 'needle'")
        await see(pilot, "the needle long 30", "long 31")
        await play(pilot, "g", "…r0    long 0", "…long 1 ", "down", "pageup")
        assert lines(app)[3].startswith("r0    long 0"), picture(app)
        shown = set[str]()
        for _ in range(40):
            shown |= set(re.findall(r"long \d+|short \d+", picture(app)))
            await pilot.press("pagedown")
        assert len(shown) == 160, "each line is shown"
        await play(pilot, "slash", *"missing", "enter", "…no earlier line", "G", "…following")


@pytest.mark.parametrize("size", SIZES, ids=str)
async def test_the_logs_of_a_later_attempt_name_it_and_the_logs_before_it(logged, size):
    log = rundir.rank_log(logged, 2, 0)
    log.parent.mkdir()
    log.write_text("a line of attempt 2\n")
    state = recorded.running(attempt=2)
    async with driven(app_on(state, run=logged), size) as (app, pilot):
        await play(pilot, "4", "…a line of attempt 2")
        assert lines(app)[2].startswith("log of attempt 2  [all]  r0")
        shown = "".join(" ".join(line.split()) for line in lines(app)[3:])
        assert f"nsa-console logs {logged} --attempt 1".replace(" ", "") in shown.replace(" ", "")
        await play(pilot, "right", "…a line of attempt 2", "…[r0]")


async def test_the_title_names_the_log_and_the_place_also_with_many_ranks():
    async with driven(app_on(recorded.running(16))) as (app, pilot):
        await play(pilot, "4", "…no log lines yet")
        app.feed.stop()
        assert app.snapshot is not None
        numbers = [(rank, number) for number in range(60) for rank in range(16)]
        log = tuple(LogLine(f"r{rank}", f"line {number}") for rank, number in numbers)
        app.take(dataclasses.replace(app.snapshot, log=log))
        await play(pilot, "…log  [all] of 16 logs ─", "left", "pageup", "…line 40")
        title = r"log  \[r15\] of 16 logs ─+ 24–42 of 60  G: to the end"
        assert re.fullmatch(title, lines(app)[2]), lines(app)[2]


async def test_an_empty_log_can_be_scrolled():
    async with driven(app_on(recorded.running())) as (_, pilot):
        await play(pilot, "4", "…no log lines yet", "pagedown", "pageup", "g", "G", "down", "up")
        await see(pilot, "following new lines")


HOSTILE_LINES = (
    "漢字" * 90, "e\u0301" * 200, "👩‍👩‍👧" * 40, "\x1b]0;title\x07\x1b[2J\x1b[31mred",
    "\x9b31m\x90q\x9c", "tab\there\rback", "\u202eright to left", "\u200b" * 300,
    "\x00\x7f\x08\x08",
)  # fmt: skip


@pytest.mark.parametrize("size", [(80, 24), (21, 12)], ids=str)
async def test_wide_and_hostile_log_lines_stay_in_their_cells(tmp_path, size):
    folder = tmp_path / "logs" / "attempt1"
    folder.mkdir(parents=True)
    (folder / "rank0.log").write_text("\n".join((*HOSTILE_LINES, "the end\n")), errors="replace")
    async with driven(app_on(recorded.running(), run=tmp_path), size) as (app, pilot):
        await play(pilot, "4", "…the end")
        for keys in (["1"], ["4"], ["g"], ["slash", *"字", "enter"], ["G"]):
            await pilot.press(*keys)
            await pilot.pause()
            assert len(lines(app)) == size[1]
            for strip in app.screen._compositor.render_strips():
                assert strip.cell_length == size[0]
                assert strip.text.isprintable(), strip.text
        await see(pilot, "the end")


async def test_what_is_held_in_the_log_stays_when_lines_come(logged):
    async with driven(app_on(recorded.running(), run=logged)) as (app, pilot):
        await until(pilot, lambda: app.book.total == 63)
        await play(pilot, "4", "…following", "pageup", "…G: to the end")
        before = lines(app)[3:20]
        assert app.snapshot is not None
        snapshot = dataclasses.replace(
            app.snapshot, log=tuple(LogLine("r0", f"new {i}") for i in range(5)), log_begins=False
        )
        app.take(snapshot)
        await pilot.pause()
        assert lines(app)[3:20] == before
        await play(pilot, "G", "…new 4", "g")
        many = tuple(LogLine("r0", f"later {i}") for i in range(BACKLOG))
        app.take(dataclasses.replace(snapshot, log=many))
        await until(pilot, lambda: "later 0 " in f"{lines(app)[3]} ")
        assert "[all]  r0" in lines(app)[2]
        assert "r1" not in lines(app)[2]


async def test_the_last_words_of_a_run_that_is_over_need_no_newline(logged):
    with (logged / "logs" / "attempt1" / "rank0.log").open("a") as stream:
        stream.write("last words")
    async with driven(app_on(recorded.running(state="crashed"), run=logged), SIZES[0]) as (
        _,
        pilot,
    ):
        await play(pilot, "4", "…last words")
