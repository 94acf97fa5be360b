"""Reads the kernel's counts of out-of-memory kills, and the memory that a cgroup has left."""

from __future__ import annotations

from pathlib import Path

from console.error_patterns import OomCounts, OomEvidence

VMSTAT = Path("/proc/vmstat")
MOUNTS, EVENTS = "/proc/self/mounts", "memory.events"
"""The list of mounts, and the file of a cgroup (version 2) with the count `oom_kill`."""
CACHE = ("inactive_file", "active_file")
"""Memory of a cgroup that the kernel frees when a process needs it."""


def snapshot(pid: int | str = "self") -> OomCounts:
    """Returns the OOM-kill counts of the host, and of the process's nearest cgroup with counts."""
    path = _counting_file(pid)
    return OomCounts(_count(path) if path else None, _count(VMSTAT), str(path or ""))


def since(before: OomCounts) -> OomEvidence:
    """Returns the counts `before` and the present counts of the same cgroup."""
    path = Path(before.path) if before.path else None
    return OomEvidence(before, OomCounts(_count(path) if path else None, _count(VMSTAT),
                                         before.path))  # fmt: skip


def spare_bytes() -> int | None:
    """Returns the memory that is left where running out of it ends each process of this cgroup.

    This is so with memory.oom.group = 1, as Kubernetes sets it. Returns None without a limit, and
    if only one process would be killed.
    """
    counts = _counting_file("self")
    if counts is None or _lines(str(counts.with_name("memory.oom.group"))) != ["1"]:
        return None
    most, used = (_lines(str(counts.with_name(name))) for name in ("memory.max", "memory.current"))
    if not (most and used and most[0].isdecimal() and used[0].isdecimal()):
        return None
    pairs = (line.partition(" ") for line in _lines(str(counts.with_name("memory.stat"))))
    cached = sum(int(n) for name, _, n in pairs if name in CACHE and n.isdecimal())
    return int(most[0]) - int(used[0]) + cached


def _count(path: Path) -> int | None:
    pairs = (line.partition(" ") for line in _lines(str(path)))
    return next((int(n) for name, _, n in pairs if name == "oom_kill" and n.isdecimal()), None)


def _counting_file(pid: int | str) -> Path | None:
    """Returns the count file of a process's cgroup, or of the nearest parent that has one.

    In a container the mount may begin at the process's own cgroup, while the path of the cgroup
    does not.
    """
    cgroups = (line.split(":", 2) for line in _lines(f"/proc/{pid}/cgroup"))
    place = next((path for hierarchy, _, path in cgroups if hierarchy == "0"), None)
    mounts = (line.split(" ") for line in _lines(MOUNTS))
    top = next((Path(at) for _, at, kind, *_ in mounts if kind == "cgroup2"), None)
    if place is None or top is None:
        return None
    inner = top / place.strip("/")
    above = (inner, *inner.parents)
    files = (folder / EVENTS for folder in above[: above.index(top) + 1])
    return next(filter(Path.is_file, files), None)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return []
