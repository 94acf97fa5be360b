"""Draws more figures of a random history, for example its speed, memory and GPUs."""

from __future__ import annotations

import math
import random
import statistics
from fractions import Fraction
from typing import Any

from console.sources.gate_files import GateFiles

Record = dict[str, Any]
GPUS = ("gpu_util_above_pct", "gpu_balance_below_pct")
"""Gates that do not always pass where the true value keeps the bound."""
MEMORY, MARKS = "gpu_mem_below_mib", (100, 500)


class Extras:
    """Draws figures of a random history, and stores their true values."""

    def __init__(self, rng: random.Random, kind: str, world: int):
        self.rng, self.kind, self.world = rng, kind, world
        self.rows: list[tuple[int, float, float]] = []
        self.reached = 0
        self.begins: dict[int, int] = {}
        """For each rank, the step of its resume in the first attempt with a record of the rank."""
        self.saved: set[int] = set()
        self.memory: dict[int, list[tuple[int, float]]] = {rank: [] for rank in range(world)}
        self.entropies: list[float] = []
        self.collapses: list[float] = []
        self.fetches: list[float] = []
        self.has_all_statistics = True
        self.unhooked, self.unknown_hooks, self.hooked = 0, 0, 0
        self.samples: list[Record] = []
        self.uses: dict[int, list[float]] = {index: [] for index in range(world)}
        self.mono = 0.0
        self.loads = 0
        self.errors = rng.choice((0, 0, 0, 1))
        self.mib = rng.uniform(1, 2)

    def begin(self, attempt: int) -> None:
        self.attempt, self.times = attempt, []
        self.aux, self.hook = self.rng.random() > 0.1, self.rng.choice(("bf16", "bf16", "none"))
        self.mono += 60
        self.samples.append({"mono": self.mono, "attempt": attempt, "ranks": [{"pulse": None}]})

    def resume(self, step: int) -> None:
        self.reached = min(self.reached, step)
        self.loads += self.attempt > 1 and step > 0

    def cut(self, step: int) -> None:
        self.rows = [row for row in self.rows if row[0] < step]
        self.saved = {each for each in self.saved if each < step}
        self.memory = {r: [x for x in each if x[0] < step] for r, each in self.memory.items()}

    def step(self, step: int) -> None:
        """Adds a step of 1 to 2 s, and a sample one second after the former sample."""
        self.times.append(self.rng.uniform(1, 2))
        self.mono += 1
        used = {index: self.rng.choice((0.0, 50.0, 100.0)) for index in self.uses}
        for index, use in used.items():
            self.uses[index].append(use)
        self.samples.append({
            "mono": self.mono, "attempt": self.attempt,
            "ranks": [{"pulse": {"phase": "forward", "step": step}}] * self.world,
            "gpus": [{"index": i, "state": "ok", "util_pct": use} for i, use in used.items()],
        })  # fmt: skip

    def record(self, step: int, rank: int, toks_per_s: float, mib: float) -> Record:
        """Returns the figures of a progress record of a rank, and stores the true values."""
        self.memory[rank].append((step, mib))
        found: Record = {"steps_dt_s": self.times, "dt_fetch_s": self.rng.random()}
        self.fetches.append(found["dt_fetch_s"])
        if self.aux:
            found |= {"gate_entropy_mean": self.rng.random()}
            found |= {"gate_collapse_frac": self.rng.choice((0.0, 0.0, self.rng.random()))}
        if rank == 0:
            self.has_all_statistics &= self.aux
            if self.aux:
                self.entropies.append(found["gate_entropy_mean"])
                self.collapses.append(found["gate_collapse_frac"])
            first = step - len(self.times) + 1
            tokens = toks_per_s * sum(self.times) / len(self.times)
            self.rows += [(number, dt, tokens) for number, dt in enumerate(self.times, first)]
            self.reached = step
        return found

    def finish(self, stepped: int, has_hook: bool) -> None:
        """Counts the communication hooks; in this attempt, `stepped` ranks may have stepped."""
        self.unknown_hooks += 0 if has_hook else stepped
        self.unhooked += stepped if has_hook and self.hook == "none" else 0
        self.hooked += stepped

    def files(self) -> GateFiles:
        name = f"step_{max(self.saved):08d}" if self.saved else ""
        mib = self.mib if name else None
        return GateFiles(
            self.errors, checkpoint=name, checkpoint_mib=mib, single="0-one", single_toks_per_s=60.0
        )

    @property
    def resumed_at(self) -> int:
        """The step of an earlier run's checkpoint, if each rank recorded that it resumed there."""
        return min(self.begins.get(rank, 0) for rank in range(self.world))

    def needed(self, bound: float, planned: float) -> float:
        """Returns how many checkpoints or loads are needed in the steps after `resumed_at`."""
        begin, last = self.resumed_at, max(Fraction(planned), Fraction(self.reached))
        if not 0 < begin < last:
            return bound
        return max(min(bound, 1), math.floor(Fraction(bound) * (1 - begin / last)))

    def at_marks(self) -> dict[str, float | None]:
        """Returns the true value of the gate `MEMORY` at each of the `MARKS` after the resume."""
        rows, found = [row for each in self.memory.values() for row in each], {}
        for mark in [each for each in MARKS if each > self.resumed_at]:
            reached = min((step for step, _ in rows if step >= mark), default=0)
            found[f"{MEMORY}@{mark}"] = max(
                (x for step, x in rows if step <= reached), default=None
            )
        return found

    def growth(self) -> float | None:
        """Returns the largest growth of a rank (its peak minus that of the first half), or None."""
        found = []
        for rank, each in self.memory.items():
            half = (self.begins.get(rank, 0) + self.reached) / 2
            early = [value for step, value in each if step <= half]
            if not early:
                return None
            found.append(max(value for _, value in each) - max(early))
        return max(found)

    def values(self) -> dict[str, Any]:
        """Returns the true values of gates on these figures; None for a gate without a value."""
        rows = self.rows[-50:]
        last = rows[-1][0] if rows else 0
        whole = len(rows) == 50 and self.reached - last <= 1
        whole &= [row[0] for row in rows] == list(range(last - len(rows) + 1, last + 1))
        times, tokens = [row[1] for row in rows], [row[2] for row in rows]
        all_known = self.unhooked or (self.hooked and not self.unknown_hooks)
        means = [statistics.fmean(each) for each in self.uses.values() if each]
        return {
            "toks_per_s_50_above": sum(tokens) / sum(times) if whole else None,
            "step_ratio_below": max(times) / statistics.median(times) if whole else None,
            "gpu_mem_growth_below_mib": self.growth(),
            "entropy_above": min(self.entropies, default=None) if self.has_all_statistics else None,
            "collapse_below": max(self.collapses, default=None)
            if self.has_all_statistics
            else None,
            "fetch_below_s": max(self.fetches, default=None),
            "heartbeats_complete": 0 if self.fetches else None,
            "checkpoints_at_least": len(self.saved),
            "checkpoints_loaded_at_least": self.loads,
            "checkpoint_mib_above": self.mib if self.saved else None,
            "no_log_errors": self.errors,
            "scaling_above": sum(tokens) / sum(times) / self.world / 60.0 if whole else None,
            "comm_hook_active": self.unhooked if all_known else None,
            "gpu_util_above_pct": min(means, default=None),
            "gpu_balance_below_pct": max(means) - min(means) if means else None,
        }
