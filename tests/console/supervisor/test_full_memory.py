"""Shared memory that is full when a run begins, or becomes so: real mounts, a real launch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from console.supervisor.shm import Live
from tests.faults.scene import ROOT
from tests.launches import STUB, Started, phase
from tests.mounts import tmpfs
from trainers.contract import pulse, rundir

FILL = """
mount -t tmpfs -o size=8k,nr_inodes=20 tmpfs /dev/shm && head -c 8192 /dev/zero >/dev/shm/full \
&& exec "$@"
"""


def test_a_run_on_full_shared_memory_says_so_and_completes(begin, tmp_path):
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare, to fill a /dev/shm of its own")
    plan = begin.options(phase("one", "member.py", 20)).plan
    words = ["launch", plan, "--run-dir", str(tmp_path / "run"), "--wait"]
    done = subprocess.run(
        ["unshare", "-m", "sh", "-ec", FILL, "sh", sys.executable, "-m", "console", *words],
        cwd=ROOT, env={**os.environ, **STUB}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    started = Started(tmp_path / "run")
    assert done.returncode == 0, done.stdout + done.stderr
    notes = [event["text"] for event in started.events(0) if event["kind"] == "note"]
    assert len(notes) == 1
    assert notes[0].startswith("cannot write to /dev/shm (No space left on device)")
    assert rundir.heartbeat(started.run(), 0).read_bytes().count(b"progress") == 20


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """A small file system that stands for /dev/shm."""
    with tmpfs(tmp_path, 1) as mount:
        monkeypatch.setattr(rundir, "SHARED_MEMORY", mount)
        yield mount


def fill(memory) -> None:
    room = os.statvfs(memory)
    (memory / "full").write_bytes(bytes(room.f_bavail * room.f_bsize))


def limit_files(memory, count: int) -> None:
    subprocess.run(["mount", "-o", f"remount,nr_inodes={count}", str(memory)], check=True)


def test_ranks_have_a_live_directory_only_with_room_for_all_of_them(memory):
    limit_files(memory, 7)
    # One too few for three pulses, three stacks, the board, and the folder.
    live = Live("0123456789abcdef", 3, 1, memory)
    assert (live.path, live.why) == (None, "No space left on device")
    assert os.listdir(memory) == []
    limit_files(memory, 20)
    live = Live("0123456789abcdef", 2, 1, memory)
    assert live.path is not None
    assert live.path.is_dir()
    fill(memory)
    pulse.PulseWriter(rundir.pulse(live.path, 1), 1).set(3, "forward")
    assert pulse.read(rundir.pulse(live.path, 1)).step == 3
    (memory / "full").unlink()
    live.renew(2)
    assert live.path is not None
    assert pulse.read(rundir.pulse(live.path, 1)) is None
    assert rundir.halt_board(live.path, 2).exists()
    live.remove()
    fill(memory)
    live.renew(3)
    assert live.path is None
    assert os.listdir(memory) == ["full"]


def test_a_store_into_what_has_no_room_is_an_error_and_no_bus_error(memory):
    fill(memory)
    with pytest.raises(OSError, match="No space left"):
        pulse.PulseWriter(memory / "pulse", 0)
