"""Reads files of the kernel about processes, cgroups and memory; no function raises an error.

The target of a descriptor is read with readlink, which cannot block. A stat would ask the file
system of the target, which may hang.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from console.rank_end import OomCounts, OomEvidence
from console.sources.sanitize import clean

SMALL_BYTES, TABLE_BYTES = 1 << 12, 1 << 18
"""The most bytes that are read of a short file, and of a longer file."""
MAX_PATH_CHARS, MAX_NAME_CHARS, MAX_DEPTH, MAX_DESCRIPTORS = 300, 64, 32, 1024
MOUNTS, VMSTAT = "/proc/self/mounts", "/proc/vmstat"
OOM_EVENTS = "memory.events"
"""The file of a cgroup (version 2) with the count `oom_kill`."""
CACHE = ("inactive_file", "active_file")
"""Memory of a cgroup that the kernel can usually free when a process needs it."""
HOST_MEMORY = "the host's memory"
LIMITED_MEMORY = "the memory within the limit of the cgroup"
_FIELDS = (11, 12, 19, 21, 49)


class Memory(NamedTuple):
    """`HOST_MEMORY` or `LIMITED_MEMORY`, with its size and its free part."""

    name: str
    total_mib: float
    free_mib: float


class Stat(NamedTuple):
    """Fields of a stat file; `wait_status` is valid only for a zombie."""

    name: str
    state: str
    cpu_ticks: int
    start_ticks: int
    resident_pages: int
    wait_status: int


def read_text(path: str, limit: int = SMALL_BYTES) -> str:
    """Returns at most `limit` bytes of a file of the kernel as text, or "" after an error."""
    try:
        with Path(path).open("rb") as file:
            return file.read(limit).decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""


def numbers_in(folder: str) -> list[int]:
    """Returns the numbers among the names in a directory of /proc, sorted; [] after an error."""
    try:
        return sorted(int(name) for name in os.listdir(folder) if name.isdecimal())
    except OSError:
        return []


def number_after(text: str, key: str) -> int | None:
    """Returns the number in the line "key: number" or "key number", or None without this line."""
    found = re.search(rf"^{key}:?[ \t]+([0-9]{{1,19}})\b", text, re.MULTILINE)
    return int(found[1]) if found else None


def status(pid: int | str) -> str:
    """Returns the status file of a process, or "". The file may have a long list of groups."""
    return read_text(f"/proc/{pid}/status", TABLE_BYTES)


def link_of(pid: int, name: str, proc: str = "/proc") -> str:
    """Returns the target of a link in /proc/PID, for example a path or "socket:[N]", or ""."""
    try:
        return clean(str(Path(f"{proc}/{pid}/{name}").readlink()), MAX_PATH_CHARS)
    except OSError:
        return ""


def open_links(pid: int, proc: str = "/proc") -> dict[int, str]:
    """Returns the link of each of the first `MAX_DESCRIPTORS` descriptors of a process, or {}."""
    fds = numbers_in(f"{proc}/{pid}/fd")[:MAX_DESCRIPTORS]
    return {fd: link_of(pid, f"fd/{fd}", proc) for fd in fds}


def stat(folder: str) -> Stat | None:
    """Returns the fields of the stat file in a folder of /proc, or None if they are not valid."""
    return parse_stat(read_text(f"{folder}/stat"))


def parse_stat(text: str) -> Stat | None:
    """Returns the fields of a stat file, or None if they are not valid.

    A name may contain parentheses, spaces and newlines.
    """
    head, _, tail = text.rpartition(")")
    name, fields = head.partition("(")[2], tail.split()
    try:
        user, system, *others = (int(fields[at]) for at in _FIELDS)
    except (IndexError, ValueError):
        return None
    state = clean(fields[0])
    whole = Stat(clean(name, MAX_NAME_CHARS), state, user + system, *others)
    return whole if len(state) == 1 else None


def lineage(pid: int, proc: str = "/proc") -> Iterator[int]:
    """Yields a process and its nearest ancestors, at most `MAX_DEPTH` processes."""
    for _ in range(MAX_DEPTH):
        yield pid
        fields = read_text(f"{proc}/{pid}/stat").rpartition(")")[2].split()
        if len(fields) < 2 or not fields[1].isdecimal():
            return
        pid = int(fields[1])


def children(pid: int, threads: Iterable[int] | None = None) -> list[int]:
    """Returns the direct children of a process, or only the children of the given `threads`."""
    threads = numbers_in(f"/proc/{pid}/task") if threads is None else threads
    texts = (read_text(f"/proc/{pid}/task/{each}/children", TABLE_BYTES) for each in threads)
    return [int(child) for text in texts for child in text.split() if child.isdecimal()]


def cgroup_folders(pid: int | str, controller: str = "") -> list[str]:
    """Returns the directories of a process's cgroup and of its parent cgroups, outermost first.

    Returns [] if they are not available. Without a `controller`, the cgroup of version 2 is used.
    Some of the directories may not exist: in a container, the path of the cgroup and the mount may
    begin at different parents.
    """
    lines = (
        line.split(":", 2) for line in read_text(f"/proc/{pid}/cgroup", TABLE_BYTES).splitlines()
    )
    place = next((x[2] for x in lines if len(x) == 3 and controller in x[1].split(",")), "..")
    mounts = (line.split(" ") for line in read_text(MOUNTS, TABLE_BYTES).splitlines())
    kind, option = ("cgroup", controller) if controller else ("cgroup2", "")
    tops = (
        each[1] for each in mounts
        if len(each) > 3 and each[2] == kind and option in ("", *each[3].split(","))
    )  # fmt: skip
    top, parts = next(tops, ""), [part for part in place.split("/") if part][:MAX_DEPTH]
    if not top or ".." in parts:
        return []
    return ["/".join((top, *parts[:depth])) for depth in range(len(parts) + 1)]


# --- memory ------------------------------------------------------------------------------------


def oom_counts() -> OomCounts:
    """Returns the OOM-kill counts of the host, and of our nearest cgroup that has counts."""
    folder = _counting_folder()
    return _oom_counts(f"{folder}/{OOM_EVENTS}" if folder else "")


def oom_since(before: OomCounts) -> OomEvidence:
    """Returns the counts `before`, and the present counts of the same cgroup and of the host."""
    return OomEvidence(before, _oom_counts(before.path))


def spare_bytes() -> int | None:
    """Returns about how many bytes our cgroup can still use before the kernel kills its processes.

    The kernel kills all processes of a cgroup if memory.oom.group is 1, as Kubernetes may set it.
    Returns None if memory.oom.group is not 1, if the cgroup has no memory limit, or if its limit or
    use cannot be read.
    """
    folder = _counting_folder()
    if not folder or _number_in(folder, "memory.oom.group") != 1:
        return None
    found = _limited(folder)
    return found and found[1]


def memories() -> tuple[Memory, ...]:
    """Returns the memory of this host, and of our cgroup or the parent with the least free memory.

    A cgroup without a memory limit, and values that cannot be read, are left out.
    """
    text = read_text("/proc/meminfo")
    total, free = (number_after(text, key) for key in ("MemTotal", "MemAvailable"))
    limits = filter(None, map(_limited, cgroup_folders("self")))
    found = min(limits, key=lambda each: each[1], default=None)
    host = [] if total is None or free is None else [Memory(HOST_MEMORY, total / 1024, free / 1024)]
    if found is not None:
        host.append(Memory(LIMITED_MEMORY, found[0] / (1 << 20), found[1] / (1 << 20)))
    return tuple(host)


def limit_of_cores() -> int | None:
    """Returns the number of cores that our cgroup and its parents allow, or None without a limit.

    A part of a core counts as a core.
    """
    limits = (read_text(f"{folder}/cpu.max").split() for folder in cgroup_folders("self"))
    found = (-(-int(each[0]) // int(each[1])) for each in limits
             if len(each) == 2 and all(map(str.isdecimal, each)) and int(each[1]))  # fmt: skip
    return min(found, default=None)


def _limited(folder: str) -> tuple[int, int] | None:
    """Returns the memory limit of a cgroup, and about how much of it is free (bytes), or None."""
    most, used = _number_in(folder, "memory.max"), _number_in(folder, "memory.current")
    if not most or used is None:
        return None
    text = read_text(f"{folder}/memory.stat", TABLE_BYTES)
    return most, most - used + sum(number_after(text, name) or 0 for name in CACHE)


def _number_in(folder: str, name: str) -> int | None:
    """Returns the number that is the whole content of a file, or None if it is no number."""
    text = read_text(f"{folder}/{name}").strip()
    return int(text) if text.isdecimal() else None


def _counting_folder() -> str:
    """Returns our nearest cgroup that counts out-of-memory kills, or ""."""
    folders = reversed(cgroup_folders("self"))
    return next((each for each in folders if _oom_kills(f"{each}/{OOM_EVENTS}") is not None), "")


def _oom_counts(path: str) -> OomCounts:
    return OomCounts(_oom_kills(path), _oom_kills(VMSTAT), path)


def _oom_kills(path: str) -> int | None:
    return number_after(read_text(path, TABLE_BYTES), "oom_kill")
