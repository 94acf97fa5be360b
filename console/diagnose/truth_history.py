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
from console.status_text import rank_names

KEPT_STEPS, KEPT_LOSSES, KEPT_SKIPS = 48, 512, 256
WINDOW, LEAST = 16, 8
"""Number of newest steps that are compared between ranks, and the least number that is enough."""
SURE_Z, LEAST_SPREAD = 4.0, 0.02
"""Number of standard errors between a ratio and its lower bound; the least spread assumed."""
SURELY = 1.15
"""A difference is certain if the lower bound of its ratio is at least this value."""
SLOWER, MATERIAL = 1.3, 0.1
"""A rank is named as slower if it takes at least `SLOWER` times as long as the other ranks. A
difference of less than `MATERIAL` of a step is ignored."""
ROUNDED_TO = 4
"""A figure with at most this many decimals may be rounded, so it may repeat by chance."""
STEPPING = frozenset((*TIMED_PHASES, "log", "step"))
WARM_STEPS = 5
KEPT_BUSY, LEAST_BUSY = 120, 20
"""Number of newest samples of the GPUs, and the least number that is enough."""
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
        """The newest losses of rank 0 that are finite and plausible."""
        self.same: dict[str, Same] = {"loss": Same(), "grad_norm": Same()}
        self.zero_norms: dict[int, int] = {}
        """Number of consecutive records with a gradient norm of zero, by rank."""
        self.busy: deque[tuple[float, float | None]] = deque(maxlen=KEPT_BUSY)
        """Mean utilisation (0 to 1) and mean power draw ÷ power limit of the GPUs by sample.

        Only samples in training steps are stored. The power is None if it is not known.
        """
        self._skips: deque[tuple[int, int]] = deque(maxlen=KEPT_SKIPS)
        self._steps: dict[int, dict[int, Progress]] = {}
        self._newest: dict[int, Progress] = {}

    def update(
        self, fresh: Sequence[Progress], ranks: Sequence[RankEvidence], gpus: Sequence[Gpu]
    ) -> None:  # fmt: skip
        """Adds the new records and, if all ranks train after `WARM_STEPS`, a sample of the GPUs."""
        # By step, because the limit KEPT_STEPS applies to all ranks together.
        for progress in sorted(fresh, key=lambda each: each.step):
            self._add(progress)
        is_training = all(
            each.phase in STEPPING and each.step > each.first_step + WARM_STEPS for each in ranks
        )
        if is_training:
            self._add_busy(self.own_gpus(gpus))

    def _add(self, progress: Progress) -> None:
        rank, norm = progress.rank, progress.grad_norm
        if norm is not None:
            self.zero_norms[rank] = self.zero_norms.get(rank, 0) + 1 if norm == 0 else 0
        self._newest[rank] = progress
        self._steps.setdefault(progress.step, {})[rank] = progress
        if len(self._steps) > KEPT_STEPS:
            del self._steps[next(iter(self._steps))]
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

    # --- the records of rank 0 -----------------------------------------------------------------

    def skipped_share(self, steps: int, after: int) -> tuple[float, int] | None:
        """Returns two values: the share of skipped steps, and the number of steps that it covers.

        The share covers the last `steps` steps or more. Returns None if the stored records cover
        fewer than `steps` steps after their first `after` steps.
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

    # --- the records of all ranks --------------------------------------------------------------

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
        """Returns whether at least two ranks recorded their batch in a step of `_complete`."""
        return any(
            sum(each.batch_crc32 != "" for each in found.values()) > 1 for found in self._complete()
        )

    def slow(self, phases: Sequence[str]) -> tuple[float, str] | None:
        """Returns the slowest rank's time in `phases` ÷ the time of the others, and a text.

        The ratio is 1 if the difference is below `MATERIAL`. It is a lower bound until the
        difference is certain. Returns None for a single rank, or while there are too few records.
        """
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
        slower = [r for r in sorted(usual) if usual[r] >= SLOWER * usual_s] or [rank]
        who = rank_names(slower, "takes", "each take")
        text = (
            f"{who} {ratio:.1f} times as long as the other ranks in {' and '.join(phases)}, "
            f"mostly in {phase} ({parts[phase][0]:.3g} s against {parts[phase][1]:.3g} s, median "
            f"of {len(steps)} records){waits}; compare clocks, temperature, CPU load and data"
        )
        return ratio if bound >= SURELY else bound, text

    # --- the GPUs ------------------------------------------------------------------------------

    def own_gpus(self, gpus: Sequence[Gpu]) -> list[Gpu]:
        """Returns the GPUs that the ranks seem to use, judged by the memory in use.

        A GPU counts if its memory in use is at least the smallest memory that a rank has reserved.
        Returns [] if a rank has recorded no reserved memory. Also returns [] if the numbers of such
        GPUs and of ranks differ: other jobs may then use GPUs.
        """
        needed = [each.gpu_mem_reserved or 0.0 for each in self._newest.values()]
        if not needed or min(needed) <= 0:
            return []
        found = [gpu for gpu in gpus if (gpu.mem_used_mib or 0.0) >= min(needed)]
        return found if len(found) == len(needed) else []

    def on_gpus(self) -> bool:
        """Returns whether the newest record of a rank has the memory of a GPU."""
        return any(each.gpu_mem_reserved is not None for each in self._newest.values())

    def _add_busy(self, gpus: Sequence[Gpu]) -> None:
        """Adds a sample of the GPUs; ignores the sample if no utilisation is known."""
        used = [g.util_pct for g in gpus if g.util_pct is not None and 0 <= g.util_pct <= 100]
        if not used:
            return
        shares = [g.power_w / g.power_limit_w for g in gpus if g.power_w and g.power_limit_w]
        known = len(shares) == len(gpus) and 0 < min(shares) <= max(shares) < LARGEST_LOAD
        self.busy.append((fmean(used) / 100, fmean(shares) if known else None))


def spent(progress: Progress, phases: Sequence[str]) -> float:
    """Returns the seconds that a rank spent in the given phases; an invalid time adds nothing."""
    times = (getattr(progress, f"dt_{phase}_s") for phase in phases)
    return math.fsum(s for s in times if s is not None and SHORTEST_S <= s <= LONGEST_STEP_S)


def _compared(steps: Sequence[dict[int, Progress]], rank: int, phase: str) -> tuple[float, float]:
    """Returns the median seconds in a phase, first of one rank, then of the other ranks."""
    times = [{r: spent(each, (phase,)) for r, each in found.items()} for found in steps]
    others = (median(s for r, s in each.items() if r != rank) for each in times)
    return median(each[rank] for each in times), median(others)
