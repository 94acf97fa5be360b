"""Can this plan start here and now? One row a check, in words; nothing is written."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from console.model import Result
from console.plans import catalog
from console.settings import Hook
from console.sources import nvml
from trainers.contract import environ, flags, rundir
from trainers.contract.errors import RefusedError
from trainers.contract.plan import Plan

LEAST_DISK_GIB = 1.0
LEAST_MEMORY_GIB_PER_RANK = 0.5
GIB = 1 << 30
Found = tuple[Result, str]


@dataclass(frozen=True, slots=True)
class Check:
    """One question about this machine. "fail" refuses the launch, "unknown" only says so."""

    name: str
    result: Result
    text: str


@dataclass(frozen=True, slots=True)
class Case:
    """What is to be launched, and where it would write."""

    plan: Plan
    directory: Path
    devices: str = ""
    hook: Hook = field(default_factory=Hook)

    @property
    def nproc(self) -> int:
        return max(phase.nproc for phase in self.plan.phases)


def _python(_case: Case) -> Found:
    return "pass", f"Python {platform.python_version()}"


def _torch(_case: Case) -> Found:
    if importlib.util.find_spec("torch") is None:
        return "fail", "torch is not installed; run make console, or pip install -e ."
    return "pass", f"torch {importlib.metadata.version('torch')}"


def _programs(case: Case) -> Found:
    for phase in case.plan.phases:
        if phase.script and not catalog.is_file(Path(phase.script)):
            return "fail", f"phase {phase.name!r}: there is no script {phase.script}"
        if not phase.script and not _is_there(phase.module):
            return "fail", f"phase {phase.name!r}: there is no module {phase.module}"
    named = dict.fromkeys(phase.script or phase.module for phase in case.plan.phases)
    return "pass", ", ".join(named)


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def gpus_there() -> int | None:
    """Returns how many NVIDIA GPUs NVML counts; 0 without a driver, None when it fails."""
    if not nvml.has_driver():
        return 0
    import pynvml

    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return None


def _gpus(case: Case) -> Found:
    needed, there = case.plan.gpus, gpus_there()
    if there is None:
        return "fail" if needed else "unknown", "the NVIDIA driver does not answer"
    if case.devices and there == 0:
        text = f"--devices {case.devices} names GPUs and this machine has none; leave it out"
        return "fail", text
    if needed == 0:
        return "pass", f"none needed, {there} there"
    chosen = [word for word in case.devices.split(",") if word]
    usable = min(there, len(chosen)) if chosen else there
    if usable < needed:
        text = (
            f"the plan {case.plan.name} needs {needed} GPU{'s' if needed > 1 else ''} and this "
            f"machine has {usable}; use the plan cpu_smoke, or a machine with GPUs"
        )
        return "fail", text
    return "pass", f"{needed} needed, {usable} there"


def _cores(case: Case) -> Found:
    cores = len(os.sched_getaffinity(0))
    text = f"{case.nproc} processes on {cores} cores"
    if case.nproc > cores:
        return "unknown", f"{text}: they will take turns"
    return "pass", text


def _memory(case: Case) -> Found:
    import psutil

    free = psutil.virtual_memory().available / GIB
    needed = LEAST_MEMORY_GIB_PER_RANK * case.nproc
    if free < needed:
        text = f"{free:.1f} GiB of memory free; {case.nproc} ranks need at least {needed:.1f} GiB"
        return "fail", text
    return "pass", f"{free:.1f} GiB free"


def nearest_folder(path: Path) -> Path:
    """Returns the deepest folder of a path that exists already."""
    path = path.absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def _disk(case: Case) -> Found:
    folder = nearest_folder(case.directory)
    try:
        free = shutil.disk_usage(folder).free / GIB
    except OSError as error:
        return "unknown", f"{folder}: {error.strerror}"
    if free < LEAST_DISK_GIB:
        return "fail", f"{folder} has {free:.2f} GiB free; free at least 1 GiB"
    return "pass", f"{free:.0f} GiB free at {folder}"


def _directory(case: Case) -> Found:
    try:
        rundir.check_parents(case.directory)
    except RefusedError as error:
        return "fail", str(error)
    folder = nearest_folder(case.directory)
    read_only = bool(os.statvfs(folder).f_flag & os.ST_RDONLY)
    if read_only or not os.access(folder, os.W_OK | os.X_OK):
        why = "is on a read-only file system" if read_only else "is not writable"
        return "fail", f"{folder} {why}; give another with --run-dir"
    return "pass", str(case.directory)


def _shell(_case: Case) -> Found:
    """Names the flags that the shell sets: which ones the launch takes, and which not."""
    variables = environ.snapshot()
    taken = flags.from_shell(variables)
    if taken:
        return "pass", "taken from the shell: " + ", ".join(taken)
    left = sorted(name for name in variables if name in flags.FLAGS)
    if left:
        return "pass", f"not taken from the shell: {', '.join(left)}; use --flag"
    return "pass", "the shell sets no flag"


def _environment(_case: Case) -> Found:
    """Names the variables that a training inherits; the whole environment is in the dry run."""
    names = ", ".join(environ.inherited()) or "nothing"
    return "pass", f"inherited: {names}; with the flags, nothing else"


def _hook(case: Case) -> Found:
    argv = case.hook.argv
    if not argv:
        return "pass", "no program is run on alerts"
    told = "/".join(case.hook.levels)
    text = f"on {told} alerts, at most every {case.hook.every_s:g} s: {shlex.join(argv)}"
    if shutil.which(argv[0], path=environ.inherited().get("PATH")) is None:
        return "unknown", f"{argv[0]} is no program that can be run; {text}"
    return "pass", text


CHECKS: Mapping[str, Callable[[Case], Found]] = {
    "python": _python, "torch": _torch, "program": _programs, "gpus": _gpus, "cores": _cores,
    "memory": _memory, "disk": _disk, "directory": _directory, "shell": _shell,
    "environment": _environment, "hook": _hook,
}  # fmt: skip


def run(case: Case, settings: Sequence[Mapping[str, object]]) -> tuple[Check, ...]:
    """Returns all checks; `settings` are those of the phases, which do fit together."""
    checks = [Check(name, *check(case)) for name, check in CHECKS.items()]
    for phase, resolved in zip(case.plan.phases, settings, strict=True):
        count = len(resolved)
        text = f"{count} settings fit together" if count else "a foreign program, not checked"
        checks.append(Check(f"config {phase.name}", "pass", text))
    return tuple(checks)
