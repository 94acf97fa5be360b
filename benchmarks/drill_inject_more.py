"""Injects faults of author 2 from outside the training program."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import sqlite3
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from benchmarks import drill_inject
from benchmarks.drill_fuse import mount_stuck
from benchmarks.drill_inject import (
    CGROUPS,
    Unavailable,
    freeze_disk,
    listen,
    mount_disk,
    mount_silent,
    remove_cgroup,
)
from tests.launches import Started

OOM_BYTES = 96 << 20
TRICKLE_S = 0.5
HOLD_S = 120
SEIZER = """
import ctypes, os, signal, sys
ptrace = ctypes.CDLL(None, use_errno=True).ptrace
pid, only = sys.argv[1:]
for name in [pid] if only == "leader" else os.listdir(f"/proc/{pid}/task"):
    for request in (0x4206, 0x4207):  # PTRACE_SEIZE, PTRACE_INTERRUPT
        if ptrace(request, int(name), None, None) != 0:
            sys.exit(os.strerror(ctypes.get_errno()))
    os.waitpid(int(name), 0x40000000)  # __WALL
print("attached", flush=True)
while True:
    signal.pause()
"""


# --- before the launch ---------------------------------------------------------------------------


def _hold_region(folder: Path, stack: ExitStack) -> None:
    path = folder / "index.bin"
    path.write_bytes(bytes(64))
    stream = stack.enter_context(path.open("r+b"))
    whole = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0)
    fcntl.fcntl(stream, fcntl.F_OFD_SETLK, whole)


def _hold_dataset(folder: Path, stack: ExitStack) -> None:
    stream = stack.enter_context((folder / "dataset.use").open("w"))
    fcntl.flock(stream, fcntl.LOCK_EX)


def _hold_ledger(folder: Path, stack: ExitStack) -> None:
    ledger = sqlite3.connect(folder / "runs.db", isolation_level=None)
    stack.callback(ledger.close)
    ledger.execute("CREATE TABLE results (step INTEGER)")
    ledger.execute("BEGIN EXCLUSIVE")


def _listen_datagrams(folder: Path, stack: ExitStack) -> None:
    """Opens a port for datagrams, and answers nothing."""
    server = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    server.bind(("127.0.0.1", 0))
    (folder / "peer").write_text(f"127.0.0.1:{server.getsockname()[1]}")


def _listen_full(folder: Path, stack: ExitStack) -> None:
    """Listens with a full backlog, so that other connections wait."""
    server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
    for _ in range(4):
        client = stack.enter_context(socket.socket())
        client.setblocking(False)
        with suppress(BlockingIOError):
            client.connect(server.getsockname())
    (folder / "peer").write_text(f"127.0.0.1:{server.getsockname()[1]}")


def _serve_slowly(folder: Path, stack: ExitStack) -> None:
    """Answers one request with a header, and then with a byte every `TRICKLE_S`."""
    server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    server.settimeout(TRICKLE_S)
    (folder / "peer").write_text(f"127.0.0.1:{server.getsockname()[1]}")
    closing = threading.Event()

    def serve() -> None:
        client = None
        while not closing.wait(TRICKLE_S):
            with suppress(OSError):
                if client is None:
                    client, _ = server.accept()
                    client.recv(4096)
                    client.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: 1000000\r\n\r\n")
                client.sendall(b".")
        if client is not None:
            client.close()

    serving = threading.Thread(target=serve, daemon=True)
    serving.start()
    stack.callback(serving.join)
    stack.callback(closing.set)


def _collect(folder: Path, stack: ExitStack) -> None:
    """Starts `cat`, which reads a FIFO and is not a process of the run."""
    path = folder / "metrics"
    os.mkfifo(path)
    cat = subprocess.Popen(["cat", str(path)], stdout=subprocess.DEVNULL)
    stack.callback(cat.wait)
    stack.callback(cat.kill)
    (folder / "collector").write_text(str(cat.pid))


def _hierarchy(controller: str) -> Path:
    """Returns the root of the version 1 hierarchy of cgroups that has this controller."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, where, kind, options, *_ = line.split()
        if kind == "cgroup" and controller in options.split(","):
            return Path(where)
    raise Unavailable(f"needs a version 1 hierarchy of cgroups with {controller}")


def _unified() -> Path:
    root = next((path for path in CGROUPS if (path / "cgroup.controllers").exists()), None)
    if root is None:
        raise Unavailable("needs the unified cgroup hierarchy")
    return root


def _make(group: Path, stack: ExitStack) -> None:
    try:
        group.mkdir()
    except OSError as error:
        raise Unavailable(f"cannot write cgroups: {error}") from None
    stack.callback(remove_cgroup, group)


def _make_older(folder: Path, stack: ExitStack) -> None:
    _make(_hierarchy("freezer") / folder.name, stack)


def _make_nested(folder: Path, stack: ExitStack) -> None:
    _make(_unified() / folder.name, stack)
    _make(_unified() / folder.name / "job", stack)


def _make_tree(folder: Path, stack: ExitStack) -> None:
    _make(_unified() / folder.name, stack)


def _small(folder: Path) -> tuple[Path, str]:
    """Returns two values: a cgroup for limited memory, and the name of its limit file."""
    with suppress(Unavailable):
        return _hierarchy("memory") / folder.name, "memory.limit_in_bytes"
    root = _unified()
    if "memory" not in (root / "cgroup.subtree_control").read_text().split():
        raise Unavailable("no cgroup hierarchy limits memory here")
    return root / folder.name, "memory.max"


def _make_small(folder: Path, stack: ExitStack) -> None:
    group, limit = _small(folder)
    _make(group, stack)
    try:
        (group / limit).write_text(str(OOM_BYTES))
    except OSError as error:
        raise Unavailable(f"cannot limit memory: {error}") from None


