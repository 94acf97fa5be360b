"""The file through which the ranks of one host agree on the step before which they halt."""

from __future__ import annotations

import time
from pathlib import Path

from trainers.contract import rundir
from trainers.contract.pulse import mapped

REQUESTED, HALT_AT, BEGUN = range(3)
"""The places of the numbers in the file; those of the ranks begin at `BEGUN`."""
SETTLE_S = 0.001
"""A number that one process has stored is visible to all others after much less than this time."""


def size_bytes(world: int) -> int:
    """Returns the size of the file for `world` ranks."""
    return 8 * (BEGUN + world)


class HaltBoard:
    """The mapped file with its numbers: 1 if a halt is requested, the step, and one of each rank.

    The number of a rank is the number of steps that it has begun. It differs between ranks, because
    a collective on a GPU does not block its host. All ranks begin the same steps, so rank 0 chooses
    a step that no rank has begun. Steps are counted because their own numbers may begin anew, as in
    a new epoch.

    Rank 0 first stores the next step of the fastest rank as a negative number. A rank that is about
    to begin this step or a later one waits. If no rank had begun the step after the store, rank 0
    makes the number positive: every rank then sees it in time. Otherwise rank 0 chooses again.

    At its start, rank 0 clears the file, because an earlier program may have written it. This loses
    nothing, because at each step the ranks write their number and repeat their request.
    """

    def __init__(self, directory: Path, attempt: int, rank: int, world: int):
        slots = max(world, rank + 1)  # RANK may be set without WORLD_SIZE
        memory = mapped(rundir.halt_board(directory, attempt), size_bytes(slots))
        self._is_first, self._is_alone = rank == 0, slots == 1
        if self._is_first:
            memory[:] = bytes(len(memory))
        # A number in a view with items of 8 bytes is read and written at once.
        self._numbers = memoryview(memory).cast("q")
        self._own = BEGUN + rank
        self._begun = 0

    def decide(self, halt: bool) -> bool:
        """Returns whether to halt before the next step; `halt` is the request of this rank."""
        numbers = self._numbers
        self._begun += 1
        numbers[self._own] = self._begun
        if halt:
            numbers[REQUESTED] = 1
        if self._is_first and numbers[REQUESTED] and not numbers[HALT_AT]:
            numbers[HALT_AT] = self._begun if self._is_alone else self._choose()
        while -self._begun <= (step := numbers[HALT_AT]) < 0:
            time.sleep(SETTLE_S)
        return 0 < step <= self._begun

    def leave(self) -> None:
        """Continues with private numbers, in a forked child: the file is that of the rank."""
        self._numbers = memoryview(bytearray(self._numbers.nbytes)).cast("q")

    def _choose(self) -> int:
        """Returns a step that no rank has begun; no rank begins it before `HALT_AT` is positive."""
        step, newest = 0, max(self._numbers[BEGUN:])
        while newest >= step:
            step = newest + 1
            self._numbers[HALT_AT] = -step
            time.sleep(SETTLE_S)
            newest = max(self._numbers[BEGUN:])
        return step
