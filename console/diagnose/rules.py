"""The table of watch rules: what each measures, when it is raised and when it is over.

A measure is a pure function over one moment and the attempt's past; nothing is read or kept here.
A rule is raised when its value is at or beyond `threshold` for `for_s`, and over when it is at or
behind `clear`; which side is which follows from their order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from console.diagnose import second
from console.diagnose.readings import Past, Readings
from console.diagnose.second import Second
from console.diagnose.stall import diagnose, furthest_behind, limit_s
from console.model import RECENT_XID_S, Gpu, Level
from console.sources.gpu import xid_words
from trainers.contract.errors import UsageError, did_you_mean
from trainers.contract.plan import WATCH_ACTIONS, Watch

ACTIONS = WATCH_ACTIONS
STRONG = frozenset(ACTIONS[2:])
"""Actions that end or interrupt a run."""
STRONG_TIMES = 3.0
"""For a strong action a condition must stand this many times as long as for the alert, in all."""
HELD = frozenset(("T", "t", "Z", "X", "gone"))
"""Process states that a verdict names at once."""


@dataclass(frozen=True, slots=True)
class Found:
    """A measured value with its sentence; the times are those of a rule with its own limit.

    `limit_s` is how long the condition may last and `stood_s` how long it has, by its evidence.
    `counts` says what it is made of: a raised rule is told again when one of them rises.
    """

    value: float
    text: str = ""
    limit_s: float = 0.0
    stood_s: float = math.inf
    counts: Mapping[int, int] = field(default_factory=dict)


Measure = Callable[[Readings, Past, Watch], Found | None]


@dataclass(frozen=True, slots=True)
class Rule:
    """One row. `strong` is the value that an action stronger than a dump needs, if another one.

    A strong action also needs that the `second` source agrees; a rule with one source alone can
    only warn or dump. `anomaly` is the ancestor's word for it, "" where it had none.
    """

    name: str
    says: str
    unit: str
    threshold: float
    clear: float
    for_s: float
    measure: Measure
    second: Second | None = None
    level: Level = "warn"
    action: str = "warn"
    strong: float | None = None
    anomaly: str = ""

    def breached(self, value: float) -> bool:
        return value >= self.threshold if self.threshold >= self.clear else value <= self.threshold

    def over(self, value: float) -> bool:
        return value <= self.clear if self.threshold >= self.clear else value >= self.clear

    def grave(self, value: float) -> bool:
        """Says whether a value is bad enough for a strong action."""
        bound = self.threshold if self.strong is None else self.strong
        return value >= bound if self.threshold >= self.clear else value <= bound


# --- measures --------------------------------------------------------------------------------


def _stall(now: Readings, _past: Past, watch: Watch) -> Found | None:
    """The stand-still of the ranks furthest behind, as a multiple of their limit; 1 is a stall."""
    behind = furthest_behind(now.seen)
    if not behind:
        return Found(0.0, "no rank is to be waited for") if now.seen else None
    first = min(behind, key=lambda seen: seen.still_s)
    limit = limit_s(first, watch)
    ratio = first.still_s / limit
    held = [s.still_s for s in now.seen if s.state in HELD and s.phase != "exit"]
    verdict = diagnose(now.seen, watch, now.ts) if held or ratio > 1 else None
    if verdict is None:
        return Found(min(ratio, 0.999), "the ranks move again")
    stood = max(held, default=first.still_s)
    text = verdict.sentence
    if now.records_only:
        last = time.strftime("%H:%M:%S", time.localtime(now.ts - first.still_s))
        text = (
            f"no record since {last}, step {first.step}: longer than the {limit:.0f} s that the "
            "times between records allow"
        )
    return Found(max(1.0, ratio, stood / limit), text, limit, stood)


def _throughput_drop(_now: Readings, past: Past, _watch: Watch) -> Found | None:
    ratio = past.rate_ratio
    if ratio is None:
        return None
    return Found(ratio, f"throughput has fallen to at most {ratio:.0%} of this run's own before")


def _in_a_row(count: Callable[[Past], int], sentence: str) -> Measure:
    """Counts rank 0's progress records in a row; the sentence names `count` and `step`."""

    def measure(now: Readings, past: Past, _watch: Watch) -> Found | None:
        if 0 not in now.progress:
            return None
        held = count(past)
        return Found(float(held), sentence.format(count=held, step=now.progress[0].step))

    return measure


