"""The stacks of all ranks on the Stall view: one column for each group."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from console.sources.stacks import Frame, Stack, Thread
from console.tui.rows import text_of, width_of
from console.tui.views.stall import LEAST_WIDTH, grouped, no_dump, stack_rows
from tests.console.tui import recorded
from tests.console.tui.recorded import NOW, SIZES, app_on, driven, lines, picture, play, until


def stack(number: int, *frames: str) -> Stack:
    held = tuple(Frame(f"/src/nsa/{name}.py", 7, "f") for name in frames)
    return Stack(number, NOW, f"stackdump_rank{number}.txt", (Thread("main", held),))


def heads(groups, odd, first=0, width=80):
    rows = stack_rows(groups, odd, width, 8, NOW, first)
    assert all(width_of(row) <= width for row in rows)
    count = min(len(groups) - first, max(1, width // LEAST_WIDTH))
    each = (width - 2 * (count - 1)) // count
    text = text_of(rows[1]).ljust(width)
    return [text[i * (each + 2) :][:each].strip() for i in range(count)], text_of(rows[0])


def test_ranks_with_the_same_stack_have_one_column_and_the_odd_ones_come_first():
    stacks = {r: stack(r, "reduce", "loop") for r in range(7)}
    stacks[3] = stack(3, "select", "loop")
    groups = grouped(stacks, range(8), None)
    assert [ranks for ranks, _ in groups] == [(7,), (3,), (0, 1, 2, 4, 5, 6)]
    shown, title = heads(groups, None)
    assert shown == ["rank 7", "rank 3 ◂ differs  1s ago"]
    assert "1–2 of 3 ← →" in title
    assert heads(groups, None, 1)[0][1] == "ranks 0–2,4–6  1s ago"
    assert heads(grouped(stacks, range(8), 5), 5)[0][0] == "ranks 0–2,4–6 ◂ differs  1s ago"
    rows = [text_of(row) for row in stack_rows(groups, None, 120, 8, NOW)]
    assert "no dump of this group" in rows[2]
    assert "waits for the GIL, or holds it" in rows[2]
    assert "select.py:7 f" in rows[4]
    assert "← →" not in rows[0]


def dump(folder, number, text, ts=NOW):
    """Writes a dump of a rank; without a line break, `text` is the file of the only frame."""
    if "\n" not in text:
        text = f'Stack (most recent call first):\n  File "{text}", line 7 in work\n'
    (folder / f"stackdump_rank{number}_{int(ts * 1000)}.txt").write_text(text)


@pytest.mark.parametrize("size", SIZES, ids=str)
async def test_stacks_of_all_ranks_stand_side_by_side(size, tmp_path):
    for number in range(2):
        dump(tmp_path, number, f"/x/nsa/part{number}.py")
    async with driven(app_on(recorded.running(), run=tmp_path), size) as (app, pilot):
        await play(pilot, "3", "…part1.py:7 work")
        row = next(line for line in lines(app) if line.startswith("rank 0  "))
        assert "rank 1  " in row
        assert "differs" not in row  # with two different stacks there is no majority
        await play(pilot, "down", "enter", "…stack of rank 1")
        assert "/x/nsa/part1.py:7 work" in picture(app)
        await pilot.press("escape")
        await until(pilot, lambda: "stack of rank 1" not in picture(app))


async def test_a_stack_of_a_former_process_is_not_shown_as_that_of_its_rank(tmp_path):
    """For example, the dump is of a stalled attempt, and the policy has restarted the run."""
    pids = {0: 7, 1: recorded.rank(1).pid}
    for number, pid in pids.items():
        head = f"=== rank {number} pid {pid} unix 1.0\nStack (most recent call first):\n"
        dump(tmp_path, number, head + '  File "/x/part.py", line 7 in work\n')
    async with driven(app_on(recorded.running(), run=tmp_path), (100, 24)) as (app, pilot):
        await play(pilot, "3", "….py:7 work")
        assert re.search(r" 1 .* part\.py:7 work \d+[sm]", picture(app))
        assert "no dump" in picture(app)
        await play(pilot, "enter", "…rank 0: no dump yet")


def test_a_missing_dump_names_the_key_only_if_a_supervisor_can_answer_it():
    assert "D dumps" in no_dump(recorded.running())
    assert no_dump(recorded.unsupervised()) == no_dump(recorded.crashed()) == "no dump of this run"


@pytest.mark.parametrize("count", [8, 64])
@pytest.mark.parametrize("size", SIZES, ids=str)
async def test_of_many_ranks_each_group_has_a_column_with_what_it_waits_for(size, count, tmp_path):
    dumps = Path(__file__).parents[1] / "diagnose" / "stacks"
    for number in range(count - 1):
        text = (dumps / f"loader.rank{int(number == 3)}.txt").read_text()
        dump(tmp_path, number, text.replace("pid 7 ", f"pid {recorded.rank(number).pid} "))
    async with driven(app_on(recorded.running(count), run=tmp_path), size) as (app, pilot):
        await play(pilot, "3", "…waits for its data loader")
        shown = lines(app)
        at = next(i for i, line in enumerate(shown) if line.startswith("stacks ─"))
        assert re.match(rf"rank {count - 1} +rank 3 ◂ differs", shown[at + 1])
        assert re.match(r"no dump.* waits for its data loader", shown[at + 2])
        if size[0] == 80:
            await pilot.press("right")
        others = rf"ranks 0–2,4–{count - 2} +\d+[sm] ago"
        await until(pilot, lambda: re.search(others, picture(app)) is not None)
        assert "runs backward, or waits for its" in picture(app)
        await pilot.press("left")
        await until(pilot, lambda: f"rank {count - 1} " in picture(app))


async def test_a_dump_from_the_future_is_not_the_newest(tmp_path):
    for name, ts in (("now", NOW), ("future", NOW + 3600)):
        dump(tmp_path, 0, f"/x/{name}.py", ts)
    async with driven(app_on(recorded.running(), run=tmp_path)) as (app, pilot):
        await play(pilot, "3", "….py:7 work")
        assert "now.py:7 work" in picture(app)
        assert "future.py" not in picture(app)
