"""Readers in another PID namespace of the same host, for example in another container of a pod."""

from __future__ import annotations

import time

import pytest

from console.sources.run import RunSource
from tests.console.sources import directory
from trainers.contract import rundir

DEAD = directory.DEAD


@pytest.mark.parametrize(
    ("silent_s", "pid_ns", "expected"),
    [(0, 1, "running"), (90, 1, "unsupervised"), (0, None, "lost")],
)
def test_a_supervisor_in_another_pid_namespace_is_alive_while_it_writes(
    launch, run, silent_s, pid_ns, expected
):
    owner, updated_ts = rundir.identity() | DEAD | {"pid_ns": pid_ns}, time.time() - silent_s
    directory.run(run, updated_ts=updated_ts, workers=[{"rank": 0, "exit": None, **owner}], **owner)
    directory.change(launch / rundir.PLAN_STATE, supervisor=owner, updated_ts=updated_ts)
    state = RunSource(launch).poll()
    assert state.state == expected, state.why
    assert ("in another container" in state.why) == (expected == "unsupervised")
    assert state.launch.state == ("running" if expected == "running" else "unsupervised")


def test_a_living_process_is_known_without_its_pid_namespace():
    mine = rundir.identity()
    assert rundir.is_alive(mine)
    assert not rundir.is_alive(mine | {"pid_ns": 1})
    del mine["pid_ns"]
    assert rundir.is_alive(mine)
