"""Collects the state of a training, and restores it from a checkpoint; `saver` saves the state.

torch.distributed.checkpoint (DCP) reads and writes the state. The state consists of named tensors:
the weights, the state of AdamW, the loss scale (fp16 only), the window of `Spikes`, and the states
of the random generators. The state can be restored on another number of ranks and with another
strategy. Loading a checkpoint runs no code from it: DCP loads tensors with `weights_only=True`.
DCP's index is a pickle, which may refer only to the names in `_INDEX_CLASSES`. `trainers.manifest`
describes and verifies the directory of a checkpoint.
"""

from __future__ import annotations

import contextlib
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)

from nsa.backends import Switches
from nsa.config import ModelConfig
from nsa.model import Transformer
from trainers import optim, settings
from trainers.contract.errors import UsageError
from trainers.failures import CheckpointError
from trainers.guard import Spikes
from trainers.manifest import MANIFEST
from trainers.parallel import Single
from trainers.precision import LossScale, weights_dtype

State = dict[str, Any]
Result = TypeVar("Result")
RANDOM, SPIKES, LOSS_SCALE = "random", "spikes", "loss_scale"
# A load uses DCP without a process group on purpose, and so does a save of a single rank.
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)


@dataclass(frozen=True, slots=True)
class Parts:
    """The strategy of a training, and the objects whose tensors `state` returns."""

    parallel: Single
    model: nn.Module
    """The model without the wrapper of DDP."""
    optimizer: torch.optim.AdamW
    loss_scale: LossScale
    spikes: Spikes

    def state(self) -> State:
        """Returns all tensors by section and name, except the states of the generators.

        The result has the loss scale with fp16 only. A parameter without a state of AdamW gets
        `empty_state`.
        """
        # This precedes the loops: with FSDP, it shards parameters that a forward left unsharded.
        weights = self.model.state_dict()
        for p in self.model.parameters():
            if not self.optimizer.state[p]:
                self.optimizer.state[p] = optim.empty_state(p)
        averages = {name: self.optimizer.state[p] for name, p in self.model.named_parameters()}
        window = {"norms": self.spikes.norms, "seen": self.spikes.seen}
        found = {"model": weights, "optimizer": averages, SPIKES: window}
        if self.loss_scale.active:
            finite_steps = self.loss_scale.finite_steps
            found[LOSS_SCALE] = {"scale": self.loss_scale.scale, "finite_steps": finite_steps}
        return found


def on_all_ranks(parallel: Single, work: Callable[[], Result], what: str = "") -> Result:
    """Returns the result of `work` on this rank; all ranks must call this function.

    If `work` fails on a rank, all ranks raise CheckpointError with the message of the lowest failed
    rank.
    """
    results, failure, reason = [], None, ""
    try:
        results.append(work())
    except (Exception, CheckpointException) as error:  # CheckpointException is a BaseException
        named = parallel.world > 1 and not isinstance(error, CheckpointException)
        rank = f"rank {parallel.rank}: " if named else ""
        failure, reason = error, f"{rank}{reason_of(error)}"
    for each in parallel.gather(reason):
        if each:
            raise CheckpointError(f"{what}: {each}" if what else each) from failure
    return results[0]


def load(path: Path, parts: Parts) -> None:
    """Restores the tensors of a verified checkpoint, bitwise if the dtypes are the same.

    The loss scale is restored only if the checkpoint and this training use fp16. Raises
    CheckpointError.
    """
    state = parts.state()
    with _readable(path) as (reader, index):
        if not any(name.startswith(f"{LOSS_SCALE}.") for name in index.state_dict_metadata):
            state.pop(LOSS_SCALE, None)
        state[RANDOM] = _empty(index, RANDOM)
        # Each rank reads without a group, because a group could hang if one rank fails.
        state_dict_loader.load(state, storage_reader=reader, no_dist=True)
    _restore_random(state[RANDOM][parts.parallel.rank % len(state[RANDOM])])


