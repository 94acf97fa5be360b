"""The state that the owner of a launch passes to each child, and the memory that both share."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainers.contract import rundir

MAX_OBSERVER_DEATHS = 3
"""An observer is switched off after this many children in a row died in it."""
MAX_EXIT_CODES = 4096
SLOTS, SLOT_BYTES = 2, 64
MAIN, FILES = range(SLOTS)
"""The slots of the child's main thread, and of its thread that reads the run directory."""


class Activity:
    """Shared memory in which each thread of a child writes the name of its running observer.

    The owner reads the names after a child has died.
    """

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, SLOTS * SLOT_BYTES)

    def write(self, slot: int, name: str) -> None:
        """Writes the name of an observer, or "" after the observer has returned."""
        at = slot * SLOT_BYTES
        self._map[at : at + SLOT_BYTES] = name.encode()[:SLOT_BYTES].ljust(SLOT_BYTES, b"\0")

    def read(self, slot: int) -> str:
        at = slot * SLOT_BYTES
        return self._map[at : at + SLOT_BYTES].rstrip(b"\0").decode("utf-8", "replace")

    def clear(self) -> None:
        self._map[:] = bytes(SLOTS * SLOT_BYTES)


@dataclass(slots=True)
class ChildState:
    """The state with which a child starts.

    The child gets a copy by fork; only `activity` stays shared with the owner.
    """

    identity: Mapping[str, Any] = field(default_factory=rundir.identity)
    """The owner's identity, which the documents contain as that of the supervisor."""
    documents: dict[str, bytes] = field(default_factory=dict)
    """The newest content of each document, by path."""
    torchrun_pid: int = 0
    """The pid of torchrun in the newest attempt, 0 before the first attempt."""
    attempt: tuple[str, str] = ("", "")
    """The run directory and the number of the newest attempt."""
    term_sent: bool = False
    """The owner sent TERM to the processes of the attempt."""
    exit_codes: dict[int, int] = field(default_factory=dict)
    """The exit codes of the owner's children, in the order in which they were reaped."""
    signals: list[int] = field(default_factory=list)
    """TERM and INT signals that the owner received. Each child ends the launch because of them."""
    former_end: str = ""
    """The end of the former child in words, "" for the first child."""
    observer_deaths: dict[str, int] = field(default_factory=dict)
    """The observers in which the last child died, each with the number of deaths in a row."""
    activity: Activity = field(default_factory=Activity)

    def add_exit_code(self, pid: int, code: int) -> None:
        """Stores an exit code; if there are too many, drops the oldest, but never torchrun's."""
        self.exit_codes[pid] = code
        while len(self.exit_codes) > MAX_EXIT_CODES:
            del self.exit_codes[next(old for old in self.exit_codes if old != self.torchrun_pid)]
