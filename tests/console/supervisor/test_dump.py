"""Which ranks a dump signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from console.sources import process
from console.supervisor.dump import Dumps
from console.supervisor.inbox import Request
from console.supervisor.rundir_io import Directory

SAVES = """
import signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
print("trains", flush=True)
time.sleep(60)
"""


def test_a_program_that_saves_and_exits_on_sigusr1_is_not_signalled(tmp_path):
    """Some schedulers send SIGUSR1 before they end a program."""
    with subprocess.Popen([sys.executable, "-c", SAVES], stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        rank.stdout.readline()
        handle, outcomes = process.open_child(rank.pid, os.getpid()), []
        assert handle is not None
        dumps, request = Dumps(Directory()), Request(tmp_path / "d.json", "d", "dump", {}, "tester")
        assert dumps.request(tmp_path, None, {0: handle}, request) is None
        dumps.poll(lambda _request, outcome: outcomes.append(outcome))
        handle.close()
        rank.kill()
    ((done, text, _),) = outcomes
    assert not done
    assert text == (
        "no stack: rank 0 does not catch the dump signals (still starting, or not instrumented) "
        "and was not signalled"
    )
    assert rank.returncode == -signal.SIGKILL, "the program ended by itself"