def load_weights(path: Path, section: str = "model") -> dict[str, Tensor]:
    """Returns the tensors of one section by name, on the CPU. Raises CheckpointError.

    If the section is one tensor, its key is the name of the section.
    """
    prefix = f"{section}."
    with _readable(path) as (reader, index):
        names = [each for each in index.state_dict_metadata if f"{each}.".startswith(prefix)]
        state = {name: _empty(index, name) for name in names}
        state_dict_loader.load(state, storage_reader=reader, no_dist=True)
    return {name.removeprefix(prefix): tensor for name, tensor in state.items()}


def load_model(path: Path, saved: Mapping[str, Any]) -> Transformer:
    """Returns the model of a verified checkpoint, on the CPU. Raises CheckpointError."""
    try:
        shape = settings.section(ModelConfig, "model.", saved, MANIFEST)
        switches = settings.section(Switches, "attention.", saved, MANIFEST)
        model = Transformer(shape, switches).to(weights_dtype(str(saved.get("train.precision"))))
        model.load_state_dict(load_weights(path))
    except (RuntimeError, TypeError, ValueError, UsageError) as error:
        raise CheckpointError(f"{path} does not describe its model: {reason_of(error)}") from error
    return model


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[tuple[_Reader, Metadata]]:
    """Yields two values: reader and index of a checkpoint. Read errors become CheckpointError."""
    reader = _Reader(path)
    try:
        yield reader, reader.read_metadata()
    except (CheckpointException, OSError, RuntimeError, KeyError, ValueError, EOFError,
            AttributeError, pickle.UnpicklingError) as error:  # fmt: skip
        raise CheckpointError(
            f"the checkpoint {path} cannot be read: {reason_of(error)}"
        ) from error


def _empty(index: Metadata, name: str) -> Tensor:
    entry = index.state_dict_metadata[name]
    if not isinstance(entry, TensorStorageMetadata):
        raise ValueError(f"{name} is not a tensor")
    return torch.empty(entry.size, dtype=entry.properties.dtype)


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
    """Unpickles an index that refers only to the names in `_INDEX_CLASSES`.

    Two names depend on the version of Python that wrote the index. Up to 3.11.3, a member of an
    enum is `getattr(kind, name)`; no other use of getattr is possible here. In 3.13, PosixPath is
    in `pathlib._local`.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return lambda _, member: _MEM_FORMAT_ENCODING[member]
        module = module.removesuffix("._local")
        if name not in _INDEX_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"its index contains {module}.{name}: not allowed")
        return super().find_class(module, name)


class _Reader(FileSystemReader):
    """DCP's reader, limited to a safe index and to files in the checkpoint's own directory."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as stream:
            index = _Index(stream).load()
        if not isinstance(index, Metadata):
            raise pickle.UnpicklingError("its index is not metadata")
        for stored in index.storage_data.values():
            if "/" in stored.relative_path:
                raise pickle.UnpicklingError("its index names a file outside of the checkpoint")
        index.storage_meta = StorageMeta(load_id=self.load_id)
        return index


def reason_of(error: BaseException) -> str:
    """Returns one sentence for an error; for DCP's exception, that of the lowest failed rank."""
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, CheckpointException):
        rank, (first, _) = min(error.failures.items())
        return f"rank {rank}: {reason_of(first)}"
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"


def random_state(device: torch.device) -> Tensor:
    """Returns the states of torch's generators on this rank as one uint8 vector on the CPU."""
    parts = [torch.get_rng_state()]
    if device.type == "cuda":
        parts.append(torch.cuda.get_rng_state(device))
    return torch.cat(parts)


def _restore_random(state: Tensor) -> None:
    size = torch.get_rng_state().numel()
    # A clone, because torch reads a state from the start of its storage and crashes on a view.
    torch.set_rng_state(state[:size].clone())
    if state.numel() > size and torch.cuda.is_available():
        torch.cuda.set_rng_state(state[size:].clone())
