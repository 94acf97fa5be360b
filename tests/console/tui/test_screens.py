"""The text of the screen for a state; no row is wider than its widget."""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import re
import time

import pytest

from console.model import Alert, PendingFlag
from console.tui import feed
from console.tui.feed import find_newest
from console.tui.rows import text_of
from console.tui.widgets import chooser
from console.tui.widgets.lines import Lines
from console.tui.widgets.ranks import rank_rows
from tests.console.sources import directory
from tests.console.tui import recorded
from tests.console.tui.recorded import (
    NOW,
    SIZES,
    VIEWS,
    app_on,
    charted,
    driven,
    lines,
    picture,
    play,
    renewed,
    see,
    seen,
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
        assert "\x1b" not in picture(app)


ROUTES = "cmp masked, sel causal, win banded"
SAYS = {
    "running": ("", ["cpu_smoke 0315 plumbing", "RUNNING", "phase 2/3", "step 41/100 41%",
        "ETA 1m00", "data 1s", "on stall: dump", "no alert", r"tok/s +41,020", r"loss +2\.318",
        r"p99 1\.31 s"]),
    "eight_gpus": ("", [r"(?m)^7 .*97%.* 61/80 ?G.* 612.* 63.* 41,208.* forward"]),
    "lost_gpu": ("", ["GPU LOST Xid 79"]),
    "stalled": ("3", ["! CRIT rank 3: no step for 74 s", "3 diagnose  A ack", "confidence: high",
        "VERDICT  rank 3 has not left backward of step 41,207", r"(?m)^  3 .* backward .*◂",
        r"\+ GPU 3 is idle"]),
    "crashed": ("", ["CRASHED", "killed by SIGSEGV", "4 logs"]),
    "unsupervised": ("", ["UNSUPERVISED", r"supervisor \(pid 7\) is not running"]),
    "waiting": ("2", ["the launch waits for you before phase recall", "L start",
        "flags now → recall", r"0\.001 +\*", r"Attention works\."]),
    "gates_failed": ("2", [r"✗ bytes_right: 0\.41 share \(≥ 0\.9\)", "1 of 2 passed"]),
    "hostile": ("", [r"\[red\]boo\[/red\] \[@click=app\.bell\]x\[/\]"]),
    "running after a failed gate": (
        "", [r"gate bytes_right failed \(0\.41 share, bound ≥ 0\.9\)"]),
    "running with a backend": ("2", [
        "command of phase plumbing", f"attention: {ROUTES}", "Data and loss"]),
    "running with a plan that cannot be read": ("2z", [
        r"flags now → recall \(next values unknown; z says why\)",
        r"contains no readable plan\.json", r"NSA_LR 0\.002"]),
}  # fmt: skip
"""For each state: keys, and patterns of the text that the screen then shows."""
VARIANTS = {
    "running after a failed gate": lambda: dataclasses.replace(
        recorded.gates_failed(), launch=recorded.launch("running")
    ),
    "running with a backend": lambda: recorded.running(backend=ROUTES),
    "running with a plan that cannot be read": lambda: recorded.running(
        environment={"NSA_LR": "0.002"}
    ),
}


@pytest.mark.parametrize("name", SAYS)
async def test_each_state_says_what_it_is_and_which_key_helps(name):
    key, says = SAYS[name]
    text = await seen((recorded.STATES | VARIANTS)[name](), (120, 40), key, says)
    assert all(line.isprintable() for line in text.splitlines())


async def test_seven_phases_leave_room_for_the_flags_the_command_and_what_fails(tmp_path):
    """At 80×24, the view shows six flags or more, and `›` marks the chosen flag."""
    held = recorded.phases()
    more = [dataclasses.replace(held[2], index=i, name=f"late{i}") for i in range(3, 7)]
    launch = planned(tmp_path, phases=(*held, *more))
    bounds = {"steps_done": "100", "no_stall": "True", "bytes_right": "0.9"}
    state = recorded.running(launch=launch, bounds=bounds)
    text = await seen(state, keys=("2", "j", "j"))
    flags = [line for line in text.splitlines() if re.search(r"NSA_\w+ +\S+ +→ ", line)]
    assert len(flags) >= 6, text
    assert [line for line in flags if line.startswith("›")] == [flags[2]]
    for part in ("▸ 1-plumbing", "6-late6", "torchrun -m trainers.ddp", "late3",
                 "· steps_done: at least 100 steps", "evaluated when the phase ends"):  # fmt: skip
        assert part in text, text
    whole = await seen(state, (80, 60), ("2", "z"))
    for part in ("6-late6", "torchrun -m", "bytes_right: at least 0.9 share", "esc closes"):
        assert part in whole, whole
    assert re.search(r"launch, as of \d\d:\d\d:\d\d ", whole), "the overlay does not change"


async def test_a_gate_that_can_no_longer_pass_is_marked_while_the_run_continues():
    text = "this gate needs an override: FAIL no_stall: 1 stall (≤ 0; all attempts, so far; events)"
    alert = Alert("gate-no_stall", recorded.NOW, "warn", text, "2")
    bounds = {"steps_done": "100", "no_stall": "True"}
    shown = await seen(recorded.running(bounds=bounds, alerts=(alert,)), keys="2")
    assert "2 view gates  A ack" in shown
    assert "✗ no_stall" in shown
    assert "· steps_done" in shown


def test_the_newest_launch_is_opened_when_none_lives(tmp_path):
    assert find_newest(tmp_path) is None
    assert find_newest(directory.run(tmp_path / "tiny" / "mine").parents[1]).name == "mine"
    for stamp in ("20261121-030000", "20261121-040000"):
        path = directory.launch(tmp_path, stamp=stamp)
        directory.document(path / "plan_state.json", {"v": 1, "state": "ended", "phase": 0})
    assert find_newest(tmp_path) == path


def test_a_live_launch_is_opened_and_listed_behind_many_newer_ones_that_have_ended(tmp_path):
    stamps = [f"20261121-03{number // 60:02}{number % 60:02}" for number in range(feed.RECENT + 2)]
    oldest, *others = [directory.launch(tmp_path, stamp=stamp) for stamp in stamps]
    for path in others:
        directory.document(path / rundir.PLAN_STATE, {"v": 1, "state": "ended", "phase": 0})
    owner = rundir.identity() | {"token": "mine"}
    state = {"v": 1, "state": "running", "phase": 0, "supervisor": owner}
    directory.document(oldest / rundir.PLAN_STATE, state)
    directory.document(oldest / rundir.LOCK, {"token": "mine"})
    with (oldest / rundir.LOCK).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert find_newest(tmp_path) == oldest
        found, left = chooser.entries(tmp_path)
        listed = [*reversed(others[-chooser.MOST_RUNS :]), oldest]
        assert [each.path for each in found if each.kind == "launch"] == listed
    assert find_newest(tmp_path) == others[-1]
    overlay = chooser.Chooser(tmp_path, print)
    overlay._fill((found, left))
    assert left == len(others) - chooser.MOST_RUNS
    assert overlay.list.note == f"{chooser.HINT}; {left} older: nsa-console runs"


async def test_no_run_opens_on_the_plan_with_its_checks(tmp_path):
    async with driven(app_on(root=tmp_path)) as (_, pilot):
        await see(pilot, "preflight")
        await see(pilot, "✓ torch", "no run", "plan cpu_smoke", "0-sanity", "2-recall",
                  "wait for L after a phase", "26 checks")  # fmt: skip


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
        # This snapshot is from an hour in the future, so that no age on the screen grows.
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


def planned(folder, **given):
    """Returns a launch of cpu_smoke, and writes its plan.json into `folder`."""
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
    """A flag of the current phase alone does not count for the next phase; the plan's flags do."""
    flags = (
        PendingFlag("NSA_ACCUM", "3", "op@gpu01", NOW),
        PendingFlag("NSA_SCALER_GROWTH_FACTOR", "4", "op@gpu01", NOW, "all"),
    )
    launch = planned(tmp_path, next_flags=flags)
    state = recorded.running(
        launch=launch, environment={"NSA_LR": "0.002", "OMP_NUM_THREADS": "1"},
        decided={"NSA_LR": "0.002", "NSA_ACCUM": "1", "NSA_OPT_FUSED": "0"},
    )  # fmt: skip
    text = await seen(state, size, keys=("2",))
    assert "flags now → recall" in text
    assert re.search(r"NSA_LR +0\.002 +→ 0\.0025\b", flag_line(text, "NSA_LR")), text
    assert re.search(r"NSA_ACCUM +1 +→ 3 +\*", flag_line(text, "NSA_ACCUM")), text
    lasting = flag_line(text, "NSA_SCALER_GROWTH_FACTOR")
    assert re.search(r"→ 4 +\* all later" if size[0] == 80 else r"→ 4 +\*", lasting), text
    assert re.search(r"NSA_OPT_FUSED +0 +→ [01]\b", flag_line(text, "NSA_OPT_FUSED")), text
    end = await seen(state, (size[0], 70), keys=("2",))
    assert re.search(r"OMP_NUM_THREADS +1 +→ 1", flag_line(end, "OMP_NUM_THREADS")), end
    assert re.search(r"NSA_SEL_RANGES_V2 .*→ 0", flag_line(end, "NSA_SEL_RANGES_V2")), end


async def test_a_flag_that_the_set_of_the_plan_overrides_is_shown_with_the_value_in_use():
    state = recorded.running(environment={"NSA_ACCUM": "4"}, decided={"NSA_ACCUM": "2"})
    text = await seen(state, (80, 60), keys=("2",))
    assert re.search(r"NSA_ACCUM +2\b", flag_line(text, "NSA_ACCUM")), text


async def test_after_the_last_phase_nothing_is_next(tmp_path):
    launch = planned(tmp_path, phase=2, phases=recorded.phases(2))
    state = recorded.running(
        launch=launch, path=f"{tmp_path}/2-recall", environment={"NSA_DRILL": "kill@30:1"}
    )
    text = await seen(state, (80, 60), keys=("2",))
    assert "flags now, no phase left" in text
    assert re.search(r"NSA_DRILL +kill@30:1$", flag_line(text, "NSA_DRILL")), text
    assert "…" not in flag_line(await seen(state, (120, 40), keys=("2",)), "NSA_LR")


def test_of_a_thousand_ranks_the_worst_are_shown_and_the_others_counted():
    ranks = [recorded.rank(r) for r in range(1024)]
    ranks[700] = recorded.rank(700, step=41_000)
    ranks[800] = recorded.rank(800, state="T")
    rows = [text_of(row) for row in rank_rows(recorded.running(8, True), 78, 12)]
    assert len(rows) == 9
    rows = [text_of(row) for row in rank_rows(recorded.running(ranks=tuple(ranks)), 78, 10)]
    assert len(rows) == 10
    assert any(row.startswith("700 ") for row in rows)
    assert any(row.startswith("800 ") for row in rows)
    assert "and 1,016 more ranks" in rows[-1]


async def test_a_second_snapshot_waits_until_the_first_is_shown():
    """The feed delivers the next snapshot only after `allow_next`."""
    delivered = []
    app = app_on(recorded.running())
    app.feed._deliver = delivered.append
    app.feed.start()
    for count in (1, 2):
        while len(delivered) < count:
            await asyncio.sleep(0.02)
        await asyncio.sleep(1.6)  # in this time, another snapshot would be delivered
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
    # A stalled run shows the ages of its figures, which would differ between the pictures.
    new = {name: dataclasses.replace(f, at=f.at + 3600) for name, f in state.figures.items()}
    state = dataclasses.replace(state, figures=new)
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


async def test_header_and_launch_view_tell_the_same_step():
    held = recorded.phases()
    behind = dataclasses.replace(held[1], steps=39)
    state = recorded.running(launch=recorded.launch(phases=(held[0], behind, held[2])))
    text = await seen(state, keys=("2",))
    assert "41/100" in text.splitlines()[0]
    assert "39/100" not in text
