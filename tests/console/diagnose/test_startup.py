"""Ranks that have not begun a step: a rank that delays the start-up, and ranks that do not join."""

from __future__ import annotations

from dataclasses import replace

import pytest

from console.diagnose.evidence import Evidence
from console.sources.flight import Collective, FlightRecord
from tests.console.diagnose.stalled_ranks import (
    ASLEEP,
    DOWNLOADS,
    FILE_LOCK,
    IDLE,
    NOW,
    OWN,
    PEERS,
    TCP,
    collective,
    expect,
    explained,
    rank,
    stack,
    starting,
    working,
)

JOINS = collective("_new_process_group_helper")[0]


@pytest.mark.parametrize("phase", ["", "boot"])
def test_during_the_start_the_rank_that_works_is_the_cause_and_not_those_that_wait(phase):
    """No rank has a stack. For example, a rank without a pulse (phase "") is not dumped."""
    before, after = working(0.0)
    asleep = dict.fromkeys((0, 1, 3), ASLEEP)
    found = Evidence(
        asleep | {2: before}, {n: replace(p, mono=2.0) for n, p in asleep.items()} | {2: after}
    )
    verdict = expect(found, starting(4, phase), "startup", 2, "medium")
    assert "has not joined the other ranks and runs at 95% of a core" in verdict.sentence


@pytest.mark.parametrize(
    ("frames", "main", "cause"),
    [
        (DOWNLOADS, TCP, "network"),
        (FILE_LOCK, ASLEEP.main, "lock"),
        ((JOINS, OWN), TCP, "startup"),
    ],
)
def test_the_only_rank_waits_for_no_rank_to_join(frames, main, cause):
    process = replace(IDLE, main=main)
    found = Evidence({0: process}, {0: replace(process, mono=2.0)}, {0: stack(0, *frames)})
    verdict = expect(found, starting(1), cause, 0, "high")
    assert ("has not finished its start-up" in verdict.sentence) == (cause == "startup")
    another = explained(found, *starting(1), replace(rank(1), doubt="lost"))
    assert "it has not joined the other ranks" in another.sentence


def test_ranks_that_all_wait_to_join_have_not_started_and_none_is_blamed():
    """For example, a rank expects more ranks than there are."""
    found = Evidence(
        dict.fromkeys((0, 1), IDLE), dict.fromkeys((0, 1), replace(IDLE, mono=2.0)),
        {n: stack(n, JOINS, OWN) for n in (0, 1)},
    )  # fmt: skip
    verdict = expect(found, starting(2), "startup", None, "medium")
    assert "each waits for its peers to join" in verdict.sentence


def test_of_several_ranks_that_have_not_joined_none_is_blamed_for_certain():
    """For example, ranks 1 and 2 wait for rank 3, which expects five ranks; rank 0 has joined."""
    processes = dict.fromkeys(range(4), IDLE)
    group = "gloo 0 default_pg"
    first = Collective(group, 1, "all_gather", "[1] int64", False)
    found = Evidence(
        processes, dict.fromkeys(processes, replace(IDLE, mono=2.0)),
        {0: stack(0, *PEERS), **{n: stack(n, JOINS, OWN) for n in (1, 2, 3)}},
        {0: FlightRecord(0, NOW, "x", {group: 1}, (first,)),
         **{n: FlightRecord(n, NOW, "x", {}, ()) for n in (1, 2, 3)}},
    )  # fmt: skip
    expect(found, starting(4), "startup", 1, "medium")
