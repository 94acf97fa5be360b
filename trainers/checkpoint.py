"""Checkpoints that are whole or not there: temporary name, fsync, rename, then `latest`.

`checkpoints/step_{N:08d}/state.pt` holds plain tensors and numbers under parameter names, so it
loads with `weights_only=True` and does not depend on how many ranks wrote it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainers.contract import rundir
from trainers.failures import CheckpointError
from trainers.parallel import Single

STATE, FORMAT = "state.pt", 1


@dataclass(frozen=True, slots=True)
class Position:
    """Where a training is, beside its tensors."""

    step: int
    tokens_total: int
    sequences: int
    fingerprint: str


def name_of(step: int) -> str:
    return f"step_{step:08d}"


def save(
    run: Path, parallel: Single, model: nn.Module, optimizer: torch.optim.Optimizer,
    position: Position, settings: Mapping[str, Any],
) -> Path:  # fmt: skip
    """Writes a checkpoint; all ranks call it. Raises CheckpointError on all of them alike."""
    random = parallel.gather(_random_state(parallel.device))
    target = run / rundir.CHECKPOINTS / name_of(position.step)
    failed, error = torch.zeros(1, dtype=torch.float64, device=parallel.device), None
    if parallel.rank == 0:
        plain = parallel.plain(model)
        state = {
            "format": FORMAT, "step": position.step, "tokens_total": position.tokens_total,
            "data": {"sequences": position.sequences, "fingerprint": position.fingerprint},
            "model": plain.state_dict(), "optimizer": _by_name(plain, optimizer),
            "random": [each.cpu() for each in random], "settings": dict(settings),
        }  # fmt: skip
        try:
            _write(target, state)
        except (OSError, RuntimeError) as caught:
            failed, error = failed + 1, caught
    parallel.reduce(failed)()
    if failed.item():
        reason = f": {error}" if error else "; rank 0 says why"
        raise CheckpointError(f"the checkpoint {target} could not be written{reason}") from error
    return target


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int = 0) -> Position:
    """Restores everything bitwise from a checkpoint directory. Raises CheckpointError."""
    try:
        state = torch.load(path / STATE, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        _restore_optimizer(model, optimizer, state["optimizer"])
        data = state["data"]
        position = Position(
            state["step"], state["tokens_total"], data["sequences"], data["fingerprint"]
        )
        _restore_random(state["random"][rank % len(state["random"])])
    except (OSError, RuntimeError, KeyError, ValueError, EOFError) as error:
        raise CheckpointError(f"the checkpoint {path} cannot be read: {error}") from error
    return position


def latest(run: Path) -> Path | None:
    """Returns the checkpoint that `latest` names, None when there is none."""
    folder = run / rundir.CHECKPOINTS
    try:
        name = (folder / rundir.LATEST).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    path = folder / name
    return path if "/" not in name and path.is_dir() else None


def _write(target: Path, state: Mapping[str, Any]) -> None:
    folder = target.parent
    for left_by_a_killed_save in folder.glob(".step_*"):
        shutil.rmtree(left_by_a_killed_save)
    temporary = folder / f".{target.name}.tmp-{os.getpid()}"
    temporary.mkdir(mode=0o700, parents=True)
    try:
        with (temporary / STATE).open("wb") as stream:
            torch.save(state, stream)
            stream.flush()
            os.fsync(stream.fileno())
        _sync_directory(temporary)
        if target.exists():
            # A former attempt came this far; its checkpoint goes only when this one is whole.
            target.rename(folder / f".{target.name}.old-{os.getpid()}")
        temporary.rename(target)
        _sync_directory(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    rundir.write_atomic(folder / rundir.LATEST, f"{target.name}\n")
    shutil.rmtree(folder / f".{target.name}.old-{os.getpid()}", ignore_errors=True)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Returns the optimizer's state under parameter names, which no grouping or order changes."""
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)]: dict(state) for p, state in optimizer.state.items()}


def _restore_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Mapping[str, Any]]
) -> None:
    parameters = dict(model.named_parameters())
    for name, values in state.items():
        p = parameters[name]
        optimizer.state[p] = {
            key: value.to(p.device) if isinstance(value, Tensor) else value
            for key, value in values.items()
        }


def _random_state(device: torch.device) -> Tensor:
    """Returns this rank's generator state(s) as one uint8 vector on its device."""
    parts = [torch.get_rng_state()]
    if device.type == "cuda":
        parts.append(torch.cuda.get_rng_state(device))
    return torch.cat(parts).to(device)


def _restore_random(state: Tensor) -> None:
    size = torch.get_rng_state().numel()
    torch.set_rng_state(state[:size])
    if state.numel() > size and torch.cuda.is_available():
        torch.cuda.set_rng_state(state[size:])
