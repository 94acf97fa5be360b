"""Reads the kernel's evidence about one process, for example the object that it waits for.

The only sources are /proc and the cgroup file systems. No file that the process has open is opened
here. So a file system that does not answer does not block the reader. The memory of the process is
not read, although it contains the path of an `open` and the descriptors of a `poll`. The holder of
a file lock is found in /proc/locks, by the pid of the waiting process. A process may also ask for a
lock at intervals. The holder is then found by the inode of a file that the process has open.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, replace

from console.sources import descriptors, procfs
from console.sources.descriptors import NO_PEER, NOTHING, BlockedOn
from console.sources.process import GONE
from console.sources.procfs import TABLE_BYTES, link_of, number_after, numbers_in, read_text, stat
from console.sources.sanitize import clean
from trainers.contract import rundir

MAX_THREADS = MAX_CHILDREN = MAX_OPEN = 64
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
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
"""Numbers of system calls that may wait, for x86_64 and for aarch64, grouped by kind."""
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
"""Kernel functions in which a thread waits, grouped by the object that it waits on."""
_LOCK = re.compile(r"([0-9]+): +(-> )?(\S+) +\S+ +\S+ +(-?[0-9]{1,9}) (?:\S+:([0-9]{1,19})|\S+) ")
_EPOLL_PWAIT2, _UNTIL = 441, 1
"""The number of epoll_pwait2, whose timeout is a pointer, and TIMER_ABSTIME."""
_OTHER_END = {os.O_RDONLY: "writer", os.O_WRONLY: "reader"}
_FREEZER = (("freezer.state", "FROZEN"), ("freezer.state", "FREEZING"), ("cgroup.freeze", "1"),
            ("cgroup.events", "frozen 1"))  # fmt: skip
"""Files of a cgroup, each with a line that shows that the cgroup is frozen or being frozen."""
_FREEZER_WCHANS = ("__refrigerator", "do_freezer_trap", "get_signal")
"""Kernel functions that show a freeze even in a container that does not see its cgroup."""


@dataclass(frozen=True, slots=True)
class ThreadEvidence:
    """One thread: its name, state letter, the kernel function it waits in, and its CPU time.

    `waits` is the number of voluntary context switches, or -1 if it is 0 or not available.
    """

    tid: int
    name: str
    state: str
    wchan: str
    cpu_ticks: int
    waits: int = -1


@dataclass(frozen=True, slots=True)
class ChildEvidence:
    """One direct child process."""

    pid: int
    name: str
    state: str


_Children = tuple[ChildEvidence, ...]
_Threads = tuple[ThreadEvidence, ...]
_TIMER = BlockedOn("timer", "a timer")
_FUTEX = BlockedOn("futex", "a lock, an event or a future (futex)")


@dataclass(frozen=True, slots=True)
class ProcessEvidence:
    """One reading of a process at the monotonic time `mono`.

    `state` is the kernel's letter for the main thread, "gone", or "?" if only the main thread has
    ended. `wchan` is "" if there is none or it is hidden. `cpu_ticks` is the CPU time of all
    threads. `tracer` is the pid and the name of the process that traces this process, or None.
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
    connections: tuple[descriptors.Connection, ...] = ()
    has_flock: bool = False
    """True if the process holds a lock that it acquired by `flock`."""


def collect(
    pid: int, start_ticks: int | None = None, tables: dict[str, str] | None = None
) -> ProcessEvidence | None:
    """Returns the evidence about a process; its state is "gone" if the process does not exist.

    `tables` caches the TCP tables of each network namespace for other processes of the sample.
    Returns None if the process cannot be read, or if `start_ticks` shows that another process has
    the pid now.
    """
    mono, first = time.monotonic(), stat(f"/proc/{pid}")
    if first is not None and start_ticks not in (None, first.start_ticks):
        return None
    tids = sorted(numbers_in(f"/proc/{pid}/task"), key=lambda tid: (tid != pid, tid))[:MAX_THREADS]
    threads = tuple(filter(None, (_thread(pid, tid) for tid in tids)))
    children = _children(pid, tids)
    last = stat(f"/proc/{pid}")
    if first is None or last is None:
        if pid <= 0 or os.access(f"/proc/{pid}", os.F_OK):
            return None
        return ProcessEvidence(pid, GONE, "", 0, mono, None, False, NOTHING, (), ())
    if first.start_ticks != last.start_ticks:
        return None
    wchan, state = _wchan(f"/proc/{pid}"), last.state
    if state == "Z" and any(thread.state not in "ZX" for thread in threads):
        state = "?"  # the main thread has ended, but the process has not
    sleeps = last.state in "SD"
    frozen = _is_frozen(pid) or (sleeps and wchan in _FREEZER_WCHANS)
    main = NOTHING
    if sleeps and not frozen:
        main = _blocked_on(pid, last.state, wchan, children, threads)
    sockets = descriptors.inodes_of(procfs.open_links(pid).values())
    return ProcessEvidence(
        pid, state, wchan, first.cpu_ticks, mono, _tracer(pid), frozen, main, threads, children,
        descriptors.connections(descriptors.socket_tables(pid, tables), sockets), _has_flock(pid),
    )  # fmt: skip


