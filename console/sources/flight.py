"""Reads the collective flight records of ranks, and finds the ranks that differ.

After a dump of its stacks, a rank writes torch's record of its last collectives.
`TORCH_FR_BUFFER_SIZE` limits the number of entries (2,000 by default; 0 turns the record off). Each
process group numbers its collectives. In a correct program a collective has the same number on all
ranks of the group. Point-to-point operations are left out, because they are numbered separately.
`pg_status` is left out, because its last number may belong to a point-to-point operation.

gloo leaves `state` at "scheduled" and marks a collective that has ended as `retired`. With NCCL, a
collective that is `retired` but not "completed" has timed out.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from console.sources import stacks
from console.sources.sanitize import clean
from console.status_text import rank_names
from trainers.contract import jsonl

T = TypeVar("T")
MAX_RECORD_BYTES = 16 << 20
MAX_COLLECTIVES = 2048
MAX_TOTAL_BYTES = 64 << 20
"""The most bytes that one call of `latest` reads; records beyond this limit are not available."""
MIN_PAST = MAX_SKIPPED = 8
"""The least number of calls that show the usual order, and the most skipped calls to look for."""
RARE = 2
"""A call that is this many times rarer than another is unusual, but not certainly wrong."""
DEFAULT_GROUP = "default_pg"
"""The name that torch gives the group of all ranks."""
_SAME_SIZE = re.compile(
    r"all_reduce|broadcast|reduce|_?all_?gather_(?:base|into_tensor)|_?reduce_scatter_(?:base|tensor)"
)
_SAME_SIZE_GLOO = re.compile(rf"{_SAME_SIZE.pattern}|all_gather|gather")
"""Operations in which every rank must have the same number of elements; gloo has two more."""
_ROOT_HAS = {"gather": "output_sizes", "scatter": "input_sizes"}
"""The field of an operation's entry that is empty on all ranks except the root."""
_NAME = re.compile(r"flight_rank(?P<rank>[0-9]{1,9})_(?P<ms>[0-9]{1,16})\.json")
_SHAPE = re.compile(r"\[([\d, ]*)\]")
_POINT_TO_POINT = re.compile(r"(?:send|recv)\b")
_DTYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "Long": "int64", "Int": "int32",
    "Short": "int16", "Char": "int8", "Byte": "uint8",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a rank; `sizes` describes its input, for example "[131584] float32"."""

    group: str
    """Backend, name and description of the process group: "gloo 0 default_pg"."""
    number: int
    op: str
    sizes: str
    done: bool
    is_root: bool = False
    """True if the rank gathers from the other ranks, or scatters to them."""


@dataclass(frozen=True, slots=True)
class FlightRecord:
    """The last collectives of one rank, newest last; `ts` is the time of the dump."""

    rank: int
    ts: float
    path: str
    last_enqueued: Mapping[str, int]
    """The number of each group's newest collective; empty if the record has no collective."""
    collectives: tuple[Collective, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """The result of comparing the flight records of ranks.

    - behind: other ranks wait in collective `number`, which `ranks` have not called.
    - mismatch: the ranks call different operations or sizes as collective `number`. `ranks` are the
      minority. Without a minority, `ranks` are the ranks with an unusual call (see `_unusual`), or
      (). If several ranks are the root of a collective, `ranks` are all of them except the lowest.
      If ranks wait for each other in different groups, `number` is None (see `_settled`).
    - same: no rank waits for a rank that is behind. `number` is the collective in which ranks
      wait, or None if no rank waits in a collective.
    - unknown: there is nothing to compare. `number` is the collective in which a rank waits, or
      None.
    """

    kind: Literal["behind", "mismatch", "same", "unknown"]
    ranks: tuple[int, ...]
    number: int | None
    text: str
    confirmed: bool = False
    """True for a mismatch if `_unusual` names the minority too.

    Without a minority, True if the ranks with an unusual call skipped a call.
    """
    inside: bool = False
    """True if each rank that is behind still waits in its last call."""


@functools.lru_cache(4096)
def _signature(op: str, sizes: str, group: str) -> str:
    """Returns a text that must be equal on all ranks.

    The text contains the operation. If the operation needs the same size on every rank, the text
    also contains the number and the type of the elements.
    """
    same = _SAME_SIZE_GLOO if group.startswith("gloo ") else _SAME_SIZE
    return op + (_SHAPE.sub(_elements, sizes) if same.fullmatch(op) else "")


def _kind(call: Collective) -> str:
    return _signature(call.op, call.sizes, call.group)


def _elements(shape: re.Match[str]) -> str:
    return f" {math.prod(int(each) for each in re.findall('[0-9]+', shape[1]))}"


def _items(entry: Mapping[str, Any], key: str, kind: type[T]) -> list[T]:
    value = entry.get(key)
    return [each for each in value if isinstance(each, kind)] if isinstance(value, list) else []


def _sizes(entry: Mapping[str, Any]) -> str:
    shapes = _items(entry, "input_sizes", list)[:16]
    text = ", ".join(str(jsonl.integers({"": each}, "")) for each in shapes)
    dtypes = {_DTYPES.get(each, each.lower()): None for each in _items(entry, "input_dtypes", str)}
    return clean(" ".join((text, *dtypes)).strip(), 100)


def _collective(entry: Mapping[str, Any]) -> Collective | None:
    """Returns the collective in an entry, or None, for example for a point-to-point operation."""
    number = jsonl.integer(entry, "collective_seq_id")
    backend, _, op = jsonl.text(entry, "profiling_name").rpartition(":")
    is_p2p = entry.get("is_p2p") is True or _POINT_TO_POINT.match(op)
    if number is None or number < 0 or not op or is_p2p:
        return None
    group = " ".join((backend, *_items(entry, "process_group", str)[:2]))
    done = jsonl.text(entry, "state") == "completed"
    done = done or (entry.get("retired") is True and backend != "nccl")
    is_root = bool(_items(entry, _ROOT_HAS.get(op, ""), list))
    return Collective(clean(group, 200), number, clean(op, 60), _sizes(entry), done, is_root)


def parse(data: bytes, rank: int, ts: float, path: str) -> FlightRecord | None:
    """Returns the flight record in the content of a file, or None if the file has no record."""
    document = jsonl.decode(data) or {}
    if "version" not in document:
        return None
    entries = map(_collective, jsonl.entries(document, "entries"))
    found = [each for each in entries if each is not None][-MAX_COLLECTIVES:]
    last = {each.group: each.number for each in found}
    return FlightRecord(rank, ts, path, last, tuple(found))


def latest(
    run: Path, ranks: Iterable[int], since_ts: float = 0.0, until_ts: float = math.inf
) -> dict[int, FlightRecord]:
    """Returns the newest readable record of each rank from `since_ts` to `until_ts` (unix s)."""
    left = MAX_TOTAL_BYTES

    def read(path: Path, rank: int, ts: float) -> FlightRecord | None:
        nonlocal left
        data = jsonl.read_bytes(path, min(MAX_RECORD_BYTES, left), 0)
        left -= len(data)
        return parse(data, rank, ts, str(path))

    return stacks.newest_of(_NAME, read, run, ranks, since_ts, until_ts)


class _Member:
    """The collectives of one rank in one group.

    With NCCL, coalesced collectives have the same number.
    """

    def __init__(self, record: FlightRecord, group: str):
        self.calls: dict[int, list[Collective]] = {}
        self.last = 0
        for each in record.collectives:
            if each.group == group:
                if each.number < self.last:  # a new group of the same name
                    self.calls.clear()
                self.last = each.number
                self.calls.setdefault(each.number, []).append(each)
        waits = (number for number in self.calls if self.waits_in(number))
        self.waits = next(waits, None)
        """The number of the first collective that is not done, or None if all are done."""

    def waits_in(self, number: int) -> bool:
        return not all(each.done for each in self.calls.get(number, ()))


_Members = Mapping[int, _Member]


def _call(group: str, number: int, members: _Members) -> str:
    """Returns a call as text, for example "all_reduce 918,331 ([131584] float32)".

    The text names the group, unless it is the group of all ranks.
    """
    each = next(m.calls[number][0] for m in members.values() if number in m.calls)
    sizes = f" ({each.sizes})" if each.sizes else ""
    return f"{each.op} {number:,}{sizes}{_of_group(group)}"


def _of_group(group: str) -> str:
    return "" if group.endswith(DEFAULT_GROUP) else f' of group "{group}"'


def _mismatch(group: str, members: _Members) -> Difference | None:
    """Returns the first mismatch (other operation or size, several roots), or None."""
    for number in sorted({number for member in members.values() for number in member.calls}):
        calls = {r: m.calls[number] for r, m in members.items() if number in m.calls}
        roots = [rank for rank, call in calls.items() if any(each.is_root for each in call)]
        if len(roots) > 1:
            text = f"{rank_names(roots)} are each the root of {_call(group, number, members)}"
            return Difference("mismatch", tuple(roots[1:]), number, text)
        kinds = ({_kind(each) for each in call} for call in calls.values())
        if set.intersection(*kinds):
            continue
        callers: dict[str, list[int]] = {}
        for rank, (first, *_) in calls.items():
            callers.setdefault(_kind(first), []).append(rank)
        sides = sorted(callers.values())
        most = max(sides, key=len)
        few = sorted(set(calls) - set(most)) if 2 * len(most) > len(calls) else []
        odd, skips = _unusual(members, number, callers)
        confirmed = few == odd if few else skips
        called: list[str] = []
        for side in sides[:4]:
            verbs = () if called else ("calls", "call")
            call = calls[side[0]][0]
            called.append(f"{rank_names(side, *verbs)} {call.op} {call.sizes}".rstrip())
        text = f"collective {number:,}{_of_group(group)}: {', '.join(called)}"
        if odd:
            text += f"; {rank_names(odd, 'does', 'do')} not make the usual call here"
        return Difference("mismatch", tuple(few or odd), number, text, bool(odd) and confirmed)
    return None


def _unusual(
    members: _Members, number: int, callers: Mapping[str, list[int]]
) -> tuple[list[int], bool]:
    """Returns two values: ranks with an unusual call `number`, and whether they skipped a call.

    A call is usual if it has followed a call like the one before `number`. After …, A, B, C, A, B
    the usual call is C. A rank that calls A skipped C: A came at most `MAX_SKIPPED` calls after C.

    - If some ranks make a usual call and others do not, the others are returned.
    - If every rank makes a usual call, the ranks with a much rarer call (`RARE`) are returned, or
      none if one call has a majority.
    - If no rank makes a usual call, or fewer than `MIN_PAST` calls are known, none is returned.
    """
    earlier: dict[int, str] = {}
    for member in members.values():
        earlier |= {n: _kind(c[0]) for n, c in member.calls.items() if n < number}
    past = [earlier[n] for n in sorted(earlier)]
    after = [at for at in range(1, len(past)) if past[at - 1] == past[-1]]
    usual = Counter(past[at] for at in after)
    odd = {side: ranks for side, ranks in callers.items() if side not in usual}
    if len(past) < MIN_PAST or len(odd) == len(callers):
        return [], False
    if not odd:  # every call is usual, but some calls may be far rarer
        if 2 * max(map(len, callers.values())) > sum(map(len, callers.values())):
            return [], False  # the minority is to blame
        most = max(usual[side] for side in callers)
        rare = {side for side in callers if RARE * usual[side] <= most}
        return sorted(rank for side in rare for rank in callers[side]), False
    later = {each for at in after for each in past[at + 1 : at + 1 + MAX_SKIPPED]}
    return sorted(r for ranks in odd.values() for r in ranks), set(odd) <= later


def _difference(group: str, members: _Members) -> Difference:
    lowest = min(member.last for member in members.values())
    waits = {rank: m.waits for rank, m in members.items() if m.waits is not None}
    number = min((each for each in waits.values() if each > lowest), default=None)
    mismatch = _mismatch(group, members)
    if mismatch and (number is None or mismatch.number is None or mismatch.number <= number):
        return mismatch
    if number is not None:
        late = [rank for rank, member in members.items() if member.last == lowest]
        return _behind(group, members, number, late)
    if waits:
        number = min(waits.values())
        if len(members) == 1:
            text = f"{rank_names(members)} waits in {_call(group, number, members)}; no other rank "
            return Difference("unknown", (), number, f"{text}has a record of it")
        inside = [rank for rank, member in members.items() if member.waits_in(number)]
        passed = rank_names(members.keys() - inside, "has", "have")
        text = f"{rank_names(inside, 'waits', 'wait')} in {_call(group, number, members)}"
        text += f", which {passed} passed" if len(inside) < len(members) else ", and none is behind"
        return Difference("same", (), number, text)
    if all(member.last == lowest for member in members.values()):
        text = f"all ranks have completed collective {lowest:,}{_of_group(group)}"
    else:
        ends = ", ".join(f"rank {rank} {m.last:,}" for rank, m in sorted(members.items())[:8])
        text = f"no rank waits in a collective; last collective{_of_group(group)}: {ends}"
    return Difference("same", (), None, text)


def _behind(group: str, members: _Members, number: int, late: Iterable[int]) -> Difference:
    ranks = tuple(sorted(late))
    waiting = [rank for rank, member in members.items() if member.waits_in(number)]
    text = f"{rank_names(ranks, 'has', 'have')} not called {_call(group, number, members)}"
    text += f", in which {rank_names(waiting, 'waits', 'wait')}"
    last = members[ranks[0]].last
    if inside := [rank for rank in ranks if members[rank].waits_in(last)]:
        call = _call(group, last, members)
        text += f"; {rank_names(inside, 'still waits', 'still wait')} in {call}"
    return Difference("behind", ranks, number, text, inside=len(inside) == len(ranks))


def _groups(records: Mapping[int, FlightRecord]) -> dict[str, dict[int, _Member]]:
    """Returns the members of each group, the group with the most records first.

    A rank whose record has no collective belongs to the group of all ranks.
    """
    names = sorted({group for record in records.values() for group in record.last_enqueued})
    groups = {
        group: {
            rank: _Member(record, group) for rank, record in sorted(records.items())
            if group in record.last_enqueued
            or (group.endswith(DEFAULT_GROUP) and not record.last_enqueued)
        } for group in names
    }  # fmt: skip
    return dict(sorted(groups.items(), key=lambda each: -len(each[1])))


def _settled(groups: Mapping[str, _Members], is_complete: bool) -> Difference:
    """Returns the difference that explains the differences in the other groups.

    The first choice is a mismatch in a group, or the ranks that are behind in one group and wait in
    no other. If each rank that is behind waits in another group, the ranks wait for each other.
    This is usually a mismatch, and `ranks` are those that wait alone in a group, or () if there are
    many. Otherwise, returns the difference of a group in which ranks wait, or else of any group.
    """
    circular: list[str] = []
    found = {group: _difference(group, members) for group, members in groups.items()}
    for group, each in found.items():
        if each.kind == "mismatch":
            return each
        if each.kind == "behind":
            elsewhere = [members.items() for other, members in groups.items() if other != group]
            waiting = {rank for items in elsewhere for rank, m in items if m.waits is not None}
            if late := set(each.ranks) - waiting:
                return _behind(group, groups[group], each.number or 0, late)
            circular.append(each.text)
    waits = [each for each in found.values() if each.number is not None]
    stuck = [each for each in waits if each.kind == "same"]
    alone = [each for each in waits if each.kind == "unknown"]
    if circular and not stuck and (is_complete or not alone):
        single = tuple(sorted({rank for group, each in found.items() if each in alone
                               for rank in groups[group]}))  # fmt: skip
        few = single if 2 * len(single) < max(map(len, groups.values())) else ()
        texts = [*circular[:4], *(each.text for each in alone[:4])]
        return Difference("mismatch", few, None, "; ".join(texts))
    return next(iter(stuck or alone or found.values()))


def compare(records: Mapping[int, FlightRecord], world: Sequence[int]) -> Difference:
    """Returns the result of comparing the records of the ranks in `world`."""
    known = {rank: record for rank, record in records.items() if rank in world}
    absent = [rank for rank in world if rank not in known]
    groups = _groups(known)
    found = Difference("unknown", (), None, "fewer than two ranks have a record of the same group")
    if any(len(members) > 1 for members in groups.values()):
        found = _settled(groups, not absent)
    text = found.text.replace("all ranks have", rank_names(known, "has", "have"))
    return replace(found, text=f"{text}; no record of {rank_names(absent)}") if absent else found
