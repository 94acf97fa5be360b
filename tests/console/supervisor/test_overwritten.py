"""Ranks without a token, as after setproctitle, and processes that only look like ranks."""

from __future__ import annotations

import fcntl
import os
import secrets
import select
import signal
import subprocess
import threading

import pytest

from console import actions
from console.sources import process, record_files
from console.supervisor import launch_spec
from console.supervisor.process_tree import LATE_S, Tree, Worker
from tests import broken, owners
from tests.faults.scene import order, sweep_own
from tests.launches import STUB, phase, sleeping, wait_for
from trainers.contract import environ, rundir


@pytest.fixture
def run(tmp_path):
    rundir.logs(tmp_path, 1).mkdir(parents=True)
    return tmp_path


@pytest.fixture
def orders(tmp_path):
    return tmp_path


@pytest.fixture
def bare(begin, orders):
    """A run whose torchrun was killed and whose two ranks have overwritten their environment."""
    started = begin(phase("one", "obedient.py", 100_000, orders), shell=STUB)
    started.wait_steps(3)
    for rank, pid in started.pids().items():
        order(orders, rank, "bare")
        started.wait(lambda pid=pid: not process.environment(pid))
    os.kill(started.state()["torchrun"]["pid"], signal.SIGKILL)
    return started


def test_an_attempt_is_not_over_while_a_rank_lives_and_kill_reaches_all_processes(bare, orders):
    (alert,) = bare.wait(lambda: bare.alerts("torchrun-gone"))
    assert "ranks 0-1 still run" in alert["text"]
    order(orders, 0, f"stray {orders / 'stray'}")
    stray = int(bare.wait(lambda: (orders / "stray").read_text()))
    assert bare.state()["state"] == "running"
    assert bare.ask("kill", yes=True)["ok"]
    assert bare.wait_end()["phases"][0]["state"] == "killed"
    assert {worker["exit"]["signal"] for worker in bare.state()["workers"]} == {"SIGKILL"}
    assert process.state(stray) in (process.GONE, "Z")


def test_the_files_of_ranks_that_outlive_torchrun_stay_bounded(begin, tmp_path):
    setup = (
        "from console.supervisor import rotation; rotation.POLL_EVERY_S = 0.1; "
        "rotation.divide.__defaults__ = (1000,)"
    )
    shell = broken.shell(tmp_path, "launch.Launch.tick", "pass", setup)
    started = begin(phase("one", "member.py", 100_000), shell=shell)
    started.wait_steps(3)
    samples = rundir.samples(started.run(), rundir.host_name())
    os.kill(started.state()["torchrun"]["pid"], signal.SIGKILL)
    started.wait(lambda: started.alerts("torchrun-gone"))

    def newest() -> int:
        return max((number for number, _ in record_files.parts(samples)), default=0)

    before = newest()
    started.wait(lambda: newest() > before + 2)
    assert started.ask("stop")["ok"]
    started.wait_end()


def test_a_new_supervisor_adopts_them_dumps_them_and_halts_them(bare):
    former = bare.kill_supervisor()
    # Another launch sweeps live directories, and may still have locked the one of this run.
    sweep_own([bare.token()])
    looking = os.open(bare.state()["live_dir"], os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_EX)
    threading.Timer(1.0, os.close, [looking]).start()
    actions.adopt(bare.path)
    state = bare.wait(lambda: (s := bare.state())["pid"] != former["pid"] and s)
    assert [worker["exit"] for worker in state["workers"]] == [None, None]
    assert state["live_dir"]
    answer = bare.ask("dump")
    assert answer["text"] == "stacks of 2 ranks dumped", answer
    assert bare.ask("halt")["ok"]
    assert bare.wait_end()["phases"][0]["state"] == "halted"
    assert [worker["exit"]["code"] for worker in bare.state()["workers"]] == [0, 0]


def test_a_stranger_with_a_copied_token_is_no_rank(run):
    """Rank 1 exited before the adoption, and another program has the environment of rank 1."""
    token = secrets.token_hex(8)
    environment = launch_spec.inherited() | {
        environ.RUN_DIR: str(run), environ.TOKEN: token, "RANK": "1", "LOCAL_RANK": "1",
    }  # fmt: skip
    with sleeping(**environment) as copied:
        found = Tree(token, 2, select.poll(), owners.absent(), str(run))
        gone = {"rank": 1, "pid": 4194303, "start_ticks": 1, "exit": {"code": 0, "ts": 1.0}}
        found.adopt({"workers": [gone]}, run, 1)
        assert found.workers[1].handle.pid != copied.pid
        found.close()
        copied.kill()


