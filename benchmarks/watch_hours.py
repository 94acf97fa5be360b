"""False stops of healthy runs by the watchdog: `python -m benchmarks.watch_hours`.

First replays healthy histories through the watchdog with --halt, one update a second. Their step
times have heavy tails: one phase of one rank is slow, and the other ranks wait. The histories also
have records every 1 or 20 steps; pauses for evaluation and saving; a slow loader for up to an hour;
drifting entropy; new attempts; text or random bytes; fp16 that calibrates its loss scale; and busy
or half idle GPUs. Then replays sick histories, each of which should raise the alert of its rule.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.common import publish, table
from benchmarks.simulated_runs import (
    CASES,
    COLLECTIVE_TIMEOUT_S,
    SICK_AT_S,
    Case,
    Run,
    moments,
)
from console.diagnose.readings import History, Readings
from console.diagnose.rules import HALTING, RULES, STRONG
from console.diagnose.verdict import diagnose
from console.diagnose.watchdog import Watchdog
from console.plan import Watch

RUN_HOURS = 10.0
SICK_HOURS = 3.0
ACT_S = (180, 300, 600, 900, 1800)
CONFIDENCE = ("", "low", "medium", "high")


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


def halting(run: Run, every_s: int = 1) -> Watchdog:
    """Returns a watchdog with default limits and --halt."""
    return Watchdog(Watch(), dict.fromkeys(HALTING, "halt"), every_s, run.settings)


def replay(case: Case, hours: float, seed: int, every_s: int = 1) -> Counts:
    """Returns the counts for healthy runs of one kind, with an update every `every_s` seconds."""
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
    "memory_ceiling": _with(memory=lambda now: (now.memory[0]._replace(free_mib=9000.0),)),
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
"""By rule: the change that makes a steady run sick."""


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
        "rank. Runs last up to 10 hours. The alerts on slow loaders, long saves and gates that "
        "have not learned yet are correct. A step far longer than all earlier steps is a "
        "stall while it lasts. The verdicts use only pulses and records; the replay has no "
        "processes, stacks or flight records. The second table counts the stalls of at least three "
        "stall limits that would have stopped their run with this `stall_act_s` in the plan.",
    )


if __name__ == "__main__":
    main()
