"""A run with gates is go only if gates.json and the records agree."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import asdict

import pytest

from console.cli import main
from console.plans.gate_check import poll_confirmed
from console.plans.gates import evaluate, overall
from console.sources import gate_files
from console.sources.run import RunSource
from tests.console.sources import directory
from tests.console.sources.snapshots import Observer
from tests.console.sources.written_runs import is_used
from trainers.contract import rundir

BOUNDS = {"steps_done": 20, "loss_finite": True, "no_stall": True}
PASSED = [
    {"name": "steps_done", "value": 20.0, "bound": "≥ 20", "result": "pass"},
    {"name": "loss_finite", "value": 0.0, "bound": "= 0", "result": "pass"},
    {"name": "no_stall", "value": 0.0, "bound": "= 0", "result": "pass"},
]


def completed(path, **losses):
    """Writes a completed run with a gates.json in which every gate passed."""
    return directory.completed(
        path, BOUNDS, PASSED, figures=lambda step: {"loss": losses.get(f"step{step}", 1.0)}
    )


def plan_gates(path, gates, *phases):
    for index in phases or (0, 1):
        directory.change_at(path / rundir.PLAN, "phases", index, "gates", to=gates)


@pytest.fixture
def launch(tmp_path):
    path = directory.launch(tmp_path)
    for name in ("0-first", "1-second"):
        completed(path / name)
    plan_gates(path, BOUNDS)
    directory.end(path)
    return path


def said(capsys, *words):
    """Returns exit code and all output of a command."""
    code = main([str(word) for word in words])
    told = capsys.readouterr()
    return code, told.out + told.err


@pytest.mark.decision("go-run", "lie")
def test_an_event_or_a_plan_state_does_not_make_a_crashed_run_a_good_one(launch, capsys):
    run = launch / "1-second"
    document = rundir.read_json(run / rundir.SUPERVISOR) or {}
    worker = document["workers"][0] | {"exit": {"code": None, "signal": "SIGKILL", "ts": 1.0}}
    crashed = document | {"state": "crashed", "workers": [worker], "updated_ts": time.time() - 9}
    directory.document(run / rundir.SUPERVISOR, crashed)
    directory.event(run, "state", attempt=1, state="completed", ts=time.time() + 1)
    directory.event(run, "state", attempt=1, state="completed", ts=time.time() + 1e6)
    assert said(capsys, "check", run)[0] == 5
    assert said(capsys, "check", launch)[0] != 0
    directory.document(run / rundir.SUPERVISOR, crashed | {"state": "completed"})
    code, out = said(capsys, "check", run)
    assert (code, "rank 0: killed (SIGKILL)" in out) == (1, True)
    worker["exit"] |= {"code": 7, "signal": None}
    directory.change(run / rundir.SUPERVISOR, workers=[worker])
    code, out = said(capsys, "check", run)
    assert (code, "rank 0: exited (code 7)" in out) == (1, True)


def test_a_resumed_run_is_go_if_gates_json_has_the_bounds_of_its_own_steps(tmp_path, capsys):
    """The sums in the snapshot and those over all records begin at the same step."""
    bounds = {
        "steps_done": 1_000, "checkpoints_at_least": 10, "gpu_mem_growth_below_mib": 9,
        "gpu_mem_below_mib": {"bound": 99, "at": [100, 500, 1_000]},
    }  # fmt: skip
    run = directory.run(tmp_path / "0-first", 1, "completed", why="all ranks are done")
    directory.change(run / rundir.RUN, world=1, gates=bounds)
    directory.event(run, "state", attempt=1, state="completed")
    directory.beat(run, 0, 600, "resume")
    for step in range(620, 1_001, 20):
        directory.beat(run, 0, step, gpu_mem_reserved=9.0)
        if step % 100 == 0:
            directory.beat(run, 0, step, "checkpoint")
    directory.beat(run, 0, 1_000, "exit", exit_code=0)
    observer = Observer(run)
    observer.save()
    summary = observer.reducer.summary
    summary.world, summary.attempts, summary.stalls = 1, 1, 0
    found = evaluate(summary, bounds)
    rows = {gate.name: gate.bound for gate in found}
    assert rows.keys() - bounds.keys() == {"gpu_mem_below_mib@1000"}
    assert (overall(found), rows["checkpoints_at_least"]) == ("pass", "≥ 4")
    gates_json = {"v": 1, "result": "pass", "gates": [asdict(gate) for gate in found]}
    directory.document(run / rundir.GATES, gates_json)
    assert is_used(run)
    for more in ((), ("--full",)):
        code, out = said(capsys, "check", run, *more)
        assert (code, out.splitlines()[-1]) == (0, "go"), out
        assert "@100 " not in out
    heartbeat = rundir.heartbeat(run, 0)
    heartbeat.write_bytes(heartbeat.read_bytes().partition(b"\n")[2])
    code, out = said(capsys, "check", run)
    assert code == 1, "without the record `resume` the run needs all 10 checkpoints"


@pytest.mark.decision("go-run", "true")
def test_it_is_go_when_both_say_so(launch, capsys):
    for path in (launch, launch / "0-first", launch / "1-second"):
        code, out = said(capsys, "check", path)
        assert (code, out.splitlines()[-1]) == (0, "go")
        assert said(capsys, "status", path)[0] == 0
        assert said(capsys, "watch", "--plain", path)[0] == 0


def test_a_plan_that_waits_is_go_so_far_and_names_what_has_not_run(launch, capsys):
    shutil.rmtree(launch / "1-second")
    held = rundir.read_json(launch / rundir.PLAN_STATE) or {}
    phases = [held["phases"][0], {"name": "second", "state": "next", "dir": "1-second"}]
    directory.change(launch / rundir.PLAN_STATE, state="waiting", phase=0, phases=phases)
    code, out = said(capsys, "check", launch)
    assert (code, out.splitlines()[-1]) == (0, "go so far; not started: second")


def test_a_screen_reads_the_logs_of_a_completed_run_only_once(launch, monkeypatch):
    run, calls, read = launch / "1-second", [], gate_files.read
    directory.change(run / rundir.RUN, gates=BOUNDS | {"no_log_errors": True})
    monkeypatch.setattr(gate_files, "read", lambda *given: calls.append(given) or read(*given))
    source = RunSource(run)
    for _ in range(3):
        poll_confirmed(source, former=False)
    assert len(calls) == 1


def lie(run, name):
    if name == "gates.json: a NaN in the records":
        os.unlink(rundir.heartbeat(run, 0))
        completed(run, step7="nan")
        return "gate loss_finite is passed in gates.json and failed by the records"
    if name == "gates.json: a stall in the events":
        directory.event(run, "alert", attempt=1, alert="stall", level="crit", text="stalled")
        return "gate no_stall is passed in gates.json and failed by the records (1 stall"
    if name == "gates.json: fewer steps in the records":
        directory.change(run / rundir.RUN, gates=BOUNDS | {"steps_done": 21})
        return "gate steps_done is passed in gates.json and failed by the records"
    if name == "gates.json: another bound":
        directory.change(run / rundir.GATES, gates=[PASSED[0] | {"bound": "≥ 10"}, *PASSED[1:]])
        return "gate steps_done has the bound ≥ 10 in gates.json and ≥ 20 by the records"
    path = rundir.heartbeat(run, 0)
    path.write_text(path.read_text().replace('"step":15,', '"step":900000,').replace('"n":16', "?"))
    return "record 16 is missing"


@pytest.mark.decision("go-run", "lie")
@pytest.mark.parametrize("where", ["0-first", "1-second"])
@pytest.mark.parametrize(
    "name",
    ["gates.json: a NaN in the records", "gates.json: a stall in the events",
     "gates.json: fewer steps in the records", "gates.json: another bound",
     "the records: a number that is not there"],
)  # fmt: skip
def test_it_is_no_go_when_they_disagree(launch, capsys, name, where):
    text = lie(launch / where, name)
    for path in (launch, launch / where):
        code, out = said(capsys, "check", path)
        assert code == 1
        assert out.splitlines()[-1].startswith("no go: ")
        assert text in out
        code, out = said(capsys, "status", path)
        assert (code, text in out) == (1, True), "the disagreement is on the screen"
        assert said(capsys, "watch", "--plain", path)[0] == 1
    (row,) = json.loads(said(capsys, "--root", launch.parents[1], "runs", "--json")[1])
    assert (row["exit_code"], row["state"]) == (1, "gate unknown")
    alerts = poll_confirmed(RunSource(launch / where), former=False).alerts
    assert [alert.level for alert in alerts if text in alert.text] == ["crit"]


@pytest.mark.decision("go-run", "absent")
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("heartbeat_rank0.jsonl", "no progress record of rank 0"),
        (rundir.EVENTS, "the number of attempts is not available"),
        (rundir.GATES, "gate loss_finite is not in gates.json"),
        (rundir.RUN, "run.json cannot be read"),
    ],
)
def test_it_is_no_go_when_one_of_them_is_missing(launch, capsys, name, text):
    for where in ("0-first", "1-second"):
        run = launch / where
        held = (run / name).read_bytes()
        (run / name).unlink()
        for path in (launch, run):
            code, out = said(capsys, "check", path)
            assert (code, text in out) == (1, True), (path, out)
        (run / name).write_bytes(held)
    assert said(capsys, "check", launch)[0] == 0


def test_a_run_without_gates_is_judged_by_its_exits(launch, capsys):
    run = launch / "1-second"
    directory.change(run / rundir.RUN, gates=...)
    (run / rundir.GATES).unlink()
    rundir.heartbeat(run, 0).unlink()
    plan_gates(launch, {}, 1)
    assert said(capsys, "check", launch)[0] == 0
    code, out = said(capsys, "status", launch)
    assert (code, "1-second       completed  no gates" in out) == (0, True), out
    assert said(capsys, "check", run) == (0, "go; no gates\n")


@pytest.mark.decision("go-run", "absent")
def test_a_run_without_its_launch_needs_both_documents_unless_it_was_started_by_hand(
    launch, capsys, tmp_path
):
    run = shutil.copytree(launch / "1-second", tmp_path / "apart")
    directory.change(run / rundir.RUN, gates=...)
    (run / rundir.GATES).unlink()
    for name in (rundir.RUN, rundir.SUPERVISOR):
        held = (run / name).read_bytes()
        (run / name).unlink()
        code, out = said(capsys, "check", run)
        assert (code, f"{name} cannot be read" in out) == (1, True), out
        (run / name).write_bytes(held)
    assert said(capsys, "check", run) == (0, "go; no gates\n")
    for name in (rundir.RUN, rundir.SUPERVISOR):
        (run / name).unlink()
    assert said(capsys, "check", run) == (0, "go; no gates\n")
