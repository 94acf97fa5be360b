"""The state of a run whose supervisor has died, from processes and exit records."""

from __future__ import annotations

import pytest

from console.sources.run import RunSource
from tests.console.sources import directory
from trainers.contract import rundir

DEAD = directory.DEAD


@pytest.mark.parametrize(
    ("supervisor", "workers", "expected"),
    [("alive", "alive", "running"), ("dead", "alive", "unsupervised"), ("dead", "dead", "lost")],
)
def test_without_a_living_supervisor_processes_decide_the_state(
    launch, run, supervisor, workers, expected
):
    mine = rundir.identity()
    worker = mine if workers == "alive" else mine | DEAD
    owner = mine if supervisor == "alive" else mine | DEAD
    directory.run(run, workers=[{"rank": 0, **worker, "exit": None}], **owner)
    assert RunSource(launch).poll().state == expected


def gone(run, **last):
    """Makes a run with exit records; its documents say that it runs, its processes do not exist."""
    dead = rundir.identity() | DEAD
    directory.run(run, workers=[{"rank": 0, **dead, "exit": None}], **dead)
    for rank in (0, 1):
        directory.beat(run, rank, 9, "exit", **last)


@pytest.mark.parametrize(
    ("last", "halted", "expected"),
    [
        ({"reason": "done", "exit_code": 0}, False, "completed"),
        ({"reason": ".HALT"}, True, "halted"),
        ({"reason": "loss is not finite", "exit_code": 10}, False, "failed"),
        ({"reason": "SystemExit: 1", "exit_code": 1}, False, "failed"),
        ({"reason": "", "exit_code": None}, False, "lost"),
        ({"reason": ".HALT", "exit_code": None}, True, "lost"),
    ],
)
def test_without_a_supervisor_exit_records_count(launch, run, last, halted, expected):
    if halted:
        directory.beat(run, 0, 9, "halt", reason=".HALT")
    gone(run, **last)
    state = RunSource(launch).poll()
    assert state.state == expected
    lost = "the end of rank 0 is unknown: its exit record has no exit code"
    assert expected == "completed" or (lost if expected == "lost" else last["reason"]) in state.why
    exits = {f"exited (code {last.get('exit_code', 0)})", "exit code not available"}
    assert {rank.exit for rank in state.ranks} <= exits


@pytest.mark.parametrize(
    ("settings", "says"),
    [({"train.steps": {"value": 9}}, "rank 0: out of memory at step 9 (code 11); lower train."),
     ({}, "rank 0: SystemExit: 11 at step 9 (code 11)")],
)  # fmt: skip
def test_an_exit_code_of_a_foreign_program_has_no_meaning(launch, run, settings, says):
    gone(run, reason="SystemExit: 11", exit_code=11)
    directory.change(run / rundir.RUN, settings=settings)
    assert RunSource(launch).poll().why.startswith(says)


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        ({"code": 7, "signal": None}, "(code 7)"),
        ({"code": None, "signal": "SIGKILL"}, "rank 1 was killed by SIGKILL at step 9"),
    ],
)  # fmt: skip
def test_an_observed_exit_outweighs_an_exit_record(launch, run, seen, words):
    gone(run, reason="done")
    dead = rundir.identity() | DEAD
    workers = [{"rank": 0, **dead, "exit": {"code": 0, "signal": None}},
               {"rank": 1, **dead, "exit": seen}]  # fmt: skip
    directory.run(run, workers=workers, **dead)
    state = RunSource(launch).poll()
    assert (state.state, words in state.why) == ("crashed", True), state.why


def test_a_run_without_one_exit_record_is_lost(launch, run):
    gone(run, reason="done")
    directory.change(run / rundir.RUN, world=3)
    assert RunSource(launch).poll().state == "lost"
