"""Reads processes from /proc and signals them through pidfds.

A process is identified by pid and start time. The functions `open_*` first open the pidfd of a
`Handle`, then check the identity. So the signals of the `Handle` never reach another process with
the same pid. psutil is not used, for three reasons. It sends signals by pid. It returns an exit
code only for a child. It scans all processes to find the children of one process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import re
import select
import shlex
import shutil
import signal
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from console.sources import procfs
from console.sources.procfs import Stat, children
from console.status_text import quoted
from trainers.contract import environ, jsonl, rundir

GONE, NAME = "gone", "nsa-console"
STOPPED = ("T", "t")
"""The state of a process that a signal or a debugger stopped."""
_TICKS_PER_S, _PAGE_MIB = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE") / (1 << 20)
_INFO_SIZE, _INFO_CODE, _INFO_EXIT = 64, 60, 1 << 3
_GET_INFO = 3 << 30 | _INFO_SIZE << 16 | 0xFF << 8 | 11
"""PIDFD_GET_INFO of linux/pidfd.h; since Linux 6.15 it returns a reaped process's wait status."""
SHORTEST_S = 0.5
"""The shortest time over which the CPU use of a process is measured."""
UNREAD_AFTER_S = 0.5
_reads: dict[int, threading.Thread] = {}
"""The newest read of the environment of each process that was in state D, by pid."""


def program() -> str:
    """Returns a command that starts this program: its name, its path or `python -m console`.

    A process that was started by the path of `nsa-console` gets this path, unless the shell finds
    the same file by the name. `python -m console` and a supervisor get the file beside their
    Python, by the same rule, or `python -m console` if there is none.
    """
    called, found = Path(sys.argv[0]), shutil.which(NAME)
    if called.name == "__main__.py" and "console" in called.parts[-3:-1]:
        called = Path(sys.executable).with_name(NAME)
        if not called.exists():
            return f"{shlex.quote(sys.executable)} -m console"
    if called.name != NAME or (found and called.exists() and called.samefile(found)):
        return NAME
    return shlex.quote(str(called))


def command(*words: str | Path) -> str:
    """Returns a command of this program; a shell passes these words to it unchanged."""
    return " ".join([program(), *(quoted(str(word)) for word in words)])


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """One sample of a process: the kernel's state letter or "gone", CPU (% of one core), memory."""

    state: str = GONE
    cpu_pct: float | None = None
    rss_mib: float | None = None


class Meter:
    """Measures the CPU and memory of processes; each sample reads one file of /proc."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Stat, float, float | None]] = {}
        """The last measurement of each process: stat file, time and CPU. The key is the pid."""

    def sample(self, pid: int) -> ProcessUse:
        """Returns a sample of a process, with the CPU use since the last measurement.

        The CPU use is None at first. Within `SHORTEST_S` after a measurement it is not measured
        anew: the kernel counts in ticks of 10 ms, and one tick would be a third of 30 ms.
        """
        found, now = procfs.stat(f"/proc/{pid}"), time.monotonic()
        if found is None or found.state in "ZX":
            self._known.pop(pid, None)  # a zombie has no memory that could be measured
            return ProcessUse(found.state if found else GONE)
        last, at, cpu_pct = self._known.get(pid, (None, now, None))
        if last is None or last.start_ticks != found.start_ticks:
            cpu_pct = None
            self._known[pid] = found, now, None
        elif now - at >= SHORTEST_S:
            used_s = (found.cpu_ticks - last.cpu_ticks) / _TICKS_PER_S
            cpu_pct = round(used_s / (now - at) * 100, 1)
            self._known[pid] = found, now, cpu_pct
        return ProcessUse(found.state, cpu_pct, round(found.resident_pages * _PAGE_MIB, 1))


def user_name() -> str:
    """Returns the name of the user, or the user id if the user has no name."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def state(pid: int) -> str:
    """Returns the kernel's state letter of a process, or "gone"."""
    found = procfs.stat(f"/proc/{pid}")
    return found.state if found else GONE


