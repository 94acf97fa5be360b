"""The evidence collected about a stall, and the ranks that each of its sources names."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from console.diagnose import gpu_signs
from console.diagnose.stack_classes import Where, is_of_torch, where
from console.diagnose.stall import STARTING_PHASES, RankEvidence, names, slowest
from console.model import Gpu
from console.sources import flight
from console.sources.descriptors import Connection
from console.sources.flight import Difference, FlightRecord
from console.sources.kernel_evidence import ProcessEvidence, cpu_share
from console.sources.stacks import Stack

ENDED_STATES = ("Z", "X", "gone")
LASTING_STATES = ("T", "t", *ENDED_STATES)
ABNORMAL_STATES = ("D", *LASTING_STATES)
SPIN_SHARE = 0.5
"""Least share of a core that a main thread uses while it waits for its GPU, because it then spins.
The share is low because ranks may share cores."""
BUSY_SHARE = 0.7
"""A process that uses at least this share of a core runs; a process that waits uses far less."""
RAN_SHARE = 0.025
"""A main thread that waits for one object uses less than this share of a core between samples."""
ALONE_SHARE = 0.8
"""Least share of a process's CPU time that its main thread uses if no other thread computes."""
GIL_WAITS_PER_S, WATCHER_PER_S, GIL_HELD_PER_S = 4.0, (5.0, 21.0), 120.0
"""Waits per second of three threads. A main thread that runs Python code has at least the first
number, because it passes the GIL to the contract's watcher thread. A watcher that never waits for
the GIL has the second, because it polls 20 times a second. A watcher that asks for the GIL every
5 ms and never gets it has at least the third."""
OWN_WAITS = ("lock", "pipe", "child", "timer", "disk")
"""Kinds of system calls in which a rank never waits for its peers."""
HELD = ("disk", "lock", "pipe", "child")
"""During the start, a rank in such a wait works; a rank in another wait waits for other ranks."""
NO_WHERE = Where("none", None, None, "")
UNRECORDED = re.compile(r"i?(send|recv)(_object_list)?$|batch_isend_irecv$|monitored_barrier$")
"""Calls that the flight records do not show."""
FOR_PEERS = ("peers", "device", "none")
"""Classes of stacks that name no rank: waits for peers, waits for a GPU, and missing stacks."""


