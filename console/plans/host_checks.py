"""The checks of this host, for example its memory, clock, limits, other trainers and shell."""

from __future__ import annotations

import os
import re
import resource
import shlex
import shutil
import socket
import subprocess
import time
from pathlib import Path

from console.model import Result
from console.plans import catalog
from console.plans.case import Case, Found
from console.plans.config_checks import checkpoint_bytes
from console.sources import launches, liveness, process, procfs
from console.sources.nvml import opened_by
from console.sources.sanitize import clean
from console.status_text import age, counted, size
from trainers.contract import environ, flags, jsonl, rundir

JUMP_S = 60.0
ENOUGH_FILES = 1024
SHM_PER_RANK = 1 << 20
NCCL_SHM_PER_RANK = 64 << 20
"""Approximate size of NCCL's buffers in /dev/shm, per rank."""
TRAINER = re.compile(r"-m trainers\.(ddp|fsdp)\b|\btrain_showcase(_fsdp)?\.py\b")
SUPERVISOR = "console.supervisor"
MAX_SHOWN = 8
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


def cores(case: Case) -> Found:
    """Warns if the largest phase has more ranks than there are usable cores."""
    usable, limit = len(os.sched_getaffinity(0)), procfs.limit_of_cores()
    cores = min(usable, limit or usable)
    source = " (limit of the cgroup)" if cores < usable else ""
    text = f"{counted(case.nproc, 'process')} on {counted(cores, 'core')}{source}"
    if case.nproc > cores:
        return "unknown", f"{text}: they share cores and run slower"
    return "pass", text


def memory(case: Case) -> Found:
    """Checks that each rank of the largest phase can have `LEAST_MEMORY_GIB_PER_RANK`."""
    least = min(procfs.memories(), key=lambda each: each.free_mib, default=None)
    if least is None:
        return "unknown", "the free memory of this host is not available"
    free, needed = least.free_mib / 1024, LEAST_MEMORY_GIB_PER_RANK * case.nproc
    text = f"{free:.1f} GiB of {least.name} is free"
    if free < needed:
        return "fail", f"{text}; the ranks need {needed:.1f} GiB"
    return "pass", text


def clock(case: Case) -> Found:
    """Fails if the newest launch seems to be in the future.

    Two times must be more than `JUMP_S` in the future: the creation time in its plan.json, and the
    modification time of this file.
    """
    newest = next(iter(launches.launches(case.artifacts)), None)
    if newest is None:
        return "pass", "no earlier launch to compare with"
    path, name = newest / rundir.PLAN, clean(newest.name)
    created = jsonl.number(rundir.read_json(path) or {}, "created_ts") or 0.0
    ahead_s = min(created, path.stat().st_mtime) - time.time()
    if ahead_s > JUMP_S:
        return "fail", (
            f"the clock is {age(ahead_s)} behind the launch {name}; set it (timedatectl), or pass "
            "another --root if that launch had a wrong clock"
        )
    return "pass", "not behind the newest launch"


