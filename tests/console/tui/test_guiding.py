"""Help for a new operator: notices name keys that work, and old evidence is marked as old."""

from __future__ import annotations

import dataclasses
import time

import pytest

from console.model import Alert
from console.sources.stacks import Frame, Stack, Thread
from console.tui.feed import ScreenData
from console.tui.keys import KEYS
from console.tui.rows import text_of
from console.tui.views.stall import evidence_rows, grouped, stack_rows, verdict_rows
from tests.console.tui import recorded
from tests.console.tui.recorded import (
    NOW,
    Asked,
    app_on,
    driven,
    lines,
    picture,
    play,
    see,
    until,
)

LAUNCH = "/nowhere/cpu_smoke/20261120-031500"


@pytest.mark.parametrize("key", ["H", "K"])
async def test_a_plan_that_waits_is_ended_by_the_keys_that_end_a_run(key):
    asked = Asked()
    async with driven(app_on(recorded.waiting(), actions=asked)) as (app, pilot):
        await until(pilot, lambda: "WAITING" in lines(app)[0])
        assert "COMPLETED" not in lines(app)[0]
        await play(pilot, key, "…Halt this launch before phase recall?")
        assert "then        the launch ends; not started: recall" in picture(app)
        await pilot.press("y")
        await until(pilot, lambda: bool(asked.sent))
        assert asked.sent == [(LAUNCH, "halt", {})]


async def test_a_key_of_a_view_closes_the_help_and_works_and_leaves_a_question_open():
    asked = Asked()
    async with driven(app_on(recorded.running(), actions=asked)) as (app, pilot):
        await play(pilot, "?", "…Keys in dashboard", "space", "…Charts: a longer time span", "4")
        await until(pilot, lambda: app.view_name == "logs" and app.overlay is None)
        await play(pilot, "?", "…Keys in logs", "H", "…Halt this run?", "1", "]")
        await pilot.pause()
        assert (app.view_name, asked.sent) == ("logs", [])
        assert "Halt this run?" in picture(app)
        await pilot.press("escape")
        await until(pilot, lambda: app.overlay is None)
        await pilot.press("2")
        await until(pilot, lambda: app.view_name == "launch")
        await pilot.press("E")
        await see(pilot, "the mark › is in the flags", "NSA_LR")
        await pilot.press("enter")
        await until(pilot, lambda: app.in_field)
        await pilot.press("1")
        await pilot.pause()
        assert (app.view_name, app.in_field) == ("launch", True)


def old_and_new() -> dict[int, Stack]:
    def stack(rank: int, age_s: float, name: str) -> Stack:
        frames = (Frame(f"/src/nsa/{name}.py", 7, "f"),)
        return Stack(rank, NOW - age_s, "stackdump", (Thread("main", frames),))

    return {0: stack(0, 8, "new"), 1: stack(1, 58, "old"), 2: stack(2, 8, "new")}


@pytest.mark.parametrize("odd", [None, 1])
def test_a_stack_of_an_older_dump_says_so_and_is_not_compared(odd):
    groups = grouped(old_and_new(), range(3), odd)
    rows = [text_of(row) for row in stack_rows(groups, odd, 80, 4, NOW)]
    heads = [rows[1][:40].strip(), rows[1][40:].strip()]
    old = "rank 1  58s ago, not in newest dump"
    assert sorted(heads) == [old, "ranks 0,2  8s ago"]
    assert heads.index(old) == (0 if odd == 1 else 1)
    assert "differs" not in rows[1]
    assert "ago" not in rows[0]


