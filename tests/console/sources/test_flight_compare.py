"""The comparison of the flight records of ranks: which rank differs, in which call.

The files in `flight/` have the documents that torch 2.13 with gloo wrote, by rank; fields that
nothing reads are left out. Each file is from a program of three ranks.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.sources import flight
from console.sources.flight import Collective, FlightRecord

RECORDED = Path(__file__).parent / "flight"
WORLD = (0, 1, 2)


def documents(name: str) -> dict[int, dict[str, Any]]:
    return {int(rank): each for rank, each in json.loads((RECORDED / name).read_text()).items()}


def records(name: str) -> dict[int, FlightRecord]:
    found = {
        rank: flight.parse(json.dumps(each).encode(), rank, 1.0, name)
        for rank, each in documents(f"{name}.json").items()
    }
    return {rank: record for rank, record in found.items() if record is not None}


def record(rank: int, *calls: Collective) -> FlightRecord:
    return FlightRecord(rank, 1.0, "", {each.group: each.number for each in calls}, calls)


def call(number: int, op: str = "all_reduce", done: bool = True, group: str = "0 default_pg",
         sizes: str = "[8] float32") -> Collective:  # fmt: skip
    return Collective(f"nccl {group}", number, op, sizes, done)


@pytest.mark.parametrize(
    ("name", "kind", "ranks", "number", "text"),
    [
        ("behind", "behind", (1,), 5,
         "rank 1 has not called all_reduce 5 ([64] float32), in which ranks 0, 2 wait"),
        ("not_joined", "behind", (1,), 1,
         "rank 1 has not called all_reduce 1 ([8] float32), in which ranks 0, 2 wait"),
        ("ddp_behind", "behind", (1,), 14,
         "rank 1 has not called all_reduce 14 ([4160] float32), in which ranks 0, 2 wait"),
        ("ddp_gather_object", "behind", (1,), 22,
         "rank 1 has not called all_gather 22 ([1] int64), in which ranks 0, 2 wait"),
        ("groups", "behind", (2,), 4,
         "rank 2 has not called all_reduce 4 ([24] float32), in which ranks 0-1 wait"),
        ("send_recv", "behind", (2,), 4,
         "rank 2 has not called all_reduce 4 ([9] float32), in which ranks 0-1 wait"),
        ("skipped", "mismatch", (1,), 8,
         "collective 8: ranks 0, 2 call all_reduce [8] float32, rank 1 barrier"),
        ("extra", "mismatch", (0,), 4,
         "collective 4: rank 0 calls barrier, ranks 1-2 all_reduce [8] float32"),
        ("swapped", "mismatch", (1,), 4,
         "collective 4: ranks 0, 2 call all_reduce [8] float32, rank 1 barrier"),
        ("size", "mismatch", (), 4,
         "collective 4: rank 0 calls all_reduce [8] float32, rank 2 all_reduce [16] float32; "
         "no record of rank 1"),
        ("done", "same", (), None, "all ranks have completed collective 3"),
    ],
)  # fmt: skip
def test_a_recorded_standstill_is_explained(name, kind, ranks, number, text):
    found = flight.compare(records(name), WORLD)
    assert (found.kind, found.ranks, found.number, found.text) == (kind, ranks, number, text)


def compared(*calls: tuple[Collective, ...], world: int = 0) -> flight.Difference:
    """Compares ranks that made these calls; further ranks of `world` have no record."""
    known = {rank: record(rank, *found) for rank, found in enumerate(calls)}
    return flight.compare(known, range(world or len(calls)))


WAITS, PASSED = (call(1), call(2, done=False)), (call(1), call(2))
PAIR, ALONE = "7 pipe", "1 undefined"
AGAIN = (call(1, "barrier"), call(2, "barrier"), *WAITS)
QUEUE = (call(1), *(call(number, done=False) for number in range(2, 9)))
LATE_PAIR = (call(1), call(1, group=PAIR))
STUCK = {
    "all ranks in one call": ((WAITS,) * 3, 3, "same", (), 2),
    "one of them without a record": ((WAITS,) * 2, 3, "same", (), 2),
    # ranks 2 and 3 are late for the group of all, but rank 2 only waits for rank 3
    "a rank that waits in another group": (
        (WAITS, WAITS, (*LATE_PAIR, call(2, group=PAIR, done=False)), LATE_PAIR), 4,
        "behind", (3,), 2,
    ),
    # NCCL calls do not wait for the device, so a longer queue does not show more progress
    "queues of another length": ((QUEUE, WAITS), 2, "same", (), 2),
    "a queue and a rank behind": ((QUEUE, (call(1),)), 2, "behind", (1,), 2),
    "a group that began again": ((AGAIN, (call(1),)), 2, "behind", (1,), 2),
    "another shape with as many elements": (
        ((call(1, sizes="[16] float32"),), (call(1, sizes="[4, 4] float32"),)), 2, "same", (), None,
    ),
    "a gather, which allows other sizes": (
        tuple((call(1, "gather", sizes=f"[{n}] float32"),) for n in (1, 2)), 2, "same", (), None,
    ),
    "a rank alone in its group": (
        (WAITS, (call(1), call(1, done=False, group=ALONE)), WAITS, WAITS), 4,
        "mismatch", (1,), None,
    ),
}  # fmt: skip
"""For each case: the calls of the ranks, the number of ranks, and the difference."""


@pytest.mark.parametrize("name", STUCK)
def test_the_rank_that_differs_is_named(name):
    calls, world, *expected = STUCK[name]
    found = compared(*calls, world=world)
    assert [found.kind, found.ranks, found.number] == expected, found
    assert found.text.endswith("no record of rank 2") is (len(calls) < world)


def test_a_rank_without_a_record_may_be_the_one_behind_or_in_a_group_of_its_own():
    calls, *_ = STUCK["a rank that waits in another group"]
    found = compared(*calls[:3], world=4)
    assert (found.kind, found.ranks) == ("unknown", ())
    assert found.text == (
        'rank 2 waits in all_reduce 2 ([8] float32) of group "nccl 7 pipe"; no other rank '
        "has a record of it; no record of rank 3"
    )
    calls, *_ = STUCK["a rank alone in its group"]
    assert "rank 1 waits in all_reduce 1" in compared(*calls).text
    assert compared(*calls, world=5).kind != "mismatch"


def test_ranks_that_wait_for_each_other_in_two_groups_are_a_mismatch():
    one, two = call(1, group="1 a"), call(1, group="2 b")
    found = compared((two, one, call(2, group="1 a", done=False)),
                     (one, two, call(2, group="2 b", done=False)))  # fmt: skip
    assert (found.kind, found.ranks) == ("mismatch", ())
    assert found.text.count("has not called") == 2


def test_a_rank_that_still_waits_in_a_call_that_all_have_made_is_told_apart():
    """Packets may be lost: rank 1 still waits in a call that rank 0 has completed."""
    found = compared((*PASSED, call(3, done=False)), WAITS)
    assert (found.kind, found.ranks, found.inside) == ("behind", (1,), True)
    assert not compared((*PASSED, call(3, done=False)), PASSED).inside


def stepping(last: str, steps: int = 4) -> tuple[Collective, ...]:
    """Returns `steps` steps of three calls, another call, and the unfinished call `last`."""
    usual = ["all_reduce", "all_gather", "barrier"] * steps + ["all_reduce"]
    return (*(call(n, op) for n, op in enumerate(usual, 1)), call(len(usual) + 1, last, False))


@pytest.mark.parametrize(
    ("others", "odd", "ranks", "confirmed"),
    [
        ("all_gather", "barrier", (1,), True),  # rank 1 skipped a call
        ("all_gather", "reduce", (1,), False),  # rank 1 made an extra call, or rank 0 skipped it
        ("barrier", "all_gather", (0,), True),
        ("reduce", "broadcast", (), False),
    ],
)
def test_the_rank_that_leaves_the_usual_sequence_calls_another_collective(
    others, odd, ranks, confirmed
):
    found = compared(stepping(others), stepping(odd))
    assert (found.kind, found.ranks, found.confirmed) == ("mismatch", ranks, confirmed)
    assert found.text.endswith("rank 1 does not make the usual call here") == (ranks == (1,))
    assert compared(stepping(others, steps=1), stepping(odd, steps=1)).ranks == ()


@pytest.mark.parametrize(
    ("past", "ranks"),
    [
        # the barrier came after every second step: after an all_gather, both calls are usual
        ((["all_reduce", "all_gather"] * 2 + ["barrier"]) * 2 + ["all_reduce", "all_gather"], ()),
        # the data of rank 0 have ended, so rank 0 makes the call that follows the steps
        (["all_reduce", "all_gather"] * 4 + ["barrier"] + ["all_reduce", "all_gather"] * 3, (0,)),
    ],
)
def test_of_two_usual_calls_the_far_rarer_one_is_named_without_confirmation(past, ranks):
    calls = [call(n, op) for n, op in enumerate(past, 1)]
    rare, usual = ((*calls, call(len(calls) + 1, op, done=False))
                   for op in ("barrier", "all_reduce"))  # fmt: skip
    found = compared(rare, usual)
    assert (found.kind, found.ranks, found.confirmed) == ("mismatch", ranks, False)
    three = compared(rare, usual, usual)
    assert (three.ranks, three.confirmed) == ((0,), False)  # a rare call may be right


def test_an_all_gather_of_gloo_needs_equal_sizes():
    """Rank 2 has no elements and passes the all_gather; the other ranks still wait in it."""

    def three(backend: str):
        group = f"{backend} 0 default_pg"
        usual = (Collective(group, 1, "all_gather", "[4] float32", False),)
        empty = (Collective(group, 1, "all_gather", "[0] float32", True),
                 Collective(group, 2, "all_gather", "[1] float32", False))  # fmt: skip
        return compared(usual, usual, empty)

    assert (three("gloo").kind, three("gloo").ranks) == ("mismatch", (2,))
    assert three("nccl").kind == "behind"


@pytest.mark.parametrize(
    ("usual", "few", "confirmed"), [("all_gather", "reduce", True), ("reduce", "all_gather", False)]
)
def test_a_minority_is_confirmed_where_it_leaves_the_usual_sequence(usual, few, confirmed):
    """If the majority makes the unusual call, the minority is named without confirmation."""
    found = compared(stepping(few), *[stepping(usual)] * 3)
    assert (found.ranks, found.confirmed) == ((0,), confirmed)


def test_operations_have_the_names_and_sizes_that_torch_records():
    recorded = (*records("ddp_gather_object")[1].collectives, *records("skipped")[1].collectives)
    assert {(each.op, each.sizes) for each in recorded} == {
        ("all_reduce", "[4160] float32"), ("all_reduce", "[8] float32"), ("barrier", ""),
        ("all_gather", "[1] int64"), ("gather", "[24] uint8"),
        ("broadcast", "[5] int32"), ("broadcast", "[2] int32"),
    }  # fmt: skip


CALL = st.builds(
    call, st.integers(0, 6), st.sampled_from(["all_reduce", "barrier"]), st.booleans(),
    st.sampled_from(["0 default_pg", "1 a", "2 b"]), st.sampled_from(["[8] float32", "[9] int64"]),
)  # fmt: skip


def says_the_truth(found: flight.Difference, known: dict[int, FlightRecord]) -> None:
    """Asserts that, in some group, no rank named as behind has made the call `number`.

    Another rank must wait in this call.
    """
    if found.kind != "behind":
        return
    assert found.number is not None
    groups = {group for each in known.values() for group in each.last_enqueued}
    assert any(
        all(known[rank].last_enqueued.get(group, 0) < found.number for rank in found.ranks)
        and any(
            each.number == found.number and not each.done and each.group == group
            for rank, other in known.items() if rank not in found.ranks
            for each in other.collectives
        )
        for group in groups
    )  # fmt: skip


@given(st.dictionaries(st.integers(0, 5), st.lists(CALL, max_size=8)))
def test_any_records_are_compared_without_a_false_statement(calls):
    known = {rank: record(rank, *found) for rank, found in calls.items()}
    found = flight.compare(known, range(6))
    assert set(found.ranks) <= set(known)
    says_the_truth(found, known)


@pytest.mark.parametrize("name", sorted(path.stem for path in RECORDED.glob("*.json")))
def test_fewer_records_make_no_statement_false_and_the_missing_rank_is_named(name):
    everything = records(name)
    for left_out in everything:
        known = {rank: each for rank, each in everything.items() if rank != left_out}
        found = flight.compare(known, WORLD)
        says_the_truth(found, known)
        assert re.search(rf"no record of .*{left_out}", found.text)


def test_the_records_of_many_ranks_are_compared_in_bounded_time():
    calls = tuple(call(number) for number in range(1, flight.MAX_COLLECTIVES + 1))
    begin = time.monotonic()
    assert compared(*[calls] * 64).kind == "same"
    assert time.monotonic() - begin < 60
