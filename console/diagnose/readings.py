"""The input of the watch rules: `Readings` (the newest poll), `History` (figures of the attempt).

No file is read here. Times are CLOCK_MONOTONIC seconds unless the name says otherwise; None means
"not measured".
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from console.diagnose.rank_evidence import OVERDUE, PAUSES, RankEvidence
from console.diagnose.truth_history import TruthHistory
from console.model import Gpu
from console.sources.pace import LAST_GAPS, Progress
from console.sources.procfs import Memory
from trainers.contract import jsonl

NEAR_UNIFORM = 0.99
COLLAPSED_NATS, COLLAPSED_SHARE, COLLAPSED_PART = 0.2, 0.9, 0.5
RSS_EVERY_S, RSS_POINTS, RSS_LEAST = 10.0, 90, 30
PACE_EVERY_S, PACE_RECENT, PACE_POINTS = 10.0, 6, 360
JUMP_KEPT_S = 60.0
WINDOWS = (8, 32, 128)
"""Numbers of newest records whose median rate is compared with the median of earlier rates."""
KEPT_RATES, LEAST_BEFORE, RATED_EVERY_S = 512, 16, 10.0
SURE_Z = 6.0
"""A rate counts as lower only if it fell by more than this many standard errors."""
LEAST_SPREAD = 0.02


@dataclass(frozen=True, slots=True)
class Readings:
    """The data of one poll of one attempt.

    `fresh` has the progress records since the last poll, rank by rank; `progress` has the newest
    progress record of each rank. `records_only` says that `ranks` were derived from the ages of
    records, not from pulses. `newest_ts` is the time in the newest record (unix s). `suspended_s`
    is the time for which this host was suspended since its boot; `mono` does not contain it.
    """

    mono: float
    ts: float
    ranks: tuple[RankEvidence, ...] = ()
    records_only: bool = False
    fresh: Sequence[Progress] = ()
    progress: Mapping[int, Progress] = field(default_factory=dict)
    rss_mib: Mapping[int, float] = field(default_factory=dict)
    memory: tuple[Memory, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    disk_free_gib: float | None = None
    checkpoint_gib: float | None = None
    newest_ts: float | None = None
    suspended_s: float = 0.0
    stall_doubt: str = "no second source was read"
    """Why no second source confirms a stall, or "" if a second source confirms it."""
    csv: Progress | None = None
    """The newest row of training.csv."""
    env: Mapping[str, Any] = field(default_factory=dict)
    """The content of env.json of this attempt, or {} if it is not available."""


def setting_values(run: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values in run.json by setting, or {} without settings (a foreign program).

    `measured.NAME` is a figure of the preflight, and `expects.NAME` a fact that the plan expects.
    """
    settings = jsonl.mapping(run, "settings")
    found = {name: jsonl.mapping(settings, name).get("value") for name in settings}
    measured = jsonl.mapping(jsonl.mapping(run, "machine"), "measured")
    for key, facts in (("measured", measured), ("expects", jsonl.mapping(run, "expects"))):
        found |= {f"{key}.{name}": value for name, value in facts.items()} if settings else {}
    return found


def gate_collapsed(progress: Progress) -> bool | None:
    """Returns whether a figure of the attention gate shows a collapse, or None without a figure."""
    entropy, largest = progress.gate_entropy_mean, progress.gate_max_gate
    part = progress.gate_collapse_frac
    if entropy is None and largest is None and part is None:
        return None
    return (
        (entropy is not None and entropy < COLLAPSED_NATS)
        or (largest is not None and largest > COLLAPSED_SHARE)
        or (part is not None and part > COLLAPSED_PART)
    )  # fmt: skip