@dataclass(frozen=True, slots=True)
class Sign:
    """The ranks that one source names as the cause of the stall, or none if no rank differs.

    `text` is "" for a source that is not available.
    """

    source: str
    ranks: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """Two samples of each process, and the stacks and flight records written since the stall began.

    `gaps` has a sentence for each piece of evidence that is not available.
    """

    before: Mapping[int, ProcessEvidence] = field(default_factory=dict)
    after: Mapping[int, ProcessEvidence] = field(default_factory=dict)
    stacks: Mapping[int, Stack] = field(default_factory=dict)
    flights: Mapping[int, FlightRecord] = field(default_factory=dict)
    gaps: tuple[str, ...] = ()
    gpus: Mapping[int, Sequence[Gpu]] = field(default_factory=dict)
    """The row of each rank's own GPU. () means that the GPU is not known; no key means no GPU."""
    ts: float = 0.0
    """Time of the second sample (unix s)."""
    _known: dict[object, Any] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )  # fmt: skip
    """Values that were computed from this evidence, by name."""

    def is_abnormal(self, rank: int) -> bool:
        """Returns whether the kernel shows in both samples that a rank's process cannot run."""
        before, after = self.before.get(rank), self.after.get(rank)
        if after is None or not (after.state in ABNORMAL_STATES or after.frozen):
            return False
        return before is None or after.state in (before.state, *ENDED_STATES)

    def waits(self, rank: int) -> bool:
        """Returns whether a rank waits for the same kind of object in both samples.

        Waits for peers are left out.
        """
        before, after = self.before.get(rank), self.after.get(rank)
        if after is None or after.main.kind not in OWN_WAITS:
            return False
        return before is None or before.main.kind == after.main.kind

    def runs(self, rank: int) -> bool:
        """Returns whether a rank uses a core to compute; CUDA and NCCL also use a core to wait."""
        kind = self.places()[rank].kind if rank in self.stacks else "none"
        after = self.after.get(rank)
        blocked = after is not None and after.main.kind not in ("none", "futex")
        return kind not in FOR_PEERS and not blocked and self.uses_a_core(rank)

    def runs_python(self, rank: int) -> bool | None:
        """Returns whether a main thread that runs is in Python code, or None if that is not known.

        Native code never waits for the GIL, because it either holds the GIL or lets the watcher
        run. Threads of Python have the name of the main thread; threads of libraries rarely have
        this name.
        """
        before, after = self.before.get(rank), self.after.get(rank)
        if before is None or after is None or after.mono <= before.mono or not after.threads:
            return None
        seconds, first = after.mono - before.mono, {each.tid: each for each in before.threads}
        pairs = [(first[each.tid], each) for each in after.threads if each.tid in first]
        waits = {b.tid: (b.waits - a.waits) / seconds for a, b in pairs
                 if b.name == after.threads[0].name and min(a.waits, b.waits) >= 0}  # fmt: skip
        ticks = {b.tid: b.cpu_ticks - a.cpu_ticks for a, b in pairs}
        own = waits.pop(after.pid, None)
        if own is None or ticks[after.pid] < ALONE_SHARE * sum(ticks.values()):
            return None
        if own >= GIL_WAITS_PER_S:
            return True
        most, (low, high) = max(waits.values(), default=0.0), WATCHER_PER_S
        return False if own == 0 and (low <= most <= high or most >= GIL_HELD_PER_S) else None

    def uses_a_core(self, rank: int) -> bool:
        """Returns whether a rank's process runs in both samples, or uses most of a core."""
        running = all(rank in of and of[rank].state == "R" for of in (self.before, self.after))
        return running or (self.share(rank) or 0.0) >= BUSY_SHARE

    def share(self, rank: int) -> float | None:
        """Returns the mean number of cores that a rank's process used between the samples."""
        before, after = self.before.get(rank), self.after.get(rank)
        return cpu_share(before, after) if before and after else None

    def as_of(self, source: str) -> str:
        """Returns " as of 14:03:22" for a source that is not read all the time, else ""."""
        dumps = {"flight records": self.flights, "stacks": self.stacks}.get(source, {})
        times = [each.ts for each in dumps.values()] + [self.ts] * (source == "processes")
        if not any(times):
            return ""
        return time.strftime(" as of %H:%M:%S", time.localtime(min(times)))

    def is_together(self, ranks: Sequence[RankEvidence]) -> bool:
        """Returns whether all ranks wait for each other in a collective that each has called."""
        places, found = self.places(), self.difference(ranks)
        return found.kind == "same" and found.number is not None and all(
            each.rank in self.flights and places.get(each.rank, NO_WHERE).kind == "peers"
            for each in ranks
        )  # fmt: skip

    def calls_differ(self, numbers: Collection[int]) -> bool:
        """Returns whether the stacks show that these ranks call other collectives than the rest."""
        places = self.places()
        calls = {rank: (place.text, place.own) for rank, place in places.items()}
        odd = {call for rank, call in calls.items() if rank in numbers}
        others = {call for rank, call in calls.items() if rank not in numbers}
        waits = all(place.kind == "peers" for place in places.values())
        return waits and bool(odd and others) and not odd & others

    def silent(self, ranks: Sequence[RankEvidence], known: Mapping[int, object]) -> tuple[int, ...]:
        """Returns the ranks that `known` lacks, if each of them was unable to write its evidence.

        Returns () otherwise. If all other ranks only wait, they wait for the returned ranks.
        """
        places, found = self.places(), [each for each in ranks if each.rank not in known]
        for each in found:
            place = places.get(each.rank, NO_WHERE)
            holds_gil = place.frame and place.kind == "native" and not is_of_torch(place.frame)
            if not (each.state in ENDED_STATES or self.is_abnormal(each.rank) or holds_gil):
                return ()
        return tuple(each.rank for each in found)

    def lost(self) -> dict[tuple[int, int], Connection]:
        """Returns the connections that lose packets in both samples, by the two connected ranks."""
        ends = {(c.here, c.peer): rank for rank, p in self.after.items() for c in p.connections}
        found = {}
        for rank, process in self.after.items():
            before = self.before.get(rank, process).connections
            for each in process.connections:
                other = ends.get((each.peer, each.here))
                if each.is_unacked and other is not None and each in before:
                    found[min(rank, other), max(rank, other)] = each
        return found

    def main_runs(self, rank: int) -> bool:
        """Returns whether the main thread of a rank runs in both samples, or uses most of a core.

        Only the CPU time of the main thread is used, because that of the process includes all
        threads.
        """
        before, after = self.before.get(rank), self.after.get(rank)
        if before is None or after is None or after.main.kind != "none":
            return False
        if before.state == after.state == "R":
            return True
        return (self.main_share(rank) or 0.0) >= SPIN_SHARE

    def main_share(self, rank: int) -> float | None:
        """Returns the share of a core that a rank's main thread used between the samples."""
        samples = [of[rank] for of in (self.before, self.after) if rank in of]
        own = [replace(of, cpu_ticks=t.cpu_ticks)
               for of in samples for t in of.threads if t.tid == of.pid]  # fmt: skip
        return cpu_share(*own) if len(own) == 2 else None

    def places(self) -> dict[int, Where]:
        """Returns the place of each rank's main thread.

        CUDA calls have no Python frame, so a thread that runs in the program's code may wait for
        its GPU, unless that GPU is idle. If one rank waits for its GPU, every other rank in the
        same frame waits for its own GPU too.
        """
        if "places" not in self._known:
            self._known["places"] = self._find_places()
        return self._known["places"]

    def _find_places(self) -> dict[int, Where]:
        found = {rank: where(stack) for rank, stack in self.stacks.items()}
        own = {
            rank: rows
            for rank, rows in self.gpus.items()
            if rank in found and found[rank].kind == "own" and not gpu_signs.is_idle(rows)
        }
        # A process that only counted the GPUs also has their files open. A thread in Python code
        # does not wait for a GPU.
        runs = {rank for rank in own if self.main_runs(rank) and not self.runs_python(rank)}
        frames = {found[rank].frame for rank in runs if gpu_signs.is_running(own[rank])}
        for rank, rows in own.items():
            place = found[rank]
            if rank in runs or place.frame in frames:
                is_known = gpu_signs.is_running(rows)
                text = "waits for its GPU" if is_known else "runs, or waits for its GPU,"
                found[rank] = replace(place, kind="device", text=f"{text} in {place.text[8:]}")
        return found

    def difference(self, ranks: Sequence[RankEvidence]) -> Difference:
        """Returns the first difference between the flight records of these ranks.

        A rank is not behind if its stack waits in a call that all ranks have made. If all ranks
        wait for peers, and the ranks that are behind wait in calls that are never recorded, then
        the calls differ (a mismatch).
        """
        key = "difference", *(each.rank for each in ranks)
        if key not in self._known:
            self._known[key] = self._find_difference(ranks)
        return self._known[key]

    def _find_difference(self, ranks: Sequence[RankEvidence]) -> Difference:
        found, places = flight.compare(self.flights, [each.rank for each in ranks]), self.places()
        late = {rank: places.get(rank, NO_WHERE) for rank in found.ranks}
        if found.kind != "behind" or any(place.kind != "peers" for place in late.values()):
            return found
        if found.inside:
            return replace(found, kind="same", ranks=())
        waits = all(places.get(each.rank, NO_WHERE).kind == "peers" for each in ranks)
        if waits and all(p.frame and UNRECORDED.match(p.frame.function) for p in late.values()):
            others = tuple(each.rank for each in ranks if each.rank not in late)
            odd = others if len(others) < len(late) else found.ranks
            text = "; ".join(f"rank {rank} {place.text}" for rank, place in [*late.items()][:4])
            return replace(found, kind="mismatch", ranks=odd, text=f"{found.text}; {text}")
        return found


