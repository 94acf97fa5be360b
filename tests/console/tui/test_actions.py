"""Actions by key, by Tab and Enter, or by click; the default answer and the target of questions."""

from __future__ import annotations

import dataclasses

import pytest

from console.tui import confirmations
from console.tui.background import request
from console.tui.confirmations import CannotAsk
from console.tui.keys import KEYS
from console.tui.widgets.flags import next_value
from tests.console.sources import directory
from tests.console.test_security import planted
from tests.console.tui import recorded
from tests.console.tui.recorded import (
    SIZES,
    Asked,
    app_on,
    driven,
    lines,
    picture,
    play,
    see,
    settled,
    until,
)
from trainers.contract.errors import ContractError
from trainers.contract.flags import FLAGS

LAUNCH = "/nowhere/cpu_smoke/20261120-031500"
PATH = f"{LAUNCH}/1-plumbing"


async def played(state, *steps, then="", asked=None):
    """Plays steps on a state, and waits for `then` or else a request; returns all requests."""
    asked = asked or Asked()
    async with driven(app_on(state, actions=asked)) as (_, pilot):
        await play(pilot, *steps)
        if then:
            await see(pilot, then)
        else:
            await until(pilot, lambda: bool(asked.sent))
    return asked.sent


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("way", ["key", "tab", "click"])
async def test_halt_by_key_by_tab_and_enter_and_by_click(way, size):
    asked = Asked(text="all ranks stop at step 45")
    async with driven(app_on(recorded.running(), actions=asked), size) as (_, pilot):
        if way == "click":
            await pilot.click("#button-halt")
        else:
            await pilot.press(*{"key": ["H"], "tab": ["tab", "tab", "enter"]}[way])
        await see(
            pilot, "Halt this run", "gpu01", "48230, 48231", "not started: recall", "1-plumbing"
        )
        if way == "click":
            await pilot.click("#choice0")
        else:
            await pilot.press("tab", "enter")
        await see(pilot, "all ranks stop at step 45")
        assert asked.sent == [(PATH, "halt", {})]


@pytest.mark.parametrize("key", ["D", "H", "L"])
@pytest.mark.parametrize("answer", ["enter", "escape", "n", "q"])
async def test_no_is_the_default_and_sends_nothing(key, answer):
    asked = Asked()
    state = recorded.waiting() if key == "L" else recorded.running()
    async with driven(app_on(state, actions=asked)) as (app, pilot):
        await play(pilot, key, "…y yes", answer)
        await until(pilot, lambda: app.overlay is None)
        assert (asked.sent, app.pending, app.is_running) == ([], [], True)


async def test_a_question_keeps_its_target_and_takes_no_other_keys():
    asked = Asked()
    async with driven(app_on(recorded.running(), actions=asked)) as (app, pilot):
        await play(pilot, "D", "…Dump the stacks of all instrumented ranks?")
        other = recorded.running(id="another/0-run", path="/nowhere/another/0-run")
        app.take(dataclasses.replace(app.snapshot, state=other))
        await pilot.press("4", "H", "p")
        assert (app.view_name, app.paused) == ("dashboard", False)
        await see(pilot, "Dump the stacks of all instrumented ranks?", "1-plumbing")
        await pilot.press("y")
        await until(pilot, lambda: bool(asked.sent))
        assert asked.sent[0][0] == PATH


async def test_a_kill_needs_the_name_of_the_run_and_a_wrong_one_can_be_corrected():
    asked = Asked()
    keys = ("K", "…type 1-plumbing to continue", *"2-plumbing", "enter", "…that is not 1-plumbing")
    await played(recorded.running(), *keys, "tab", "tab", "enter", then="that is not", asked=asked)
    assert asked.sent == []
    again = (*keys, "home", "delete", "1", "enter", "…→ chooses", "right")
    assert await played(recorded.running(), *again, "enter") == [(PATH, "stop", {})]
    kill = await played(recorded.running(), *again, "right", "enter")
    assert kill == [(PATH, "kill", {"yes": True})]


async def test_a_requested_checkpoint_is_reported_when_it_is_saved():
    asked, state = Asked(text=".CHECKPOINT is written"), recorded.running()
    async with driven(app_on(state, actions=asked)) as (app, pilot):
        await play(pilot, "C", "…y yes", "y", "….CHECKPOINT is written")
        for step, shown in ((42, "the checkpoint of step 42 is saved"), (44, "another message")):
            saved = dataclasses.replace(state, checkpoint=f"step_{step:08}")
            app.take(dataclasses.replace(app.snapshot, state=saved))
            await see(pilot, shown)
            app.say("another message")


