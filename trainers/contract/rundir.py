"""Paths of launches and runs, safe file access, and the identity of processes.

Other users may have written the files of a launch. So the functions open no path that ends in a
link, read only regular files, and limit the size of a document.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import os
import re
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainers.contract import environ, jsonl
from trainers.contract.errors import RefusedError

PLAN, PLAN_STATE, LOCK, SUPERVISOR_LOG = ("plan.json", "plan_state.json", "lock", "supervisor.log")
RUN, ENV, SUPERVISOR, EVENTS, GATES, METRICS, SNAPSHOT = (
    "run.json", "env.json", "supervisor.json", "events.jsonl", "gates.json", "metrics.json",
    "snapshot.json",
)  # fmt: skip
REQUESTS, VERDICTS, CHECKPOINTS, LATEST, HALT, ANOMALY = (
    "requests", "verdicts", "checkpoints", "latest", ".HALT", ".anomaly_type",
)  # fmt: skip
REQUEST_FILES = CHECKPOINT_NOW, PROFILE_NOW = ".CHECKPOINT", ".PROFILE"
"""Files that request a checkpoint or profile when they appear or change."""
TORCHRUN_LOG, TRAINING_CSV, TRAINING_LOCK = "torchrun.log", "training.csv", "training.lock"
LIVE_STATUS = "supervisor_status.json"
SHARED_MEMORY, LIVE_PREFIX = Path("/dev/shm"), "nsa-console-"
MAX_DOCUMENT_BYTES, PROC_BYTES = 4 << 20, 4096
RUN_NAME = re.compile(r"[0-9]{1,4}-[a-z0-9][a-z0-9_.-]{0,47}")
"""Pattern of the name of a run directory in a launch directory."""


def heartbeat(run: Path, rank: int) -> Path:
    return run / f"heartbeat_rank{rank}.jsonl"


def stackdump(run: Path, rank: int) -> Path:
    return run / f"stackdump_rank{rank}.txt"


def samples(run: Path, host: str) -> Path:
    return run / f"samples_{host}.jsonl"


def logs(run: Path, attempt: int) -> Path:
    return run / "logs" / f"attempt{attempt}"


def rank_log(run: Path, attempt: int, rank: int) -> Path:
    return logs(run, attempt) / f"rank{rank}.log"


def pulse(live: Path, rank: int) -> Path:
    return live / f"pulse_rank{rank}"


def live_stack(live: Path, rank: int) -> Path:
    """Returns the path of the file in memory that receives a rank's stack dumps."""
    return live / f"stack_rank{rank}.txt"


def halt_board(folder: Path, attempt: int) -> Path:
    return folder / f"halt_board_{attempt}"


def host_name() -> str:
    return os.uname().nodename or "localhost"


@functools.cache
def boot_id() -> str:
    """Returns the kernel's boot id, or "" if not available; a pid is valid within one boot only."""
    data = jsonl.read_bytes(Path("/proc/sys/kernel/random/boot_id"), PROC_BYTES, 0)
    return data.decode("ascii").strip()


@functools.cache
def pid_ns() -> int | None:
    """Returns the id of this PID namespace, or None if not available."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return None


def start_ticks(pid: int) -> int | None:
    """Returns the start of a process in clock ticks since boot; None if it ended or is hidden."""
    data = jsonl.read_bytes(Path(f"/proc/{pid}/stat"), PROC_BYTES, 0)
    fields = data.rpartition(b")")[2].split()
    return int(fields[19]) if len(fields) > 19 and fields[0] not in (b"Z", b"X") else None


def identity(pid: int | None = None) -> dict[str, Any]:
    """Returns the fields that identify a process (default: this process)."""
    ticks = start_ticks(pid) if pid else _own_start_ticks(os.getpid())
    return {
        "pid": pid or os.getpid(), "start_ticks": ticks, "boot_id": boot_id(), "host": host_name(),
        "pid_ns": pid_ns(),
    }  # fmt: skip


@functools.cache
def _own_start_ticks(pid: int) -> int | None:
    """Returns the start time of this process, from a cache after the first call.

    Without the cache, the call would fail when no file descriptor is free, and other processes
    would consider this process dead.
    """
    return start_ticks(pid)


def is_here(owner: Mapping[str, Any]) -> bool:
    """Returns whether the process with this `identity` is of this boot and PID namespace.

    The host name is compared only without boot id or `pid_ns`, which older documents lack, because
    a host can be renamed.
    """
    if owner.get("boot_id") != boot_id():
        return False
    known = owner.get("pid_ns") if boot_id() else None
    return owner.get("host") == host_name() if known is None else known == pid_ns()


def is_hidden(owner: Mapping[str, Any]) -> bool:
    """Returns whether the process with this `identity` is in another PID namespace of this host.

    The containers of a pod, for example, have one host name.
    """
    is_same_boot = (owner.get("host"), owner.get("boot_id")) == (host_name(), boot_id())
    return is_same_boot and not is_here(owner)


def other_host(owner: Mapping[str, Any]) -> str:
    """Returns the host in this `identity`, or "" if it is this host or not recorded."""
    host = jsonl.text(owner, "host")
    return "" if host == host_name() or is_here(owner) else host


def is_alive(owner: Mapping[str, Any]) -> bool:
    """Returns whether the process with this `identity` is alive on this host, in this boot."""
    pid = jsonl.integer(owner, "pid") or 0
    ticks = start_ticks(pid) if pid > 0 else None
    return ticks is not None and owner.get("start_ticks") == ticks and is_here(owner)


def token(run: Mapping[str, Any]) -> str:
    """Returns the token that run.json names for the processes of a run, or ""."""
    return jsonl.text(jsonl.mapping(run, "environment"), environ.TOKEN)


class OpenDirectory:
    """An open directory; detects whether another directory is at its path. Raises OSError."""

    def __init__(self, path: Path):
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        self.path, self.fd = path, os.open(path, flags)
        self._is_there = True

    def is_there(self) -> bool:
        """Returns whether the directory is at its path, or the last result if this is not known."""
        try:
            self._is_there = os.path.samestat(os.stat(self.path), os.fstat(self.fd))
        except (FileNotFoundError, NotADirectoryError):
            self._is_there = False
        except OSError:
            pass
        return self._is_there

    def close(self) -> None:
        os.close(self.fd)


def stamp(path: Path) -> tuple[int, int, int] | None:
    """Returns inode, size and modification time of a file, or None if they cannot be read."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except (OSError, ValueError):
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def names(folder: Path, below: Path | None = None) -> list[str] | None:
    """Returns the sorted names in a directory, or None if it cannot be read.

    With `below`, neither `folder` nor the directories between `below` and `folder` may be links.
    """
    fd = None if below is None else jsonl.open_inside(folder, below)
    if fd is None and below is not None:
        return None
    try:
        return sorted(os.listdir(folder if fd is None else fd))
    except OSError:
        return None
    finally:
        if fd is not None:
            os.close(fd)


