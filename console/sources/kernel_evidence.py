"""Reads the kernel's evidence about one process: its state and the object its main thread waits on.

The only sources are /proc and the cgroup file systems, and no read can block: descriptors are
resolved with readlink, because a stat of one asks its file system, which may hang. The holder of a
file lock is found by the pid of the waiting process in /proc/locks, so no inode is needed. Memory
of the process is not read: the path of an `open` and the descriptors of a `poll` are in it.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from console.sources import tcp
from console.sources.process import GONE
from console.sources.sanitize import clean

MAX_THREADS = MAX_CHILDREN = MAX_DESCRIPTORS = 64
MAX_DEPTH = 32
SMALL_BYTES, TABLE_BYTES = 1 << 12, 1 << 18
"""Bytes read of a file about one process, and of a table of the host."""
MAX_NAME_CHARS, MAX_PATH_CHARS = 64, 300
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
Kind = Literal["lock", "pipe", "network", "child", "timer", "disk", "futex", "none"]
_STATES = {"R": "running", "S": "sleeping", "D": "in uninterruptible sleep", "T": "stopped",
           "t": "traced", "Z": "ended, not reaped"}  # fmt: skip
_SYSCALLS = {
    "read": ("0 17 19 45 47 299", "63 65 67 207 212 243"),
    "write": ("1 18 20 44 46 307", "64 66 68 206 211 269"),
    "connect": ("42", "203"), "accept": ("43 288", "202 242"), "lock": ("72 73", "25 32"),
    "poll": ("7 271", "73"), "select": ("23 270", "72"), "epoll": ("232 281 441", "22 441"),
    "wait4": ("61", "260"), "waitid": ("247", "95"), "timer": ("35 230", "101 115"),
    "signal": ("34 128", "137"), "futex": ("202", "98"),
    "openat": ("257", "56"), "sync": ("74 75", "82 83"),
}  # fmt: skip
"""Numbers of the system calls that may wait, on x86_64 and aarch64, by what they wait on."""
_COLUMNS = {"x86_64": slice(0, 1), "aarch64": slice(1, 2)}
_COLUMN = _COLUMNS.get(os.uname().machine, slice(0))
_CALLS = {int(n): name for name, all_ in _SYSCALLS.items() for n in " ".join(all_[_COLUMN]).split()}
_WITH_DESCRIPTOR = ("read", "write", "connect", "accept", "lock", "sync")
_WCHANS = {
    "lock": r"fcntl_setlk|locks_lock_inode_wait|flock_lock|posix_lock",
    "open": r"wait_for_partner",
    "read-pipe": r"(anon_)?pipe_read|pipe_wait_readable",
    "write-pipe": r"(anon_)?pipe_write|pipe_wait_writable",
    "child": r"do_wait$|kernel_wait4|kernel_waitid",
    "timer": r"hrtimer_nanosleep|do_nanosleep",
    "futex": r"futex_",
    "network": r"wait_woken|inet_|tcp_|sk_|unix_|__skb_|skb_|sock_",
    "disk": r"io_schedule|percpu_rwsem|folio_wait|wait_on_page|bit_wait_io|jbd2_|ext4_|xfs_|btrfs_"
    r"|nfs_|rpc_|request_wait_answer|fuse_|blk_|submit_bio_wait",
}
"""Functions of the kernel in which a thread waits, for what its system call does not say."""
_LOCK = re.compile(r"([0-9]+): +(-> )?\S+ +\S+ +\S+ +(-?[0-9]{1,9}) ")
_OTHER_END = {os.O_RDONLY: "writer", os.O_WRONLY: "reader"}
_FREEZER = (("freezer.state", "FROZEN"), ("freezer.state", "FREEZING"), ("cgroup.freeze", "1"),
            ("cgroup.events", "frozen 1"))  # fmt: skip
"""Files of a cgroup, and the line in them while it is frozen."""
_FREEZER_WCHANS = ("__refrigerator", "do_freezer_trap", "get_signal")
"""They show a freeze also in a container that does not see its cgroup."""
_NO_PEER = "a socket, its peer is not available"


@dataclass(frozen=True, slots=True)
class ThreadEvidence:
    """One thread: its name, state letter, the kernel function it waits in, and its CPU time."""

    tid: int
    name: str
    state: str
    wchan: str
    cpu_ticks: int


@dataclass(frozen=True, slots=True)
class ChildEvidence:
    """One direct child process."""

    pid: int
    name: str
    state: str


@dataclass(frozen=True, slots=True)
class BlockedOn:
    """The object that a system call waits on; `text` is a noun phrase, "" for "none"."""

    kind: Kind
    text: str


NOTHING = BlockedOn("none", "")
_Children = tuple[ChildEvidence, ...]
_TIMER = BlockedOn("timer", "a timer")
_FUTEX = BlockedOn("futex", "a lock, an event or a future (futex)")


@dataclass(frozen=True, slots=True)
class ProcessEvidence:
    """One reading of a process at the monotonic time `mono`.

    `state` is the kernel's letter of the main thread or "gone", `wchan` "" where the kernel hides
    it, `cpu_ticks` the time of all threads, `tracer` a pid and a name.
    """

    pid: int
    state: str
    wchan: str
    cpu_ticks: int
    mono: float
    tracer: tuple[int, str] | None
    frozen: bool
    main: BlockedOn
    threads: tuple[ThreadEvidence, ...]
    children: tuple[ChildEvidence, ...]
    connections: tuple[tcp.Connection, ...] = ()


@dataclass(frozen=True, slots=True)
class _Stat:
    name: str
    state: str
    cpu_ticks: int
    start_ticks: int


def collect(
    pid: int, start_ticks: int | None = None, tables: dict[str, str] | None = None
) -> ProcessEvidence | None:
    """Returns the evidence about a process, with state "gone" where there is none.

    `tables` keeps the sockets of each network namespace for the other processes of one sample.
    Returns None where it cannot be read, or another process has its pid: `start_ticks` differ.
    """
    mono, first = time.monotonic(), _stat(f"/proc/{pid}")
    if first is not None and start_ticks not in (None, first.start_ticks):
        return None
    tids = sorted(_numbers(f"/proc/{pid}/task"), key=lambda tid: (tid != pid, tid))[:MAX_THREADS]
    threads = tuple(filter(None, (_thread(f"/proc/{pid}/task/{tid}", tid) for tid in tids)))
    children = _children(pid, tids)
    last = _stat(f"/proc/{pid}")
    if first is None or last is None:
        if pid <= 0 or os.access(f"/proc/{pid}", os.F_OK):
            return None
        return ProcessEvidence(pid, GONE, "", 0, mono, None, False, NOTHING, (), ())
    if first.start_ticks != last.start_ticks:
        return None
    wchan, state = _wchan(f"/proc/{pid}"), last.state
    if state == "Z" and any(thread.state not in "ZX" for thread in threads):
        state = "?"  # the main thread has ended, the process has not
    sleeps = last.state in "SD"
    frozen = _is_frozen(pid) or (sleeps and wchan in _FREEZER_WCHANS)
    main = _blocked_on(pid, last.state, wchan, children) if sleeps and not frozen else NOTHING
    links = (_link(pid, f"fd/{fd}") for fd in _numbers(f"/proc/{pid}/fd")[: tcp.MAX_CONNECTIONS])
    return ProcessEvidence(
        pid, state, wchan, first.cpu_ticks, mono, _tracer(pid), frozen, main, threads, children,
        tcp.connections(_tables(pid, tables), _inodes(links)),
    )  # fmt: skip


def cpu_share(before: ProcessEvidence, after: ProcessEvidence) -> float | None:
    """Returns the cores that all threads used between two readings, None if not available."""
    elapsed_s, ticks = after.mono - before.mono, after.cpu_ticks - before.cpu_ticks
    if before.pid != after.pid or GONE in (before.state, after.state):
        return None
    return ticks / _TICKS_PER_S / elapsed_s if elapsed_s > 0 and ticks >= 0 else None


def _read(path: str, limit: int = SMALL_BYTES) -> str:
    """Returns at most `limit` bytes of a file of the kernel as text, "" if not available."""
    try:
        with Path(path).open("rb") as file:
            return file.read(limit).decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""


def _numbers(folder: str) -> list[int]:
    """Returns the names in a directory of /proc that are numbers, [] if not available."""
    try:
        return sorted(int(name) for name in os.listdir(folder) if name.isdecimal())
    except OSError:
        return []


def _stat(folder: str) -> _Stat | None:
    return _parse_stat(_read(f"{folder}/stat"))


def _parse_stat(text: str) -> _Stat | None:
    """Returns the fields of a stat file; a name may contain parentheses, spaces and newlines."""
    head, _, tail = text.rpartition(")")
    name, fields = head.partition("(")[2], tail.split()
    numbers = [int(field) for field in fields[11:20] if re.fullmatch(r"-?[0-9]{1,19}", field)]
    if len(numbers) < 9 or len(fields[0]) != 1:
        return None
    name, state = clean(name, MAX_NAME_CHARS), clean(fields[0])
    return _Stat(name, state, numbers[0] + numbers[1], numbers[8])


def _wchan(folder: str) -> str:
    """Returns the kernel function a thread waits in, "" where it runs or the kernel hides it."""
    name = clean(_read(f"{folder}/wchan"), MAX_NAME_CHARS).partition(".")[0]
    return "" if name == "0" else name


def _thread(folder: str, tid: int) -> ThreadEvidence | None:
    stat = _stat(folder)
    return stat and ThreadEvidence(tid, stat.name, stat.state, _wchan(folder), stat.cpu_ticks)


def _children(pid: int, tids: list[int]) -> _Children:
    texts = (_read(f"/proc/{pid}/task/{tid}/children") for tid in tids)
    pids = [each for text in texts for each in text.split() if each.isdecimal()][:MAX_CHILDREN]
    found = ((int(child), _stat(f"/proc/{child}")) for child in pids)
    return tuple(ChildEvidence(child, stat.name, stat.state) for child, stat in found if stat)


def _value(text: str, key: str) -> int:
    """Returns the number in the line "key: number", 0 without one."""
    found = re.search(rf"^{key}:\s*([0-9]{{1,19}})\s*$", text, re.MULTILINE)
    return int(found[1]) if found else 0


def _tracer(pid: int) -> tuple[int, str] | None:
    tracer = _value(_read(f"/proc/{pid}/status"), "TracerPid")
    stat = _stat(f"/proc/{tracer}") if tracer else None
    return (tracer, stat.name if stat else "") if tracer else None


def _is_frozen(pid: int) -> bool:
    """Returns whether the process is in a frozen cgroup (version 2, or freezer of version 1)."""
    mounts = [line.split(" ") for line in _read("/proc/self/mounts", TABLE_BYTES).splitlines()]
    for line in _read(f"/proc/{pid}/cgroup").splitlines():
        controllers, _, place = line.partition(":")[2].partition(":")
        if controllers and "freezer" not in controllers.split(","):
            continue
        kind, option = ("cgroup", "freezer") if controllers else ("cgroup2", "")
        tops = (
            each[1] for each in mounts
            if len(each) > 3 and each[2] == kind and option in ("", *each[3].split(","))
        )  # fmt: skip
        top, parts = next(tops, None), place.strip("/").split("/")[:MAX_DEPTH]
        # In a container the mount may start at a cgroup above the one that the path names.
        folders = ("/".join((top or "", *parts[:depth])) for depth in range(len(parts) + 1))
        if top and ".." not in parts and any(
            line in _read(f"{folder}/{name}").splitlines()
            for folder in folders for name, line in _FREEZER
        ):  # fmt: skip
            return True
    return False


def _parse_syscall(text: str) -> tuple[int, tuple[int, ...]] | None:
    """Returns the number and the six arguments of a system call, None for a running thread."""
    if not re.fullmatch(r"[0-9]{1,9}( 0x[0-9a-f]{1,16}){8}\s*", text):
        return None
    number, *arguments = text.split()
    return int(number), tuple(int(each, 16) for each in arguments[:6])


def _blocked_on(pid: int, state: str, wchan: str, children: _Children) -> BlockedOn:
    """Returns the object that the main thread waits on, by its system call and its wchan."""
    call, arguments = _parse_syscall(_read(f"/proc/{pid}/syscall")) or (-1, (0,) * 6)
    name = _CALLS.get(call, "")
    waits_in = next((kind for kind, known in _WCHANS.items() if re.match(known, wchan)), "")
    fd = arguments[0] & 0xFFFFFFFF
    link = _link(pid, f"fd/{fd}") if name in _WITH_DESCRIPTOR else ""
    if "lock" in (name, waits_in):
        return _lock(pid, link)
    if waits_in == "open":
        end = _OTHER_END.get(arguments[2] & os.O_ACCMODE, "peer") if name == "openat" else "peer"
        return BlockedOn("pipe", f"a FIFO, which has no {end}")
    if link.startswith("socket:["):
        return _socket(pid, link[8:-1], name == "accept")
    if link.startswith("pipe:[") or waits_in in ("read-pipe", "write-pipe"):
        subject = f"the FIFO {link}, which" if link.startswith("/") else "a pipe that"
        is_full = name == "write" or waits_in == "write-pipe"
        return BlockedOn("pipe", f"{subject} is {'full' if is_full else 'empty'}")
    if name in ("wait4", "waitid") or waits_in == "child":
        return _child(_waited_pid(pid, name, arguments), children)
    if name == "signal" or (name in ("poll", "select") and not arguments[name == "poll"]):
        return BlockedOn("timer", "a signal or a timeout")  # a poll of no descriptor
    if name in ("poll", "select", "epoll"):
        return _polled(pid, fd if name == "epoll" else None)
    if name == "sync" or state == "D" or waits_in == "disk":
        where = f"the file {link}" if link.startswith("/") else "a disk or a driver"
        return BlockedOn("disk", where + (f" (in {wchan})" if wchan else ""))
    if waits_in == "network" and not link:
        return BlockedOn("network", _NO_PEER)
    if "timer" in (name, waits_in):
        return _TIMER
    return _FUTEX if "futex" in (name, waits_in) else NOTHING


def _link(pid: int, name: str) -> str:
    """Returns the path of an open file, "socket:[N]", "pipe:[N]" or "net:[N]", "" without it."""
    try:
        return clean(str(Path(f"/proc/{pid}/{name}").readlink()), MAX_PATH_CHARS)
    except OSError:
        return ""


def _lock(pid: int, link: str) -> BlockedOn:
    name = f"the lock of {link}" if link else "a file lock"
    holder = _holder(_read("/proc/locks", TABLE_BYTES), pid)
    if holder is None:
        return BlockedOn("lock", f"{name} (its holder is not available)")
    stat = _stat(f"/proc/{holder}")
    who = stat.name if stat else "ended, another process has its descriptor"
    return BlockedOn("lock", f"{name}, held by pid {holder} ({who})")


def _holder(locks: str, waiting: int) -> int | None:
    """Returns the pid that holds the lock for which a process waits, as /proc/locks shows it.

    The lines of the waiting processes have an arrow and the number of the holder's line.
    """
    holders: dict[str, int] = {}
    for found in filter(None, map(_LOCK.match, locks.splitlines())):
        number, arrow, pid = found.groups()
        if not arrow:
            holders[number] = int(pid)
        elif int(pid) == waiting:
            return max(holders.get(number, 0), 0) or None  # -1: not of one process
    return None


def _waited_pid(pid: int, name: str, arguments: tuple[int, ...]) -> int:
    """Returns the pid of the child that a process waits for, 0 for any child."""
    first, second = (each & 0xFFFFFFFF for each in arguments[:2])
    if name == "waitid" and first == os.P_PIDFD:
        return _value(_read(f"/proc/{pid}/fdinfo/{second}"), "Pid")
    child = first if name == "wait4" else second if name == "waitid" and first == os.P_PID else 0
    return child if child < 1 << 31 else 0


def _child(waited: int, children: _Children) -> BlockedOn:
    waited = waited or (children[0].pid if len(children) == 1 else 0)
    if not waited:
        count = len(children)
        return BlockedOn("child", f"any of {count} children" if count else "a child process")
    stat = _stat(f"/proc/{waited}")
    words = f" ({stat.name}, {_STATES.get(stat.state, stat.state)})" if stat else ""
    return BlockedOn("child", f"child {waited}{words}")


def _polled(pid: int, epoll_fd: int | None) -> BlockedOn:
    """Returns the only socket that a poll can wait on, or the only unfinished connection.

    The descriptors of an epoll are in fdinfo. Those of a poll are not available: it is named only
    where the process has one socket and no pipe above stderr.
    """
    if epoll_fd is None:
        fds = [fd for fd in _numbers(f"/proc/{pid}/fd") if fd > 2]
    else:
        info = _read(f"/proc/{pid}/fdinfo/{epoll_fd}")
        fds = [int(fd) for fd in re.findall(r"^tfd:\s*([0-9]{1,9})\s", info, re.MULTILINE)]
    links = {_link(pid, f"fd/{fd}") for fd in fds[:MAX_DESCRIPTORS]}
    sockets = sorted(_inodes(links))
    tables = _tables(pid) if sockets else ""
    opening = [each for each in sockets if tcp.entry(tables, each)[2] == tcp.SYN_SENT]
    has_pipe = any(link.startswith("pipe:[") for link in links)
    named = opening or (sockets if not has_pipe and len(fds) <= MAX_DESCRIPTORS else [])
    return _socket(pid, named[0], False) if len(named) == 1 else NOTHING


def _inodes(links: Iterable[str]) -> set[str]:
    """Returns the inodes of the sockets among the links of descriptors."""
    return {link[8:-1] for link in links if link.startswith("socket:[")}


def _tables(pid: int, known: dict[str, str] | None = None) -> str:
    """Returns the TCP sockets in the network namespace of a process; to read them is expensive."""
    known, namespace = {} if known is None else known, _link(pid, "ns/net")
    if not namespace or namespace not in known:
        texts = (_read(f"/proc/{pid}/net/{name}", TABLE_BYTES) for name in ("tcp", "tcp6"))
        known[namespace] = "".join(texts)
    return known[namespace]


def _socket(pid: int, inode: str, accepts: bool) -> BlockedOn:
    """Returns a socket with the address of its peer, or with its own where it accepts."""
    here, peer, state = tcp.entry(_tables(pid), inode)
    if not state:
        table = _read(f"/proc/{pid}/net/unix", TABLE_BYTES)
        found = re.search(rf"^(?:\S+ ){{6}} *{inode}(?: (.*))?$", table, re.MULTILINE)
        path = clean(found[1] or "", MAX_PATH_CHARS) if found else ""
        name = f"the local socket {path}" if path else "a local socket"
        return BlockedOn("network", name if found else _NO_PEER)
    if accepts:
        return BlockedOn("network", f"a connection to {tcp.address(here)}")
    suffix = " that is not connected yet" if state == tcp.SYN_SENT else ""
    return BlockedOn("network", f"a socket to {tcp.address(peer)}{suffix}")
