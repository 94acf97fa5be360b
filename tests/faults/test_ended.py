"""Faults of ranks and supervisors, most of which end a run: the console names the fault."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

from console import actions
from console.sources import process
from console.sources.run import RunSource
from tests.faults.scene import console, order, state_of, status, verdict_of
from tests.launches import HANG_GUARD_S, STUB, phase
from tests.mounts import ext4
from trainers.contract import rundir

GRACE_S, SHORT_GRACE_S = 5, 2.0
"""Grace times: the usual time of these tests, and the time for which fault 24 has its limit."""


def watch(grace_s: float = GRACE_S) -> dict[str, float]:
    return {"stall_floor_s": 10, "startup_s": 60, "grace_s": grace_s}


@pytest.fixture
def run(begin, orders, request):
    """A launch of two ranks under torchrun; its second phase starts only if the first passes."""
    started = begin(
        phase("one", "obedient.py", 100_000, orders, gates={"steps_done": 100_000}),
        phase("two", "obedient.py", 1, orders), watch=watch(getattr(request, "param", GRACE_S)),
    )  # fmt: skip
    started.wait_steps(3)
    return started


def names_rank_1(state) -> str:
    return state.why if "rank 1" in state.why else ""


@pytest.mark.decision("end-others", "true")
@pytest.mark.fault("1")
def test_a_killed_rank_is_named_before_and_after_its_peer_is_ended(scene, run, orders):
    order(orders, 0, "deaf")
    victim = run.pids()[1]
    words = scene.inject(run, lambda: os.kill(victim, signal.SIGKILL), names_rank_1)
    assert words.startswith("rank 1 failed, torchrun ends the others")
    assert status(run.path)[1]["state"] in ("stopping", "crashed")
    run.wait_end()
    why = scene.ended(run, "crashed", 5)
    assert why.startswith("rank 1 was killed by SIGKILL at step ")
    assert why.endswith("rank 0 ended because of it")
    exits = [rank.exit for rank in RunSource(run.run()).poll().ranks]
    assert exits == ["killed (SIGKILL), because of another rank", "killed (SIGKILL)"]
    scene.note(why)


RAISED = {
    "exit 7": "(code 7)",
    "raise ValueError the batch is broken": "rank 1: ValueError: the batch is broken",
    "raise OutOfMemoryError CUDA out of memory": "rank 1: out of GPU memory (",
}
CRASHED = {"segv": "SIGSEGV", "abort": "SIGABRT"}


def first_then_slow(cases: dict[str, str]) -> list[object]:
    """Returns the cases of a row; all except the first are slow tests."""
    slow = [pytest.param(words, marks=pytest.mark.slow) for words in list(cases)[1:]]
    return [next(iter(cases)), *slow]


def ends_by_itself(scene, run, orders, words) -> str:
    """Sends rank 1 an order that ends the run; returns the reason."""
    scene.inject(run, lambda: order(orders, 1, words), names_rank_1)
    ended = run.wait_end()
    why = scene.ended(run, "crashed", 5)
    assert why.startswith("rank 1")
    assert [phase["state"] for phase in ended["phases"]] == ["crashed", "later"]
    gates = rundir.read_json(run.run() / rundir.GATES)["gates"]
    # After a native crash, the last records may be lost.
    assert [gate["result"] for gate in gates] in (["fail"], ["unknown"])
    scene.note(why)
    return why


@pytest.mark.fault("2")
@pytest.mark.parametrize("words", first_then_slow(RAISED))
def test_a_rank_that_raises_or_exits_is_named_with_the_reason(scene, run, orders, words):
    assert RAISED[words] in ends_by_itself(scene, run, orders, words)


@pytest.mark.fault("3")
@pytest.mark.parametrize("words", first_then_slow(CRASHED))
def test_a_native_crash_is_named_with_its_signal(scene, run, orders, words):
    why = ends_by_itself(scene, run, orders, words)
    assert why.startswith(f"rank 1 crashed in native code ({CRASHED[words]}) at step ")


@pytest.mark.slow
@pytest.mark.fault("30")
def test_half_a_record_is_ignored_and_the_one_before_it_counts(scene, run, orders):
    why = ends_by_itself(scene, run, orders, "half")
    assert not rundir.heartbeat(run.run(), 1).read_bytes().endswith(b"\n")
    assert int(why.partition("at step ")[2].split()[0].rstrip(";,")) >= 3


@pytest.mark.fault("2", "again and again")
def test_an_error_that_comes_again_is_not_tried_a_third_time(scene, begin):
    started = begin(
        phase("one", "member.py", 100, "raise"), shell=STUB,
        restart={"when": "crash", "attempts": 5, "backoff_s": 0.2},
        watch=watch() | {"grace_s": 0.5},
    )  # fmt: skip
    started.wait_end()
    why = scene.ended(started, "crashed", 5)
    assert "rank 1: ValueError: the batch of step 5 is broken" in why
    assert "not restarted: two attempts with the same error, no new checkpoint between them" in why
    assert started.state()["attempt"] == 2
    scene.note(why)


@pytest.mark.fault("24")
@pytest.mark.parametrize("run", [SHORT_GRACE_S], indirect=True, ids=["grace"])
def test_stop_ends_ranks_that_are_deaf_hold_the_gil_or_are_stopped(scene, run, orders):
    order(orders, 0, f"stray {orders / 'stray'}")
    stray = int(run.wait(lambda: (orders / "stray").read_text()))
    order(orders, 0, "deaf")
    order(orders, 1, "gil 60")
    os.kill(run.pids()[0], signal.SIGSTOP)
    token, pids = run.token(), run.pids()
    # Both requests are sent before an answer, because the first request may end the run soon.
    sent_to = [(box, actions.send(box, "stop", {}, "tester")) for box in (run.path, run.run())]
    answers = [actions.answer(box, request, HANG_GUARD_S) for box, request in sent_to]
    assert [answer["ok"] for answer in answers] == [True, True]
    assert sum("in progress" in answer["text"] for answer in answers) == 1
    sent = min(answer["mono"] for answer in answers)
    run.wait(lambda: not process.with_token(token), every_s=0.02)
    seconds = time.monotonic() - sent
    assert not [pid for pid in pids.values() if process.environment(pid)]
    run.wait_end()
    assert process.state(stray) in (process.GONE, "Z")
    scene.note(scene.ended(run, "stopped", 4), seconds)


@pytest.mark.fault("a")
def test_a_killed_supervisor_is_said_and_the_ranks_can_still_be_halted(scene, run):
    pid = run.plan_state["supervisor"]["pid"]
    words = scene.inject(run, lambda: os.kill(pid, signal.SIGKILL), state_of("unsupervised"))
    assert "ranks 0-1 still run" in words
    assert console("halt", run.path)[0] == 0
    run.wait_gone()
    assert "halted at step" in scene.ended(run, "halted", 4)
    scene.note(words)


@pytest.mark.slow
@pytest.mark.fault("27")
def test_a_rank_that_is_dead_and_not_reaped_is_not_alive(scene, run):
    agent, victim = run.state()["torchrun"]["pid"], run.pids()[1]
    os.kill(agent, signal.SIGSTOP)
    try:
        words = scene.inject(run, lambda: os.kill(victim, signal.SIGKILL), verdict_of("exited"))
        assert process.state(victim) == "Z"
        assert "but its parent has not reaped it" in words
    finally:
        os.kill(agent, signal.SIGCONT)
    run.wait_end()
    assert "rank 1 was killed by SIGKILL" in scene.ended(run, "crashed", 5)
    scene.note(words)


@pytest.mark.slow
@pytest.mark.fault("28")
def test_a_rank_that_sleeps_uninterruptibly_is_said_and_not_killed(scene, run, orders, tmp_path):
    pids = run.pids()
    with ext4(tmp_path, 64) as mount:
        subprocess.run(["fsfreeze", "-f", str(mount)], check=True)
        try:
            words = scene.inject(
                run, lambda: order(orders, 1, f"write {mount / 'file'}"),
                verdict_of("disk"),
            )  # fmt: skip
            assert process.state(pids[1]) == "D"
        finally:
            subprocess.run(["fsfreeze", "-u", str(mount)], check=True)
        scene.goes_on(run, pids)
    assert "uninterruptible sleep" in words
