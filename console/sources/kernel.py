"""What the kernel counts: processes that it killed because memory ran out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

VMSTAT = Path("/proc/vmstat")
FILES = {"cgroup2": "memory.events", "cgroup": "memory.oom_control"}
"""The file with the count, by type of cgroup file system; both call it `oom_kill`."""


@dataclass(frozen=True, slots=True)
class OomCounts:
    """Out-of-memory kills since boot: of one cgroup and of the whole host, None for not known.

    Version 2 counts in a cgroup what was killed in it and below it, version 1 only in it.
    """

    cgroup: int | None = None
    host: int | None = None
    path: str = ""
    """The file that `cgroup` was read from."""


@dataclass(frozen=True, slots=True)
class OomEvidence:
    """What was counted before a run and after it."""

    before: OomCounts
    after: OomCounts

    @property
    def here(self) -> bool:
        """Says whether the kernel killed in the cgroup of the run."""
        return _rose(self.before.cgroup, self.after.cgroup)

    @property
    def elsewhere(self) -> bool:
        """Says whether it killed on this host, but none that the cgroup of the run counts."""
        known = self.after.cgroup is not None
        return known and not self.here and _rose(self.before.host, self.after.host)

    @property
    def perhaps(self) -> bool:
        """Says whether it killed on this host and no cgroup tells whom."""
        return self.after.cgroup is None and _rose(self.before.host, self.after.host)

    def words(self) -> str:
        """Returns the counter that rose: "cgroup oom_kill 0 → 1"."""
        if self.here:
            return f"cgroup oom_kill {self.before.cgroup} → {self.after.cgroup}"
        return f"host-wide oom_kill {self.before.host} → {self.after.host}"


def snapshot(pid: int | str = "self") -> OomCounts:
    """Returns the counts that hold for a process: of its nearest cgroup that counts memory."""
    path = _counting_file(pid)
    return OomCounts(_count(path) if path else None, _count(VMSTAT), str(path or ""))


def since(before: OomCounts) -> OomEvidence:
    """Returns what was counted since `before`, of the same cgroup."""
    path = Path(before.path) if before.path else None
    return OomEvidence(before, OomCounts(_count(path) if path else None, _count(VMSTAT),
                                         before.path))  # fmt: skip


def _rose(before: int | None, after: int | None) -> bool:
    return before is not None and after is not None and after > before


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
    mounts = _memory_mounts()
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


def _memory_mounts() -> dict[str, Path]:
    """Returns where the cgroup file systems are mounted, by their type."""
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
