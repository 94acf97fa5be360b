"""Saves: a background save has one result, and leaves a whole checkpoint or none."""

from __future__ import annotations

import os
import resource
import signal
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.launches import wait_for
from tests.mounts import tmpfs
from tests.trainers.ranks import TIMEOUT_MIN, together
from tests.trainers.runs import Run, latest_checkpoint, small
from tests.trainers.test_checkpoint import at, made, saved, train
from trainers import checkpoint, manifest, saver
from trainers.contract.rundir import CHECKPOINT_NOW, HALT
from trainers.failures import CheckpointError
from trainers.parallel import Single
from trainers.saver import Saver
from trainers.schema import CheckpointSettings

BACKGROUND = CheckpointSettings(background="on")


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def waited(saver: Saver) -> list[CheckpointError]:
    """Returns the error of a background save after a wait of up to 120 s."""
    errors = saver.collect(wait_s=120)
    assert not saver.busy
    return errors


def test_a_background_save_holds_the_moment_it_began(tmp_path):
    parts = made(1)
    saver = Saver(tmp_path, parts, BACKGROUND)
    before = {name: weight.clone() for name, weight in parts.model.state_dict().items()}
    saver.save_async(at(1))
    train(parts, 0, 2)
    assert waited(saver) == []
    weights = checkpoint.load_weights(*manifest.newest_first(tmp_path))
    assert all(torch.equal(weights[name], before[name]) for name in before)


def test_the_thread_of_background_saves_uses_the_gpu_of_its_rank(tmp_path, monkeypatch):
    """By default, this thread of each rank would use GPU 0."""
    chosen, own = [], torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for device in (torch.device("cpu"), own):
        of = replace(made(1), parallel=Single(device))
        Saver(tmp_path, of, BACKGROUND)._worker.submit(int).result()
    assert chosen == [own]


def test_a_failed_background_save_is_told_once_and_harms_nothing(tmp_path):
    parts = made(1)
    (whole,) = saved(tmp_path, parts, 1)
    saver = Saver(tmp_path, parts, BACKGROUND)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        saver.save_async(at(2))
        (failed,) = waited(saver)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert saver.collect() == []
    assert isinstance(failed, CheckpointError)
    assert str(whole.with_name("step_00000002")) in str(failed)
    assert latest_checkpoint(tmp_path) == whole
    manifest.verify(whole)
    assert names(tmp_path) == ["latest", whole.name]


def test_the_folder_of_the_checkpoints_may_be_a_link_to_another_disk(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "checkpoints").symlink_to("disk")
    *_, newest = saved(tmp_path, made(1), 1, 2)
    assert latest_checkpoint(tmp_path) == newest


def test_a_checkpoint_without_latest_is_complete_and_no_message_says_that_it_failed(tmp_path):
    (tmp_path / "checkpoints" / "latest").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="the checkpoint is complete, but") as raised:
        saved(tmp_path, made(1), 1)
    assert "failed" not in str(raised.value)
    assert [manifest.verify(path).step for path in manifest.newest_first(tmp_path)] == [1]


class Raises:
    """A value of the manifest whose copy raises an error in the thread of the saver."""

    def __init__(self, error: BaseException):
        self.error = error

    def __deepcopy__(self, memo):
        raise self.error


ERRORS = [MemoryError(), KeyError("a"), SystemExit(1)]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_whatever_is_raised_in_the_background_ends_the_wait_and_is_told(tmp_path, error):
    saver = Saver(tmp_path, made(1), BACKGROUND)
    saver.save_async(replace(at(1), data={"x": Raises(error)}))
    (failed,) = waited(saver)
    assert isinstance(failed, CheckpointError)
    assert type(error).__name__ in str(failed)
    assert names(tmp_path) == []
    assert isinstance(saver.save(at(2)), Path)


def test_an_error_of_the_training_lets_a_background_save_end(tmp_path):
    changes = small(train__steps=100, checkpoint__every=5, checkpoint__background="on")
    run = Run(tmp_path, changes, nproc=1, broken="bug_while_saving")
    assert run.wait() == 1
    whole = manifest.newest_first(run.path)
    assert names(run.path) == ["latest", *sorted(path.name for path in whole)]
    assert [manifest.verify(path).step for path in whole][-1:] == [5]
    messages = [record["msg"] for record in run.records(0)]
    assert messages.index("checkpoint") < messages.index("error")
    (error,) = run.records(0, "error")
    assert (error["error_class"], error["exit_code"]) == ("ZeroDivisionError", 1)
    assert run.metrics()["reason"] == "ZeroDivisionError: a real bug"


