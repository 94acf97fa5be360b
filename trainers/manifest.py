"""Completes, lists, verifies and removes checkpoints. This module needs no torch.

A save writes the files into `.step_{N:08d}.tmp`, and then `manifest.json`, with the size and
SHA-256 of each of them. It then renames the directory to `step_{N:08d}`, and updates `latest`. So a
directory with the final name is complete. Verifying it executes nothing in it.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainers.contract import jsonl, rundir
from trainers.failures import CheckpointError

MANIFEST, FORMAT = "manifest.json", 2
ASIDE = ".old"
"""Suffix of a checkpoint while a new save of the same step replaces this checkpoint."""
_NAME = re.compile(rf"(?:step_(\d{{8,}})|\.step_(\d{{8,}}){re.escape(ASIDE)})\Z")


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a manifest: the training after a step, and the files of its checkpoint."""

    step: int
    tokens_total: int
    data: Mapping[str, Any]
    """State of the data, as in `Loader.state`."""
    world: int = 1
    report: Mapping[str, Any] = field(default_factory=dict)
    """Figures that a resumed run continues from."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """Size in bytes and SHA-256 by file name."""


def name_of(step: int) -> str:
    return f"step_{step:08d}"


def step_of(path: Path) -> int | None:
    """Returns the step in a checkpoint directory's name, or None for any other name."""
    match = _NAME.match(path.name)
    return int(match.group(1) or match.group(2)) if match else None


def newest_first(run: Path, limit: int = sys.maxsize) -> list[Path]:
    """Returns the checkpoint directories of a run, the highest step first; [] if there are none.

    The result includes a checkpoint that an interrupted save renamed and did not replace. Raises
    CheckpointError if the folder cannot be listed, or has `limit` entries or more.
    """
    folder = run / rundir.CHECKPOINTS
    try:
        with os.scandir(folder) as entries:
            there = {entry.name for entry in itertools.islice(entries, limit)}
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"cannot list the checkpoints in {folder}: {error}") from error
    if len(there) >= limit:
        raise CheckpointError(f"{folder} has {limit} entries or more")
    found = [
        path for path in map(folder.joinpath, there)
        if step_of(path) is not None
        and (not path.name.endswith(ASIDE) or _original(path) not in there)
    ]  # fmt: skip
    return sorted(found, key=lambda path: step_of(path) or 0, reverse=True)


def complete(temporary: Path, target: Path, manifest: Manifest) -> None:
    """Completes a save: hashes, manifest, fsync, rename, `latest`.

    Raises OSError if the rename or an earlier part failed. Raises CheckpointError if the rename
    succeeded and then `latest` or the last fsync failed.
    """
    files = {path.name: _fingerprint(path) for path in sorted(temporary.iterdir())}
    record = {"format": FORMAT} | asdict(manifest) | {"files": files}
    rundir.write_json(temporary / MANIFEST, record)
    _sync(temporary)
    replaced = target.with_name(f".{target.name}{ASIDE}")
    if target.exists():
        # The former checkpoint of this step is removed only after the new one is complete.
        target.rename(replaced)
    try:
        temporary.rename(target)
    except OSError:
        with contextlib.suppress(OSError):  # `newest_first` also finds `replaced`
            replaced.rename(target)
        raise
    try:
        _sync(target.parent)
        rundir.write_atomic(target.parent / rundir.LATEST, f"{target.name}\n")
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint is complete, but {rundir.LATEST} or the directory cannot be written "
            f"to the disk: {error}"
        ) from error
    rundir.remove_tree(replaced)


def _original(aside: Path) -> str:
    return aside.name.removeprefix(".").removesuffix(ASIDE)


def clear_leftovers(run: Path) -> None:
    """Removes the files of a killed save; restores the name of a checkpoint that the save renamed.

    Also removes what `retain` left. Only the process that saves may call this function.
    """
    folder = run / rundir.CHECKPOINTS
    for left in folder.glob(".step_*"):
        original = left.with_name(_original(left))
        if left.suffix == ASIDE and not original.exists():
            left.rename(original)
        else:
            rundir.remove_tree(left)
    for left in folder.glob(f".{rundir.LATEST}.tmp-*"):
        left.unlink()


