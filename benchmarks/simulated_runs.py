"""Simulated attempts with heavy-tailed step times: the input of `benchmarks.watch_hours`."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from console.diagnose.rank_evidence import RankEvidence
from console.diagnose.readings import Readings
from console.model import Gpu
from console.sources.pace import LAST_GAPS, UNIFORM_NATS, Pace
from console.sources.procfs import HOST_MEMORY, Memory

HOUR_S, SICK_AT_S = 3600, 3600.0
COLLECTIVE_TIMEOUT_S = 1795.0
PHASES = ("fetch", "forward", "backward", "optimizer", "log")
SHARES = (0.02, 0.33, 0.55, 0.06, 0.04)
Draw = Callable[[random.Random], float]


def lognormal(rng: random.Random) -> float:
    """Returns a step time as a multiple of the median, lognormal with sigma 1."""
    return rng.lognormvariate(0.0, 1.0)


def pareto(rng: random.Random) -> float:
    """Returns a multiple of the median step time: about 1, and in 1 of 100 steps a long tail."""
    tail = 2 * rng.paretovariate(1.1) if rng.random() < 0.01 else 0.0
    return rng.lognormvariate(0.0, 0.1) + tail


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of run: its step times, their median in s, steps per record, ranks."""

    name: str
    draw: Draw
    median_s: float
    log_every: int
    world: int = 2


CASES = (*(
    Case(f"{draw.__name__}, {median_s:g} s a step, record every {log_every}", draw, median_s,
         log_every, world)
    for draw in (lognormal, pareto)
    for median_s, log_every, world in ((1.0, 20, 2), (1.0, 1, 2), (10.0, 20, 8), (60.0, 20, 2))
), Case("pareto, 1 s a step, record every 1, alone", pareto, 1.0, 1, 1))  # fmt: skip


class Run:
    """One simulated attempt: the times of the phases of each rank, and the records."""

    def __init__(self, case: Case, rng: random.Random):
        self.case, self.rng = case, rng
        self.paces = [Pace() for _ in range(case.world)]
        self.random_bytes = rng.random() < 0.5
        self.settings = {
            "data.source": "synthetic" if self.random_bytes else "text", "data.seq_len": 512,
            "train.batch_size": 8, "train.accumulate": 1, "train.strategy": "ddp",
            "model.vocab_size": 256, "attention.force_branch": "none",
        }  # fmt: skip
        self.env = {
            "config": "configs/m7c_125m.yaml", "run": "base-1/0-train", "parameters": 81_894_576,
            "parameters_counted": 81_894_576, "backend": {"cmp": "masked", "win": "banded"},
        }  # fmt: skip
        self.skipped, self.calibrates = 0, rng.random() < 0.5
        self.busy, self.power = rng.uniform(0.45, 1.0), rng.uniform(0.4, 0.9)
        self.first = rng.choice((0, rng.randrange(20, 40_000, 20)))
        self.step, self.slower, self.slow_until = self.first, 0.0, 0.0
        self.next_eval, self.next_save = rng.uniform(600, 3000), rng.uniform(900, 4000)
        self.learns_at = self.step + rng.uniform(50, 3000)
        self.entropy = UNIFORM_NATS
        self.durations: list[float] = []
        self.recorded: list[float] = []
        """The times of the records."""
        self.spent = [[0.0] * 4 for _ in range(case.world)]
        self.edges: list[list[tuple[float, int, str]]] = [
            [(0.0, 0, "boot"), (rng.uniform(5, 120), 0, "load")] for _ in range(case.world)
        ]
        self.ends = rng.uniform(130, 280)
        self.sick_at = SICK_AT_S
        self.spoil: Callable[[dict[str, Any]], None] = lambda record: None

    def advance(self) -> None:
        """Simulates one step, and the pauses after it."""
        begun, rng, case = self.ends, self.rng, self.case
        self.step += 1
        took = case.median_s * case.draw(rng) + self.slower * case.median_s
        took = (
            rng.uniform(20, 280) if self.step == self.first + 1 else min(took, COLLECTIVE_TIMEOUT_S)
        )
        usual = min(took, 2 * case.median_s)
        victim, phase = rng.randrange(case.world), rng.choice((0, 1, 2, 3))
        if self.slower:
            victim, phase = 0, 0
        common = 0.0
        own: list[list[float]] = []
        for rank in range(case.world):
            parts = [share * usual * rng.uniform(0.9, 1.1) for share in SHARES]
            if rank == victim:
                parts[phase] += took - usual
            own.append(parts)
            common = max(common, sum(parts[:3]))
        ended = begun + max(common + sum(parts[3:]) for parts in own)
        for rank, parts in enumerate(own):
            at = begun
            self.edges[rank].append((at, self.step, "fetch"))
            self.edges[rank].append((at := at + parts[0], self.step, "forward"))
            self.edges[rank].append((at + parts[1], self.step, "backward"))
            self.edges[rank].append((begun + common, self.step, "optimizer"))
            self.edges[rank].append((min(ended, begun + common + parts[3]), self.step, "log"))
            told = (parts[0], parts[1], common - parts[0] - parts[1], parts[3])
            for place, seconds in enumerate(told):
                self.spent[rank][place] += seconds
        self.durations.append(ended - begun)
        self.ends = ended
        if self.step - self.first <= 5 or self.step % case.log_every == 0:
            self._record()
        self._pause()

    def _record(self) -> None:
        rng, count = self.rng, len(self.durations)
        if self.step > self.learns_at:
            drift = self.entropy + rng.gauss(-0.002, 0.01)
            self.entropy = min(1.09, max(0.4, drift))
        tokens = 4096 * self.case.world * count
        self.skipped += sum(
            rng.random() < (0.4 if self.calibrates and self.step - self.first < 30 else 0.005)
            for _ in range(count)
        )
        loss = 5.5 / (1 + self.step / 2000) + abs(rng.gauss(0, 0.3))
        if self.random_bytes:
            loss = (
                math.log(256)
                + abs(rng.gauss(0, 0.3)) / self.step
                + rng.gauss(0.002, 0.26 / math.sqrt(4096 * self.case.world))
            )
        for rank in range(self.case.world):
            record = {
                "v": 1, "attempt": 1, "rank": rank, "step": self.step, "msg": "progress",
                "ts": self.ends, "loss": loss, "host": f"node{rank // 4}",
                "batch_crc32": f"{rng.getrandbits(32):08x}", "gpu_mem_reserved": 60_000,
                "grad_norm": "inf" if rng.random() < 1e-3 else rng.lognormvariate(0, 0.7),
                "skipped_steps": self.skipped, "steps_dt_s": list(self.durations),
                "toks_per_s": tokens / sum(self.durations), "gate_entropy_mean": self.entropy,
                "gate_max_gate": 0.36 + 0.4 * (UNIFORM_NATS - self.entropy),
                "gate_collapse_frac": abs(rng.gauss(0, 0.02)),
            }  # fmt: skip
            for place, name in enumerate(("fetch", "forward", "backward", "optimizer")):
                record[f"dt_{name}_s"] = self.spent[rank][place] / count
            self.spoil(record)
            self.paces[rank].add(record, 1, self.ends, self.ends)
        self.recorded.append(self.ends)
        self.durations, self.spent = [], [[0.0] * 4 for _ in range(self.case.world)]

    def _pause(self) -> None:
        rng = self.rng
        if self.ends > self.next_eval:
            self._all("eval", rng.uniform(10, 280))
            self.next_eval = self.ends + rng.uniform(1200, 5000)
        if self.ends > self.next_save:
            self._all("save", rng.uniform(300, 900) if rng.random() < 0.05 else rng.uniform(2, 200))
            self.next_save = self.ends + rng.uniform(1200, 7200)
        if self.ends > self.slow_until:
            slow = self.slower == 0 and rng.random() < 0.001
            self.slower = rng.uniform(0.5, 4.0) if slow else 0.0
            self.slow_until = self.ends + (rng.uniform(600, 3600) if slow else 30)

    def _all(self, phase: str, took: float) -> None:
        for edges in self.edges:
            edges.append((self.ends, self.step, phase))
        self.ends += took

    def evidence(self, now: float) -> tuple[RankEvidence, ...]:
        """Returns the evidence about every rank at the time `now`."""
        found = []
        last = bisect_right(self.recorded, now)
        times = self.recorded[max(0, last - LAST_GAPS - 1) : last]
        records_s = now - times[-1] if times else None
        gap_s = max((after - before for before, after in pairwise(times)), default=0.0)
        for rank, edges in enumerate(self.edges):
            index = bisect_right(edges, (now, 1 << 60, "")) - 1
            at, step, phase = edges[index]
            if index > 200:
                del edges[:index]
            p99_s = self.paces[rank].p99_s(phase)
            found.append(RankEvidence(
                rank, 1000 + rank, "S", step, phase, now - at, step, p99_s, self.first + 1,
                records_s=records_s, records_gap_s=gap_s,
            ))  # fmt: skip
        return tuple(found)