def limits(case: Case) -> Found:
    """Checks the resource limits (ulimit) that a training inherits from the shell.

    A low limit of open files is only a warning, because the supervisor raises its own limit.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    largest, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    needed = checkpoint_bytes(case)
    if 0 <= largest < needed:
        return "fail", (
            f"files of at most {size(largest)} are allowed, and a checkpoint has {size(needed)}; "
            "run ulimit -f unlimited first"
        )
    if space >= 0 and case.plan.gpus:
        return "fail", f"CUDA needs more address space than {size(space)}; run ulimit -v unlimited"
    if 0 <= files < ENOUGH_FILES:
        return "unknown", f"only {files} open files are allowed; ulimit -n 65536 raises this limit"
    return "pass", f"{files if files >= 0 else 'unlimited'} open files"


def shm(case: Case) -> Found:
    """Checks the shared memory for the pulses, and for NCCL between several GPUs.

    Without NCCL, too little memory is only a warning, because the run directory can store the
    pulses.
    """
    folder = case.root / "dev/shm"
    nccl = case.plan.gpus > 0 and case.nproc > 1
    needed = case.nproc * (NCCL_SHM_PER_RANK if nccl else SHM_PER_RANK)
    try:
        found = os.statvfs(folder)
    except OSError as error:
        return "unknown", f"{folder}: {error.strerror}; the run directory stores the pulses instead"
    free = found.f_bavail * found.f_frsize
    if free < needed:
        advice = "; start the container with --shm-size=1g" if nccl else ""
        text = f"{folder} has {size(free)} free, and {size(needed)} are needed{advice}"
        return "fail" if nccl else "unknown", text
    return "pass", f"{size(free)} free at {folder}"


def ports(_case: Case) -> Found:
    """Checks that torchrun can get a free port."""
    try:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
    except OSError as error:
        return "fail", (
            f"no free port on 127.0.0.1 ({error.strerror}), which torchrun needs; see ss -s, and "
            "ip link show lo"
        )
    return "pass", "torchrun finds free ports by itself"


def leftovers(case: Case) -> Found:
    """Lists trainers without a supervisor, at most `MAX_SHOWN`.

    The check fails if the plan needs GPUs and such trainers have a GPU open; it then lists only
    these. Otherwise it can only warn, because no trainer is known to share a GPU with the launch.
    """
    proc = case.root / "proc"
    found = unsupervised(proc)
    if not found:
        return "pass", "no trainer runs without a supervisor"
    on_gpu = [pid for pid in found if case.plan.gpus and opened_by(pid, str(proc))]
    pids = " ".join(map(str, (on_gpu or found)[:MAX_SHOWN]))
    what = "have GPUs open" if on_gpu else "share this machine"
    result: Result = "fail" if on_gpu else "unknown" if case.plan.gpus else "pass"
    return result, (
        f"trainers without a supervisor {what}: pid {pids}; check PLAN --end-leftovers lists "
        "them; with --yes, it ends those of a dead supervisor"
    )


def unsupervised(proc: Path) -> list[int]:
    """Returns the pids of the trainers without a supervisor that is alive."""
    commands = {
        pid: procfs.read_text(f"{proc}/{pid}/cmdline").replace("\0", " ")
        for pid in procfs.numbers_in(str(proc))
    }
    trainers = sorted(pid for pid, command in commands.items() if TRAINER.search(command))
    return [pid for pid in trainers if not _is_supervised(pid, str(proc), commands)]


def _is_supervised(pid: int, proc: str, commands: dict[int, str]) -> bool:
    """Returns whether a process descends from a supervisor, or a supervisor adopted its run."""
    if any(SUPERVISOR in commands.get(each, "") for each in procfs.lineage(pid, proc)):
        return True
    variables = process.environment(pid, proc)
    run = Path(variables.get(environ.RUN_DIR, ""))
    return liveness.is_adopted(run, variables.get(environ.TOKEN, ""))


def code(case: Case) -> Found:
    """Reports the commit; for a plan with GPUs, local changes or no commit are a warning."""
    sha = jsonl.text(dict(case.git), "sha")[:12]
    if not sha:
        return "unknown" if case.plan.gpus else "pass", _without_commit(catalog.PROJECT)
    if case.git.get("dirty"):
        text = f"commit {sha} with local changes; commit them, or nobody can repeat the run"
        return "unknown" if case.plan.gpus else "pass", text
    return "pass", f"commit {sha}"


def _without_commit(folder: Path) -> str:
    """Returns why the commit of the code in a folder is not known."""
    if not any(os.path.lexists(each / ".git") for each in (folder, *folder.parents)):
        return "the code is in no git repository"
    see = shlex.join(("git", "-C", str(folder), "rev-parse", "HEAD"))
    return clean(f"git cannot report the commit of the code; see {see}", 400)


def shell(case: Case) -> Found:
    """Lists the shell's variables that configure a training: passed to it, dropped or overridden.

    A dropped flag that the plan or an option sets for every phase is not listed.
    """
    variables = environ.snapshot()
    passed = {n: x for n, x in flags.from_shell(variables).items()
              if all(p.flags.get(n) == x for p in case.plan.phases)}  # fmt: skip
    given = {*case.plan.env}.union(set.intersection(*(set(p.flags) for p in case.plan.phases)))
    unusual = variables.items() - environ.DEVICE_ORDER.items()
    others = {name for name, value in unusual if value} - given - passed.keys()
    dropped = sorted(name for name in others if name in flags.FLAGS or _is_foreign(name))
    parts = [f"handed to the training: {', '.join(passed)}"] if passed else []
    if dropped:
        parts.append(
            f"not handed to the training: {clean(', '.join(dropped))}; launch --flag NAME=VALUE "
            f"sets a flag that `{process.program()} flags` lists"
        )
    used = {key for phase in case.plan.phases if phase.is_ours for key in phase.set}
    void = [f"{name} has no effect where the plan or --set sets {flags.OWN[name]}"
            for name in passed if flags.OWN.get(name) in used]  # fmt: skip
    parts += void
    text = "; ".join(parts) or "no flag comes from the shell"
    return "unknown" if dropped or void else "pass", text


def _is_foreign(name: str) -> bool:
    """Returns whether a variable configures a library or a trainer, and a launch does not use it.

    A variable whose name ends with `_VERSION` configures nothing, so the result is False.
    """
    known = name in environ.INHERITED or name.endswith("_VERSION")
    return name == environ.CONFIG or (name.startswith(LIBRARIES) and not known)


def logout(case: Case) -> Found:
    """Reports what systemd-logind would end or remove when the operator logs out."""
    return at_logout(case.root, os.getuid(), process.user_name())


def at_logout(root: Path, uid: int, user: str) -> Found:
    """Returns the result of the row `logout` for a user; `root` is the root of the file system."""
    if not (root / RUNS).is_dir():
        return "pass", "the run survives a logout (no systemd-logind here)"
    try:
        done = subprocess.run(ASK, capture_output=True, text=True, timeout=ANSWER_S, check=True)
        kills, removes = (line == "b true" for line in done.stdout.splitlines())
    except (OSError, subprocess.SubprocessError, ValueError):
        return "unknown", "not available: systemd-logind does not answer busctl"
    place = (root / "proc/self/cgroup").read_text(errors="replace")
    lingers = (root / LINGER / user).exists()
    ends = (USER_MANAGER in place and not lingers) or (SESSION in place and kills and uid)
    harm = "ends the run" if ends else "removes the shared memory of the run"
    if not ends and (not removes or lingers or uid < LEAST_UID):
        return "pass", "the run survives a logout"
    return "unknown", (
        f"systemd-logind {harm} when {user} logs out; run loginctl enable-linger {user}, and "
        "launch with systemd-run --user --scope"
    )


def hook(case: Case) -> Found:
    result: Result = "pass"
    of, texts = case.operator, list[str]()
    for argv, every_s, when in (
        (of.hook, of.hook_every_s, f"on {'/'.join(of.hook_levels)} alerts, at most every"),
        (of.alive, of.alive_every_s, "alive, every"),
    ):
        if argv and shutil.which(argv[0], path=environ.inherited().get("PATH")) is None:
            result = "unknown"
            texts.append(f"cannot run {argv[0]}: there is no such program")
        texts += [f"{when} {every_s:g} s: {shlex.join(argv)}"] if argv else []
    return result, "; ".join(texts) or "no hook is set"
