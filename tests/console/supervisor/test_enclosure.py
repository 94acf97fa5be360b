"""The cgroup around a run: what is in it ends with it, and nothing of it stays."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from console.sources import kernel
from console.supervisor import enclosure

TOKEN = "test-enclosure"
FORKS = "import os, time; os.fork(); os.setsid() if os.fork() else None; time.sleep(600)"


@pytest.fixture
def home():
    """This process's own cgroup, if one can be made below it."""
    found = kernel.unified()
    probe = found / "nsa-probe" if found else None
    try:
        if probe is None:
            raise OSError("no cgroup of version 2 is to be seen")
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        pytest.skip(f"this machine lets nobody make a cgroup: {error}")
    return found


@pytest.fixture
def tree(home):
    """A process that forks once it is inside, its folder, and its enclosure."""
    program = f"import sys; sys.stdin.read(1); {FORKS}"
    process = subprocess.Popen([sys.executable, "-c", program], env={}, stdin=subprocess.PIPE)
    inside = enclosure.around(process.pid, TOKEN)
    assert inside is not None
    process.stdin.write(b"x")
    process.stdin.close()
    while len(inside.pids()) < 4:
        assert process.poll() is None
    yield process, home / f"{enclosure.PREFIX}{TOKEN}", inside
    inside.kill()
    process.wait(20)
    while inside.pids():
        pass
    inside.remove()


def test_what_has_no_token_and_another_session_ends_too(tree):
    process, folder, inside = tree
    inside.kill()
    assert process.wait(20) == -9
    while inside.pids():
        pass
    inside.remove()
    assert not folder.exists()


def test_who_takes_over_finds_it_again_unless_it_is_inside_itself(tree, home):
    process, folder, inside = tree
    found = enclosure.of(process.pid, TOKEN)
    assert found is not None
    assert sorted(found.pids()) == sorted(inside.pids())
    assert enclosure.of(process.pid, "another") is None
    assert enclosure.of(os.getpid(), TOKEN) is None
    asks = (
        "import sys; sys.stdin.read(1); from console.supervisor import enclosure; "
        f"sys.exit(enclosure.of({process.pid}, {TOKEN!r}) is None)"
    )
    within = subprocess.Popen([sys.executable, "-c", asks], stdin=subprocess.PIPE)
    (folder / enclosure.PROCS).write_text(str(within.pid))
    within.stdin.write(b"x")
    within.stdin.close()
    assert within.wait(20) == 1


def test_an_empty_one_of_a_dead_supervisor_is_swept_away(home, tree):
    left = home / f"{enclosure.PREFIX}left-behind"
    left.mkdir()
    process, _, _ = tree
    again = enclosure.around(process.pid, f"{TOKEN}-2")
    assert again is not None
    assert not left.exists()
    process.kill()
    again.kill()
    process.wait(20)
    again.remove()


def test_where_none_can_be_made_there_is_none(monkeypatch, tmp_path):
    """Not root, a read-only mount, version 1 alone."""
    monkeypatch.setattr(kernel, "unified", lambda pid="self": None)
    assert enclosure.around(os.getpid(), TOKEN) is None
    monkeypatch.setattr(kernel, "unified", lambda pid="self": tmp_path / "not-there")
    assert enclosure.around(os.getpid(), TOKEN) is None


def test_a_cgroup_that_another_supervisor_removes_meanwhile_is_empty(tmp_path):
    folder, ended = tmp_path / "group", threading.Event()

    def remove_again_and_again() -> None:
        while not ended.is_set():
            folder.mkdir()
            folder.rmdir()

    other = threading.Thread(target=remove_again_and_again)
    other.start()
    try:
        until = time.monotonic() + 1
        while time.monotonic() < until:
            assert enclosure.Enclosure(folder).pids() == []
    finally:
        ended.set()
        other.join()