async def test_a_mistake_in_an_action_is_shown():
    class Broken(Asked):
        def request(self, *given):
            raise KeyError("nothing")

    words = "dump failed: KeyError: 'nothing'; please report"
    await played(recorded.running(), "D", "…y yes", "y", then=words, asked=Broken())


def test_a_request_names_its_rejection_and_runs_nothing_from_the_working_directory(
    tmp_path, monkeypatch
):
    planted(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ContractError, match="no run '"):
        request(tmp_path / "nowhere", "dump", {})
    assert not (tmp_path / "ran").exists()


async def test_the_alert_that_is_shown_is_acknowledged():
    sent = await played(recorded.stalled(), "A", "…Acknowledge this alert?", "y")
    assert sent == [(PATH, "ack", {"alert": "stall-3"})]


async def test_a_flag_is_changed_while_a_launch_waits():
    sent = await played(recorded.waiting(), "2", "…NSA_OPT_FUSED", "j", "j", "space")
    change = {"name": "NSA_OPT_FUSED", "value": "1", "phases": "next", "phase": "recall"}
    assert sent == [(LAUNCH, "set-flag", change)]
    sent = await played(
        recorded.waiting(), "2", "…NSA_OPT_FUSED", "v", "…and later", "j", "j", "space"
    )
    assert sent == [(LAUNCH, "set-flag", change | {"phases": "all"})]


async def test_a_value_is_typed_and_a_wrong_one_is_said_before_it_is_sent():
    field, wrong = "…a number from 0 to 1000", "…cannot be 'fast'"
    keys = ("2", "…NSA_LR", "enter", field, "ctrl+a", "ctrl+k", *"fast", wrong, "enter")
    sent = await played(recorded.waiting(), *keys, *["backspace"] * 4, *"0.01", "enter")
    assert [args for _, _, args in sent] == [
        {"name": "NSA_LR", "value": "0.01", "phases": "next", "phase": "recall"}
    ]


async def test_proceed_names_the_phase_and_shows_the_phase_that_starts():
    facts = ("…Start phase recall?", "…NSA_LR=0.001", "…Attention works.")
    asked = Asked(text="recall starts")
    await played(recorded.waiting(), "2", "L", *facts, "y", then="throughput tok/s", asked=asked)
    assert asked.sent == [(LAUNCH, "proceed", {"phase": "recall"})]


async def test_without_a_run_l_asks_once_and_launches_with_what_was_set(tmp_path):
    asked = Asked()
    async with driven(app_on(root=tmp_path, actions=asked)) as (app, pilot):
        await play(pilot, "…✓ torch", "space", "…→ 0 ")
        await play(pilot, "down", "down", "down", "space", "…* launch")
        await until(pilot, lambda: app.draft.prepared.plan.phases[0].flags != {})
        await pilot.press("L")
        await see(pilot, "Launch cpu_smoke?", "2 ranks with torchrun")
        await play(pilot, "y", "…launched cpu_smoke in")
        options = asked.launched[0]
        assert (options.plan, options.between) == ("cpu_smoke", "go")
        assert options.flags == {"NSA_OPT_FUSED": "0"}
        await until(pilot, lambda: app.view_name == "dashboard")


async def test_a_paused_display_hides_no_stall_and_looks_like_no_frozen_directory():
    async with driven(app_on(recorded.running(8, True))) as (app, pilot):
        await pilot.press("p")
        await until(pilot, lambda: "paused" in lines(app)[0])
        held = (await settled(pilot)).splitlines()[2:-2]
        app.feed._source.states = [recorded.stalled()]
        app.feed.nudge()
        await until(pilot, lambda: "STALLED" in lines(app)[0])
        assert "paused" in lines(app)[0]
        assert lines(app)[1].startswith("! CRIT rank 3: no step for 74 s")
        assert lines(app)[2:-2] == held
        await play(pilot, "p", "…◂")
        assert "paused" not in picture(app)


