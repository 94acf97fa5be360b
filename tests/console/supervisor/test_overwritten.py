"""Ranks that overwrote their environment, as setproctitle does: they have no token any more."""

from __future__ import annotations

import fcntl
import os
import secrets
import select
import signal
import subprocess
import threading
import time

import pytest

from console import actions
from console.sources import process
from console.supervisor import launch_spec, shm
from console.supervisor.tree import Tree
from tests import owners
from tests.faults.scene import order
from tests.launches import PROGRAMS, SMALL_TORCHRUN, STUB, phase
from trainers.contract import environ, rundir


@pytest.fixture
def orders(tmp_path_factory):
    return tmp_path_factory.mktemp("orders")


@pytest.fixture
def run(tmp_path):
    rundir.logs(tmp_path, 1).mkdir(parents=True)
    return tmp_path


@pytest.fixture
def tree(run, orders):
    """Two ranks that have overwritten their environment."""
    token = secrets.token_hex(8)
    environment = launch_spec.inherited() | {
        environ.RUN_DIR: str(run), environ.RUN_ID: "test", environ.ATTEMPT: "1",
        environ.TOKEN: token,
    }  # fmt: skip
    link = owners.begin()
    found = Tree(token, 2, select.poll(), link)
    log = rundir.open_append(rundir.logs(run, 1) / rundir.TORCHRUN_LOG)
    argv = (*SMALL_TORCHRUN, str(PROGRAMS / "obedient.py"), "100000", str(orders))
    found.spawn(argv, environment, log, 10.0)
    os.close(log)
    wait(found, lambda: len(found.workers) == 2)
    for rank in (0, 1):
        order(orders, rank, "bare")
        wait(found, lambda rank=rank: not environment_of(found, rank))
    yield found
    for worker in found.alive():
        worker.handle.send(signal.SIGKILL)
    found.kill()
    wait(found, lambda: found.is_over() and not found.alive())
    found.close()
    owners.end(link)


def environment_of(tree, rank: int) -> dict[str, str]:
    return process.environment(tree.workers[rank].handle.pid)


def wait(tree, reached, timeout_s: float = 20.0) -> None:
    until = time.monotonic() + timeout_s
    while not reached():
        assert time.monotonic() < until, tree.workers
        tree._link.receive()
        tree.look()
        time.sleep(0.01)


def test_an_attempt_is_not_over_while_a_rank_lives_and_kill_reaches_it(tree):
    tree.agent.send(signal.SIGKILL)
    wait(tree, lambda: tree.agent_over)
    for _ in range(5):
        assert not tree.is_over()
        tree.look()
    assert len(tree.alive()) == 2
    tree.kill()
    wait(tree, tree.is_over)
    assert {worker.signal for worker in tree.workers.values()} == {"SIGKILL"}


def test_an_adoption_finds_them_by_the_document_and_the_kernel(tree, run):
    tree.agent.send(signal.SIGKILL)
    wait(tree, lambda: tree.agent_over)
    workers = [worker.as_dict() for worker in tree.workers.values()]
    held = rundir.identity() | {"workers": workers, "torchrun": None}
    after = Tree(tree.token, 2, select.poll(), owners.absent())
    after.adopt(held, run, 1)
    assert [w.over_ts for w in after.workers.values()] == [None, None]
    assert [w.as_dict() for w in after.workers.values()] == workers
    after.kill()
    wait(after, after.is_over)
    after.close()


def test_a_stranger_with_a_copied_token_is_no_rank(run):
    """Rank 1 exited before the adoption, and another program has its environment."""
    token = secrets.token_hex(8)
    environment = launch_spec.inherited() | {
        environ.RUN_DIR: str(run), environ.TOKEN: token, "RANK": "1", "LOCAL_RANK": "1",
    }  # fmt: skip
    with subprocess.Popen(["sleep", "60"], env=environment) as copied:
        found = Tree(token, 2, select.poll(), owners.absent(), str(run))
        gone = {"rank": 1, "pid": 4194303, "start_ticks": 1, "exit": {"code": 0, "ts": 1.0}}
        found.adopt({"workers": [gone]}, run, 1)
        assert found.workers[1].handle.pid != copied.pid
        with (rundir.logs(run, 1) / "rank1.log").open("w") as log, subprocess.Popen(
            ["sleep", "60"], env=environment, stdout=log
        ) as own:  # fmt: skip
            again = Tree(token, 2, select.poll(), owners.absent(), str(run))
            again.adopt({}, run, 1)
            assert [worker.handle.pid for worker in again.workers.values()] == [own.pid]
            again.close()
            own.kill()
        found.close()
        copied.kill()


@pytest.fixture
def stranger(run, tmp_path_factory):
    """A process of this user whose output goes into a log of another run."""
    other = rundir.logs(tmp_path_factory.mktemp("other"), 1)
    other.mkdir(parents=True)
    with (other / "rank0.log").open("w") as log:
        found = subprocess.Popen(["sleep", "60"], stdout=log, stderr=log)
    yield found, other
    found.kill()
    found.wait()


def test_a_document_cannot_name_a_stranger(stranger, run):
    found, other = stranger
    known, own = rundir.identity(found.pid), rundir.logs(run, 1)
    handle = process.hold_named(known, other.parent.parent, other)
    assert handle is not None
    handle.close()
    for change in ({"start_ticks": 1}, {"boot_id": "before"}, {"host": "elsewhere"}, {"pid": -1}):
        assert process.hold_named(known | change, other.parent.parent, other) is None
    log = own / "rank0.log"
    for link in (None, log.hardlink_to, log.symlink_to):
        if link is not None:
            link(other / "rank0.log")
        assert process.hold_named(known, run, own) is None
        log.unlink(missing_ok=True)
    own.rmdir()
    own.symlink_to(other)
    assert process.hold_named(known, run, own) is None


def test_a_new_supervisor_goes_on_with_them_dumps_them_and_ends_them(begin, orders):
    started = begin(phase("one", "obedient.py", 100_000, orders), shell=STUB)
    started.wait_steps(3)
    pids = started.pids()
    for rank in (0, 1):
        order(orders, rank, "bare")
        started.wait(lambda rank=rank: not process.environment(pids[rank]))
    os.kill(started.state()["torchrun"]["pid"], signal.SIGKILL)
    former = started.kill_supervisor()
    shm.sweep(0.0)  # as another launch does, and one that still looks when the new one begins
    looking = os.open(started.state()["live_dir"], os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_EX)
    threading.Timer(1.0, os.close, [looking]).start()
    actions.adopt(started.path)
    (alert,) = started.wait(lambda: started.alerts("torchrun-gone"), 10)
    assert "ranks 0, 1 still run" in alert["text"]
    state = started.wait(lambda: (s := started.state())["pid"] != former["pid"] and s)
    assert [worker["exit"] for worker in state["workers"]] == [None, None]
    assert state["live_dir"]
    answer = started.ask("dump")
    assert answer["text"] == "stacks of 2 ranks dumped", answer
    assert started.ask("halt")["ok"]
    assert started.wait_end(20)["phases"][0]["state"] == "halted"
    assert [worker["exit"]["code"] for worker in started.state()["workers"]] == [0, 0]


def test_what_a_rank_detached_without_its_environment_ends_with_the_attempt(tree, orders):
    order(orders, 0, f"stray {orders / 'stray'}")
    wait(tree, (orders / "stray").exists)
    stray = int((orders / "stray").read_text())
    tree.kill()
    wait(tree, tree.is_over)
    assert process.state(stray) in (process.GONE, "Z")
