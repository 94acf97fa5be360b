"""Steps of several ranks together, as with a collective, but without torch."""

import mmap
import struct
import time
from pathlib import Path

from trainers.contract.member import Member


class Board:
    """A file in which each rank writes its newest step, in one or several places."""

    def __init__(self, run: Member, places: int = 1):
        self._world, self._rank = run.world, run.rank
        path = Path(run.live or run.run) / f"lockstep{run.attempt}"
        path.touch()
        with path.open("r+b") as stream:
            stream.truncate(8 * run.world * places)
            self._steps = mmap.mmap(stream.fileno(), 8 * run.world * places)

    def write(self, step: int, place: int = 0) -> None:
        struct.pack_into("<q", self._steps, 8 * (self._world * place + self._rank), step)

    def slowest(self, place: int = 0) -> int:
        """Returns the lowest step of all ranks."""
        return min(struct.unpack_from(f"<{self._world}q", self._steps, 8 * self._world * place))

    def meet(self, step: int) -> None:
        """Writes the step of this rank, and waits until all ranks have reached this step."""
        self.write(step)
        while self.slowest() < step:
            time.sleep(0.002)
