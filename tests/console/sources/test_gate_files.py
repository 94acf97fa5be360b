"""The files that gates need besides the records, also damaged and hostile files."""

from __future__ import annotations

import json
import os
import time

import pytest

from console.sources import gate_files
from console.sources.record_files import RecordFiles
from console.supervisor.run_files import Files
from tests.console.sources import directory
from trainers.contract import rundir


def test_an_absurd_number_of_attempts_is_a_doubt(tmp_path):
    found = gate_files.read(tmp_path, 1 << 60, 1)
    assert found.log_doubt == "there are more than 1000 attempts"


def test_logs_after_a_missing_one_count_and_absent_ones_take_no_time(tmp_path):
    log, before = rundir.rank_log(tmp_path, 1, 4000), time.process_time()
    log.parent.mkdir(parents=True)
    log.write_text("RuntimeError: CUDA error: device-side assert triggered\n")
    found = gate_files.read(tmp_path, 1, 10_000)
    assert (found.errors, found.log_doubt[:24]) == (1, "attempt1/rank0.log is mi")
    assert time.process_time() - before < 2


@pytest.mark.parametrize("change", ["grows", "shrinks", "is too long", "grows too long"])
def test_a_log_that_changes_during_the_read_is_a_doubt_unless_it_grows(
    tmp_path, monkeypatch, change
):
    log, read_end = rundir.rank_log(tmp_path, 1, 0), gate_files.read_end
    log.parent.mkdir(parents=True)
    (log.parent / rundir.TORCHRUN_LOG).write_text("")
    log.write_bytes(b"line\n" * (1000 if change == "is too long" else 100))

    def read_while_it_changes(path, limit, below):
        if path == log and change == "shrinks":
            os.truncate(log, 50)
        if path == log and change == "grows too long":
            log.write_bytes(b"line\n" * 1000)
        found = read_end(path, limit, below)
        if path == log and change == "grows":
            log.write_bytes(b"line\n" * 101)
        return found

    monkeypatch.setattr(gate_files, "read_end", read_while_it_changes)
    monkeypatch.setattr(gate_files, "LOG_BYTES", 1000)
    doubt = gate_files.read(tmp_path, 1, 1).log_doubt
    assert bool(doubt) == (change != "grows"), doubt


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 5000])
def test_a_name_that_no_file_can_have_is_a_missing_file(tmp_path, name):
    folder = tmp_path / rundir.CHECKPOINTS / "step_00000001"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"files": {name: [1, "x"]}}))
    (folder.parent / rundir.LATEST).write_text(folder.name)
    log = rundir.logs(tmp_path, 1) / rundir.TORCHRUN_LOG
    log.parent.mkdir(parents=True)
    log.write_text("Received 15 death signal\n")
    found = Files(tmp_path, 1, 1, RecordFiles(tmp_path)).read_final(0)
    assert (found.torchrun_signal, found.checkpoint) == ("SIGTERM", 1)
    assert found.files is not None
    assert "is missing" in found.files.checkpoint_doubt


def test_the_speed_of_one_rank_is_that_of_its_records_and_its_phase_is_planned(tmp_path):
    directory.document(tmp_path / rundir.PLAN, {"phases": [{"name": "one"}, {"name": "two"}]})
    for name in ("0-one", "0-x"):
        run = tmp_path / name
        run.mkdir(mode=0o700)
        directory.document(run / rundir.RUN, {"world": 1})
        for step in range(1, 61):
            directory.beat(run, 0, step, toks_per_s=1000.0, steps_dt_s=[0.1], n=step)

    def speed(value, run="1-two", phase="0-one"):
        gate = {"name": "toks_per_s_50_above", "result": "pass", "value": value}
        directory.document(tmp_path / phase / rundir.GATES, {"gates": [gate]})
        return gate_files.read(tmp_path / run, 1, 2)

    (tmp_path / "1-two").mkdir()
    found = speed(1000.0)
    assert (found.single, found.single_toks_per_s) == ("0-one", pytest.approx(1000))
    for wrong in (1.0, -5, "nan", None):
        assert speed(wrong).single_toks_per_s is None, wrong
    directory.document(tmp_path / rundir.PLAN, {"phases": [{"name": "zero"}, {"name": "two"}]})
    assert speed(1000.0, phase="0-x").single == "", "the plan has no such phase"


def test_the_newest_record_of_a_long_heartbeat_counts_for_the_speed(tmp_path):
    directory.document(tmp_path / rundir.PLAN, {"phases": [{"name": "one"}, {"name": "two"}]})
    run = tmp_path / "0-one"
    run.mkdir(mode=0o700)
    (tmp_path / "1-two").mkdir()
    directory.document(run / rundir.RUN, {"world": 1})
    for step in range(1, 401):
        speed = 1000.0 if step < 400 else 2000.0
        directory.beat(run, 0, step, toks_per_s=speed, steps_dt_s=[0.1], n=step, pad="x" * 3000)
    assert rundir.heartbeat(run, 0).stat().st_size > gate_files.SPEED_BYTES
    gate = {"name": "toks_per_s_50_above", "result": "pass", "value": 1020.0}
    directory.document(run / rundir.GATES, {"gates": [gate]})
    assert gate_files.read(tmp_path / "1-two", 1, 2).single_toks_per_s == pytest.approx(1020)
