"""A halt is answered by what became of `.HALT`."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.launches import phase
from trainers.contract import rundir


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for an immutable folder")
def test_a_halt_that_cannot_be_written_is_answered_so_and_the_run_goes_on(begin):
    started = begin(phase("one", "member.py", 100_000), nproc=1)
    started.wait_steps(2)
    run = started.run()
    if subprocess.run(["chattr", "+i", str(run)], capture_output=True).returncode != 0:
        pytest.skip("this file system knows no immutable folder")
    try:
        refused = started.ask("halt")
    finally:
        subprocess.run(["chattr", "-i", str(run)], check=True)
    assert (refused["ok"], "cannot write .HALT" in refused["text"]) == (False, True)
    assert not (run / rundir.HALT).exists()
    started.wait_steps(5)
    assert started.state()["state"] == "running"
    assert started.ask("halt")["ok"]
    assert started.wait_end()["phases"][0]["state"] == "halted"
