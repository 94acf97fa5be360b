"""Collects the evidence about a stall: stacks and flight records once, processes repeatedly."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from console.diagnose import gpu_signs
from console.diagnose.evidence import LASTING_STATES, Evidence
from console.diagnose.stall import RankEvidence
from console.model import Gpu
from console.sources import flight, kernel_evidence, stacks
from console.sources.kernel_evidence import ProcessEvidence
from console.sources.nvml import opened_by, visible_devices
from console.supervisor.rundir_io import Directory

APART_S = 2.0
"""Time between the two samples of each process."""
DUMPED_AFTER_S, UNREAD_AFTER_S = 3.0, 6.0
"""Stacks and flight records are read again until every rank has both, at most for `DUMPED_AFTER_S`.
If the run directory does not answer for `UNREAD_AFTER_S`, the evidence has only the processes.
"""
READ_EVERY_S = 0.5
CLOCKS_APART_S = 0.1
"""A file with a time further in the future was written before the clock was set back."""
AGAIN_S = 10.0
"""Shortest time between two collections. Ranks that move again within this time are only slow and
need no new evidence."""
OFTEN_S, SELDOM_S = 120.0, 60.0
"""Processes are sampled every `AGAIN_S` in the first `OFTEN_S` of a stall, then every `SELDOM_S`.

