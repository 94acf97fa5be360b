"""Reading a record file with garbage: no error, and the skipped lines are counted."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from console.sources.record_files import RecordFiles
from console.sources.tail import Tail
from trainers.contract import heartbeat, jsonl

GOOD = {"v": 1, "run": "r", "attempt": 1, "ts": 1.5, "rank": 0, "step": 3, "msg": "progress"}


def drain(tail: Tail) -> list[dict]:
    records = []
    while True:
        fresh = tail.poll()
        records += fresh
        if not fresh and tail.offset >= tail.size_bytes:
            return records


@given(
    st.lists(
        st.one_of(
            st.just(jsonl.encode(GOOD)),
            st.binary(max_size=60).map(lambda b: b.replace(b"\n", b"") + b"\n"),
        ),
        max_size=30,
    ),
    st.lists(st.integers(1, 50), min_size=1, max_size=40),
)
@settings(max_examples=150)
def test_good_records_survive_among_garbage_in_any_portions(tmp_path_factory, lines, cuts):
    """Each good line is found once, also if a write ends within a line."""
    path = tmp_path_factory.mktemp("hb") / "f.jsonl"
    data = b"".join(lines)
    tail = Tail(path, heartbeat.accept)
    found = 0
    at = 0
    for cut in cuts:
        with path.open("ab") as stream:
            stream.write(data[at : at + cut])
        at += cut
        found += len(tail.poll())
    with path.open("ab") as stream:
        stream.write(data[at:])
    found += len(drain(tail))
    expected = sum(1 for line in lines if heartbeat.accept(jsonl.decode(line) or {}) is not None)
    assert found == expected
    assert tail.skipped == sum(1 for line in lines if line.strip()) - expected


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000,
        b'{"v":1,"rank":0,"step":1,"attempt":1,"ts":1e400,"msg":"x"',
        b'{"v":1e999}',
        b"\x00\x00\x00",
        b"\xff\xfe\x00{",
        b'"text"',
        b"12",
        b'{"v":1,"rank":"0","step":1,"attempt":1,"ts":1,"msg":"x"}',
        b'{"v":1,"rank":-1,"step":1,"attempt":1,"ts":1,"msg":"x"}',
        b'{"v":2,"rank":0,"step":1,"attempt":1,"ts":1,"msg":"x"}',
        b'{"v":1,"rank":1099511627776,"step":1,"attempt":1,"ts":1,"msg":"x"}',
        b'{"v":1,"rank":0,"step":4611686018427387904,"attempt":1,"ts":1,"msg":"x"}',
        b'{"v":1,"rank":0,"step":1,"attempt":1152921504606846976,"ts":1,"msg":"x"}',
        b'{"v":1,"rank":0,"step":' + b"9" * 5000 + b',"attempt":1,"ts":1,"msg":"x"}',
    ],
)
def test_hostile_lines_are_counted_and_the_next_good_one_is_read(tmp_path, line):
    path = tmp_path / "f.jsonl"
    path.write_bytes(line + b"\n" + jsonl.encode(GOOD))
    tail = Tail(path, heartbeat.accept)
    assert [record["step"] for record in drain(tail)] == [3]
    assert tail.skipped == 1


def test_an_endless_line_costs_bounded_memory_and_is_counted_once(tmp_path):
    path = tmp_path / "f.jsonl"
    with path.open("wb") as stream:
        for _ in range(20):
            stream.write(b"x" * (1 << 20))
        stream.write(b"\n" + jsonl.encode(GOOD))
    tail = Tail(path, heartbeat.accept)
    assert [record["step"] for record in drain(tail)] == [3]
    assert tail.skipped == 1
    assert len(tail._carry) <= jsonl.MAX_LINE_BYTES


def test_truncation_and_replacement_start_the_file_again(tmp_path):
    path = tmp_path / "f.jsonl"
    path.write_bytes(jsonl.encode(GOOD) * 3)
    tail = Tail(path, heartbeat.accept)
    assert len(drain(tail)) == 3
    path.write_bytes(jsonl.encode(GOOD))
    assert len(drain(tail)) == 1
    other = tmp_path / "other"
    other.write_bytes(jsonl.encode(GOOD) * 2)
    other.replace(path)
    assert len(drain(tail)) == 2


@pytest.mark.parametrize("kind", ["fifo", "directory", "link", "missing"])
def test_what_is_not_a_regular_file_is_not_opened(tmp_path, kind):
    path = tmp_path / "f.jsonl"
    target = tmp_path / "target"
    target.write_bytes(jsonl.encode(GOOD))
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(target)
    assert Tail(path, heartbeat.accept).poll() == []


@pytest.mark.parametrize("recent", [None, 1 << 18])
def test_a_hole_costs_nothing_and_the_record_behind_it_is_read(tmp_path, recent):
    path = tmp_path / "f.jsonl"
    path.write_bytes(jsonl.encode(GOOD) + b'{"half')
    os.truncate(path, 1 << 40)
    tail = Tail(path, heartbeat.accept, recent)
    before = len(drain(tail))
    assert (before, tail.size_bytes - tail.offset) == (0 if recent else 1, 0)
    with path.open("ab") as stream:
        stream.write(jsonl.encode(GOOD))
    assert [record["step"] for record in drain(tail)] == [3]
    assert tail.taken_bytes < 1 << 21
    path.write_bytes(bytes(3 << 18) + jsonl.encode(GOOD))
    zeros = drain(Tail(path, heartbeat.accept))
    assert [record["step"] for record in zeros] == [3], "the file has zeros and no hole"


def test_a_directory_that_cannot_be_listed_is_not_one_without_records(tmp_path):
    run = tmp_path / "run"
    files = RecordFiles(run)
    assert (list(files.poll(1 << 20)), files.unread) == ([], "")
    run.symlink_to(run)
    assert (list(files.poll(1 << 20)), files.unread) == ([], "the run directory cannot be listed")
