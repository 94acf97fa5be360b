"""Launches without threads, processes, descriptors or a working directory to spare."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from console import actions
from console.supervisor import launcher
from tests.faults.scene import ROOT
from tests.launches import STUB, phase
from trainers.contract.errors import ContractError


def limited(limits: str, *words: object) -> subprocess.CompletedProcess[str]:
    """Runs `nsa-console` in a shell with other limits, under the small torchrun."""
    return subprocess.run(
        ["sh", "-ec", f'{limits}; exec "$@"', "sh", sys.executable, "-m", "console",
         *map(str, words)],
        env={**os.environ, **STUB, "PYTHONPATH": f"{STUB['PYTHONPATH']}:{ROOT}"}, cwd=ROOT,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


@pytest.fixture
def plan(begin):
    return begin.options(phase("one", "member.py", 100_000)).plan


def files_of(pid: int) -> tuple[int, int]:
    """Returns the soft and the hard limit of open files of a process."""
    found = re.search(r"Max open files +(\d+) +(\d+)", Path(f"/proc/{pid}/limits").read_text())
    return int(found[1]), int(found[2])


def test_the_supervisor_may_open_all_that_is_allowed_and_the_ranks_what_was_given(
    begin, plan, tmp_path
):
    done = limited("ulimit -Sn 200; ulimit -Hn 3000", "launch", plan, "--run-dir", tmp_path / "x")
    assert done.returncode == 0, done.stderr
    started = begin.adopt(tmp_path / "x")
    started.wait_steps(1)
    assert files_of(started.child()) == (3000, 3000)
    owner = started.plan_state["supervisor"]["pid"]
    for pid in (owner, started.state()["torchrun"]["pid"], *started.pids().values()):
        assert files_of(pid) == (200, 3000)


def test_a_working_directory_that_is_gone_is_named(plan, tmp_path):
    removed = f"mkdir {tmp_path}/gone; cd {tmp_path}/gone; rmdir {tmp_path}/gone"
    for where in ((), ("--run-dir", tmp_path / "x")):
        done = limited(removed, "launch", plan, *where)
        assert done.returncode == 4, done.stdout + done.stderr
        assert "the working directory does not exist" in done.stderr
    assert not (tmp_path / "x").exists()


def test_a_launcher_without_a_thread_to_spare_has_launched(begin, monkeypatch):
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    options = begin.options(phase("one", "member.py", 3))
    monkeypatch.setenv("PYTHONPATH", STUB["PYTHONPATH"])
    with monkeypatch.context() as patch:
        patch.setattr(launcher.threading.Thread, "start", refuse)
        started = begin.adopt(actions.launch(options, "tester"))
    started.wait_end()


def test_a_supervisor_that_cannot_be_started_is_not_a_directory_that_cannot_be_written(
    begin, monkeypatch, tmp_path
):
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    options = begin.options(phase("one", "member.py", 3))
    prepared = actions.prepare(options)
    monkeypatch.setattr(launcher.subprocess, "Popen", refuse)
    with pytest.raises(
        ContractError, match=r"cannot start the supervisor: Resource temporarily unavailable"
    ):
        launcher.start(tmp_path / "x", prepared.spec)
    assert not (tmp_path / "x").exists()
