"""Collects the evidence about a stall: stacks, flight records, samples of processes and GPUs."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from console.diagnose import gpu_signs
from console.diagnose.evidence import Evidence
from console.diagnose.rank_evidence import LASTING_STATES, RankEvidence, unfinished
from console.model import Gpu
from console.sources import flight, kernel_evidence, process, stacks
from console.sources.kernel_evidence import ProcessEvidence
from console.sources.nvml import opened_by
from console.sources.stacks import BY_PY_SPY, Stack
from console.status_text import rank_names

APART_S = 2.0
"""Time between the two samples of each process."""
DUMPED_AFTER_S, UNREAD_AFTER_S = 3.0, 8.0
"""A collection reads stacks and flight records until each sampled rank has both, at most for
`DUMPED_AFTER_S`. If a read hangs, the evidence is complete after `UNREAD_AFTER_S`, with what was
read so far."""
READ_EVERY_S = 0.5
PY_SPY_S = 2.0
"""Longest time in which py-spy reads the stacks of the ranks that wrote no dump."""
CLOCKS_APART_S = 0.1
"""A file from further in the future is ignored: it was written before the clock was set back."""
AGAIN_S = 10.0
"""Shortest time between two collections. Ranks that move again within this time are only slow and
need no new evidence."""
OFTEN_S, SELDOM_S = 120.0, 60.0
"""Processes are sampled every `AGAIN_S` in the first `OFTEN_S`, then every `SELDOM_S`.

Their states can still change, for example when a debugger detaches or the holder of a lock exits.
"""
MAX_RANKS = 64
"""At most this many ranks are sampled; the slowest ranks come first."""

Positions = tuple[tuple[int, str, tuple[int, int, int]], ...]


def _positions(ranks: Sequence[RankEvidence]) -> Positions:
    """Returns each rank's number, its process state (only a lasting one) and its position."""
    return tuple(
        (each.rank, each.state if each.state in LASTING_STATES else "", each.position)
        for each in ranks
    )


