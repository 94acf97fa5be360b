"""Collective flight records: what torch writes, hostile files, and the comparison of ranks.

The files in `flight/` have the documents that torch 2.13 with gloo wrote, by rank; fields that
nothing reads are left out. Each file is from a program of three ranks; its name is that of a case.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.sources import flight
from console.sources.flight import Collective, FlightRecord

ROOT = Path(__file__).parents[3]
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


def test_ranks_in_the_same_collective_are_not_behind():
    stuck = {rank: record(rank, call(1), call(2, done=False)) for rank in WORLD}
    found = flight.compare(stuck, WORLD)
    assert (found.kind, found.ranks, found.number) == ("same", (), 2)
    del stuck[2]
    found = flight.compare(stuck, WORLD)
    assert (found.kind, found.ranks) == ("same", ())
    assert found.text.endswith("no record of rank 2")


def test_a_rank_that_waits_in_another_group_is_not_the_one_behind():
    """Ranks 2 and 3 are late for the group of all, but rank 2 only waits for rank 3."""
    pair = "7 pipe"
    stuck = {
        0: record(0, call(1), call(2, done=False)), 1: record(1, call(1), call(2, done=False)),
        2: record(2, call(1), call(1, group=pair), call(2, group=pair, done=False)),
        3: record(3, call(1), call(1, group=pair)),
    }  # fmt: skip
    assert flight.compare(stuck, range(4)).ranks == (3,)
    del stuck[3]
    found = flight.compare(stuck, range(4))
    assert (found.kind, found.ranks) == ("unknown", ())
    assert found.text == (
        'rank 2 waits in all_reduce 2 ([8] float32) of group "nccl 7 pipe"; no other rank '
        "has a record of it; no record of rank 3"
    )


def test_ranks_that_wait_for_each_other_in_two_groups_are_a_mismatch():
    stuck = {
        0: record(0, call(1, group="1 a", done=False)), 1: record(1, call(1, group="2 b")),
    }  # fmt: skip
    stuck[0] = record(
        0, call(1, group="2 b"), call(1, group="1 a"), call(2, group="1 a", done=False)
    )
    stuck[1] = record(
        1, call(1, group="1 a"), call(1, group="2 b"), call(2, group="2 b", done=False)
    )
    found = flight.compare(stuck, (0, 1))
    assert (found.kind, found.ranks) == ("mismatch", ())
    assert found.text.count("has not called") == 2


def test_a_queue_of_unfinished_collectives_is_compared_at_its_first():
    """NCCL calls do not wait for the device, so a longer queue does not show more progress."""
    ahead = record(0, call(1), *(call(number, done=False) for number in range(2, 9)))
    late = record(1, call(1), call(2, done=False))
    assert flight.compare({0: ahead, 1: late}, (0, 1)).kind == "same"
    found = flight.compare({0: ahead, 1: record(1, call(1))}, (0, 1))
    assert (found.kind, found.ranks, found.number) == ("behind", (1,), 2)


def test_a_rank_that_still_waits_in_a_call_that_all_have_made_is_told_apart():
    """Packets may be lost: rank 1 still waits in a call that rank 0 has completed."""
    ahead = record(0, call(1), call(2, "all_gather"), call(3, done=False))
    inside = record(1, call(1), call(2, "all_gather", done=False))
    found = flight.compare({0: ahead, 1: inside}, (0, 1))
    assert (found.kind, found.ranks, found.inside) == ("behind", (1,), True)
    assert not flight.compare(
        {0: ahead, 1: record(1, call(1), call(2, "all_gather"))}, WORLD
    ).inside


def stepping(rank: int, *last: str, steps: int = 4) -> FlightRecord:
    """Returns the record of a rank with `steps` steps of three calls, and then the calls `last`."""
    usual = ["all_reduce", "all_gather", "barrier"] * steps + ["all_reduce"]
    ops = [*usual, *last]
    calls = [call(n, op, n < len(usual) or op != last[-1]) for n, op in enumerate(ops, 1)]
    return record(rank, *calls)


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
    two = {0: stepping(0, others), 1: stepping(1, odd)}
    found = flight.compare(two, (0, 1))
    assert (found.kind, found.ranks, found.confirmed) == ("mismatch", ranks, confirmed)
    assert found.text.endswith("rank 1 does not make the usual call here") == (ranks == (1,))
    young = {0: stepping(0, others, steps=1), 1: stepping(1, odd, steps=1)}
    assert flight.compare(young, (0, 1)).ranks == ()


def test_a_call_that_came_only_now_and_then_is_as_usual_as_the_other():
    """In the past, both calls followed an all_gather: the barrier came after every second step."""
    ops = ["all_reduce", "all_gather", "all_reduce", "all_gather", "barrier"] * 2
    calls = [call(n, op) for n, op in enumerate([*ops, "all_reduce", "all_gather"], 1)]
    two = {0: record(0, *calls, call(13, "barrier", done=False)),
           1: record(1, *calls, call(13, "all_reduce", done=False))}  # fmt: skip
    found = flight.compare(two, (0, 1))
    assert (found.kind, found.ranks, found.confirmed) == ("mismatch", (), False)


def test_of_two_usual_calls_the_one_that_came_far_less_often_is_named_without_confirmation():
    """The data of rank 0 have ended, so rank 0 makes the call that follows the steps."""
    ops = ["all_reduce", "all_gather"] * 4 + ["barrier", *["all_reduce", "all_gather"] * 3]
    calls = [call(n, op) for n, op in enumerate(ops, 1)]
    two = {0: record(0, *calls, call(16, "barrier", done=False)),
           1: record(1, *calls, call(16, "all_reduce", done=False))}  # fmt: skip
    found = flight.compare(two, (0, 1))
    assert (found.kind, found.ranks, found.confirmed) == ("mismatch", (0,), False)
    three = flight.compare(two | {2: replace(two[1], rank=2)}, WORLD)
    assert (three.ranks, three.confirmed) == ((0,), False)  # a rare call may be right


def test_an_all_gather_of_gloo_needs_equal_sizes():
    """Rank 2 has no elements and passes the all_gather; the other ranks still wait in it."""

    def three(backend: str):
        group = f"{backend} 0 default_pg"
        usual = [Collective(group, 1, "all_gather", "[4] float32", False)]
        empty = [Collective(group, 1, "all_gather", "[0] float32", True),
                 Collective(group, 2, "all_gather", "[1] float32", False)]  # fmt: skip
        found = {rank: record(rank, *(empty if rank == 2 else usual)) for rank in WORLD}
        return flight.compare(found, WORLD)

    assert (three("gloo").kind, three("gloo").ranks) == ("mismatch", (2,))
    assert three("nccl").kind == "behind"


def made(number: int, op: str, outputs: list[list[int]], done: bool) -> dict[str, Any]:
    return {
        "collective_seq_id": number, "profiling_name": f"gloo:{op}", "retired": done,
        "process_group": ["0", "default_pg"], "input_sizes": [[1]], "input_dtypes": ["Float"],
        "output_sizes": outputs,
    }  # fmt: skip


def test_two_roots_of_one_gather_are_a_mismatch():
    """Ranks 0 and 2 are roots and wait in the gather; ranks 1 and 3 have passed it."""
    found = {}
    for rank in range(4):
        root = rank in (0, 2)
        entries = [made(1, "gather", [[4, 1]] if root else [], not root)]
        entries += [] if root else [made(2, "all_gather", [[4, 1]], False)]
        document = json.dumps({"version": "2", "entries": entries}).encode()
        found[rank] = flight.parse(document, rank, 1.0, "")
    found = flight.compare(found, range(4))
    assert (found.kind, found.ranks, found.confirmed) == ("mismatch", (2,), False)
    assert found.text == "ranks 0, 2 are each the root of gather 1 ([1] float32)"


def test_a_rank_that_waits_alone_in_its_group_is_the_minority():
    all_ranks, own = "0 default_pg", "1 undefined"
    found = {rank: record(rank, call(1, group=all_ranks), call(2, done=False, group=all_ranks))
             for rank in (0, 2, 3)}  # fmt: skip
    found[1] = record(1, call(1, group=all_ranks), call(1, done=False, group=own))
    known = flight.compare(found, range(4))
    assert (known.kind, known.ranks, known.number) == ("mismatch", (1,), None)
    assert "rank 1 waits in all_reduce 1" in known.text
    assert flight.compare(found, range(5)).kind != "mismatch"  # rank 4 may be in group 1


@pytest.mark.parametrize(
    ("usual", "few", "confirmed"),
    [("all_gather", "reduce", True), ("reduce", "all_gather", False)],
)
def test_a_minority_is_confirmed_where_it_leaves_the_usual_sequence(usual, few, confirmed):
    """If the majority makes the unusual call, the minority is named without confirmation."""
    four = {0: stepping(0, few)} | {rank: stepping(rank, usual) for rank in (1, 2, 3)}
    found = flight.compare(four, range(4))
    assert (found.ranks, found.confirmed) == ((0,), confirmed)


def test_shapes_may_differ_where_the_number_of_elements_agrees_or_the_operation_allows_it():
    same = {
        0: record(0, call(1, sizes="[16] float32")),
        1: record(1, call(1, sizes="[4, 4] float32")),
    }
    assert flight.compare(same, (0, 1)).kind == "same"
    gather = {r: record(r, call(1, "gather", sizes=f"[{r + 1}] float32")) for r in (0, 1)}
    assert flight.compare(gather, (0, 1)).kind == "same"


def test_a_group_that_begins_again_is_compared_from_its_new_beginning():
    again = record(0, call(1, "barrier"), call(2, "barrier"), call(1), call(2, done=False))
    found = flight.compare({0: again, 1: record(1, call(1))}, (0, 1))
    assert (found.kind, found.ranks, found.number) == ("behind", (1,), 2)


def test_operations_have_the_names_and_sizes_that_torch_records():
    recorded = (*records("ddp_gather_object")[1].collectives, *records("skipped")[1].collectives)
    assert {(each.op, each.sizes) for each in recorded} == {
        ("all_reduce", "[4160] float32"), ("all_reduce", "[8] float32"), ("barrier", ""),
        ("all_gather", "[1] int64"), ("gather", "[24] uint8"),
        ("broadcast", "[5] int32"), ("broadcast", "[2] int32"),
    }  # fmt: skip


DUMPED = """
import os, signal, sys, time, types
from pathlib import Path
from trainers.contract.dumps import StackDumper
recorder = types.SimpleNamespace(_dump_fr_trace_json=lambda *_: sys.argv[2].encode())
sys.modules["torch"] = types.SimpleNamespace(
    _C=types.SimpleNamespace(_distributed_c10d=recorder)
)
run = Path(sys.argv[1])
dumper = StackDumper(run, None, 0, lambda work: (time.sleep(1), work()))
dumper.install()
os.kill(os.getpid(), signal.SIGUSR1)
while not list(run.glob("flight_rank0_*.json")):
    time.sleep(0.01)
