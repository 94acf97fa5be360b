"""The screen on recorded states, at both sizes: what it says, and that nothing overflows."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import time
from pathlib import Path

import pytest

from console.model import Gate, PendingFlag
from console.sources.stacks import Frame, Stack, Thread
from console.tui import feed
from console.tui.feed import ScreenData, find_newest
from console.tui.rows import text_of, width_of
from console.tui.views.stall import LEAST_WIDTH, grouped, stack_rows
from console.tui.widgets.alertline import alert_rows, notices
from console.tui.widgets.header import header_row
from console.tui.widgets.lines import Lines
from console.tui.widgets.ranks import rank_rows
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
    renewed,
    see,
    settled,
    until,
)
from trainers.contract import rundir


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", list(recorded.STATES))
async def test_every_state_is_shown_on_every_view_without_overflow(name, size):
    async with driven(app_on(recorded.STATES[name]()), size) as (app, pilot):
        for key in "1234":
            await pilot.press(key)
            await pilot.pause()
            shown = lines(app)
            assert len(shown) == size[1]
            assert app.query_one("#header", Lines).shown
            assert "q leave" in shown[-1], picture(app)
            assert "[ Dump ]" in shown[-2], picture(app)
            await until(
                pilot,
                lambda: all(
                    width_of(row) <= widget.size.width
                    for widget in app.query(Lines)
                    if widget.region.area and app.view in widget.ancestors
                    for row in widget.shown
                ),
            )
        assert "\x1b" not in picture(app)


VIEWS = {"1": "dashboard", "2": "launch", "3": "stall", "4": "logs"}


async def seen(state, size=(80, 24), keys=(), says=()):
    """Returns the screen after these keys, when it has all that `says`, which are patterns."""
    async with driven(app_on(state), size) as (app, pilot):
        await until(pilot, lambda: bool(app.query_one("#header", Lines).shown))
        shown = await settled(pilot)
        for key in keys:
            await pilot.press(key)
            if key in VIEWS:
                await until(pilot, lambda key=key: app.view_name == VIEWS[key])
                await renewed(pilot)
            shown = await settled(pilot)
        if says:  # while a sample is late, its data are shown as old
            await until(pilot, lambda: all(re.search(each, picture(app)) for each in says))
        return shown


SAYS = {
    "running": ("", ["cpu_smoke 0315 plumbing", "RUNNING", "phase 2/3", "step 41/100 41%",
        "ETA 1m00", "data 1s", "on stall: dump", "no alert", r"tok/s +41,020", r"loss +2\.318",
        r"p99 1\.31 s"]),
    "eight_gpus": ("", [r"(?m)^7 .*97%.* 61/80 ?G.* 612.* 63.* 41,208.* forward"]),
    "lost_gpu": ("", ["GPU LOST Xid 79"]),
    "stalled": ("3", ["! CRIT rank 3: no step for 74 s", "3 diagnose  A ack", "confidence: high",
        "VERDICT  rank 3 has not left backward of step 41,207", r"(?m)^  3 .* backward .*◂",
        r"\+ GPU 3 is idle"]),
    "crashed": ("", ["CRASHED", "killed by SIGSEGV", "4 shows logs"]),
    "unsupervised": ("", ["UNSUPERVISED", r"supervisor \(pid 7\) is gone"]),
    "waiting": ("2", ["waiting for confirmation before phase 2-recall", "L start",
        "flags now → 2-recall", r"0\.001 +\*", r"Attention works\."]),
    "gates_failed": ("2", [r"✗ bytes_right: 0\.41 share \(≥ 0\.9\)", "1 of 2 pass"]),
    "hostile": ("", [r"\[red\]boo\[/red\] \[@click=app\.bell\]x\[/\]"]),
}  # fmt: skip
"""For each recorded state a key, and what the screen then says."""


@pytest.mark.parametrize("name", SAYS)
async def test_each_state_says_what_it_is_and_which_key_helps(name):
    key, says = SAYS[name]
    await seen(recorded.STATES[name](), (120, 40), key, says)


ARMED = {
    "alert": "on stall (10 s): alert only",
    "dump ↻9": "on stall (9 s): alert, then dump; on crash: restart, 9 left",
    "restart ↻2": "on stall (9 s): alert, and 25 s later restart; on crash: restart, 2 left",
}


@pytest.mark.parametrize("short", list(ARMED))
def test_the_smallest_header_says_how_far_how_fresh_and_what_is_armed(short):
    state = recorded.running(armed=ARMED[short], armed_short=short)
    header = text_of(header_row(ScreenData(0.0, NOW, state), 80))
    for part in ("cpu_smoke", "plumbing", "RUNNING", "41/100", "ETA 1m00", "data 1s",
                 f"on stall: {short}"):  # fmt: skip
        assert part in header, header
    assert ARMED[short] in text_of(header_row(ScreenData(0.0, NOW, state), 200))


def test_nothing_is_armed_where_nobody_watches():
    for make in (recorded.unsupervised, recorded.waiting, recorded.crashed):
        for width in (80, 200):
            header = text_of(header_row(ScreenData(0.0, NOW, make()), width))
            assert "on stall" not in header


def test_a_further_attempt_is_counted():
    again = recorded.running(attempt=2)
    for width in (80, 120):
        assert re.search("att(empt)? 2", text_of(header_row(ScreenData(0.0, NOW, again), width)))
        assert " att" not in text_of(header_row(ScreenData(0.0, NOW, recorded.running()), width))


async def test_seven_phases_leave_room_for_the_flags_the_command_and_what_fails(tmp_path):
    """Six flags, the chosen one marked by a sign, on the smallest terminal."""
    held = recorded.phases()
    more = [dataclasses.replace(held[2], index=i, name=f"late{i}") for i in range(3, 7)]
    launch = planned(tmp_path, phases=(*held, *more))
    bounds = {"steps_done": "100", "no_stall": "True", "bytes_right": "0.9"}
    state = recorded.running(launch=launch, bounds=bounds)
    text = await seen(state, keys=("2", "j", "j"))
    flags = [line for line in text.splitlines() if " → " in line and "NSA_" in line]
    assert len(flags) >= 6, text
    assert [line for line in flags if line.startswith("›")] == [flags[2]]
    for part in ("▸ 1-plumbing", "6-late6", "torchrun -m trainers.ddp", "late3",
                 "· steps_done: at least 100 steps", "evaluated when the phase ends"):  # fmt: skip
        assert part in text, text
    whole = await seen(state, (80, 60), ("2", "z"))
    for part in ("6-late6", "torchrun -m", "bytes_right: at least 0.9 share", "esc closes"):
        assert part in whole, whole


async def test_the_route_that_the_attention_takes_stands_at_the_command():
    """In its heading where that is long enough; a flag that is not followed says why."""
    routes = "cmp masked, sel causal, win banded"
    state = dataclasses.replace(recorded.running(), backend=routes)
    text = await seen(state, keys=("2",))
    assert re.search(f"command of phase 1-plumbing ─+ attention: {routes}", text), text
    assert "Attention works." in text
    refused = f"{routes} (flash-attn is not installed)"
    text = await seen(dataclasses.replace(state, backend=refused), keys=("2",))
    assert f"attention: {refused}" in text
    assert "torchrun -m trainers.ddp" in text
    text = await seen(dataclasses.replace(state, backend=recorded.HOSTILE), keys=("2",))
    assert "[red]boo[/red]" in text
    assert all(line.isprintable() for line in text.splitlines())


async def test_header_and_launch_view_tell_the_same_step():
    held = recorded.phases()
    behind = dataclasses.replace(held[1], steps=39)
    state = recorded.running(launch=recorded.launch(phases=(held[0], behind, held[2])))
    text = await seen(state, keys=("2",))
    assert "41/100" in text.splitlines()[0]
    assert "39/100" not in text


def test_the_newest_launch_is_opened_when_none_lives(tmp_path):
    assert find_newest(tmp_path) is None
    assert find_newest(directory.run(tmp_path / "tiny" / "mine").parents[1]).name == "mine"
    for stamp in ("20261121-030000", "20261121-040000"):
        path = directory.launch(tmp_path, stamp=stamp)
        directory.document(path / "plan_state.json", {"v": 1, "state": "ended", "phase": 0})
    assert find_newest(tmp_path) == path


async def test_a_failed_gate_is_on_the_alert_line():
    running = dataclasses.replace(recorded.gates_failed(), launch=recorded.launch("running"))
    assert "gate bytes_right failed (0.41 share, bound ≥ 0.9)" in await seen(running)


def test_a_launch_that_is_over_says_why_and_what_does_not_run():
    gate = Gate("no_stall", 0.0, "", "run", "events", "yes", "fail")
    held = recorded.waiting()
    state = dataclasses.replace(held, gates=(gate,), launch=recorded.launch("ended"))
    said = notices(ScreenData(0.0, NOW, state))
    line = text_of(alert_rows(said, 80)[0])
    assert "plan ended: gate no_stall failed (0, bound yes)" in line, line
    assert line.rstrip().endswith("2 shows gates  a 1 of 2")
    unknown = dataclasses.replace(gate, result="unknown")
    ended = recorded.launch("ended")
    halted = recorded.launch("ended", why="halt requested by op")
    cases = [
        ((unknown,), ended, "plan ended: gate no_stall unknown (0, bound yes)"),
        ((), ended, "plan ended: plumbing completed; not started: recall"),
        ((), halted, "plan ended: halt requested by op; not"),
        ((gate,), recorded.launch("ended", phase=2), ""),
        ((gate,), recorded.launch("running"), ""),
    ]
    for gates, launch, words in cases:
        state = dataclasses.replace(held, gates=gates, launch=launch)
        text = " ".join(notice.text for notice in notices(ScreenData(0.0, NOW, state)))
        assert words in text if words else "plan ended" not in text
    halted = dataclasses.replace(recorded.crashed(), state="halted", why="H by op")
    levels = [notice.level for notice in notices(ScreenData(0.0, NOW, halted))]
    assert levels == ["info", "info"]


async def test_no_run_opens_on_the_plan_with_its_checks(tmp_path):
    async with driven(app_on(root=tmp_path)) as (_, pilot):
        await see(pilot, "preflight")
        await see(pilot, "✓ python", "no run", "plan cpu_smoke", "0-sanity", "2-recall",
                  "between phases", "wait for L", "27 checks")  # fmt: skip


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("key", "13")
async def test_a_view_without_a_run_says_how_to_get_one(key, size, tmp_path):
    async with driven(app_on(root=tmp_path), size) as (_, pilot):
        await play(pilot, "…preflight", key, "…no run; L launches one")


@pytest.mark.parametrize("size", [(40, 12), (60, 16), (30, 10)], ids=str)
async def test_a_small_terminal_keeps_header_alert_and_ranks_and_says_so(size):
    text = await seen(recorded.running(), size)
    assert "RUNNING" in text, text
    assert "no alert" in text
    assert any(line.startswith("0 ") for line in text.splitlines()), text
    assert "80×24" in text, text


async def test_the_picture_that_nothing_changes_sends_nothing():
    async with driven(app_on(recorded.running())) as (app, pilot):
        await until(pilot, lambda: app.snapshot is not None and app.snapshot.state is not None)
        await settled(pilot)
        app.feed.stop()
        await settled(pilot)
        # Read in an hour from now, so that no age on the screen grows.
        app.take(dataclasses.replace(app.snapshot, at=time.monotonic() + 3600))
        await settled(pilot)
        before = {widget: widget.repaints for widget in app.query(Lines)}
        again = dataclasses.replace(app.snapshot, log=(), log_begins=False)
        for _ in range(3):
            app.take(again)
            await pilot.pause()
        assert {widget: widget.repaints for widget in app.query(Lines)} == before
        state = dataclasses.replace(again.state, step=42)
        app.take(dataclasses.replace(again, state=state))
        changed = {w.id for w in app.query(Lines) if w.repaints != before[w]}
        assert changed == {"header"}


def test_the_header_ages_when_nothing_comes():
    snapshot = ScreenData(0.0, NOW, recorded.running())
    assert "data 1s" in text_of(header_row(snapshot, 120))
    assert "data 5s old" in text_of(header_row(snapshot, 120, late_s=4.0))
    row = header_row(snapshot, 120, late_s=30.0)
    assert ("data 31s old", "stale") in row
    worst = notices(snapshot, silent_s=30.0)[0]
    assert worst.level == "crit"
    assert "has not answered for 30s" in worst.text


def test_a_stall_is_as_old_in_the_header_as_at_the_rank_that_stands():
    header = text_of(header_row(ScreenData(0.0, NOW, recorded.stalled()), 120))
    (row,) = [text for row in rank_rows(recorded.stalled(), 78, 12)
              if (text := text_of(row)).startswith("3 ")]  # fmt: skip
    assert "STALLED 74s" in header
    assert " 74s" in row


def test_a_run_that_completed_early_is_no_share_of_its_plan():
    state = dataclasses.replace(recorded.running(), state="completed", step=95, steps_planned=600)
    header = text_of(header_row(ScreenData(0.0, NOW, state), 120))
    assert "step 95" in header
    assert "%" not in header
    why = 'all ranks done after step 95; reason: "bytes_right reached"'
    said = notices(ScreenData(0.0, NOW, dataclasses.replace(state, why=why)))
    assert f"completed: {why}" in [notice.text for notice in said]


def test_pids_stand_beside_the_ranks_of_a_small_terminal():
    state = dataclasses.replace(
        recorded.running(), verdict=dataclasses.replace(recorded.VERDICT, rank=1)
    )
    text = [text_of(row) for row in rank_rows(state, 50, 9)]
    assert [line.split()[8 - 1 :] for line in text[1:]] == [["48230"], ["48231", "◂"]]
    assert all(len(line) <= 50 for line in text)


def planned(folder, **given):
    """A launch of cpu_smoke whose plan.json stands in `folder`."""
    from console import actions

    spec = actions.prepare(actions.LaunchOptions("cpu_smoke", run_dir=folder)).spec
    env = {**spec.plan.env, "NSA_SEL_RANGES_V2": "0"}
    spec = dataclasses.replace(spec, plan=dataclasses.replace(spec.plan, env=env))
    rundir.write_json(folder / rundir.PLAN, spec.as_dict(NOW))
    return recorded.launch(path=str(folder), **given)


def flag_line(text, name):
    return next(line for line in text.splitlines() if f" {name} " in line)


@pytest.mark.parametrize("size", SIZES, ids=str)
async def test_what_the_next_phase_gets_is_what_the_supervisor_would_give_it(tmp_path, size):
    """Not what the current one has: a flag of this phase alone is gone, the plan's own stay."""
    flags = (PendingFlag("NSA_ACCUM", "3", "op@gpu01", NOW),)
    launch = planned(tmp_path, next_flags=flags)
    state = recorded.running(
        launch=launch, environment={"NSA_LR": "0.002", "OMP_NUM_THREADS": "1"},
        decided={"NSA_LR": "0.002", "NSA_ACCUM": "1", "NSA_OPT_FUSED": "0"},
    )  # fmt: skip
    text = await seen(state, size, keys=("2",))
    assert "flags now → 2-recall" in text
    assert re.search(r"NSA_LR +0\.002 +→ 0\.0025\b", flag_line(text, "NSA_LR")), text
    assert re.search(r"NSA_ACCUM +1 +→ 3 +\*", flag_line(text, "NSA_ACCUM")), text
    assert re.search(r"NSA_OPT_FUSED +0 +→ [01]\b", flag_line(text, "NSA_OPT_FUSED")), text
    end = await seen(state, (size[0], 70), keys=("2",))
    assert re.search(r"OMP_NUM_THREADS +1 +→ 1", flag_line(end, "OMP_NUM_THREADS")), end
    assert re.search(r"NSA_SEL_RANGES_V2 .*→ 0", flag_line(end, "NSA_SEL_RANGES_V2")), end


