"""Samples are moved into numbered, compressed parts, which charts read in order."""

from __future__ import annotations

import gzip
import json
import os
import shutil

import pytest

from console.sources import record_files
from console.sources.run_records import Reads, RunRecords
from console.supervisor.rotation import divide
from console.supervisor.rundir_io import Directory
from tests.mounts import tmpfs
from trainers.contract import jsonl, rundir

COUNT, PART_BYTES = 3000, 64 << 10


def sample(number: int) -> dict[str, object]:
    ranks = [{"rank": 0, "rss_mib": float(number), "state": "R", "pad": "x" * 80}]
    return {"v": 1, "ts": 1e9 + number, "host": "here", "attempt": 1, "ranks": ranks}


def fill(path, count: int = COUNT) -> None:
    """Writes records as a supervisor does, and calls `divide` after each 100 records."""
    directory = Directory()
    for number in range(count):
        directory.put(path, jsonl.encode(sample(number)))
        if number % 100 == 99:
            directory.call(lambda: divide(directory, path, PART_BYTES))
    assert directory.close()
    assert not directory.replaced


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    run = tmp_path_factory.mktemp("run")
    fill(rundir.samples(run, "here"))
    return run


def lines_of(run) -> list[bytes]:
    path = rundir.samples(run, "here")
    older = [gzip.decompress(part.read_bytes()) for _, part in record_files.parts(path)]
    return b"".join([*older, path.read_bytes()]).splitlines()


def test_parts_and_the_newest_file_hold_every_record_in_order(filled):
    numbers = [json.loads(line)["ts"] - 1e9 for line in lines_of(filled)]
    assert numbers == list(range(COUNT))
    parts = record_files.parts(rundir.samples(filled, "here"))
    assert [number for number, _ in parts] == list(range(1, len(parts) + 1))
    assert sum(p.stat().st_size for _, p in parts) < COUNT * len(jsonl.encode(sample(1))) / 4


def read(run, reads: Reads = "all") -> tuple[RunRecords, list[float]]:
    records = RunRecords(run, reads)
    for _ in range(COUNT):
        records.poll(1, 1, 100_000)
        if not records.files.behind_bytes:
            break
    return records, [value for _, value in records.reducer.series.points("rss_mib:0")]


def test_charts_begin_at_the_first_sample_and_a_look_reads_only_the_newest_file(filled):
    records, values = read(filled)
    assert (records.files.skipped, records.files.has_all_records) == (0, True)
    assert (min(values), max(values)) == (0.0, COUNT - 1.0)
    assert records.samples["here"]["ts"] == 1e9 + COUNT - 1
    newest, _ = read(filled, "recent")
    assert newest.samples["here"]["ts"] == 1e9 + COUNT - 1


def test_a_compressed_part_is_on_disk_before_the_plain_one_goes(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size))
    fill(rundir.samples(tmp_path, "here"))
    whole = [
        part.stat().st_size for _, part in record_files.parts(rundir.samples(tmp_path, "here"))
    ]
    assert whole
    assert synced == whole


@pytest.mark.parametrize("damage", [b"", b"garbage", b"\x1f\x8b" + bytes(500)])
def test_a_damaged_part_costs_its_own_records(filled, tmp_path, damage):
    run = tmp_path / "run"
    shutil.copytree(filled, run)
    part = record_files.parts(rundir.samples(run, "here"))[1][1]
    part.write_bytes(damage)
    records, values = read(run)
    assert records.files.skipped <= 1
    assert (min(values), max(values)) == (0.0, COUNT - 1.0)


def test_a_part_that_unpacks_to_more_than_memory_is_read_in_pieces(tmp_path):
    run = tmp_path
    bomb = record_files.part(rundir.samples(run, "here"), 1)
    with gzip.open(f"{bomb}{record_files.GZIP}", "wb") as packed:
        for _ in range(64):
            packed.write(b"x" * (1 << 20))
    rundir.samples(run, "here").write_bytes(jsonl.encode(sample(7)))
    records, values = read(run)
    assert (values, records.files.skipped) == ([7.0], 1)


def test_a_full_disk_leaves_the_plain_part(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    with tmpfs(tmp_path, 1) as mount:
        path = rundir.samples(mount, "here")
        data = os.urandom(PART_BYTES)
        path.write_bytes(data)
        room = os.statvfs(mount)
        filler = mount / "filler"
        filler.write_bytes(bytes((room.f_bavail - 2) * room.f_frsize))
        directory = Directory()
        with pytest.raises(OSError, match="No space"):
            divide(directory, path, PART_BYTES)
        assert directory.close()
        ((_, part),) = record_files.parts(path)
        assert part.read_bytes() == data
        assert sorted(os.listdir(mount)) == ["filler", part.name]