def signs(ranks: Sequence[RankEvidence], evidence: Evidence) -> tuple[Sign, ...]:
    """Returns the signs of all sources, the most reliable source first."""
    pulses = _of_pulses(ranks)
    if evidence.difference(ranks).kind == "mismatch" or evidence.is_together(ranks):
        pulses = replace(pulses, ranks=())  # the rank that is ahead may be the cause
    return (
        _of_flights(ranks, evidence), _of_stacks(ranks, evidence), _of_processes(ranks, evidence),
        _of_gpus(ranks, evidence), pulses,
    )  # fmt: skip


def _named(ranks: Sequence[RankEvidence], numbers: Sequence[int]) -> str:
    return names([each for each in ranks if each.rank in numbers])


def _odd(odd: list[int], ranks: Sequence[RankEvidence]) -> tuple[int, ...]:
    """Returns the ranks that differ, or () if there are several ranks and all of them differ."""
    return tuple(odd) if len(odd) < len(ranks) or len(ranks) == 1 else ()


def _of_flights(ranks: Sequence[RankEvidence], evidence: Evidence) -> Sign:
    """Names the ranks that differ, if the flight record of every rank is available.

    Otherwise names the ranks without a record, if each of them is unable to write one.
    """
    found = evidence.difference(ranks)
    complete = all(each.rank in evidence.flights for each in ranks)
    named = found.ranks if complete else ()
    if not complete and found.kind in ("same", "unknown") and found.number is not None:
        named = evidence.silent(ranks, evidence.flights)
    text = found.text if named or found.kind != "unknown" else ""
    return Sign("flight records", named, text)


