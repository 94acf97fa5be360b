"""Stalls before the first step, in which some or all ranks have not joined."""

from __future__ import annotations

from dataclasses import replace

from console.diagnose.evidence import Evidence
from console.diagnose.verdict import diagnose
from console.sources.flight import Collective, FlightRecord
from tests.console.diagnose.stalled_ranks import (
    IDLE,
    NOW,
    OWN,
    PEERS,
    WATCH,
    collective,
    rank,
    stack,
)

JOINS = collective("_new_process_group_helper")[0]


def test_ranks_that_all_wait_to_join_have_not_started_and_none_is_blamed():
    """For example, a rank expects more ranks than there are."""
    found = Evidence(
        dict.fromkeys((0, 1), IDLE), dict.fromkeys((0, 1), replace(IDLE, mono=2.0)),
        {n: stack(n, JOINS, OWN) for n in (0, 1)},
    )  # fmt: skip
    ranks = [rank(n, "boot", 0) for n in (0, 1)]
    verdict = diagnose(ranks, replace(WATCH, startup_s=5.0), NOW, found)
    assert (verdict.cause, verdict.rank, verdict.sure) == ("startup", None, "medium")
    assert "each waits for its peers to join" in verdict.sentence


def test_of_several_ranks_that_have_not_joined_none_is_blamed_for_certain():
    """For example, rank 3 expects five ranks, ranks 1 and 2 wait for it, and rank 0 has joined."""
    processes = dict.fromkeys(range(4), IDLE)
    group = "gloo 0 default_pg"
    first = Collective(group, 1, "all_gather", "[1] int64", False)
    found = Evidence(
        processes, dict.fromkeys(processes, replace(IDLE, mono=2.0)),
        {0: stack(0, *PEERS), **{n: stack(n, JOINS, OWN) for n in (1, 2, 3)}},
        {0: FlightRecord(0, NOW, "x", {group: 1}, (first,)),
         **{n: FlightRecord(n, NOW, "x", {}, ()) for n in (1, 2, 3)}},
    )  # fmt: skip
    ranks = [rank(n, "boot", 0) for n in range(4)]
    verdict = diagnose(ranks, replace(WATCH, startup_s=5.0), NOW, found)
    assert (verdict.cause, verdict.rank, verdict.sure) == ("startup", 1, "medium"), verdict
