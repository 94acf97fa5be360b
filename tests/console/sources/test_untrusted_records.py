"""The state of a run whose records are wrong, missing or from another program."""

from __future__ import annotations

import json
import os
import re
import time

import pytest

from console import actions, status_text
from console.sources import liveness
from console.sources.reducer import MAX_ALERTS, Events
from console.sources.run import RunSource
from console.tui import feed
from tests.console.sources import directory
from trainers.contract import rundir
from trainers.contract.errors import RefusedError
from trainers.contract.pulse import PulseWriter


@pytest.fixture
def bare(tmp_path):
    """A run of a program that was started by hand: no supervisor, no run.json."""
    return tmp_path


# --- attempts, steps and ranks ----------------------------------------------------------------


@pytest.mark.parametrize("attempt", [2, 3, 2**60])
def test_supervisor_json_names_the_attempt_and_no_record_does(launch, attempt):
    run = launch / "0-first"
    for step in (1, 2):
        directory.beat(run, 0, step)
    directory.beat(run, 0, 3, attempt=attempt)
    directory.beat(run, 0, 3, attempt=attempt)
    source = RunSource(launch)
    assert (source.poll().attempt, source.poll().step) == (1, 2)
    directory.beat(run, 0, 4)
    assert source.poll().step == 4


def test_records_of_the_next_attempt_count_once_supervisor_json_names_it(launch):
    run = launch / "0-first"
    source = RunSource(launch)
    directory.beat(run, 0, 50, loss=1.0)
    directory.beat(run, 0, 7, loss=2.0, attempt=2)
    directory.beat(run, 1, 7, loss=2.0, attempt=2)
    assert (source.poll().attempt, source.poll().step) == (1, 50)
    directory.run(run, attempt=2)
    state = source.poll()
    assert (state.attempt, state.step) == (2, 7)
    assert state.figures["loss"].value == 2.0
    assert RunSource(launch).poll().step == 7, "a new reader shows the same step"


def test_a_pulse_with_an_earlier_step_than_the_records_is_not_shown(launch, run, shared_memory):
    """A copy may have replaced the pulse; the supervisor's sample is of the true pulse."""
    PulseWriter(rundir.pulse(shared_memory, 0), 0).set(42, "forward")
    directory.run(run, live_dir=str(shared_memory))
    sampled = {"step": 377, "phase": "backward", "since_s": 0.1}
    directory.sample(run, ranks=[{"rank": 0, "state": "S", "pulse": sampled}])
    source = RunSource(launch)
    for msg, step, shown in (("resume", 99, 42), ("progress", 42, 42), ("progress", 376, 377)):
        directory.beat(run, 0, step, msg)
        assert source.poll().ranks[0].pulse.step == shown


def test_without_a_supervisor_two_records_start_an_attempt(bare):
    directory.beat(bare, 0, 9)
    source = RunSource(bare)
    directory.beat(bare, 0, 2**62, attempt=2**60)
    directory.beat(bare, 0, 2**62, attempt=2**60)
    directory.beat(bare, 0, 3, attempt=7)
    assert (source.poll().attempt, source.poll().step) == (1, 9)
    directory.beat(bare, 0, 10)
    assert source.poll().step == 10
    directory.beat(bare, 0, 1, attempt=2)
    directory.beat(bare, 1, 1, attempt=2)
    source = RunSource(bare)
    assert (source.poll().attempt, source.poll().step) == (2, 1)


def test_records_of_another_rank_or_beyond_the_world_are_ignored(launch):
    run = launch / "0-first"
    directory.change(run / rundir.RUN, world=2)
    directory.beat(run, 0, 3)
    lie = json.loads(rundir.heartbeat(run, 0).read_text())
    for rank in (1, 5):
        directory.append(rundir.heartbeat(run, 0), lie | {"rank": rank, "step": 99})
    directory.beat(run, 2, 99)
    directory.beat(run, 4000, 99)
    state = RunSource(launch).poll()
    assert ([rank.rank for rank in state.ranks], state.step) == ([0, 1], 3)


def test_events_on_any_number_of_alerts_cost_bounded_memory():
    events = Events()
    for number in range(2 * MAX_ALERTS):
        for kind in ("alert", "ack"):
            events.add({"kind": kind, "alert": f"a{number}"})
    assert len(events.open()) == len(events.acknowledged) == MAX_ALERTS


# --- runs without a living process ------------------------------------------------------------


def test_the_ages_of_a_lost_run_do_not_advance(launch):
    run = launch / "0-first"
    dead = rundir.identity() | directory.DEAD
    last = time.time() - 30
    held = {"step": 9, "phase": "forward", "since_s": 4.0, "collectives": 2}
    directory.sample(run, ts=last, ranks=[{"rank": 0, "state": "S", "pulse": held}])
    directory.run(run, workers=[{"rank": 0, **dead, "exit": None}], updated_ts=last, **dead)
    source = RunSource(launch)
    state = source.poll()
    assert (state.state, state.data_age_s, state.ranks[0].age_s) == ("lost", None, None)
    assert state.since_ts == pytest.approx(last), "the time is that of the last sample"
    lines = [line for line in status_text.status_lines(state) if not line.endswith("s ago")]
    assert any("step 9 forward  " in f"{line}  " for line in lines)
    time.sleep(1.1)
    after = status_text.status_lines(source.poll())
    assert [line for line in after if not line.endswith("s ago")] == lines