async def test_after_the_last_phase_nothing_is_next(tmp_path):
    launch = planned(tmp_path, phase=2, phases=recorded.phases(2))
    state = recorded.running(launch=launch, environment={"NSA_DRILL": "kill@30:1"})
    text = await seen(state, (80, 60), keys=("2",))
    assert "flags now, no phase left" in text
    assert re.search(r"NSA_DRILL +kill@30:1$", flag_line(text, "NSA_DRILL")), text
    assert "…" not in flag_line(await seen(state, (120, 40), keys=("2",)), "NSA_LR")


async def test_a_plan_that_cannot_be_read_is_said_and_nothing_is_made_up():
    state = recorded.running(environment={"NSA_LR": "0.002"})
    text = await seen(state, keys=("2",))
    assert "flags now → 2-recall: not available: /nowhere" in text
    assert re.search(r"NSA_LR +0\.002$", flag_line(text, "NSA_LR")), text


def test_a_directory_that_takes_no_writes_is_said():
    state = dataclasses.replace(recorded.running(), directory_blocked_s=12.0)
    worst = notices(ScreenData(0.0, NOW, state))[0]
    assert worst.text == "no write to the run directory has finished for 12s; training continues"


@pytest.mark.parametrize("width", [30, 60, 80, 120, 200])
def test_header_and_alert_fit_any_width(width):
    for make in recorded.STATES.values():
        snapshot = ScreenData(0.0, NOW, make())
        assert width_of(header_row(snapshot, width)) <= width
        assert all(width_of(row) <= width for row in alert_rows(notices(snapshot), width, 0, 3))
        state = make()
        waits = state.launch is not None and state.launch.state == "waiting"
        word = "WAITING" if waits else state.state.upper()
        assert word in text_of(header_row(snapshot, width)) or width == 30


