"""Adoptions of a run whose ranks are alive, and those that are rejected."""

from __future__ import annotations

import os
import secrets

import pytest

from console import actions
from console.sources.run import RunSource
from console.supervisor import former_documents
from tests.console.sources import directory
from tests.launches import PROGRAMS, STUB, phase, sleeping
from trainers.contract import environ, jsonl, rundir
from trainers.contract.errors import RefusedError

FOREIGN_TOKEN = secrets.token_hex(8)


@pytest.fixture(scope="module")
def lost(begin):
    """A run whose supervisor has died and whose ranks are alive."""
    started = begin(phase("one", "member.py", 100_000), shell=STUB)
    started.wait_steps(3)
    started.kill_supervisor()
    return started


def refused_with(launch, path, changed, says):
    """Checks that an adoption is rejected while one document of the launch is changed."""
    record = rundir.read_json(path)
    rundir.write_json(path, record | changed)
    try:
        with pytest.raises(RefusedError, match=says):
            actions.adopt(launch.path)
    finally:
        rundir.write_json(path, record)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"supervisor": directory.ELSEWHERE}, "adopt it there"),
        ({"supervisor": {"boot_id": "before"}}, "add --yes to confirm"),
        ({"v": 99}, "of another version"),
        ({"state": "ended"}, "says that no phase runs, but in 0-one ranks 0-1 still run; kill "),
    ],
)
def test_a_launch_of_another_host_boot_version_or_state_is_not_adopted(lost, changed, says):
    state = lost.plan_state
    merged = {key: state[key] | value if isinstance(value, dict) else value
              for key, value in changed.items()}  # fmt: skip
    refused_with(lost, lost.path / rundir.PLAN_STATE, merged, says)


def test_the_token_of_another_run_is_refused_and_its_processes_are_left_alone(lost):
    environment = rundir.read_json(lost.run() / rundir.RUN)["environment"]
    forged = {"environment": environment | {environ.TOKEN: FOREIGN_TOKEN}}
    foreign = {environ.TOKEN: FOREIGN_TOKEN, environ.RUN_DIR: "/elsewhere/0-x"}
    with sleeping(**foreign) as other:
        path = lost.run() / rundir.RUN
        refused_with(lost, path, forged, "contains the token of another run")
        assert other.poll() is None
        other.kill()


def test_a_plan_that_starts_another_program_than_the_run_is_not_adopted(lost):
    path = lost.path / rundir.PLAN
    evil = rundir.read_json(path)["phases"][0] | {"script": str(PROGRAMS / "ends.py")}
    refused_with(lost, path, {"phases": [evil]}, "differ in argv; the launch is not adopted")


def test_stalls_of_a_former_supervisor_are_the_most_that_document_and_events_say(tmp_path):
    stall = {"kind": "alert", "alert": "stall", "ts": 1.0}
    (tmp_path / rundir.EVENTS).write_bytes(jsonl.encode(stall) * 2)
    for written, counted in ((0, 2), (5, 5)):
        state = {"attempt": 1, "stalls": written}
        assert former_documents.summary(state, tmp_path, 1, 1).stalls == counted
    assert former_documents.summary({"attempt": 1}, tmp_path, 1, 1).stalls is None


def test_a_stall_that_an_adoption_raises_again_counts_once(tmp_path):
    first = {"kind": "alert", "alert": "stall", "ts": 100.0, "since_ts": 90.0}
    again, later = first | {"ts": 120.0, "since_ts": 90.1}, first | {"ts": 150.0, "since_ts": 130.0}
    clear = {"kind": "clear", "alert": "stall", "ts": 125.0}
    for events, counted, open_ts in (
        ([first, again, again, clear], 1, 0.0),
        ([first, again, clear, later], 2, 150.0),
        ([first, again, later], 2, 150.0),  # no supervisor saw the end of the first stall
    ):
        (tmp_path / rundir.EVENTS).write_bytes(b"".join(map(jsonl.encode, events)))
        found = former_documents.summary({"attempt": 1, "stalls": 1}, tmp_path, 1, 1)
        assert (found.stalls, found.stalled_ts) == (counted, open_ts)


def test_living_processes_count_and_not_a_document_that_lags_behind_or_holds_garbage(lost):
    pids, state = lost.pids(), lost.state()
    (lost.run() / rundir.EVENTS).unlink()
    os.mkfifo(lost.run() / rundir.EVENTS)
    wrong = {"rank": 0, "pid": [1], "start_ticks": {}}
    garbage = {"torchrun": {"pid": {}}, "workers": [wrong, 7], "attempt": 0}
    rundir.write_json(lost.run() / rundir.SUPERVISOR, state | garbage)
    actions.adopt(lost.path)
    assert lost.wait(lambda: lost.state()["pid"] != state["pid"] and lost.pids()) == pids
    step = lost.wait(
        lambda: RunSource(lost.path).poll().step
    )  # 150 steps last longer than `LEFTOVER_GRACE_S`
    lost.wait(lambda: (RunSource(lost.path).poll().step or 0) > step + 150)
    assert lost.state()["state"] == "running"
    assert lost.ask("halt")["ok"]
    assert lost.wait_end()["phases"][0]["state"] == "halted"
    assert [w["exit"]["code"] for w in lost.state()["workers"]] == [0, 0]