def read_json(
    path: Path, limit: int = MAX_DOCUMENT_BYTES, below: Path | None = None
) -> dict[str, Any] | None:
    """Returns the object in a JSON file of at most `limit` bytes, or None for anything else.

    `below` has the same meaning as in `jsonl.open_regular`.
    """
    data = jsonl.read_bytes(path, limit + 1, 0, below)
    return jsonl.decode(data) if len(data) <= limit else None


def write_atomic(path: Path, data: bytes | str) -> None:
    """Replaces `path` atomically: temporary name, fsync, rename. Raises OSError."""
    if isinstance(data, str):
        data = data.encode()
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}-{os.urandom(4).hex()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(temporary, flags, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Replaces a JSON document atomically, with one line per key. Raises OSError."""
    plain = jsonl.decode(jsonl.encode(record)) or {}
    rows = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in plain.items())
    write_atomic(path, f"{{\n{rows}\n}}\n")


def open_append(path: Path) -> int:
    """Opens or creates a regular file to append records; `path` must be no link. Raises OSError."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
    except OSError:
        os.close(fd)
        raise
    return fd


def make_directory(path: Path) -> None:
    """Creates a directory and its missing parents with mode 0700.

    Closes an existing `path` to other users. Raises RefusedError.
    """
    try:
        for folder in reversed((path, *path.parents)):
            if folder == path or not folder.is_dir():
                folder.mkdir(mode=0o700, exist_ok=True)
        check_owner(path)
        if not os.access(path, os.W_OK | os.X_OK):
            raise RefusedError(f"{path} is not writable; pass another with --run-dir")
        with contextlib.closing(OpenDirectory(path)) as folder:
            if os.fstat(folder.fd).st_mode & 0o077:
                os.fchmod(folder.fd, 0o700)
    except OSError as error:
        raise RefusedError(
            f"cannot create the directory {path} with the mode 0700: {error.strerror}; "
            "pass another with --run-dir"
        ) from error


def lock_rank(run: Path, rank: int) -> None:
    """Locks a rank of a run until this process ends; its child processes do not get the lock.

    Raises RefusedError if another process has this lock. After any other error, for example in a
    file system without locks, nothing is locked.
    """
    try:  # The descriptor stays open, because closing it would end the lock.
        fcntl.lockf(open_append(run / TRAINING_LOCK), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
    except BlockingIOError as error:
        raise RefusedError(f"a training in {run} is alive (rank {rank}); end it first") from error
    except OSError:
        pass


def remove_tree(path: Path) -> None:
    """Removes a directory and its content as far as possible; raises no OSError."""
    with contextlib.suppress(OSError):  # `ignore_errors` does not cover an error of fstat
        shutil.rmtree(path, ignore_errors=True)


def check_owner(path: Path) -> os.stat_result:
    """Returns the stat result of a directory.

    Raises RefusedError if `path` is no directory, is a link, has another owner or cannot be read.
    """
    try:
        status = path.lstat()
    except OSError as error:
        raise RefusedError(f"cannot read {path}: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise RefusedError(f"{path} is a link or not a directory; name the directory itself")
    if status.st_uid != os.geteuid():
        raise RefusedError(
            f"{path} belongs to user id {status.st_uid}, not to you, so it is read-only here"
        )
    return status


def write_request(run: Path, name: str, by: str) -> None:
    """Creates or touches `.HALT` or one of `REQUEST_FILES`; on a full disk the file may be empty.

    Raises OSError if the ranks would see no change.
    """
    path = run / name
    before = stamp(path)
    try:
        with os.fdopen(open_append(path), "ab", buffering=0) as file:
            with contextlib.suppress(OSError):
                file.write(f"requested by {by}\n".encode("utf-8", "replace"))
            os.utime(file.fileno())
    except OSError:
        if stamp(path) in (before, None):
            raise
