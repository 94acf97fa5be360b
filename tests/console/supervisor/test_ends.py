"""Ends of runs: a hang that is stopped, a launcher that dies. Real signals, real torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from console.sources import process
from tests.launches import PROGRAMS, phase, write_plan
from trainers.contract import heartbeat, jsonl, rundir

LAUNCHER = """
import sys, time
from pathlib import Path
from console import actions
options = actions.LaunchOptions(plan=sys.argv[1], root=Path(sys.argv[2]))
print(actions.launch(options, "tester"), flush=True)
time.sleep(600)
"""


def test_a_rank_that_hangs_is_named_with_who_waits_and_term_to_the_supervisor_stops_all(begin):
    started = begin(
        phase("one", "member.py", 100_000, "hang"), phase("two", "member.py", 5),
        watch={"stall_floor_s": 2, "startup_s": 60, "grace_s": 2},
    )  # fmt: skip
    verdict = started.wait_state("stalled")["verdict"]
    assert (verdict["rank"], verdict["cause"], verdict["sure"]) == (1, "slowest-rank", "medium")
    assert (verdict["phase"], verdict["step"]) == ("forward", 30)
    assert "rank 1 has been stalled in forward of step 30" in verdict["sentence"]
    assert "rank 0 waits in backward" in verdict["sentence"]
    answer = started.ask("halt")["text"]
    assert answer.startswith(".HALT is written; the run is stalled")
    assert "stop ends it now" in answer
    os.kill(started.owner["pid"], signal.SIGTERM)
    ended = started.wait_end(20)
    assert started.state()["state"] == "stopped"
    assert "SIGTERM to the supervisor" in ended["why"]
    assert not process.with_token(started.token())


def test_a_run_outlives_its_launcher_and_completes_with_whole_records(begin, tmp_path):
    """The launcher is killed, and its session gets SIGHUP, right after the launch began."""
    gates = {"steps_done": 59, "loss_finite": True}
    plan = write_plan(tmp_path, phases=[phase("one", "member.py", 60, gates=gates)])
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(plan), str(tmp_path)], stdout=subprocess.PIPE,
        text=True, start_new_session=True, cwd=PROGRAMS.parents[1],
    )  # fmt: skip
    started = begin.adopt(launcher.stdout.readline().strip())
    for number in (signal.SIGHUP, signal.SIGKILL):
        os.killpg(launcher.pid, number)
    launcher.wait()
    ended = started.wait_end()
    assert ended["why"] == "all phases are done"
    assert [(p["state"], p["result"]) for p in ended["phases"]] == [("completed", "pass")]
    changes = [e["state"] for e in started.events(0) if e["kind"] == "state"]
    assert changes == ["running", "completed"]
    reader = jsonl.Tail(rundir.heartbeat(started.run(), 0), heartbeat.accept)
    assert reader.poll()
    assert reader.skipped == 0


def test_a_torchrun_that_rejects_its_command_line_is_quoted(begin, tmp_path):
    module = tmp_path / "torch" / "distributed" / "run.py"
    module.parent.mkdir(parents=True)
    for folder in module.parents[:2]:
        (folder / "__init__.py").touch()
    module.write_text("import argparse\nargparse.ArgumentParser('torchrun').parse_args()\n")
    started = begin(phase("one", "member.py", 5), shell={"PYTHONPATH": str(tmp_path)})
    started.wait_end()
    assert started.state()["state"] == "crashed"
    why = started.state()["why"]
    assert why.startswith("torchrun started no rank: torchrun: error: unrecognized arguments")


def test_torchrun_before_torch_2_12_gets_no_shutdown_timeout(tmp_path):
    """It rejects the option: with torch 2.11 no launch could start."""
    program = (
        "from pathlib import Path\nfrom console.supervisor.launch_spec import argv\n"
        "from trainers.contract.plan import Phase\n"
        "print(argv(Phase(name='one', module='trainers.ddp'), 5.0, Path('logs')))"
    )
    for version, expected in (("2.11.0", False), ("2.12.0a0+git1", True), ("3.0", True)):
        folder = tmp_path / version / f"torch-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True,
            cwd=PROGRAMS.parents[1], env=os.environ | {"PYTHONPATH": str(folder.parent)},
        )  # fmt: skip
        assert ("--shutdown-timeout" in done.stdout) is expected, version
