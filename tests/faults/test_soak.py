"""What `make soak` counts and injects; the half hour itself is a benchmark."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from benchmarks import steps
from benchmarks.chaos import DISRUPTIVE, FULL, schedule


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