def identity_in(document: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the identity of a process from its entry in supervisor.json.

    If the entry lacks the host, the boot id or the PID namespace, that of the document is used.
    """
    return {key: document.get(key) for key in ("boot_id", "host", "pid_ns")} | dict(entry)


def is_stopped(owner: Mapping[str, Any]) -> bool:
    """Returns whether the process with this identity is alive and stopped."""
    return rundir.is_alive(owner) and state(owner["pid"]) in STOPPED


def environment(pid: int, proc: str = "/proc") -> dict[str, str]:
    """Returns the initial environment of a process, or {} if it cannot be read.

    The kernel reads it from the memory of the process, and waits for the lock of this memory. A
    process in state D may hold the lock, for example in `mmap` of a file on a hung server. So for a
    process in state D, this function waits at most `UNREAD_AFTER_S`.
    """
    found = list[bytes]()

    def read() -> None:
        with contextlib.suppress(OSError):
            found.append(Path(f"{proc}/{pid}/environ").read_bytes())

    now = procfs.stat(f"{proc}/{pid}")
    if now is None or now.state != "D":
        read()
    elif pid not in _reads or not _reads[pid].is_alive():
        # Another thread of this process may read the same pid, so `_reads` may change meanwhile.
        reader = _reads[pid] = threading.Thread(target=read, name="environment", daemon=True)
        reader.start()
        reader.join(UNREAD_AFTER_S)
    pairs = (os.fsdecode(entry).partition("=") for data in found for entry in data.split(b"\0"))
    return {name: value for name, equals, value in pairs if equals}


def with_token(token: str, home: str = "") -> list[int]:
    """Returns the pids of the processes whose initial environment contains this token.

    A process is not found if it has overwritten its environment, or if its environment cannot be
    read, for example in state D. With `home`, the environment must also contain this run directory,
    because a token may be copied. Raises OSError if the processes cannot be listed.
    """
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return [pid for pid in pids if (variables := environment(pid)).get(environ.TOKEN) == token
            and (not home or variables.get(environ.RUN_DIR) == home)]  # fmt: skip


def catches(pid: int, number: int) -> bool:
    """Returns whether a process has a handler for a signal."""
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", procfs.status(pid), re.MULTILINE)
    return bool(caught and int(caught[1], 16) >> (number - 1) & 1)


class Handle:
    """One process: its pidfd, pid and start time. Another process may later have its pid."""

    def __init__(self, pid: int, fd: int, start_ticks: int):
        self.pid, self.fd, self.start_ticks = pid, fd, start_ticks

    def send(self, number: int) -> bool:
        """Sends a signal; returns False if the process was reaped or this handle is closed."""
        if self.fd < 0:
            return False
        try:
            signal.pidfd_send_signal(self.fd, number)
        except ProcessLookupError:
            return False
        return True

    def is_over(self) -> bool:
        """Returns whether the process has ended, reaped or not; True for a closed handle."""
        if self.fd < 0:
            return True
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        return bool(poller.poll(0))

    def exit_code(self) -> int | None:
        """Returns the exit code, the negative number of a signal, or None if not available.

        Call this method when `is_over` returns True. The method never waits. The code comes from
        /proc while the process is a zombie, and from the pidfd after it is reaped (Linux 6.15 or
        later). The parent may be any process.
        """
        status = _zombie_status(self.pid, self.start_ticks)
        if status is None and self.fd >= 0:
            status = _reaped_status(self.fd)
        return None if status is None else os.waitstatus_to_exitcode(status)

    def is_unreaped(self) -> bool:
        """Returns whether the process is a zombie (ended and not reaped)."""
        return _zombie_status(self.pid, self.start_ticks) is not None

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def open_process(pid: int, token: str) -> Handle | None:
    """Opens a process, then checks its token; returns None if the open or the check fails."""
    return _open(pid, lambda: environment(pid).get(environ.TOKEN) == token)


def open_child(pid: int, parent: int) -> Handle | None:
    """Opens a process, then checks its parent; returns None if the open or the check fails."""
    return _open(pid, lambda: pid in children(parent))


def _open(pid: int, is_meant: Callable[[], bool]) -> Handle | None:
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return None
    ticks = rundir.start_ticks(pid)
    if ticks is None or not is_meant():
        os.close(fd)
        return None
    return Handle(pid, fd, ticks)


def open_named(
    owner: Mapping[str, Any], run: Path, logs: Path | None, family: Collection[int] = ()
) -> Handle | None:
    """Opens the process that a document names, then checks it; returns None if a check fails.

    The process need not have a token; setproctitle, for example, overwrites it. A document may name
    any process. So the process must belong to this user, and write its output into one of the run's
    `logs`. `family` has the processes with the token and the RANK of the named process. If `family`
    is not empty, it must contain the process or one of its descendants. If `logs` is None, this
    supervisor wrote the document, so only pid and start time are checked.
    """
    if not rundir.is_alive(owner):
        return None
    pid = owner["pid"]

    def is_meant() -> bool:
        if logs and family and not any(pid in procfs.lineage(each) for each in family):
            return False
        return rundir.is_alive(owner) and (logs is None or writes_into(pid, run, logs))

    return _open(pid, is_meant)


def writes_into(pid: int, run: Path, logs: Path) -> bool:
    """Returns whether a process of this user writes its output into one of the files in `logs`.

    The output is stdout or stderr. A file with a second hard link is ignored.
    """
    folder = jsonl.open_inside(logs, run)
    if folder is None:
        return False
    try:
        found = [os.stat(name, dir_fd=folder, follow_symlinks=False) for name in os.listdir(folder)]
        ours = {(f.st_dev, f.st_ino) for f in found if stat.S_ISREG(f.st_mode) and f.st_nlink == 1}
        output = [os.stat(f"/proc/{pid}/fd/{number}") for number in (1, 2)]
        mine = os.stat(f"/proc/{pid}").st_uid == os.geteuid()
    except OSError:
        return False
    finally:
        os.close(folder)
    return mine and any((f.st_dev, f.st_ino) in ours for f in output)


def _zombie_status(pid: int, start_ticks: int) -> int | None:
    """Returns the wait status in a zombie's stat file, or None if the process is not a zombie.

    The kernel shows 0 to a process that lacks the right to read it. `open_process` has read the
    environment, and that needs the same right.
    """
    found = procfs.stat(f"/proc/{pid}")
    is_zombie = found is not None and (found.state, found.start_ticks) == ("Z", start_ticks)
    return found.wait_status if found is not None and is_zombie else None


def _reaped_status(fd: int) -> int | None:
    """Returns the wait status of a reaped process from its pidfd, or None if not available."""
    info = bytearray(_INFO_SIZE)
    struct.pack_into("<Q", info, 0, _INFO_EXIT)
    try:
        fcntl.ioctl(fd, _GET_INFO, info)
    except OSError:
        return None
    known = struct.unpack_from("<Q", info)[0] & _INFO_EXIT
    return struct.unpack_from("<i", info, _INFO_CODE)[0] if known else None


def signal_name(number: int) -> str:
    """Returns the name of a signal, or "signal N"."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def end_words(code: int) -> str:
    """Returns a return code of `Popen` in words: "exited (code 1)" or "was killed (SIGTERM)"."""
    return f"was killed ({signal_name(-code)})" if code < 0 else f"exited (code {code})"
