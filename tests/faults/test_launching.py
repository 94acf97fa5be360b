"""Faults of a launch: a kill in the middle, a bad directory, or files that exist already."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from console import actions
from tests.launches import CONSOLE, HANG_GUARD_S, ROOT, STUB, console, phase, wait_for
from tests.mounts import tmpfs
from trainers.contract import rundir
from trainers.contract.errors import RefusedError

MOMENTS = 6
"""`make test` kills a launch at about this number of calls, `make faults` at all calls."""

LAUNCHER = """
import os, signal, sys
from pathlib import Path
from console import actions
folder, last, seen = sys.argv[1], int(sys.argv[2]), 0
def count(event, args):
    global seen
    about = event in ("subprocess.Popen", "fcntl.flock") or (
        event.startswith(("open", "os.")) and folder in str(args[0]))
    if about and seen >= 0:
        seen += 1
        if seen == last:
            os.kill(os.getpid(), signal.SIGKILL)
options = actions.LaunchOptions(plan=sys.argv[3], run_dir=Path(folder))
sys.addaudithook(count)
actions.launch(options, "launcher")
count, total, seen = None, seen, -1
print(total, flush=True)
"""
"""A program that launches, and kills itself at the `last`-th call that `count` counts.

If it is not killed, it prints the number of these calls.
"""


def launch_and_die(folder: Path, last: int, plan: str) -> int:
    """Runs `LAUNCHER`; returns the number of calls that it counted, or 0 if it killed itself."""
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER, str(folder), str(last), plan], cwd=ROOT, text=True,
        capture_output=True, timeout=HANG_GUARD_S, env={**os.environ, **STUB},
    )  # fmt: skip
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return int(done.stdout) if done.returncode == 0 else 0


def supervisors(folder: Path) -> int:
    """Returns the number of supervisors that wrote into the log of this directory."""
    log = folder / rundir.SUPERVISOR_LOG
    return len(re.findall(r"supervisor pid \d+", log.read_text())) if log.exists() else 0


def is_locked(folder: Path) -> bool:
    try:
        with (folder / rundir.LOCK).open() as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def took_place(folder: Path) -> bool:
    """Waits until a supervisor is ready or the lock is free; returns whether one became ready."""
    path = folder / rundir.PLAN_STATE
    wait_for(lambda: path.exists() or not is_locked(folder), every_s=0.02)
    return path.exists()


@pytest.fixture
def plan(begin, orders):
    """A plan of one rank and a few steps under the small torchrun."""
    return begin.options(phase("one", "obedient.py", 3, orders), nproc=1).plan


@pytest.mark.fault("11", "launcher, at each step")
def test_a_launch_that_is_killed_at_any_step_is_complete_or_never_was(
    full, scene, begin, plan, tmp_path
):
    total = launch_and_die(tmp_path / "whole", 0, plan)
    begin.adopt(tmp_path / "whole").wait_end()
    assert total >= 10
    every = 1 if full else max(1, total // MOMENTS)
    outcomes, refused = {True: 0, False: 0}, {}
    for last in range(1, total + 1, every):
        folder = tmp_path / f"killed-{last}"
        options = actions.LaunchOptions(plan=plan, run_dir=folder)
        launch_and_die(folder, last, plan)
        started = begin.adopt(folder)
        complete = took_place(folder)
        outcomes[complete] += 1
        if complete:
            with pytest.raises(RefusedError, match=r"is in use by|contains the launch"):
                begin.launch(options, STUB)
        else:
            try:
                begin.launch(options, STUB)
            except RefusedError as error:
                refused[last] = str(error)
                continue
        assert started.wait_end()["phases"][0]["state"] == "completed", last
        assert supervisors(folder) == 1, last
        scene.ended(started, "completed", 0)
    assert not refused, "\n".join(f"step {n} of {total}: {why}" for n, why in refused.items())
    assert all(outcomes.values()), outcomes
    scene.note(f"{outcomes[True]} complete, {outcomes[False]} never begun, {total} steps")


@pytest.mark.fault("15")
def test_a_halt_that_is_older_than_its_run_is_set_aside_and_said(scene, begin, orders):
    started = begin(
        phase("one", "obedient.py", 2, orders), phase("two", "obedient.py", 30, orders),
        between="ask", nproc=1, shell=STUB,
    )  # fmt: skip
    started.wait(lambda: started.plan_state.get("state") == "waiting")
    run = started.path / "1-two"
    run.mkdir(mode=0o700)
    (run / rundir.HALT).write_text("of an earlier run\n")
    assert started.ask("proceed")["ok"]
    started.wait_end()
    said = [e["text"] for e in started.events(1) if e["kind"] == "note"]
    assert "a .HALT from before the start was renamed to .HALT.stale-" in said[0]
    scene.note(said[0])
    scene.ended(started, "completed", 0)


@pytest.mark.fault("17", "read-only")
def test_a_launch_onto_a_read_only_file_system_is_refused_with_the_reason(scene, plan, tmp_path):
    with tmpfs(tmp_path, 1, "ro") as mount:
        code, _, said = console("launch", plan, "--run-dir", mount / "a" / "b")
    assert code == 4
    assert f"{mount} is on a read-only file system" in said
    scene.note(said.strip())


@pytest.mark.fault("17", "not allowed")
def test_a_launch_where_the_user_may_not_write_is_refused_with_the_reason(scene, plan, tmp_path):
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o555)
    words = [*CONSOLE, "launch", plan, "--run-dir", str(folder / "x")]
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("needs setpriv, so that root cannot ignore file modes")
        words = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *words]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 4, done.stderr
    assert f"{folder} is not writable" in done.stderr
    assert os.listdir(folder) == []
    scene.note(done.stderr.strip())
