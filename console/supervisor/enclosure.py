"""A cgroup of version 2 around the processes of one attempt, where the machine allows it.

It also holds what has lost the token of its environment, and ends all of it at once. Without one
(no right to make it, version 1 alone) the token scan does what it can.
"""

from __future__ import annotations

from pathlib import Path

from console.sources import kernel

PREFIX = "nsa-console-"
PROCS, KILL = "cgroup.procs", "cgroup.kill"


class Enclosure:
    """One cgroup, below the supervisor's own, named by the attempt's token."""

    def __init__(self, folder: Path):
        self._folder = folder

    def pids(self) -> list[int]:
        """Returns the processes inside, dead ones left out."""
        return kernel.inside(self._folder)

    def kill(self) -> bool:
        """Sends KILL to every process inside; False where the kernel cannot (before 5.14)."""
        return _write(self._folder / KILL, "1")

    def remove(self) -> None:
        """Takes the cgroup away if it is empty."""
        _remove(self._folder)


def around(pid: int, token: str) -> Enclosure | None:
    """Puts a process, and what it will start, into a cgroup of its own; None where that fails."""
    home = kernel.unified()
    if home is None:
        return None
    folder = home / f"{PREFIX}{token}"
    try:
        for old in home.glob(f"{PREFIX}*"):
            _remove(old)
        folder.mkdir(mode=0o755)
    except OSError:
        return None
    if not _write(folder / PROCS, str(pid)):
        _remove(folder)
        return None
    return Enclosure(folder)


def of(pid: int, token: str) -> Enclosure | None:
    """Returns the cgroup that a former supervisor made around a process of this attempt."""
    folder = kernel.unified(pid)
    return Enclosure(folder) if folder and folder.name == f"{PREFIX}{token}" else None


def _write(path: Path, text: str) -> bool:
    try:
        path.write_text(text)
    except OSError:
        return False
    return True


def _remove(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        return