class Collector:
    """Owns the evidence about the present stall; collects new evidence after a rank has changed.

    `poll` is called at intervals and does not wait for the run directory. Each collection has a
    thread, which reads the run directory unless `check` raises OSError.
    """

    def __init__(
        self, run: Path, gpus: Callable[[], Sequence[Gpu]], check: Callable[[], object],
        dumps_since_ts: float | None = None,
        save: Callable[[Path, str], object] = lambda path, text: None,
    ):  # fmt: skip
        """Uses dumps from `dumps_since_ts` on; with None, dumps since the collection began.

        `save` writes a dump that py-spy made; the thread calls `save`.
        """
        self._run, self._gpus, self._check, self._save = run, gpus, check, save
        self._dumps_since_ts = dumps_since_ts
        self._positions: Positions | None = None
        self._began_at = -AGAIN_S
        self._sampled_at = 0.0
        self._ranks: tuple[RankEvidence, ...] = ()
        self._found: list[Evidence] = []
        """The evidence after each step of the collection; the thread appends to this list."""
        self._thread = threading.Thread()
        self.complete: Evidence | None = None
        """The evidence about the ranks at their present positions; None until it is collected."""
        self.wants_dump: frozenset[int] = frozenset()
        """The ranks whose stacks are needed; a supervisor dumps these ranks and clears this set.

        A rank without a pulse is left out, because its signal handler may not be installed yet.
        """

    def clear(self) -> None:
        """Drops the evidence, because there is no stall or no new sample."""
        self._positions, self.complete = None, None
        self.wants_dump = frozenset()

    def poll(self, ranks: Sequence[RankEvidence]) -> None:
        """Collects the next part of the evidence; `ranks` are all ranks of the run."""
        positions, now = _positions(ranks), time.monotonic()
        if positions != self._positions:
            self.complete = None
            if now - self._began_at >= AGAIN_S:
                self._begin(ranks, positions, now)
        elif self.complete is not None:
            self._sample_again(self.complete, now)
        elif not self._thread.is_alive():
            self._complete(self._found[-1] if self._found else Evidence())
        elif self._found and now - self._began_at >= UNREAD_AFTER_S:
            gap = "cannot read the dumps: the run directory does not answer"
            self._complete(replace(self._found[-1], gaps=(gap,)))

    def _sample_again(self, known: Evidence, now: float) -> None:
        often = now - self._began_at < OFTEN_S
        if now - self._sampled_at >= (AGAIN_S if often else SELDOM_S):
            self._sampled_at = now
            self.complete = replace(
                known, before=known.after, after=_processes(self._ranks), ts=time.time(),
                gpus=self._own_gpus(),
            )  # fmt: skip

    def _begin(self, ranks: Sequence[RankEvidence], positions: Positions, now: float) -> None:
        self._positions, self._began_at, self._found = positions, now, []
        since_ts = int((self._dumps_since_ts or time.time()) * 1000) / 1000
        self._ranks = tuple(sorted(unfinished(ranks), key=lambda each: each.position)[:MAX_RANKS])
        self.wants_dump = frozenset(each.rank for each in self._ranks if each.phase)
        self._thread = threading.Thread(
            target=self._collect, args=(self._ranks, since_ts, self._found), name="evidence",
            daemon=True,
        )  # fmt: skip
        self._thread.start()

    def _collect(
        self, ranks: Sequence[RankEvidence], since_ts: float, found: list[Evidence]
    ) -> None:  # fmt: skip
        """Runs in the thread: samples processes, reads dumps and flight records, calls py-spy."""
        numbers, begun_at = [each.rank for each in ranks], time.monotonic()
        before = _processes(ranks)
        time.sleep(APART_S)
        found.append(Evidence(before, _processes(ranks)))
        is_last = False
        while not is_last:
            is_last = time.monotonic() - begun_at >= DUMPED_AFTER_S
            with contextlib.suppress(OSError):  # for example, the directory was replaced
                self._check()
                until_ts, flights = time.time() + CLOCKS_APART_S, found[-1].flights
                without = [rank for rank in numbers if rank not in flights]
                dumps = stacks.latest(self._run, numbers, since_ts, until_ts)
                records = {**flights, **flight.latest(self._run, without, since_ts, until_ts)}
                found.append(replace(found[-1], stacks=dumps, flights=records))
                is_last = is_last or len(dumps) == len(numbers) == len(records)
            time.sleep(0 if is_last else READ_EVERY_S)
        found.append(self._with_py_spy(ranks, found[-1]))

    def _with_py_spy(self, ranks: Sequence[RankEvidence], found: Evidence) -> Evidence:
        """Returns the evidence; py-spy adds the stacks of ranks that can run but wrote no dump.

        The rules expect no stack of a rank that cannot run. A stack from py-spy gets the time of
        the newest dump; without a dump, it gets the present time.
        """
        until, dumps = time.monotonic() + PY_SPY_S, dict(found.stacks)
        ts = max((each.ts for each in dumps.values()), default=time.time())
        can_run = {n for n, each in found.after.items() if each.state in "RS" and not each.frozen}
        for rank in (each for each in ranks if each.rank in can_run - dumps.keys()):
            if text := stacks.py_spy_dump(rank.pid, rank.start_ticks, until - time.monotonic()):
                path = self._run / f"stackdump_rank{rank.rank}_{round(ts * 1000)}{BY_PY_SPY}"
                self._save(path, text)
                dumps[rank.rank] = Stack(rank.rank, ts, str(path), stacks.parse(text))
        return replace(found, stacks=dumps)

    def _complete(self, found: Evidence) -> None:
        numbers, gaps = {each.rank for each in self._ranks}, list(found.gaps)
        self._sampled_at = time.monotonic()
        gpus = self._own_gpus()
        lacking = {
            "process evidence": numbers - found.after.keys(),
            "stack": numbers - found.stacks.keys(),
            "flight record": numbers - found.flights.keys(),
            "GPU figures": {rank for rank, gpu in gpus.items() if gpu is None},
        }
        gaps += [f"no {name} of {rank_names(ranks)}" for name, ranks in lacking.items() if ranks]
        self.complete = replace(found, gaps=tuple(gaps), ts=time.time(), gpus=gpus)

    def _own_gpus(self) -> dict[int, Gpu | None]:
        """Returns the newest row of each rank's own GPU, as `gpu_signs.own_gpus` does."""
        pids = {each.rank: each.pid for each in self._ranks}
        opened = {rank: opened_by(pid) for rank, pid in pids.items()}
        environments = {rank: process.environment(pid) for rank, pid in pids.items()}
        return gpu_signs.own_gpus(opened, environments, self._gpus())


def _processes(ranks: Sequence[RankEvidence]) -> dict[int, ProcessEvidence]:
    tables: dict[str, str] = {}
    found = {each.rank: kernel_evidence.collect(each.pid, each.start_ticks, tables)
             for each in ranks}  # fmt: skip
    return {rank: each for rank, each in found.items() if each is not None}
