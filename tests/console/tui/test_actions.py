"""Acting: by key, by Tab and Enter, by click; questions with No as default and a frozen target."""

from __future__ import annotations

import dataclasses

import pytest

from console.tui import confirmations
from console.tui.background import request
from console.tui.confirmations import CannotAsk
from console.tui.keys import KEYS
from console.tui.rows import text_of
from console.tui.widgets.confirm import question_rows
from console.tui.widgets.flags import next_value
from tests.console.sources import directory
from tests.console.test_security import planted
from tests.console.tui import recorded
from tests.console.tui.recorded import Asked, app_on, drive, lines, picture, until
from trainers.contract.errors import ContractError
from trainers.contract.flags import FLAGS

PATH = "/nowhere/cpu_smoke/20261120-031500/1-plumbing"
SIZES = [(80, 24), (120, 40)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("way", ["key", "tab", "click"])
def test_halt_by_key_by_tab_and_enter_and_by_click(way, size):
    asked = Asked(text="all ranks stop at step 45")
    app = app_on(recorded.running(), actions=asked)

    async def body(pilot):
        if way == "key":
            await pilot.press("H")
        elif way == "click":
            await pilot.click("#button-halt")
        else:
            await pilot.press("tab", "tab", "enter")
        await until(pilot, lambda: "Halt this run" in picture(app))
        for fact in ("gpu01", "48230, 48231", "not run: recall", "1-plumbing"):
            assert fact in picture(app)
        if way == "click":
            await pilot.click("#choice0")
        else:
            await pilot.press("tab", "enter")
        await until(pilot, lambda: "all ranks stop at step 45" in picture(app))
        assert asked.sent == [(PATH, "halt", {})]

    drive(app, body, size)


@pytest.mark.parametrize("answer", [["enter"], ["escape"], ["n"], ["q"]])
@pytest.mark.parametrize("key", ["D", "H", "L"])
def test_no_is_the_default_and_sends_nothing(key, answer):
    asked = Asked()
    state = recorded.waiting() if key == "L" else recorded.running()
    app = app_on(state, actions=asked)

    async def body(pilot):
        await pilot.press(key)
        await until(pilot, lambda: "y yes" in picture(app))
        await pilot.press(*answer)
        await until(pilot, lambda: app.overlay is None)
        await pilot.pause(0.05)
        assert asked.sent == []
        assert app.is_running

    drive(app, body)


def test_the_target_is_frozen_when_the_question_opens():
    asked = Asked()
    app = app_on(recorded.running(), actions=asked)

    async def body(pilot):
        await pilot.press("D")
        await until(pilot, lambda: "Dump the stacks of all ranks?" in picture(app))
        other = recorded.running(id="another/0-run", path="/nowhere/another/0-run")
        app.take(dataclasses.replace(app.snapshot, state=other))
        await pilot.pause()
        assert "1-plumbing" in picture(app)
        await pilot.press("y")
        await until(pilot, lambda: bool(asked.sent))
        assert asked.sent[0][0] == PATH

    drive(app, body)


def test_other_keys_do_nothing_while_a_question_is_open():
    asked = Asked()
    app = app_on(recorded.running(), actions=asked)

    async def body(pilot):
        await pilot.press("H")
        await until(pilot, lambda: "Halt this run" in picture(app))
        await pilot.press("4", "D", "p")
        await pilot.pause()
        assert app.view_name == "dashboard"
        assert "Halt this run" in picture(app)
        assert not app.paused

    drive(app, body)


def test_kill_needs_the_name_of_the_run():
    asked = Asked()
    app = app_on(recorded.running(), actions=asked)

    async def body(pilot):
        await pilot.press("K")
        await until(pilot, lambda: "type 1-plumbing to continue" in picture(app))
        await pilot.press(*"1-plumb", "tab", "tab", "enter")
        await pilot.pause(0.05)
        assert asked.sent == []
        if app.overlay is None:
            await pilot.press("K")
            await until(pilot, lambda: "type 1-plumbing to continue" in picture(app))
        else:
            app.query_one("#confirm Input").value = ""
            app.query_one("#confirm Input").focus()
        await pilot.press(*"1-plumbing", "enter", "tab", "tab", "enter")
        await until(pilot, lambda: bool(asked.sent))
        assert asked.sent == [(PATH, "kill", {"yes": True})]

    drive(app, body)


def test_a_wrong_name_is_said_and_can_be_corrected_at_once():
    asked = Asked()
    app = app_on(recorded.running(), actions=asked)

    async def body(pilot):
        await pilot.press("K")
        await until(pilot, lambda: "type 1-plumbing to continue" in picture(app))
        await pilot.press(*"2-plumbing", "enter")
        await until(pilot, lambda: "that is not 1-plumbing" in picture(app))
        await pilot.press("home", "delete", "1")
        await until(pilot, lambda: "that is not" not in picture(app))
        await pilot.press("enter")
        await until(pilot, lambda: "→ chooses" in picture(app))
        await pilot.press("right", "enter")
        await until(pilot, lambda: bool(asked.sent))
        assert asked.sent == [(PATH, "stop", {})]

    drive(app, body)


def test_a_refusal_is_one_sentence_on_the_screen():
    app = app_on(recorded.running(), actions=Asked(ok=False, text="rank 1 does not catch it"))

    async def body(pilot):
        await pilot.press("D", "y")
        await until(pilot, lambda: "✗ rank 1 does not catch it" in picture(app))
        await pilot.press("escape")
        await until(pilot, lambda: "does not catch" not in picture(app))

    drive(app, body)


def test_an_answer_is_text_and_no_command_to_the_terminal():
    app = app_on(recorded.running(), actions=Asked(text=recorded.HOSTILE))

    async def body(pilot):
        await pilot.press("D", "y")
        await until(pilot, lambda: "[red]boo[/red]" in picture(app))
        assert all(line.isprintable() for line in lines(app))

    drive(app, body)


def test_a_mistake_in_what_was_asked_is_said():
    asked = Asked()
    app = app_on(recorded.running(), actions=asked)
    app.operator._request = lambda *given: {}["nothing"]

    async def body(pilot):
        await pilot.press("D", "y")
        await until(
            pilot, lambda: "dump failed: KeyError: 'nothing'; please report" in picture(app)
        )

    drive(app, body)


def test_the_real_request_names_what_refuses_it(tmp_path):
    with pytest.raises(ContractError, match="there is no run"):
        request(tmp_path / "nowhere", "dump", {})


def test_a_request_runs_nothing_from_the_working_directory(tmp_path, monkeypatch):
    planted(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ContractError, match="there is no run"):
        request(tmp_path / "nowhere", "dump", {})
    assert not (tmp_path / "ran").exists()


def test_a_directory_that_does_not_answer_does_not_hold_up_the_screen():
    app = app_on(recorded.running(), actions=Asked(delay_s=60.0))

    async def body(pilot):
        await pilot.press("D", "y")
        for key in "2341":
            await pilot.press(key)
        assert "dump: sent …" in picture(app)

    drive(app, body)


def test_acting_on_a_run_that_ended_says_so():
    app = app_on(recorded.crashed())

    async def body(pilot):
        await pilot.press("H")
        await until(pilot, lambda: "has ended (crashed)" in picture(app))

    drive(app, body)


def test_the_alert_that_was_shown_is_acknowledged():
    asked = Asked(text="noted")
    app = app_on(recorded.stalled(), actions=asked)

    async def body(pilot):
        await pilot.press("A")
        await until(pilot, lambda: "Acknowledge this alert?" in picture(app))
        await pilot.press("y")
        await until(pilot, lambda: bool(asked.sent))
        assert asked.sent == [(PATH, "ack", {"alert": "stall-3"})]

    drive(app, body)


def test_a_flag_toggled_while_a_launch_waits_is_asked_of_the_launch():
    asked = Asked(text="NSA_OPT_FUSED=1 from the next phase")
    app = app_on(recorded.waiting(), actions=asked)

    async def body(pilot):
        await pilot.press("2", "j", "j", "space")
        await until(pilot, lambda: "from the next phase" in picture(app))
        assert asked.sent == [
            ("/nowhere/cpu_smoke/20261120-031500", "set-flag",
             {"name": "NSA_OPT_FUSED", "value": "1"})
        ]  # fmt: skip

    drive(app, body)


def test_a_value_is_typed_and_a_wrong_one_is_said_before_it_is_sent():
    asked = Asked()
    app = app_on(recorded.waiting(), actions=asked)

    async def body(pilot):
        await pilot.press("2", "enter")
        await until(pilot, lambda: "a number of at least 0" in picture(app))
        await pilot.press("ctrl+a", "ctrl+k", *"fast")
        await until(pilot, lambda: "cannot be 'fast'" in picture(app))
        await pilot.press("enter")
        assert asked.sent == []
        await pilot.press(*["backspace"] * 4, *"0.01", "enter")
        await until(pilot, lambda: bool(asked.sent))
        assert asked.sent[0][2] == {"name": "NSA_LR", "value": "0.01"}

    drive(app, body)


def test_proceed_names_the_phase_and_goes_to_the_launch():
    asked = Asked(text="recall starts")
    app = app_on(recorded.waiting(), actions=asked)

    async def body(pilot):
        await pilot.press("L")
        await until(pilot, lambda: "Start phase recall?" in picture(app))
        assert "NSA_LR=0.001" in picture(app)
        assert "Attention works." in picture(app)
        await pilot.press("y")
        await until(pilot, lambda: bool(asked.sent))
        assert asked.sent == [
            ("/nowhere/cpu_smoke/20261120-031500", "proceed", {"phase": "recall"})
        ]

    drive(app, body)


def test_without_a_run_l_asks_once_and_launches_with_what_was_set(tmp_path):
    asked = Asked()
    app = app_on(root=tmp_path, actions=asked)

    async def body(pilot):
        await until(pilot, lambda: "✓ python" in picture(app), 20)
        await pilot.press("space")
        await until(pilot, lambda: "go while gates pass" in picture(app))
        await pilot.press("down", "down", "down", "space")
        await until(pilot, lambda: "* launch" in picture(app))
        await until(pilot, lambda: app.draft.prepared.plan.phases[0].flags != {}, 20)
        await pilot.press("L")
        await until(pilot, lambda: "Launch cpu_smoke?" in picture(app))
        assert "2 ranks by torchrun, starts the next phase while the gates pass" in picture(app)
        await pilot.press("y")
        await until(pilot, lambda: "launched cpu_smoke in" in picture(app))
        options = asked.launched[0]
        assert (options.plan, options.between) == ("cpu_smoke", "go")
        assert options.flags == {"NSA_OPT_FUSED": "1"}
        assert app.view_name == "dashboard"

    drive(app, body)


def test_leaving_asks_nothing_and_sends_nothing():
    for key in ("q", "ctrl+c"):
        asked = Asked()
        app = app_on(recorded.running(), actions=asked)

        async def body(pilot, key=key, app=app):
            await pilot.press(key)
            await until(pilot, lambda: not app.is_running or app._exit)

        drive(app, body)
        assert asked.sent == []
        assert app.return_value == 0


def test_a_held_picture_hides_no_stall_and_looks_like_no_frozen_directory():
    app = app_on(recorded.running(8, True))

    async def body(pilot):
        await pilot.press("p")
        await until(pilot, lambda: "paused" in lines(app)[0])
        held = lines(app)[2:-2]
        app.feed._source.states = [recorded.stalled()]
        app.feed.nudge()
        await until(pilot, lambda: "STALLED" in lines(app)[0])
        assert "paused" in lines(app)[0]
        assert lines(app)[1].startswith("! CRIT rank 3: no step for 74 s")
        assert lines(app)[2:-2] == held
        await pilot.press("p")
        await until(pilot, lambda: "◂" in picture(app))
        assert "paused" not in picture(app)

    drive(app, body)


@pytest.mark.parametrize("key", "234")
def test_another_view_is_another_picture_and_shows_what_is(key):
    app = app_on(recorded.running())

    async def body(pilot):
        await pilot.press("p")
        await until(pilot, lambda: "paused" in lines(app)[0])
        app.feed._source.states = [recorded.crashed()]
        await pilot.press(key)
        await until(pilot, lambda: "paused" not in lines(app)[0])
        await until(pilot, lambda: app.view.snapshot.state.state == "crashed")

    drive(app, body)


def test_a_copy_that_no_file_takes_is_on_the_clipboard_and_the_screen_lives(monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null/nowhere")
    app = app_on(recorded.waiting())

    async def body(pilot):
        await pilot.press("2", "y")
        await until(
            pilot, lambda: "to the clipboard; not to a file: Not a directory" in picture(app)
        )
        assert app.clipboard.startswith("OMP_NUM_THREADS=1 torchrun")

    drive(app, body)


def test_a_launch_that_begins_elsewhere_is_shown_where_there_was_none(tmp_path):
    app = app_on(root=tmp_path)

    async def body(pilot):
        assert app.snapshot.state is None
        directory.launch(tmp_path)
        await until(pilot, lambda: app.snapshot.state is not None)

    drive(app, body)


def test_what_is_shown_is_copied_to_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    app = app_on(recorded.waiting())

    async def body(pilot):
        await pilot.press("2", "y")
        await until(pilot, lambda: "copied 1 line " in picture(app))
        text = (tmp_path / "nsa-console" / "copied.txt").read_text()
        assert text == "OMP_NUM_THREADS=1 torchrun -m trainers.ddp --config configs/tiny_cpu.yaml\n"

    drive(app, body)


def test_commands_are_found_by_their_words():
    asked = Asked()
    app = app_on(recorded.running(), actions=asked)

    async def body(pilot):
        await pilot.press("colon")
        await until(pilot, lambda: "what to do" in picture(app))
        await pilot.press(*"stacks of all", "enter")
        await until(pilot, lambda: "Dump the stacks of all ranks?" in picture(app))

    drive(app, body)


@pytest.mark.parametrize(
    ("down", "up"), [("down", "up"), ("tab", "shift+tab"), ("ctrl+n", "ctrl+p")]
)
def test_the_list_of_commands_moves_while_its_field_has_the_focus(down, up):
    app = app_on(recorded.running())

    async def body(pilot):
        await pilot.press("colon")
        await until(pilot, lambda: "› 1" in picture(app))
        await pilot.press(down, down)
        await until(pilot, lambda: "› 3" in picture(app))
        await pilot.press(up, "enter")
        await until(pilot, lambda: app.view_name == "launch" and app.overlay is None)

    drive(app, body)


def test_enter_does_the_command_that_was_clicked():
    app = app_on(recorded.running())

    async def body(pilot):
        await pilot.press("colon")
        await until(pilot, lambda: "› 1" in picture(app))
        await pilot.click("#reading", offset=(10, 3))
        await until(pilot, lambda: "› 3" in picture(app))
        await pilot.press("enter")
        await until(pilot, lambda: app.view_name == "stall" and app.overlay is None)

    drive(app, body)


def test_the_question_says_run_host_pids_and_what_is_lost():
    for key in (KEYS["dump"], KEYS["halt"], KEYS["stop"]):
        question = key.question(recorded.stalled())
        text = "\n".join(text_of(row) for row in question_rows(question, 80))
        for part in ("run ", "host ", "pids ", key.actions[0].cost[0], "gpu01", "48230"):
            assert part in text
    with pytest.raises(CannotAsk, match="no run"):
        KEYS["dump"].question(None)
    with pytest.raises(CannotAsk, match="still running"):
        confirmations.proceed(recorded.running())
    with pytest.raises(CannotAsk, match="no alert"):
        confirmations.acknowledge(recorded.running(), "", "")


def test_space_goes_through_the_values_and_back():
    fused = FLAGS["NSA_OPT_FUSED"]
    assert next_value(fused, "", None) == (True, "1")
    assert next_value(fused, "", "1") == (True, "0")
    assert next_value(fused, "", "0") == (True, None)
    assert next_value(fused, "1", None) == (True, "0")
    compress = FLAGS["NSA_DDP_COMPRESS"]
    assert next_value(compress, "", "none") == (True, "fp16")
    assert next_value(FLAGS["NSA_LR"], "", None) == (False, None)
