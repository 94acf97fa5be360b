"""Measures the pace of one rank in one attempt; `Progress` has the figures of a progress record.

A pace has the times between records, and the durations of steps and phases. Only the supervisor
and the diagnosis need a pace. `LatestRecords` has the content of the newest records.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from console.sources import json_documents
from console.sources.rank_totals import OF_EARLIER_STEPS
from trainers.contract import jsonl

SAFETY = 5.0
"""In steps after the first, a stall limit is at least this many times the usual duration."""
RECORDS_LATE_S = 5.0
"""A record may be read up to this time after the pulse has shown the same progress."""
LONGEST_STEP_S = 1e6
"""A step time is valid if it is shorter than this time."""
UNIFORM_NATS = math.log(3)
"""Entropy of an attention gate with equal weights for the three branches."""
WARM_UP_STEPS = 2
KEPT_STEPS, KEPT_FRESH, KEPT_GAPS, LAST_GAPS = 256, 512, 256, 8
KEPT_DEAD = 64
TIMED_PHASES = ("fetch", "forward", "backward", "optimizer")
RHYTHM_OF_ONE = 8
"""After this many gaps of one step between records, each step is expected to have a record."""
UNKNOWN_STEPS = 50
"""Assumed number of steps between two records until their regular distance is known."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The figures of one progress record."""

    rank: int
    step: int
    loss: float | None = None
    grad_norm: float | None = None
    toks_per_s: float | None = None
    gate_entropy_mean: float | None = None
    gate_entropy_max: float = UNIFORM_NATS
    gate_max_gate: float | None = None
    gate_collapse_frac: float | None = None
    dt_fetch_s: float | None = None
    dt_forward_s: float | None = None
    dt_backward_s: float | None = None
    dt_optimizer_s: float | None = None
    gpu_mem_reserved: float | None = None
    skipped_steps: int | None = None
    nonfinite_loss_steps: int = 0
    overflow_steps: int = 0
    scale_lowered_steps: int = 0
    batch_crc32: str = ""
    host: str = ""
    step_s: float | None = None
    """The mean of the step times in the record."""
    steps: int = 0
    """The number of step times in the record."""
    dead: tuple[str, ...] = ()
    """The parameters in the newest `dead_parameters` record before this record."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> None:
            raise AttributeError(f"add the figure {name!r} of a record to the fields of Progress")


def progress_of(record: Mapping[str, object], dead: tuple[str, ...] = ()) -> Progress:
    """Returns the figures of a progress record; an invalid field gets its default."""
    steps_s = _steps_s(record)
    highest = jsonl.number(record, "gate_entropy_max")
    return json_documents.read(
        Progress, record,
        gate_entropy_max=highest if highest and highest > 0 else UNIFORM_NATS,
        step_s=math.fsum(steps_s) / len(steps_s) if steps_s else None, steps=len(steps_s),
        dead=dead,
    )  # fmt: skip


def _steps_s(record: Mapping[str, Any]) -> list[float]:
    return [d for d in jsonl.numbers(record, "steps_dt_s") if 0 <= d < LONGEST_STEP_S]


def _p99(ordered: list[float]) -> float:
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


class Pace:
    """The pace of one rank. At `live_since`, all older records had been read.

    `live_since` is in monotonic seconds; it is infinite while older records are still being read.
    """

    def __init__(self, live_since: float = math.inf):
        self.progress: Progress | None = None
        self._fresh: deque[Progress] = deque(maxlen=KEPT_FRESH)
        self._dead: tuple[str, ...] = ()
        self._live_since = live_since
        self._recorded_s: float | None = None
        """Sum of the step times in the records since `live_since`, except the first record."""
        self._step = 0
        self._new_step_at = -math.inf
        """Time at which the newest step was read (monotonic s), -inf if before `live_since`."""
        self._new_step_ts = math.inf
        """The time in the record of the newest step (unix s)."""
        self._gaps: deque[tuple[int, float]] = deque(maxlen=KEPT_GAPS)
        """Steps and seconds from one record with a new step to the next."""
        self._trained_s: deque[float] = deque(maxlen=LAST_GAPS)
        """The times of the newest gaps, without the pauses."""
        self.paused_s = 0.0
        """Time in pauses since the newest step was read."""
        self._paused_at: float | None = None
        """When the rank was last seen in a pause that has not ended (monotonic s)."""
        self._first_s = 0.0
        """The longest time per step before the first gap."""
        self._read_at, self._age_s = -math.inf, 0.0
        """Time at which the newest record was read (monotonic s), and its age at that time."""
        self.from_future = False
        """True if the time in the newest record is more than `RECORDS_LATE_S` after its read."""
        self._timed_steps = 0
        self._warm_up_s: float | None = None
        """The time of the newest warm-up step, which counts until a later step time is known."""
        self._durations: dict[str, tuple[deque[float], list[float]]] = {}
        """Durations of each phase, in the order of arrival and sorted; the key "" is for steps."""

    def add(self, record: Mapping[str, Any], first_step: int, mono: float, ts: float) -> None:
        """Adds one record, which was read at the times `mono` (monotonic s) and `ts` (unix s).

        `first_step` is the first step of the attempt. A gap is used if it begins at or after this
        step, or after a progress record.
        """
        step, written = record["step"], jsonl.number(record, "ts") or 0.0
        if self._read_at == -math.inf or step > self._step:
            self._add_step(step, first_step, mono, written)
        self._read_at, self._age_s = mono, _span(ts - written)
        self.from_future = written > ts + RECORDS_LATE_S
        if record["msg"] not in OF_EARLIER_STEPS:
            self._step = step
        if record["msg"] == "dead_parameters":
            self._dead = json_documents.words(record, "parameters")[:KEPT_DEAD]
        if record["msg"] == "progress":
            self.progress = progress_of(record, self._dead)
            self._fresh.append(self.progress)
        if steps_s := self._possible(_steps_s(record), mono):
            self._take_durations(record, steps_s)

    def mark_old(self, mono: float) -> None:
        """Marks all records so far as old (see `_add_step`)."""
        self._new_step_at, self._live_since = -math.inf, mono

    def take_fresh(self) -> list[Progress]:
        """Returns the progress records since the last call, at most the newest `KEPT_FRESH`."""
        fresh = list(self._fresh)
        self._fresh.clear()
        return fresh

    # --- times between records -----------------------------------------------------------------

    def _add_step(self, step: int, first_step: int, mono: float, written: float) -> None:
        """Adds a new step.

        The time since the last new step comes from the times of reading. If that step is older than
        `live_since`, the time comes from the records.
        """
        live = self._new_step_at > -math.inf
        took_s = _span(mono - self._new_step_at if live else written - self._new_step_ts)
        steps = step - self._step
        if self._step and (self.progress or self._step >= first_step):
            self._gaps.append((steps, took_s))
            self._trained_s.append(max(0.0, took_s - self.paused_s))
        else:
            self._first_s = max(self._first_s, took_s / max(1, steps))
        self.paused_s = 0.0
        self._new_step_ts = written
        self._new_step_at = mono if self._live_since < math.inf else -math.inf

    def note_pause(self, mono: float, is_paused: bool) -> None:
        """Notes whether the rank is now in a phase without training steps."""
        if self._paused_at is not None:
            self.paused_s += mono - self._paused_at
        self._paused_at = mono if is_paused else None

    def without_step_s(self, mono: float) -> float:
        """Returns the seconds since the last new step; infinity if none came after `live_since`."""
        return max(0.0, mono - self._new_step_at)

    def age_s(self, mono: float) -> float:
        """Returns the seconds since the newest record was written; infinity if there is none."""
        return self._age_s + max(0.0, mono - self._read_at)

    def gap_s(self) -> float:
        """Returns the longest recent gap between records with a new step, or 0 if there is none.

        The time in pauses does not count.
        """
        return max(self._trained_s, default=0.0)

    def usual_gap_s(self, least_s: float) -> float:
        """Returns the 99th percentile of the gaps, or a long estimate while the gaps are irregular.

        While there is no gap, the estimate is at least `least_s`.
        """
        steps = [count for count, _ in self._gaps]
        if not steps:
            return max(UNKNOWN_STEPS * self._first_s, least_s)
        again = steps[-1:] == steps[-2:-1]
        if again and (steps[-1] > 1 or (len(steps) >= RHYTHM_OF_ONE and max(steps) == 1)):
            return _p99(sorted(took_s for _, took_s in self._gaps))
        return UNKNOWN_STEPS * max(took_s / count for count, took_s in self._gaps)

    # --- times of steps and phases -------------------------------------------------------------

    def _possible(self, steps_s: list[float], mono: float) -> list[float]:
        """Returns the step times, or [] if they cannot be true.

        The sum of all step times since `live_since` is limited to the elapsed time plus a margin.
        The steps of the first record may have begun earlier. They are left out of the sum, and each
        of them is cut to the limit.
        """
        most_s = mono - self._live_since + RECORDS_LATE_S
        if self._live_since == math.inf or not steps_s:
            return steps_s
        if self._recorded_s is None:
            self._recorded_s = 0.0
            return [min(step_s, most_s) for step_s in steps_s]
        recorded_s = self._recorded_s + math.fsum(steps_s)
        if recorded_s > most_s:
            return []
        self._recorded_s = recorded_s
        return steps_s

    def _take_durations(self, record: Mapping[str, Any], steps_s: list[float]) -> None:
        """Adds step times, and the longest time that each phase can have lasted in these steps.

        The first `WARM_UP_STEPS` steps count only until a later step time is known. A record
        contains the mean time of a phase. In one of n steps the phase lasted at most n times the
        mean, and not longer than the longest step. For a rank with a GPU only `fetch` is used; the
        other times are measured on the GPU.
        """
        warm = steps_s[max(0, WARM_UP_STEPS - self._timed_steps) :]
        self._timed_steps += len(steps_s)
        if not warm:
            self._warm_up_s = steps_s[-1] if steps_s else self._warm_up_s
            return
        self._keep("", warm)
        for phase in ("fetch",) if "gpu_mem_reserved" in record else TIMED_PHASES:
            mean_s = jsonl.number(record, f"dt_{phase}_s")
            if mean_s is not None and 0 <= mean_s < LONGEST_STEP_S:
                self._keep(phase, [min(mean_s * len(steps_s), max(steps_s))])

    def _keep(self, phase: str, durations_s: list[float]) -> None:
        """Adds durations, each cut to `SAFETY` times the present p99: a stall may be among them."""
        kept, ordered = self._durations.setdefault(phase, (deque(), []))
        most_s = (SAFETY * _p99(ordered) if ordered else 0.0) or LONGEST_STEP_S
        for duration_s in durations_s:
            kept.append(min(duration_s, most_s))
            insort(ordered, kept[-1])
            if len(kept) > KEPT_STEPS:
                del ordered[bisect_left(ordered, kept.popleft())]

    def p99_s(self, phase: str = "") -> float | None:
        """Returns the 99th percentile of recent times in a phase, or None if no time is known.

        For a phase without times, and for the phase "", it is the percentile of the step times.
        """
        found = self._durations.get(phase) or self._durations.get("")
        return self._warm_up_s if found is None else _p99(found[1])


UNTIMED = Pace()
"""An empty pace, for a rank whose pace is not measured."""


def _span(seconds: float) -> float:
    """Returns a time span in seconds, or 0 if it is not valid."""
    return seconds if math.isfinite(seconds) and 0 < seconds < 1e8 else 0.0
