"""The run that an action reaches if the watched run or the draft changes before the action."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from textual.events import Key

from console.tui.confirmations import CannotAsk
from console.tui.draft import Draft
from console.tui.feed import Feed, open_source
from console.tui.keys import KEYS
from console.tui.widgets.chooser import Entry
from tests.console.sources import directory
from tests.console.test_resume import continued, ended
from tests.console.tui import recorded
from tests.console.tui.recorded import Asked, app_on, driven, lines, picture, play, see, until
from tests.console.tui.test_actions import LAUNCH
from trainers.contract import rundir

OTHER = "/nowhere/other/20261122-000000"


def other():
    """Returns the state of a stalled run of another launch."""
    found = recorded.stalled()
    launch = replace(found.launch, id="other-20261122-000000", path=OTHER)
    return replace(found, id=f"{launch.id}/0-train", path=f"{OTHER}/0-train", launch=launch)


async def test_a_flag_that_has_its_planned_value_again_is_not_changed(tmp_path):
    async with driven(app_on(root=tmp_path)) as (app, pilot):
        await pilot.press("2")
        await until(pilot, lambda: app.draft.is_checked)
        names = [item.flag.name if item.flag else "" for item in app.view._items]
        app.view.picker.move(names.index("NSA_LR") - app.view.picker.cursor)
        for typed, held in (("0.5", {"NSA_LR": "0.5"}), ("2.5e-3", {})):
            await play(pilot, "enter", "…enter accepts", *["backspace"] * 10, *typed, "enter")
            await until(pilot, lambda held=held: (
                app.draft.flags == held and app.draft.is_checked
                and ("0.5*" in picture(app).replace(" ", "")) == bool(held)
            ))  # fmt: skip


async def test_a_typed_flag_reaches_the_launch_for_which_its_field_was_opened():
    asked = Asked()
    async with driven(app_on(recorded.waiting(), actions=asked)) as (app, pilot):
        await play(pilot, "2", "…NSA_LR", *["down"] * 40, "slash")
        names = [item.flag.name if item.flag else "" for item in app.view._items]
        app.view.picker.move(names.index("NSA_LR") - app.view.picker.cursor)
        await play(pilot, "enter", "…enter accepts")
        app.feed._source.states = [other()]
        app.feed.nudge()
        await until(pilot, lambda: app.view.snapshot.state.path.startswith(OTHER))
        await pilot.press(*["backspace"] * 10, *"0.5", "enter")
        await until(pilot, lambda: bool(asked.sent))
        assert asked.sent[0][:2] == (LAUNCH, "set-flag")
        assert asked.sent[0][2]["phase"] == "recall", "the phase that was next for the typist"


async def test_a_key_that_is_pressed_twice_at_once_sends_one_request():
    asked = Asked()
    async with driven(app_on(recorded.running(), actions=asked)) as (app, pilot):
        await play(pilot, "C", "…y yes")
        for _ in range(2):
            app.post_message(Key("y", "y"))
        await until(pilot, lambda: bool(asked.sent))
        await asyncio.sleep(0.2)
        assert len(asked.sent) == 1, picture(app)


async def test_another_run_resumes_a_paused_display():
    app = app_on(recorded.running(8, True))
    first, second = recorded.Recorded(recorded.running(8, True)), recorded.Recorded(other())
    app.feed._open = lambda path: second if str(path) == OTHER else first
    async with driven(app) as (_, pilot):
        await pilot.press("p")
        await until(pilot, lambda: "paused" in lines(app)[0])
        app._choose(Entry("launch", "other", "", Path(OTHER)))
        await until(pilot, lambda: app.snapshot.state.path.startswith(OTHER))
        await until(pilot, lambda: app.view.snapshot is app.snapshot)
        assert "paused" not in lines(app)[0]


async def test_a_launch_without_a_run_shows_no_log_of_the_former_run(tmp_path):
    first = directory.launch(tmp_path)
    log = rundir.rank_log(directory.run(first / "0-first"), 1, 0)
    log.parent.mkdir(parents=True)
    log.write_text("RuntimeError: the first launch\n")
    second = directory.launch(tmp_path, "other")
    phases = [{"name": "first", "state": "next"}, {"name": "second", "state": "later"}]
    directory.change(
        second / rundir.PLAN_STATE, state="ended", why="the supervisor found .HALT", phases=phases
    )
    app = app_on(recorded.running(), root=tmp_path)
    app.feed._open, app.feed._path = open_source, first
    async with driven(app, (120, 40)) as (_, pilot):
        await see(pilot, "RuntimeError: the first launch")
        app.feed.follow(second)
        await see(pilot, "launch ended: the supervisor found .HALT; not started: first, second")
        await see(pilot, "no log lines yet")


def test_a_plan_that_is_chosen_again_during_its_check_is_not_checked_yet(tmp_path):
    draft = Draft("cpu_smoke", tmp_path)
    draft.take(draft.options(), None, "")
    draft.choose("cpu_validation")
    draft.choose("cpu_smoke")
    with pytest.raises(CannotAsk, match="still being checked"):
        draft.question("gpu01")


@pytest.mark.parametrize("checkpoint", ["step_00000001", ""])
def test_the_screen_offers_no_resume_of_a_launch_that_another_continues(tmp_path, checkpoint):
    old = ended(tmp_path, checkpoint)
    root = old.parents[1]
    feed = Feed(str, old, root)
    assert feed.take().state.can_resume == bool(checkpoint)
    continued(root, old / "0-sanity", "one", 1.6e9)
    feed = Feed(str, old, root)  # the same feed reads the other launches every CONTINUED_S
    state = feed.take().state
    assert not state.can_resume
    with pytest.raises(CannotAsk, match="is already continued by one"):
        KEYS["adopt"].question(state)