async def test_a_goes_through_the_alerts_and_what_comes_brings_back_the_worst():
    crit = Alert("stall-3", NOW, "crit", "rank 3 hangs", "3")
    own = Alert("document run.json", NOW, "warn", "run.json is no document", observed=True)
    state = recorded.running(alerts=(crit, own))
    async with driven(app_on(state)) as (app, pilot):
        await until(pilot, lambda: lines(app)[1].endswith("3 diagnose  A ack  a next (1 of 2)"))
        await pilot.press("a")
        await until(pilot, lambda: lines(app)[1].startswith("! WARN run.json is no document"))
        assert lines(app)[1].endswith("a next (2 of 2)")
        assert "A ack" not in lines(app)[1]
        await play(pilot, "A", "…this notice cannot be acknowledged", "a", "A")
        await play(pilot, "…Acknowledge this alert?", "escape")
        await until(pilot, lambda: app.overlay is None)
        await pilot.press("a")
        await until(pilot, lambda: "a next (2 of 2)" in lines(app)[1])
        more = (*state.alerts, Alert("gone", NOW, "crit", "rank 1 is gone"))
        came = ScreenData(time.monotonic(), NOW, recorded.running(alerts=more))

        def shows() -> bool:
            app.alert.take(came)  # the feed may deliver the two earlier alerts again
            return "a next (1 of 3)" in lines(app)[1]

        await until(pilot, shows)


def test_an_acknowledged_stall_is_a_note():
    state = recorded.stalled()
    noted = tuple(dataclasses.replace(alert, acknowledged=True) for alert in state.alerts)
    (first, *_) = recorded.noticed(dataclasses.replace(state, alerts=noted))
    assert first.level == "info"
    assert first.text.startswith("acknowledged: rank 3: no step for 74 s")


async def test_the_gates_of_a_run_that_ended_stand_where_its_alert_leads():
    state = dataclasses.replace(recorded.gates_failed(), launch=recorded.launch("ended"))
    async with driven(app_on(state)) as (app, pilot):
        await until(pilot, lambda: lines(app)[2].endswith("2 view gates  a next (1 of 2)"))
        await play(pilot, "2", "…preflight")
        await see(pilot, "✓ torch", "gates of plumbing, which ended", "bytes_right: 0.41")
        found = next(line for line in lines(app) if "bytes_right" in line and "!" not in line)
        assert found.startswith("✗ bytes_right: 0.41 share (≥ 0.9)")


@pytest.mark.parametrize("stays", [True, False])
async def test_the_next_launch_is_checked_when_the_one_that_is_shown_ends(tmp_path, stays):
    async with driven(app_on(recorded.running(), root=tmp_path)) as (app, pilot):
        await play(pilot, "2", "…command of phase")
        if not stays:
            await pilot.press("1")
        ended = recorded.running(state="completed", launch=recorded.launch("ended"))
        app.feed._source.states[:] = [ended]
        await until(pilot, lambda: "COMPLETE" in lines(app)[0])
        if not stays:
            await pilot.press("2")
        await play(pilot, "…✓ torch", "L", "…Launch cpu_smoke?")


async def test_the_cursor_stays_on_its_flag_when_a_launch_starts(tmp_path):
    ended = recorded.running(state="completed", launch=recorded.launch("ended"))
    async with driven(app_on(ended, root=tmp_path)) as (app, pilot):
        await play(pilot, "2", "…flags of a new launch", "E", "down")

        def is_held():
            return any(line.startswith("› ") and "NSA_LR " in line for line in lines(app))

        await until(pilot, is_held)
        app.feed._source.states[:] = [recorded.running(launch=recorded.launch())]
        await see(pilot, "flags now → recall")
        await until(pilot, is_held)


async def test_a_key_that_does_nothing_is_said():
    async with driven(app_on(recorded.running())) as (app, pilot):
        await play(pilot, "x", "…x has no function; ? shows the keys", "space")
        await play(pilot, "…space works only in launch", "question_mark", "…Keys in dashboard")
        await pilot.press("escape")
        await until(pilot, lambda: app.overlay is None)
        await play(pilot, "colon", "…type words", *"zzz", "…nothing found", "enter")
        await until(pilot, lambda: app.overlay is None)