def cpu_share(before: ProcessEvidence, after: ProcessEvidence) -> float | None:
    """Returns the mean number of cores used between two readings, or None if not available."""
    elapsed_s, ticks = after.mono - before.mono, after.cpu_ticks - before.cpu_ticks
    if before.pid != after.pid or GONE in (before.state, after.state):
        return None
    return ticks / _TICKS_PER_S / elapsed_s if elapsed_s > 0 and ticks >= 0 else None


def _wchan(folder: str) -> str:
    """Returns the kernel function that a thread waits in; "" if there is none or it is hidden."""
    name = clean(read_text(f"{folder}/wchan"), procfs.MAX_NAME_CHARS).partition(".")[0]
    return "" if name == "0" else name


def _thread(pid: int, tid: int) -> ThreadEvidence | None:
    folder = f"/proc/{pid}/task/{tid}"
    found = stat(folder)
    status = procfs.status(f"{pid}/task/{tid}")
    waits = number_after(status, "voluntary_ctxt_switches") or -1
    return found and ThreadEvidence(
        tid, found.name, found.state, _wchan(folder), found.cpu_ticks, waits
    )  # fmt: skip


def _children(pid: int, tids: list[int]) -> _Children:
    pids = procfs.children(pid, tids)[:MAX_CHILDREN]
    found = ((child, stat(f"/proc/{child}")) for child in pids)
    return tuple(ChildEvidence(child, each.name, each.state) for child, each in found if each)


def _tracer(pid: int) -> tuple[int, str] | None:
    tracer = number_after(procfs.status(pid), "TracerPid")
    found = stat(f"/proc/{tracer}") if tracer else None
    return (tracer, found.name if found else "") if tracer else None


def _is_frozen(pid: int) -> bool:
    """Returns whether a cgroup of the process (version 2 or 1) is frozen or being frozen."""
    return any(
        line in read_text(f"{folder}/{name}").splitlines()
        for folder in (*procfs.cgroup_folders(pid), *procfs.cgroup_folders(pid, "freezer"))
        for name, line in _FREEZER
    )


def _parse_syscall(text: str) -> tuple[int, tuple[int, ...]] | None:
    """Returns the number and the six arguments of a system call, or None if not available."""
    if not re.fullmatch(r"[0-9]{1,9}( 0x[0-9a-f]{1,16}){8}\s*", text):
        return None
    number, *arguments = text.split()
    return int(number), tuple(int(each, 16) for each in arguments[:6])


def _blocked_on(
    pid: int, state: str, wchan: str, children: _Children, threads: _Threads = ()
) -> BlockedOn:  # fmt: skip
    """Returns the object that the main thread waits on, or `NOTHING` if it cannot be named.

    The main sources are the system call and the wchan of this thread.
    """
    call, arguments = _parse_syscall(read_text(f"/proc/{pid}/syscall")) or (-1, (0,) * 6)
    name = _CALLS.get(call, "")
    waits_in = next((kind for kind, known in _WCHANS.items() if re.match(known, wchan)), "")
    fd = arguments[0] & 0xFFFFFFFF
    link = link_of(pid, f"fd/{fd}") if name in _WITH_DESCRIPTOR else ""
    if "lock" in (name, waits_in):
        return _lock(pid, link)
    if waits_in == "open":
        end = _OTHER_END.get(arguments[2] & os.O_ACCMODE, "peer") if name == "openat" else "peer"
        return BlockedOn("pipe", f"a FIFO, which has no {end}")
    if link.startswith("socket:["):
        return descriptors.socket_wait(pid, link[8:-1], name == "accept")
    if link.startswith("pipe:[") or waits_in in ("read-pipe", "write-pipe"):
        return descriptors.pipe_wait(link, name == "write" or waits_in == "write-pipe")
    if name in ("wait4", "waitid") or waits_in == "child":
        return _child(_waited_pid(pid, name, arguments), children)
    if name in ("signal", "poll", "select", "epoll"):
        return _polled(pid, call, arguments, children, threads)
    if name == "sync" or state == "D" or waits_in == "disk":
        where = f"the file {link}" if link.startswith("/") else "a disk or a driver"
        return BlockedOn("disk", where + (f" (in {wchan})" if wchan else ""))
    if waits_in == "network" and not link:
        return BlockedOn("network", NO_PEER)
    if "timer" in (name, waits_in):
        return _timer(pid, name, arguments)
    return _FUTEX if "futex" in (name, waits_in) else NOTHING


