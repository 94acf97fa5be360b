"""Writing checkpoints: in the foreground or beside the training, sealed by rank 0.

All ranks call alike, and a save fails on all of them or on none. The background thread is bounded
by the time limit of its own process group; after an error of the training, by `FINISH_S`.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from trainers import manifest
from trainers.checkpoint import (
    ALONE,
    RANDOM,
    Parts,
    Result,
    State,
    alike,
    random_state,
    reason_of,
)
from trainers.contract import rundir
from trainers.failures import CheckpointError
from trainers.manifest import Manifest
from trainers.schema import CheckpointSettings

FINISH_S, HURRY_S = 60.0, 10.0
"""Longest wait for a background save after an error; the second once this process has to end."""
REMOVE_S, POLL_S = 5.0, 0.1


class Saver:
    """Writes the checkpoints of a run, one at a time; all ranks call the same methods alike.

    `ours` says whether the run directory is still the one at its path. Rank 0 asks it, also from
    the background thread; where it says no, nothing is sealed and nothing there is removed.
    """

    def __init__(
        self, run: Path, parts: Parts, settings: CheckpointSettings,
        ours: Callable[[], bool] = lambda: True,
    ):  # fmt: skip
        self._run, self._parts, self._settings, self._ours = run, parts, settings, ours
        warnings.filterwarnings("ignore", ALONE, UserWarning)
        device = parts.parallel.device.type
        wish = settings.background
        self._background = wish == "on" or (wish == "auto" and device == "cuda")
        self._group = cast(
            "dist.ProcessGroup | None",
            dist.new_group(backend="gloo") if parts.parallel.world > 1 else None,
        )
        # The second worker removes what a first one that hangs has written.
        self._workers = ThreadPoolExecutor(2, thread_name_prefix="nsa-saver")
        self._pending: tuple[Future[Path], Path] | None = None
        self._ended: list[Path | CheckpointError] = []
        self._sealed: Path | None = None

    def save(self, position: Manifest) -> Path:
        """Writes a checkpoint and returns its directory. Raises CheckpointError on all ranks."""
        target, random = self._begin(position)
        writer = FileSystemWriter(_temporary(target))
        return self._alike(
            target, lambda: self._write(self._state(random), writer, position, target)
        )

    def save_beside(self, position: Manifest) -> None:
        """Copies the state and writes it in the background; `collect` returns how that ended.

        Raises CheckpointError on all ranks where it cannot begin.
        """
        if not self._background:
            raise ValueError("this run saves in the foreground")
        target, random = self._begin(position)
        writer = FileSystemWriter(_temporary(target))
        copy = self._alike(target, lambda: writer.stage(self._state(random)))
        # A worker's future settles whatever is raised, so `wait` always ends.
        written = self._workers.submit(self._write, copy, writer, position, target)
        self._pending = written, target

    @property
    def in_background(self) -> bool:
        """Says whether `save_beside` is the way of this run."""
        return self._background

    @property
    def busy(self) -> bool:
        """Says whether a background save has not been waited for or collected."""
        return self._pending is not None

    def collect(self) -> list[Path | CheckpointError]:
        """Returns how background saves ended, each of them once."""
        if self._pending is not None and self._pending[0].done():
            self.wait()
        ended, self._ended = self._ended, []
        return ended

    def wait(self) -> None:
        """Waits for a background save; `collect` returns how it ended."""
        if self._pending is None:
            return
        (written, target), self._pending = self._pending, None
        error = written.exception()
        self._ended.append(target if error is None else _failed(target, reason_of(error)))

    def finish(self, hurry: Callable[[], bool] = lambda: False) -> list[Path | CheckpointError]:
        """Ends the background save of a training that failed; raises nothing.

        It gets `FINISH_S` seconds, `HURRY_S` once `hurry` says that this process is to end; then
        what it has written is removed. Returns what `collect` does.
        """
        began = time.monotonic()
        while self._pending is not None and not self._pending[0].done():
            if time.monotonic() - began > (HURRY_S if hurry() else FINISH_S):
                (_, target), self._pending = self._pending, None
                self._ended.append(self._give_up(target, time.monotonic() - began))
            else:
                futures.wait((self._pending[0],), POLL_S)
        return self.collect()

    def _give_up(self, target: Path, waited_s: float) -> Path | CheckpointError:
        late = f"it was not finished within {waited_s:.0f} s after the training failed"
        if self._parts.parallel.rank == 0:
            try:
                self._workers.submit(self._discard, target).result(REMOVE_S)
            except (TimeoutError, RuntimeError):
                late += f", and {_temporary(target).name} could not be removed"
            if self._sealed == target:
                return target
        return _failed(target, late)

    def _begin(self, position: Manifest) -> tuple[Path, Tensor]:
        """Clears what a killed save left. Returns the directory to write and all generators."""
        self.wait()
        parallel, folder = self._parts.parallel, self._run / rundir.CHECKPOINTS
        target = folder / manifest.name_of(position.step)

        def clear() -> None:
            if parallel.rank == 0:
                self._refuse_another_run()
                folder.mkdir(mode=0o700, exist_ok=True)
                manifest.clear_leftovers(self._run)

        self._alike(target, clear)
        random = torch.stack(parallel.gather(random_state(parallel.device))).cpu()
        return target, random

    def _state(self, random: Tensor) -> State:
        return self._parts.state() | {RANDOM: random}

    def _alike(self, target: Path, work: Callable[[], Result]) -> Result:
        return alike(self._parts.parallel, work, _not_written(target))

    def _write(
        self, state: State, writer: FileSystemWriter, position: Manifest, target: Path
    ) -> Path:
        """Writes and seals one checkpoint. Raises on all ranks what failed on rank 0."""
        try:
            state_dict_saver.save(
                state, storage_writer=writer, process_group=self._group,
                no_dist=self._group is None,
            )  # fmt: skip
            self._seal(position, target)
        except BaseException:
            if self._parts.parallel.rank == 0:
                self._discard(target)
            raise
        return target

    def _seal(self, position: Manifest, target: Path) -> None:
        """Makes a written checkpoint whole on rank 0; the others wait for that."""
        parallel, reason = self._parts.parallel, ""
        if parallel.rank == 0:
            try:
                self._refuse_another_run()
                whole = replace(position, world=parallel.world)
                manifest.seal(_temporary(target), target, whole)
                self._sealed = target
            except BaseException as error:
                reason = reason_of(error)
            else:
                # An old checkpoint that cannot be removed stays: the new one is whole all the same.
                with contextlib.suppress(OSError):
                    manifest.retain(self._run, self._settings.keep_last, self._settings.keep_every)
        if self._group is not None:
            told = [reason]
            try:
                dist.broadcast_object_list(told, group=self._group, group_src=0)
            except RuntimeError:
                # The checkpoint of rank 0 is as it is, also where another rank has gone since.
                if parallel.rank:
                    raise
            reason = told[0]
        if reason:
            raise CheckpointError(reason)

    def _refuse_another_run(self) -> None:
        if not self._ours():
            raise CheckpointError(f"the run directory {self._run} was moved or replaced")

    def _discard(self, target: Path) -> None:
        """Removes an unfinished checkpoint (rank 0).

        The rename comes first: either it succeeds or that of a seal under way.
        """
        if not self._ours():
            return
        temporary = _temporary(target)
        gone = temporary.with_suffix(".gone")
        with contextlib.suppress(OSError):
            temporary.rename(gone)
        rundir.remove_tree(gone)


def _not_written(target: Path) -> str:
    return f"the save of the checkpoint {target} failed"


def _failed(target: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{_not_written(target)}: {reason}")


def _temporary(target: Path) -> Path:
    return target.with_name(f".{target.name}.tmp")
