"""Ends of runs that are not in supervisor.json, because a write of this document failed."""

from __future__ import annotations

import time

import pytest

from console import actions
from console.sources.run import RunSource
from console.supervisor import cross_check, launch_spec
from tests import owners
from tests.console.sources import directory
from tests.console.sources.directory import change
from tests.console.supervisor.test_cross_check import TOKEN, launch, tell
from tests.launches import STUB, phase
from trainers.contract import rundir

__all__ = ["launch"]


@pytest.mark.parametrize("source", ["event", "heartbeat"])
def test_an_end_that_the_document_lacks_is_read_where_it_was_recorded(
    launch, tmp_path, monkeypatch, source
):
    """After a full disk, supervisor.json still says that the run is running."""
    run, why = launch / "0-one", "rank 1: checkpoint error at step 25 (code 15)"
    last = {"state": "failed", "why": why, "ts": time.time()}
    monkeypatch.setattr(rundir, "SHARED_MEMORY", tmp_path)
    live = tmp_path / f"{rundir.LIVE_PREFIX}x-{TOKEN}"
    live.mkdir(mode=0o700)
    change(run / rundir.SUPERVISOR, updated_ts=time.time() - 60, live_dir=str(live),
           **rundir.identity())  # fmt: skip
    if source == "event":
        tell(run, {"kind": "state"} | last)
    else:
        rundir.write_json(live / rundir.LIVE_STATUS, last)
    spec = launch_spec.load(launch)
    former = cross_check.read_run(owners.absent(), run, spec, 0, False)
    assert (former.end.state, former.end.why, former.is_final) == ("failed", why, True)
    lives = {"rank": 0, "local_rank": 0, **rundir.identity(), "exit": None}
    change(run / rundir.SUPERVISOR, workers=[lives])
    former = cross_check.read_run(owners.absent(), run, spec, 0, False)
    assert (former.end.state, former.is_final) == (None, False), "a rank is alive"


def test_an_adoption_keeps_the_end_that_only_the_events_have(begin):
    """Both documents are older than the end of the launch, as after a full disk."""
    started = begin(phase("one", "member.py", 100_000, "leave"), shell=STUB)
    started.wait(lambda: len(started.pids()) == 2)
    documents = (started.run() / rundir.SUPERVISOR, started.path / rundir.PLAN_STATE)
    before = {path: path.read_bytes() for path in documents}
    ended, exact = started.wait_over(), started.state()
    for path, content in before.items():
        path.write_bytes(content)
    for rank in range(2):
        rundir.heartbeat(started.run(), rank).unlink()
    for log in rundir.logs(started.run(), 1).glob("*.log"):
        log.unlink()
    assert started.state()["state"] not in ("crashed", "failed")
    actions.adopt(started.path)
    found = started.wait_over()
    assert [found[key] for key in ("state", "why")] == [ended[key] for key in ("state", "why")]
    assert "code 7" in started.state()["why"]
    assert (started.state()["state"], started.state()["why"]) == (exact["state"], exact["why"])


@pytest.mark.parametrize("source", ["document", "event"])
def test_a_recorded_success_without_other_evidence_starts_no_phase(begin, source):
    """Any program of this user can write the two files; rank 1 exited with code 7."""
    phases = [phase("one", "member.py", 100_000, "leave"), phase("two", "member.py", 3)]
    started = begin(*phases, shell=STUB)
    started.wait(lambda: len(started.pids()) == 2)
    documents = (started.run() / rundir.SUPERVISOR, started.path / rundir.PLAN_STATE)
    before = {path: path.read_bytes() for path in documents}
    started.wait_over()
    for path, content in before.items():
        path.write_bytes(content)
    claim = {"state": "completed", "why": "all ranks reached the end"}
    if source == "document":
        change(documents[0], **claim)
    else:
        tell(started.run(), {"kind": "state", "ts": time.time()} | claim)
    actions.adopt(started.path)
    assert "code 7" in started.wait_over()["why"]
    assert not (started.path / "1-two").exists()


def test_an_end_is_not_shown_before_the_supervisor_that_is_alive_has_written_it(tmp_path):
    """Otherwise the gates of a run that ends normally are missing for a moment."""
    run = directory.run(tmp_path / "0-first", updated_ts=time.time() - 60)
    dead = [{"rank": 0, "local_rank": 0, **directory.DEAD, "exit": None}]
    change(run / rundir.SUPERVISOR, workers=dead, **rundir.identity())
    directory.event(run, "state", attempt=1, state="completed", why="done")
    directory.beat(run, 0, 8, pid=directory.DEAD["pid"], dropped_records=0)
    state = RunSource(run).poll()
    assert (state.state, "end-missing" in {each.id for each in state.alerts}) == ("running", False)
    directory.event(run, "state", attempt=1, state="completed", why="done", ts=time.time() - 4)
    change(run / rundir.SUPERVISOR, state={})
    state = RunSource(run).poll()
    assert (state.state, "end-missing" in {each.id for each in state.alerts}) == ("completed", True)


def test_a_reader_says_that_the_document_lacks_the_end(tmp_path):
    """The ranks and the figures may then be older than the end."""
    run = directory.run(tmp_path / "0-first", updated_ts=time.time() - 60)
    dead = [{"rank": 0, "local_rank": 0, **directory.DEAD, "exit": None}]
    change(run / rundir.SUPERVISOR, workers=dead, **directory.DEAD)
    directory.event(run, "state", attempt=1, state="failed", why="code 15")
    directory.beat(run, 0, 8, pid=directory.DEAD["pid"], dropped_records=0)
    state = RunSource(run).poll()
    assert state.state == "failed"
    assert "supervisor.json does not contain the end of the run" in state.alerts[0].text
    change(run / rundir.SUPERVISOR, state="failed")
    assert not RunSource(run).poll().alerts