_non_finite = _in_a_row(lambda past: past.nonfinite, "the loss of step {step} is not finite")
_zero_gradient = _in_a_row(
    lambda past: past.zero_grads, "the gradient norm is zero in {count} records up to step {step}"
)
_gate_collapse = _in_a_row(
    lambda past: past.collapsed, "the gate uses one branch only, {count} records up to step {step}"
)


def _gate_never_learned(_now: Readings, past: Past, _watch: Watch) -> Found | None:
    steps = past.uniform_steps
    if steps is None:
        return None
    text = f"the gate has weighed all branches alike (entropy at its maximum) for {steps} steps"
    return Found(float(steps), text)


def _memory_growth(now: Readings, past: Past, _watch: Watch) -> Found | None:
    if not past.growth_mib_s or now.host_free_mib is None:
        return None
    growth = math.fsum(past.growth_mib_s[rank] for rank in past.growth_mib_s if rank in now.rss_mib)
    left = now.host_free_mib / growth if growth > 0 else 1e9
    worst = max(past.growth_mib_s, key=lambda rank: past.growth_mib_s[rank])
    text = (
        f"the ranks' memory grows by {growth * 60:.0f} MiB a minute (most in rank {worst}): the "
        f"host is full in {left / 60:.0f} min"
    )
    return Found(left, text)


def _memory_ceiling(now: Readings, _past: Past, _watch: Watch) -> Found | None:
    if not now.host_total_mib or now.host_free_mib is None:
        return None
    used = 1 - now.host_free_mib / now.host_total_mib
    return Found(used, f"{used:.0%} of the host's memory is used")


def _gpu_memory_ceiling(now: Readings, _past: Past, _watch: Watch) -> Found | None:
    used = [
        (gpu.mem_used_mib / gpu.mem_total_mib, gpu.index) for gpu in now.gpus
        if gpu.mem_used_mib is not None and gpu.mem_total_mib
    ]  # fmt: skip
    if not used:
        return None
    share, index = max(used)
    return Found(share, f"{share:.0%} of the memory of GPU {index} is used")


def _loader_slow(now: Readings, _past: Past, _watch: Watch) -> Found | None:
    shares = [
        (p.dt_fetch_s / p.step_s, rank) for rank, p in now.progress.items()
        if p.dt_fetch_s is not None and p.dt_fetch_s >= 0 and p.step_s
    ]  # fmt: skip
    if not shares:
        return None
    share, rank = max(shares)
    return Found(share, f"rank {rank} waits for data in {min(share, 1.0):.0%} of its step time")


def _ecc(now: Readings, past: Past, _watch: Watch) -> Found | None:
    if not past.ecc:
        return None
    counts = {index: held.rose for index, held in past.ecc.items() if held.rose}
    parts = (f"GPU {index} had {count}" for index, count in counts.items())
    text = f"uncorrected memory errors in this attempt: {', '.join(parts)}"
    return Found(float(max(counts.values(), default=0)), text, counts=counts)


def _xid(now: Readings, past: Past, _watch: Watch) -> Found | None:
    """Counts recent Xids, those of the attempt before too: they may have ended it.

    An Xid of the attempt before raises an alert and never an action in this one.
    """
    if not now.gpus:
        return None
    recent = {i: held for i, held in past.xids.items() if now.mono - held.at < RECENT_XID_S}
    told = [_xids_of(gpu, now.ts) for gpu in now.gpus if gpu.index in recent]
    new = any(held.rose for held in recent.values())
    counts = {index: held.seen for index, held in recent.items()}
    return Found(
        float(len(recent)), "; ".join(told), stood_s=math.inf if new else -1.0, counts=counts
    )