Their states can still change, for example when a debugger detaches or the holder of a lock exits.
"""
MAX_RANKS = 64
"""The processes of at most this many ranks are sampled; the slowest ranks come first."""

Places = tuple[tuple[int, str, tuple[int, int, int]], ...]


def _places(ranks: Sequence[RankEvidence]) -> Places:
    """Returns the position of each rank, and the state of the process if that state lasts."""
    return tuple(
        (each.rank, each.state if each.state in LASTING_STATES else "", each.position)
        for each in ranks
    )


class Collector:
    """Owns the evidence about the present stall; collects new evidence if a rank has moved.

    `poll` is called once a second and never waits. The thread of the run directory reads the files.
    """

    def __init__(
        self, directory: Directory, run: Path, gpus: Callable[[], Sequence[Gpu]] = tuple,
        dumps_since_ts: float | None = None,
    ):  # fmt: skip
        """Uses dumps from `dumps_since_ts` on; with None, dumps since the collection began."""
        self._directory, self._run, self._gpus = directory, run, gpus
        self._dumps_since_ts = dumps_since_ts
        self._places: Places = ()
        self._began_at = -AGAIN_S
        self._since_ts = 0.0
        self._read_at, self._reading = 0.0, False
        self._sampled_at = 0.0
        self._found = Evidence()
        self._is_sampled = False
        """The processes were sampled for the second time."""
        self._ranks: tuple[RankEvidence, ...] = ()
        self.complete: Evidence | None = None
        """The evidence about the ranks at their present positions; None while it is collected."""
        self.wants_dump: frozenset[int] = frozenset()
        """The ranks whose stacks are needed; the caller dumps the stacks and clears this set.

        A rank without a pulse is left out, because it has not installed the signal handler yet.
        """

    def clear(self) -> None:
        """Drops the evidence, because the ranks make progress again."""
        self._places, self.complete, self._found = (), None, Evidence()
        self.wants_dump = frozenset()

    def poll(self, ranks: Sequence[RankEvidence]) -> None:
        """Collects the next part of the evidence about ranks that are stalled."""
        places, now = _places(ranks), time.monotonic()
        if places != self._places:
            self.complete = None
            if now - self._began_at >= AGAIN_S:
                self._begin(ranks, places, now)
            return
        if self.complete is not None:
            self._sample_again(self.complete, now)
            return
        waited_s = now - self._began_at
        if not self._is_sampled and waited_s >= APART_S:
            self._found = Evidence(self._found.before, _processes(self._ranks))
            self._is_sampled = True
        if self._reading:
            if self._is_sampled and waited_s >= UNREAD_AFTER_S:
                self._complete({}, {}, TimeoutError("the run directory does not answer"))
        elif self._is_sampled and now - self._read_at >= READ_EVERY_S:
            self._read_at, self._reading = now, True
            self._read(waited_s >= DUMPED_AFTER_S)

    def _sample_again(self, known: Evidence, now: float) -> None:
        often = now - self._began_at < OFTEN_S
        if now - self._sampled_at >= (AGAIN_S if often else SELDOM_S):
            self._sampled_at = now
            self.complete = replace(
                known, before=known.after, after=_processes(self._ranks), ts=time.time(),
                gpus=self._own_gpus(),
            )  # fmt: skip

    def _begin(self, ranks: Sequence[RankEvidence], places: Places, now: float) -> None:
        self._places, self._began_at = places, now
        self._since_ts = int((self._dumps_since_ts or time.time()) * 1000) / 1000
        running = [each for each in ranks if each.phase != "exit"]
        self._ranks = tuple(sorted(running, key=lambda each: each.position)[:MAX_RANKS])
        self._found, self._is_sampled = Evidence(_processes(self._ranks)), False
        self.wants_dump = frozenset(each.rank for each in self._ranks if each.phase)

    def _read(self, is_last: bool) -> None:
        numbers, run, since_ts = [r.rank for r in self._ranks], self._run, self._since_ts
        begun, former = self._began_at, self._found

        def work() -> tuple[dict[int, stacks.Stack], dict[int, flight.FlightRecord]]:
            until_ts = time.time() + CLOCKS_APART_S
            without = [rank for rank in numbers if rank not in former.flights]
            return (
                stacks.latest(run, numbers, since_ts, until_ts),
                {**former.flights, **flight.latest(run, without, since_ts, until_ts)},
            )

        def then(found: object, error: Exception | None) -> None:
            self._reading = False
            if begun != self._began_at:
                return
            dumps, records = found if isinstance(found, tuple) else ({}, {})
            self._found = replace(self._found, flights=records)
            everyone = len(dumps) == len(numbers) == len(records)
            if everyone or is_last or error is not None:
                self._complete(dumps, records, error)

        self._directory.job(work, then, run)

    def _complete(
        self, dumps: Mapping[int, stacks.Stack], records: Mapping[int, flight.FlightRecord],
        error: Exception | None,
    ) -> None:  # fmt: skip
        numbers = [each.rank for each in self._ranks]
        gaps = [f"cannot read the dumps: {error}"] if error is not None else []
        for name, of in (("process evidence", self._found.after), ("stack", dumps),
                         ("flight record", records)):  # fmt: skip
            missing = [str(rank) for rank in numbers if rank not in of]
            if missing:
                gaps.append(f"no {name} of rank {', '.join(missing[:16])}")
        self._sampled_at = time.monotonic()
        gpus = self._own_gpus()
        if without := [str(rank) for rank, rows in gpus.items() if not rows]:
            gaps.append(f"no GPU figures of rank {', '.join(without[:16])}")
        self.complete = replace(
            self._found, stacks=dumps, flights=records, gaps=tuple(gaps), ts=time.time(), gpus=gpus
        )  # fmt: skip

    def _own_gpus(self) -> dict[int, tuple[Gpu, ...]]:
        """Returns the newest row of each rank's own GPU."""
        pids = {each.rank: each.pid for each in self._ranks}
        opened = {rank: opened_by(pid) for rank, pid in pids.items()}
        visible = {rank: visible_devices(pid) for rank, pid in pids.items()}
        return gpu_signs.own_gpus(opened, visible, self._gpus())


def _processes(ranks: Sequence[RankEvidence]) -> dict[int, ProcessEvidence]:
    tables: dict[str, str] = {}
    found = {each.rank: kernel_evidence.collect(each.pid, each.start_ticks, tables)
             for each in ranks}  # fmt: skip
    return {rank: process for rank, process in found.items() if process is not None}
