"""The run directory's file system stops answering: training goes on and nothing is lost."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from trainers.contract import pulse, rundir
from trainers.contract.heartbeat import tail

from .conftest import phase

FROZEN_S = 8.0
TOOLS = ("fsfreeze", "mkfs.ext4", "mount", "umount")


@pytest.fixture(scope="module")
def mounted(tmp_path_factory):
    """A small ext4 on a loop device."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"needs root and {', '.join(missing or TOOLS)} for a file system to freeze")
    folder = tmp_path_factory.mktemp("frozen")
    image, mount = folder / "image", folder / "mount"
    mount.mkdir()
    with image.open("wb") as stream:
        stream.truncate(3 << 30)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    if subprocess.run(["mount", "-o", "loop", str(image), str(mount)]).returncode != 0:
        pytest.skip("this machine mounts no loop device")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def test_a_frozen_directory_blocks_only_its_writer_and_loses_nothing(begin, mounted):
    started = begin(phase("one", "member.py", 100_000), root=mounted / "artifacts")
    started.wait_steps(5)
    live = Path(started.state()["live_dir"])
    step = pulse.read(rundir.pulse(live, 0)).step
    subprocess.run(["fsfreeze", "-f", str(mounted)], check=True)
    try:
        time.sleep(FROZEN_S)
        status = rundir.read_json(live / rundir.LIVE_STATUS)
        status_age_s = time.time() - status["ts"]
        moved = pulse.read(rundir.pulse(live, 0)).step - step
    finally:
        subprocess.run(["fsfreeze", "-u", str(mounted)], check=True)
    assert moved > 100
    assert status["blocked_s"] > FROZEN_S - 3
    assert status["waiting"] > 0
    assert status_age_s < 2.5
    started.wait(lambda: rundir.read_json(live / rundir.LIVE_STATUS)["blocked_s"] < 1, 5)
    assert started.ask("halt")["ok"]
    started.wait_end()
    assert started.state()["state"] == "halted"
    reader = tail(rundir.heartbeat(started.run(), 0))
    steps = [r["step"] for r in reader.poll() if r["msg"] == "progress"]
    assert steps == list(range(1, len(steps) + 1))
    gaps = [b["mono"] - a["mono"] for a, b in itertools.pairwise(started.samples())]
    assert max(gaps) < 3
    assert not any(event["kind"] == "alert" for event in started.events(0))
