"""Reads the kernel's counts of out-of-memory kills, for a cgroup and for the host."""

from __future__ import annotations

from console.error_patterns import OomCounts, OomEvidence
from console.sources.procfs import TABLE_BYTES, cgroup_folders, number_after, read_text

VMSTAT = "/proc/vmstat"
EVENTS = "memory.events"
"""The file of a cgroup (version 2) with the count `oom_kill`."""


def snapshot(pid: int | str = "self") -> OomCounts:
    """Returns the OOM-kill counts of the host, and of the process's nearest cgroup with counts."""
    paths = (f"{folder}/{EVENTS}" for folder in reversed(cgroup_folders(pid)))
    return _counts(next((path for path in paths if _count(path) is not None), ""))


def since(before: OomCounts) -> OomEvidence:
    """Returns the counts `before` and the present counts of the same cgroup."""
    return OomEvidence(before, _counts(before.path))


def _counts(path: str) -> OomCounts:
    return OomCounts(_count(path) if path else None, _count(VMSTAT), path)


def _count(path: str) -> int | None:
    return number_after(read_text(path, TABLE_BYTES), "oom_kill")
