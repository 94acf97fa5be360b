"""The evidence collected about a stall, and the ranks that each source of evidence names."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from console.diagnose import gpu_signs
from console.diagnose.causes import FOR_PEERS, Suspect
from console.diagnose.rank_evidence import STARTING_PHASES, Moment, RankEvidence, names, slowest
from console.diagnose.stack_classes import Where, is_of_torch, where
from console.model import Gpu
from console.sources import flight
from console.sources.descriptors import Connection
from console.sources.flight import Difference, FlightRecord
from console.sources.kernel_evidence import ProcessEvidence
from console.sources.stacks import Stack
from console.status_text import clock

HELD = ("disk", "lock", "pipe", "child")
"""Kinds of waits by which a rank may delay the start-up of the other ranks."""
NO_WHERE = Where("none", None, None, "")
UNRECORDED = re.compile(r"i?(send|recv)(_object_list)?$|batch_isend_irecv$|monitored_barrier$")
"""Matches functions whose calls the flight records do not show."""


@dataclass(frozen=True, slots=True)
class Sign:
    """The ranks that one source names as the cause of the stall, and what the source shows."""

    source: str
    ranks: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Evidence:
    """Two samples of the processes, and the stacks, flight records and GPUs of the ranks.

    Each part may be missing. `gaps` names evidence that is not available.
    """

    before: Mapping[int, ProcessEvidence] = field(default_factory=dict)
    after: Mapping[int, ProcessEvidence] = field(default_factory=dict)
    stacks: Mapping[int, Stack] = field(default_factory=dict)
    flights: Mapping[int, FlightRecord] = field(default_factory=dict)
    gaps: tuple[str, ...] = ()
    gpus: Mapping[int, Gpu | None] = field(default_factory=dict)
    """The result of `gpu_signs.own_gpus`."""
    ts: float = 0.0
    """Time of the newest sample since the evidence was complete, or else of completion (unix s)."""

    @cached_property
    def places(self) -> Mapping[int, Where]:
        """The class of each stack, by rank."""
        return {rank: where(stack) for rank, stack in self.stacks.items()}

    @cached_property
    def _compared(self) -> dict[tuple[int, ...], Difference]:
        return {}

    def difference(self, ranks: tuple[int, ...]) -> Difference:
        """Returns the result of comparing the flight records of these ranks."""
        if ranks not in self._compared:
            self._compared[ranks] = flight.compare(self.flights, ranks)
        return self._compared[ranks]

    def as_of(self, source: str) -> str:
        """Returns a text such as " as of 14:03:22", or "" if no time is known for the source.

        It is the time of the source's oldest dump, or `ts` for the processes.
        """
        dumps = {"flight records": self.flights, "stacks": self.stacks}.get(source, {})
        times = [each.ts for each in dumps.values()] + [self.ts] * (source == "processes")
        if not any(times):
            return ""
        return f" as of {clock(min(times))}"


class Stall:
    """A stall: its ranks with the evidence about them, and the signs of all sources."""

    def __init__(self, moment: Moment, evidence: Evidence) -> None:
        self.moment, self.ranks, self.evidence = moment, moment.running, evidence
        alone = len((*self.ranks, *moment.exited, *moment.doubtful)) == 1
        suspects = [_suspect(each, evidence, alone) for each in self.ranks]
        self.suspects = _with_holders(_with_gpus(suspects))
        self.difference = self._find_difference()
        if self.difference.kind == "mismatch":
            odd = self.difference.ranks
            self.suspects = [replace(e, calls_other=e.number in odd) for e in self.suspects]
        self.signs = _signs(self)
        """The signs of all sources, the most reliable source first."""

    def places(self) -> dict[int, Where]:
        """Returns the class of each available stack, by rank."""
        return {each.number: each.where for each in self.suspects if each.has_stack}

    @property
    def is_together(self) -> bool:
        """True if all ranks wait for each other, and none is behind.

        Every rank must have a flight record, and a stack that shows a wait for its peers. The
        flight records must show a collective in which ranks wait, and no difference.
        """
        found = self.difference
        return found.kind == "same" and found.number is not None and all(
            each.number in self.evidence.flights and each.where.kind == "peers"
            for each in self.suspects
        )  # fmt: skip

    def calls_differ(self, numbers: Collection[int]) -> bool:
        """Returns whether these ranks wait for their peers in other calls than the other ranks.

        Returns False if a rank with an available stack does not wait for its peers.
        """
        places = self.places()
        calls = {rank: (place.text, place.own) for rank, place in places.items()}
        odd = {call for rank, call in calls.items() if rank in numbers}
        others = {call for rank, call in calls.items() if rank not in numbers}
        waits = all(place.kind == "peers" for place in places.values())
        return waits and bool(odd and others) and not odd & others

    def silent(self, known: Mapping[int, object]) -> tuple[int, ...]:
        """Returns the ranks without evidence in `known`; () if one of them was able to write it."""
        found = [each for each in self.suspects if each.number not in known]
        for each in found:
            frame = each.where.frame
            holds_gil = frame and each.where.kind == "native" and not is_of_torch(frame)
            if not (each.cannot_run or holds_gil):
                return ()
        return tuple(each.number for each in found)

    def lost(self) -> dict[tuple[int, int], Connection]:
        """Returns a connection for each pair of ranks whose packets are not acknowledged.

        If there are two samples of a process, both must show this connection without an
        acknowledgement.
        """
        after = self.evidence.after
        ends = {(c.here, c.peer): rank for rank, p in after.items() for c in p.connections}
        found = {}
        for rank, process in after.items():
            before = self.evidence.before.get(rank, process).connections
            for each in process.connections:
                other = ends.get((each.peer, each.here))
                if each.is_unacked and other is not None and each in before:
                    found[min(rank, other), max(rank, other)] = each
        return found

    def _find_difference(self) -> Difference:
        """Returns the result of comparing the flight records of the ranks, checked by the stacks.

        The stacks change "behind" only if each late rank (a rank that is behind) waits for its
        peers. The result is "same" if each late rank still waits in its last recorded call.
        Otherwise it is "mismatch" if all ranks wait for their peers, and the late ranks wait in
        calls that flight records do not show.
        """
        found = self.evidence.difference(tuple(each.rank for each in self.ranks))
        late = {each.number: each.where for each in self.suspects
                if each.number in found.ranks}  # fmt: skip
        if found.kind != "behind" or any(place.kind != "peers" for place in late.values()):
            return found
        if found.inside:
            return replace(found, kind="same", ranks=())
        waits = all(each.where.kind == "peers" for each in self.suspects)
        if waits and all(p.frame and UNRECORDED.match(p.frame.function) for p in late.values()):
            others = tuple(each.rank for each in self.ranks if each.rank not in late)
            odd = others if len(others) < len(late) else found.ranks
            text = "; ".join(f"rank {rank} {place.text}" for rank, place in [*late.items()][:4])
            return replace(found, kind="mismatch", ranks=odd, text=f"{found.text}; {text}")
        return found


def _suspect(rank: RankEvidence, evidence: Evidence, is_alone: bool) -> Suspect:
    number = rank.rank
    return Suspect(
        rank, evidence.before.get(number), evidence.after.get(number),
        evidence.places.get(number, NO_WHERE), evidence.stacks, evidence.gpus.get(number),
        number in evidence.gpus, is_alone,
    )  # fmt: skip


def _with_gpus(suspects: Sequence[Suspect]) -> list[Suspect]:
    """Returns the suspects; those that may wait for their GPU have the class "device".

    Such a rank has a stack of the class "own", and its GPU is not known to be idle. Its main thread
    runs, and is not known to run Python code. Or it is in the same frame as a rank with such a
    thread, whose GPU runs a kernel. Open GPU files are not enough: a process that only counted the
    GPUs has them open too.
    """
    own = [each for each in suspects if each.uses_gpu and each.where.kind == "own"
           and not gpu_signs.is_idle(each.gpu)]  # fmt: skip
    waiting = {each.number for each in own if each.may_wait_for_gpu}
    frames = {each.where.frame for each in own
              if each.number in waiting and gpu_signs.is_running(each.gpu)}  # fmt: skip
    found = list[Suspect]()
    for each in suspects:
        place = each.where
        if each in own and (each.number in waiting or place.frame in frames):
            is_known = gpu_signs.is_running(each.gpu)
            text = "waits for its GPU" if is_known else "runs, or waits for its GPU,"
            place = replace(place, kind="device", text=f"{text} in {place.text[8:]}")
            each = replace(each, where=place)
        found.append(each)
    return found


def _with_holders(suspects: Sequence[Suspect]) -> list[Suspect]:
    """Returns the suspects; those that wait for a file lock of another rank have its number.

    A library that asks for its lock at intervals shows no holder; see `_possible_holder`. A holder
    that waits for its peers does not count: it waits for the ranks that wait for its lock.
    """
    by_pid = {each.rank.pid: each for each in suspects if each.rank.pid}
    found = list[Suspect]()
    for each in suspects:
        holder = by_pid.get(each.main.holder)
        if holder and each.after:
            name = f"rank {holder.number} (pid {holder.rank.pid})"
            text = re.sub(rf"pid {holder.rank.pid} \([^)]*\)", name, each.main.text)
            each = replace(each, after=replace(each.after, main=replace(each.main, text=text)))
        elif each.where.kind == "file":
            holder = _possible_holder(each, suspects)
        if holder and holder.number != each.number and not each.cannot_run:
            waits = holder.where.kind in ("peers", "store")
            each = replace(each, holder=None if waits else holder.number)
        found.append(each)
    return found


def _possible_holder(waiting: Suspect, suspects: Sequence[Suspect]) -> Suspect | None:
    """Returns the first rank with a lock by `flock`, which most libraries use, and work of its own.

    Its lock may be of another file. So the rank must compute, have a wait of its own or be unable
    to run, unless all other ranks wait for their peers, for a GPU that is not known to compute, or
    for a file lock.
    """
    free = [
        each for each in suspects if each.number != waiting.number
        and (each.gpu_computes or each.where.kind not in ("peers", "store", "device", "file"))
    ]  # fmt: skip
    for each in free:
        works = each.cannot_run or each.runs or each.gpu_computes
        waits = each.main.kind not in ("none", "futex") or each.where.kind not in (
            "own", *FOR_PEERS)  # fmt: skip
        if each.after and each.after.has_flock and (works or waits or len(free) == 1):
            return each
    return None


def _signs(stall: Stall) -> tuple[Sign, ...]:
    positions = _of_positions(stall.ranks)
    if stall.difference.kind == "mismatch" or stall.is_together:
        positions = replace(positions, ranks=())  # the rank that is ahead may be the cause
    return _of_flights(stall), _of_stacks(stall), _of_processes(stall), _of_gpus(stall), positions


def _odd(odd: Sequence[int], stall: Stall) -> tuple[int, ...]:
    """Returns `odd`, or () if `odd` contains all ranks of a stall with several ranks."""
    return tuple(odd) if len(odd) < len(stall.ranks) or len(stall.ranks) == 1 else ()


def _of_flights(stall: Stall) -> Sign:
    """Names the ranks that differ, if the flight record of every rank is available.

    If a record is missing, and the others show a wait and no difference, names the ranks without a
    record. Names no rank if one of these ranks was able to write its record (`Stall.silent`).
    """
    found, flights = stall.difference, stall.evidence.flights
    complete = all(each.rank in flights for each in stall.ranks)
    named = found.ranks if complete else ()
    if not complete and found.kind in ("same", "unknown") and found.number is not None:
        named = stall.silent(flights)
    return Sign("flight records", named, found.text if named or found.kind != "unknown" else "")


def _of_stacks(stall: Stall) -> Sign:
    """Names the ranks of the first group below that is not empty; see also `_odd`.

    - ranks whose native code holds the GIL
    - ranks that do not wait for peers, to join, for a lock of another rank, or for a GPU that is
      not known to compute; while a rank cannot run, no wait for a GPU counts, because the other
      ranks may still have work before they wait for this rank
    - ranks that may wait for their GPU, but no kernel is known to run on it
    - ranks that wait to join; only if every rank has a stack
    - ranks that could not write a stack; only if all ranks with a stack wait for their peers
    """
    places = stall.places()
    native = [rank for rank, place in places.items() if place.kind == "native"]
    joining = [rank for rank, place in places.items() if place.kind == "store"]
    can_run = not any(each.cannot_run for each in stall.suspects)
    own = [
        each.number for each in stall.suspects if each.holder is None
        and ((each.gpu_computes and can_run) or each.where.kind not in (*FOR_PEERS, "store"))
    ]  # fmt: skip
    own = own or [  # a rank that may wait for its GPU; the GPU is not known to run a kernel
        each.number for each in stall.suspects
        if each.where.kind == "device" and not gpu_signs.is_running(each.gpu)
    ]  # fmt: skip
    odd = native or own or (joining if len(places) == len(stall.ranks) else [])
    if places and not odd and all(place.kind == "peers" for place in places.values()):
        odd = list(stall.silent(places))
    texts: dict[str, list[RankEvidence]] = {}
    for each in stall.suspects:
        if each.where.text:
            texts.setdefault(each.where.text, []).append(each.rank)
    said = "; ".join(f"{names(ranks)}: {text}" for text, ranks in texts.items())
    return Sign("stacks", _odd(odd, stall), said)


def _of_processes(stall: Stall) -> Sign:
    """Names the ranks that cannot run, or else the ranks that delay the start-up of the others.

    If there are no such ranks, names the ranks that compute (`runs`, `gpu_computes`) or have a wait
    of their own (`waits`). A rank that waits for a lock of another rank is replaced by this rank,
    or left out if the holder is not certain. Names no rank if all of several ranks were found.
    """
    odd = [each for each in stall.suspects if each.cannot_run]
    odd = odd or _starting(stall) or [
        each for each in stall.suspects if each.waits or each.runs or each.gpu_computes
    ]  # fmt: skip
    said = list[str]()
    for each in odd:
        used = "" if each.share is None else f", {each.share:.0%} of a core"
        what = f", waits for {each.main.text}" if each.main.text else ""
        said.append(f"rank {each.number} in state {each.state}{used}{what}")
    numbers = {each.number if each.holder is None else each.holder for each in odd
               if each.holder is None or (each.main.holder and not each.main.unsure)}  # fmt: skip
    return Sign("processes", _odd(sorted(numbers), stall), "; ".join(said[:8]))


def _starting(stall: Stall) -> list[Suspect]:
    """Returns the ranks that compute during start-up, or else the ranks with a wait in `HELD`.

    Returns [] if a rank has finished its start-up.
    """
    if any(each.phase and each.phase not in STARTING_PHASES for each in stall.ranks):
        return []
    works = [each for each in stall.suspects
             if each.uses_a_core and each.where.kind not in ("peers", "store")]  # fmt: skip
    return works or [each for each in stall.suspects if each.main.kind in HELD]


def _of_gpus(stall: Stall) -> Sign:
    gpus = {each.number: each.gpu for each in stall.suspects if each.uses_gpu}
    said = "; ".join(f"rank {rank}: {gpu_signs.words(gpu)}"
                     for rank, gpu in [*gpus.items()][:8] if gpu)  # fmt: skip
    odd = gpu_signs.odd_ranks(gpus) if len(gpus) == len(stall.ranks) else ()
    return Sign("GPUs", _odd(odd, stall), said)


def _of_positions(ranks: Sequence[RankEvidence]) -> Sign:
    found = slowest(ranks)
    if not found:  # all ranks exit
        return Sign("positions", (), "")
    if len(found) == len(ranks) > 1:
        return Sign("positions", (), "all ranks are at the same position")
    return Sign(
        "positions", tuple(each.rank for each in found),
        f"{names(found)} at the earliest position, {found[0].position_text}",
    )  # fmt: skip
