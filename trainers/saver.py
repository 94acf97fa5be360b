"""Writes checkpoints in the foreground or in a background thread; rank 0 completes them.

If the write fails on one rank, the save fails on all ranks. The timeout of a separate process group
limits each wait of a background save for other ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from trainers import checkpoint, manifest
from trainers.checkpoint import RANDOM, Parts, Result, State, on_all_ranks, reason_of
from trainers.contract import rundir
from trainers.failures import CheckpointError
from trainers.manifest import Manifest
from trainers.schema import CheckpointSettings

FINISH_S = 25.0
"""Longest wait for a background save after an error; torchrun may kill a rank after 30 s."""


class Saver:
    """Writes the checkpoints of a run, one at a time; all ranks must start the same saves.

    `ours` returns whether the run directory is still at its path. Only rank 0 calls `ours`, also
    from the background thread. If the result is False, the save fails, and rank 0 removes no files.
    `saved` gets the step of each written checkpoint and, on rank 0, sentences on old checkpoints
    that cannot be removed. A background save calls `saved` in its thread, because the present step
    may never end.
    """

    def __init__(
        self, run: Path, parts: Parts, settings: CheckpointSettings,
        ours: Callable[[], bool] = lambda: True,
        saved: Callable[[int, list[str]], object] = lambda *_: None,
    ):  # fmt: skip
        self._run, self._parts, self._settings, self._ours = run, parts, settings, ours
        self._saved = saved
        device, choice = parts.parallel.device, settings.background
        on_cuda = device.type == "cuda"
        self.in_background = choice == "on" or (choice == "auto" and on_cuda)
        """True if the saves before the end of the training use `save_async`."""
        self._group: Any = dist.new_group(backend="gloo") if parts.parallel.world > 1 else None
        # DCP synchronises the current GPU of its thread, which is GPU 0 in a new thread.
        choose_gpu = partial(torch.cuda.set_device, device) if on_cuda else None
        self._worker = ThreadPoolExecutor(1, "nsa-saver", choose_gpu)
        self._pending: tuple[Future[Path], Path] | None = None

    def save(self, position: Manifest, keeps_all: bool = False) -> Path:
        """Writes a checkpoint and returns its directory. Raises CheckpointError on all ranks.

        With `keeps_all`, no old checkpoint is removed.
        """
        target, state, writer = self._begin(position)
        return self._alike(target, lambda: self._write(state, writer, position, target, keeps_all))

    def save_async(self, position: Manifest) -> None:
        """Copies the state and writes it in the background; `collect` returns an error of the save.

        An earlier save must have been collected after its end. Raises CheckpointError on all ranks
        if the save cannot start.
        """
        target, state, writer = self._begin(position)
        copy = self._alike(target, lambda: writer.stage(state))
        # The worker stores any exception in the future, also a BaseException such as DCP's.
        written = self._worker.submit(self._write, copy, writer, position, target)
        self._pending = written, target

    @property
    def busy(self) -> bool:
        """True from the start of a background save until it is collected after its end."""
        return self._pending is not None

    def collect(self, wait_s: float | None = 0) -> list[CheckpointError]:
        """Returns the error of a background save that has ended, once; otherwise [].

        Waits up to `wait_s` seconds for a running save, or without limit if `wait_s` is None.
        """
        if self._pending is None or not futures.wait((self._pending[0],), wait_s).done:
            return []
        (written, target), self._pending = self._pending, None
        error = written.exception()
        return [] if error is None else [_failed(target, reason_of(error))]

    def finish(self) -> list[CheckpointError]:
        """Returns the error of a background save that still runs; raises nothing.

        If the save is not finished within `FINISH_S`, this is an error. The next save of the run
        removes the files of such a save.
        """
        errors = self.collect(FINISH_S)
        if self._pending is None:
            return errors
        (_, target), self._pending = self._pending, None
        self._saved = lambda *_: None  # no record may follow the exit record
        late = f"it was not finished within {FINISH_S:g} s after the training failed"
        return [_failed(target, late)]

    def _begin(self, position: Manifest) -> tuple[Path, State, FileSystemWriter]:
        """Removes the files of a killed save. Returns the target, the state, and a writer."""
        parallel, folder = self._parts.parallel, self._run / rundir.CHECKPOINTS
        target = folder / manifest.name_of(position.step)

        def clear() -> None:
            if parallel.rank == 0:
                self._refuse_another_run()
                folder.mkdir(mode=0o700, exist_ok=True)
                manifest.clear_leftovers(self._run)

        self._alike(target, clear)
        random = torch.stack(parallel.gather(checkpoint.random_state(parallel.device)))
        state = self._parts.state() | {RANDOM: random}
        return target, state, FileSystemWriter(_temporary(target))

    def _alike(self, target: Path, work: Callable[[], Result]) -> Result:
        return on_all_ranks(self._parts.parallel, work, _not_written(target))

    def _write(
        self, state: State, writer: FileSystemWriter, position: Manifest, target: Path,
        keeps_all: bool = False,
    ) -> Path:  # fmt: skip
        """Writes, completes and reports one checkpoint."""
        try:
            state_dict_saver.save(
                state, storage_writer=writer, process_group=self._group,
                no_dist=self._group is None,
            )  # fmt: skip
            self._seal(position, target, keeps_all)
        except BaseException:
            if self._parts.parallel.rank == 0 and self._ours():
                rundir.remove_tree(_temporary(target))
            raise
        return target

    def _seal(self, position: Manifest, target: Path, keeps_all: bool) -> None:
        """Completes and reports a written checkpoint; the ranks above 0 wait for the result.

        Rank 0 reports it before it sends the result, because the other ranks may have died.
        """
        parallel, reason, remain = self._parts.parallel, "", list[str]()
        if parallel.rank == 0:
            try:
                self._refuse_another_run()
                whole = replace(position, world=parallel.world)
                manifest.complete(_temporary(target), target, whole)
            except BaseException as error:
                reason = reason_of(error)
            else:
                # The new checkpoint is complete, even if an old one cannot be removed.
                last, every = self._settings.keep_last, self._settings.keep_every
                if not keeps_all:
                    remain = manifest.retain(self._run, position.step, last, every)
                self._saved(position.step, remain)
        if self._group is not None:
            message = [reason]
            dist.broadcast_object_list(message, group=self._group, group_src=0)
            reason = message[0]
        if reason:
            raise CheckpointError(reason)
        if parallel.rank:
            self._saved(position.step, [])

    def _refuse_another_run(self) -> None:
        if not self._ours():
            raise CheckpointError(f"the run directory {self._run} was moved or replaced")


def _not_written(target: Path) -> str:
    return f"an error in the save of the checkpoint {target}"


def _failed(target: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{_not_written(target)}: {reason}")


def _temporary(target: Path) -> Path:
    return target.with_name(f".{target.name}.tmp")
