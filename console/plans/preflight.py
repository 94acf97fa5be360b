"""The checks before a launch. A new check is one row in `TABLE`."""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path

from console import access
from console.model import Result
from console.plans import catalog, config_checks, device_checks, gpu_checks, host_checks
from console.plans.case import Case, Check, Found
from console.sources import gpu_survey, process
from console.sources.sanitize import clean
from trainers.contract import environ, flags
from trainers.contract.errors import ContractError, RefusedError

LIBRARIES = ("NCCL_", "TORCH_", "PYTORCH_", "CUDA_")
"""Prefixes of the variables that configure the libraries of a training."""
LEAST_MEMORY_GIB_PER_RANK = 0.5
RUNS, LINGER = "run/systemd/system", "var/lib/systemd/linger"
ASK = (
    "busctl", "get-property", "org.freedesktop.login1", "/org/freedesktop/login1",
    "org.freedesktop.login1.Manager", "KillUserProcesses", "RemoveIPC",
)  # fmt: skip
ANSWER_S = 5.0
LEAST_UID = 1000
"""Smallest uid of a normal user; logind does not remove the shared memory of system users."""
SESSION, USER_MANAGER = "/session-", "/user@"


def _python(_case: Case) -> Found:
    return "pass", f"Python {platform.python_version()}"


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


def _cores(case: Case) -> Found:
    cores = len(os.sched_getaffinity(0))
    text = f"{case.nproc} processes on {cores} cores"
    if case.nproc > cores:
        return "unknown", f"{text}: they share cores and run slower"
    return "pass", text


def _memory(case: Case) -> Found:
    _, free_mib = process.host_memory_mib()
    if free_mib is None:
        return "unknown", "the free memory of this host is not available"
    free = free_mib / 1024
    needed = LEAST_MEMORY_GIB_PER_RANK * case.nproc
    if free < needed:
        return "fail", f"{free:.1f} GiB of memory is free; {case.nproc} ranks need {needed:.1f} GiB"
    return "pass", f"{free:.1f} GiB free"


def _directory(case: Case) -> Found:
    try:
        access.check_parents(case.directory)
    except RefusedError as error:
        return "fail", str(error)
    folder = config_checks.nearest_folder(case.directory)
    path = case.directory.absolute()
    if path != folder and os.path.lexists(file := folder / path.relative_to(folder).parts[0]):
        return "fail", f"{file} is not a directory; pass another directory with --root or --run-dir"
    read_only = bool(os.statvfs(folder).f_flag & os.ST_RDONLY)
    if read_only or not os.access(folder, os.W_OK | os.X_OK):
        why = "is on a read-only file system" if read_only else "is not writable"
        return "fail", f"{folder} {why}; pass another directory with --root or --run-dir"
    return "pass", str(case.directory)


def _shell(case: Case) -> Found:
    """Lists the shell's variables that configure a training, whether passed on or dropped.

    A dropped flag that the plan or an option sets for every phase is not listed.
    """
    variables = environ.snapshot()
    passed = {n: x for n, x in flags.from_shell(variables).items()
              if all(p.flags.get(n) == x for p in case.plan.phases)}  # fmt: skip
    given = {*case.plan.env}.union(set.intersection(*(set(p.flags) for p in case.plan.phases)))
    known = sorted(n for n in flags.FLAGS if variables.get(n) and n not in given | passed.keys())
    foreign = sorted(name for name in variables if _is_foreign(name))
    parts = [f"handed to the training: {', '.join(passed)}"] if passed else []
    if known:
        parts.append(
            f"not handed to the training: {', '.join(known)}; to set one, use launch --flag "
            f"{known[0]}=VALUE"
        )
    if foreign:
        parts.append(
            f"not handed to the training: {clean(', '.join(foreign))}; a launch can set only the "
            f"flags that `{process.program()} flags` lists"
        )
    return "unknown" if known or foreign else "pass", "; ".join(parts) or "the shell sets no flag"


def _is_foreign(name: str) -> bool:
    """Returns whether a variable configures a library or a trainer, and a launch does not use it.

    A variable whose name ends with `_VERSION` configures nothing, so the result is False.
    """
    known = name in flags.FLAGS or name in environ.INHERITED or name.endswith("_VERSION")
    return name == environ.CONFIG or (name.startswith(LIBRARIES) and not known)


def _logout(case: Case) -> Found:
    """Reports what systemd-logind would end or remove when the operator logs out."""
    return at_logout(case.root, os.getuid(), process.user_name())


