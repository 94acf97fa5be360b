"""Snapshots that do not fit their records, contradict themselves or are hostile."""

from __future__ import annotations

import json
import os
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from console import status_text
from console.plans import gates
from console.sources import run_records
from console.sources.run import RunSource
from console.sources.run_records import RunRecords
from tests.console.plans.histories import EVERY_BOUND
from tests.console.sources import directory
from tests.console.sources.snapshots import DRAWN, Observer, same_state
from tests.console.sources.written_runs import HOSTILE, is_used, places, prepared, put
from trainers.contract import jsonl, rundir


def replaced(path: Path) -> None:
    path.write_bytes(b'{"v": 1, "other": 1}\n' + path.read_bytes())


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 10)


def removed(path: Path) -> None:
    path.unlink()


def edited(path: Path) -> None:
    """Replaces the newest record by another record of the same length."""
    lines = path.read_bytes().splitlines(keepends=True)
    last = json.loads(lines[-1])
    last["n"] = last["n"] + 1 if last["n"] % 10 < 9 else last["n"] - 1
    line = jsonl.encode(last)
    path.write_bytes(b"".join([*lines[:-1], line + b" " * (len(lines[-1]) - len(line))]))


@pytest.mark.parametrize("harm", [replaced, truncated, removed, edited])
def test_a_snapshot_of_other_files_is_not_used(run, harm):
    prepared(run)
    harm(run / "heartbeat_rank0.jsonl")
    assert not is_used(run)
    same_state(run)


def test_an_old_snapshot_is_used_for_charts_only(run, monkeypatch):
    monkeypatch.setattr(run_records, "MAX_TAIL_BYTES", 10_000)
    prepared(run)
    for number in range(61, 200):
        directory.beat(run, 0, number, n=number, mono=1e6 + number)
    assert not is_used(run)
    assert not RunRecords(run, "charts").has_snapshot, "a short run needs no snapshot"
    monkeypatch.setattr(run_records, "SHORT_BYTES", 0)
    assert RunRecords(run, "charts").has_snapshot


def test_a_duplicate_record_leaves_a_valid_snapshot(run):
    prepared(run)
    observer = Observer(run)
    directory.beat(run, 0, 61, n=5, mono=1e9)
    observer.save()
    assert is_used(run)
    assert "record 5 exists twice" in observer.reducer.summary.ranks[0].attempts[1].trouble
    same_state(run)


def test_a_duplicate_line_changes_nothing(run):
    prepared(run)
    path, observer = rundir.heartbeat(run, 0), Observer(run)
    observer.read()
    before = replace(observer.reducer.heads(1)[0])
    with path.open("ab") as stream:
        stream.write(path.read_bytes().splitlines(True)[3])
    observer.save()
    assert observer.reducer.heads(1)[0] == before
    assert is_used(run)


def test_a_copied_file_changes_no_total_and_no_head_after_a_clock_step_and_a_reboot(run):
    starts = ((0.0, 3e6), (-7200.0, 3e6 + 10), (86400.0, 500.0))
    for start, (ts, mono) in enumerate(starts):
        for n in range(1, 6):
            times = {"ts": 1.8e9 + ts + n, "mono": mono + n}
            directory.beat(run, 0, 5 * start + n, n=n, **times)
    path, observer = rundir.heartbeat(run, 0), Observer(run)
    observer.read()
    before = deepcopy((observer.reducer.summary.ranks, observer.reducer.heads(1)[0]))
    assert (before[0][0].progress, before[1].step) == (15, 15), "each start by hand is counted"
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    copy.replace(path)
    observer.save()
    assert (observer.reducer.summary.ranks, observer.reducer.heads(1)[0]) == before
    assert is_used(run)


def test_a_truncated_file_is_followed(run):
    prepared(run)
    path, observer = rundir.heartbeat(run, 0), Observer(run)
    observer.read()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:5]))
    observer.read()
    for number in range(61, 64):
        directory.beat(run, 0, 1000 + number, n=number, mono=1e6 + number)
    observer.read()
    assert observer.reducer.heads(1)[0].last["step"] == 1063
    observer.write()
    assert is_used(run)


def test_the_records_before_the_snapshot_fill_the_pace_and_change_no_total(run):
    prepared(run)
    observer = Observer(run)
    before = deepcopy(observer.reducer.summary.ranks)
    observer.read()
    pace = observer.reducer.heads(1)[0].pace
    assert pace.p99_s() is not None
    assert len(pace.take_fresh()) == rundir.heartbeat(run, 0).read_bytes().count(b"progress")
    assert (observer.reducer.summary.ranks, observer.reducer.counted) == (before, 0)


