"""Finds launches and runs on disk by directory, id, unique prefix or `latest`."""

from __future__ import annotations

import os
import re
from pathlib import Path

from console.sources.sanitize import clean
from trainers.contract import jsonl, rundir
from trainers.contract.errors import NotFoundError, UsageError, did_you_mean

ROOT = Path("artifacts")
STAMP = re.compile(r"\d{8}-\d{6}(-\d+)?")


def is_launch(path: Path) -> bool:
    return rundir.PLAN in _names(path)


def is_run(path: Path) -> bool:
    return any(name == rundir.RUN or name.startswith("heartbeat_rank") for name in _names(path))


def launch_of(path: Path) -> Path | None:
    """Returns the launch that a run or launch directory belongs to, None for a bare run."""
    if is_launch(path):
        return path
    return path.parent if is_launch(path.parent) else None


def launch_id(path: Path) -> str:
    """Returns the id of a launch directory: `<plan>-<stamp>`, or the directory's own name."""
    named = jsonl.text(rundir.read_json(path / rundir.PLAN) or {}, "launch")
    stamped = f"{path.parent.name}-{path.name}" if STAMP.fullmatch(path.name) else path.name
    return clean(named or stamped, 200)


def run_directories(launch: Path) -> list[Path]:
    """Returns the runs of a launch in the order of their phases."""
    found = []
    for name in _names(launch):
        index, dash, _ = name.partition("-")
        if dash and index.isdecimal() and (launch / name).is_dir() and is_run(launch / name):
            found.append((int(index), launch / name))
    return [path for _, path in sorted(found)]


def launches(root: Path = ROOT) -> list[Path]:
    """Returns every launch under `root` (`<plan>/<stamp>/`), newest first."""
    found: list[tuple[str, Path]] = []
    for plan in _names(root):
        for stamp in _names(root / plan):
            path = root / plan / stamp
            if is_launch(path) and not path.is_symlink():
                found.append((stamp, path))
    return [path for _, path in sorted(found, reverse=True)]


def find(name: str, root: Path = ROOT) -> Path:
    """Returns the launch or run that `name` means.

    `name` is a directory, an id (`<launch>` or `<launch>/<n>-<phase>`), a unique prefix of one, or
    `latest`. Raises NotFoundError, or UsageError when a prefix fits several.
    """
    path = Path(name)
    if path.is_dir():
        if is_launch(path) or is_run(path):
            return path
        raise NotFoundError(f"{path} is not a run: it holds neither {rundir.PLAN} nor {rundir.RUN}")
    known = {launch_id(launch): launch for launch in launches(root)}
    if name == "latest":
        if not known:
            raise NotFoundError(f"there is no run under {root}; start one with nsa-console launch")
        return next(iter(known.values()))
    wanted, _, phase = name.partition("/")
    matches = [key for key in known if key.startswith(wanted)] if wanted else []
    if wanted in known:
        matches = [wanted]
    if not matches:
        raise NotFoundError(f"there is no run {name!r} under {root}{did_you_mean(wanted, known)}")
    if len(matches) > 1:
        raise UsageError(f"{name!r} fits {len(matches)} runs: {', '.join(matches[:4])}; give more")
    launch = known[matches[0]]
    return _phase_run(launch, phase) if phase else launch


def _phase_run(launch: Path, phase: str) -> Path:
    runs = {run.name: run for run in run_directories(launch)}
    for name, run in runs.items():
        if phase in (name, name.partition("-")[2], name.partition("-")[0]):
            return run
    raise NotFoundError(f"{launch_id(launch)} has no run {phase!r}{did_you_mean(phase, runs)}")


def _names(path: Path) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []
