"""Faults around a run: reused pids, directories with malicious files, a GPU with wrong values."""

from __future__ import annotations

import pickle
import secrets
import signal
import subprocess
import zipfile
from pathlib import Path

import pytest

from console.sources import process
from tests.console.sources import directory
from tests.fakes import nvml as fake
from tests.faults.scene import watching
from tests.launches import STUB, console, sleeping
from trainers.contract import environ, rundir

LAST_PID = Path("/proc/sys/kernel/ns_last_pid")
TRIES = 50
TOKEN = secrets.token_hex(8)  # no process of another test has it


def stranger_with(pid: int) -> subprocess.Popen[bytes] | None:
    """Starts a process with this pid, or skips the test; returns None if the pid was taken."""
    try:
        LAST_PID.write_text(str(pid - 1))
    except OSError:
        pytest.skip("this user cannot choose the next pid (ns_last_pid)")
    found = sleeping()
    if found.pid == pid:
        return found
    found.kill()
    found.wait()
    return None


@pytest.mark.slow
@pytest.mark.fault("26")
def test_a_stranger_with_the_pid_of_a_dead_rank_is_never_signalled(scene):
    for _ in range(TRIES):
        rank = sleeping(**{environ.TOKEN: TOKEN})
        handle, known = process.open_process(rank.pid, TOKEN), rundir.identity(rank.pid)
        assert handle is not None
        rank.kill()
        rank.wait()
        stranger = stranger_with(rank.pid)
        if stranger is None:
            handle.close()
            continue
        try:
            assert not handle.send(signal.SIGKILL)
            assert process.open_process(rank.pid, TOKEN) is None
            assert process.with_token(TOKEN) == []
            assert stranger.poll() is None
        finally:
            stranger.kill()
            stranger.wait()
            handle.close()
        scene.note(f"start ticks {'equal' if rundir.is_alive(known) else 'differ'}: not hit")
        return
    pytest.skip(f"no process got a chosen pid in {TRIES} tries: the machine is too busy")


class Canary:
    """A pickle that touches a file when it is loaded."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


EVIL = (
    "flight_rank0_1.json", "flight_rank0_1.pickle", "mem_boot_rank0.json", "env.json", "gates.json",
    "metrics.json", "stackdump_rank0_1.txt", "events.jsonl",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.fault("32", "opened by every command")
def test_looking_at_a_hostile_directory_runs_nothing_and_writes_nothing(scene, tmp_path):
    canary, launch = tmp_path / "canary", directory.launch(tmp_path / "root")
    run = directory.run(launch / "0-first", workers=[], **directory.DEAD)
    directory.change(launch / rundir.PLAN_STATE, supervisor=directory.DEAD)
    directory.beat(run, 0, 5, loss=1.0)
    evil = pickle.dumps(Canary(canary))
    for name in EVIL:
        (run / name).write_bytes(evil)
    step = run / rundir.CHECKPOINTS / "step_00000005"
    step.mkdir(parents=True)
    (step / ".metadata").write_bytes(evil)
    (step.parent / rundir.LATEST).write_text("../../../../etc\n")
    with zipfile.ZipFile(step / "__0_0.distcp", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb/data.pkl", evil)
        archive.writestr("bomb/data/0", bytes(64 << 20))
    bomb = "a: &a [x, x]\n" + "".join(
        f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    )
    (launch / "plan.yaml").write_text(f"{bomb}z: !!python/object/apply:os.system ['true']\n")
    (run / "logs").symlink_to("/etc")
    before = {path: path.lstat().st_mtime_ns for path in launch.rglob("*")}
    codes = {
        words[0]: console(*words)[0]
        for words in (
            ("status", run, "--json"), ("status", launch), ("check", launch), ("logs", launch),
            ("watch", launch, "--plain"), ("check", launch / "plan.yaml"), ("halt", launch),
        )
    }  # fmt: skip
    assert not canary.exists()
    assert set(codes.values()) <= {0, 1, 2, 3, 4, 5}, codes
    halts = {run / rundir.HALT, launch / "0-first"}
    after = {path: path.lstat().st_mtime_ns for path in launch.rglob("*")}
    changed = {path for path, time in after.items() if before.get(path) != time}
    assert changed <= halts
    with watching(launch, "LOST") as screen:
        screen.press(*"12345")
    assert not canary.exists()
    scene.note(f"exit codes {sorted(set(codes.values()))}, nothing ran")


@pytest.mark.slow
@pytest.mark.fault("d")
def test_a_gpu_that_is_busy_at_idle_power_shows_both_figures(scene, launch, tmp_path):
    fake.build(tmp_path)
    fake.write(tmp_path, count=2, gpu1={"util": 100, "power_mw": 70_000})
    started = launch(shell={**STUB, "LD_LIBRARY_PATH": str(tmp_path)})
    with watching(started.path) as screen:
        shown = screen.wait(lambda text: "100%" in text and "70W" in text)
    row = next(line for line in shown.splitlines() if "100%" in line)
    assert "70W" in row
    scene.note(" ".join(row.split()))
