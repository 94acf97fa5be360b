"""Reads the manifests of checkpoints, and says which checkpoints are good. Needs no torch.

A save writes into `.step_{N:08d}.tmp`; `manifest.json` comes last, with the size and SHA-256 of
every file beside it; then the directory gets its name, and then `latest` names it. So a directory
with the right name is whole, and whether it still is can be told without running anything in it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainers.contract import jsonl, rundir
from trainers.failures import CheckpointError

MANIFEST, FORMAT = "manifest.json", 2
ASIDE = ".old"
"""The end of a checkpoint's name while another save of its step takes its place."""
_NAME = re.compile(rf"(?:step_(\d{{8,}})|\.step_(\d{{8,}}){re.escape(ASIDE)})\Z")


@dataclass(frozen=True, slots=True)
class Manifest:
    """The position of a training beside its tensors, and the files of its checkpoint."""

    step: int
    tokens_total: int
    data: Mapping[str, Any]
    """State of the data, as `Loader.state` gives it."""
    world: int = 1
    report: Mapping[str, Any] = field(default_factory=dict)
    """Figures that a resumed run goes on from."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """Size in bytes and SHA-256 by file name."""


def name_of(step: int) -> str:
    return f"step_{step:08d}"


def step_of(path: Path) -> int | None:
    """Returns the step of a checkpoint directory, None when its name is no such name."""
    match = _NAME.match(path.name)
    return int(match.group(1) or match.group(2)) if match else None


def newest_first(run: Path) -> list[Path]:
    """Returns the checkpoint directories of a run, none where it has no folder for them.

    One that a save set aside and did not replace is among them. Raises OSError: a folder that
    cannot be listed may hold some.
    """
    folder = run / rundir.CHECKPOINTS
    try:
        there = {path.name: path for path in folder.iterdir()}
    except FileNotFoundError:
        return []
    found = [
        path for name, path in there.items()
        if step_of(path) is not None and (not name.endswith(ASIDE) or _original(path) not in there)
    ]  # fmt: skip
    return sorted(found, key=lambda path: step_of(path) or 0, reverse=True)


def seal(temporary: Path, target: Path, manifest: Manifest) -> None:
    """Gives a finished save its name: hashes, manifest, fsync, rename, `latest`.

    Raises OSError where it has no name, CheckpointError where it has it and `latest` does not say
    so, or the disk may not have it yet.
    """
    files = {path.name: _fingerprint(path) for path in sorted(temporary.iterdir())}
    record = {"format": FORMAT} | asdict(manifest) | {"files": files}
    rundir.write_json(temporary / MANIFEST, record)
    _sync(temporary)
    replaced = target.with_name(f".{target.name}{ASIDE}")
    if target.exists():
        # A former attempt came this far; its checkpoint goes only when this one is whole.
        target.rename(replaced)
    try:
        temporary.rename(target)
    except OSError:
        with contextlib.suppress(OSError):  # without one, it is found where it is
            replaced.rename(target)
        raise
    try:
        _sync(target.parent)
        rundir.write_atomic(target.parent / rundir.LATEST, f"{target.name}\n")
    except OSError as error:
        raise CheckpointError(
            f"it is whole, but {rundir.LATEST} cannot be written or the disk may not have it yet: "
            f"{error}"
        ) from error
    rundir.remove_tree(replaced)


def _original(aside: Path) -> str:
    return aside.name.removeprefix(".").removesuffix(ASIDE)


def clear_leftovers(run: Path) -> None:
    """Removes what a killed save left; a whole checkpoint that it was replacing gets back its name.

    Only the one process that saves may call it.
    """
    folder = run / rundir.CHECKPOINTS
    for left in folder.glob(".step_*"):
        original = left.with_name(_original(left))
        if left.suffix == ASIDE and not original.exists():
            left.rename(original)
        else:
            shutil.rmtree(left)
    for left in folder.glob(f".{rundir.LATEST}.tmp-*"):
        left.unlink()


def retain(run: Path, keep_last: int, keep_every: int) -> None:
    """Removes old checkpoints: all but the last few and those of every `keep_every`-th step."""
    for path in newest_first(run)[keep_last:]:
        if not keep_every or (step_of(path) or 0) % keep_every:
            shutil.rmtree(path)


def verify(path: Path) -> Manifest:
    """Returns the manifest of a checkpoint that is as it was written. Raises CheckpointError."""
    manifest = read(path)
    for name, (size, digest) in manifest.files.items():
        try:
            found = _fingerprint(path / name)
        except OSError as error:
            raise CheckpointError(f"{path} lacks {name}: {error.strerror}") from None
        if found != (size, digest):
            what = f"{found[0]} bytes instead of {size}" if found[0] != size else "other content"
            raise CheckpointError(f"{path} is damaged: {name} has {what} than when it was written")
    return manifest


def choose(path: Path, step: int = 0) -> tuple[Path, list[CheckpointError]]:
    """Returns the checkpoint that `path` means, and why newer ones do not verify.

    Itself, or a run's newest that verifies (or that of `step`). Raises CheckpointError.
    """
    if step_of(path) is not None:
        verify(path)
        return path, []
    skipped: list[CheckpointError] = []
    try:
        candidates = newest_first(path)
    except OSError as error:
        raise CheckpointError(f"the checkpoints of {path} cannot be listed: {error}") from error
    for candidate in candidates:
        if step in (0, step_of(candidate)):
            try:
                verify(candidate)
                return candidate, skipped
            except CheckpointError as error:
                skipped.append(error)
    wanted = f" of step {step}" if step else ""
    why = "; ".join(map(str, skipped)) or "there is none"
    raise CheckpointError(f"{path} has no checkpoint{wanted} that verifies: {why}")


def read(path: Path) -> Manifest:
    """Returns the manifest of a checkpoint, its files unchecked. Raises CheckpointError."""
    record = rundir.read_json(path / MANIFEST)
    if record is None:
        raise CheckpointError(f"{path} has no readable {MANIFEST}")
    if record.pop("format", None) != FORMAT:
        raise CheckpointError(f"{path} has another format than {FORMAT}, which this version reads")
    try:
        files = record.pop("files")
        files = {name: (int(size), str(digest)) for name, (size, digest) in files.items()}
        manifest = Manifest(**record, files=files)
        sound = min(manifest.step, manifest.tokens_total, manifest.world) >= 0
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path / MANIFEST} lacks or misspells a part: {error}") from None
    if not sound or not files or any("/" in name or name.startswith("..") for name in files):
        raise CheckpointError(f"{path / MANIFEST} does not describe a checkpoint")
    return manifest


def digest(path: Path) -> str:
    """Returns what tells a checkpoint from any other of its name. Raises OSError."""
    return _fingerprint(path / MANIFEST)[1]


def _fingerprint(path: Path) -> tuple[int, str]:
    with jsonl.opened(path) as fd, os.fdopen(fd, "rb", closefd=False) as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return stream.tell(), digest


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
