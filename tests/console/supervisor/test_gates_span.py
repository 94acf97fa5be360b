"""Gates of runs that were restarted, adopted or damaged, and the phase after these runs."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from console.cli import main
from tests.launches import STUB, phase
from trainers.contract import rundir

TWICE = """
import os, signal, sys, time
from trainers.contract.member import join
run = join()
first = run.attempt == 1
for step in range(1, 100_000 if first else 21):
    time.sleep(0.02)
    loss = float("nan") if first and step == 5 else 1.0 / step
    if run.step(step, loss=loss, grad_norm=1.0):
        break
    if first and os.path.exists(sys.argv[1]):
        run.recorder.close()  # a kill from outside can lose the last records
        os.kill(os.getpid(), signal.SIGKILL)
"""
DONE = """
import os, sys
from trainers.contract.member import join
from trainers.contract.recorder import Recorder
mode = sys.argv[1]
if mode == "no records":  # no file at any moment: a supervisor may read between any two writes
    Recorder.put = lambda *_, **__: True
run = join()
put, count = run.recorder.put, 0
def drop(path, record, keep=False):
    global count
    count += 1
    return count == 5 or put(path, record, keep)
if mode == "hole":
    run.recorder.put = drop
for step in range(1, 13):
    run.step(step, loss=1.0)
if mode == "exit 3":
    run.close(12, exit_code=0)
    os._exit(3)
"""

SPEED = """
import os, sys, time
from trainers.contract.member import join
run = join()
if sys.argv[1] == "ill" and run.rank == 1:
    print("ncclInternalError: planted \\x1b[2J", flush=True)
for step in range(1, 201):
    time.sleep(0.02)
    run.step(step, loss=1.0, toks_per_s=run.world * 100.0, dt_fetch_s=9.0)
while not os.path.exists(sys.argv[2]):
    time.sleep(0.02)
