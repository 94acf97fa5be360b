"""Actions from another host or container, and on this host after a change of its name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial

import pytest

from tests.console.sources import directory
from tests.console.test_targets import DEAD, ROOT, made, said
from tests.launches import STUB, phase
from trainers.contract import rundir


@pytest.fixture(scope="module")
def launched(begin):
    """A real launch of one rank under the small torchrun."""
    started = begin(phase("one", "member.py", 100000), shell=STUB, nproc=1)
    started.wait_steps(1)
    return started


def unshared(options: Sequence[str], *words: object) -> tuple[int, str]:
    """Runs a command in other namespaces, or skips the test; returns exit code and output."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare, for another host name or PID namespace")
    command = [sys.executable, "-m", "console", *map(str, words)]
    done = subprocess.run(
        ["unshare", *options, *command], cwd=ROOT, capture_output=True, text=True, timeout=150
    )
    return done.returncode, done.stdout + done.stderr


def renamed(*words: object) -> tuple[int, str]:
    """Runs a command on this host after a change of its name; returns exit code and output."""
    return unshared(["--uts", "sh", "-ec", 'hostname renamed && exec "$@"', "sh"], *words)


@pytest.fixture
def elsewhere(tmp_path):
    """A function that runs a command as on another host, with another name and another boot."""
    (boot := tmp_path / "boot_id").write_text("another\n")
    script = 'hostname elsewhere; mount --bind "$0" /proc/sys/kernel/random/boot_id; exec "$@"'
    return partial(unshared, ["--uts", "--mount", "sh", "-ec", script, str(boot)])


@pytest.mark.decision("target-supervisor", "absent")
def test_after_the_host_was_renamed_its_rank_is_halted_and_is_not_that_of_another_host(tmp_path):
    path, gone = made(tmp_path / "r1"), rundir.identity() | DEAD
    mine = rundir.identity()
    run, written_ts = path / "0-first", time.time() - 3600
    directory.run(run, 1, workers=[{"rank": 0, "exit": None, **mine}],
                  updated_ts=written_ts, **gone)  # fmt: skip
    directory.told(path, "", **gone)
    code, text = renamed("status", path)
    assert ("UNSUPERVISED" in text, "may have ended" in text) == (True, False), text
    code, text = renamed("adopt", path)
    assert (code, "ran on" in text) == (4, False), text
    code, text = renamed("diagnose", path)
    assert "the ranks run" not in text, text
    code, text = renamed("halt", path)
    assert (code, (run / rundir.HALT).exists()) == (0, True), text


@pytest.mark.decision("target-supervisor", "true")
def test_from_another_host_a_request_is_sent_and_its_answer_counts(launched, elsewhere):
    for words in (("do", launched.path, "note", "text=from afar"), ("dump", launched.run())):
        code, text = elsewhere(*words)
        assert code == 0, text
    assert "from afar" in [event["text"] for event in launched.events()]


@pytest.mark.decision("target-supervisor", "true")
def test_from_another_pid_namespace_the_run_is_running_and_a_request_is_sent(launched):
    options = ("--pid", "--fork", "--mount-proc")
    code, text = unshared(options, "status", launched.path)
    assert (code, "RUNNING" in text) == (0, True), text
    code, text = unshared(options, "do", launched.path, "note", "text=from beside")
    assert code == 0, text
    assert "from beside" in [event["text"] for event in launched.events()]


@pytest.mark.decision("target-supervisor", "absent")
def test_in_another_pid_namespace_a_launch_with_a_free_lock_has_no_supervisor(tmp_path, capsys):
    path = made(tmp_path / "r1")
    with directory.owned(path):
        directory.told(path, "", pid_ns=1)
    code, err = said(capsys, "do", path, "note", "text=x")
    assert (code, "is not running" in err) == (4, True), err


@pytest.mark.decision("target-supervisor", "absent")
def test_from_another_host_a_missing_answer_is_reported(launched, elsewhere):
    with launched.stopped():
        code, text = elsewhere("halt", launched.path, "--timeout", "3")
        assert not (launched.run() / rundir.HALT).exists()
        for left in (launched.path / rundir.REQUESTS).iterdir():
            left.unlink()
    assert code == 5, text
    assert (
        "no answer to halt within 3 s; the request remains and may still be executed; see" in text
    )
