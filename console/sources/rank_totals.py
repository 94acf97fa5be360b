"""Adds up the records of one rank over all its attempts, in the order of the rank's file.

The memory for the totals is bounded. Records are numbered. A gap in the numbers shows which records
are missing, and the first step to which they may belong.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from console.sources.accumulators import Figures, Live, Overflows, Peak, Step, cut, worst
from trainers.contract import heartbeat, jsonl

MAX_ATTEMPTS, KEPT_MISSING, FIRST_LOSSES = 1000, 16, 5
LAST_STEPS, KEPT_STEPS, KEPT_RECORDS, KEPT_CHECKPOINTS = 50, 128, 256, 64
LIVE_STEPS = (100, 500, 1000, 5000)
"""Steps at which the values of `FIGURES` are stored for the gates."""
FIGURES: Mapping[str, tuple[str, str, str]] = {
    "steps": ("steps", "newest steps whose durations are complete", ""),
    "toks_per_s": ("tok/s", "last {steps} steps, tokens divided by time", ""),
    "toks_per_s_stdev": ("tok/s", "last {steps} steps, standard deviation", ""),
    "step_ratio": ("", "last {steps} steps, longest divided by median", ""),
    "memory_mib": ("MiB", "largest gpu_mem_reserved, surviving steps", "memories"),
    "memory_growth_mib": ("MiB", "growth of gpu_mem_reserved, later half of steps", "memories"),
    "entropy_min": ("nats", "lowest gate_entropy_mean, all attempts", "gated"),
    "collapse_max": ("share", "largest gate_collapse_frac, all attempts", "gated"),
    "fetch_max_s": ("s", "largest dt_fetch_s, all attempts", "fetches"),
}
"""Unit, window and counter of each figure; the counter is the name of a field of `RankTotals`.

