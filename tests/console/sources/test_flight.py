"""Flight records: the files and entries that torch writes, and other bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.sources import flight
from console.sources.flight import Collective

ROOT = Path(__file__).parents[3]


def test_two_roots_of_one_gather_are_a_mismatch():
    """Ranks 0 and 2 are roots and wait in the gather; ranks 1 and 3 have passed it."""
    found = {}
    for rank in range(4):
        root = rank in (0, 2)
        usual = {"input_sizes": [[1]], "input_dtypes": ["Float"], "output_sizes": [[4, 1]]}
        entries = [
            entry(
                **usual
                | {
                    "collective_seq_id": 1,
                    "profiling_name": "gloo:gather",
                    "retired": not root,
                    "output_sizes": [[4, 1]] * root,
                }
            )
        ]
        entries += [] if root else [entry(**usual, profiling_name="gloo:all_gather")]
        document = json.dumps({"version": "2", "entries": entries}).encode()
        found[rank] = flight.parse(document, rank, 1.0, "")
    found = flight.compare(found, range(4))
    assert (found.kind, found.ranks, found.confirmed) == ("mismatch", (2,), False)
    assert found.text == "ranks 0, 2 are each the root of gather 1 ([1] float32)"


DUMPED = """
import os, signal, sys, time, types
from pathlib import Path
from trainers.contract.dumps import StackDumper
recorder = types.SimpleNamespace(_dump_fr_trace_json=lambda *_: sys.argv[2].encode())
sys.modules["torch"] = types.SimpleNamespace(
    _C=types.SimpleNamespace(_distributed_c10d=recorder)
)
run, saved = Path(sys.argv[1]), []
delay_s, count = float(sys.argv[3]), int(sys.argv[4])
later = lambda work: (time.sleep(delay_s), work(), saved.append(work))
dumper = StackDumper(run, None, 0, later)
dumper.install()
for number in range(count):
    os.kill(os.getpid(), signal.SIGUSR1)
    while len(saved) <= number:
        time.sleep(0.01)
dumper.uninstall()
"""


def dump(run: Path, delay_s: float, count: int) -> None:
    """Makes a process dump; each dump is saved `delay_s` after it was written."""
    document = json.dumps({"version": "2.10", "entries": [entry(profiling_name="gloo:barrier")]})
    words = [sys.executable, "-c", DUMPED, run, document, delay_s, count]
    subprocess.run([*map(str, words)], check=True, timeout=300, cwd=ROOT)


def test_a_record_has_the_time_of_the_dump_and_not_of_its_copy(tmp_path):
    """The record is copied one second after the dump."""
    dump(tmp_path, 1.0, 1)
    found = flight.latest(tmp_path, (0,))[0]
    assert set(found.last_enqueued) == {"gloo 0 default_pg"}
    assert Path(found.path).stat().st_mtime - found.ts > 0.9


def test_a_record_is_kept_after_the_clock_was_set_back(tmp_path):
    ahead = [
        tmp_path / f"flight_rank0_{time.time_ns() // 10**6 + 10**7 + i}.json" for i in range(8)
    ]
    for path in ahead:
        path.touch()
    dump(tmp_path, 0.01, 3)
    kept = set(tmp_path.glob("flight_rank0_*.json"))
    assert (len(kept), kept & set(ahead)) == (8, set(ahead[3:]))


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
    found = flight.latest(tmp_path, range(3))
    assert {rank: each.ts for rank, each in found.items()} == {0: 2.0, 1: 1.0}
    assert found[0].path == str(tmp_path / "flight_rank0_2000.json")
    assert set(flight.latest(tmp_path, range(3), 1.5)) == {0}
    assert flight.latest(tmp_path / "missing", range(3)) == {}


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


def test_the_record_that_nccl_writes_shows_the_rank_that_is_behind(tmp_path):
    """Entries as torch 2.11 wrote them on an H100; the last collective has not ended."""

    def of_nccl(number, state):
        return entry(
            collective_seq_id=number, input_dtypes=["Float"], input_sizes=[[1048576]], op_id=number,
            output_dtypes=["Float"], output_sizes=[[1048576]], p2p_seq_id=0, pg_id=0,
            record_id=number - 1, state=state, thread_name="python3",
            time_discovered_completed_ns=0, timeout_ms=600000,
        )  # fmt: skip

    for rank, last in ((0, 51), (1, 50)):
        calls = [of_nccl(n, "completed" if n < 51 else "scheduled") for n in range(40, last + 1)]
        path = tmp_path / f"flight_rank{rank}_1000.json"
        path.write_text(json.dumps({"version": "2.10", "entries": calls}))
    found = flight.compare(flight.latest(tmp_path, (0, 1)), (0, 1))
    assert (found.kind, found.ranks, found.number) == ("behind", (1,), 51)
    assert "all_reduce 51" in found.text