def test_of_a_thousand_ranks_the_worst_are_shown_and_the_others_counted():
    ranks = [recorded.rank(r) for r in range(1024)]
    ranks[700] = recorded.rank(700, step=41_000)
    ranks[800] = recorded.rank(800, state="T")
    rows = [text_of(row) for row in rank_rows(recorded.running(8, True), 78, 12)]
    assert len(rows) == 9
    state = dataclasses.replace(recorded.running(), ranks=tuple(ranks))
    rows = [text_of(row) for row in rank_rows(state, 78, 10)]
    assert len(rows) == 10
    assert any(row.startswith("700 ") for row in rows)
    assert any(row.startswith("800 ") for row in rows)
    assert "and 1,016 more ranks" in rows[-1]


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


@pytest.mark.parametrize("size", SIZES, ids=str)
async def test_stacks_of_all_ranks_stand_side_by_side(size, tmp_path):
    for number in range(2):
        frame = f'  File "/x/nsa/part{number}.py", line 7 in work\n'
        text = "Stack (most recent call first):\n" + frame
        (tmp_path / f"stackdump_rank{number}_{int(NOW * 1000)}.txt").write_text(text)
    async with driven(app_on(recorded.running(), run=tmp_path), size) as (app, pilot):
        await play(pilot, "3", "…part1.py:7 work")
        row = next(line for line in lines(app) if line.startswith("rank 0  "))
        assert "rank 1  " in row
        assert "differs" not in row  # neither rank is in a majority
        await play(pilot, "down", "enter", "…stack of rank 1")
        assert "/x/nsa/part1.py:7 work" in picture(app)
        await pilot.press("escape")
        await until(pilot, lambda: "stack of rank 1" not in picture(app))


