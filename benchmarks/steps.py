"""Reads the steps of a run from a heartbeat file, and adds up the times of the surviving ones."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from console.sources.tail import Tail
from trainers.contract import heartbeat, jsonl

LONGEST = 4.0
"""A step counts for at most this many medians, because the time of a fault is not work."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step: `ts` is its end (unix s), `dt_s` its duration."""

    number: int
    attempt: int
    ts: float
    dt_s: float


def read(path: Path) -> list[Step]:
    """Returns the steps in a heartbeat file, in the order in which they were done."""
    tail = Tail(path, heartbeat.accept)
    found: list[Step] = []
    while (records := tail.poll()) or tail.offset < tail.size_bytes:
        found += from_records(records)
    return found


def from_records(records: Iterable[Mapping[str, Any]]) -> list[Step]:
    """Returns the steps of progress records. A record lists the steps since the previous record."""
    found: list[Step] = []
    for record in records:
        if record["msg"] != "progress":
            continue
        durations = jsonl.numbers(record, "steps_dt_s")
        end, last, steps = float(record["ts"]), int(record["step"]), []
        for back, dt_s in enumerate(reversed(durations)):
            steps.append(Step(last - back, int(record["attempt"]), end, dt_s))
            end -= dt_s
        found += reversed(steps)
    return found


def median_s(steps: Sequence[Step]) -> float:
    return statistics.median(step.dt_s for step in steps)


def effective_s(steps: Sequence[Step]) -> float:
    """Returns the time of the surviving steps; a repeated step counts once, with its last time.

    A step without a record counts with the median time. See `LONGEST` for long steps.
    """
    usual_s = median_s(steps)
    kept = {step.number: step.dt_s for step in steps}
    numbers = range(steps[0].number, steps[-1].number + 1)
    return sum(min(kept.get(number, usual_s), LONGEST * usual_s) for number in numbers)


def total_s(steps: Sequence[Step]) -> float:
    """Returns the wall time from the beginning of the first step to the end of the last."""
    return steps[-1].ts - steps[0].ts + steps[0].dt_s


def firsts(steps: Iterable[Step]) -> dict[int, Step]:
    """Returns each attempt's first step; a later attempt resumed from the step before that step."""
    found: dict[int, Step] = {}
    for step in steps:
        found.setdefault(step.attempt, step)
    return found
