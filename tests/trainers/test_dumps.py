"""A thousand or more stack dumps of a training, also while its process exits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainers.contract import environ, pulse, rundir

ROOT = Path(__file__).parents[2]
MARK = b"Stack (most recent call first)"


def dumped(path: Path, start: int) -> tuple[int, int]:
    """Returns the number of dumps after the offset `start`, and the offset of their end."""
    with path.open("rb") as stream:
        stream.seek(start)
        data = stream.read()
    return data.count(MARK), start + len(data)


@pytest.mark.parametrize("dumps", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_thousands_of_dumps_kill_nothing_and_training_continues(tmp_path, dumps):
    live, run = tmp_path / "live", tmp_path / "run"
    live.mkdir()
    variables = {
        **{k: v for k, v in os.environ.items() if not k.startswith("NSA_")},
        environ.LIVE_DIR: str(live), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "trainers.ddp", "--config", "configs/tiny_cpu.yaml", "--run-dir",
         str(run), "--set", "data.source=text", "--set", "train.steps=1000000"],
        cwd=ROOT, env=variables,
    )  # fmt: skip
    stack = rundir.live_stack(live, 0)

    def step() -> int:
        found = pulse.read(rundir.pulse(live, 0))
        return found.step if found else 0

    try:
        deadline = time.monotonic() + 500
        while step() < 2:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        first, count, at = step(), 0, 0
        while count < dumps:
            assert process.poll() is None, f"the training died after {count} dumps"
            assert time.monotonic() < deadline, f"there were only {count} dumps"
            for _ in range(50):
                process.send_signal(signal.SIGUSR1)
                time.sleep(0.0005)
            fresh, at = dumped(stack, at)
            count += fresh
        again = step()
        while step() < again + 3:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert again > first
        # The dumps continue while Python and torch exit.
        (run / rundir.HALT).touch()
        while process.poll() is None:
            assert time.monotonic() < deadline
            process.send_signal(signal.SIGUSR1)
            time.sleep(0.0005)
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()
