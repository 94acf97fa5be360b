"""The verdicts of a run: the newest verdict, and the search in other runs."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from console.commands import diagnose
from console.model import Verdict
from console.sources import verdicts
from console.supervisor.offline import diagnosis
from tests.console.sources import directory

SAME = Verdict(9.0, "", "lock", 1, "log", 5, "high", place="a.py:1")


def say(run: Path, ts: float, cause: str, **more: Any) -> None:
    (run / "verdicts").mkdir(exist_ok=True)
    record = {"ts": ts, "cause": cause, "sentence": cause, "rank": 1, "place": "a.py:1"} | more
    directory.document(run / "verdicts" / f"{int(ts * 1000)}.json", record)


def test_a_verdict_from_the_future_is_not_the_newest_one_and_hides_none(tmp_path):
    now = time.time()
    say(tmp_path, now - 20, "stopped")
    say(tmp_path, now - 10, "sleep", end="the ranks step again")
    for second in range(verdicts.MAX_PER_RUN):
        say(tmp_path, now + 3600 + second, "lock")
    directory.document(tmp_path / "verdicts" / "7.json", {"ts": now + 60, "cause": "lock"})
    last = verdicts.newest(tmp_path)
    assert last is not None
    assert (last.cause, last.end) == ("sleep", "the ranks step again")


@pytest.mark.parametrize("ts", [1e20, -1e20])
def test_a_verdict_whose_time_is_no_date_is_not_called_earlier(tmp_path, ts):
    launch, now = directory.launch(tmp_path, stamp="20261121-060500"), time.time()
    run = directory.run(
        launch / "0-first",
        state="stalled",
        since_ts=now - 12,
        verdict={"ts": now - 12, "cause": "stopped", "sentence": "x", "rank": 1, "place": "a.py:1"},
    )
    earlier = directory.run(directory.launch(tmp_path, stamp="20261120-060500") / "0-first")
    say(earlier, now - 90, "stopped")
    (path,) = (earlier / "verdicts").iterdir()
    found = diagnosis(run)
    record = diagnose.as_json(found, tmp_path)
    assert record["seen_before"]["ts"] == now - 90
    assert any("seen before: " in line for line in diagnose.lines(found, record, tmp_path))
    directory.change(path, ts=ts)
    assert diagnose.as_json(found, tmp_path)["seen_before"] is None


def test_an_earlier_stall_of_the_same_run_was_seen_before_and_its_present_one_was_not(tmp_path):
    run = directory.run(directory.launch(tmp_path) / "0-first")
    say(run, 3.0, "lock", end="the ranks step again")
    say(run, 4.0, "lock")
    say(run, 5.0, "lock", end=verdicts.REPLACED)
    say(run, 9.0, "lock", end="the run has ended: killed")
    seen = verdicts.seen_before(tmp_path, run, SAME)
    assert seen is not None
    assert (seen.run.rpartition("/")[2], seen.verdict.ts) == ("0-first", 3.0)
    assert verdicts.seen_before(tmp_path, run, replace(SAME, ts=3.0)) is None


def test_a_later_stall_of_another_run_was_not_seen_before_and_hides_none(tmp_path):
    run = directory.run(directory.launch(tmp_path, stamp="20261121-030000") / "0-first")
    other = directory.run(directory.launch(tmp_path, stamp="20261121-030001") / "0-first")
    for second in range(verdicts.MAX_PER_RUN):
        say(other, 10.0 + second, "lock")
    assert verdicts.seen_before(tmp_path, run, SAME) is None
    say(other, 8.0, "lock")
    seen = verdicts.seen_before(tmp_path, run, SAME)
    assert seen is not None
    assert seen.verdict.ts == 8.0


def test_the_verdict_in_the_document_of_the_supervisor_counts_before_files(tmp_path):
    launch, now = directory.launch(tmp_path), time.time()
    said = {"ts": now - 12, "cause": "stopped", "sentence": "rank 1 is stopped", "rank": 1}
    run = directory.run(launch / "0-first", state="stalled", verdict=said, since_ts=now - 12)
    say(run, now - 9, "sleep", end="replaced by the next verdict")
    say(run, now - 6, "lock")
    found = diagnosis(launch)
    assert (found.outlook, found.source) == ("stalled", "supervisor")
    assert found.verdict is not None
    assert found.verdict.cause == "stopped"


def test_a_run_that_is_gone_or_a_link_ends_no_search(tmp_path):
    old = directory.run(directory.launch(tmp_path, stamp="20261121-030000") / "0-first")
    say(old, 5.0, "lock")
    new = directory.launch(tmp_path, stamp="20261121-030001")
    (new / "0-first").symlink_to(old)
    for each, ts in ((old.parent, 1e9), (new, 2e9)):
        os.utime(each, (ts, ts))
    seen = verdicts.seen_before(tmp_path, tmp_path / "gone", SAME)
    assert seen is not None
    assert seen.run.endswith("030000/0-first")


def test_the_search_covers_the_last_runs_of_a_launch(tmp_path, monkeypatch):
    monkeypatch.setattr(verdicts, "MAX_RUNS", 1)
    launch = directory.launch(tmp_path)
    say(directory.run(launch / "0-first"), 5.0, "sleep")
    say(directory.run(launch / "1-second"), 5.0, "lock")
    seen = verdicts.seen_before(tmp_path, tmp_path / "gone", SAME)
    assert seen is not None
    assert seen.run.endswith("/1-second")