@dataclass(slots=True)
class NonFinite:
    """The steps of one rank in this attempt whose loss or gradients were not finite.

    A step need not have a record, so the counts in the records and in the pulse are used too. An
    overflow that only lowered the loss scale of fp16 does not count. The gradient norm of a foreign
    program does not count, because it may be such an overflow.
    """

    losses: int = 0
    gradients: int = 0
    """Number of steps with a finite loss and a gradient norm that is not finite."""
    what: str = ""
    """The figure that was not finite in the newest of these steps."""
    step: int = 0
    """The newest of these steps, or a later step."""
    in_a_row: int = 0
    """Number of newest consecutive progress records with a loss that is not finite."""
    _recorded: int = 0

    @property
    def steps(self) -> int:
        return self.losses + self.gradients

    def add_record(self, progress: Progress) -> None:
        """Adds a progress record."""
        if progress.loss is not None:
            is_bad = not math.isfinite(progress.loss)
            self.in_a_row = self.in_a_row + 1 if is_bad else 0
            self._recorded += is_bad
        losses = max(self._recorded, progress.nonfinite_loss_steps)
        self._add(losses, progress.overflow_steps - progress.scale_lowered_steps, progress.step)

    def add_pulse(self, rank: RankEvidence) -> None:
        """Adds the count in a pulse, which may be newer than the count in the newest record."""
        self._add(rank.nonfinite_steps, 0, rank.step)

    def _add(self, losses: int, gradients: int, step: int) -> None:
        if losses > self.losses or gradients > self.gradients:
            self.what = "loss" if losses > self.losses else "gradient norm"
            self.step = step
        self.losses, self.gradients = max(self.losses, losses), max(self.gradients, gradients)


class Rates:
    """The throughput in the records of rank 0, compared with the earlier throughput.

    While the ratio is below `limit`, new rates are compared with the rates before the drop. So a
    lasting drop does not become the usual throughput.
    """

    def __init__(self, limit: float):
        self.ratio: float | None = None
        """An upper bound of new ÷ old throughput, or None if it is not known."""
        self._limit = limit
        self._logs: deque[float] = deque(maxlen=KEPT_RATES)
        self._usual: list[float] = []
        """The rates before the present drop, or [] if there is none."""
        self._rated_at, self._unrated = -math.inf, False

    def add(self, toks_per_s: float | None) -> None:
        if toks_per_s is not None and 0 <= toks_per_s < math.inf:
            self._logs.append(math.log(max(toks_per_s, 1e-9)))
            self._unrated = True

    def update(self, mono: float) -> None:
        """Sets `ratio`, at most every `RATED_EVERY_S`."""
        if not self._unrated or mono - self._rated_at < RATED_EVERY_S:
            return
        self._rated_at, self._unrated = mono, False
        self.ratio, before = rate_ratio(list(self._logs), self._usual)
        if self.ratio is not None and self.ratio < self._limit:
            self._usual = self._usual or before
        elif self._usual:
            self._logs, self._usual = deque(self._usual, KEPT_RATES), []


def rate_ratio(logs: list[float], usual: list[float]) -> tuple[float | None, list[float]]:
    """Returns two values: an upper bound of new rate ÷ old rate, and the old rates.

    Rates are given as logarithms, in order. For each of `WINDOWS`, the median of the newest rates
    is compared with the median of `usual`, or else of the rates before them. The bound of a window
    is `SURE_Z` standard errors above the measured ratio; the lowest bound is returned. The standard
    error follows from the spread of the rates, so a run with uneven steps needs more rates. Returns
    None and [] until there are enough rates.
    """
    bounds: list[tuple[float, list[float]]] = []
    for count in WINDOWS:
        before, recent = usual or logs[:-count], logs[-count:]
        if len(before) < max(LEAST_BEFORE, count):
            break
        middle = median(before)
        spread = 1.4826 * median([abs(log - middle) for log in before])
        error = 1.2533 * max(spread, LEAST_SPREAD) * math.sqrt(1 / count + 1 / len(before))
        bound = math.exp(min(50.0, median(recent) - middle + SURE_Z * error))
        bounds.append((bound, before))
    return min(bounds, default=(None, []), key=lambda each: each[0])


