"""Documents of a launch that contradict each other, its records or its processes."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import time
from typing import get_args

import pytest

from console import actions, status_text
from console.sources.run import RunSource
from console.sources.run_records import Reads
from tests.console.sources import directory
from tests.console.sources.conftest import shared_memory as shared_memory
from tests.console.test_go import BOUNDS, PASSED, completed, plan_gates, said
from tests.launches import sleeping
from trainers.contract import environ, rundir

TOKEN = secrets.token_hex(8)
"""Each process of pytest has its own token, because tests search the whole machine for it."""


@pytest.fixture
def launch(tmp_path):
    """A launch whose second phase failed a gate."""
    path = directory.launch(tmp_path)
    runs = [completed(path / name) for name in ("0-first", "1-second")]
    plan_gates(path, BOUNDS)
    failed = [gate | {"result": "fail"} for gate in PASSED[:1]] + PASSED[1:]
    directory.change(runs[1] / rundir.GATES, result="fail", gates=failed)
    directory.end(
        path, "pass", "fail", why="second: gate steps_done failed (20 steps, bound ≥ 99999)"
    )
    return path


def let_pass(launch):
    directory.document(launch / "1-second" / rundir.GATES, {"v": 1, "gates": PASSED})
    directory.end(launch)
    return launch


@pytest.fixture
def passed(launch):
    """The same launch, with gates that all passed."""
    return let_pass(launch)


@pytest.fixture
def alone(tmp_path):
    """A launch whose supervisor has ended, and a live process with the token of its run."""
    path = directory.launch(tmp_path)
    run = directory.run(path / "0-first", **directory.DEAD)
    born = rundir.read_json(run / rundir.RUN) or {}
    directory.change(run / rundir.RUN, environment=born["environment"] | {environ.TOKEN: TOKEN})
    rank = sleeping(**{environ.TOKEN: TOKEN})
    worker = {"rank": 0, **rundir.identity(rank.pid), "exit": None}
    directory.change(run / rundir.SUPERVISOR, workers=[worker])
    directory.change(path / rundir.PLAN_STATE, supervisor=rundir.identity() | directory.DEAD)
    yield path
    rank.kill()
    rank.wait()


# --- plan.json and plan_state.json --------------------------------------------------------------


@pytest.mark.decision("go-run", "lie")
@pytest.mark.parametrize("how", ["empty", "half", "large", "no phases", "first phase"])
@pytest.mark.parametrize("result", ["fail", "pass"])
def test_a_plan_is_no_go_where_its_documents_name_other_phases(launch, capsys, how, result):
    if result == "pass":
        let_pass(launch)
    path = launch / rundir.PLAN
    plan = path.read_text()
    held = json.loads(plan)
    texts = {
        "empty": "", "half": plan[: len(plan) // 2], "large": " " * (5 << 20),
        "no phases": json.dumps(held | {"phases": []}),
        "first phase": json.dumps(held | {"phases": held["phases"][:1]}),
    }  # fmt: skip
    path.write_text(texts[how])
    names = {
        "no phases": "plan.json names no phase",
        "first phase": "plan.json has the phases first, and plan_state.json has first, second",
    }
    wanted = names.get(how, "plan.json cannot be read as a JSON object")
    for command in ("check", "status", "watch --plain"):
        code, out = said(capsys, *command.split(), launch)
        assert (code, wanted in out) == (1, True), out
        assert "\ngo\n" not in out
    shown = said(capsys, "status", launch)[1]
    assert f"  > 1-second       completed  gates {'unknown' if result == 'pass' else 'failed'}" in (
        shown
    )


@pytest.mark.decision("go-run", "absent")
def test_a_run_directory_that_no_phase_names_is_named(passed, capsys):
    assert said(capsys, "check", passed)[0] == 0
    completed(passed / "2-third")
    code, out = said(capsys, "check", passed)
    assert (code, "plan.json has no phase with the directory 2-third" in out) == (1, True)


@pytest.mark.decision("go-run", "lie")
def test_a_run_whose_gates_were_taken_out_of_two_documents_is_no_go(launch, capsys):
    run = launch / "1-second"
    assert said(capsys, "check", run)[1].splitlines()[-1] == (
        "no go; toy/1-second: completed: all ranks done after step 20; gate steps_done failed "
        "(20, bound ≥ 20)"
    ), "the sentence names the gate"
    directory.change(run / rundir.RUN, gates={})
    directory.document(run / rundir.GATES, {"v": 1, "result": "pass", "gates": []})
    for path in (run, launch):
        code, out = said(capsys, "check", path)
        assert code == 1
    code, out = said(capsys, "check", run)
    assert "run.json has other gates than its phase in plan.json" in out
    assert "its gates are failed in plan_state.json" in out


def test_the_row_of_an_unconfirmed_phase_shows_unknown_gates(passed, capsys):
    directory.change(passed / "0-first" / rundir.SUPERVISOR, state="running")
    _, out = said(capsys, "status", passed)
    assert "no go: first: its state is running in supervisor.json" in out
    assert "0-first        completed  gates unknown" in out
    assert "1-second       completed  gates passed" in out


# --- living processes ---------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["empty", "no phases", "no index", "ended", "other run"])
def test_a_run_whose_processes_live_is_unsupervised_whatever_plan_state_says(alone, capsys, how):
    path = alone / rundir.PLAN_STATE
    held = rundir.read_json(path) or {}
    if how == "empty":
        path.write_text("")
    elif how == "ended":
        directory.change(path, state="ended", why="all phases are done")
    elif how == "other run":
        directory.change(completed(alone / "1-second") / rundir.SUPERVISOR, workers=[])
        directory.change(path, state="running", phase=1)
    else:
        key = {"no phases": "phases", "no index": "phase"}[how]
        directory.document(path, {name: held[name] for name in held if name != key})
    state = RunSource(alone).poll()
    assert (state.state, status_text.is_over(state)) == ("unsupervised", False), state.why
    code, out = said(capsys, "status", alone)
    assert (code, "rank 0 still runs" in out) == (1, True)
    assert state.launch.state == ("unknown" if how == "empty" else "unsupervised")
    if how == "ended":
        assert "plan_state.json says that the launch has ended, but" in out
    assert said(capsys, "halt", alone)[0] == 0
    assert (alone / "0-first" / rundir.HALT).exists()
    if how != "empty":
        _, err = said(capsys, "adopt", alone)
        assert "has ended" not in err


@pytest.mark.parametrize("where", ["document", "event", "status", "launch"])
def test_an_end_does_not_count_while_ranks_are_alive(alone, shared_memory, where):
    run, now = alone / "0-first", time.time() + 1
    end = {"v": 1, "ts": now, "state": "crashed", "why": "rank 0 is gone"}
    alert = {"alert": "rank-gone", "ts": now, "level": "crit", "text": "rank 0 is gone"}
    if where == "document":
        directory.change(run / rundir.SUPERVISOR, state="crashed")
    elif where == "event":
        directory.event(run, **({"kind": "state"} | end))
        directory.event(run, "alert", **alert)
    elif where == "status":
        directory.change(run / rundir.SUPERVISOR, live_dir=str(shared_memory), **rundir.identity())
        directory.document(shared_memory / rundir.LIVE_STATUS, end | {"alerts": [alert]})
    else:
        phases = [{"name": "first", "state": "crashed", "ended_ts": now, "dir": "0-first"},
                  {"name": "second", "state": "later"}]  # fmt: skip
        directory.change(alone / rundir.PLAN_STATE, phases=phases, state="ended")
    state = RunSource(alone).poll()
    expected = ("running", 0) if where == "status" else ("unsupervised", 1)
    assert (state.state, status_text.exit_code(state, True)) == expected, state.why
    assert "rank-gone" not in {each.id for each in state.alerts}


def test_a_lost_rank_by_an_alert_and_the_kernel_is_a_crash(tmp_path):
    path = directory.launch(tmp_path)
    dead = {"rank": 0, **rundir.identity(), **directory.DEAD, "exit": None}
    run = directory.run(path / "0-first", workers=[dead])
    directory.event(run, "alert", alert="rank-gone", level="crit", text="rank 0 is gone")
    assert status_text.exit_code(RunSource(path).poll()) == 5


# --- records that are not read ------------------------------------------------------------------


def test_skipped_records_name_the_part_that_was_read(passed, capsys):
    path = rundir.heartbeat(passed / "0-first", 0)
    path.write_bytes(b"garbage\n" * 50_000 + path.read_bytes())
    state = RunSource(passed / "0-first").poll()
    lines = " ".join(status_text.status_lines(state))
    assert f"at least {state.skipped_records:,} records cannot be read" in lines
    assert "(in the newest 256 KiB of each file) and are skipped" in lines
    whole = RunSource(passed / "0-first", reads="all").poll()
    whole_lines = " ".join(status_text.status_lines(whole))
    assert " 50,000 records cannot be read and are skipped" in whole_lines
    one = dataclasses.replace(state, skipped_records=1, skipped_in="")
    assert "  1 record cannot be read and is skipped" in status_text.status_lines(one)


def test_a_sparse_file_does_not_block_the_others(passed):
    run = passed / "0-first"
    os.truncate(rundir.heartbeat(run, 0), 1 << 40)
    directory.sample(run)
    for reads in get_args(Reads):
        source = RunSource(run, reads=reads)
        source.poll()
        state = source.poll()
        assert (state.behind_bytes, "load1" in state.figures) == (0, True)
    state = RunSource(run, limit_bytes=1 << 9, reads="all").poll()
    assert state.behind_bytes > 1 << 30
    (text,) = [alert.text for alert in state.alerts if alert.id == "behind"]
    assert text == "1,024.0 GiB of records are not read yet"


def test_an_answer_after_a_hole_is_found(passed):
    path = passed / rundir.EVENTS
    path.touch()
    os.truncate(path, 1 << 40)
    directory.event(passed, "answer", request="a-1", ok=True, text="done")
    assert (actions.answer(passed, "a-1", 30.0) or {})["text"] == "done"