def _xids_of(gpu: Gpu, now_ts: float) -> str:
    known = gpu.xid_ts is not None and 0 <= gpu.xid_ts <= now_ts
    at = time.strftime("%H:%M:%S", time.localtime(gpu.xid_ts if known else now_ts))
    text = f"{xid_words(gpu.xids or (gpu.xid or 0,), 1)} on GPU {gpu.index}"
    return f"{text} at {at}" if gpu.xid_count < 2 else f"{text}, {gpu.xid_count} times, last {at}"


def _gpu_silent(now: Readings, _past: Past, _watch: Watch) -> Found | None:
    if not now.gpus:
        return None
    silent: dict[str, list[int]] = {}
    for gpu in now.gpus:
        if gpu.state == "error":
            silent.setdefault(gpu.why, []).append(gpu.index)
    parts = (f"GPU {', '.join(map(str, held))} ({why})" for why, held in silent.items())
    text = f"NVML gives no figures for {'; '.join(parts)}"
    return Found(float(sum(map(len, silent.values()))), text)


def _gpus_with(
    holds: Callable[[Gpu], object], known: Callable[[Gpu], object], sentence: str,
    again: bool = False,
) -> Measure:  # fmt: skip
    """Counts the GPUs of which something holds, with a sentence for each `gpu`.

    With `again` another GPU, or the same one anew, is told again.

    A GPU of which it is not `known` raises nothing and ends nothing.
    """

    def measure(now: Readings, _past: Past, _watch: Watch) -> Found | None:
        found = [gpu for gpu in now.gpus if known(gpu) and holds(gpu)]
        if not found and not all(map(known, now.gpus)):
            return None
        text = "; ".join(sentence.format(gpu=gpu) for gpu in found)
        counts = {gpu.index: 1 for gpu in found} if again else {}
        return Found(float(len(found)), text, counts=counts) if now.gpus else None

    return measure


_gpu_lost = _gpus_with(
    lambda gpu: gpu.state == "lost",
    lambda gpu: gpu.state != "error",
    "GPU {gpu.index} is {gpu.why}",
    again=True,
)
_throttle = _gpus_with(
    lambda gpu: gpu.throttle, lambda gpu: gpu.state == "ok",
    "GPU {gpu.index} is slowed down ({gpu.throttle})",
)  # fmt: skip


def _imbalance(_now: Readings, past: Past, _watch: Watch) -> Found | None:
    if len(past.own_s) < 2:
        return None
    slowest = max(past.own_s, key=lambda rank: past.own_s[rank])
    others = median([own_s for rank, own_s in past.own_s.items() if rank != slowest])
    ratio = past.own_s[slowest] / others
    return Found(ratio, f"rank {slowest} needs {ratio:.1f} times the others' time for its own part")


def _disk(now: Readings, _past: Past, _watch: Watch) -> Found | None:
    if now.disk_free_gib is None:
        return None
    needed = max(1.0, 2 * (now.checkpoint_gib or 0.0))
    ratio = now.disk_free_gib / needed
    text = f"{now.disk_free_gib:.1f} GiB are free on the run's disk; it should be {needed:.1f} GiB"
    return Found(ratio, text)


def _clock(now: Readings, past: Past, _watch: Watch) -> Found | None:
    ahead = 0.0 if now.newest_ts is None else now.newest_ts - now.ts
    if ahead > past.jump_s:
        return Found(ahead, f"the newest record is {ahead:.0f} s in the future")
    return Found(past.jump_s, f"the wall clock jumped by {past.jump_s:.0f} s")