@pytest.mark.parametrize("key", "234")
async def test_another_view_resumes_the_display(key):
    async with driven(app_on(recorded.running())) as (app, pilot):
        await pilot.press("p")
        await until(pilot, lambda: "paused" in lines(app)[0])
        app.feed._source.states = [recorded.crashed()]
        await pilot.press(key)
        await until(pilot, lambda: "paused" not in lines(app)[0])
        await until(pilot, lambda: app.view.snapshot.state.state == "crashed")


@pytest.mark.parametrize("writable", [True, False])
async def test_a_view_is_copied_to_the_clipboard_and_to_a_file(tmp_path, monkeypatch, writable):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path) if writable else "/dev/null/nowhere")
    async with driven(app_on(recorded.waiting())) as (app, pilot):
        await pilot.press("2", "y")
        trouble = "copied 1 line to the clipboard; cannot write the file: Not a directory"
        await see(pilot, "copied 1 line to the clipboard and to" if writable else trouble)
        command = "OMP_NUM_THREADS=1 torchrun -m trainers.ddp --config configs/tiny_cpu.yaml"
        assert app.clipboard == command
        copy = tmp_path / "nsa-console" / "copied.txt"
        assert not writable or copy.read_text() == f"{command}\n"


async def test_a_launch_that_begins_elsewhere_is_shown_where_there_was_none(tmp_path):
    async with driven(app_on(root=tmp_path)) as (app, pilot):
        assert app.snapshot.state is None
        directory.launch(tmp_path)
        await until(pilot, lambda: app.snapshot.state is not None)


@pytest.mark.parametrize(("down", "up"), [("down", "up"), ("tab", "shift+tab")])
async def test_the_list_of_commands_moves_while_its_field_has_the_focus(down, up):
    keys = ("colon", "…› 1", down, down, "…› 3", up, "enter")
    await played(recorded.running(), *keys, then="command of phase")


async def test_commands_are_found_by_their_words_and_by_a_click():
    keys = ("colon", "…type words", *"stacks of all", "enter")
    await played(recorded.running(), *keys, then="Dump the stacks of all instrumented ranks?")
    async with driven(app_on(recorded.running())) as (app, pilot):
        await play(pilot, "colon", "…› 1")
        await pilot.click("#reading", offset=(10, 3))
        await play(pilot, "…› 3", "enter")
        await until(pilot, lambda: app.view_name == "stall" and app.overlay is None)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: KEYS["dump"].question(None), "no run"),
        (lambda: KEYS["halt"].question(recorded.crashed()), r"has ended \(crashed\)"),
        (lambda: KEYS["adopt"].question(recorded.running()), "starts a supervisor for an unsup"),
        (lambda: KEYS["adopt"].question(recorded.by_hand()), "belongs to no launch"),
        (lambda: confirmations.proceed(recorded.running()), "still running"),
        (lambda: confirmations.acknowledge(recorded.running(), "", ""), "no alert"),
    ],
)
def test_an_action_without_a_target_says_why(make, says):
    with pytest.raises(CannotAsk, match=says):
        make()


def test_space_goes_through_the_values_and_back():
    fused = FLAGS["NSA_OPT_FUSED"]
    assert next_value(fused, "", None) == (True, "1")
    assert next_value(fused, "", "1") == (True, "0")
    assert next_value(fused, "", "0") == (True, None)
    assert next_value(fused, "1", None) == (True, "0")
    assert next_value(fused, "1", "0") == (True, None), "the planned value is no change"
    compress = FLAGS["NSA_DDP_COMPRESS"]
    assert next_value(compress, "", "none") == (True, "fp16")
    assert next_value(compress, "fp16", "none")[1] not in ("none", "fp16")
    assert next_value(FLAGS["NSA_LR"], "", None) == (False, None)


async def test_an_answer_is_text_and_no_command_to_the_terminal():
    asked = Asked(text=recorded.HOSTILE)
    async with driven(app_on(recorded.running(), actions=asked)) as (app, pilot):
        await play(pilot, "D", "…y yes", "y", "…[red]boo[/red]")
        assert all(line.isprintable() for line in lines(app))


def test_proceed_without_a_known_next_phase_names_none():
    state = recorded.waiting()
    held = dataclasses.replace(state.launch, phases=state.launch.phases[:2], phase=1)
    found = confirmations.proceed(dataclasses.replace(state, launch=held))
    assert (found.title, found.choices[0].args) == ("Start the next phase?", {})