def _polled(
    pid: int, call: int, arguments: tuple[int, ...], children: _Children, threads: _Threads
) -> BlockedOn:  # fmt: skip
    """Returns the object of a poll or a wait for a signal, or `NOTHING` if it cannot be named."""
    name, first = _CALLS[call], arguments[0] & 0xFFFFFFFF
    if name == "signal" or (name in ("poll", "select") and not arguments[name == "poll"]):
        return BlockedOn("timer", "a signal or a timeout")  # also for a poll without descriptors
    if name != "epoll":
        return (
            descriptors.poll_wait(pid)
            if name == "poll"
            else descriptors.select_wait(pid, first - 1, arguments[1] > 0)
        )
    forever = 0 if call == _EPOLL_PWAIT2 else 0xFFFFFFFF
    found = descriptors.epoll_wait(pid, first, arguments[3] & 0xFFFFFFFF != forever)
    # In an event loop, another thread may wait for the child.
    reaps = any(re.match(_WCHANS["child"], thread.wchan) for thread in threads[1:])
    if children and (
        found == descriptors.LOOP_EVENT or (found == descriptors.LOOP_TIMER and reaps)
    ):
        return replace(_child(0, children), unsure=True)
    return found


def _timer(pid: int, name: str, arguments: tuple[int, ...]) -> BlockedOn:
    """Returns a timer, or the lock that a library may be trying to get at intervals.

    `time.sleep` waits until a time of the monotonic clock; C functions such as `usleep` wait for a
    duration.
    """
    if name != "timer" or arguments[:2] == (time.CLOCK_MONOTONIC, _UNTIL):
        return _TIMER
    held = _locks_of_others(pid)
    for fd in numbers_in(f"/proc/{pid}/fd")[:MAX_OPEN] if held else ():
        holder = held.get(number_after(read_text(f"/proc/{pid}/fdinfo/{fd}"), "ino") or 0)
        link = link_of(pid, f"fd/{fd}")
        found = stat(f"/proc/{holder}") if holder else None
        is_own = link.endswith(f"/{rundir.TRAINING_LOCK}")  # each rank locks its own byte of it
        if holder and found and link.startswith("/") and not is_own:
            text = f"a timer, while pid {holder} ({found.name}) holds a lock of {link}"
            return BlockedOn("lock", text, True, holder)
    return replace(_TIMER, unsure=True)


def _locks_of_others(pid: int) -> dict[int, int]:
    """Returns, by inode, a process other than `pid` that has a POSIX lock of this inode."""
    lines = map(_LOCK.match, read_text("/proc/locks", TABLE_BYTES).splitlines())
    return {
        int(found[5]): int(found[4]) for found in lines
        if found and found[5] and (found[2], found[3]) == (None, "POSIX") and int(found[4]) > 0
        and int(found[4]) != pid
    }  # fmt: skip


def _has_flock(pid: int) -> bool:
    lines = map(_LOCK.match, read_text("/proc/locks", TABLE_BYTES).splitlines())
    return any(found and found.group(2, 3, 4) == (None, "FLOCK", str(pid)) for found in lines)


def _lock(pid: int, link: str) -> BlockedOn:
    name = f"the lock of {link}" if link else "a file lock"
    holder = _holder(read_text("/proc/locks", TABLE_BYTES), pid)
    if holder is None:
        return BlockedOn("lock", f"{name} (its holder is not available)")
    found = stat(f"/proc/{holder}")
    who = found.name if found else "ended, another process has its descriptor"
    return BlockedOn("lock", f"{name}, held by pid {holder} ({who})", holder=holder)


def _holder(locks: str, waiting: int) -> int | None:
    """Returns the pid that holds the lock for which a process waits, or None if it is not known.

    In /proc/locks, the line of a waiting process has an arrow and the number of the holder's line.
    """
    holders: dict[str, int] = {}
    for found in filter(None, map(_LOCK.match, locks.splitlines())):
        number, arrow, _, pid, _ = found.groups()
        if not arrow:
            holders[number] = int(pid)
        elif int(pid) == waiting:
            return max(holders.get(number, 0), 0) or None  # -1: no single process holds it
    return None


def _waited_pid(pid: int, name: str, arguments: tuple[int, ...]) -> int:
    """Returns the pid of the child that a process waits for, or 0 if no single child is known."""
    first, second = (each & 0xFFFFFFFF for each in arguments[:2])
    if name == "waitid" and first == os.P_PIDFD:
        return number_after(read_text(f"/proc/{pid}/fdinfo/{second}"), "Pid") or 0
    child = first if name == "wait4" else second if name == "waitid" and first == os.P_PID else 0
    return child if child < 1 << 31 else 0


def _child(waited: int, children: _Children) -> BlockedOn:
    waited = waited or (children[0].pid if len(children) == 1 else 0)
    if not waited:
        count = len(children)
        return BlockedOn("child", f"any of {count} children" if count else "a child process")
    found = stat(f"/proc/{waited}")
    words = f" ({found.name}, {_STATES.get(found.state, found.state)})" if found else ""
    return BlockedOn("child", f"child {waited}{words}")
