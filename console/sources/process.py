"""Processes as /proc shows them, and signals that cannot hit a stranger.

A process is known by pid and start time; it is signalled through a pidfd that was opened first and
checked afterwards, so a reused pid is never hit.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass

from trainers.contract import environ

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / (1 << 20)
MAX_ENVIRON_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Stat:
    """One look at /proc/PID/stat. `state` is the kernel's letter."""

    pid: int
    state: str
    ppid: int
    cpu_s: float
    start_ticks: int
    rss_mib: float


def _read(path: str, limit: int = 1 << 16) -> bytes | None:
    """Returns the bytes of a /proc file, None when the process is gone or not ours."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        parts = []
        while limit > 0 and (part := os.read(fd, min(limit, 1 << 16))):
            parts.append(part)
            limit -= len(part)
        return b"".join(parts)
    except OSError:
        return None
    finally:
        os.close(fd)


def stat(pid: int) -> Stat | None:
    """Returns what the kernel says about a process, None if there is none (any more)."""
    data = _read(f"/proc/{pid}/stat")
    if not data:
        return None
    fields = data.rpartition(b")")[2].split()
    if len(fields) < 22:
        return None
    cpu_s = (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    return Stat(
        pid, fields[0].decode(), int(fields[1]), cpu_s, int(fields[19]), int(fields[21]) * PAGE_MIB
    )


def children(pid: int) -> list[int]:
    """Returns the direct children of a process."""
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for thread in threads:
        listed = _read(f"/proc/{pid}/task/{thread}/children")
        if listed is None:
            return [each for each in pids() if (seen := stat(each)) and seen.ppid == pid]
        found += [int(word) for word in listed.split()]
    return found


def pids() -> list[int]:
    """Returns every pid of this host."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def environment(pid: int) -> dict[str, str]:
    """Returns the environment a process was born with, empty if it cannot be read."""
    data = _read(f"/proc/{pid}/environ", MAX_ENVIRON_BYTES) or b""
    pairs = (entry.partition(b"=") for entry in data.split(b"\0") if b"=" in entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def with_token(token: str) -> list[int]:
    """Returns the living processes that were born with this token, whoever their parent is."""
    needle = f"{environ.TOKEN}={token}".encode()
    found = []
    for pid in pids():
        data = _read(f"/proc/{pid}/environ", MAX_ENVIRON_BYTES)
        if data and needle in data.split(b"\0"):
            found.append(pid)
    return found


def ranks_with_token(token: str) -> dict[int, int]:
    """Returns `{rank: pid}` of the ranks born with this token, their own children left out."""
    ranked: dict[int, dict[str, str]] = {}
    for pid in with_token(token):
        variables = environment(pid)
        if variables.get("RANK", "").isdecimal():
            ranked[pid] = variables
    found = {}
    for pid, variables in ranked.items():
        seen = stat(pid)
        if seen is not None and seen.ppid not in ranked:
            found[int(variables["RANK"])] = pid
    return found


def catches(pid: int, number: signal.Signals) -> bool:
    """Says whether a process has a handler of its own for a signal."""
    for line in (_read(f"/proc/{pid}/status") or b"").splitlines():
        if line.startswith(b"SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


class Handle:
    """A process that stays the same one: its pidfd, pid and start time."""

    def __init__(self, pid: int, fd: int, start_ticks: int):
        self.pid, self.fd, self.start_ticks = pid, fd, start_ticks

    def send(self, number: signal.Signals) -> bool:
        """Sends a signal; False when the process is gone."""
        try:
            signal.pidfd_send_signal(self.fd, number)
        except ProcessLookupError:
            return False
        return True

    def is_over(self) -> bool:
        """Says whether the process has ended, reaped or not."""
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        return bool(poller.poll(0))

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def hold(pid: int, token: str, start_ticks: int | None = None) -> Handle | None:
    """Opens a process and then checks who it is; None when it is gone or another one."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return None
    seen = stat(pid)
    wanted = environment(pid).get(environ.TOKEN) == token
    if seen is None or not wanted or start_ticks not in (None, seen.start_ticks):
        os.close(fd)
        return None
    return Handle(pid, fd, seen.start_ticks)


class CpuMeter:
    """CPU of processes in percent of one core, from one look to the next."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[float, float]] = {}

    def pct(self, seen: Stat) -> float | None:
        """Returns the percentage since the last look at this process, None at the first."""
        now = time.monotonic()
        before = self._last.get(seen.pid)
        self._last[seen.pid] = (now, seen.cpu_s)
        if before is None or now <= before[0]:
            return None
        return round(100 * (seen.cpu_s - before[1]) / (now - before[0]), 1)


def signal_name(number: int) -> str:
    """Returns SIGKILL for 9; the number as text for what has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def exit_record(status: int) -> Mapping[str, int | str | None]:
    """Returns `{code, signal}` of a wait status; one of them is None."""
    code = os.waitstatus_to_exitcode(status)
    return {"code": None, "signal": signal_name(-code)} if code < 0 else {
        "code": code, "signal": None,
    }  # fmt: skip
