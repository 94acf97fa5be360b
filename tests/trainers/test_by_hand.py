"""Trainings that are started by hand: one at a time per directory, each a new attempt."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from console.sources.run import RunSource
from tests.trainers.runs import ROOT, Run, latest_checkpoint, small
from trainers import manifest
from trainers.contract import rundir
from trainers.contract.errors import RefusedError

RESUME = {"checkpoint.resume": "auto"}
STEPS = small(train__steps=4, report__disable_tb=1)


def test_a_resume_in_the_directory_of_a_living_training_is_rejected(tmp_path):
    first = Run(tmp_path, small(train__steps=100_000, checkpoint__every=2), nproc=1)
    first.until_step(4)
    second = Run(tmp_path, small(train__steps=100_000) | RESUME, nproc=1)
    assert second.wait() == 13
    assert f"a training in {first.path} is alive (rank 0); end it first" in second.text()
    (first.path / rundir.HALT).touch()
    first.done()
    assert len(first.records(0, "boot")) == 1
    assert Run(tmp_path, STEPS | RESUME, nproc=1).done().records(0, "boot")[1]["attempt"] == 2


LOCKS = """
import os, sys, time
from pathlib import Path
from trainers import manifest
from trainers.contract import rundir
rundir.lock_rank(Path(sys.argv[1]), 0)
child = os.fork()
print(child, flush=True)
time.sleep(600)
"""


def test_a_lock_ends_with_its_process_although_a_forked_child_lives(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", LOCKS, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(RefusedError, match="end it first"):
            rundir.lock_rank(tmp_path, 0)
        rundir.lock_rank(tmp_path, 1)
        process.kill()
        process.wait()
        rundir.lock_rank(tmp_path, 0)
    finally:
        os.killpg(process.pid, signal.SIGKILL)


def test_a_directory_without_room_for_a_lock_is_trained_in(tmp_path):
    (tmp_path / rundir.TRAINING_LOCK).mkdir()
    rundir.lock_rank(tmp_path, 0)


def test_a_training_by_hand_shows_its_steps_and_its_unit_and_no_two_attempts_have_one_number(
    tmp_path,
):
    """The two claims are about one training, because a training is slow to start."""
    state = RunSource(Run(tmp_path, STEPS, nproc=1).done().path).poll()
    assert (state.step, state.steps_planned, state.figures["loss"].unit) == (4, 4, "nats/token")
    assert Run(tmp_path, STEPS | RESUME | {"train.lr": 0.5}, nproc=1).wait() == 13
    last = Run(tmp_path, STEPS | RESUME | {"train.steps": 6}, nproc=1).done()
    assert [record["attempt"] for record in last.records(0, "boot")] == [1, 2, 3]
    assert last.metrics()["attempt"] == 3
    places = [(record["attempt"], record["n"]) for record in last.records()]
    assert len(set(places)) == len(places)


def test_a_resume_without_a_further_step_keeps_the_checkpoint_and_the_figures(tmp_path):
    """In another directory, a resume without a further step saves a checkpoint."""
    changes, target = small(train__steps=3), tmp_path / "model"
    first = Run(tmp_path, changes, nproc=1).done()
    path, before = latest_checkpoint(first.path), first.metrics()
    assert path is not None
    saved = path.stat().st_ino
    changes |= {"checkpoint.export": str(target)}
    after = Run(tmp_path, changes | {"checkpoint.resume": "auto"}, nproc=1).done().metrics()
    assert path.stat().st_ino == saved
    assert target.exists()
    assert (before["attempt"], after["attempt"], after["reason"]) == (1, 2, "done")
    assert before["loss"] > 0
    assert before["toks_per_s"] > 0
    own = {"attempt", "ts", "wall_s"}
    assert {k: x for k, x in after.items() if k not in own} == {
        k: x for k, x in before.items() if k not in own
    }
    changes |= {"checkpoint.resume": str(first.path)}
    other = Run(tmp_path, changes, nproc=1, name="other").done()
    copied = latest_checkpoint(other.path)
    assert copied is not None
    assert manifest.verify(copied).step == 3
    assert (other.metrics()["steps_done"], other.metrics()["loss"]) == (3, None)
