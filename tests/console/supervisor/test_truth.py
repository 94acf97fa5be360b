"""The state that a reader shows when the supervisor, torchrun or the disk fails."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from console import actions, status_text
from console.sources.run import RunSource
from console.supervisor import live_directory
from tests.launches import STUB, phase
from tests.mounts import tmpfs
from trainers.contract import rundir
from trainers.contract.errors import RefusedError


def look(started, index=0):
    return RunSource(started.run(index)).poll()


def test_a_start_without_its_supervisor_is_unsupervised_halts_and_is_cleared_away(begin):
    started = begin(phase("one", "member.py", 100_000))
    started.wait(lambda: (started.state().get("torchrun") or {}).get("pid"))
    started.kill_supervisor()
    assert not started.pids()
    (leaked,) = Path("/dev/shm").glob(f"nsa-console-*-{started.token()}")
    state = look(started)
    assert state.state == "unsupervised", state.why
    assert "still run" in state.why
    started.wait(started.run().joinpath("heartbeat_rank1.jsonl").exists)
    (started.run() / rundir.HALT).touch()
    started.wait_gone()
    state = RunSource(started.path).poll()
    assert (state.state, "halted at step" in state.why) == ("halted", True), state.why
    assert state.launch is not None
    assert status_text.launch_exit_code(state.launch) == 4
    live_directory.sweep()
    assert leaked.is_dir()
    long_ago = time.time() - 2 * live_directory.SWEPT_AFTER_S
    os.utime(leaked, (long_ago, long_ago))
    later = begin(phase("one", "member.py", 1))
    later.wait_end()
    later.wait(lambda: not leaked.exists())  # another launch may also remove it


@pytest.mark.parametrize(
    ("number", "program"), [(signal.SIGHUP, "foreign_ddp.py"), (signal.SIGTERM, "member.py")]
)
def test_a_signal_to_torchrun_halts_members_and_is_named(begin, number, program):
    started = begin(
        phase("one", program, 100_000), phase("two", "member.py", 5), watch={"grace_s": 30},
    )  # fmt: skip
    started.wait_steps(2)
    os.kill(started.state()["torchrun"]["pid"], number)
    ended = started.wait_end()
    assert [p["state"] for p in ended["phases"]] == ["halted", "later"]
    assert ended["why"].endswith(f"({number.name} to torchrun)")
    assert not any(e["kind"] == "alert" for e in started.events(0))
    assert [rank.exit for rank in look(started).ranks] == ["exited (code 0)"] * 2


def test_a_signal_to_one_rank_halts_all_and_is_named_with_its_rank(begin):
    started = begin(phase("one", "member.py", 100_000), shell=STUB)
    started.wait_steps(2)
    os.kill(started.pids()[1], signal.SIGTERM)
    why = started.wait_end()["why"]
    assert re.fullmatch(
        r'one: all 2 ranks halted at step \d+ \(reason: "SIGTERM" at rank 1\)', why
    ), why
    (started.run() / rundir.SUPERVISOR).unlink()
    assert look(started).why in why


def test_a_signal_to_torchrun_stops_a_program_that_knows_nothing_of_us(begin, tmp_path):
    script = tmp_path / "plain.py"
    script.write_text("import time\nprint('begun', flush=True)\ntime.sleep(600)\n")
    started = begin({"name": "one", "script": str(script), "nproc": 1})
    log = rundir.logs(started.path / "0-one", 1) / rundir.TORCHRUN_LOG
    started.wait(lambda: log.exists() and b"begun" in log.read_bytes())
    os.kill(started.state()["torchrun"]["pid"], signal.SIGTERM)
    assert started.wait_end()["why"] == "one: stopped by SIGTERM to torchrun"


@pytest.fixture
def small(tmp_path):
    """A file system whose size can be changed while it is in use."""
    with tmpfs(tmp_path, 2048) as mount:
        yield mount


def resize(mount: Path, size_bytes: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size_bytes}", str(mount)], check=True)


def fill(mount: Path) -> None:
    with contextlib.suppress(OSError), (mount / "filler").open("wb", buffering=0) as stream:
        while stream.write(bytes(4096)):
            pass


def test_on_a_full_disk_a_halt_ends_a_launch_that_waits(begin, small):
    one, two = (phase(name, "member.py", 1) for name in ("one", "two"))
    started = begin(one, two, between="ask", root=small / "artifacts", nproc=1, shell=STUB)
    started.wait(lambda: started.plan_state.get("state") == "waiting")
    space = os.statvfs(small)
    resize(small, (space.f_blocks - space.f_bfree + 2) * space.f_frsize)
    fill(small)
    assert actions.send(started.path, "halt", {}, "tester") == ""
    started.wait((started.path / rundir.HALT).exists)
    resize(small, 1 << 30)
    assert started.wait_end()["why"].startswith("halt requested by .HALT in the launch directory")


def test_on_a_full_disk_a_halt_ends_the_plan_and_the_last_word_is_kept(begin, small):
    started = begin(
        phase("one", "member.py", 100_000), phase("two", "member.py", 5), root=small / "artifacts"
    )
    started.wait_steps(3)
    supervisor = started.plan_state["supervisor"]
    space = os.statvfs(small)
    resize(small, (space.f_blocks - space.f_bfree + 2) * space.f_frsize)
    started.wait(lambda: "dropped" in {alert.id for alert in look(started).alerts})
    fill(small)
    with pytest.raises(RefusedError, match=rf"No space .* kill -TERM {supervisor['pid']} .* stops"):
        actions.send(started.path, "stop", {}, "tester")
    (started.run() / rundir.HALT).touch()
    started.wait(lambda: look(started).state == "halted")
    assert rundir.is_alive(supervisor)
    assert started.state()["state"] != "halted"
    resize(small, 1 << 30)
    ended = started.wait_end()
    # The documents whose write failed are written later, in any order.
    started.wait(lambda: started.state()["state"] == "halted")
    assert [p["state"] for p in ended["phases"]] == ["halted", "later"]
    assert started.wait(lambda: rundir.read_json(started.run() / rundir.GATES))
    started.wait(lambda: not rundir.is_alive(supervisor))
