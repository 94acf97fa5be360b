"""The attempt so far, for the truth checks: the records of each step by rank, and the GPU samples.

No file is read here. Memory is bounded.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import fmean, median

from console.diagnose.rank_evidence import RankEvidence
from console.model import Gpu
from console.sources.pace import LONGEST_STEP_S, TIMED_PHASES, Progress

KEPT_STEPS, KEPT_LOSSES, KEPT_SKIPS = 48, 512, 256
WINDOW, LEAST = 16, 8
"""Number of newest steps that are compared between ranks, and the least number that is enough."""
SURE_Z, LEAST_SPREAD = 4.0, 0.02
"""Number of standard errors between a ratio and its lower bound; the least spread assumed."""
SURELY = 1.15
"""A difference is certain if the lower bound of its ratio is at least this value."""
SLOWER, MATERIAL = 1.3, 0.1
"""Bounds for a slower rank: the least ratio of its time to the usual time, and the least difference
of the two times as a share of a step."""
ROUNDED_TO = 4
"""A figure with at most this many decimals may be rounded, so it may repeat by chance."""
STEPPING = frozenset((*TIMED_PHASES, "log", "step"))
WARM_STEPS, RATED_EVERY_S = 5, 10.0
KEPT_BUSY, LEAST_BUSY = 120, 20
HALF_BITS = 11
"""A figure with at most this many significant bits may be rounded to half precision."""
SHORTEST_S, LARGEST_LOSS, LARGEST_LOAD = 1e-9, 1e6, 10.0
"""Bounds of valid figures: the shortest time, the largest loss, the largest power ÷ power limit."""


class Same:
    """Counts the consecutive records in which a figure has exactly the same value."""

    def __init__(self) -> None:
        self.value: float | None = None
        self.count = self.added = 0

    def add(self, value: float | None) -> None:
        """Adds a figure; if it is not finite or may be rounded, the count becomes 0.

        None is ignored.
        """
        if value is None:
            return
        self.added += 1
        if not math.isfinite(value) or _is_rounded(value):
            self.value, self.count = None, 0
        else:
            self.count = self.count + 1 if value == self.value else 1
            self.value = value


def _is_rounded(value: float) -> bool:
    halves = math.frexp(value)[0] * (1 << HALF_BITS)
    return round(value, ROUNDED_TO) == value or halves.is_integer()


class TruthHistory:
    """Figures computed from records and GPU samples. `update` adds the data of one poll."""

    def __init__(self) -> None:
        self.first: Progress | None = None
        """The record of step 1 of rank 0."""
        self.losses: deque[float] = deque(maxlen=KEPT_LOSSES)
        """The newest losses of rank 0, without losses that are not finite or not plausible."""
        self.same: dict[str, Same] = {"loss": Same(), "grad_norm": Same()}
        self.zero_norms: dict[int, int] = {}
        """Number of consecutive records with a gradient norm of zero, by rank."""
        self.most_zero_norms: int | None = None
        """The highest such number of rank 0 since the last poll, None before its first norm."""
        self.busy: deque[float] = deque(maxlen=KEPT_BUSY)
        """Mean utilisation of the GPUs (0 to 1), added when the slowest rank finishes a step."""
        self.power: deque[float] = deque(maxlen=KEPT_BUSY)
        """Mean power draw ÷ power limit of the GPUs, added with `busy` if it is known."""
        self._skips: deque[tuple[int, int]] = deque(maxlen=KEPT_SKIPS)
        self._steps: dict[int, dict[int, Progress]] = {}
        self._newest: dict[int, Progress] = {}
        self._added = 0
        self._slow: tuple[float, str] | None = None
        self._slow_at, self._slow_mono, self._mono = 0, -math.inf, 0.0
        self._usual: dict[int, dict[str, float]] = {}
        self._usual_at, self._usual_step_s = 0, 0.0
        self._busy_step: int | None = None
        self._samples: list[tuple[float, float | None]] = []

    def update(
        self, fresh: Sequence[Progress], ranks: Sequence[RankEvidence], gpus: Sequence[Gpu],
        mono: float, is_slow: bool,
    ) -> None:  # fmt: skip
        """Adds the new records and one sample of the GPUs taken at `mono` (monotonic s).

        `is_slow` says that the run is slower than before.
        """
        self._mono, most = mono, self.zero_norms.get(0)
        for progress in fresh:
            self._add(progress)
            most = self.zero_norms.get(0) if most is None else max(most, self.zero_norms[0])
        self.most_zero_norms = most
        if fresh and not is_slow:
            self._update_usual()
        if gpus:
            self._add_busy(ranks, self.own_gpus(gpus))

    def _add(self, progress: Progress) -> None:
        rank, norm = progress.rank, progress.grad_norm
        if norm is not None:
            self.zero_norms[rank] = self.zero_norms.get(rank, 0) + 1 if norm == 0 else 0
        self._newest[rank] = progress
        self._steps.setdefault(progress.step, {})[rank] = progress
        if len(self._steps) > KEPT_STEPS:
            del self._steps[next(iter(self._steps))]
        self._added += 1
        if rank == 0:
            self._add_first_rank(progress)

    def _add_first_rank(self, progress: Progress) -> None:
        if progress.step == 1:
            self.first = progress
        if progress.loss is not None and abs(progress.loss) < LARGEST_LOSS:
            self.losses.append(progress.loss)
        for name, same in self.same.items():
            same.add(getattr(progress, name))
        skipped = progress.skipped_steps
        if skipped is not None:
            if self._skips and (progress.step, skipped) < self._skips[-1]:
                self._skips.clear()
            self._skips.append((progress.step, skipped))

    # --- over the records of rank 0 ------------------------------------------------------------

    def skipped_share(self, steps: int, after: int) -> tuple[float, int] | None:
        """Returns two values: the share of skipped steps, and the number of steps that it covers.

        The share covers the last `steps` steps or more. Returns None unless the stored records
        cover `steps` steps after their first `after` steps.
        """
        if not self._skips:
            return None
        (first, _), (last, skipped) = self._skips[0], self._skips[-1]
        for step, before in reversed(self._skips):
            if step < first + after:
                return None
            if last - step >= steps and skipped >= before:
                return (skipped - before) / (last - step), last - step
        return None

    def step_s(self) -> float | None:
        """Returns the median step time of rank 0's newest records, or None if there are too few."""
        newest = [found[0] for found in self._steps.values() if 0 in found][-WINDOW:]
        times = [each.step_s for each in newest if each.step_s and each.step_s > SHORTEST_S]
        return median(times) if len(times) == WINDOW else None

    # --- over the ranks ------------------------------------------------------------------------

    def _complete(self) -> list[dict[int, Progress]]:
        """Returns the stored steps that every rank has recorded, oldest first."""
        return [found for found in self._steps.values() if len(found) == len(self._newest)]

    def same_batches(self) -> tuple[int, tuple[int, ...]]:
        """Returns two values: the number of steps in which ranks share a batch, and these ranks.

        Only the newest steps of `_complete` count. The ranks share a batch in each of these steps.
        """
        count, ranks = 0, frozenset[int]()
        for found in reversed(self._complete()):
            by_sum: dict[str, list[int]] = {}
            for rank, progress in found.items():
                if progress.batch_crc32:
                    by_sum.setdefault(progress.batch_crc32, []).append(rank)
            alike = frozenset(max(by_sum.values(), key=len, default=[]))
            alike = alike & ranks if count else alike
            if len(alike) < 2:
                break
            count, ranks = count + 1, alike
        return count, tuple(sorted(ranks))

    def has_batches(self) -> bool:
        """Returns whether at least two ranks record which batch they read in the same step."""
        return any(
            sum(each.batch_crc32 != "" for each in found.values()) > 1 for found in self._complete()
        )

    def slow(self, phases: Sequence[str]) -> tuple[float, str] | None:
        """Returns two values: the slowest rank's time in `phases` ÷ that of the others, and a text.

        The ratio is a lower bound until the difference is certain, and 1 if the difference is
        small. Returns None for a single rank, or until there are enough records.
        """
        if self._slow_at != self._added and self._mono - self._slow_mono >= RATED_EVERY_S:
            self._slow_at, self._slow_mono = self._added, self._mono
            self._slow = self._find_slow(phases)
        return self._slow

    def _find_slow(self, phases: Sequence[str]) -> tuple[float, str] | None:
        steps = [
            found for found in self._complete()[-WINDOW:]
            if all(spent(each, phases) > 0 for each in found.values())
        ]  # fmt: skip
        if len(self._newest) < 2 or len(steps) < LEAST:
            return None
        own = {rank: [spent(found[rank], phases) for found in steps] for rank in self._newest}
        usual = {rank: median(times) for rank, times in own.items()}
        rank = max(usual, key=lambda each: usual[each])
        others = [times for other, times in own.items() if other != rank]
        logs = [
            math.log(mine / median(theirs))
            for mine, *theirs in zip(own[rank], *others, strict=True)
        ]  # fmt: skip
        middle = median(logs)
        ratio, spread = math.exp(middle), 1.4826 * median(abs(log - middle) for log in logs)
        error = 1.2533 * max(spread, LEAST_SPREAD) / math.sqrt(len(logs))
        bound = math.exp(middle - SURE_Z * error)
        usual_s = median(usual[other] for other in usual if other != rank)
        excess_s = usual[rank] - usual_s
        if excess_s < MATERIAL * median(found[rank].step_s or 0.0 for found in steps):
            return 1.0, ""
        parts = {phase: _compared(steps, rank, phase) for phase in phases}
        phase = max(parts, key=lambda name: parts[name][0] - parts[name][1])
        mine_s, theirs_s = _compared(steps, rank, "backward")
        waits = "; the others wait for it in backward" if theirs_s - mine_s >= excess_s / 2 else ""
        who = self._in_words([r for r in sorted(usual) if usual[r] >= SLOWER * usual_s] or [rank])
        text = (
            f"{who} takes {ratio:.1f} times as long as the other ranks in {' and '.join(phases)}, "
            f"mostly in {phase} ({parts[phase][0]:.3g} s against {parts[phase][1]:.3g} s, median "
            f"of {len(steps)} records){waits}; compare clocks, temperature, CPU load and data"
        )
        return ratio if bound >= SURELY else bound, text

    def _update_usual(self) -> None:
        """Replaces the usual times after every `WINDOW` records per rank.

        Fewer than `WINDOW` complete steps replace nothing.
        """
        if self._added - self._usual_at < WINDOW * len(self._newest):
            return
        steps, self._usual_at = self._complete(), self._added
        if len(steps) >= WINDOW:
            self._usual = {rank: _medians(steps, rank) for rank in self._newest}
            self._usual_step_s = median(found[min(found)].step_s or 0.0 for found in steps)

    def slower(self) -> str:
        """Returns a text with the ranks known to be slower than before and their phase, or ""."""
        steps = self._complete()[-LEAST:]
        if len(steps) < LEAST or self._usual.keys() != self._newest.keys():
            return ""
        now = {rank: _medians(steps, rank) for rank in self._newest}
        found: list[tuple[bool, float, str, dict[int, float]]] = []
        for phase in TIMED_PHASES:
            pairs = {rank: (self._usual[rank][phase], now[rank][phase]) for rank in now}
            growth_s = max(new - old for old, new in pairs.values())
            ratios = {
                rank: new / old for rank, (old, new) in pairs.items()
                if new > old > 0 and new - old >= growth_s / 2
            }  # fmt: skip
            material = growth_s >= MATERIAL * self._usual_step_s
            if material and max(ratios.values(), default=0.0) >= SLOWER:
                # In backward a rank also waits for slower ranks, so other phases come first.
                found.append((phase != "backward", growth_s, phase, ratios))
        if not found:
            return ""
        _, _, phase, ratios = max(found, key=lambda each: each[:2])
        everyone = len(ratios) == len(self._newest) > 1
        who = "all ranks take" if everyone else f"{self._in_words(sorted(ratios))} takes"
        return f"; {who} {median(ratios.values()):.1f} times as long as before in {phase}"

    def _in_words(self, ranks: Sequence[int]) -> str:
        """Returns the names of ranks; adds the host if the host has no other ranks.

        The host is not added for a single rank, or for all ranks of the run.
        """
        hosts = {self._newest[rank].host for rank in ranks}
        of_host = [rank for rank, each in self._newest.items() if each.host in hosts]
        if len(hosts) == 1 < len(ranks) == len(of_host) < len(self._newest):
            return f"each rank of host {hosts.pop()} ({', '.join(map(str, ranks))})"
        return f"{'each of ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks))}"

    # --- over the samples ----------------------------------------------------------------------

    def own_gpus(self, gpus: Sequence[Gpu]) -> list[Gpu]:
        """Returns the GPUs with at least as much memory in use as a rank of this run reserves.

        Returns [] if a rank has recorded no reserved memory. Also returns [] if the number of such
        GPUs differs from the number of ranks, because other jobs may then use GPUs too.
        """
        needed = [each.gpu_mem_reserved or 0.0 for each in self._newest.values()]
        if not needed or min(needed) <= 0:
            return []
        found = [gpu for gpu in gpus if (gpu.mem_used_mib or 0.0) >= min(needed)]
        return found if len(found) == len(needed) else []

    def on_gpus(self) -> bool:
        """Returns whether a rank has recorded the memory of a GPU."""
        return any(each.gpu_mem_reserved is not None for each in self._newest.values())

    def _add_busy(self, ranks: Sequence[RankEvidence], gpus: Sequence[Gpu]) -> None:
        """Adds a sample of the GPUs.

        When the slowest rank has finished a step, the mean utilisation is appended to `busy`. The
        samples are dropped if the utilisation is not known, or if a rank is in its first steps or
        in a phase outside `STEPPING`.
        """
        used = [g.util_pct for g in gpus if g.util_pct is not None and 0 <= g.util_pct <= 100]
        step = min((each.step for each in ranks), default=0)
        warm = all(each.step > each.first_step + WARM_STEPS for each in ranks)
        if not used or not warm or any(each.phase not in STEPPING for each in ranks):
            self._busy_step, self._samples = None, []
            return
        if self._busy_step is not None and step > self._busy_step and self._samples:
            self.busy.append(fmean(busy for busy, _ in self._samples))
            powers = [power for _, power in self._samples if power is not None]
            if powers:
                self.power.append(fmean(powers))
            self._samples = []
        self._busy_step = step if self._busy_step is None else max(step, self._busy_step)
        shares = [g.power_w / g.power_limit_w for g in gpus if g.power_w and g.power_limit_w]
        known = len(shares) == len(gpus) and 0 < min(shares) <= max(shares) < LARGEST_LOAD
        power = fmean(shares) if known else None
        self._samples = [*self._samples[-KEPT_BUSY:], (fmean(used) / 100, power)]


def spent(progress: Progress, phases: Sequence[str]) -> float:
    """Returns the seconds that a rank spent in the given phases; an invalid time adds nothing."""
    times = (getattr(progress, f"dt_{phase}_s") for phase in phases)
    return math.fsum(s for s in times if s is not None and SHORTEST_S <= s <= LONGEST_STEP_S)


def _medians(steps: Sequence[dict[int, Progress]], rank: int) -> dict[str, float]:
    """Returns the median seconds of a rank in each phase."""
    return {p: median(spent(found[rank], (p,)) for found in steps) for p in TIMED_PHASES}


def _compared(steps: Sequence[dict[int, Progress]], rank: int, phase: str) -> tuple[float, float]:
    """Returns two values: the median seconds of a rank in a phase, and those of the other ranks."""
    times = [{r: spent(each, (phase,)) for r, each in found.items()} for found in steps]
    others = (median(s for r, s in each.items() if r != rank) for each in times)
    return median(each[rank] for each in times), median(others)