TABLE: tuple[Rule, ...] = (
    Rule("stall", "the ranks furthest behind stand still beyond their limit", "limits",
         1.0, 0.9999, 0.0, _stall, second.stall, "crit", anomaly="heartbeat_stall"),
    Rule("throughput_drop", "tok/s below this share of the run's own before (halt: 0.1)", "share",
         0.7, 0.8, 60.0, _throughput_drop, second.pace, strong=0.1,
         anomaly="throughput_flatline"),
    Rule("non_finite", "loss not finite", "records in a row",
         1, 0, 0.0, _non_finite, second.loss, "crit", anomaly="nan_loss"),
    Rule("zero_gradient", "gradient norm exactly zero", "records in a row",
         3, 0, 0.0, _zero_gradient, second.norm, "crit", anomaly="zero_grad"),
    Rule("gate_collapse", "gate entropy < 0.2 nats, largest share > 0.9 or half collapsed",
         "records in a row", 3, 0, 60.0, _gate_collapse, second.gate,
         anomaly="gate_collapse"),
    Rule("gate_never_learned", "gate entropy within 1 % of its maximum", "steps",
         1000, 0, 0.0, _gate_never_learned),
    Rule("memory_growth", "host full at the ranks' steady growth", "s",
         3600, 7200, 120.0, _memory_growth, second.of_the_kernel),
    Rule("memory_ceiling", "share of the host's memory in use", "share",
         0.95, 0.92, 30.0, _memory_ceiling, second.of_the_kernel),
    Rule("gpu_memory_ceiling", "share of a GPU's memory in use", "share",
         0.985, 0.97, 60.0, _gpu_memory_ceiling),
    Rule("loader_slow", "fetch's share of the step time", "share", 0.5, 0.4, 120.0, _loader_slow),
    Rule("gpu_lost", "GPUs that fell off the bus", "GPUs", 1, 0, 0.0, _gpu_lost, level="crit"),
    Rule("gpu_silent", "GPUs for which NVML gives no figures", "GPUs", 1, 0, 10.0, _gpu_silent),
    Rule("xid", "GPUs with a critical error of the driver in the last 10 min", "GPUs",
         1, 0, 0.0, _xid, level="crit"),
    Rule("ecc", "uncorrected memory errors of a GPU in this attempt", "errors",
         1, 0, 0.0, _ecc, level="crit"),
    Rule("throttle", "GPUs slowed down by heat or power", "GPUs", 1, 0, 60.0, _throttle),
    Rule("imbalance", "slowest rank's own time ÷ median of the others", "ratio",
         1.3, 1.15, 300.0, _imbalance),
    Rule("disk", "free space ÷ max(2 checkpoints, 1 GiB)", "ratio", 1.0, 1.2, 5.0, _disk,
         second.of_the_kernel, "crit"),
    Rule("clock", "jump of the wall clock, or records from the future", "s", 5.0, 1.0, 0.0, _clock),
)  # fmt: skip

RULES: dict[str, Rule] = {rule.name: rule for rule in TABLE}
HALTING = ("stall", "throughput_drop", "non_finite", "zero_gradient", "gate_collapse")
"""Rules for which the runbooks let a watchdog halt a run."""


def check(watch: Watch, where: str) -> None:
    """Raises UsageError for a rule that is in no table, or an action that it cannot have."""
    for name, given in watch.rules.items():
        if name not in RULES:
            raise UsageError(f"{where}: there is no watch rule {name!r}{did_you_mean(name, RULES)}")
        if given.action in STRONG and RULES[name].second is None:
            raise UsageError(
                f"{where}: the watch rule {name!r} cannot {given.action}: it has one source, and "
                "nothing that ends a run rests on one source; use warn or dump"
            )


def chosen(watch: Watch, actions: Mapping[str, str]) -> tuple[Rule, ...]:
    """Returns the table with what the plan changes; `actions` (a rule's at least) come on top.

    With another threshold the point where a rule is over moves along in proportion.
    """
    rules = []
    for rule in TABLE:
        given = watch.rules.get(rule.name)
        action = rule.action
        if given is not None:
            threshold = rule.threshold if given.threshold is None else given.threshold
            rule = replace(
                rule, threshold=threshold, clear=rule.clear * threshold / rule.threshold,
                for_s=rule.for_s if given.for_s is None else given.for_s,
            )  # fmt: skip
            action = given.action or action
        asked = actions.get(rule.name, action)
        rules.append(replace(rule, action=max(action, asked, key=ACTIONS.index)))
    return tuple(rules)