def moments(run: Run, hours: float, every_s: int = 1) -> Iterator[Readings]:
    """Yields the readings of a supervisor, one every `every_s` seconds."""
    rng, world = run.rng, run.case.world
    peak = rng.uniform(2000, 16_000)
    for second in range(0, int(hours * HOUR_S), every_s):
        now = second + 0.5
        while run.ends <= now:
            run.advance()
        rss = {rank: peak * (1 - math.exp(-now / 900)) + rng.random() * 60 for rank in range(world)}
        seen = run.evidence(now)
        works = all(each.phase in PHASES for each in seen)
        busy = min(1.0, max(0.0, run.busy + rng.gauss(0, 0.1))) if works else 0.1 * rng.random()
        gpus = tuple(
            Gpu(rank, "A100", "error" if rng.random() < 1e-4 else "ok", util_pct=100 * busy,
                power_w=60 + 340 * busy * run.power * rng.uniform(0.8, 1.1), power_limit_w=400.0,
                mem_used_mib=61_000 + 500 * rng.random(), mem_total_mib=81_920.0,
                throttle="hardware thermal" if rng.random() < 0.01 else "", ecc_uncorrected=0)
            for rank in range(world)
        )  # fmt: skip
        yield Readings(
            mono=now, ts=1.8e9 + now + 0.2 * math.sin(now / 5000), ranks=seen, env=run.env,
            fresh=[progress for pace in run.paces for progress in pace.take_fresh()],
            progress={rank: p for rank, pace in enumerate(run.paces) if (p := pace.progress)},
            rss_mib=rss, gpus=gpus,
            memory=(Memory(HOST_MEMORY, 512_000, 400_000 - sum(rss.values())),),
            disk_free_gib=300 + 50 * math.sin(now / 7000), checkpoint_gib=1.5, stall_doubt="",
        )  # fmt: skip