class History:
    """The attempt so far, in bounded memory. `update` adds the data of one poll.

    `settings` has the values of the run's settings; it is empty for a foreign program. `slow` is
    the limit of `Rates`.
    """

    def __init__(self, settings: Mapping[str, Any] | None = None, slow: float = 1.0) -> None:
        self._settings: Mapping[str, Any] = settings or {}
        self.is_paused = False
        """True while a rank without a `doubt` is in a phase of `PAUSES`."""
        self.is_current = False
        """True if a record is new. Also true if no record is overdue and the run is not paused."""
        self.nonfinite: dict[int, NonFinite] = {}
        self.collapsed: int | None = None
        """Number of consecutive records of rank 0 with a collapsed attention gate."""
        self.uniform_steps: int | None = None
        self.rates = Rates(slow)
        self.fetch_shares: dict[int, float] = {}
        """By rank: the share of fetch in the step time of the newest records. A single step can
        lower the value, but cannot raise it above the share in the records before."""
        self.pace_ratio: float | None = None
        """Pace of about the last minute ÷ earlier pace, by the steps and this host's clock, or
        that of the last `PACE_RECENT` new steps if they took longer than a minute."""
        self.growth_mib_s: dict[int, float] = {}
        """Growth of the memory of each rank."""
        self.truth = TruthHistory()
        self.ecc: dict[int, int] = {}
        """Uncorrected memory errors by GPU since the first poll or a reset of the counter."""
        self.gpu_memory: dict[int, float] = {}
        """The share of the memory of each GPU that was in use when the GPU last answered."""
        self.jump_s = 0.0
        self._ecc_before: dict[int, int] = {}
        self._uniform_since: int | None = None
        self._fetch_shares: dict[int, float] = {}
        self._rss: dict[int, deque[tuple[float, float]]] = {}
        self._rss_at = -math.inf
        self._offset: float | None = None
        self._jumped_at = 0.0
        self._steps: deque[tuple[float, int]] = deque(maxlen=PACE_POINTS)
        """The times at which a new step was seen, without the pauses, and these steps."""
        self._mono: float | None = None
        self._trained_s, self._age_s = 0.0, math.inf
        """The time since the first poll, and since the newest record, both without the pauses."""
        self._gaps_s: deque[float] = deque(maxlen=LAST_GAPS)
        """The last times between polls with a new record, without the pauses."""

    def number(self, setting: str, default: float) -> float:
        """Returns a setting such as `train.warmup_steps`, or `default` if there is no number."""
        found = jsonl.number(self._settings, setting)
        return default if found is None else found

    def value(self, setting: str) -> Any:
        """Returns a setting of the run as run.json has it, or None if run.json lacks it."""
        return self._settings.get(setting)

    @property
    def is_gate_fixed(self) -> bool:
        """True if a setting forces one branch of the attention, or equal weights of all."""
        forced = self.value("attention.force_branch") not in (None, "none")
        return forced or bool(self.value("attention.uniform_gate"))

    def update(self, now: Readings) -> None:
        """Adds the data of one poll."""
        self._update_clock(now.ts - now.mono - now.suspended_s, now.mono)
        self._update_time(now)
        self.truth.update(now.fresh, now.ranks, now.gpus)
        self._update_fetch(now.fresh)
        for progress in now.fresh:
            self.nonfinite.setdefault(progress.rank, NonFinite()).add_record(progress)
            if progress.rank == 0:
                if not self.is_gate_fixed:
                    self._update_gate(progress)
                self.rates.add(progress.toks_per_s)
        for rank in now.ranks:
            if rank.nonfinite_steps >= 0:
                self.nonfinite.setdefault(rank.rank, NonFinite()).add_pulse(rank)
        self.rates.update(now.mono)
        self._update_pace(now)
        if now.rss_mib and now.mono - self._rss_at >= RSS_EVERY_S:
            self._rss_at = now.mono
            self._update_rss(now)
        for gpu in now.gpus:
            if (count := gpu.ecc_uncorrected) is not None:
                before = min(count, self._ecc_before.get(gpu.index, count))
                self._ecc_before[gpu.index], self.ecc[gpu.index] = before, count - before
            if gpu.mem_used_mib is not None and gpu.mem_total_mib:
                self.gpu_memory[gpu.index] = gpu.mem_used_mib / gpu.mem_total_mib

    def _update_time(self, now: Readings) -> None:
        elapsed_s = now.mono - (now.mono if self._mono is None else self._mono)
        was_paused, self._mono = self.is_paused, now.mono
        self.is_paused = any(rank.phase in PAUSES and not rank.doubt for rank in now.ranks)
        if not (was_paused or self.is_paused):
            self._trained_s += elapsed_s
            self._age_s += elapsed_s
        if now.fresh:
            self._gaps_s.extend([self._age_s] if self._age_s < math.inf else [])
            self._age_s = 0.0
        overdue = self._age_s > OVERDUE * max(self._gaps_s, default=0.0)
        self.is_current = bool(now.fresh) or not (self.is_paused or overdue)

    def _update_fetch(self, fresh: Sequence[Progress]) -> None:
        times: dict[int, tuple[float, float, int]] = {}
        for each in fresh:
            if each.dt_fetch_s is not None and each.dt_fetch_s >= 0 and each.step_s:
                fetch_s, steps_s, steps = times.get(each.rank, (0.0, 0.0, 0))
                fetch_s += each.steps * each.dt_fetch_s
                steps_s += each.steps * each.step_s
                times[each.rank] = fetch_s, steps_s, steps + each.steps
        for rank, (fetch_s, steps_s, steps) in times.items():
            share = fetch_s / steps_s
            if steps > 1:
                self.fetch_shares[rank] = share
            elif rank in self._fetch_shares:
                self.fetch_shares[rank] = min(share, self._fetch_shares[rank])
            self._fetch_shares[rank] = share

    def _update_pace(self, now: Readings) -> None:
        """Adds the lowest step of the ranks if it is new, at most every `PACE_EVERY_S`.

        Sets `pace_ratio`. The time in a pause does not count.
        """
        steps = [rank.step for rank in now.ranks if not rank.doubt and rank.phase != "exit"]
        if not steps:
            return
        at_s, step, points = self._trained_s, min(steps), self._steps
        if points and step < points[-1][1]:
            points.clear()
        if not points or (step > points[-1][1] and at_s - points[-1][0] >= PACE_EVERY_S):
            points.append((at_s, step))
        if len(points) > 2 * PACE_RECENT:
            (t0, s0), (t1, s1) = points[0], points[-1 - PACE_RECENT]
            self.pace_ratio = (step - s1) / (at_s - t1) * (t1 - t0) / (s1 - s0)

    def _update_clock(self, offset: float, mono: float) -> None:
        """Sets `jump_s` for `JUMP_KEPT_S` after a clock jump, then accepts the new time."""
        if self._offset is None:
            self._offset = offset
        jump = abs(offset - self._offset)
        if jump > max(self.jump_s, 1.0):
            self.jump_s, self._jumped_at = jump, mono
        if mono - self._jumped_at >= JUMP_KEPT_S:
            self.jump_s, self._offset = 0.0, offset

    def _update_gate(self, progress: Progress) -> None:
        entropy, bad = progress.gate_entropy_mean, gate_collapsed(progress)
        if bad is not None:
            self.collapsed = (self.collapsed or 0) + 1 if bad else 0
        if entropy is None:
            return
        if not entropy >= NEAR_UNIFORM * progress.gate_entropy_max:
            self._uniform_since, self.uniform_steps = None, 0
            return
        if self._uniform_since is None or progress.step < self._uniform_since:
            self._uniform_since = progress.step
        self.uniform_steps = max(1, progress.step - self._uniform_since)

    def _update_rss(self, now: Readings) -> None:
        for rank, rss_mib in now.rss_mib.items():
            points = self._rss.setdefault(rank, deque(maxlen=RSS_POINTS))
            points.append((now.mono, rss_mib))
            if len(points) >= RSS_LEAST:
                self.growth_mib_s[rank] = steady_growth(list(points))


def steady_growth(points: list[tuple[float, float]]) -> float:
    """Returns the steady growth of a figure per second, or 0 if the figure does not grow.

    The points are reduced to the medians of three thirds. The result is the lowest slope between
    two of the medians, because one jump is not steady growth.
    """
    third = len(points) // 3
    parts = (points[:third], points[third:-third], points[-third:])
    (t0, y0), (t1, y1), (t2, y2) = (
        (median([t for t, _ in part]), median([y for _, y in part])) for part in parts
    )
    if not t0 < t1 < t2:
        return 0.0
    return max(0.0, min((y2 - y0) / (t2 - t0), (y2 - y1) / (t2 - t1), (y1 - y0) / (t1 - t0)))
