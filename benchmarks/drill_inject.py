"""Injects faults from outside the training program, for example locks, signals and tracers."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from benchmarks.drill_fuse import Unavailable, mount
from tests.launches import Started
from tests.mounts import ext4

CGROUPS = Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup")
DISK_MIB = 16
TRACER = """
import ctypes, os, signal, sys
ptrace = ctypes.CDLL(None, use_errno=True).ptrace
for name in os.listdir(f"/proc/{sys.argv[1]}/task"):
    if ptrace(16, int(name), None, None) != 0:  # PTRACE_ATTACH
        sys.exit(os.strerror(ctypes.get_errno()))
    os.waitpid(int(name), 0x40000000)  # __WALL
print("attached", flush=True)
signal.pause()
"""


# --- before the launch ---------------------------------------------------------------------------


def _hold_flock(folder: Path, stack: ExitStack) -> None:
    stream = stack.enter_context((folder / "flock").open("w"))
    fcntl.flock(stream, fcntl.LOCK_EX)


def _hold_fcntl(folder: Path, stack: ExitStack) -> None:
    stream = stack.enter_context((folder / "fcntl").open("w"))
    fcntl.lockf(stream, fcntl.LOCK_EX)


def listen(folder: Path, stack: ExitStack) -> None:
    """Listens on loopback, and answers no connection."""
    server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    (folder / "peer").write_text(f"127.0.0.1:{server.getsockname()[1]}")


def mount_disk(folder: Path, stack: ExitStack) -> None:
    try:
        stack.enter_context(ext4(folder, DISK_MIB))
    except pytest.skip.Exception as reason:
        raise Unavailable(str(reason)) from None


def mount_silent(folder: Path, stack: ExitStack) -> None:
    """Mounts a FUSE file system that answers no request."""
    mount(folder / "silent", stack)


def _make_cgroup(folder: Path, stack: ExitStack) -> None:
    root = next((path for path in CGROUPS if (path / "cgroup.controllers").exists()), None)
    if root is None:
        raise Unavailable("needs the unified cgroup hierarchy")
    group = _group(root, folder)
    try:
        group.mkdir()
    except OSError as error:
        raise Unavailable(f"cannot write cgroups: {error}") from None
    stack.callback(remove_cgroup, group)


def _group(root: Path, folder: Path) -> Path:
    return root / folder.name


def remove_cgroup(group: Path) -> None:
    if (freeze := group / "cgroup.freeze").exists():  # not in version 1
        freeze.write_text("0")
    for pid in (group / "cgroup.procs").read_text().split():
        with suppress(OSError):
            (group.parent / "cgroup.procs").write_text(pid)
    for _ in range(100):  # a killed process exits a little later
        with suppress(OSError):
            return group.rmdir()
        time.sleep(0.1)
    raise OSError(f"cannot remove the cgroup {group}")


PREPARE: dict[str, Callable[[Path, ExitStack], None]] = {
    "flock": _hold_flock,
    "fcntl": _hold_fcntl,
    "recv": listen,
    "http": listen,
    "send": listen,
    "disk": mount_disk,
    "fuse": mount_silent,
    "freeze": _make_cgroup,
}
"""The preparation before the launch, by mechanism."""


# --- when the rank has reached the place of its fault --------------------------------------------


def _stop(started: Started, rank: int, _folder: Path, _stack: ExitStack) -> None:
    os.kill(started.pids()[rank], signal.SIGSTOP)


def _trace(started: Started, rank: int, _folder: Path, stack: ExitStack) -> None:
    words = [sys.executable, "-c", TRACER, str(started.pids()[rank])]
    tracer = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    stack.callback(tracer.wait)
    stack.callback(tracer.kill)
    assert tracer.stdout is not None
    assert tracer.stderr is not None
    if tracer.stdout.readline() != "attached\n":
        raise Unavailable(f"cannot trace: {tracer.stderr.read().strip()}")


def _freeze(started: Started, rank: int, folder: Path, _stack: ExitStack) -> None:
    groups = (_group(root, folder) for root in CGROUPS)
    group = next(path for path in groups if path.exists())
    (group / "cgroup.procs").write_text(str(started.pids()[rank]))
    (group / "cgroup.freeze").write_text("1")


def _kill(started: Started, rank: int, _folder: Path, _stack: ExitStack) -> None:
    """Stops torchrun, so that it does not reap the rank, and then kills the rank."""
    os.kill(started.state()["torchrun"]["pid"], signal.SIGSTOP)
    os.kill(started.pids()[rank], signal.SIGKILL)


def freeze_disk(_started: Started, _rank: int, folder: Path, _stack: ExitStack) -> None:
    subprocess.run(["fsfreeze", "-f", str(folder / "mount")], check=True)
    (folder / "frozen").touch()


INJECT: dict[str, Callable[[Started, int, Path, ExitStack], None]] = {
    "stop": _stop,
    "trace": _trace,
    "freeze": _freeze,
    "kill": _kill,
    "disk": freeze_disk,
}
"""The injection at the place of the fault, by mechanism."""