def _need(program: str) -> Callable[[Path, ExitStack], None]:
    def check(_folder: Path, _stack: ExitStack) -> None:
        if shutil.which(program) is None:
            raise Unavailable(f"needs {program}")

    return check


PREPARE: dict[str, Callable[[Path, ExitStack], None]] = {
    **drill_inject.PREPARE,
    "region": _hold_region, "dataset": _hold_dataset, "ledger": _hold_ledger,
    "resolve": _listen_datagrams, "register": _listen_full, "trickle": _serve_slowly,
    "again": listen, "greet": listen, "tracker": listen, "feed": listen, "remote": listen,
    "collector": _collect,
    "commit": mount_disk, "journal": mount_disk, "pages": mount_disk,
    "list": mount_silent, "tokenizer": mount_silent, "shard": mount_stuck,
    "older": _make_older, "nested": _make_nested, "tree": _make_tree, "cache": _make_small,
    "inspect": _need("gdb"), "calls": _need("strace"),
}  # fmt: skip


# --- when the rank has reached the place of its fault --------------------------------------------


def _suspend(started: Started, rank: int, _folder: Path, _stack: ExitStack) -> None:
    """Stops a rank like a batch system: first SIGTSTP, which a process may handle, then SIGSTOP."""
    pid = started.pids()[rank]
    os.kill(pid, signal.SIGTSTP)
    os.kill(pid, signal.SIGSTOP)


def _stop_group(started: Started, rank: int, _folder: Path, _stack: ExitStack) -> None:
    """Stops the process group of a rank. Raises Unavailable if the rank is not its leader."""
    pid = started.pids()[rank]
    if os.getpgid(pid) != pid:
        raise Unavailable("a rank shares its process group with others")
    os.killpg(pid, signal.SIGSTOP)


def _tracer(pid: int, *words: str, says: str, stack: ExitStack) -> subprocess.Popen[str]:
    """Starts a tracer, and waits until it has printed `says` and is attached to `pid`."""
    tracer = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    stack.callback(tracer.wait)
    stack.callback(tracer.kill)
    assert tracer.stdout is not None
    heard = []
    for line in tracer.stdout:
        heard.append(line.strip())
        if says in line and "TracerPid:\t0\n" not in Path(f"/proc/{pid}/status").read_text():
            return tracer
    raise Unavailable(f"cannot trace: {' '.join(heard)[-200:]}")


def _seize(which: str) -> Callable[[Started, int, Path, ExitStack], None]:
    def inject(started: Started, rank: int, _folder: Path, stack: ExitStack) -> None:
        pid = started.pids()[rank]
        words = [sys.executable, "-c", SEIZER, str(pid), which]
        _tracer(pid, *words, says="attached", stack=stack)

    return inject


def _inspect(started: Started, rank: int, _folder: Path, stack: ExitStack) -> None:
    """Attaches a debugger for at most `HOLD_S`."""
    pid = started.pids()[rank]
    words = ["gdb", "-nx", "-batch", "-p", str(pid), "-ex", "echo attached\\n"]
    _tracer(pid, *words, "-ex", f"shell sleep {HOLD_S}", says="attached", stack=stack)


def _trace_calls(started: Started, rank: int, _folder: Path, stack: ExitStack) -> None:
    """Attaches a tracer of system calls and stops it, so that the rank stays in its next call."""
    words = ["strace", "-f", "-e", "trace=all", "-o", "/dev/null"]
    pid = started.pids()[rank]
    tracer = _tracer(pid, *words, "-p", str(pid), says="attached", stack=stack)
    os.kill(tracer.pid, signal.SIGSTOP)


def _freeze_older(started: Started, rank: int, folder: Path, stack: ExitStack) -> None:
    group = _hierarchy("freezer") / folder.name
    (group / "cgroup.procs").write_text(str(started.pids()[rank]))
    (group / "freezer.state").write_text("FROZEN")
    stack.callback((group / "freezer.state").write_text, "THAWED")


def _freeze_parent(started: Started, rank: int, folder: Path, stack: ExitStack) -> None:
    _freeze_all(_unified() / folder.name, [started.pids()[rank]], stack, "job")


def _freeze_tree(started: Started, rank: int, folder: Path, stack: ExitStack) -> None:
    """Freezes a rank and all of its descendants."""
    pids = [started.pids()[rank]]
    for pid in pids:
        with suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                pids += [int(child) for child in (task / "children").read_text().split()]
    _freeze_all(_unified() / folder.name, pids, stack, ".")


def _freeze_all(group: Path, pids: list[int], stack: ExitStack, within: str) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            (group / within / "cgroup.procs").write_text(str(pid))
    (group / "cgroup.freeze").write_text("1")
    stack.callback((group / "cgroup.freeze").write_text, "0")


def _limit_memory(started: Started, rank: int, folder: Path, _stack: ExitStack) -> None:
    group, _ = _small(folder)
    (group / "cgroup.procs").write_text(str(started.pids()[rank]))
    (folder / "moved").touch()


def _stop_collector(_started: Started, _rank: int, folder: Path, _stack: ExitStack) -> None:
    os.kill(int((folder / "collector").read_text()), signal.SIGSTOP)


INJECT: dict[str, Callable[[Started, int, Path, ExitStack], None]] = {
    **drill_inject.INJECT,
    "suspend": _suspend, "group": _stop_group,
    "seize": _seize("all"), "leader": _seize("leader"), "inspect": _inspect,
    "calls": _trace_calls,
    "older": _freeze_older, "nested": _freeze_parent, "tree": _freeze_tree,
    "cache": _limit_memory, "collector": _stop_collector,
    "commit": freeze_disk, "journal": freeze_disk, "pages": freeze_disk,
}  # fmt: skip
