"""The samples of real processes: which process counts as stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from console.diagnose.verdict import diagnose
from console.plan import Watch
from console.sources import process
from console.supervisor.sampling import Sampler
from trainers.contract import rundir
from trainers.contract.pulse import Pulse

BUSY, IDLE = "while True: pass", "import time; time.sleep(1000)"


@pytest.fixture(params=[BUSY, IDLE], ids=["busy", "idle"])
def child(request):
    with subprocess.Popen([sys.executable, "-c", request.param]) as found:
        yield found
        found.kill()


def sampled(sampler, pid):
    """Returns the state in a new sample, and the cause of the verdict on it, or ""."""
    handle = process.Handle(pid, -1, rundir.start_ticks(pid) or 0)
    rank = SimpleNamespace(rank=0, handle=handle, over_ts=None, unreaped=False, code=None)
    row = sampler.sample([rank], {}, 1, 0.0)["ranks"][0]
    verdict = diagnose(sampler.evidence, Watch(), time.time())
    return row["state"], verdict.cause if verdict else ""


def test_a_process_counts_as_stopped_if_it_does_not_run_between_the_samples(child):
    """A tracer, for example strace, stops a process many times a second."""
    since, pid = time.monotonic() - 60, child.pid
    pulse = Pulse(0, pid, 41, "eval", since, since, 0, 41, "eval", 0, 0)
    sampler = Sampler(SimpleNamespace(rows=list), lambda _: pulse, tuple)

    def stop():
        os.kill(pid, signal.SIGSTOP)
        while process.state(pid) != "T":
            time.sleep(0.01)

    assert sampled(sampler, pid)[1] == ""
    for _ in range(10):
        stop()
        assert sampled(sampler, pid) == ("T", "")
        os.kill(pid, signal.SIGCONT)
    stop()
    found = [sampled(sampler, pid) for _ in range(5)]
    assert found == [("T", "")] * 3 + [("T", "stopped")] * 2
    # A supervisor that replaces another one does not clear the stall.
    assert sampled(Sampler(SimpleNamespace(rows=list), lambda _: pulse, tuple), pid)[1] == "stopped"
    os.kill(pid, signal.SIGCONT)
    while process.state(pid) == "T":
        time.sleep(0.01)
    assert sampled(sampler, pid)[1] == ""
