"""The ends of an attempt's ranks: by the kernel, else by their records, logs and pulses."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from console.ending import End
from console.sources.lastwords import LastWords
from console.supervisor.follow import Story, end_of
from console.supervisor.live import LastPulses
from console.supervisor.tree import Tree, Worker

LATE_END_S = 5.0
"""For so long torchrun has time to reap a rank, and the last record of a rank to arrive."""


class Ends:
    """Says how the ranks of one attempt ended; `last_words` are read when all have ended."""

    def __init__(self, tree: Tree, story: Story, pulses: LastPulses):
        self._tree, self._story, self._pulses = tree, story, pulses
        self.last_words: Mapping[int, LastWords] = {}

    def of(self, worker: Worker) -> End:
        """Returns how a rank ended: as the kernel, else as it said itself."""
        step = self._pulses.step(worker.rank, worker.handle.pid)
        return end_of(worker, self._story, self.last_words.get(worker.rank), step)

    @property
    def newest_pulse(self) -> int:
        """The newest step that an ended rank was at, 0 without a pulse."""
        return self._pulses.newest

    def so_far(self) -> list[End]:
        """Returns the ends that there are."""
        over = [each for each in self._tree.workers.values() if each.over_ts is not None]
        return [self.of(worker) for worker in over]

    def failed(self) -> list[int]:
        """Returns the ranks that have failed: by the kernel, or by end and last record of each."""
        return sorted(rank for rank, each in self._tree.workers.items() if self._has_failed(each))

    def _has_failed(self, worker: Worker) -> bool:
        if worker.over_ts is None:
            return False
        late = worker.over_ts < time.time() - LATE_END_S
        if worker.seen:
            return worker.failed and (late or not worker.unreaped)
        return late and self._story.code(worker.rank) not in (None, 0)

    def conclude(self, last_words: Mapping[int, LastWords]) -> None:
        """Takes the last words and pulses of all ranks."""
        self.last_words = last_words
        pids = {rank: worker.handle.pid for rank, worker in self._tree.workers.items()}
        self._pulses.take_all(pids, self._tree.nproc)

    def documents(self, blamed: End | None) -> list[dict[str, Any]]:
        """Returns the ranks as supervisor.json holds them."""
        found = []
        for _, worker in sorted(self._tree.workers.items()):
            record = worker.as_dict()
            if record["exit"] is not None:
                end = self.of(worker)
                secondary = end.bad and end.secondary and end != blamed
                record["exit"] |= {"code": end.code, "signal": end.signal, "secondary": secondary}
            found.append(record)
        return found
