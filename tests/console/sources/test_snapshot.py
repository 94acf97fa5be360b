"""A snapshot and the records after it give the same state as all records."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import re
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from console.cli import main
from console.sources import record_files, run_records, snapshot
from console.sources.run import RunSource
from console.sources.series import SPANS_S
from tests.console.sources import directory
from tests.console.sources.snapshots import Observer, same_state
from tests.console.sources.written_runs import Writer, is_used, prepared
from trainers.contract import heartbeat, rundir


@given(seed=st.integers(0, 2**32))
@example(seed=132)  # a sample file becomes a part before it is read
@settings(max_examples=60)
def test_a_snapshot_with_later_records_gives_the_state_of_all_records(tmp_path_factory, seed):
    rng = random.Random(seed)
    run = directory.run(tmp_path_factory.mktemp("r") / "0-first")
    writer, observer = Writer(run, rng), Observer(run)
    for _ in range(rng.randint(1, 120)):
        writer.write()
        if rng.random() < 0.2:
            observer.read(rng.choice((1 << 9, 1 << 30)))
        if rng.random() < 0.1:
            observer.write()
        if rng.random() < 0.03:
            observer = Observer(run)  # the working process was replaced
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_records, "SHORT_BYTES", 0)
        same_state(run)


def test_the_newest_figures_are_read_even_if_many_other_records_follow_them(run, monkeypatch):
    monkeypatch.setattr(run_records, "SHORT_BYTES", 0)
    directory.beat(run, 0, 5, loss=2.0)
    for _ in range(8):
        directory.beat(run, 0, 5, "checkpoint_failed", reason="x" * 2000)
    observer = Observer(run)
    observer.read()
    observer.write()
    assert is_used(run)
    assert RunSource(run).poll().figures["loss"].value == 2.0
    same_state(run)


def test_the_first_reason_counts_even_if_many_other_records_follow_it(run, monkeypatch):
    monkeypatch.setattr(run_records, "SHORT_BYTES", 0)
    directory.beat(run, 0, 5, "halt", reason="requested")
    for _ in range(200):
        directory.beat(run, 0, 5, "checkpoint_failed", reason="x" * 2000)
    directory.beat(run, 0, 5, "exit", reason="last step")
    observer = Observer(run)
    observer.read()
    observer.write()
    assert is_used(run)
    source = RunSource(run, reads="recent")
    source.poll()
    assert source.heads[0].reason == "requested"


def charted(run: Path) -> list[float]:
    """Returns the times of the points in the chart of rank 0's memory."""
    source = RunSource(run, reads="charts")
    source.poll()
    source.poll()
    return [at for at, _ in source.series.points("rss_mib:0")]


def test_the_series_of_a_long_run_are_the_thinned_ones_of_all_records(run, monkeypatch):
    """Few points of each resolution are stored, so that old points are dropped."""
    monkeypatch.setattr(run_records, "SHORT_BYTES", 0)
    monkeypatch.setattr("console.sources.series.RAW_RECORDS", 20)
    monkeypatch.setattr("console.sources.series.KEPT_SPANS", (15, 12, 9, 9))
    rng = random.Random(7)
    writer, observer = Writer(run, rng), Observer(run)
    for count in range(1500):
        writer.ts += 5.0
        writer.beat()
        writer.sample()
        if count % 40 == 0:
            observer.read()
        if count % 170 == 0:
            observer.write()
        if count % 260 == 0:
            writer.part()
    same_state(run)
    ats = charted(run)
    assert ats == sorted(ats)
    assert len(set(ats)) > 40
    assert ats[-1] == writer.ts


def test_the_history_of_a_long_run_stays_small_and_covers_all_of_it(run, monkeypatch):
    most = 64 << 10
    monkeypatch.setattr("console.sources.snapshot.HISTORY_BYTES", most)
    monkeypatch.setattr(run_records, "SHORT_BYTES", 0)
    writer, observer = Writer(run, random.Random(7)), Observer(run)
    begin = writer.ts
    for count in range(3000):
        writer.ts += 120.0
        writer.sample()
        if count % 40 == 0:
            observer.read()
    observer.save()
    for path in run.glob("history_*"):
        assert path.stat().st_size < 1.1 * most, path
    ats = charted(run)
    assert (ats[0] - begin, ats[-1]) < (SPANS_S[-1], writer.ts + 1)
    assert max(b - a for a, b in itertools.pairwise(ats)) <= SPANS_S[-1]


def test_the_owner_keeps_a_snapshot_when_the_history_before_it_is_on_disk(run):
    """An observer that is replaced while the disk hangs reads the missing spans again."""
    writer, observer = Writer(run, random.Random(7)), Observer(run)

    def look() -> int:
        for _ in range(30):
            writer.ts += 10.0
            writer.beat()
            writer.sample()
        observer.save()
        lines = snapshot.history(run, 0).read_bytes().splitlines()
        return sum(json.loads(line)["of"] == "samples_here.jsonl" for line in lines)

    assert (look(), len(observer.disk.kept)) == (29, 1)
    observer.disk.is_full = True
    assert (look(), len(observer.disk.kept)) == (29, 1)
    assert observer.disk.alerts
    observer.disk.is_full = False
    assert (look(), len(observer.disk.kept)) == (89, 2)
    assert not observer.disk.alerts
    observer.disk.hangs = True
    assert (look(), len(observer.disk.kept)) == (89, 2)
    kept = observer.disk.kept[-1]
    observer = Observer(run, held=kept)
    assert (look(), len(observer.disk.kept)) == (149, 1)