def _of_stacks(ranks: Sequence[RankEvidence], evidence: Evidence) -> Sign:
    """Names the ranks that hold the GIL, or else ranks that wait neither for peers nor to join.

    If there are no such ranks, names the ranks that wait to join after the others have joined. If
    all stacks wait for peers, names the ranks that cannot write a stack.
    """
    places = evidence.places()
    native = [rank for rank, place in sorted(places.items()) if place.kind == "native"]
    joining = [rank for rank, place in sorted(places.items()) if place.kind == "store"]
    own = [rank for rank, place in sorted(places.items())
           if place.kind not in (*FOR_PEERS, "store")]  # fmt: skip
    own = own or [  # a rank that may wait for its GPU, while the others wait for peers
        rank
        for rank, place in sorted(places.items())
        if place.kind == "device" and not gpu_signs.is_running(evidence.gpus.get(rank, ()))
    ]
    odd = native or own or (joining if all(each.rank in places for each in ranks) else [])
    if places and not odd and all(place.kind == "peers" for place in places.values()):
        odd = list(evidence.silent(ranks, places))
    texts = {text: [r for r, place in places.items() if place.text == text]
             for text in dict.fromkeys(place.text for place in places.values())}  # fmt: skip
    said = "; ".join(f"{_named(ranks, numbers)}: {text}" for text, numbers in texts.items() if text)
    return Sign("stacks", _odd(odd, ranks), said)


def _of_processes(ranks: Sequence[RankEvidence], evidence: Evidence) -> Sign:
    odd, said = [], []
    abnormal = [each.rank for each in ranks if evidence.is_abnormal(each.rank)]
    abnormal = abnormal or _starting(ranks, evidence)
    for each in ranks:
        found, share = evidence.after.get(each.rank), evidence.share(each.rank)
        if found is None:
            continue
        own = evidence.waits(each.rank) or evidence.runs(each.rank)
        if each.rank in abnormal or (own and not abnormal):
            odd.append(each.rank)
            used = "" if share is None else f", {share:.0%} of a core"
            what = f", waits for {found.main.text}" if found.main.text else ""
            said.append(f"rank {each.rank} in state {found.state}{used}{what}")
    none = "no process is in an unusual state" if evidence.after else ""
    return Sign("processes", _odd(odd, ranks), "; ".join(said[:8]) or none)


def _starting(ranks: Sequence[RankEvidence], evidence: Evidence) -> list[int]:
    """Returns the ranks that compute or read during the start, while the others wait for them."""
    if any(each.phase and each.phase not in STARTING_PHASES for each in ranks):
        return []
    places = evidence.places()
    works = [each.rank for each in ranks if evidence.uses_a_core(each.rank)
             and places.get(each.rank, NO_WHERE).kind not in ("peers", "store")]  # fmt: skip
    held = [rank for rank, found in evidence.after.items() if found.main.kind in HELD]
    return works or held


def _of_gpus(ranks: Sequence[RankEvidence], evidence: Evidence) -> Sign:
    rows = {each.rank: evidence.gpus[each.rank] for each in ranks if each.rank in evidence.gpus}
    said = "; ".join(f"rank {rank}: {gpu_signs.words(gpus)}"
                     for rank, gpus in sorted(rows.items())[:8] if gpus)  # fmt: skip
    odd = gpu_signs.odd_ranks(rows) if len(rows) == len(ranks) else ()
    return Sign("GPUs", _odd(list(odd), ranks), said)


def _of_pulses(ranks: Sequence[RankEvidence]) -> Sign:
    found = slowest(ranks)
    running = [each for each in ranks if each.phase != "exit" and not each.doubt]
    if not found or len(found) == len(running) > 1:
        return Sign("pulses", (), "all ranks are at the same place")
    return Sign(
        "pulses", tuple(each.rank for each in found),
        f"{names(found)} at the earliest place, {found[0].place}",
    )  # fmt: skip
