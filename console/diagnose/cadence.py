"""The age that a rank's newest record may have, from the times between records: without a pulse.

A trainer records every few steps, so silence means nothing before its rhythm is known.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from console.diagnose.stall import SAFETY, STARTING_PHASES, Seen
from trainers.contract import jsonl

KEPT = 256
RHYTHM_OF_ONE = 8
"""So many records at every step show that each step has one: the first few steps always do."""
UNKNOWN_STEPS = 50
"""Before a rhythm is seen, the next record may be so many steps away."""


class Cadence:
    """The rhythm of one rank's records in one attempt, whose first step may take `startup_s`."""

    def __init__(self, startup_s: float):
        self._startup_s = startup_s
        self.record: Mapping[str, Any] = {}
        self._at, self._age_s = 0.0, 0.0
        self._gaps: deque[int] = deque(maxlen=KEPT)
        self._times_s: deque[float] = deque(maxlen=KEPT)
        self._first_s = 0.0

    def take(self, record: Mapping[str, Any], mono: float, ts: float) -> None:
        """Takes in one record, which was read at `mono`, unix time `ts`."""
        before, self.record = self.record, record
        written = jsonl.number(record, "ts")
        self._at, self._age_s = mono, _span(ts - (ts if written is None else written))
        if not before:
            return
        since = jsonl.number(before, "ts")
        took_s = 0.0 if written is None or since is None else _span(written - since)
        gap = record["step"] - before["step"]
        if gap <= 0 or before["step"] == 0:
            self._first_s = max(self._first_s, took_s / max(1, gap))
            return
        self._gaps.append(gap)
        self._times_s.append(took_s)

    @property
    def steps_seen(self) -> bool:
        """Says whether this rank records steps at all; some trainers let only rank 0 do it."""
        return bool(self.record) and self.record["step"] > 0

    def usual_s(self) -> float:
        """Returns the 99th percentile of the times between records, or a guess on the long side."""
        if self._knows_rhythm():
            ordered = sorted(self._times_s)
            return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
        each = [took / gap for took, gap in zip(self._times_s, self._gaps, strict=True)]
        if not each:
            return max(UNKNOWN_STEPS * self._first_s, self._startup_s / SAFETY)
        return UNKNOWN_STEPS * max(each)

    def _knows_rhythm(self) -> bool:
        gaps = list(self._gaps)
        if len(gaps) < 2 or gaps[-1] != gaps[-2]:
            return False
        return gaps[-1] > 1 or (len(gaps) >= RHYTHM_OF_ONE and max(gaps) == 1)

    def seen(self, rank: int, mono: float) -> Seen:
        """Returns this rank's newest record as evidence."""
        record, step = self.record, self.record["step"]
        still_s = self._age_s + max(0.0, mono - self._at)
        msg, pid = record["msg"], jsonl.integer(record, "pid") or 0
        phase = "exit" if msg == "exit" else "log" if step else min(STARTING_PHASES)
        return Seen(rank, pid, "?", max(step, 2) if step else 0, phase, still_s, 0, self.usual_s())


def _span(seconds: float) -> float:
    """Returns a time span that was read, 0 for what is none."""
    return seconds if math.isfinite(seconds) and 0 < seconds < 1e8 else 0.0