def at_logout(root: Path, uid: int, user: str) -> Found:
    """Returns the result of the row `logout` for a user; `root` is the root of the file system."""
    if not (root / RUNS).is_dir():
        return "pass", "no systemd-logind here"
    try:
        done = subprocess.run(ASK, capture_output=True, text=True, timeout=ANSWER_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown", "not available: systemd-logind does not answer busctl"
    answers = done.stdout.splitlines()
    if len(answers) != 2 or not {*answers} <= {"b true", "b false"}:
        return "unknown", f"not available: busctl answers {clean(done.stdout, 80)!r}"
    kills, removes = (line == "b true" for line in answers)
    place = (root / "proc/self/cgroup").read_text(errors="replace")
    lingers = (root / LINGER / user).exists()
    found = []
    if USER_MANAGER in place and not lingers:
        found.append(f"the run ends when {user} logs out, because it belongs to the user manager")
    elif SESSION in place and kills and uid:  # root is excluded by default
        found.append(
            f"logind has KillUserProcesses=yes and kills the run when {user} logs out: launch with "
            "systemd-run --user --scope"
        )
    if removes and not lingers and uid >= LEAST_UID:
        found.append(
            f"logind has RemoveIPC=yes and removes the shared memory of the run when {user} logs "
            "out, so no stack can be dumped"
        )
    if not found:
        return "pass", "the run survives a logout"
    return "unknown", f"{'; '.join(found)}; run loginctl enable-linger {user}"


def _environment(_case: Case) -> Found:
    """Lists the variables that a training inherits; `--dry-run` shows the whole environment."""
    names = ", ".join(environ.inherited()) or "nothing"
    return "pass", f"a training inherits {names}, and no other variable except its flags"


def _hook(case: Case) -> Found:
    result: Result = "pass"
    of, texts = case.operator, list[str]()
    for argv, every_s, when in (
        (of.hook, of.hook_every_s, f"on {'/'.join(of.hook_levels)} alerts, at most every"),
        (of.alive, of.alive_every_s, "alive, every"),
    ):
        if argv and shutil.which(argv[0], path=environ.inherited().get("PATH")) is None:
            result = "unknown"
            texts.append(f"cannot run {argv[0]}: no such program in PATH")
        texts += [f"{when} {every_s:g} s: {shlex.join(argv)}"] if argv else []
    return result, "; ".join(texts) or "no hook is set"


@dataclass(frozen=True, slots=True)
class Row:
    """One check, and the resource that it reads; rows with the same `needs` share a thread."""

    name: str
    check: Callable[[Case], Found]
    needs: str = "this machine"


PLAN, DISK, NETWORK = "the plan", "the file system", "the network"
DRIVER, PROCESSES = "the NVIDIA driver", "the other processes"
LIMIT_S: Mapping[str, float] = {DRIVER: gpu_survey.LIMIT_S + 2, NETWORK: 8.0}
"""Time limit of the rows, by their `needs`; `USUAL_S` is the limit of all other rows."""
USUAL_S, SAID_S = 20.0, 2.0
"""After `SAID_S`, the preflight reports what it is still waiting for."""
TABLE: tuple[Row, ...] = (
    Row("python", _python), Row("torch", gpu_checks.torch), Row("device", gpu_checks.device, PLAN),
    Row("program", _programs, PLAN), Row("gpus", gpu_checks.gpus, DRIVER),
    Row("driver", gpu_checks.driver, DRIVER), Row("gpu memory", config_checks.gpu_memory, DRIVER),
    Row("nccl", gpu_checks.nccl, PLAN), Row("leftovers", host_checks.leftovers, PROCESSES),
    Row("cores", _cores), Row("memory", _memory), Row("shm", host_checks.shm),
    Row("limits", host_checks.limits), Row("ports", host_checks.ports),
    Row("clock", host_checks.clock, DISK), Row("disk", config_checks.disk, DISK),
    Row("directory", _directory, DISK), Row("data", config_checks.data, NETWORK),
    Row("code", host_checks.code), Row("shell", _shell), Row("environment", _environment),
    Row("logout", _logout), Row("hook", _hook),
)  # fmt: skip
ROWS: Mapping[str, Row] = {row.name: row for row in TABLE}


def run(case: Case, said: Callable[[str], None] | None = None) -> tuple[Check, ...]:
    """Returns all checks. A row that exceeds its time limit fails (but see `_in_time`).

    `said` gets a text when rows are late, and before the measurements.
    """
    phases: dict[str, int] = {}
    for index, phase in enumerate(case.plan.phases):  # one row for all runs of a variant
        phases.setdefault(f"{phase.sweep} {phase.variant}" if phase.sweep else phase.name, index)
    rows = [*TABLE, *(
        Row(f"config {name}", functools.partial(config_checks.config, index=index), PLAN)
        for name, index in phases.items()
    )]  # fmt: skip
    answers: dict[str, Future[Found]] = {row.name: Future() for row in rows}
    for need in {row.needs for row in rows}:
        work = [(row.check, answers[row.name]) for row in rows if row.needs == need]
        thread = threading.Thread(target=_answer, args=(case, work), name="preflight", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread can be started
            _answer(case, work)
    begun = time.monotonic()
    late = wait(answers.values(), SAID_S).not_done
    if late and said:
        needs = sorted({row.needs for row in rows if answers[row.name] in late})
        said(f"the preflight is still waiting for {' and '.join(needs)}")
    checks = tuple(_in_time(case, row, answers[row.name], begun) for row in rows)
    refused = any(check.result == "fail" for check in checks)
    return (*checks, *device_checks.measure(case, refused, said))


def _answer(case: Case, work: Sequence[tuple[Callable[[Case], Found], Future[Found]]]) -> None:
    for check, answer in work:
        try:
            answer.set_result(check(case))
        except BaseException as error:  # `_in_time` handles it
            answer.set_exception(error)


def _in_time(case: Case, row: Row, answer: Future[Found], begun: float) -> Check:
    """Returns the result of a row; with assumed GPUs, a check of this machine can only warn.

    A late answer of `PROCESSES` only warns: one process in state D can keep every reader waiting.
    """
    limit_s = LIMIT_S.get(row.needs, USUAL_S)
    try:
        result, text = answer.result(max(0.0, begun + limit_s - time.monotonic()))
    except TimeoutError:
        result = "unknown" if row.needs == PROCESSES else "fail"
        text = f"no answer from {row.needs} within {limit_s:g} s"
    except ContractError:
        raise
    except Exception as error:  # a check may read files that other users wrote
        text = f"the check itself failed: {type(error).__name__}: {clean(str(error), 200)}"
        result = "fail"
    if case.assumed and result == "fail" and row.needs not in (PLAN, DRIVER):
        result, text = "unknown", f"on this machine: {text}"
    return Check(row.name, result, text)
