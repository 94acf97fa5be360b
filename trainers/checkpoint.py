"""Saving and loading what a training consists of, through torch.distributed.checkpoint (DCP).

The state is tensors under parameter names: weights, AdamW's averages, loss scale, generators. It
does not depend on how many ranks wrote it or how they shared the work, and loading it runs no code:
tensors load with `weights_only=True`, and DCP's index, a pickle, through a list of its own classes.
What makes a directory whole and checkable is `trainers.manifest`.
"""

from __future__ import annotations

import contextlib
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)

from nsa.backends import Switches
from nsa.config import ModelConfig
from nsa.model import Transformer
from trainers import manifest, optim, settings
from trainers.contract import rundir
from trainers.contract.errors import UsageError
from trainers.failures import CheckpointError
from trainers.manifest import MANIFEST, Manifest
from trainers.parallel import Single
from trainers.precision import LossScale
from trainers.schema import CheckpointSettings

State = dict[str, Any]
RANDOM = "random"


@dataclass(frozen=True, slots=True)
class Parts:
    """The tensors of a training and who holds them."""

    parallel: Single
    model: nn.Module
    optimizer: torch.optim.AdamW
    loss_scale: LossScale

    def state(self) -> State:
        """Returns all tensors but the generators', by section and parameter name; views."""
        plain = self.parallel.plain(self.model)
        for p in plain.parameters():
            if not self.optimizer.state[p]:
                self.optimizer.state[p] = optim.empty_state(p)
        averages = {name: self.optimizer.state[p] for name, p in plain.named_parameters()}
        scale = {"scale": self.loss_scale.scale, "finite_steps": self.loss_scale.finite_steps}
        return {"model": plain.state_dict(), "optimizer": averages, "loss_scale": scale}


ALONE = "torch.distributed is disabled"
"""How DCP's warning begins that it saves or loads in one process, which is what we want of it."""


class Saver:
    """Writes the checkpoints of a run, one at a time; all ranks call the same methods alike."""

    def __init__(self, run: Path, parts: Parts, settings: CheckpointSettings):
        self._run, self._parts, self._settings = run, parts, settings
        warnings.filterwarnings("ignore", ALONE, UserWarning)
        device = parts.parallel.device.type
        wish = settings.background
        self._background = wish == "on" or (wish == "auto" and device == "cuda")
        self._group = cast(
            "dist.ProcessGroup | None",
            dist.new_group(backend="gloo") if parts.parallel.world > 1 else None,
        )
        self._pending: Future[Path] | None = None

    def save(self, position: Manifest) -> Path:
        """Writes a checkpoint and returns its directory. Raises CheckpointError on all ranks."""
        self.wait()
        target, temporary = self._paths(position.step)
        state = self._begin()
        failure: BaseException | None = None
        try:
            state_dict_saver.save(state, storage_writer=FileSystemWriter(temporary),
                     process_group=self._group, no_dist=self._group is None)  # fmt: skip
            if self._parts.parallel.rank == 0:
                self._seal(position)
        except (CheckpointException, OSError, RuntimeError) as error:
            failure = error
        self._agree(failure, target)
        return target

    def save_beside(self, position: Manifest) -> None:
        """Copies the state and writes it while training goes on; `collect` tells how it went."""
        if not self._background:
            raise ValueError("this run saves in the foreground")
        self.wait()
        _, temporary = self._paths(position.step)
        written = state_dict_saver.async_save(
            self._begin(), storage_writer=FileSystemWriter(temporary),
            process_group=self._group, no_dist=self._group is None,
        )  # fmt: skip
        self._pending = Future()
        cast("Future[object]", written).add_done_callback(self._finisher(position, self._pending))

    @property
    def in_background(self) -> bool:
        """Says whether `save_beside` is the way of this run."""
        return self._background

    def collect(self) -> Path | CheckpointError | None:
        """Returns how a save beside the training ended, once; None while there is nothing new."""
        if self._pending is None or not self._pending.done():
            return None
        ended, self._pending = self._pending, None
        error = ended.exception()
        return ended.result() if error is None else _as_error(error)

    def wait(self) -> None:
        """Waits for a save beside the training; its failure has harmed no checkpoint."""
        if self._pending is not None:
            self._pending.exception()

    def _paths(self, step: int) -> tuple[Path, Path]:
        folder = self._run / rundir.CHECKPOINTS
        return folder / manifest.name_of(step), folder / manifest.temporary_name(step)

    def _begin(self) -> State:
        """Clears what a killed save left, and returns the state to write."""
        parallel, failure = self._parts.parallel, None
        if parallel.rank == 0:
            try:
                (self._run / rundir.CHECKPOINTS).mkdir(mode=0o700, exist_ok=True)
                manifest.clear_leftovers(self._run)
            except OSError as error:
                failure = error
        self._agree(failure, self._run / rundir.CHECKPOINTS)
        random = torch.stack(parallel.gather(_random_state(parallel.device))).cpu()
        return self._parts.state() | {RANDOM: random}

    def _agree(self, failure: BaseException | None, target: Path) -> None:
        parallel = self._parts.parallel
        failed = torch.tensor(float(failure is not None), device=parallel.device)
        parallel.reduce(failed)()
        if failed.item():
            if parallel.rank == 0:
                for temporary in target.parent.glob(".step_*.tmp"):
                    shutil.rmtree(temporary, ignore_errors=True)
            reason = _reason(failure) if failure else "another rank says why"
            raise CheckpointError(
                f"the checkpoint {target} could not be written: {reason}"
            ) from failure

    def _seal(self, position: Manifest) -> Path:
        """Makes a written checkpoint whole, and lets old ones go (rank 0)."""
        target, temporary = self._paths(position.step)
        manifest.seal(temporary, target, replace(position, world=self._parts.parallel.world))
        manifest.retain(self._run, self._settings.keep_last, self._settings.keep_every)
        return target

    def _finisher(self, position: Manifest, ended: Future[Path]) -> Callable[[Any], None]:
        def finish(written: Any) -> None:
            target, temporary = self._paths(position.step)
            try:
                written.result()
                ended.set_result(self._seal(position) if self._parts.parallel.rank == 0 else target)
            except (CheckpointException, OSError, RuntimeError) as error:
                if self._parts.parallel.rank == 0:
                    shutil.rmtree(temporary, ignore_errors=True)
                ended.set_exception(_as_error(error))

        return finish