dumper.uninstall()
"""


def test_a_record_has_the_time_of_the_dump_and_not_of_its_copy(tmp_path):
    """The record is copied one second after the dump."""
    document = json.dumps({"version": "2.10", "entries": [entry(profiling_name="gloo:barrier")]})
    subprocess.run(
        [sys.executable, "-c", DUMPED, str(tmp_path), document], check=True, timeout=300, cwd=ROOT
    )
    found = flight.latest(tmp_path, (0,))[0]
    assert set(found.last_enqueued) == {"gloo 0 default_pg"}
    assert Path(found.path).stat().st_mtime - found.ts > 0.9


def entry(**changes: Any) -> dict[str, Any]:
    return {
        "collective_seq_id": 4, "is_p2p": False, "process_group": ["0", "default_pg"],
        "profiling_name": "nccl:all_reduce", "input_sizes": [[4, 2], [8]],
        "input_dtypes": ["BFloat16", "Long"], "retired": False, "state": "started",
    } | changes  # fmt: skip


def parsed(*entries: dict[str, Any]) -> tuple[Collective, ...]:
    data = json.dumps({"version": "2.10", "entries": entries}).encode()
    found = flight.parse(data, 0, 1.0, "")
    assert found is not None
    return found.collectives


def test_an_nccl_entry_is_done_when_its_state_says_so():
    assert parsed(entry())[0] == Collective(
        "nccl 0 default_pg", 4, "all_reduce", "[4, 2], [8] bfloat16 int64", False
    )
    assert parsed(entry(state="completed"))[0].done
    assert not parsed(entry(retired=True))[0].done, "the call has timed out"
    assert parsed(entry(retired=True, profiling_name="gloo:all_reduce", state="scheduled"))[0].done


def test_point_to_point_operations_are_left_out():
    assert not parsed(entry(is_p2p=True), entry(profiling_name="nccl:send 0->1"))


def test_the_newest_readable_file_of_a_rank_is_taken(tmp_path):
    good = json.dumps({"version": "2.10", "entries": [entry()]})
    for name in ("flight_rank0_1000.json", "flight_rank0_2000.json", "flight_rank1_1000.json"):
        (tmp_path / name).write_text(good)
    (tmp_path / "flight_rank0_3000.json").write_text("{")
    (tmp_path / "flight_rank0_4000.json").mkdir()
    (tmp_path / "flight_rank0_5000.json").symlink_to(tmp_path / "flight_rank0_1000.json")
    (tmp_path / "flight_rank7_1.json").write_text(good)
    os.mkfifo(tmp_path / "flight_rank0_6000.json")
    found = flight.latest(tmp_path, WORLD)
    assert {rank: each.ts for rank, each in found.items()} == {0: 2.0, 1: 1.0}
    assert found[0].path == str(tmp_path / "flight_rank0_2000.json")
    assert set(flight.latest(tmp_path, WORLD, 1.5)) == {0}
    assert flight.latest(tmp_path / "missing", WORLD) == {}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text()
    | st.sampled_from(["5", "-1", "9" * 30, 10**30]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)  # fmt: skip
ENTRY = st.dictionaries(st.sampled_from(sorted(entry())), JSON).map(lambda each: entry() | each)


DOCUMENT = st.lists(ENTRY, max_size=4).map(lambda found: {"version": 1, "entries": found})
ANY_DOCUMENT = JSON.map(lambda value: {"version": 1, "entries": value, "recorders": value})


@given(st.binary() | (DOCUMENT | ANY_DOCUMENT).map(lambda each: json.dumps(each).encode()))
def test_any_bytes_are_a_record_or_none(data):
    found = flight.parse(data, 0, 1.0, "")
    if found is not None:
        assert all(0 <= each.number < 1 << 63 for each in found.collectives)
        assert flight.compare({0: found, 1: found}, (0, 1)).kind in ("same", "unknown")


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"[" * 100_000, b'{"error":"RuntimeError"}'])
def test_another_document_is_no_record(data):
    assert flight.parse(data, 0, 1.0, "") is None


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
    calls = [call(number) for number in range(1, flight.MAX_COLLECTIVES + 1)]
    known = {rank: record(rank, *calls) for rank in range(64)}
    begin = time.monotonic()
    assert flight.compare(known, range(64)).kind == "same"
    assert time.monotonic() - begin < 60


def test_the_record_that_nccl_writes_shows_the_rank_that_is_behind(tmp_path):
    """Entries as torch 2.11 wrote them on an H100; the last collective has not ended."""

    def of_nccl(number, state):
        return {
            "collective_seq_id": number, "input_dtypes": ["Float"], "input_sizes": [[1048576]],
            "is_p2p": False, "op_id": number, "output_dtypes": ["Float"],
            "output_sizes": [[1048576]], "p2p_seq_id": 0, "pg_id": 0,
            "process_group": ["0", "default_pg"], "profiling_name": "nccl:all_reduce",
            "record_id": number - 1, "retired": False, "state": state, "thread_name": "python3",
            "time_discovered_completed_ns": 0, "timeout_ms": 600000,
        }  # fmt: skip

    for rank, last in ((0, 51), (1, 50)):
        calls = [of_nccl(n, "completed" if n < 51 else "scheduled") for n in range(40, last + 1)]
        path = tmp_path / f"flight_rank{rank}_1000.json"
        path.write_text(json.dumps({"version": "2.10", "entries": calls}))
    found = flight.compare(flight.latest(tmp_path, (0, 1)), (0, 1))
    assert (found.kind, found.ranks, found.number) == ("behind", (1,), 51)
    assert "all_reduce 51" in found.text
