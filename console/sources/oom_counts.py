"""Reads the kernel's counts of out-of-memory kills, and the memory that a cgroup has left."""

from __future__ import annotations

from console.rank_end import OomCounts, OomEvidence
from console.sources.procfs import TABLE_BYTES, cgroup_folders, number_after, read_text

VMSTAT = "/proc/vmstat"
EVENTS = "memory.events"
"""The file of a cgroup (version 2) with the count `oom_kill`."""
CACHE = ("inactive_file", "active_file")
"""Memory of a cgroup that the kernel can usually free when a process needs it."""


def snapshot(pid: int | str = "self") -> OomCounts:
    """Returns the OOM-kill counts of the host, and of the process's nearest cgroup with counts."""
    folder = _counting_folder(pid)
    return _counts(f"{folder}/{EVENTS}" if folder else "")


def since(before: OomCounts) -> OomEvidence:
    """Returns the counts `before`, and the present counts of the same cgroup and of the host."""
    return OomEvidence(before, _counts(before.path))


def spare_bytes() -> int | None:
    """Returns the memory that is left until the kernel kills all processes of our cgroup.

    An out-of-memory kill ends all processes if memory.oom.group is 1, as Kubernetes sets it.
    Returns None if memory.oom.group is not 1, if there is no memory limit, or if the limit or the
    use cannot be read.
    """
    folder = _counting_folder("self")
    if not folder or _number_in(folder, "memory.oom.group") != 1:
        return None
    most, used = _number_in(folder, "memory.max"), _number_in(folder, "memory.current")
    if most is None or used is None:
        return None
    stat = read_text(f"{folder}/memory.stat", TABLE_BYTES)
    return most - used + sum(number_after(stat, name) or 0 for name in CACHE)


def _number_in(folder: str, name: str) -> int | None:
    """Returns the number that is the whole content of a file, or None if it is no number."""
    text = read_text(f"{folder}/{name}").strip()
    return int(text) if text.isdecimal() else None


def _counting_folder(pid: int | str) -> str:
    """Returns the nearest cgroup of a process that counts out-of-memory kills, or ""."""
    folders = reversed(cgroup_folders(pid))
    return next((each for each in folders if _count(f"{each}/{EVENTS}") is not None), "")


def _counts(path: str) -> OomCounts:
    return OomCounts(_count(path) if path else None, _count(VMSTAT), path)


def _count(path: str) -> int | None:
    return number_after(read_text(path, TABLE_BYTES), "oom_kill")
