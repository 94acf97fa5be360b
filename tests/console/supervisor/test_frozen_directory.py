"""The run directory's file system stops answering: training goes on and nothing is lost."""

from __future__ import annotations

import itertools
import subprocess
import time
from pathlib import Path

import pytest

from tests.mounts import ext4
from trainers.contract import pulse, rundir
from trainers.contract.heartbeat import tail

from .conftest import phase

FROZEN_S = 8.0


@pytest.fixture(scope="module")
def mounted(tmp_path_factory):
    """A small ext4 on a loop device."""
    with ext4(tmp_path_factory.mktemp("frozen"), 3 << 10) as mount:
        yield mount


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
