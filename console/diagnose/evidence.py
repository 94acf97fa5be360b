"""The evidence collected about a stall, and the ranks that each of its sources names."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from console.diagnose import gpu_signs
from console.diagnose.stack_classes import Where, is_of_torch, where
from console.diagnose.stall import RankEvidence, names, slowest
from console.model import Gpu
from console.sources import flight
from console.sources.flight import Difference, FlightRecord
from console.sources.kernel_evidence import ProcessEvidence, cpu_share
from console.sources.stacks import Stack
from console.sources.tcp import Connection

ENDED_STATES = ("Z", "X", "gone")
LASTING_STATES = ("T", "t", *ENDED_STATES)
ABNORMAL_STATES = ("D", *LASTING_STATES)
BUSY_SHARE = 0.7
"""A process that uses at least this much of one core runs; one that waits uses far less."""
OWN_WAITS = ("lock", "pipe", "child", "timer", "disk")
"""System calls in which no rank waits for its peers."""
NO_WHERE = Where("none", None, None, "")
FOR_PEERS = ("peers", "device", "none")
"""Stacks that name nobody: they wait for peers or the device, or are not available."""


@dataclass(frozen=True, slots=True)
class Sign:
    """The ranks that one source names as the cause of the stall; none where it shows no odd one.

    `text` is "" for a source that is not available.
    """

    source: str
    ranks: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """Two samples of each process, and each stack and flight record written since the stall began.

    `gaps` holds a sentence for each piece that is not available.
    """

    before: Mapping[int, ProcessEvidence] = field(default_factory=dict)
    after: Mapping[int, ProcessEvidence] = field(default_factory=dict)
    stacks: Mapping[int, Stack] = field(default_factory=dict)
    flights: Mapping[int, FlightRecord] = field(default_factory=dict)
    gaps: tuple[str, ...] = ()
    gpus: Mapping[int, Sequence[Gpu]] = field(default_factory=dict)
    """The GPUs that the process of a rank has open; no key for a rank that uses none."""
    ts: float = 0.0
    """Time of the second sample (unix s)."""

    def is_abnormal(self, rank: int) -> bool:
        """Returns whether the kernel shows in both samples that a rank's process cannot run."""
        before, after = self.before.get(rank), self.after.get(rank)
        if after is None or not (after.state in ABNORMAL_STATES or after.frozen):
            return False
        return before is None or after.state in (before.state, *ENDED_STATES)

    def waits(self, rank: int) -> bool:
        """Returns whether a rank waits in both samples for the same kind of object, no peer."""
        before, after = self.before.get(rank), self.after.get(rank)
        if after is None or after.main.kind not in OWN_WAITS:
            return False
        return before is None or before.main.kind == after.main.kind

    def runs(self, rank: int) -> bool:
        """Returns whether a rank runs in code of its own; CUDA and NCCL wait with a core too."""
        kind = self.places()[rank].kind if rank in self.stacks else "none"
        return kind not in FOR_PEERS and self._uses_a_core(rank)

    def _uses_a_core(self, rank: int) -> bool:
        running = all(rank in of and of[rank].state == "R" for of in (self.before, self.after))
        return running or (self.share(rank) or 0.0) >= BUSY_SHARE

    def share(self, rank: int) -> float | None:
        """Returns the cores that a rank's process used between the two samples."""
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
        """Returns whether the stacks show these ranks in another collective than the others."""
        places = self.places()
        calls = {rank: (place.text, place.own) for rank, place in places.items()}
        odd = {call for rank, call in calls.items() if rank in numbers}
        others = {call for rank, call in calls.items() if rank not in numbers}
        waits = all(place.kind == "peers" for place in places.values())
        return waits and bool(odd and others) and not odd & others

    def silent(self, ranks: Sequence[RankEvidence], known: Mapping[int, object]) -> tuple[int, ...]:
        """Returns the ranks without evidence in `known`, if each of them was unable to write it.

        Returns () otherwise. If all other ranks only wait, they wait for the returned ones.
        """
        places, found = self.places(), [each for each in ranks if each.rank not in known]
        for each in found:
            place = places.get(each.rank, NO_WHERE)
            holds_gil = place.frame and place.kind == "native" and not is_of_torch(place.frame)
            if not (each.state in ENDED_STATES or self.is_abnormal(each.rank) or holds_gil):
                return ()
        return tuple(each.rank for each in found)

    def lost(self) -> dict[tuple[int, int], Connection]:
        """Returns the connections between two ranks that lose packets in both samples."""
        ends = {(c.here, c.peer): rank for rank, p in self.after.items() for c in p.connections}
        found = {}
        for rank, process in self.after.items():
            before = self.before.get(rank, process).connections
            for each in process.connections:
                other = ends.get((each.peer, each.here))
                if each.is_unacked and other is not None and each in before:
                    found[min(rank, other), max(rank, other)] = each
        return found

    def places(self) -> dict[int, Where]:
        """Returns the place of each rank's main thread.

        One that uses a core in code of its own may wait for its GPU, unless that is idle: the calls
        of CUDA have no Python frame.
        """
        found = {rank: where(stack) for rank, stack in self.stacks.items()}
        for rank, rows in self.gpus.items():
            place = found.get(rank)
            if place is None or place.kind != "own" or place.frame is None:
                continue
            if self._uses_a_core(rank) and not gpu_signs.is_idle(rows):
                doubt = (
                    "waits for its GPU"
                    if gpu_signs.is_running(rows)
                    else "runs, or waits for its GPU,"
                )
                found[rank] = replace(place, kind="device", text=f"{doubt} in {place.frame.short}")
        return found

    def difference(self, ranks: Sequence[RankEvidence]) -> Difference:
        """Returns the first difference between the flight records of these ranks.

        A rank whose stack waits in a call that all ranks have made is not behind.
        """
        found, places = flight.compare(self.flights, [each.rank for each in ranks]), self.places()
        if found.inside and all(places.get(r, NO_WHERE).kind == "peers" for r in found.ranks):
            return replace(found, kind="same", ranks=())
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
    """Returns the odd ranks; none where all ranks of several are odd."""
    return tuple(odd) if len(odd) < len(ranks) or len(ranks) == 1 else ()


