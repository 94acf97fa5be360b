"""A cgroup of version 2 around the processes of a run, where the machine allows it.

It also holds what has lost the token of its environment, and ends all of it at once. It needs Linux
5.14 and the right to make one: root, or a delegated unit (`systemd-run --user --scope`). Without,
the token scan does what it can.
"""

from __future__ import annotations

import os
from pathlib import Path

from console.sources import kernel, process

PREFIX = "nsa-console-"
PROCS, KILL = "cgroup.procs", "cgroup.kill"


class Enclosure:
    """One cgroup, below the supervisor's own, named by the run's token."""

    def __init__(self, folder: Path):
        self._folder = folder

    def pids(self) -> list[int]:
        """Returns the processes inside, dead ones left out.

        Another supervisor removes a cgroup that is empty, at any moment.
        """
        try:
            return [pid for file in self._folder.rglob(PROCS) for pid in kernel.inside(file.parent)]
        except FileNotFoundError:
            return []

    def kill(self) -> None:
        """Sends KILL to every process inside."""
        _write(self._folder / KILL, "1")

    def remove(self) -> None:
        """Takes the cgroup away if it is empty."""
        _remove(self._folder)


def around(pid: int, token: str) -> Enclosure | None:
    """Puts a process and its children into a cgroup of their own; None where that fails."""
    home = kernel.unified()
    if home is None:
        return None
    _sweep(home)
    folder = home / f"{PREFIX}{token}"
    for _ in range(2):  # between the two steps another supervisor may sweep it away
        try:
            folder.mkdir(mode=0o755, exist_ok=True)
        except OSError:
            return None
        if (folder / KILL).exists() and _write(folder / PROCS, str(pid)):
            for child in process.children(pid):
                _write(folder / PROCS, str(child))
            return Enclosure(folder)
    _remove(folder)
    return None


def of(pid: int, token: str) -> Enclosure | None:
    """Returns the cgroup that a former supervisor made around a process of this run.

    None if this process is in it too, started by a rank: it must not kill itself.
    """
    inner, ours = kernel.unified(pid), kernel.unified()
    chain = (inner, *inner.parents) if inner else ()
    folder = next((each for each in chain if each.name == f"{PREFIX}{token}"), None)
    if folder is None or (ours and ours.is_relative_to(folder)):
        return None
    return Enclosure(folder)


def _sweep(home: Path) -> None:
    """Takes away what dead supervisors left there; a cgroup with processes stays."""
    try:
        names = [name for name in os.listdir(home) if name.startswith(PREFIX)]
    except OSError:
        return
    for name in names:
        _remove(home / name)


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
