"""The counts and the injections of `make soak`; the half hour itself is a benchmark."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from benchmarks import steps
from benchmarks.chaos import DISRUPTIVE, FULL, KILLED, Injected, schedule
from benchmarks.soak import false_alarms
from tests.console.sources import directory


def progress(attempt: int, step: int, ts: float, *durations: float) -> dict[str, Any]:
    return {
        "msg": "progress", "attempt": attempt, "step": step, "ts": ts,
        "steps_dt_s": list(durations),
    }  # fmt: skip


def listed(*records: dict[str, Any]) -> list[steps.Step]:
    return steps.from_records(records)


def test_a_repeated_step_counts_once_and_what_lies_between_does_not():
    found = listed(progress(1, 4, 4.0, 1, 1, 1, 1), progress(2, 5, 20.0, 2, 2, 2))
    assert steps.effective_s(found) == 1 + 1 + 2 + 2 + 2
    assert steps.total_s(found) == 20
    assert steps.firsts(found)[2].number == 3


def test_a_seed_gives_the_same_faults_each_kind_nearly_as_often():
    due = schedule(random.Random(7), 10, 1800.0, full=False)
    assert due == schedule(random.Random(7), 10, 1800.0, full=False)
    assert [at for at, _ in due] == sorted(at for at, _ in due)
    counts = Counter(fault.name for _, fault in due if not fault.harmless)
    assert len(counts) == len(DISRUPTIVE)
    assert sum(counts.values()) == 10
    assert max(counts.values()) - min(counts.values()) <= 1
    assert FULL not in [fault for _, fault in due]


def test_only_what_is_said_and_done_without_a_fault_is_a_false_alarm(tmp_path):
    run = directory.run(tmp_path / "0-one")
    (run / "verdicts").mkdir()
    for ts, sure in ((1000.0, "medium"), (2003.0, "high"), (3000.0, "high")):
        document = {"ts": ts, "sure": sure, "cause": "sleep", "sentence": "rank 1 sleeps"}
        directory.document(run / "verdicts" / f"{int(ts * 1000)}.json", document)
    directory.event(run, "watch", ts=2004.0)
    found = [Injected(KILLED, 2000.0, 1, over_s=10.0)]
    assert [line[1::2] for line in false_alarms(run, found)] == [
        ("sleep: rank 1 sleeps", False), ("1", True), ("0", True),
    ]  # fmt: skip
    directory.event(run, "watch", ts=3001.0)
    high, _, acts = false_alarms(run, [])
    assert (high[1], acts[1::2]) == ("sleep: rank 1 sleeps; sleep: rank 1 sleeps", ("2", False))


def test_a_soak_without_disruptive_faults_has_none_at_all():
    assert schedule(random.Random(7), 0, 1800.0, full=True) == []