def _of_flights(ranks: Sequence[RankEvidence], evidence: Evidence) -> Sign:
    """Names no rank while a flight record is missing.

    Exception: every rank without a record is unable to write one.
    """
    found = evidence.difference(ranks)
    complete = all(each.rank in evidence.flights for each in ranks)
    named = found.ranks if complete else ()
    if not complete and found.kind in ("same", "unknown") and found.number is not None:
        named = evidence.silent(ranks, evidence.flights)
    text = found.text if named or found.kind != "unknown" else ""
    return Sign("flight records", named, text)


def _of_stacks(ranks: Sequence[RankEvidence], evidence: Evidence) -> Sign:
    """Names the ranks that hold the GIL, else those that wait neither for peers nor to join.

    Ranks that wait to join are named where the others have joined, and ranks that cannot write a
    stack where all others wait for peers.
    """
    places = evidence.places()
    native = [rank for rank, place in sorted(places.items()) if place.kind == "native"]
    joining = [rank for rank, place in sorted(places.items()) if place.kind == "store"]
    own = [rank for rank, place in sorted(places.items())
           if place.kind not in (*FOR_PEERS, "store")]  # fmt: skip
    odd = native or own or (joining if all(each.rank in places for each in ranks) else [])
    if places and not odd and all(place.kind == "peers" for place in places.values()):
        odd = list(evidence.silent(ranks, places))
    texts = {text: [r for r, place in places.items() if place.text == text]
             for text in dict.fromkeys(place.text for place in places.values())}  # fmt: skip
    said = "; ".join(f"{_named(ranks, numbers)} {text}" for text, numbers in texts.items() if text)
    return Sign("stacks", _odd(odd, ranks), said)


def _of_processes(ranks: Sequence[RankEvidence], evidence: Evidence) -> Sign:
    odd, said = [], []
    abnormal = [each.rank for each in ranks if evidence.is_abnormal(each.rank)]
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
