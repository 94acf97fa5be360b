"""How runs end: killed, raised, deaf to TERM, orphaned, stopped. Real signals, real torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from console.sources import process
from trainers.contract import rundir
from trainers.contract.heartbeat import tail

from .conftest import PROGRAMS, phase, write_plan


def test_a_killed_rank_is_named_with_its_signal_and_its_peer_is_not_blamed(begin):
    started = begin(phase("one", "member.py", 100_000))
    started.wait_steps(3)
    victim = started.pids()[1]
    os.kill(victim, signal.SIGKILL)
    begun = time.time()
    ended = started.wait_state("crashed", timeout_s=3 + 3)
    assert ended["why"].startswith("rank 1 was killed by SIGKILL at step ")
    exits = {w["rank"]: w["exit"] for w in ended["workers"]}
    assert exits[1]["signal"] == "SIGKILL"
    assert exits[1]["ts"] - begun < 2
    assert started.wait_end()["phases"][0]["state"] == "crashed"
    assert not process.with_token(started.token())


def test_a_rank_that_raises_is_named_with_its_exception(begin):
    started = begin(
        phase("one", "member.py", 100_000, "raise", gates={"steps_done": 10}),
        phase("two", "member.py", 5),
    )
    ended = started.wait_end()
    assert started.state()["state"] == "crashed"
    assert "rank 1: ValueError: the batch of step 5 is broken" in started.state()["why"]
    assert [p["state"] for p in ended["phases"]] == ["crashed", "later"]
    assert not list(started.path.glob("1-*"))
    gate = rundir.read_json(started.run() / rundir.GATES)["gates"][0]
    assert gate["result"] == "fail"


def test_stop_kills_what_ignores_term_or_is_stopped_and_leaves_no_process(begin):
    started = begin(phase("one", "member.py", 100_000, "deaf"))
    started.wait_steps(3)
    os.kill(started.pids()[1], signal.SIGSTOP)
    token, begun = started.token(), time.monotonic()
    assert len(process.with_token(token)) >= 3
    assert started.ask("stop")["ok"]
    assert "under way" in started.ask("stop", started.run())["text"]
    ended = started.wait_end(20)
    assert time.monotonic() - begun < 3 + 2
    assert not process.with_token(token)
    assert started.state()["state"] == "stopped"
    assert ended["phases"][0]["state"] == "stopped"
    assert not rundir.is_alive(started.state()["torchrun"] | {
        "host": rundir.host_name(), "boot_id": rundir.boot_id(),
    })  # fmt: skip


def test_ranks_that_outlive_torchrun_go_on_and_leave_real_exits(begin):
    started = begin(phase("one", "member.py", 100_000))
    started.wait_steps(2)
    os.kill(started.state()["torchrun"]["pid"], signal.SIGKILL)
    alert = started.wait(lambda: [e for e in started.events(0) if e["kind"] == "alert"], 10)
    assert "torchrun" in alert[0]["text"]
    step = started.samples()[-1]["ranks"][0]["pulse"]["step"]
    started.wait(lambda: started.samples()[-1]["ranks"][0]["pulse"]["step"] > step + 10)
    assert started.ask("halt")["ok"]
    started.wait_end()
    ended = started.state()
    assert ended["state"] == "halted"
    assert [w["exit"]["code"] for w in ended["workers"]] == [0, 0]


def test_a_rank_that_hangs_is_named_with_who_waits_and_term_to_the_supervisor_stops_all(begin):
    started = begin(
        phase("one", "member.py", 100_000, "hang"), phase("two", "member.py", 5),
        watch={"stall_floor_s": 2, "startup_s": 60, "grace_s": 2},
    )  # fmt: skip
    verdict = started.wait_state("stalled")["verdict"]
    assert (verdict["rank"], verdict["cause"], verdict["sure"]) == (1, "behind", "high")
    assert (verdict["phase"], verdict["step"]) == ("forward", 30)
    assert "rank 1 is behind: in forward of step 30" in verdict["sentence"]
    assert "rank 0 waits in backward" in verdict["sentence"]
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
    reader = tail(rundir.heartbeat(orphan.run(), 0))
    assert reader.poll()
    assert reader.skipped == 0