@pytest.mark.parametrize(
    ("steps", "ended"), [(60, "completed"), (100, "stopped"), (None, "stopped")]
)
def test_a_legacy_run_that_has_ended_is_not_halted(tmp_path, steps, ended):
    path = directory.legacy(tmp_path / "old", 60, 5)
    assert RunSource(path).poll().state == "unsupervised"
    directory.document(path / "metrics.json", {"steps": steps})
    state = RunSource(path).poll()
    assert state.state == ended
    assert "the run has ended: metrics.json is newer than the last record" in state.why
    for action in ("halt", "dump", "stop"):
        with pytest.raises(RefusedError, match="old has ended"):
            actions.send(path, action, {}, "tester")
    assert not (path / rundir.HALT).exists()
    os.utime(path / "metrics.json", (0, 0))
    assert RunSource(path).poll().state == "unsupervised", "the file is from an earlier run"


# --- values without a measurement -------------------------------------------------------------


def test_a_pulse_without_collectives_has_none(launch):
    run = launch / "0-first"
    for rank, count in ((0, 0), (1, 7)):
        held = {"step": 9, "phase": "forward", "since_s": 1.0, "collectives": count}
        directory.sample(run, host=f"h{rank}", ranks=[{"rank": rank, "state": "S", "pulse": held}])
    shown = [rank.pulse.collectives for rank in RunSource(launch).poll().ranks]
    assert shown == [None, 7]


def test_only_the_loss_of_our_own_trainers_has_a_unit(launch):
    run = launch / "0-first"
    directory.beat(run, 0, 1, loss=2.5, toks_per_s=3.0)
    assert RunSource(launch).poll().figures["loss"].unit == "nats/token"
    directory.change(run / rundir.RUN, settings={})
    figures = RunSource(launch).poll().figures
    assert (figures["loss"].unit, figures["toks_per_s"].unit) == ("", "tok/s")


def test_values_without_a_measurement_are_not_zero(launch):
    run = launch / "0-first"
    directory.sample(run, gpus=[{"name": "H200", "state": "ok"}], ranks=[{"rank": 7}])
    state = RunSource(launch).poll()
    assert (state.step, state.gpus) == (None, ())
    assert any(line.startswith("  rank 7 ?") for line in status_text.status_lines(state))


@pytest.mark.parametrize(("ranks", "words"), [
    (["1", 3], "rank 3 still runs"), ([None, True], "a rank still runs"),
])  # fmt: skip
def test_a_living_rank_without_a_number_is_not_rank_0(ranks, words):
    workers = [rundir.identity() | {"rank": rank} for rank in ranks]
    assert liveness.living_ranks({"workers": workers}) == words


@pytest.mark.parametrize("named", ["running", "stalled", "restarting"])
def test_a_run_of_another_host_is_never_lost_without_a_recorded_end(launch, named):
    run, before = launch / "0-first", time.time() - 300
    owner = directory.ELSEWHERE | {"pid": 77}
    directory.run(run, state=named, workers=[], updated_ts=before, **owner)
    directory.change(launch / rundir.PLAN_STATE, supervisor=owner, updated_ts=before)
    directory.beat(run, 0, 3, ts=before)
    state = RunSource(launch).poll()
    assert re.sub(r"\d+ s", "N s", f"{state.state}: {state.why}") == (
        "unsupervised: the supervisor on elsewhere may have ended; newest state: N s old; "
        "newest record: N s old"
    )
    assert not status_text.is_over(state)
    assert state.launch
    assert (state.launch.state, state.launch.why) == (
        "unsupervised", "the supervisor on elsewhere may have ended",
    )  # fmt: skip
    assert "no supervisor" not in " ".join(status_text.status_lines(state, True))
    assert feed.find_live([launch]) is None, "a launch of a crashed host does not stay the newest"
    # The clock of the host may be behind, and NFS may show the document late.
    directory.change(run / rundir.SUPERVISOR, updated_ts=time.time() - 30)
    assert RunSource(launch).poll().state == named
    directory.change(run / rundir.SUPERVISOR, state="halted", why="asked", updated_ts=before)
    assert RunSource(launch).poll().state == "halted", "a recorded end is shown"


def test_a_launch_of_another_host_without_a_run_is_not_lost(tmp_path):
    path = directory.launch(tmp_path)
    for owner, state in ((directory.ELSEWHERE, "unsupervised"), (directory.DEAD, "lost")):
        document = rundir.identity() | owner
        directory.change(path / rundir.PLAN_STATE, supervisor=document, updated_ts=1.0)
        assert RunSource(path).poll().state == state


def test_records_without_a_time_are_not_recent(launch):
    run = launch / "0-first"
    directory.run(run, workers=[], updated_ts=1.0, **directory.ELSEWHERE)
    directory.beat(run, 0, 3, ts="nan")
    state = RunSource(launch).poll()
    assert state.state == "unsupervised"
    assert "newest record: age not available" in state.why


def test_another_host_whose_clock_is_ahead_looks_alive_only_while_it_writes(launch):
    run = launch / "0-first"
    directory.run(run, workers=[], updated_ts=time.time() + 3600, **directory.ELSEWHERE)
    directory.beat(run, 0, 3, ts=time.time() - 3600)
    assert RunSource(launch).poll().state == "running"
    before = time.time() - 61
    os.utime(run / rundir.SUPERVISOR, (before, before))
    assert RunSource(launch).poll().state == "unsupervised"
    directory.beat(run, 0, 4, ts=time.time() + 3600)
    state = RunSource(launch).poll()
    assert state.state == "unsupervised"
    assert "newest record: age not available (its time is in the future" in state.why
