"""The file through which the ranks of one host agree on the step before which they halt."""

from __future__ import annotations

from pathlib import Path

from trainers.contract import rundir
from trainers.contract.pulse import mapped

REQUESTED, HALT_AT, BEGUN = range(3)
"""The places of the numbers in the file; those of the ranks begin at `BEGUN`."""


def size_bytes(world: int) -> int:
    """Returns the size of the file for `world` ranks."""
    return 8 * (BEGUN + world)


class HaltBoard:
    """The mapped file with its numbers: 1 if a halt is requested, the step, and one of each rank.

    The number of a rank is the number of steps that it has begun. It differs between ranks, because
    a collective on a GPU does not block its host. All ranks begin the same steps, so rank 0 chooses
    a step that no rank has begun: two after the highest number. It is two because a rank may begin
    the next step while rank 0 chooses. Steps are counted because their own numbers may begin anew,
    as in a new epoch.

    At its start, rank 0 clears the file, because an earlier program may have written it. This loses
    nothing, because at each step the ranks write their number and repeat their request.
    """

    def __init__(self, directory: Path, attempt: int, rank: int, world: int):
        slots = max(world, rank + 1)  # RANK may be set without WORLD_SIZE
        memory = mapped(rundir.halt_board(directory, attempt), size_bytes(slots))
        self._is_first = rank == 0
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
            numbers[HALT_AT] = max(numbers[BEGUN:]) + 2
        return 0 < numbers[HALT_AT] <= self._begun
