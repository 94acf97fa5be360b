"""State that the owner of a launch hands to each child, and notes that they share."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainers.contract import rundir

DEATHS_OFF = 3
"""An observer is switched off after this many children in a row died in it."""
MAX_EXITS = 4096
PLACES, PLACE_BYTES = 2, 64
MAIN, FILES = range(PLACES)
"""Each thread of the child has a place: the main thread, and the run directory's."""


class Notes:
    """Shared memory with the name of the observer in which each thread of a child works."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, PLACES * PLACE_BYTES)

    def write(self, place: int, name: str) -> None:
        """Notes a name, "" when the work is done."""
        at = place * PLACE_BYTES
        self._map[at : at + PLACE_BYTES] = name.encode()[:PLACE_BYTES].ljust(PLACE_BYTES, b"\0")

    def read(self, place: int) -> str:
        at = place * PLACE_BYTES
        return self._map[at : at + PLACE_BYTES].rstrip(b"\0").decode("utf-8", "replace")

    def clear(self) -> None:
        self._map[:] = bytes(PLACES * PLACE_BYTES)


@dataclass(slots=True)
class Charge:
    """All that a child goes on with: it is forked with a copy, and shares the notes."""

    identity: Mapping[str, Any] = field(default_factory=rundir.identity)
    """The owner's: documents name it as the supervisor."""
    kept: dict[str, bytes] = field(default_factory=dict)
    """The newest content of each document, by path."""
    agent: int = 0
    """The pid of torchrun in the newest attempt, 0 before the first."""
    held: tuple[str, str] = ("", "")
    """The run directory and the number of that attempt."""
    termed: bool = False
    """Its processes were sent TERM here."""
    exits: dict[int, int] = field(default_factory=dict)
    """The exit codes of children, in the order in which they were reaped."""
    asked: list[int] = field(default_factory=list)
    """Signals that no child has obeyed yet."""
    forwarded: int = 0
    """The number of signals in `asked` that the child has been told of."""
    mishap: str = ""
    """The end of the former child in words, "" for the first."""
    deaths: dict[str, int] = field(default_factory=dict)
    """The number of children in a row that died in the observer of the last death."""
    notes: Notes = field(default_factory=Notes)

    def reaped(self, pid: int, code: int) -> None:
        """Takes the exit code of a child; of too many the oldest goes, but never torchrun's."""
        self.exits[pid] = code
        while len(self.exits) > MAX_EXITS:
            del self.exits[next(old for old in self.exits if old != self.agent)]