async def test_a_dump_from_the_future_is_not_the_newest(tmp_path):
    for name, ts in (("now", NOW), ("future", NOW + 3600)):
        text = f'Stack (most recent call first):\n  File "/x/{name}.py", line 7 in work\n'
        (tmp_path / f"stackdump_rank0_{int(ts * 1000)}.txt").write_text(text)
    async with driven(app_on(recorded.running(), run=tmp_path)) as (app, pilot):
        await play(pilot, "3", "….py:7 work")
        assert "now.py:7 work" in picture(app)
        assert "future.py" not in picture(app)


async def test_a_stack_of_a_former_process_is_not_shown_as_that_of_its_rank(tmp_path):
    """For example, the dump of a stalled attempt, after the policy has restarted the run."""
    pids = {0: 7, 1: recorded.rank(1).pid}
    for number, pid in pids.items():
        text = "Stack (most recent call first):\n" + '  File "/x/part.py", line 7 in work\n'
        path = tmp_path / f"stackdump_rank{number}_{int(NOW * 1000)}.txt"
        path.write_text(f"=== rank {number} pid {pid} unix 1.0\n{text}")
    async with driven(app_on(recorded.running(), run=tmp_path), (100, 24)) as (app, pilot):
        await play(pilot, "3", "….py:7 work")
        assert re.search(r" 0 .* former process \d+[sm]", picture(app))
        assert re.search(r" 1 .* part\.py:7 work \d+[sm]", picture(app))
        heads = next(line for line in lines(app) if line.startswith("rank "))
        assert sorted(re.sub(r"\d+[sm]", "9s", each) for each in re.split(" {3,}", heads)) == [
            "rank 0  9s ago, of a former process", "rank 1  9s ago",
        ]  # fmt: skip
        await play(pilot, "enter", "…stack of rank 0, of a former process")


