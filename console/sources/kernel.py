"""Reads the kernel's counts of processes that it killed for memory, in a cgroup and on the host."""

from __future__ import annotations

from pathlib import Path

from console.causes import OomCounts, OomEvidence

VMSTAT = Path("/proc/vmstat")
FILES = {"cgroup2": "memory.events", "cgroup": "memory.oom_control"}
"""The file with the count, by type of cgroup file system; both call it `oom_kill`."""


def snapshot(pid: int | str = "self") -> OomCounts:
    """Returns the counts that hold for a process: of its nearest cgroup that counts memory."""
    path = _counting_file(pid)
    return OomCounts(_count(path) if path else None, _count(VMSTAT), str(path or ""))


def since(before: OomCounts) -> OomEvidence:
    """Returns what was counted since `before`, of the same cgroup."""
    path = Path(before.path) if before.path else None
    return OomEvidence(before, OomCounts(_count(path) if path else None, _count(VMSTAT),
                                         before.path))  # fmt: skip


def _count(path: Path) -> int | None:
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    pairs = (line.partition(" ") for line in lines)
    return next((int(n) for name, _, n in pairs if name == "oom_kill" and n.isdecimal()), None)


def _counting_file(pid: int | str) -> Path | None:
    """Returns the file that counts a process's cgroup, or the nearest above it that has one.

    In a container the mount may begin at the process's own cgroup while its path does not.
    """
    mounts = _mounts()
    for kind, place in _places(pid):
        if kind not in mounts:
            continue
        top = mounts[kind]
        inner = top / place.strip("/")
        for folder in (inner, *inner.parents):
            if (folder / FILES[kind]).is_file():
                return folder / FILES[kind]
            if folder == top:
                break
    return None


def _places(pid: int | str) -> list[tuple[str, str]]:
    """Returns the cgroups that a process is in: (type of file system, path)."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text(errors="replace").splitlines()
    except OSError:
        return []
    fields = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    first = [("cgroup", path) for _, names, path in fields if "memory" in names.split(",")]
    return first + [("cgroup2", path) for _, names, path in fields if not names]


def _mounts() -> dict[str, Path]:
    """Returns where version 2 and version 1 that counts memory are mounted, by their type."""
    try:
        lines = Path("/proc/self/mounts").read_text(errors="replace").splitlines()
    except OSError:
        return {}
    found: dict[str, Path] = {}
    for line in lines:
        _, place, kind, options, *_ = line.split(" ")
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(",")):
            found.setdefault(kind, Path(place))
    return found