@pytest.mark.parametrize(
    ("name", "dimmed"), [("running", set()), ("waiting", {"dump"}), ("crashed", {"dump", "halt"})]
)
async def test_a_button_that_finds_nothing_to_act_on_is_dim(name, dimmed):
    async with driven(app_on(recorded.STATES[name]())) as (app, _):
        found = {key for key in ("dump", "halt", "flags", "launch", "stall_view")
                 if app.query_one(f"#button-{key}").disabled}  # fmt: skip
        assert found == dimmed


def test_a_halt_of_a_stalled_run_promises_nothing_and_names_the_key_that_stops_it():
    facts = dict(KEYS["halt"].question(recorded.stalled()).facts)
    said = "rank 3 is stalled in backward, and no rank halts before every rank completes its step"
    assert facts["stalled"] == f"{said}; K stops the run"
    saving = dataclasses.replace(recorded.VERDICT, phase="save")
    for verdict, who in (saving, "rank 3"), (dataclasses.replace(saving, rank=None), "a rank"):
        state = dataclasses.replace(recorded.stalled(), verdict=verdict)
        facts = dict(KEYS["halt"].question(state).facts)
        then = "the run halts when the save ends; K loses the checkpoint"
        assert facts["stalled"] == f"{who} is stalled in save, and {then}"


def test_no_question_promises_a_checkpoint_of_a_program_that_may_save_none():
    """A foreign program may save nothing at a halt; without `join`, its ranks do not halt."""
    running, promised = recorded.running(), "only what the program saves itself"
    facts = {name: dict(KEYS[name].question(running).facts) for name in ("halt", "stop")}
    assert facts["halt"]["keeps"] == promised
    assert facts["stop"]["loses"] == "all steps that the program has not saved itself"
    assert facts["stop"]["saved"] == "no checkpoint in the run directory"
    ours = dataclasses.replace(running, decided={"NSA_LR": "1"}, step=43, checkpoint="step_33")
    cost = "10 steps (newest checkpoint: step 33)"
    in_step = tuple(recorded.rank(number, step=44) for number in range(2))
    ours = dataclasses.replace(ours, ranks=in_step)  # step 44 is not complete
    for state, lost in ("running", f"Kill: {cost}; Stop: none, if all"), ("stalled", cost):
        asked = KEYS["stop"].question(dataclasses.replace(ours, state=state))
        assert dict(asked.facts)["loses"].startswith(lost), "ranks that are stalled cannot save"
    saves = dict(KEYS["checkpoint"].question(running).facts)["note"]
    assert saves == "it is not known whether this program saves a checkpoint on request"
    assert dict(KEYS["halt"].question(recorded.stalled()).facts)["keeps"].startswith(promised)
    assert "else" not in facts["halt"]
    silent = dataclasses.replace(running, step=None)
    assert "does not call join" in dict(KEYS["halt"].question(silent).facts)["else"]


@pytest.mark.parametrize(
    ("verdict", "says"),
    [
        (recorded.VERDICT, ["the run is unsupervised"]),
        (None, ["unsupervised; R starts a new supervisor",
                "nsa-console watchdog /nowhere/cpu_smoke/20261120-031500/1-plumbing"]),
    ],
)  # fmt: skip
def test_where_nobody_watches_nobody_says_that_nothing_stalls(verdict, says):
    state = dataclasses.replace(recorded.unsupervised(), verdict=verdict)
    rows = [*verdict_rows(state, 80, 2, NOW), *evidence_rows(state, 80, 9, NOW)]
    text = " ".join(" ".join(map(text_of, rows)).split())
    assert "no stall detected" not in text
    assert "the run has ended" not in text
    for words in says:
        assert words in text


async def test_tab_stays_in_a_question():
    async with driven(app_on(recorded.running())) as (app, pilot):
        await play(pilot, "H", "…Halt this run")
        for name in ("choice0", "no", "choice0"):
            await pilot.press("tab")
            await until(pilot, lambda name=name: bool(app.focused) and app.focused.id == name)