def test_a_background_save_is_recorded_while_a_step_does_not_end(tmp_path):
    changes = small(train__steps=100, checkpoint__every=5, checkpoint__background="on")
    run = Run(tmp_path, changes, nproc=1, broken="hang_while_saving")
    try:
        (record,) = run.until(lambda: run.records(0, "checkpoint"), 60)
        assert (record["step"], record["path"]) == (5, "step_00000005")
        assert latest_checkpoint(run.path) == run.path / "checkpoints" / "step_00000005"
    finally:
        run.process.kill()
        run.process.wait()


def test_a_background_save_that_fails_is_recorded_once_and_before_the_next_save(tmp_path):
    changes = small(
        train__steps=6, checkpoint__every=2, checkpoint__background="on", checkpoint__at_end=False
    )
    run = Run(tmp_path, changes, nproc=1, broken="first_save_fails").done()
    failed, *saved = run.records(0, "checkpoint", "checkpoint_failed")
    assert (failed["msg"], [record["step"] for record in saved]) == ("checkpoint_failed", [4, 6])
    assert "step_00000002: OSError: [Errno 28] No space left on device" in failed["error"]


class Leaves(Saver):
    """A rank that stops itself after it has copied its state, before it writes the copy."""

    how = signal.SIGSTOP

    def _write(self, *arguments):
        while not (self._run / "began").exists():  # rank 0 creates this file after its copy
            time.sleep(0.01)
        os.kill(os.getpid(), self.how)
        return super()._write(*arguments)


class Dies(Leaves):
    how = signal.SIGKILL


@pytest.mark.parametrize("peer", [Leaves, Dies])
def test_a_save_that_a_peer_leaves_is_given_up_and_its_files_go_with_the_next(
    tmp_path, peer, monkeypatch
):
    monkeypatch.setattr(saver, "FINISH_S", 2.0)
    run = tmp_path / "run"

    def work(rank, parallel, member):
        del member
        mine = (peer if rank else Saver)(run, made(1, parallel), BACKGROUND)
        mine.save_async(at(1))
        if rank:
            time.sleep(600)
        began = time.monotonic()
        (run / "began").touch()
        (failed,) = mine.finish()
        return time.monotonic() - began, str(failed)

    run.mkdir()
    took_s, failed = together([run, run], work, first_only=True)[0]
    assert took_s < 60 * TIMEOUT_MIN, "the limit of a collective is longer"
    assert "an error in the save" in failed
    saved(run, made(1), 2)
    assert names(run) == ["latest", "step_00000002"]


class DiesLast(Saver):
    """A rank that is killed while rank 0 completes the checkpoint."""

    def _seal(self, *arguments):
        (self._run / "gone").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_complete_checkpoint_is_recorded_also_if_a_peer_has_died(tmp_path, monkeypatch):
    run, complete = tmp_path / "run", manifest.complete

    def late(*arguments):
        assert wait_for((run / "gone").exists)
        time.sleep(0.5)
        complete(*arguments)

    def work(rank, parallel, member):
        del member
        told = []
        mine = (DiesLast if rank else Saver)(
            run, made(1, parallel), BACKGROUND, saved=lambda *each: told.append(each)
        )
        mine.save_async(at(1))
        return mine.collect(None), told

    monkeypatch.setattr(manifest, "complete", late)
    run.mkdir()
    errors, told = together([run, run], work, first_only=True)[0]
    assert [manifest.verify(path).step for path in manifest.newest_first(run)] == [1]
    assert told == [(1, [])]
    assert len(errors) == 1


def test_an_old_checkpoint_that_cannot_be_removed_does_not_fail_the_next_saves(tmp_path):
    """The old checkpoint and the temporary directory of a killed save contain mount points.

    No reader finds a part of the old checkpoint.
    """
    run = tmp_path / "run"
    old, _ = saved(run, made(1), 1, 2)
    left, aside = (old.with_name(name) for name in (".step_00000009.tmp", f".{old.name}.removed"))
    left.mkdir()
    with ExitStack() as mounted:
        for folder in (old, left):
            (folder / "in").mkdir()
            mounted.enter_context(tmpfs(folder / "in", 1))
        told = []
        mine = Saver(
            run, made(1), CheckpointSettings(keep_last=1), saved=lambda *each: told.append(each)
        )
        for step in (3, 4):
            assert mine.save(at(step)) == latest_checkpoint(run)
        assert [step for step, _ in told] == [3, 4]
        (remark,) = told[0][1] + told[1][1]
        assert f"cannot remove the old checkpoint {aside}: " in remark
        assert [path.name for path in manifest.newest_first(run)] == ["step_00000004"]
        aside.rename(old)  # the end of the test unmounts what is in it


