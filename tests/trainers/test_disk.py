"""Runs whose disk is full or read-only, or whose directory is gone."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from tests.mounts import tmpfs
from tests.trainers.runs import (
    Run,
    small,
)
from trainers import manifest
from trainers.contract import pulse, rundir
from trainers.contract.member import Member
from trainers.run_records import TensorBoard


@pytest.fixture
def disk(tmp_path):
    """Yields a mounted file system of 4 MiB."""
    with tmpfs(tmp_path, 4) as mounted:
        yield mounted


def fill(disk: Path) -> Path:
    """Writes a file until the disk is full."""
    with (disk / "filler").open("ab", buffering=0) as stream, contextlib.suppress(OSError):
        while stream.write(b"x" * 4096):
            pass
    return disk / "filler"


def test_a_full_disk_costs_records_and_nothing_else(tmp_path, disk):
    """Steps continue while the disk is full; later records contain the number of lost records."""
    changes = small(train__steps=100_000, report__log_every=1, checkpoint__at_end=False)
    run = Run(tmp_path, changes, nproc=1, name=disk.name)
    run.until_step(5)
    filler = fill(disk)
    run.until(lambda: "records are dropped and counted" in run.text())
    # A short record may still fit into the last block of its file. The pulse is a copy.
    before = run.until(lambda: step_of(disk))
    full = run.until(lambda: max(step_of(disk) - before, 0)) + before
    filler.unlink()
    after = run.until(lambda: [r for r in readable(disk) if r["step"] > full])[-1]
    assert after["dropped_records"] > 0
    (disk / rundir.HALT).touch()
    assert run.wait() == 0, run.text()
    assert run.metrics()["reason"] == rundir.HALT


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_tensorboard_continues_in_a_new_file_after_a_full_disk(disk):
    member = Member(disk, {})
    board, recorder, written = TensorBoard(member), member.recorder, threading.Event()

    def add(step: int, record: bytes = bytes(1000)) -> None:
        recorder.put(disk / "heartbeat", record)
        board.add(step, {"loss": 0.5})
        recorder.call(written.set)
        assert written.wait(60)
        written.clear()

    add(1)
    filler, step = fill(disk), 2
    while "No space left" not in recorder.trouble:
        add(step := step + 1, b"")
    for _ in range(50):
        fill(disk)
        add(step := step + 1)
    assert len(list((disk / "tb").iterdir())) < 9
    filler.unlink()
    add(step + 1)
    lost = recorder.dropped
    add(step + 2)
    assert recorder.dropped == lost
    assert sum(file.stat().st_size > 0 for file in (disk / "tb").iterdir()) == 2
    assert recorder.close()


def step_of(run: Path) -> int:
    found = pulse.read(rundir.pulse(run, 0))
    return found.step if found else 0


def in_the_way(file: Path, folder: Path) -> bool:
    """Replaces a directory, to which a trainer saves, by a file; returns whether this worked."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        file.rename(folder)
    return folder.is_file()


SAVING = small(
    train__steps=100_000, report__log_every=200, checkpoint__every=20, checkpoint__keep_last=1,
)  # fmt: skip


def test_a_full_disk_costs_no_good_checkpoint_and_a_gone_directory_is_named(tmp_path, disk):
    run = Run(tmp_path, SAVING, nproc=1, name=disk.name)
    first = run.until(lambda: manifest.newest_first(disk))[0]
    filler = fill(disk)
    # The removal of an old checkpoint frees disk space, so the disk is filled again each time.
    run.until(lambda: fill(disk) and "the save of the checkpoint" in run.text())
    (good,) = manifest.newest_first(disk)
    manifest.verify(good)
    filler.unlink()
    run.until(lambda: (manifest.newest_first(disk) or [first])[0] > good)
    (disk / "file").write_text("in the way")
    run.until(lambda: in_the_way(disk / "file", disk / "checkpoints"))
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.wait() == 15
    assert "Traceback" not in run.text()
    assert f"the checkpoint {disk / 'checkpoints'}" in run.metrics()["reason"]


@pytest.mark.skipif(os.geteuid() != 0, reason="a read-only mount needs root")
def test_a_read_only_or_deleted_directory_is_named_and_the_last_checkpoint_stays_good(tmp_path):
    run = Run(tmp_path, SAVING, nproc=1, name="ro")
    folder = run.path / "checkpoints"
    run.until(lambda: manifest.newest_first(run.path))
    if subprocess.run(["mount", "--bind", folder, folder], capture_output=True).returncode:
        pytest.skip("this machine does not let root mount a directory read-only")
    try:
        # The mount is busy while a save is written, so the remount is tried until it works.
        read_only = ["mount", "-o", "remount,ro,bind", folder]
        run.until(lambda: not subprocess.run(read_only, capture_output=True).returncode)
        run.until(lambda: "Read-only file system" in run.text())
        good = manifest.newest_first(run.path)[0]
        manifest.verify(good)
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
    run.until(lambda: manifest.newest_first(run.path)[0] > good)
    # The directory is renamed first, because a save during the removal could create it again.
    shutil.rmtree(run.path.rename(tmp_path / "away"), ignore_errors=True)
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.wait() == 15
    assert "Traceback" not in run.text()
    assert any(f"the checkpoint {folder}" in line for line in run.text().splitlines()[-4:])


def readable(run: Path) -> list[dict]:
    """Returns the progress records; lines that are not JSON are left out."""
    records = []
    for line in (run / "heartbeat_rank0.jsonl").read_bytes().split(b"\n"):
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return [record for record in records if record.get("msg") == "progress"]
