"""The header and the alert line: their text for a state, and its fit to a width."""

from __future__ import annotations

import dataclasses
import re

import pytest

from console.model import Gate
from console.status_text import outcome
from console.tui.feed import ScreenData
from console.tui.keys import KEYS
from console.tui.rows import text_of, width_of
from console.tui.views.stall import no_dump
from console.tui.widgets.alertline import alert_rows
from console.tui.widgets.header import header_row
from tests.console.tui import recorded
from tests.console.tui.recorded import NOW, header_of, noticed

ARMED = {
    "alert": "on stall (10 s): alert only",
    "dump ↻9": "on stall (9 s): alert, then dump; on crash: restart, 9 left",
    "restart ↻2": "on stall (9 s): alert, and 25 s later restart; on crash: restart, 2 left",
}


@pytest.mark.parametrize("short", list(ARMED))
def test_the_smallest_header_says_how_far_how_fresh_and_what_is_armed(short):
    state = recorded.running(armed=ARMED[short], armed_short=short)
    header = header_of(state, 80)
    for part in ("cpu_smoke", "plumbing", "RUNNING", "41/100", "ETA 1m00", "data 1s",
                 f"on stall: {short}"):  # fmt: skip
        assert part in header, header
    assert ARMED[short] in header_of(state, 200)


def test_nothing_is_armed_where_nobody_watches():
    for make in (recorded.unsupervised, recorded.waiting, recorded.crashed):
        assert not any("on stall" in header_of(make(), width) for width in (80, 200))


def test_a_launch_that_a_gate_ended_is_not_called_completed():
    phases = list(recorded.phases(1, "completed"))
    phases[1] = dataclasses.replace(phases[1], result="fail")
    state = recorded.running(state="completed", launch=recorded.launch("ended", phases=phases))
    assert "GATE FAILED" in header_of(state)
    assert "COMPLETED" not in header_of(state)


GATE = Gate("no_stall", 0.0, "", "run", "events", "yes", "fail")
HALTED = {"state": "ended", "why": "halt requested by op"}


@pytest.mark.parametrize(
    ("gates", "launch", "words"),
    [
        ((GATE,), {"state": "ended"}, "launch ended: gate no_stall failed (0, bound yes)"),
        ((dataclasses.replace(GATE, result="unknown"),), {"state": "ended"},
         "launch ended: gate no_stall unknown (0, bound yes)"),
        ((), {"state": "ended"}, "launch ended: plumbing completed; not started: recall"),
        ((), HALTED, "launch ended: halt requested by op; not"),
        ((GATE,), {"state": "ended", "phase": 2}, ""),
        ((GATE,), {"state": "running"}, ""),
    ],
)  # fmt: skip
def test_a_plan_that_ended_says_why_and_which_phase_was_not_started(gates, launch, words):
    phases = recorded.phases(launch.get("phase", 1), "completed")
    held = recorded.launch(phases=phases, **launch)
    state = dataclasses.replace(recorded.waiting(), gates=gates, launch=held)
    row = text_of(alert_rows(noticed(state), 80)[0])
    text = " ".join(notice.text for notice in noticed(state))
    assert words in text if words else "launch ended" not in text
    leads = row.rstrip().endswith("2 view gates  a next (1 of 2)")
    assert leads is words.startswith("launch ended: gate")


def earlier(launch: str):
    """Returns the state of the completed run 0-sanity, whose launch is in its last phase."""
    held = recorded.launch(launch, phase=2, phases=recorded.phases(2))
    gates = (dataclasses.replace(GATE, result="pass"),)
    return recorded.running(
        state="completed", path=f"{held.path}/0-sanity", id=f"{held.id}/0-sanity", launch=held,
        gates=gates, step=7,
    )  # fmt: skip


@pytest.mark.parametrize("launch", ["running", "waiting", "ended"])
async def test_an_earlier_phase_has_its_own_name_number_and_row(launch):
    state = earlier(launch)
    for words in ("cpu_smoke 0315 sanity", "COMPLETED", "phase 1/3"):
        assert words in header_of(state, 200)
    assert "recall" not in header_of(state, 200)
    shown = await recorded.seen(state, (100, 60), keys=("2",), says=["gates of sanity"])
    rows = {name: next(line for line in shown.splitlines() if f" {name} " in line)
            for name in ("0-sanity", "2-recall")}  # fmt: skip
    assert "▸" in rows["0-sanity"]
    assert "7/100" in rows["0-sanity"]
    assert "gates 1/1" in rows["0-sanity"]
    assert "7/100" not in rows["2-recall"]
    assert "gates" not in rows["2-recall"]
    if launch != "ended":
        assert "command of phase sanity, which ended" in shown
        assert "flags of sanity, which ended, no phase left" in shown


def test_a_halted_run_is_no_alert():
    halted = dataclasses.replace(recorded.crashed(), state="halted", why="H by op")
    assert [notice.level for notice in noticed(halted)] == ["info", "info"]


def test_the_header_ages_when_nothing_comes():
    state = recorded.running()
    assert "data 1s" in header_of(state)
    assert "data 5s old" in header_of(state, late_s=4.0)
    row = header_row(ScreenData(0.0, NOW, state), 120, late_s=30.0)
    assert ("data 31s old", "stale") in row
    worst = noticed(state, silent_s=30.0)[0]
    assert (worst.level, "has not answered for 30s" in worst.text) == ("crit", True)


def test_a_run_that_completed_early_is_no_share_of_its_plan():
    why = 'all ranks done after step 95; reason: "bytes_right reached"'
    state = recorded.running(state="completed", step=95, steps_planned=600, why=why)
    assert "step 95" in header_of(state)
    assert "%" not in header_of(state)
    assert f"completed: {why}" in [notice.text for notice in noticed(state)]


@pytest.mark.parametrize("width", [30, 60, 80, 120, 200])
def test_header_and_alert_fit_any_width(width):
    for make in recorded.STATES.values():
        state = make()
        assert width_of(header_row(ScreenData(0.0, NOW, state), width)) <= width
        assert all(width_of(row) <= width for row in alert_rows(noticed(state), width, 0, 3))
        waits = state.launch is not None and state.launch.state == "waiting"
        word = "WAITING" if waits else outcome(state)[0].upper()
        assert word in header_of(state, width) or width == 30


def test_a_further_attempt_is_counted():
    for width in (80, 120):
        assert re.search("att(empt)? 2", header_of(recorded.running(attempt=2), width))
        assert " att" not in header_of(recorded.running(), width)


def test_a_directory_that_takes_no_writes_is_said():
    worst = noticed(recorded.running(directory_blocked_s=12.0))[0]
    assert worst.text == "no write to the run directory has finished for 12s; training continues"


def test_a_program_that_has_not_called_join_is_named_where_its_steps_and_stacks_would_be():
    ranks = tuple(recorded.rank(number, False, pulse=None) for number in range(2))
    state = recorded.running(state="starting", ranks=ranks, step=None, eta_s=None)
    assert "STARTING 60s  phase 2/3  no join yet, steps not known" in header_of(state)
    assert "no join" in header_of(state, 80)
    assert "no rank has called join" in no_dump(state)
    note = dict(KEYS["dump"].question(state).facts)["note"]
    assert note.startswith("no rank has called join")
    ours = dataclasses.replace(state, decided={"NSA_LR": "1"})
    assert "join" not in header_of(ours) + no_dump(ours)