def test_replaced_events_leave_a_valid_snapshot(run):
    prepared(run)
    observer = Observer(run)
    directory.event(run, "alert", alert="disk", level="warn", text="little room")
    observer.read()
    (run / rundir.EVENTS).rename(run / "elsewhere")
    directory.event(run, "note", text="a new file")
    observer.save()
    assert is_used(run)
    assert observer.reducer.events.open() == {}


def test_skipped_lines_are_counted_once(run):
    prepared(run)
    with rundir.heartbeat(run, 0).open("ab") as stream:
        stream.write(b"garbage\n" * 7)
    directory.beat(run, 0, 90, n=61, mono=1e6)
    for _ in range(3):
        observer = Observer(run)
        observer.save()
    found = RunRecords(run, "recent")
    found.poll(1, 2, 1 << 20)
    assert (found.has_snapshot, found.files.skipped) == (True, 7)


@pytest.mark.parametrize("change", [
    lambda held: held["files"].clear(),
    lambda held: held["files"].update({f"samples_{'x' * 300}": {"head": "x", "part": 1, "at": 5}}),
    lambda held: held["folds"].update({"7": held["folds"]["0"]}),
    lambda held: held["folds"]["0"].update(memory_mib={"found": [[1, None]]}),
    lambda held: held["folds"]["0"].update(newest=9),
    lambda held: held["folds"]["0"]["attempts"]["1"].update(last=59),
    lambda held: held["folds"]["0"]["attempts"]["1"].update(last=9999),
    lambda held: held["folds"]["0"]["attempts"]["1"].update(step=9999),
    lambda held: held.update(v=1),
    lambda held: held["events"].update(alerts={"disk": [0, 0, 10]}),
    lambda held: held["spans"][rundir.heartbeat(Path(), 0).name]["now"].pop(),
])  # fmt: skip
def test_a_snapshot_that_contradicts_itself_or_its_records_is_not_used(run, change):
    prepared(run)
    held = rundir.read_json(run / rundir.SNAPSHOT) or {}
    change(held)
    directory.document(run / rundir.SNAPSHOT, held)
    assert not is_used(run)
    same_state(run)


def test_a_window_without_its_records_makes_loss_falls_unknown(run):
    prepared(run)
    at = ("folds", "0", "newest_figures")
    directory.change_at(run / rundir.SNAPSHOT, *at, to=[])
    source = RunSource(run)
    source.poll()
    assert source.summary is not None
    (gate,) = gates.evaluate(source.summary, {"loss_falls": True})
    assert (gate.value, gate.result) == (None, "unknown")


@given(st.randoms(use_true_random=False), st.sampled_from(HOSTILE))
@settings(max_examples=250)
def test_no_snapshot_makes_a_reader_raise(tmp_path_factory, rng, value):
    global _prepared
    if _prepared is None:
        _prepared = prepared(directory.run(tmp_path_factory.mktemp("r") / "0-first"))
    held = rundir.read_json(_prepared / rundir.SNAPSHOT) or {}
    put(held, rng.choice(list(places(held))[1:]), value)
    folder = tmp_path_factory.mktemp("h") / "0-first"
    folder.mkdir()
    for path in _prepared.iterdir():
        if path.is_file():
            os.link(path, folder / path.name)
    (folder / rundir.SNAPSHOT).unlink()
    (folder / rundir.SNAPSHOT).write_bytes(jsonl.encode(held))
    source = RunSource(folder, reads="charts")
    steps = max(
        rundir.heartbeat(_prepared, rank).read_bytes().count(b"progress") for rank in (0, 1)
    )
    for number in range(2):
        state = source.poll()
        mono, memory = 1e6 + number, {"gpu_mem_reserved": 1.0}
        path = rundir.heartbeat(folder, 0)
        lines, _ = path.read_bytes(), path.unlink()
        path.write_bytes(lines)
        directory.beat(folder, 0, 500 + number, n=600 + number, mono=mono, attempt=9, **memory)
        assert (state.step or 0) >= steps, "no record is left out"
        assert list(status_text.status_lines(state))
        assert source.summary is not None
        gates.evaluate(source.summary, EVERY_BOUND)
        for name in DRAWN:
            source.series.points(name)


_prepared: Path | None = None