@pytest.mark.parametrize("exit_", [None, {"code": 0, "ts": 1.0}], ids=["alive", "exited"])
@pytest.mark.parametrize("named", ["parent", "stranger"])
def test_a_named_process_is_a_rank_only_if_processes_with_its_token_descend_from_it(
    run, named, exit_
):
    """The parent is a rank that overwrote its environment after it had started a child.

    The stranger has no token, but has the log of the rank open.
    """
    token = secrets.token_hex(8)
    pairs = {environ.RUN_DIR: str(run), environ.TOKEN: token, "RANK": "0", "LOCAL_RANK": "0"}
    words = ["sh", "-c", 'env "$@" sleep 60 & exec sleep 60', "sh"]
    words += [f"{name}={value}" for name, value in pairs.items()]
    with (rundir.logs(run, 1) / "rank0.log").open("w") as log:
        parent = subprocess.Popen(words, stdout=log, stderr=log)
        stranger = subprocess.Popen(["sleep", "60"], stdout=log, stderr=log)
    (child,) = wait_for(lambda: process.with_token(token, str(run)))
    found = Tree(token, 1, select.poll(), owners.absent(), str(run))
    known = rundir.identity(parent.pid if named == "parent" else stranger.pid)
    found.adopt(known | {"workers": [{"rank": 0, "exit": exit_, **known}]}, run, 1)
    handle = found.workers[0].handle
    if named == "parent":
        assert handle.pid == parent.pid
    else:
        assert (handle.pid == child) if exit_ is None else handle.is_over()
    found.close()
    os.kill(child, signal.SIGKILL)
    for each in (parent, stranger):
        each.kill()
        each.wait()


def test_an_orphan_that_kill_does_not_end_is_reported_although_it_has_no_token(run):
    """The attempt is not over while the orphan is alive, so the operator must know of it."""
    with subprocess.Popen(["sleep", "60"]) as orphan:
        found = Tree(secrets.token_hex(8), 1, select.poll(), owners.absent(), str(run))
        found._parent, found._first_killed = os.getpid(), 0.0
        assert found.stuck() == []  # so far, only the ranks got KILL
        found._kill_at = 0.0
        assert any(text.startswith(f"{orphan.pid} (") for text in found.stuck())
        orphan.kill()


def test_a_rank_that_outlives_kill_after_a_failure_is_reported_and_not_scanned_for_at_each_tick(
    run, monkeypatch
):
    """torchrun got no KILL, so torchrun is not reported."""
    scans = []
    monkeypatch.setattr(process, "with_token", lambda *_: scans.append(1) or [])
    deaf = process.Handle(os.getpid(), -1, 0)  # a rank in state D: no signal ends it
    found = Tree(secrets.token_hex(8), 1, select.poll(), owners.absent(), str(run))
    found.agent, found.workers[0] = process.Handle(os.getppid(), -1, 0), Worker(0, 0, deaf)
    assert found.stuck() == []
    found.kill_ranks_after(0.0)
    for _ in range(5):
        assert not found.enforce()
    assert len(scans) == 1
    found._first_killed -= LATE_S
    assert [text.split()[0] for text in found.stuck()] == [str(os.getpid())]


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
    handle = process.open_named(known, other.parent.parent, other)
    assert handle is not None
    handle.close()
    elsewhere = {"host": "elsewhere", "pid_ns": None}
    for change in ({"start_ticks": 1}, {"boot_id": "before"}, elsewhere, {"pid": -1}):
        assert process.open_named(known | change, other.parent.parent, other) is None
    log = own / "rank0.log"
    for link in (None, log.hardlink_to, log.symlink_to):
        if link is not None:
            link(other / "rank0.log")
        assert process.open_named(known, run, own) is None
        log.unlink(missing_ok=True)
    own.rmdir()
    own.symlink_to(other)
    assert process.open_named(known, run, own) is None
