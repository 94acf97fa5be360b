"""The lock of a launch; its file names the owner before the supervisor starts."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from console import actions
from console.settings_file import Settings
from console.sources import process
from console.supervisor import launcher, lock
from tests.console.sources import directory
from tests.launches import HANG_GUARD_S, STUB, phase
from tests.mounts import tmpfs
from trainers.contract import jsonl, rundir
from trainers.contract.errors import ContractError, RefusedError


def test_a_new_owner_has_a_new_token_and_its_supervisor_keeps_it(tmp_path):
    fd = rundir.open_append(tmp_path / rundir.LOCK)
    os.close(fd)
    fd = os.open(tmp_path / rundir.LOCK, os.O_RDWR)
    tokens = []
    for name in ("a" * 300, "b"):
        lock.claim(fd, name, "ann")
        tokens.append(lock.token_of(tmp_path))
        assert lock.LaunchLock(tmp_path, fd).token == tokens[-1] == lock.token_of(tmp_path)
        held = rundir.read_json(tmp_path / rundir.LOCK)
        assert (held["launch"], held["user"], held["pid"]) == (name, "ann", os.getpid())
    assert len(set(tokens)) == 2
    os.close(fd)


def test_the_sentence_on_an_overwritten_lock_says_that_a_halt_still_halts_the_ranks(tmp_path):
    path = tmp_path / rundir.LOCK
    with path.open("w+b") as file:
        lock.claim(file.fileno(), "one", "ann")
        owned = lock.LaunchLock(tmp_path, file.fileno())
        assert owned.lost() == ""
        path.write_text("{}")
        said = owned.lost()
    assert "the supervisor ignores requests and .HALT there" in said
    assert "halts the ranks while the run directory is at its path" in said


def test_a_lock_that_cannot_be_read_does_not_change_the_last_answer(tmp_path):
    path, limits = tmp_path / rundir.LOCK, resource.getrlimit(resource.RLIMIT_NOFILE)
    with path.open("w+b") as file:
        lock.claim(file.fileno(), "one", "ann")
        owned, written = lock.LaunchLock(tmp_path, file.fileno()), path.read_bytes()
        for content in (b"{}", written):
            path.write_bytes(content)
            known = owned.lost()
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
            try:
                assert owned.lost() == known
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            assert bool(known) == (content == b"{}")


@pytest.mark.parametrize("content", [b"", b"[]", b'{"token": 7}', b"\xff" * 9000])
def test_a_lock_that_holds_something_else_has_no_token(tmp_path, content):
    (tmp_path / rundir.LOCK).write_bytes(content)
    assert lock.token_of(tmp_path) == ""


def test_a_disk_that_is_full_when_the_owner_is_named_begins_nothing(tmp_path, begin):
    """plan.json fills the last free block, so the lock file cannot be written."""
    given = actions.prepare(begin.options(phase("one", "member.py", 1), nproc=1)).spec
    assert len(json.dumps(given.as_dict(0.0), indent=1)) < 4096
    with tmpfs(tmp_path, 1) as mount:
        room = os.statvfs(mount)
        (mount / "full").write_bytes(bytes((room.f_bavail - 1) * room.f_bsize))
        with pytest.raises(RefusedError, match=r"cannot write into .*: No space left"):
            launcher.start(mount / "launch", given)
        assert os.listdir(mount) == ["full"]
        assert supervisors_of(mount / "launch") == []


def supervisors_of(path: Path) -> list[str]:
    found = [jsonl.read_bytes(each / "cmdline", 4096, 0) for each in Path("/proc").glob("[0-9]*")]
    return [str(words) for words in found if b"console.supervisor" in words
            and os.fsencode(path) in words]  # fmt: skip


def test_a_launch_that_was_adopted_and_ended_meanwhile_is_not_adopted(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "DYING_S", HANG_GUARD_S)
    path = directory.launch(tmp_path)
    with ThreadPoolExecutor(1) as pool, directory.owned(path):
        directory.told(path, lock.token_of(path), **directory.DEAD)
        adopted = pool.submit(launcher.adopt, path, Settings())
        time.sleep(0.3)
        assert not adopted.done(), "adopt waits for the lock"
        directory.change(path / rundir.PLAN_STATE, state="ended")
    with pytest.raises(RefusedError, match="has ended; there is nothing to adopt"):
        adopted.result()


def test_a_former_supervisor_with_the_same_pid_is_not_taken_for_the_new_one(tmp_path):
    """A container that starts again may repeat its pids."""
    new: Any = SimpleNamespace(pid=7, poll=lambda: RefusedError.exit_code)
    rundir.write_json(tmp_path / rundir.LOCK, {"token": "new"})
    (tmp_path / rundir.SUPERVISOR_LOG).write_text("the launch is not adopted\n")
    former = {"supervisor": {"pid": 7, "token": "former"}}
    rundir.write_json(tmp_path / rundir.PLAN_STATE, former)
    with pytest.raises(RefusedError, match="the launch is not adopted"):
        launcher._wait_until_ready(new, tmp_path, ranks_live=True)
    rundir.write_json(tmp_path / rundir.PLAN_STATE, {"supervisor": {"pid": 7, "token": "new"}})
    launcher._wait_until_ready(new, tmp_path, ranks_live=True)


def test_an_adopt_on_a_full_disk_ends_no_rank(tmp_path, begin, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", STUB["PYTHONPATH"])
    given = actions.prepare(begin.options(phase("one", "member.py", 100_000), nproc=1)).spec
    with tmpfs(tmp_path, 4) as mount:
        launcher.start(mount / "launch", given)
        started = begin.adopt(mount / "launch")
        started.wait_steps(3)
        pids = started.pids()
        started.kill_supervisor()
        filler = mount / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as stream:
            while stream.write(bytes(4096)):
                pass
        monkeypatch.setattr(launcher, "READY_S", 3.0)
        with pytest.raises(ContractError, match="the ranks keep running"):
            launcher.adopt(started.path, Settings())
        filler.unlink()
        started.wait(lambda: rundir.is_alive(started.plan_state["supervisor"]))
        assert (started.pids(), process.state(pids[0]) in "RSD") == (pids, True)
        assert started.ask("stop")["ok"]
        started.wait_end()