def test_read_all_reads_compressed_parts_to_their_end(run):
    prepared(run)
    for second in range(400):
        ranks = [{"rank": 0, "rss_mib": 100.0}]
        directory.sample(run, ts=second, attempt=1, ranks=ranks, gpus=[], host="here")
    path = run / "samples_here.jsonl"
    text = path.read_bytes()
    path.unlink()
    for number in (1, 2):
        part = record_files.part(path, number)
        part.with_name(part.name + record_files.GZIP).write_bytes(gzip.compress(text))
    left = []
    source = RunSource(run, limit_bytes=1 << 11, reads="all")
    assert source.read_all(left.append).behind_bytes == 0
    assert left == sorted(set(left), reverse=True)


@pytest.mark.parametrize(("attempts", "most"), [(8, 64 << 10), (40, 180 << 10)])
def test_a_snapshot_is_small_for_eight_ranks_and_many_restarts(tmp_path, attempts, most):
    run = directory.run(tmp_path / "0-first", world=8)
    at = time.time() - 1e6
    for attempt in range(1, attempts + 1):
        for rank in range(8):
            with rundir.heartbeat(run, rank).open("ab") as stream:
                for number in range(1, 201 if attempt <= 8 else 4):
                    stream.write(heartbeat.encode({
                        "v": 1, "n": number, "rank": rank, "attempt": attempt, "ts": at + number,
                        "mono": 1e4 * attempt + number, "step": attempt * 200 + number,
                        "msg": "progress", "loss": 2.123456789012345 + 1 / number,
                        "toks_per_s": 123456.7, "grad_norm": 0.1234567890123, "bytes_right": 0.51,
                        "gpu_mem_reserved": 80_000.0 + number, "nonfinite_loss_steps": 0,
                        "steps_dt_s": [0.3123456789] * 20,
                    }))  # fmt: skip
    for second in range(100):
        gpus = [{"index": index, "name": "H", "mem_used_mib": 9e4 + second, "util_pct": 99.0}
                for index in range(8)]  # fmt: skip
        ranks = [{"rank": rank, "rss_mib": 5000.1 + second} for rank in range(8)]
        directory.sample(run, ts=at + second, gpus=gpus, ranks=ranks, host="here")
    observer = Observer(run)
    observer.save()
    assert (run / rundir.SNAPSHOT).stat().st_size <= most
    assert is_used(run)


def test_charts_show_a_long_run_at_once_and_then_its_past(run, monkeypatch):
    monkeypatch.setattr(run_records, "RECENT_BYTES", 1 << 10)
    writer = Writer(run, random.Random(5))
    for _ in range(300):
        writer.beat()
        writer.sample()
    source = RunSource(run, 1 << 12, reads="charts")
    state = source.poll()
    assert state.step == writer.steps
    assert state.behind_bytes > 0
    first = len(source.series.points("rss_mib:0"))
    while state.behind_bytes:
        state = source.poll()
        assert state.step == writer.steps, "the step is known before the rest is read"
    assert len(source.series.points("rss_mib:0")) == 300 > first


def test_check_names_its_basis_and_full_reads_all_records(run, monkeypatch, capsys):
    monkeypatch.setattr(run_records, "RECENT_BYTES", 1 << 10)
    prepared(run)
    directory.change(run / rundir.SUPERVISOR, state="completed", workers=[])
    directory.change(run / rundir.RUN, world=2, gates={"restarts_at_most": 0})
    gate = {"name": "restarts_at_most", "value": 0.0, "bound": "≤ 0", "result": "pass"}
    directory.document(run / rundir.GATES, {"v": 1, "result": "pass", "gates": [gate]})
    assert main(["check", str(run)]) == 1
    by_snapshot = r"based on gates.json and snapshot.json of \d+s ago and {} after it$"
    basis = capsys.readouterr().out.splitlines()[1]
    assert re.match(by_snapshot.format("0 records"), basis), basis
    directory.beat(run, 0, 61, "progress", n=50, mono=1e6, loss=1.0)
    main(["check", str(run), "--json"])
    basis = json.loads(capsys.readouterr().out)["basis"]
    assert re.match(by_snapshot.format("1 record"), basis), basis
    main(["check", str(run)])
    with_snapshot = capsys.readouterr().out.splitlines()
    (run / rundir.SNAPSHOT).unlink()
    assert main(["check", str(run)]) == 1
    assert "snapshot.json is not usable, so only the newest records were read; " in (
        capsys.readouterr().out
    )
    assert main(["check", str(run), "--full"]) == 1
    lines = sum(len(rundir.heartbeat(run, rank).read_bytes().splitlines()) for rank in (0, 1))
    with_snapshot[1] = f"based on gates.json and all {lines} records"
    assert capsys.readouterr().out.splitlines() == with_snapshot
