"""The report of a launch is written in a separate thread, with a time limit."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import pytest

from console.plans import report, sweep
from console.supervisor import report_writer
from console.supervisor.report_writer import ReportWriter
from console.supervisor.rundir_io import Directory
from tests.console.sources import directory
from tests.console.test_report import recorded
from tests.launches import HANG_GUARD_S, wait_for
from trainers.contract import rundir


@pytest.fixture
def launch(tmp_path):
    path = directory.launch(tmp_path / "artifacts")
    recorded(path)
    directory.change_at(path / rundir.PLAN, "phases", 0, "sweep", to="speed")
    return path


def written(launch, files=None, reached=lambda: True):
    """Waits for the report and for `reached`; returns the sentences about the report."""
    files, said = files or Directory(), []
    writer = ReportWriter(launch, files, lambda _, text, level: said.append(text))
    writer.start()
    wait_for(lambda: files.deliver() or writer.poll() or (not writer.busy and reached()))
    assert files.close()
    return said


def test_a_comparison_that_takes_too_long_is_left_out_and_blocks_nothing(launch, monkeypatch):
    files, answers, ended, now = Directory(), [], threading.Event(), 0.0

    def long_comparison(_):
        nonlocal now
        now = 1.0
        files.job(lambda: "answered", lambda value, _: answers.append(value))
        ended.wait(2 * HANG_GUARD_S)
        return []

    monkeypatch.setattr(sweep, "sweeps", long_comparison)
    monkeypatch.setattr(report_writer, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(report_writer, "LIMIT_S", 1.0)
    said = written(launch, files, lambda: answers)
    ended.set()
    assert answers == ["answered"]
    assert said == [
        "the report lacks the comparison of the sweeps: it is not complete after 1 s; run "
        f"nsa-console report {launch}"
    ]
    text = (launch / report.NAME).read_text()
    assert "**go** with 1 override" in text
    assert "The sweeps have not been compared yet." in text


def test_a_whole_report_has_the_comparison_and_no_event(launch, monkeypatch):
    monkeypatch.setattr(sweep, "sweeps", lambda _: [sweep.Comparison("speed", refusal="planted")])
    said = written(launch)
    text = (launch / report.NAME).read_text()
    assert (said, "speed: not compared: planted" in text, "yet" in text) == ([], True, False)


def test_a_sweep_that_cannot_be_compared_is_in_the_report_with_the_reason(launch):
    """plan.json has one run of the sweep only."""
    assert written(launch) == []
    text = (launch / report.NAME).read_text()
    reason = "the launch has only a part of the rounds in speed"
    assert f"## Sweeps\n\n    speed: not compared: {reason}" in text


def test_a_report_that_cannot_be_written_is_an_event(launch):
    os.mkdir(launch / report.NAME)
    (text,) = written(launch)
    assert text.startswith("the report is not written: Is a directory; run nsa-console report ")