The field has the number of records with a value. The counter is "" for a figure of step durations,
which a progress record need not contain.
"""
NEEDED = ("loss", "grad_norm", "gpu_mem_reserved", "dt_fetch_s", "gate_entropy_mean")
OF_EARLIER_STEPS = ("checkpoint", "checkpoint_failed", "checkpoint_skipped", "note")
"""Kinds of records whose step may be earlier than the current step of the rank."""
Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LastPulse:
    """The last pulse of a rank in one attempt; without a pulse, the last three fields are 0."""

    attempt: int
    rank: int
    records: int
    """The number of the newest record that the rank queued, or 0 if it queued none."""
    nonfinite_steps: int
    """-1 if the program does not count these steps."""
    step: int


@dataclass(frozen=True, slots=True)
class Missing:
    """`count` missing records; `step` is the first step to which these records may belong."""

    first: int
    last: int
    step: int
    count: int


@dataclass(slots=True)
class AttemptTotals:
    """The totals of one rank in one attempt."""

    last: int = 0
    """The number of the newest record."""
    trouble: str = ""
    """Why the records cannot be counted, or "" if they can."""
    holes: list[Missing] = field(default_factory=list)
    start: int | None = None
    """The first step: one after the checkpoint of the resume, or else the first recorded step."""
    resumed: int = 0
    """The step of the checkpoint in the `resume` record, or 0."""
    saved: int = 0
    """The step of the newest `checkpoint` record, or 0."""
    at: int = 0
    """The step of the newest record, apart from records of the kinds in `OF_EARLIER_STEPS`."""
    step: int = 0
    """The step of the newest progress record."""
    exit: tuple[int, int | None] | None = None
    """Step and exit code of the exit record: 0 without a code, None for an invalid code."""
    reason: str = ""
    """The start of the first recorded reason for a halt or exit, or "" if there is none."""
    counted: int | None = None
    """The number of steps with a non-finite loss, as last recorded."""
    counts_at_last: bool = False
    """True if the newest progress or exit record contains the count `counted`."""
    losses: int = 0
    bad_losses: int = 0
    first_bad: int | None = None
    hook: int | None = None
    """1 if `loader_ready` names a communication hook, 0 if it says "none"; None if not recorded."""
    broken: bool = False
    """True if a step before the newest progress record has no record with a loss."""
    bare: bool = False
    """True if the newest progress record has no loss."""
    overflows: Overflows = field(default_factory=Overflows)
    mono: float = -math.inf
    ts: float = 0.0

    def has(self, number: int, mono: float | None, ts: float) -> bool:
        """Returns whether a record was added before; the records of a replaced file come twice."""
        # A new record of another boot or host may have a smaller `mono`, but has a later `ts`.
        is_known = mono is not None and mono <= self.mono and ts <= self.ts
        return is_known and 1 <= number <= self.last

    def add(self, record: Record, number: int, mono: float | None, ts: float) -> None:
        """Adds a record of any kind, except the figures of a progress record."""
        step, msg = record["step"], record["msg"]
        if number < 1:
            self.trouble = self.trouble or "its records have no numbers (an older program)"
        elif number <= self.last:
            self.trouble = self.trouble or f"record {number} exists twice, with different content"
        else:
            if number > self.last + 1:
                begin, lost = self.last + 1, number - self.last - 1
                self._add_missing(Missing(begin, number - 1, min(self.missing_from, step), lost))
            self.last = number
        if self.exit is not None:
            self.trouble = self.trouble or "a record follows its exit record"
        self.mono, self.ts = max(self.mono, mono or -math.inf), max(self.ts, ts)
        if msg not in OF_EARLIER_STEPS:
            self.at = step
        elif msg == "checkpoint":
            self.saved = step
        if msg == "resume" and not self.step:
            self.resumed = step
        if msg in ("progress", "exit"):
            self._take_count(jsonl.integer(record, "nonfinite_loss_steps"))
        if msg == "loader_ready" and (hook := jsonl.text(record, "comm_hook")):
            self.hook = int(hook != "none")
        if msg == "exit":
            self.exit = (step, jsonl.integer({"exit_code": 0, **record}, "exit_code"))

    @property
    def missing_from(self) -> int:
        """The earliest possible step of a missing record that follows the newest record."""
        return max(self.at, self.step + 1, self.start or 1)

    def _add_missing(self, gap: Missing) -> None:
        if len(self.holes) == KEPT_MISSING:
            before = self.holes.pop()
            count = before.count + gap.count
            gap = Missing(before.first, gap.last, min(before.step, gap.step), count)
        self.holes.append(gap)

    def _take_count(self, count: int | None) -> None:
        self.counts_at_last = count is not None
        if count is None:
            return
        if count < (self.counted or 0):
            self.trouble = self.trouble or "its count of non-finite steps decreases"
        self.counted = count

    def take_progress(self, step: int, loss: float | None) -> None:
        """Adds the step and the loss of a progress record."""
        expected = self.step + 1 if self.step else self.start
        self.broken = self.broken or self.bare or step != expected
        self.step, self.bare = step, loss is None
        if loss is not None:
            self.losses += 1
            if not math.isfinite(loss):
                self.bad_losses += 1
                self.first_bad = step if self.first_bad is None else self.first_bad

    def has_stepped(self, end: LastPulse | None) -> bool:
        """Returns whether the rank may have begun a step."""
        begun = self.exit[0] if self.exit is not None else end.step if end is not None else 1
        return self.step > 0 or begun > 0

    def every_loss_is_recorded(self, end: LastPulse | None) -> bool:
        """Returns whether each ended step has a record; only the last record may have no loss."""
        if self.exit is not None:
            step, code = self.exit
            return not self.broken and step <= self.step + bool(code)
        whole = end is not None and end.records == self.last and end.step <= self.step + 1
        return whole and not self.broken


@dataclass(slots=True)
class RankTotals:
    """The totals of one rank. Its records are added in the order of the rank's file.

    Some totals cover only surviving steps. When an attempt resumes, these totals drop the values of
    the steps that it repeats.
    """

    rank: int
    attempts: dict[int, AttemptTotals] = field(default_factory=dict)
    newest: int = 0
    """The newest attempt with a record."""
    step: int = 0
    """The newest surviving step."""
    progress: int = 0
    """Number of progress records."""
    memory_mib: Peak = field(default_factory=Peak)
    norm_min: float | None = None
    norms: int = 0
    first_losses: list[tuple[int, float]] = field(default_factory=list)
    """Step and value of rank 0's first finite losses."""
    newest_figures: deque[Figures] = field(default_factory=lambda: deque(maxlen=KEPT_RECORDS))
    fetch_max_s: float | None = None
    entropy_min: float | None = None
    collapse_max: float | None = None
    gated: int = 0
    """Number of progress records with statistics of the attention gate."""
    memories: int = 0
    """Number of progress records with `gpu_mem_reserved`."""
    fetches: int = 0
    """Number of progress records with `dt_fetch_s`."""
    empty: int = 0
    """Number of progress records without figures, such as the last record of a foreign program."""
    loads: int = 0
    """Number of attempts after the first that resumed from a checkpoint."""
    steps: deque[Step] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    """The newest steps of rank 0."""
    dropped_steps: bool = False
    """True if a step was dropped, because only the newest steps are stored."""
    checkpoints: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT_CHECKPOINTS))
    """The newest surviving steps with a checkpoint."""
    saved_count: int | None = 0
    """The number of surviving steps with a checkpoint, or None if this number is lost."""
    live: deque[Live] = field(default_factory=lambda: deque(maxlen=2 * len(LIVE_STEPS)))

    def add(self, record: Record) -> bool:
        """Adds a record; returns False if it was added before."""
        attempt = record["attempt"]
        part = self.attempts.get(attempt)
        if part is None:
            if len(self.attempts) >= MAX_ATTEMPTS:
                self.attempts[self.newest].trouble = f"more than {MAX_ATTEMPTS} attempts"
                return True
            part = self.attempts[attempt] = AttemptTotals()
        number, mono = jsonl.integer(record, "n") or 0, jsonl.number(record, "mono")
        ts = jsonl.number(record, "ts") or 0.0
        if part.has(number, mono, ts):
            return False
        if attempt < self.newest:
            part.trouble = part.trouble or f"a record follows the records of attempt {self.newest}"
            return True
        self.newest = attempt
        part.add(record, number, mono, ts)
        if record["msg"] == "resume":
            self.loads += attempt > 1 and record["step"] > 0 and part.start is None
            self._begin(part, record["step"] + 1)
            self.step = min(self.step, record["step"])
        elif record["msg"] == "progress":
            self._take_progress(part, record)
        elif record["msg"] == "checkpoint" and record["step"] not in self.checkpoints:
            self.checkpoints.append(record["step"])
            self.saved_count = None if self.saved_count is None else self.saved_count + 1
        return True

    @property
    def begin(self) -> int:
        """The step of an earlier run's checkpoint from which this run resumed, or 0.

        Only the first attempt with a record of a step counts: one that failed at its start has not
        resumed, and later attempts resume from this run's checkpoints.
        """
        return next((part.resumed for _, part in sorted(self.attempts.items()) if part.at), 0)

    @property
    def expected(self) -> int:
        """The number of progress records that need figures.

        The last record of an attempt of a foreign program may have no figures.
        """
        return self.progress - min(self.empty, sum(part.bare for part in self.attempts.values()))

    def saved_in(self, step: int) -> int:
        """Returns the newest attempt that began at or before a step, or 0 if there is none."""
        return max((number for number, part in self.attempts.items()
                    if part.start is not None and part.start <= step), default=0)  # fmt: skip

    def _begin(self, part: AttemptTotals, step: int) -> None:
        """Starts an attempt at a step; drops this step and later ones from the surviving steps."""
        if part.start is not None and part.start != step:
            part.trouble = part.trouble or f"it resumes at step {part.start} and at step {step}"
        part.start = step
        self.memory_mib.cut(step)
        self.first_losses = [each for each in self.first_losses if each[0] < step]
        for rows in (self.newest_figures, self.steps, self.live):
            cut(rows, step)
        kept = [saved for saved in self.checkpoints if saved < step]
        if self.saved_count is not None:
            older = self.saved_count - len(self.checkpoints)
            # If no stored checkpoint survives, it is unknown how many of the older ones survive.
            self.saved_count = older + len(kept) if kept or not older else None
        self.checkpoints = deque(kept, KEPT_CHECKPOINTS)

    def _take_progress(self, part: AttemptTotals, record: Record) -> None:
        step, loss = record["step"], jsonl.number(record, "loss")
        if part.start is None:
            self._begin(part, max(1, step + 1 - max(1, len(jsonl.numbers(record, "steps_dt_s")))))
        elif not part.step and step < part.start:
            why = f"it resumed at step {part.start}, and its first record is of step {step}"
            part.trouble = part.trouble or why
        part.take_progress(step, loss)
        self.step = step
        self.progress += 1
        self.empty += all(record.get(name) is None for name in NEEDED)
        memory = jsonl.number(record, "gpu_mem_reserved")
        if memory is not None:
            self.memories += 1
            self.memory_mib.add(step, memory)
        fetch = jsonl.number(record, "dt_fetch_s")
        self.fetches += fetch is not None
        self.fetch_max_s = worst(self.fetch_max_s, fetch, max)
        cut(self.live, step)  # an earlier record may have had an absurd, later step
        if not self.rank:
            self._take_figures(record, step, loss, part.overflows.add(record))
        for at in LIVE_STEPS:
            if step >= at and all(row.at != at for row in self.live):
                self.live.append(Live(step, at, tuple(self.figures().values())))

    def _take_figures(self, record: Record, step: int, loss: float | None, lowered: bool) -> None:
        """Adds the figures that the gates need only of rank 0; for `lowered` see `Overflows.add`.

        The norm of an overflow, a step with a finite loss, that lowered the scale is not used.
        """
        norm = jsonl.number(record, "grad_norm")
        self.norms += norm is not None
        if not (lowered and math.isfinite(loss or 0) and not math.isfinite(norm or 0)):
            self.norm_min = worst(self.norm_min, norm, min)
        entropy = jsonl.number(record, "gate_entropy_mean")
        collapse = jsonl.number(record, "gate_collapse_frac")
        self.gated += None not in (entropy, collapse)
        self.entropy_min = worst(self.entropy_min, entropy, min)
        self.collapse_max = worst(self.collapse_max, collapse, max)
        self._take_steps(record, step)
        if loss is not None and math.isfinite(loss) and len(self.first_losses) < FIRST_LOSSES:
            self.first_losses.append((step, loss))
        self.newest_figures.append(Figures(step, loss, jsonl.number(record, "bytes_right")))

    def _take_steps(self, record: Record, step: int) -> None:
        """Adds the durations of the steps since the previous record.

        A record whose lists were shortened to fit its line (`cut`) adds no duration.
        """
        durations = jsonl.numbers(record, "steps_dt_s")
        toks_per_s = jsonl.number(record, "toks_per_s")
        first = step - len(durations) + 1
        cut(self.steps, max(first, 0))
        if jsonl.text(record, "cut") in heartbeat.TRIMMABLE:
            return
        tokens = None
        if toks_per_s is not None:
            tokens = toks_per_s * sum(durations) / max(len(durations), 1)
        for number, took_s in enumerate(durations, first):
            self.dropped_steps = self.dropped_steps or len(self.steps) == KEPT_STEPS
            self.steps.append(Step(number, took_s, tokens))

    def figures(self) -> dict[str, float | None]:
        """Returns the present value of each of `FIGURES`."""
        half = self.begin + (self.step - self.begin) // 2
        values = (*self._speed(), self.memory_mib.value, self.memory_mib.growth(half),
                  self.entropy_min, self.collapse_max, self.fetch_max_s)  # fmt: skip
        return dict(zip(FIGURES, values, strict=True))

    def figures_at(self, step: int) -> dict[str, float | None] | None:
        """Returns the figures at one of `LIVE_STEPS`, or None before the rank reached this step."""
        found = [row.figures for row in self.live if row.at == step]
        return dict(zip(FIGURES, found[-1], strict=False)) if found else None

    def _speed(self) -> tuple[float | None, ...]:
        """Returns four values: step count, tokens per second, deviation, and longest ÷ median step.

        The values cover the last steps; the deviation is of tokens per second. All are None if
        fewer than two steps are known, or if a step or its duration is missing or not valid. Speed
        and deviation are None if a step has no valid tokens. Only the newest step may be missing,
        or lack the tokens that the step before has: a foreign program reports the figures of a step
        when the next step begins.
        """
        rows = list(self.steps)
        if [row.tokens is None for row in rows[-2:]] == [False, True]:
            rows.pop()
        rows = rows[-LAST_STEPS:]
        few = self.dropped_steps and len(rows) < LAST_STEPS
        last = rows[-1].step if rows else 0
        wanted = range(last - len(rows) + 1, last + 1)
        times, tokens = [row.took_s for row in rows], [row.tokens or 0.0 for row in rows]
        known = len(rows) > 1 and not few and self.step - last <= 1
        known = known and [row.step for row in rows] == list(wanted)
        if not known or not all(0 < x < math.inf for x in times):
            return None, None, None, None
        ratio = max(times) / statistics.median(times)
        if not all(0 < x < math.inf for x in tokens):
            return len(rows), None, None, ratio
        rates = [each / took_s for each, took_s in zip(tokens, times, strict=True)]
        mean = sum(rates) / len(rates)
        deviation = math.sqrt(sum((x - mean) * (x - mean) for x in rates) / len(rates))
        return len(rows), sum(tokens) / sum(times), deviation, ratio