@pytest.mark.parametrize(("at_end", "background"), [(0, "off"), (0, "on"), (1, "on")])
def test_each_save_is_recorded_once_also_that_of_the_last_step(tmp_path, at_end, background):
    changes = small(
        train__steps=4, checkpoint__every=2, checkpoint__at_end=at_end,
        checkpoint__background=background,
    )  # fmt: skip
    run = Run(tmp_path, changes, nproc=1).done()
    assert [record["step"] for record in run.records(0, "checkpoint")] == [2, 4]
    assert run.text().count("saved checkpoints/") == 2


def test_a_save_into_a_directory_that_was_replaced_is_refused_and_nothing_there_is_touched(
    tmp_path,
):
    """The directory is replaced before or during a save; the moved directory keeps its files."""
    run, away = tmp_path / "run", tmp_path / "away"
    saved(run, made(1), 1)
    home = run.stat()
    mine = Saver(run, made(1), BACKGROUND, lambda: os.path.samestat(run.stat(), home))
    move = MovesAt(run, away)
    mine.save_async(replace(at(2), data={"x": "before"}))
    assert waited(mine) == []
    moving = Saver(run, made(1), BACKGROUND, move)
    moving.save_async(at(9))  # the run that now has this path saves the same step
    (failed,) = waited(moving)
    assert "step_00000009: the run directory" in str(failed)
    assert f"the run directory {run} was moved or replaced" in str(failed)
    assert names(run) == [".step_00000009.tmp"]
    for save in (mine.save, mine.save_async):
        with pytest.raises(CheckpointError, match="was moved or replaced"):
            save(at(4))
    assert names(run) == [".step_00000009.tmp"]
    assert {"step_00000001", "step_00000002"} < set(names(away))


class MovesAt:
    """Replaces the run directory at the second call, which is made when a save is completed."""

    def __init__(self, run: Path, away: Path):
        self.run, self.away, self.asked = run, away, 0
        self.home = run.stat()

    def __call__(self) -> bool:
        self.asked += 1
        if self.asked == 2:
            self.run.rename(self.away)
            (self.run / "checkpoints" / ".step_00000009.tmp").mkdir(parents=True)
        return os.path.samestat(self.run.stat(), self.home)


@pytest.mark.parametrize("background", [True, False])
def test_a_directory_that_rank_0_finds_replaced_fails_the_save_on_all_ranks(tmp_path, background):
    run = tmp_path / "run"

    def work(rank, parallel, member):
        del member
        move = MovesAt(run, tmp_path / "away") if rank == 0 else pytest.fail
        mine = Saver(run, made(1, parallel), BACKGROUND, move)
        if not background:
            return mine.save(at(1))
        mine.save_async(at(1))
        (failed,) = mine.collect(None)
        raise failed

    for name, code, sentence in together([run, run], work):
        assert (name, code) == ("CheckpointError", 15)
        assert sentence.endswith(f"the run directory {run} was moved or replaced")


@pytest.mark.parametrize(
    ("every", "bad", "log_every", "code", "saved"),
    [(4, (4, 5), 1, 0, [6, 8, 12]), (2, (3, 4, 5), 1, 10, [2]), (2, (8, 9, 10), 9, 10, [2, 4, 6])],
)
def test_no_due_checkpoint_has_the_weights_of_a_non_finite_step(
    tmp_path, every, bad, log_every, code, saved
):
    """The save waits for a finite step; after three non-finite steps the training ends."""
    changes = small(
        train__steps=12, train__max_nonfinite_steps=3, report__log_every=log_every,
        checkpoint__every=every, checkpoint__at_end=False,
    )  # fmt: skip
    nans = ",".join(f"nan@{step}" for step in bad)
    run = Run(tmp_path, changes, nproc=1, flags={"NSA_DRILL": nans})
    assert run.wait() == code, run.text()
    assert [record["step"] for record in run.records(0, "checkpoint")] == saved
    assert [manifest.step_of(path) for path in manifest.newest_first(run.path)] == saved[::-1]


def test_a_halt_during_non_finite_steps_keeps_the_good_checkpoint(tmp_path):
    """A requested checkpoint waits for a finite step, and the checkpoint of the halt is added."""
    changes = small(
        train__steps=5000, train__max_nonfinite_steps=5000, report__log_every=1,
        checkpoint__every=4, checkpoint__keep_last=1,
    )  # fmt: skip
    nans = ",".join(f"nan@{step}" for step in range(6, 5001))
    run = Run(tmp_path, changes, nproc=1, flags={"NSA_DRILL": nans})
    run.until_step(8)
    (run.path / CHECKPOINT_NOW).touch()
    run.until(lambda: "requested checkpoint is saved after the next finite step" in run.text())
    (run.path / HALT).touch()
    assert run.wait() == 0, run.text()
    steps = [manifest.step_of(path) for path in manifest.newest_first(run.path)]
    assert steps == [run.records(0, "halt")[-1]["step"], 4]
    assert "may be unusable: the last step was not finite" in run.text()