def load(path: Path, parts: Parts) -> None:
    """Restores all tensors bitwise from a verified checkpoint. Raises CheckpointError.

    A model that is not the one saved is refused with the parameter that differs.
    """
    state = parts.state()
    with _readable(path) as (reader, index):
        _compare(path, state, index)
        state[RANDOM] = _empty(index, RANDOM)
        # Every rank reads for itself: a group could hang where one rank fails.
        state_dict_loader.load(state, storage_reader=reader, no_dist=True)
    _restore_random(state[RANDOM][parts.parallel.rank % len(state[RANDOM])])


def load_weights(path: Path) -> dict[str, Tensor]:
    """Returns the weights of a checkpoint by parameter name, on the CPU. Raises CheckpointError."""
    return load_section(path, "model")


def load_model(path: Path) -> Transformer:
    """Returns the model of a verified checkpoint, on the CPU. Raises CheckpointError."""
    saved = manifest.read(path).settings
    try:
        shape = settings.section(ModelConfig, "model.", saved, MANIFEST)
        switches = settings.section(Switches, "attention.", saved, MANIFEST)
        model = Transformer(shape, switches)
        model.load_state_dict(load_weights(path))
    except (AttributeError, RuntimeError, TypeError, ValueError, UsageError) as error:
        raise CheckpointError(f"{path} does not describe its model: {_reason(error)}") from error
    return model


def load_section(path: Path, section: str) -> dict[str, Tensor]:
    """Returns the tensors of one section of the state by name, on the CPU. Raises as `load`."""
    prefix = f"{section}."
    with _readable(path) as (reader, index):
        names = [name for name in index.state_dict_metadata if name.startswith(prefix)]
        state = {name: _empty(index, name) for name in names}
        state_dict_loader.load(state, storage_reader=reader, no_dist=True)
    return {name.removeprefix(prefix): tensor for name, tensor in state.items()}


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[tuple[_Reader, Metadata]]:
    """Gives reader and index of a checkpoint; what goes wrong inside becomes a CheckpointError."""
    reader = _Reader(path)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ALONE, UserWarning)
            yield reader, reader.read_metadata()
    except (CheckpointException, OSError, RuntimeError, KeyError, ValueError, EOFError,
            AttributeError, pickle.UnpicklingError) as error:  # fmt: skip
        raise CheckpointError(f"the checkpoint {path} cannot be read: {_reason(error)}") from error


