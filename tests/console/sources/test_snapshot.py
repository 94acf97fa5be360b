"""A snapshot and the records after it give the same state as all records."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import os
import random
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from console import status_text
from console.cli import main
from console.plans import gates
from console.sources import record_files, run_records, snapshot
from console.sources.rank_totals import RankTotals
from console.sources.run import RunSource
from console.sources.run_records import RunRecords
from console.sources.series import SPANS_S
from tests.console.plans.histories import EVERY_BOUND
from tests.console.sources import directory
from tests.console.sources.snapshots import DRAWN, Observer, same_state
from trainers.contract import heartbeat, jsonl, rundir


class Writer:
    """Writes files like those of a run of two ranks, with clock jumps, garbage and restarts."""

    def __init__(self, run: Path, rng: random.Random):
        self.run, self.rng = run, rng
        self.ts, self.mono, self.attempt, self.steps, self.written = 1e9, 1.0, 1, 0, {}

    def write(self) -> None:
        self.ts += self.rng.choice((0.1, 1.0, 1.0, 7.0, 61.0))
        if self.rng.random() < 0.02:
            self.ts += self.rng.choice((-3600.0, 86_400.0))
        kinds = (self.beat, self.beat, self.beat, self.sample, self.sample, self.event,
                 self.garbage, self.again, self.part, self.word)  # fmt: skip
        self.rng.choice(kinds)()

    def beat(self, msg: str = "progress", **more) -> None:
        self.mono += 1.0
        self.steps += msg == "progress"
        for rank in self.rng.sample((0, 1), self.rng.choice((1, 2, 2))):
            key = (rank, self.attempt)
            number = self.written[key] = self.written.get(key, 0) + 1
            loss = self.rng.choice((2.0 / self.steps if self.steps else 2.0, 1.5, "nan"))
            record = {"n": number, "mono": self.mono, "ts": self.ts, "attempt": self.attempt}
            figures = {} if msg != "progress" else {
                "loss": loss, "grad_norm": self.rng.random(), "steps_dt_s": [self.rng.random()],
                "gate_entropy_mean": self.rng.random(), "gpu_mem_reserved": self.rng.random(),
                "bytes_right": self.rng.random(), "toks_per_s": self.rng.random(),
                "gate_collapse_frac": self.rng.random(),
                "dt_fetch_s": self.rng.random(), "comm_hook": self.rng.choice(("bf16", "none")),
            }  # fmt: skip
            directory.beat(self.run, rank, self.steps, msg, **(record | figures | more))

    def word(self) -> None:
        msg = self.rng.choice(("checkpoint", "error", "halt", "exit", "loader_ready"))
        self.beat(msg, reason=f"reason {self.ts}", error=f"{msg} {self.ts}", exit_code=0)

    def sample(self) -> None:
        pulse = {"phase": self.rng.choice(("forward", "forward", "save")), "step": self.steps}
        ranks = [{"rank": rank, "rss_mib": self.rng.random() * 100, "pulse": pulse}
                 for rank in (0, 1)]  # fmt: skip
        gpus = [{"index": 0, "util_pct": self.rng.random(), "state": "ok", "name": "x"}]
        directory.sample(
            self.run, ts=self.ts, attempt=self.attempt, ranks=ranks, gpus=gpus, host="here"
        )

    def event(self) -> None:
        kind = self.rng.choice(("alert", "clear", "ack", "state"))
        name = self.rng.choice(("stall", "disk", "no-supervisor"))
        more = {"state": "running", "why": "so"} if kind == "state" else {"alert": name}
        directory.event(self.run, kind, level="warn", text=f"{self.ts}", attempt=self.attempt,
                        ts=self.ts, **more)  # fmt: skip

    def garbage(self) -> None:
        name = self.rng.choice(("heartbeat_rank0.jsonl", "events.jsonl", "samples_here.jsonl"))
        with (self.run / name).open("ab") as stream:
            stream.write(self.rng.choice((b"{}\n", b"\xff\xfe\n", b"\0\0\n", b'{"v": 1', b"\n")))

    def again(self) -> None:
        """Sometimes begins the next attempt, from a checkpoint."""
        if self.rng.random() < 0.3:
            self.attempt += 1
            self.steps = self.rng.randint(0, self.steps)
            held = json.loads((self.run / rundir.SUPERVISOR).read_text())
            document = held | {"attempt": self.attempt}
            directory.document(self.run / rundir.SUPERVISOR, document)
            self.beat("resume")

    def part(self) -> None:
        """Renames the sample file to a part, as the supervisor does; may compress the part."""
        path = self.run / "samples_here.jsonl"
        if not path.exists() or self.rng.random() < 0.5:
            return
        part = record_files.part(path, len(record_files.parts(path)) + 1)
        path.rename(part)
        if self.rng.random() < 0.7:
            part.with_name(part.name + record_files.GZIP).write_bytes(
                gzip.compress(part.read_bytes())
            )
            part.unlink()


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
            observer = Observer(run)  # the supervisor's process was replaced
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_records, "SHORT_BYTES", 0)
        same_state(run)


def test_the_series_of_a_long_run_are_the_thinned_ones_of_all_records(run, monkeypatch):
    """Few points of each resolution are stored, so that old points are dropped."""
    monkeypatch.setattr("console.sources.series.RAW_RECORDS", 20)
    monkeypatch.setattr(run_records, "SHORT_BYTES", 0)
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
    source = RunSource(run, reads="charts")
    source.poll()
    source.poll()
    ats = [at for at, _ in source.series.points("rss_mib:0")]
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
    observer.read()
    observer.write()
    for path in run.glob("history_*"):
        assert path.stat().st_size < 1.1 * most, path
    source = RunSource(run, reads="charts")
    source.poll()
    source.poll()
    ats = [at for at, _ in source.series.points("rss_mib:0")]
    assert (ats[0] - begin, ats[-1]) < (SPANS_S[-1], writer.ts + 1)
    assert max(b - a for a, b in itertools.pairwise(ats)) <= SPANS_S[-1]


def test_the_owner_keeps_a_snapshot_when_the_history_before_it_is_on_disk(run):
    """An observer that is replaced while the disk hangs reads the missing spans again."""
    writer, observer = Writer(run, random.Random(7)), Observer(run)

    def look() -> list[int]:
        for _ in range(30):
            writer.ts += 10.0
            writer.beat()
            writer.sample()
        observer.read()
        observer.write()
        lines = snapshot.history(run, 0).read_bytes().splitlines()
        return [each["n"] for line in lines
                if (each := json.loads(line))["of"] == "samples_here.jsonl"]  # fmt: skip

    assert (look(), len(observer.disk.kept)) == ([*range(1, 30)], 1)
    observer.disk.is_full = True
    assert (look(), len(observer.disk.kept)) == ([*range(1, 30)], 1)
    assert observer.disk.alerts
    observer.disk.is_full = False
    assert (look(), len(observer.disk.kept)) == ([*range(1, 90)], 2)
    assert not observer.disk.alerts
    observer.disk.hangs = True
    assert (look(), len(observer.disk.kept)) == ([*range(1, 90)], 2)
    kept = observer.disk.kept[-1]
    observer = Observer(run, held=kept)
    assert (look(), len(observer.disk.kept)) == ([*range(1, 150)], 1)


# --- snapshots that are not valid ---------------------------------------------------------


def prepared(run: Path) -> Path:
    writer, observer = Writer(run, random.Random(3)), Observer(run)
    for _ in range(60):
        writer.beat()
        writer.sample()
    writer.event()
    observer.read()
    observer.write()
    assert RunRecords(run, "recent").has_snapshot
    return run


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
    assert not RunRecords(run, "recent").has_snapshot
    same_state(run)


def test_an_old_snapshot_is_used_for_charts_only(run, monkeypatch):
    monkeypatch.setattr(run_records, "MAX_TAIL_BYTES", 10_000)
    prepared(run)
    for number in range(61, 200):
        directory.beat(run, 0, number, n=number, mono=1e6 + number)
    assert not RunRecords(run, "recent").has_snapshot
    assert not RunRecords(run, "charts").has_snapshot, "a short run needs no snapshot"
    monkeypatch.setattr(run_records, "SHORT_BYTES", 0)
    assert RunRecords(run, "charts").has_snapshot


def test_a_duplicate_record_leaves_a_valid_snapshot(run):
    prepared(run)
    observer = Observer(run)
    directory.beat(run, 0, 61, n=5, mono=1e9)
    observer.read()
    observer.write()
    assert RunRecords(run, "recent").has_snapshot
    assert "record 5 exists twice" in observer.reducer.summary.ranks[0].attempts[1].trouble
    same_state(run)


def test_a_duplicate_line_changes_nothing(run):
    prepared(run)
    path, observer = rundir.heartbeat(run, 0), Observer(run)
    observer.read()
    before = replace(observer.reducer.heads(1)[0])
    with path.open("ab") as stream:
        stream.write(path.read_bytes().splitlines(True)[3])
    observer.read()
    observer.write()
    assert observer.reducer.heads(1)[0] == before
    assert RunRecords(run, "recent").has_snapshot


def test_a_snapshot_reads_no_file_of_another_directory(run, tmp_path):
    prepared(run)
    secret = tmp_path / "samples_secret.jsonl"
    secret.write_text('{"ts": 1.0, "host": "secret", "load1": 7.0}\n')
    held = rundir.read_json(run / rundir.SNAPSHOT) or {}
    size = secret.stat().st_size
    held["samples"] = {"../samples_secret.jsonl": [0, 0, size]}
    directory.document(run / rundir.SNAPSHOT, held)
    found = RunRecords(run, "recent")
    found.poll(1, 2, 1 << 20)
    assert (found.has_snapshot, "secret" in found.samples) == (False, False)


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
    assert observer.reducer.heads(1)[0].last.record["step"] == 1063
    observer.write()
    assert RunRecords(run, "recent").has_snapshot


def test_a_warm_up_before_the_snapshot_fills_the_pace(run):
    prepared(run)
    observer = Observer(run)
    before = observer.reducer.heads(1)[0].records
    observer.read()
    head = observer.reducer.heads(1)[0]
    assert head.records == before
    assert head.pace.p99_s() is not None
    assert len(head.pace.take_fresh()) == rundir.heartbeat(run, 0).read_bytes().count(b"progress")


def test_replaced_events_leave_a_valid_snapshot(run):
    prepared(run)
    observer = Observer(run)
    directory.event(run, "alert", alert="disk", level="warn", text="little room")
    observer.read()
    (run / rundir.EVENTS).rename(run / "elsewhere")
    directory.event(run, "note", text="a new file")
    observer.read()
    observer.write()
    assert RunRecords(run, "recent").has_snapshot
    assert observer.reducer.events.open() == {}


def test_skipped_lines_are_counted_once(run):
    prepared(run)
    with rundir.heartbeat(run, 0).open("ab") as stream:
        stream.write(b"garbage\n" * 7)
    directory.beat(run, 0, 90, n=61, mono=1e6)
    for _ in range(3):
        observer = Observer(run)
        observer.read()
        observer.write()
    found = RunRecords(run, "recent")
    found.poll(1, 2, 1 << 20)
    assert (found.has_snapshot, found.files.skipped) == (True, 7)


@pytest.mark.parametrize("change", [
    lambda held: held["heads"].clear(), lambda held: held["files"].clear(),
    lambda held: held["files"].update({f"samples_{'x' * 300}": {"head": "x", "place": [1, 5]}}),
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
    assert not RunRecords(run, "recent").has_snapshot
    same_state(run)


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


def places(held, at=()):
    """Yields every place in a document."""
    yield at
    inner = list(enumerate(held)) if isinstance(held, list) else []
    for key, value in held.items() if isinstance(held, dict) else inner:
        yield from places(value, (*at, key))


def put(held, at, value):
    for key in at[:-1]:
        held = held[key]
    held[at[-1]] = value


HOSTILE = (
    None, -1, 2**70, 10**400, 1.5, math.inf, "x", "nan", True, [], {}, [1], {"a": 1}, [[1, 2, 3]],
    [[1, 1], [2, 10**400]],
)  # fmt: skip


def test_a_window_without_its_records_makes_loss_falls_unknown(run):
    prepared(run)
    held = rundir.read_json(run / rundir.SNAPSHOT) or {}
    held["folds"]["0"]["window"]["newest"]["rows"] = []
    directory.document(run / rundir.SNAPSHOT, held)
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


def test_a_snapshot_is_small_for_eight_ranks_and_many_restarts(tmp_path):
    run = directory.run(tmp_path / "0-first", world=8)
    at = time.time() - 1e6
    for attempt in range(1, 9):
        for rank in range(8):
            with rundir.heartbeat(run, rank).open("ab") as stream:
                for number in range(1, 201):
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
    observer.read()
    observer.write()
    assert (run / rundir.SNAPSHOT).stat().st_size <= snapshot.MAX_BYTES
    assert RunRecords(run, "recent").has_snapshot


# --- reading, and the output of check -------------------------------------------------------------


def test_a_poll_reads_only_records_after_the_snapshot(run, monkeypatch):
    prepared(run)
    source, folds = RunSource(run), []
    before = source.poll().step
    monkeypatch.setattr(RankTotals, "add", lambda totals, record: folds.append(record["n"]) or True)
    source = RunSource(run)
    assert (source.poll().step, folds) == (before, [])
    directory.beat(run, 0, 99, n=61, mono=1e6)
    assert (source.poll().step, folds, source.has_all_records) == (99, [61], True)


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
    by_snapshot = r"based on gates.json and snapshot.json of \d+s ago and {} after it; nsa-console "
    basis = capsys.readouterr().out.splitlines()[1]
    assert re.match(by_snapshot.format("0 records"), basis), basis
    assert basis.endswith(f"; nsa-console check {run} --full replays all records")
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
