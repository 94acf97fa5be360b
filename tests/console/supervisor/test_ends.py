"""How runs end: killed, raised, deaf to TERM, orphaned, stopped. Real signals, real torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from console.sources import process
from trainers.contract import heartbeat, jsonl, rundir

from .conftest import PROGRAMS, phase, write_plan


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
    assert "stop ends them" in answer
    os.kill(started.plan_state["supervisor"]["pid"], signal.SIGTERM)
    ended = started.wait_end(20)
    assert started.state()["state"] == "stopped"
    assert "SIGTERM to the supervisor" in ended["why"]
    assert not process.with_token(started.token())


@pytest.fixture(scope="module")
def orphan(begin, tmp_path_factory):
    """A launch whose launcher was killed, and whose session got SIGHUP, right after it began."""
    folder = tmp_path_factory.mktemp("orphan")
    plan = write_plan(folder, phases=[
        phase("one", "member.py", 60, gates={"steps_done": 59, "loss_finite": True}),
    ])  # fmt: skip
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom console import actions\n"
        f"o = actions.LaunchOptions(plan={str(plan)!r}, root=Path({str(folder)!r}))\n"
        "print(actions.launch(o, 'tester'), flush=True)\ntime.sleep(600)\n"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True,
        start_new_session=True, cwd=PROGRAMS.parents[1],
    )  # fmt: skip
    path = launcher.stdout.readline().strip()
    os.killpg(launcher.pid, signal.SIGHUP)
    os.killpg(launcher.pid, signal.SIGKILL)
    launcher.wait()
    return begin.adopt(path)


def test_a_run_outlives_its_launcher_and_completes(orphan):
    ended = orphan.wait_end()
    assert [p["state"] for p in ended["phases"]] == ["completed"]
    assert ended["why"] == "all phases are done"
    assert ended["phases"][0]["result"] == "pass"


def test_the_state_changes_are_all_in_the_events(orphan):
    changes = [e["state"] for e in orphan.events(0) if e["kind"] == "state"]
    assert changes == ["running", "completed"]


def test_nothing_is_left_unread_in_the_heartbeats(orphan):
    reader = jsonl.Tail(rundir.heartbeat(orphan.run(), 0), heartbeat.accept)
    assert reader.poll()
    assert reader.skipped == 0