@pytest.mark.parametrize("count", [8, 64])
@pytest.mark.parametrize("size", SIZES, ids=str)
async def test_of_many_ranks_each_group_has_a_column_with_what_it_waits_for(size, count, tmp_path):
    dumps = Path(__file__).parents[1] / "diagnose" / "stacks"
    for number in range(count - 1):
        text = (dumps / f"loader.rank{int(number == 3)}.txt").read_text()
        text = text.replace("pid 7 ", f"pid {recorded.rank(number).pid} ")
        (tmp_path / f"stackdump_rank{number}_{int(NOW * 1000)}.txt").write_text(text)
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


async def test_a_second_snapshot_waits_until_the_first_is_shown():
    """A slow screen skips samples: nothing piles up behind it."""
    delivered = []
    app = app_on(recorded.running())
    app.feed._deliver = delivered.append
    app.feed.start()
    for count in (1, 2):
        while len(delivered) < count:
            await asyncio.sleep(0.02)
        await asyncio.sleep(1.6)  # for a further one, which must not come
        assert len(delivered) == count
        app.feed.allow_next()
    app.feed.stop()


async def test_a_change_of_state_is_shown_before_the_next_sample_is_due(tmp_path, monkeypatch):
    monkeypatch.setattr(feed, "POLL_S", 3600.0)
    run = tmp_path / "1-plumbing"
    run.mkdir()
    marker = run / "supervisor.json"

    class Crashes(recorded.Recorded):
        def poll(self):
            super().poll()
            return recorded.crashed() if marker.exists() else recorded.running()

    source = Crashes(recorded.running(), run=run)
    app = app_on(recorded.running(), run=run)
    app.feed._open = lambda path: source
    async with driven(app) as (_, pilot):
        marker.write_text("{}")
        await see(pilot, "CRASHED")


