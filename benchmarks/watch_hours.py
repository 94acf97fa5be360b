"""False stops of healthy runs by the watchdog: `python -m benchmarks.watch_hours`.

First replays healthy histories through the real watchdog with --halt, one update a second. They
have step times with heavy tails, where one phase of one rank is slow and the other ranks wait. They
also have records every 1 or 20 steps; pauses for evaluation and saving; hours of a slow loader;
drifting entropy; restarts; text or random bytes; fp16 that calibrates its loss scale; and busy or
half idle GPUs. Then replays sick histories, each of which must raise the alert of its rule.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from benchmarks.common import publish, table
from console.diagnose.rank_evidence import RankEvidence
from console.diagnose.readings import History, Readings
from console.diagnose.rules import HALTING, RULES, STRONG
from console.diagnose.verdict import diagnose
from console.diagnose.watchdog import Watchdog
from console.model import Gpu
from console.plan import Watch
from console.sources.pace import LAST_GAPS, UNIFORM_NATS, Pace

HOUR_S, RUN_HOURS = 3600, 10.0
SICK_AT_S, SICK_HOURS = 3600.0, 3.0
COLLECTIVE_TIMEOUT_S = 1795.0
PHASES = ("fetch", "forward", "backward", "optimizer", "log")
SHARES = (0.02, 0.33, 0.55, 0.06, 0.04)
ACT_S = (180, 300, 600, 900, 1800)
CONFIDENCE = ("", "low", "medium", "high")
Draw = Callable[[random.Random], float]


def lognormal(rng: random.Random) -> float:
    """Returns a step time in medians, lognormal with sigma 1."""
    return rng.lognormvariate(0.0, 1.0)


def pareto(rng: random.Random) -> float:
    """Returns a step time in medians: nearly 1, but 1 in 100 has a tail of exponent 1.1."""
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


@dataclass(slots=True)
class Counts:
    """The counts of one replay. `lasted_s` are the durations of stalls beyond three limits.

    `said` counts the stalls with a verdict, by the highest confidence of the verdict.
    """

    hours: float = 0.0
    looks: int = 0
    looking_s: float = 0.0
    raised: Counter[str] = field(default_factory=Counter)
    acted: Counter[str] = field(default_factory=Counter)
    lasted_s: list[float] = field(default_factory=list)
    said: Counter[str] = field(default_factory=Counter)

    def add(self, other: Counts) -> None:
        self.hours += other.hours
        self.looks += other.looks
        self.looking_s += other.looking_s
        self.raised += other.raised
        self.acted += other.acted
        self.lasted_s += other.lasted_s
        self.said += other.said


class Run:
    """One simulated attempt: times of the phases of each rank, records, memory, GPUs."""

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
        """Returns the evidence about every rank."""
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
            rss_mib=rss,
            host_total_mib=512_000, host_free_mib=400_000 - sum(rss.values()), gpus=gpus,
            disk_free_gib=300 + 50 * math.sin(now / 7000), checkpoint_gib=1.5, stall_doubt="",
        )  # fmt: skip


def halting(run: Run, every_s: int = 1) -> Watchdog:
    """Returns a watchdog with default limits and --halt."""
    return Watchdog(Watch(), dict.fromkeys(HALTING, "halt"), every_s, run.settings)


def replay(case: Case, hours: float, seed: int, every_s: int = 1) -> Counts:
    """Returns the alerts and actions for healthy runs of one kind, one update every `every_s`."""
    counts, rng = Counts(), random.Random(f"{case.name} {seed}")
    while counts.hours < hours:
        # An attempt may end early; the next attempt resumes, or starts at step 1.
        length = min(RUN_HOURS * rng.choice((0.1, 1)), hours - counts.hours)
        run, lasted, surest = Run(case, rng), 0.0, ""
        dog = halting(run, every_s)
        for now in moments(run, length, every_s):
            begun = time.thread_time()
            changes = dog.update(now)
            counts.looking_s += time.thread_time() - begun
            counts.looks += 1
            if "stall" in dog.raised():
                verdict = diagnose(now.ranks, dog.watch, now.ts)
                surest = max(surest, verdict.sure if verdict else "", key=CONFIDENCE.index)
                found = RULES["stall"].measure(now, History(), dog.watch)
                if found is not None and found.value >= 3:
                    lasted = max(lasted, found.lasted_s)
            else:
                counts.lasted_s += [lasted] if lasted else []
                counts.said[surest] += bool(surest)
                lasted, surest = 0.0, ""
            for change in changes:
                if change.kind == "raise":
                    counts.raised[change.rule.name] += 1
                elif change.kind == "act" and change.action in STRONG:
                    counts.acted[change.rule.name] += 1
        counts.hours += length
    return counts


# --- sick runs -------------------------------------------------------------------------------

CALM = Case("even", lambda rng: rng.lognormvariate(0.0, 0.1), 1.0, 20)
Spoil = Callable[[Run, Readings], Readings]


def _in_records(**fields: Any) -> Spoil:
    def spoil(run: Run, now: Readings) -> Readings:
        run.spoil = lambda record: record.update(fields)
        return now

    return spoil


def _slower(times: float) -> Spoil:
    def spoil(run: Run, now: Readings) -> Readings:
        run.slower, run.slow_until = times, math.inf
        return now

    return spoil


def _frozen(run: Run, now: Readings) -> Readings:
    still = now.mono - run.sick_at
    stalled = tuple(
        replace(rank, unchanged_s=still, step=3000, phase="backward") for rank in now.ranks
    )
    return replace(now, fresh=(), ranks=stalled)


def _with(**fields: Callable[[Readings], Any]) -> Spoil:
    return lambda _run, now: replace(now, **{name: make(now) for name, make in fields.items()})


def _gpu(**fields: Any) -> Spoil:
    return _with(gpus=lambda now: (replace(now.gpus[0], **fields), *now.gpus[1:]))


def _lame(run: Run, now: Readings) -> Readings:
    run.spoil = lambda record: record.update(
        dt_forward_s=record["dt_forward_s"] * (1.6 if record["rank"] == 1 else 1)
    )
    return now


def _of_rank(rank: int, **fields: Any) -> Spoil:
    def spoil(run: Run, now: Readings) -> Readings:
        run.spoil = lambda record: record.update(fields if record["rank"] == rank else {})
        return now

    return spoil


def _skipping(run: Run, now: Readings) -> Readings:
    run.spoil = lambda record: record.update(skipped_steps=record["step"] // 4)
    return now


def _gpus(**fields: Any) -> Spoil:
    return _with(gpus=lambda now: tuple(replace(gpu, **fields) for gpu in now.gpus))


SICK: dict[str, Spoil] = {
    "stall": _frozen,
    "throughput_drop": _slower(30.0),
    "non_finite": _in_records(loss="nan"),
    "zero_gradient": _in_records(grad_norm=0.0),
    "gate_collapse": _in_records(gate_entropy_mean=0.05, gate_collapse_frac=0.9),
    "gate_never_learned": _in_records(gate_entropy_mean=1.098),
    "memory_growth": _with(rss_mib=lambda now: dict.fromkeys(now.rss_mib, 9000 + 60 * now.mono)),
    "memory_ceiling": _with(host_free_mib=lambda now: 9000.0),
    "gpu_memory_ceiling": _gpu(mem_used_mib=81_500.0),
    "loader_slow": _slower(3.0),
    "gpu_lost": _gpu(state="lost", why="lost: GPU is lost"),
    "gpu_silent": _gpu(state="error", why="NVML has not answered for 6 s"),
    "xid": _gpu(xid=79, xids=(79,), xid_count=1),
    "ecc": _gpu(ecc_uncorrected=2),
    "throttle": _gpu(throttle="hardware thermal"),
    "imbalance": _lame,
    "disk": _with(disk_free_gib=lambda now: 2.0),
    "clock": _with(ts=lambda now: now.ts + 30),
    "random_loss": _in_records(loss=5.5),
    "rank_zero_gradient": _of_rank(1, grad_norm=0.0),
    "same_batch": _in_records(batch_crc32="7"),
    "constant_figure": _in_records(loss=5.5512345),
    "skipped_steps": _skipping,
    "host_bound": _gpus(util_pct=12.0, power_w=90.0),
    "no_power": _gpus(util_pct=99.0, power_w=80.0),
    "backend": _with(env=lambda now: {"backend": {"win": "banded (flash-attn is missing)"}}),
    "model_size": _with(
        env=lambda now: {
            "config": "m7c_125m.yaml",
            "parameters": 254_499,
            "parameters_counted": 254_499,
        }
    ),
}
"""By rule: the change that makes a steady run sick, `SICK_AT_S` after its start."""


def seen_after_s(
    name: str, sick_at_s: float = SICK_AT_S, seed: int = 1
) -> tuple[float | None, float | None]:
    """Returns the seconds from the fault to the alert of a rule and to its halt; None if never."""
    run = Run(CALM, random.Random(seed))
    run.random_bytes, run.settings["data.source"] = True, "synthetic"
    run.learns_at, run.slow_until, run.sick_at = 0, math.inf, sick_at_s
    dog, raised, acted = halting(run), None, None
    for now in moments(run, SICK_HOURS):
        sick = now.mono >= sick_at_s
        for change in dog.update(SICK[name](run, now) if sick else now):
            if change.rule.name == name and sick:
                after = now.mono - sick_at_s
                raised = after if raised is None and change.kind == "raise" else raised
                acted = after if change.kind == "act" else acted
        if raised is not None and (acted is not None or name not in HALTING):
            break
    return raised, acted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=1040.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    total, rows = Counts(), []
    for case in CASES:
        counts = replay(case, options.hours / len(CASES), options.seed)
        total.add(counts)
        lasted = max(counts.lasted_s, default=0.0)
        said = ", ".join(f"{name} {n}" for name, n in counts.raised.most_common()) or "nothing"
        rows.append((case.name, case.world, f"{counts.hours:.0f}", said, f"{lasted:.0f}",
                     counts.said["medium"] + counts.said["low"], counts.said["high"],
                     counts.acted.total()))  # fmt: skip
    header = ("healthy runs", "ranks", "hours", "alerts", "longest stall beyond 3 limits, s",
              "stalls with an unsure verdict", "of high confidence", "stopped")  # fmt: skip
    body = table(header, rows)
    floors = [(f"{act_s}", sum(lasted >= act_s for lasted in total.lasted_s)) for act_s in ACT_S]
    body += "\n\n" + table(("stall_act_s", "stalls that would have stopped their run"), floors)
    sick = []
    for name in SICK:
        raised, acted = seen_after_s(name)
        due = "-" if name not in HALTING else "never" if acted is None else f"{acted:.0f}"
        sick.append((name, "never" if raised is None else f"{raised:.0f}", due))
    body += "\n\n" + table(("sick runs, by rule", "seen after s", "would halt after s"), sick)
    per_look = 1e6 * total.looking_s / total.looks
    publish(
        "watch_hours",
        "Does the watchdog ever stop a healthy run?",
        f"**{total.hours:,.0f} run-hours, {total.acted.total()} runs stopped, "
        f"{total.said['high']} verdicts of high confidence.**\n\n{body}",
        f"{total.looks:,} updates, one a second, {per_look:.0f} µs of CPU time each; default "
        f"limits, with --halt. The only bound of a step is {COLLECTIVE_TIMEOUT_S:g} s, below a "
        "collective timeout of 30 minutes; the excess of a long step lies in one phase of one "
        "rank. Runs last up to 10 hours. Alerts of slow loaders, long saves, and of gates that "
        "have not learned yet are true. A step far longer than all earlier steps is a "
        "stall while it lasts. The verdicts use only pulses and records; the replay has no "
        "processes, stacks or flight records. The second table counts the stalls that would have "
        "stopped their run with this `stall_act_s` in the plan (never below three limits).",
    )


if __name__ == "__main__":
    main()