def retain(run: Path, step: int, keep_last: int, keep_every: int) -> list[str]:
    """Removes old checkpoints after the save of `step`.

    Keeps the newest `keep_last` checkpoints and those of every `keep_every`-th step. Checkpoints of
    later steps, from before a resume at an earlier step, are kept and not counted. Returns a
    sentence for each checkpoint that cannot be removed, or one sentence if the directory cannot be
    listed.
    """
    failed: list[str] = []
    try:
        old = [path for path in newest_first(run) if (step_of(path) or 0) <= step][keep_last:]
    except CheckpointError as error:
        return [f"{error}; old checkpoints remain"]
    for path in old:
        if not keep_every or (step_of(path) or 0) % keep_every:
            try:
                # After a rename, no reader finds a checkpoint without some of its files.
                path = path.rename(path.with_name(f".{path.name}.removed"))
                shutil.rmtree(path)
            except OSError as error:
                failed.append(f"cannot remove the old checkpoint {path}: {error.strerror}")
    return failed


def verify(path: Path) -> Manifest:
    """Verifies a checkpoint and returns its manifest. Raises CheckpointError."""
    manifest = read(path)
    if step_of(path) not in (None, manifest.step):
        raise CheckpointError(f"{path} contradicts its {MANIFEST}, whose step is {manifest.step}")
    for name, (size, digest) in manifest.files.items():
        try:
            found = _fingerprint(path / name)
        except OSError as error:
            raise CheckpointError(f"{path} lacks {name}: {error.strerror}") from None
        if found != (size, digest):
            what = f"{found[0]} bytes instead of {size}" if found[0] != size else "changed content"
            raise CheckpointError(f"{path} is damaged: {name} has {what}")
    return manifest


def choose(
    path: Path, step: int = 0, check: Callable[[Path], object] | None = None
) -> tuple[Path, list[CheckpointError]]:
    """Returns two values: a checkpoint that passed `check`, and the errors of skipped checkpoints.

    `check` is `verify` by default. `path` is a checkpoint or a run. For a run, `step` selects the
    checkpoint; 0 selects the newest that passes. For a checkpoint, a `step` above 0 must be the
    step in its name. Raises CheckpointError.
    """
    skipped: list[CheckpointError] = []
    is_one = step_of(path) is not None or (path / MANIFEST).is_file()
    for candidate in [path] if is_one else newest_first(path):
        if step in (0, step_of(candidate)):
            try:
                (check or verify)(candidate)
                return candidate, skipped
            except CheckpointError as error:
                skipped.append(error)
    wanted = f" of step {step}" if step else ""
    why = "; ".join(map(str, skipped)) or "there is none"
    raise CheckpointError(f"{path} has no verified checkpoint{wanted}: {why}")


def read(path: Path) -> Manifest:
    """Returns the manifest of a checkpoint without verifying its files. Raises CheckpointError."""
    record = rundir.read_json(path / MANIFEST)
    if record is None:
        raise CheckpointError(f"{path} has no readable {MANIFEST}")
    if record.pop("format", None) != FORMAT:
        raise CheckpointError(f"{path} does not have the format {FORMAT} of this version")
    try:
        files = record.pop("files")
        files = {name: (int(size), str(digest)) for name, (size, digest) in files.items()}
        manifest = Manifest(**record, files=files)
        sound = min(manifest.step, manifest.tokens_total, manifest.world) >= 0
        parts = (manifest.data, manifest.report, manifest.settings)
        sound = sound and all(isinstance(each, dict) for each in parts)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path / MANIFEST} has a missing or wrong part: {error}") from None
    if not sound or not files or any("/" in name or name.startswith("..") for name in files):
        raise CheckpointError(f"{path / MANIFEST} does not describe a checkpoint")
    return manifest


def _fingerprint(path: Path) -> tuple[int, str]:
    with jsonl.opened(path) as fd, os.fdopen(fd, "rb", closefd=False) as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return stream.tell(), digest


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)  # `directory` may be a link
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