async def test_a_mistake_while_reading_is_said_and_reading_goes_on():
    class Breaks(recorded.Recorded):
        is_broken = False

        def poll(self):
            if self.is_broken:
                raise ValueError("no such thing")
            return super().poll()

    source = Breaks(recorded.running())
    app = app_on(recorded.running())
    app.feed._open = lambda path: source
    async with driven(app) as (_, pilot):
        source.is_broken = True
        await see(pilot, "cannot read /nowhere: ValueError: no such thing")
        assert "RUNNING" in picture(app)
        source.is_broken = False
        await see(pilot, "no alert")


@pytest.mark.parametrize("key", ["1", "2", "3"])
async def test_a_resize_leaves_nothing_of_the_old_size(key):
    phases = tuple(dataclasses.replace(p, started_ts=None) for p in recorded.phases())
    state = dataclasses.replace(recorded.stalled(), launch=recorded.launch(phases=phases))
    pictures = []
    for sizes in (((80, 24),), ((120, 40), (80, 24)), ((90, 30), (80, 24))):
        async with driven(app_on(state), sizes[0]) as (app, pilot):
            await pilot.press(key)
            await until(pilot, lambda: app.view_name == VIEWS[key])
            await (charted if key == "1" else renewed)(pilot)
            app.feed.stop()
            await settled(pilot)
            for size in sizes[1:]:
                await pilot.resize_terminal(*size)
                await settled(pilot)
            pictures.append(lines(app)[1:])
    assert pictures[0] == pictures[1]
    assert pictures[0] == pictures[2]
