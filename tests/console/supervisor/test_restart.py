"""Runs that are started again: by their policy, and by a new supervisor. Real processes."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import threading
import time

import pytest

from console import actions, status_text
from console.model import State
from console.sources import process
from console.sources.run import RunSource
from console.supervisor import recovery, restart
from console.supervisor.restart import Again, Ended
from tests.launches import PROGRAMS, STUB, phase
from trainers.contract import environ, jsonl, rundir
from trainers.contract import plan as plans
from trainers.contract.errors import ContractError, RefusedError
from trainers.contract.plan import Restart

CRASH = Restart("crash", attempts=3, backoff_s=10)


def crashed(checkpoint=0, state: State = "crashed", **more):
    return Ended(state, "why", checkpoint, **more)


@pytest.mark.parametrize("state", ["halted", "stopped", "killed", "completed"])
def test_what_somebody_ended_is_not_started_again(state):
    assert restart.after([crashed(state=state)], CRASH) == ""


def test_nothing_is_started_again_without_a_policy():
    assert restart.after([crashed()], Restart()) == ""


def test_the_back_off_doubles_without_progress_and_begins_anew_with_it():
    ended = [crashed()]
    waits = []
    for checkpoint in (0, 20, 20, 40):
        again = restart.after(ended, CRASH)
        assert isinstance(again, Again)
        waits.append(again.wait_s)
        ended.append(crashed(checkpoint))
    assert waits == [10, 20, 10, 10]
    assert restart.left(ended, CRASH, saved=41) == 3
    assert restart.left(ended, CRASH) == 2


def test_three_attempts_without_a_new_checkpoint_are_enough():
    ended = [crashed(20), crashed(20), crashed(20), crashed(20)]
    assert isinstance(restart.after(ended[:3], CRASH), Again)
    assert restart.after(ended, CRASH) == "not restarted: 3 attempts without a new checkpoint"
    assert restart.left(ended, CRASH) == 0


def test_the_same_error_twice_is_not_tried_again_unless_it_came_further():
    first, same = crashed(signature="x"), crashed(signature="x")
    assert "the same error twice" in str(restart.after([first, same], CRASH))
    for other in (crashed(5, signature="x"), crashed(signature="y"), crashed()):
        assert isinstance(restart.after([first, other], CRASH), Again)


def test_what_can_never_work_is_not_tried_twice():
    assert "same way" in str(restart.after([crashed(hopeless=True)], CRASH))


def test_what_was_ended_for_a_restart_is_restarted_where_there_is_a_policy():
    wanted = [crashed()]
    assert restart.after(wanted, Restart()) == ""
    assert isinstance(restart.after(wanted, Restart("stall")), Again)


def test_a_killed_rank_begins_a_new_attempt_with_its_own_logs_and_records(begin):
    started = begin(
        phase("one", "member.py", 150), restart={"when": "crash", "backoff_s": 0.5},
    )  # fmt: skip
    started.wait_steps(3)
    first = started.pids()
    os.kill(first[1], signal.SIGKILL)
    waiting = started.wait(
        lambda: [e for e in started.events(0) if e.get("state") == "restarting"]
    )  # fmt: skip
    assert "rank 1 was killed by SIGKILL" in waiting[0]["text"]
    assert "attempt 2 begins in 0.5 s from step 1" in waiting[0]["text"]
    again = started.wait(lambda: (s := started.state())["attempt"] == 2 and s["workers"] and s)
    assert "restart, 1 left" in again["armed"]
    assert again["armed_short"].endswith(" ↻1")
    ended = started.wait_end()
    assert ended["phases"][0]["state"] == "completed"
    assert set(started.pids().values()).isdisjoint(first.values())
    for attempt in (1, 2):
        assert (rundir.logs(started.run(), attempt) / rundir.TORCHRUN_LOG).exists()
    records = rundir.heartbeat(started.run(), 0).read_text()
    assert '"attempt":1' in records.replace(" ", "")
    assert '"attempt":2' in records.replace(" ", "")
    assert (RunSource(started.path).poll().attempt) == 2


def test_a_program_that_always_fails_is_given_up_and_halt_ends_the_waiting(begin):
    looping = begin(
        phase("one", "member.py", 100_000, "leave"), shell=STUB,
        restart={"when": "crash", "attempts": 2, "backoff_s": 0},
    )  # fmt: skip
    ended = looping.wait_end(90)
    assert "not restarted" in ended["why"]
    assert looping.state()["state"] == "crashed"
    waits = begin(
        phase("one", "member.py", 100_000, "leave"), shell=STUB,
        restart={"when": "crash", "backoff_s": 600},
    )  # fmt: skip
    waits.wait_state("restarting")
    assert waits.ask("halt")["ok"]
    assert waits.wait_end(10)["phases"][0]["state"] == "halted"
    assert not process.with_token(waits.token())


def test_a_new_supervisor_takes_over_what_lives_and_goes_on_with_the_plan(begin):
    started = begin(
        phase("one", "member.py", 250), phase("two", "member.py", 5), shell=STUB,
    )  # fmt: skip
    started.wait_steps(3)
    with pytest.raises(RefusedError, match="has a supervisor"):
        actions.adopt(started.path)
    owner, pids = started.plan_state["supervisor"]["pid"], started.pids()
    os.kill(owner, signal.SIGKILL)
    started.wait(lambda: RunSource(started.path).poll().state == "unsupervised", 10)
    assert "a new supervisor watches" in actions.adopt(started.run())
    state = started.wait(lambda: (s := started.state())["pid"] != owner and s)
    assert (state["state"], started.pids()) == ("running", pids)
    step = RunSource(started.path).poll().step
    started.wait(lambda: (RunSource(started.path).poll().step or 0) > step + 5)
    assert started.ask("dump")["ok"]
    ended = started.wait_end()
    assert [p["state"] for p in ended["phases"]] == ["completed", "completed"]
    with pytest.raises(RefusedError, match="has ended"):
        actions.adopt(started.path)


def test_ranks_that_lost_supervisor_and_torchrun_are_found_shown_and_reaped(begin):
    started = begin(phase("one", "member.py", 100_000), shell=STUB)
    started.wait_steps(3)
    token = started.token()
    owner = started.plan_state["supervisor"]
    os.kill(owner["pid"], signal.SIGKILL)
    os.kill(started.state()["torchrun"]["pid"], signal.SIGKILL)
    started.wait(lambda: not rundir.is_alive(owner), 10)
    actions.adopt(started.path)
    alert = started.wait(lambda: [e for e in started.events(0) if e.get("alert")], 10)
    assert "ranks 0, 1 still run" in alert[0]["text"]
    begun = time.monotonic()
    assert started.ask("stop")["ok"]
    assert started.wait_end(20)["phases"][0]["state"] == "stopped"
    assert time.monotonic() - begun < 15
    assert not process.with_token(token)


def test_a_rank_that_fails_after_torchrun_is_gone_ends_the_others_and_the_next_attempt_begins(
    begin,
):
    started = begin(
        phase("one", "member.py", 100_000), restart={"when": "crash", "backoff_s": 0.5},
        watch={"grace_s": 1}, shell=STUB,
    )  # fmt: skip
    started.wait_steps(3)
    os.kill(started.state()["torchrun"]["pid"], signal.SIGKILL)
    started.wait(lambda: [e for e in started.events(0) if e.get("alert") == "torchrun-gone"], 10)
    os.kill(started.pids()[1], signal.SIGKILL)
    state = started.wait(lambda: s if (s := started.state())["attempt"] == 2 else None, 20)
    assert "rank 1 was killed by SIGKILL" in state["ended"][0]["why"]
    assert started.ask("stop")["ok"]
    assert started.wait_end(20)["phases"][0]["state"] == "stopped"


def test_a_launch_that_ends_while_its_lock_is_waited_for_is_not_taken_over(begin):
    started = begin(phase("one", "member.py", 100_000), shell=STUB)
    started.wait_steps(1)
    state, pids = started.plan_state, started.pids()
    for pid in (state["supervisor"]["pid"], started.state()["torchrun"]["pid"], *pids.values()):
        os.kill(pid, signal.SIGKILL)
    started.wait(lambda: not process.with_token(started.token()), 10)
    started.wait(lambda: not rundir.is_alive(state["supervisor"]), 10)
    held = os.open(started.path / rundir.LOCK, os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)

    def end() -> None:
        rundir.write_json(started.path / rundir.PLAN_STATE, state | {"state": "ended"})
        os.close(held)

    threading.Timer(1.0, end).start()
    with pytest.raises(RefusedError, match="has ended; there is nothing to take over"):
        actions.adopt(started.path)


def test_what_was_asked_is_asked_again_by_who_takes_over(begin):
    """The supervisor dies in the grace of a stop: the next one ends what is deaf to TERM."""
    started = begin(
        phase("one", "member.py", 100_000, "deaf"), shell=STUB, restart="crash",
        watch={"grace_s": 4, "stall_floor_s": 60},
    )  # fmt: skip
    started.wait_steps(3)
    assert started.ask("stop")["ok"]
    owner = started.plan_state["supervisor"]
    started.wait(lambda: started.state()["asked"] == "stop")
    os.kill(owner["pid"], signal.SIGKILL)
    started.wait(lambda: not rundir.is_alive(owner), 10)
    actions.adopt(started.path)
    ended = started.wait_end(30)
    assert ended["phases"][0]["state"] == "stopped"
    assert not process.with_token(started.token())


@pytest.fixture(scope="module")
def lost(begin):
    """A run whose supervisor is gone and whose document lags behind."""
    started = begin(phase("one", "member.py", 100_000), shell=STUB)
    started.wait_steps(3)
    owner = started.plan_state["supervisor"]
    os.kill(owner["pid"], signal.SIGKILL)
    started.wait(lambda: not rundir.is_alive(owner), 10)
    return started


@pytest.mark.parametrize(
    ("changed", "says"),
    [({"host": "elsewhere"}, "adopt it there"), ({"boot_id": "before"}, "add --yes to mean it")],
)
def test_what_another_host_or_boot_supervised_is_not_taken_over(lost, changed, says):
    state = lost.plan_state
    rundir.write_json(
        lost.path / rundir.PLAN_STATE, state | {"supervisor": state["supervisor"] | changed}
    )
    with pytest.raises(RefusedError, match=says):
        actions.adopt(lost.path)
    rundir.write_json(lost.path / rundir.PLAN_STATE, state)


def test_the_token_of_another_run_is_refused_and_its_processes_are_left_alone(lost):
    other = subprocess.Popen(
        ["sleep", "60"], env={environ.TOKEN: "fedcba9876543210", environ.RUN_DIR: "/elsewhere/0-x"}
    )
    born = rundir.read_json(lost.run() / rundir.RUN)
    forged = born | {"environment": born["environment"] | {environ.TOKEN: "fedcba9876543210"}}
    try:
        rundir.write_json(lost.run() / rundir.RUN, forged)
        with pytest.raises(RefusedError, match="holds the token of another run"):
            actions.adopt(lost.path)
        assert other.poll() is None
    finally:
        rundir.write_json(lost.run() / rundir.RUN, born)
        other.kill()
        other.wait()


def test_a_plan_that_starts_another_program_than_the_run_is_not_taken_over(lost):
    plan = rundir.read_json(lost.path / rundir.PLAN)
    evil = plan["phases"][0] | {"script": str(PROGRAMS / "agent.py")}
    rundir.write_json(lost.path / rundir.PLAN, plan | {"phases": [evil]})
    try:
        with pytest.raises(RefusedError, match="nothing is taken over before they agree"):
            actions.adopt(lost.path)
    finally:
        rundir.write_json(lost.path / rundir.PLAN, plan)


def test_stalls_of_a_former_supervisor_are_the_most_that_document_and_events_say(tmp_path):
    stall = {"kind": "alert", "alert": "stall", "ts": 1.0}
    (tmp_path / rundir.EVENTS).write_bytes(jsonl.encode(stall) * 2)
    for told, counted in ((0, 2), (5, 5)):
        held = {"attempt": 1, "stalls": told}
        assert recovery.summary(held, tmp_path, 1, 1).stalls == counted
    assert recovery.summary({"attempt": 1}, tmp_path, 1, 1).stalls is None


def test_a_copy_is_not_taken_over_and_does_not_touch_the_processes_of_the_original(lost):
    copy = lost.path.with_name("copy")
    shutil.copytree(lost.path, copy)
    with pytest.raises(ContractError, match="is a copy or was moved"):
        actions.adopt(copy)
    assert set(lost.pids().values()) <= set(process.with_token(lost.token()))


def test_living_processes_are_believed_and_not_a_document_that_lags_behind(lost):
    pids = lost.pids()
    state = lost.state()
    rundir.write_json(
        lost.run() / rundir.SUPERVISOR, state | {"torchrun": None, "workers": [], "attempt": 0}
    )
    actions.adopt(lost.path)
    assert lost.wait(lambda: lost.state()["pid"] != state["pid"] and lost.pids()) == pids
    time.sleep(3)  # longer than leftover processes are given
    assert lost.state()["state"] == "running"
    assert lost.ask("halt")["ok"]
    assert lost.wait_end()["phases"][0]["state"] == "halted"
    assert [w["exit"]["code"] for w in lost.state()["workers"]] == [0, 0]


def test_the_policy_in_the_guide_is_one_that_a_plan_takes(tmp_path):
    guide = (PROGRAMS.parents[1] / "docs" / "guide.md").read_text()
    (line,) = [line.strip() for line in guide.splitlines() if line.strip().startswith("restart: {")]
    path = tmp_path / "plan.yaml"
    path.write_text(f"name: x\nphases: [{{name: one}}]\n{line}\n")
    assert plans.load(path).restart == Restart("crash", 3, 10.0)


def waiting(begin, backoff_s: float):
    """A run between two attempts, whose first ended because rank 1 left with 7."""
    started = begin(
        phase("one", "member.py", 100_000, "leave"), shell=STUB,
        restart={"when": "crash", "attempts": 2, "backoff_s": backoff_s},
    )  # fmt: skip
    started.wait_state("restarting")
    return started


@pytest.mark.slow
def test_who_takes_over_between_two_attempts_waits_on_and_knows_why(begin):
    started = waiting(begin, 4)
    owner, before = started.plan_state["supervisor"], started.state()
    time.sleep(1)
    os.kill(owner["pid"], signal.SIGKILL)
    started.wait(lambda: not rundir.is_alive(owner), 10)
    # A document alone refuses no restart for which the former supervisor waited.
    before["ended"] = [before["ended"][0] | {"hopeless": True}]
    rundir.write_json(started.run() / rundir.SUPERVISOR, before)
    actions.adopt(started.path)
    after = started.wait(lambda: (s := started.state())["pid"] != before["pid"] and s)
    assert (after["state"], after["why"]) == ("restarting", before["why"])
    assert after["ended"] == before["ended"]
    assert after["since_ts"] == before["since_ts"]
    ended = started.wait_end(60)
    assert "rank 1: no reason given" in ended["why"]
    assert "not restarted: 2 attempts without a new checkpoint" in ended["why"]
    assert started.state()["attempt"] == 2
    adopted, begun = (
        next(e["ts"] for e in started.events(0) if key in (e.get("state"), e["text"]))
        for key in ("a new supervisor watches this run", "starting")
    )
    assert begun - max(adopted, before["since_ts"] + 4) < 1.2


def test_a_run_that_lost_its_supervisor_between_two_attempts_is_not_over_and_takes_a_halt(
    begin, tmp_path
):
    script = tmp_path / "seven.py"
    script.write_text("import sys\nfrom trainers.contract.member import join\n"
                      "join().step(1)\nsys.exit(7)\n")  # fmt: skip
    started = begin(
        {"name": "one", "script": str(script), "nproc": 1}, shell=STUB,
        restart={"when": "crash", "attempts": 3, "backoff_s": 600},
    )  # fmt: skip
    started.wait_state("restarting")
    owner = started.plan_state["supervisor"]
    os.kill(owner["pid"], signal.SIGKILL)
    started.wait(lambda: not rundir.is_alive(owner), 10)
    state = RunSource(started.path).poll()
    assert (state.state, status_text.exit_code(state)) == ("lost", 5)
    assert "so attempt 2 does not start; adopt the run" in state.why
    assert state.why.endswith("(exit 7)")
    assert actions.send(started.path, "halt", {}, "tester") == ""
    long_ago = started.state() | {"since_ts": time.time() - 3600}
    rundir.write_json(started.run() / rundir.SUPERVISOR, long_ago)
    actions.adopt(started.path)
    assert started.wait_end(10)["phases"][0]["state"] == "halted"
    assert started.state()["attempt"] == 1


def test_an_attempt_waits_for_a_directory_that_is_away(begin):
    started = waiting(begin, 2)
    run = started.run()
    away = run.rename(started.path / "away")
    started.wait(lambda: b"restart-waits" in (away / rundir.EVENTS).read_bytes(), 30)
    assert not process.with_token(rundir.read_json(away / rundir.RUN)["environment"][environ.TOKEN])
    away.rename(run)
    started.wait_end(60)
    assert started.state()["attempt"] == 2


def test_documents_that_nobody_can_believe_are_not_taken_over(begin):
    started = begin(phase("one", "member.py", 100_000), shell=STUB)
    started.wait_steps(1)
    owner = started.plan_state["supervisor"]
    os.kill(owner["pid"], signal.SIGKILL)
    started.wait(lambda: not rundir.is_alive(owner), 10)
    state = started.plan_state
    rundir.write_json(started.path / rundir.PLAN_STATE, state | {"v": 99})
    with pytest.raises(RefusedError, match="of another version"):
        actions.adopt(started.path)
    rundir.write_json(started.path / rundir.PLAN_STATE, state)
    (started.run() / rundir.EVENTS).unlink()
    os.mkfifo(started.run() / rundir.EVENTS)
    wrong = {"rank": 0, "pid": [1], "start_ticks": {}}
    document = started.state() | {"workers": [wrong, 7], "torchrun": {"pid": {}}}
    rundir.write_json(started.run() / rundir.SUPERVISOR, document)
    actions.adopt(started.path)
    started.wait(lambda: [worker["rank"] for worker in started.state()["workers"]] == [0, 1])
    assert started.ask("stop")["ok"]
    assert started.wait_end(20)["phases"][0]["state"] == "stopped"