def _empty(index: Metadata, name: str) -> Tensor:
    entry = index.state_dict_metadata[name]
    if not isinstance(entry, TensorStorageMetadata):
        raise ValueError(f"{name} is no tensor")
    return torch.empty(entry.size, dtype=entry.properties.dtype)


def newest(run: Path, step: int, parallel: Single) -> tuple[Path, Manifest, list[CheckpointError]]:
    """Returns the checkpoint of a run that `manifest.choose` takes, and why newer ones are not it.

    Rank 0 looks, so that all ranks take the same. Raises CheckpointError on all of them alike.
    """
    skipped, failed = [], None
    chosen = torch.zeros((), dtype=torch.float64, device=parallel.device)
    if parallel.rank == 0:
        try:
            path, skipped = manifest.choose(run, step)
            chosen += (manifest.step_of(path) or 0) + 1
        except CheckpointError as error:
            failed = error
    parallel.reduce(chosen)()
    if not chosen.item():
        raise failed or CheckpointError(f"{run} has no checkpoint to resume from: rank 0 says why")
    path = run / rundir.CHECKPOINTS / manifest.name_of(int(chosen.item()) - 1)
    return path, manifest.read(path), skipped


_INDEX_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata",
        "BytesStorageMetadata", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "float64", "float32", "float16", "bfloat16", "int64", "uint8"},
    "pathlib": {"PosixPath"},
}  # fmt: skip


class _Index(pickle.Unpickler):
    """Unpickles DCP's index and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _INDEX_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"its index names {module}.{name}, which is no part of it")
        return super().find_class(module, name)


class _Reader(FileSystemReader):
    """DCP's reader, with an index that runs no code and files of its own directory only."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        del args, kwargs
        with (Path(self.path) / ".metadata").open("rb") as stream:
            index = _Index(stream).load()
        if not isinstance(index, Metadata):
            raise pickle.UnpicklingError("its index is none")
        for stored in index.storage_data.values():
            if "/" in stored.relative_path:
                raise pickle.UnpicklingError("its index names a file elsewhere")
        index.storage_meta = StorageMeta(load_id=self.load_id)
        return index


def _compare(path: Path, state: State, index: Metadata) -> None:
    """Raises CheckpointError where a parameter is missing, is spare, or has another shape."""
    saved = {
        name.removeprefix("model."): tuple(entry.size)
        for name, entry in index.state_dict_metadata.items()
        if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }
    here = {name: tuple(tensor.shape) for name, tensor in state["model"].items()}
    for name in sorted(saved.keys() | here.keys()):
        if saved.get(name) != here.get(name):
            raise CheckpointError(
                f"{path} is of another model: {name} is {saved.get(name, 'missing')} there and "
                f"{here.get(name, 'missing')} here"
            )


def _as_error(error: BaseException) -> CheckpointError:
    if isinstance(error, CheckpointError):
        return error
    return CheckpointError(f"a checkpoint could not be written: {_reason(error)}")


def _reason(error: BaseException) -> str:
    """Returns one sentence; DCP wraps each rank's own error and its traceback."""
    if isinstance(error, CheckpointException):
        rank, (first, _) = min(error.failures.items())
        return f"rank {rank}: {_reason(first)}"
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"


def _random_state(device: torch.device) -> Tensor:
    """Returns this rank's generator state(s) as one uint8 vector on its device."""
    parts = [torch.get_rng_state()]
    if device.type == "cuda":
        parts.append(torch.cuda.get_rng_state(device))
    return torch.cat(parts).to(device)


def _restore_random(state: Tensor) -> None:
    size = torch.get_rng_state().numel()
    # Copies: torch reads a generator's state as if it began its storage, and dies of a view.
    torch.set_rng_state(state[:size].clone())
    if state.numel() > size and torch.cuda.is_available():
        torch.cuda.set_rng_state(state[size:].clone())