"""


def script(folder: Path, text: str) -> str:
    path = folder / "program.py"
    path.write_text(text)
    return str(path)


def test_nan_stall_and_crash_of_the_first_attempt_fail_the_gates_of_the_run(
    begin, tmp_path, capsys
):
    """The supervisor that counted the stall is replaced; the next one continues the count."""
    bounds = {"steps_done": 20, "loss_finite": True, "no_stall": True, "restarts_at_most": 0,
              "stalls_at_most": 1, "grad_norm_above": 0}  # fmt: skip
    end = tmp_path / "end"
    started = begin(
        {"name": "one", "script": script(tmp_path, TWICE), "args": [str(end)], "nproc": 1,
         "gates": bounds},
        phase("two", "member.py", 5), shell=STUB, restart={"when": "crash", "backoff_s": 0},
        watch={"stall_floor_s": 30, "grace_s": 3},  # the verdict on a stopped rank comes after 3 s
    )  # fmt: skip
    started.wait_steps(20)
    (pid,) = started.pids().values()
    os.kill(pid, signal.SIGSTOP)
    started.wait_state("stalled")
    started.replace_supervisor()
    started.wait(lambda: started.state()["verdict"])
    os.kill(pid, signal.SIGCONT)
    started.wait_state("running")
    end.touch()
    ended = started.wait_end()
    assert [p["state"] for p in ended["phases"]] == ["completed", "later"], ended["why"]
    assert ended["phases"][0]["result"] == "fail"
    held = {g["name"]: g for g in rundir.read_json(started.run() / rundir.GATES)["gates"]}
    found = {name: (gate["result"], gate["value"]) for name, gate in held.items()}
    assert found == {
        "steps_done": ("pass", 20), "loss_finite": ("fail", 1), "no_stall": ("fail", 1),
        "restarts_at_most": ("fail", 1), "stalls_at_most": ("pass", 1),
        "grad_norm_above": ("pass", 1),
    }, held  # fmt: skip
    assert held["no_stall"]["window"].startswith("all attempts")
    for command in ("check", "status"):
        assert main([command, str(started.path)]) == 1
    assert "\ngo\n" not in capsys.readouterr().out


def ended_with(begin, folder, mode):
    started = begin(
        {"name": "one", "script": script(folder, DONE), "args": [mode], "nproc": 1,
         "gates": {"no_stall": True, "steps_done": 12}},
        phase("two", "member.py", 3), shell=STUB,
    )  # fmt: skip
    return started, started.wait_end()


@pytest.mark.decision("next-phase", "true")
def test_the_next_phase_starts_when_exits_and_whole_records_say_so(begin, tmp_path):
    started, ended = ended_with(begin, tmp_path, "whole")
    assert [p["state"] for p in ended["phases"]] == ["completed", "completed"], ended["why"]
    assert main(["check", str(started.path)]) == 0
    report = started.path / "report.md"
    started.wait(lambda: "**go**" in report.read_text())


@pytest.mark.parametrize(
    ("mode", "state", "why"),
    [
        pytest.param("exit 3", "crashed", "crashed: rank 0",
                     marks=pytest.mark.decision("next-phase", "lie")),
        pytest.param("hole", "completed",
                     "unknown (0 stalls, bound = 0): rank 0, attempt 1: record 6 is",
                     marks=pytest.mark.decision("next-phase", "lie")),
        pytest.param("no records", "completed", "gate no_stall unknown",
                     marks=pytest.mark.decision("next-phase", "absent")),
    ],
)  # fmt: skip
def test_the_plan_ends_where_exits_and_records_disagree(begin, tmp_path, mode, state, why):
    _, ended = ended_with(begin, tmp_path, mode)
    assert [p["state"] for p in ended["phases"]] == [state, "later"]
    assert why in ended["why"]


def test_gates_at_a_step_of_the_logs_and_of_the_phase_before(begin, tmp_path):
    program, late = script(tmp_path, SPEED), {"bound": 5, "at": 100, "override": "It is planted."}
    seen = [tmp_path / name for name in ("single", "both")]
    started = begin(
        {"name": "single", "script": program, "args": ["well", str(seen[0])], "nproc": 1,
         "gates": {"toks_per_s_50_above": 1, "no_log_errors": True, "fetch_below_s": late}},
        {"name": "both", "script": program, "args": ["ill", str(seen[1])], "nproc": 2,
         "gates": {"scaling_above": 0.3, "no_log_errors": True, "heartbeats_complete": True,
                   "fetch_below_s": {"bound": 5, "at": 100}}}, shell=STUB,
    )  # fmt: skip
    started.wait(lambda: "fetch_below_s@100" in str(started.events(0)))
    seen[0].touch()
    started.wait(lambda: started.alerts("gate-fetch_below_s@100", 1))
    seen[1].touch()
    ended = started.wait_end()
    assert [(p["name"], p["result"]) for p in ended["phases"]] == [
        ("single", "pass"), ("both", "fail"),
    ], ended["why"]  # fmt: skip
    held = rundir.read_json(started.run(1) / rundir.GATES) or {}
    found = {gate["name"]: (gate["result"], gate["value"]) for gate in held["gates"]}
    assert found.pop("scaling_above")[0] == "pass", held
    assert found == {
        "no_log_errors": ("fail", 1), "heartbeats_complete": ("pass", 0),
        "fetch_below_s": ("fail", 9), "fetch_below_s@100": ("fail", 9),
    }  # fmt: skip
    (alert,) = (e for e in started.alerts("gate-fetch_below_s@100", 1) if e["kind"] == "alert")
    assert alert["level"] == "crit"
    assert not started.alerts("gate-fetch_below_s@100", 0), "the gate has an override"
    assert any("fetch_below_s@100" in event["text"] for event in started.events(0))
    assert main(["check", str(started.path)]) == 1
    assert main(["check", str(started.run(0))]) == 0
    report = started.path / "report.md"
    started.wait(lambda: "It is planted." in report.read_text())
