"""The table of watch rules: what each rule measures, when it is raised, and its second source.

A measure is a function of the newest poll, the attempt so far and the plan's key `watch`. A rule is
raised when its value has been at least as bad as `threshold` for `for_s`. It is cleared when the
value is at least as good as `clear`. Low values are bad if `threshold` is below `clear`; otherwise
high values are bad. A new rule is one row in `TABLE`. No function here reads a file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from console.diagnose import truth
from console.diagnose.rank_evidence import LASTING_STATES, limit_s, slowest
from console.diagnose.readings import History, Readings, gate_collapsed
from console.diagnose.rule import Corroborate, Measure, Measured, Rule
from console.diagnose.verdict import diagnose
from console.model import RECENT_XID_S, Gpu
from console.plan import WATCH_ACTIONS as ACTIONS
from console.plan import Watch
from console.sources.nvml import xid_words
from console.sources.pace import Progress
from console.status_text import clock, counted
from trainers.contract.errors import UsageError, did_you_mean

STRONG = frozenset(ACTIONS[2:])
"""Actions that end or interrupt a run."""
STRONG_TIMES = 3.0
"""A strong action needs a condition that lasts this many times `for_s` or the stall limit."""
THROUGHPUT_DROP = "throughput_drop"
PACE_LOST = 0.5
"""A drop of throughput is confirmed if the pace is at most this many times the earlier pace."""

# --- measures --------------------------------------------------------------------------------


def _stall(now: Readings, _history: History, watch: Watch) -> Measured | None:
    """Returns a time without progress, divided by the stall limit of the slowest rank.

    The time is from the slowest rank, or from a stopped or ended rank if that time is longer. The
    value is at least 1 if there is a verdict, and below 1 otherwise.
    """
    limits = {rank: limit_s(rank, watch) for rank in slowest(now.ranks)}
    first = min(limits, key=lambda rank: rank.unchanged_s / limits[rank], default=None)
    if first is None:
        return Measured(0.0) if now.ranks else None
    limit = limits[first]
    ratio = first.unchanged_s / limit
    halted = [
        rank.unchanged_s for rank in now.ranks
        if rank.state in LASTING_STATES and rank.phase != "exit" and not rank.doubt
    ]  # fmt: skip
    verdict = diagnose(now.ranks, watch, now.ts) if halted or ratio > 1 else None
    if verdict is None:
        return Measured(min(ratio, 0.999))
    text, lasted = verdict.sentence, max(halted, default=first.unchanged_s)
    if now.records_only:
        last = clock(now.ts - first.unchanged_s)
        text = f"no record since {last} (step {first.step}); the stall limit is {limit:.0f} s"
    return Measured(max(1.0, ratio, lasted / limit), text, limit, lasted)


def _throughput_drop(_now: Readings, history: History, _watch: Watch) -> Measured | None:
    ratio = history.rates.ratio
    if ratio is None or history.is_paused or not history.is_current:
        return None
    return Measured(ratio, f"throughput fell to at most {ratio:.0%} of its earlier value")


def _consecutive(count: Callable[[History], int | None], sentence: str) -> Measure:
    """Returns a measure of a count over rank 0's records. `sentence` may use {count} and {step}.

    Nothing is measured without a record of the figure, or while the records are not current.
    """

    def measure(now: Readings, history: History, _watch: Watch) -> Measured | None:
        found = count(history)
        if found is None or 0 not in now.progress or not history.is_current:
            return None
        return Measured(float(found), sentence.format(count=found, step=now.progress[0].step))

    return measure


def _non_finite(now: Readings, history: History, _watch: Watch) -> Measured | None:
    """Returns the number of steps of this attempt with non-finite figures, on the worst rank.

    `acts_at` counts the newest consecutive records whose loss is not finite; it is 0 while the
    records are not current. Without a non-finite figure nothing is measured, because a former
    process may have seen one.
    """
    found = {rank: each for rank, each in history.nonfinite.items() if each.steps}
    if not found:
        return None
    rank = max(found, key=lambda each: (found[each].steps, -each))
    worst, of = found[rank], f" of rank {rank}" if rank else ""
    text = (
        f"the {worst.what}{of} was not finite in {counted(worst.steps, 'step')} of this attempt, "
        f"last at step {worst.step} or before"
    )
    in_a_row = max(each.in_a_row for each in found.values()) if history.is_current else 0
    return Measured(float(worst.steps), text, acts_at=in_a_row)


_zero_gradient = _consecutive(
    lambda history: history.truth.zero_norms.get(0),
    "the gradient norm is zero in {count} consecutive records up to step {step}",
)
_gate_collapse = _consecutive(
    lambda history: history.collapsed,
    "the attention gate uses only one branch in {count} consecutive records up to step {step}",
)


def _gate_never_learned(_now: Readings, history: History, _watch: Watch) -> Measured | None:
    steps = history.uniform_steps
    if steps is None:
        return None
    text = f"the attention gate has given all branches the same weight for {steps} steps"
    return Measured(float(steps), text)


def _memory_growth(now: Readings, history: History, _watch: Watch) -> Measured | None:
    by_rank = {rank: mib_s for rank, mib_s in history.growth_mib_s.items() if rank in now.rss_mib}
    least = min(now.memory, key=lambda each: each.free_mib, default=None)
    if not by_rank or least is None:
        return None
    growth = math.fsum(by_rank.values())
    if growth <= 0:
        return Measured(1e9)
    left = least.free_mib / growth
    text = (
        f"the memory of the ranks grows by {growth * 60:.0f} MiB a minute (fastest: rank "
        f"{max(by_rank, key=lambda rank: by_rank[rank])}); {least.name} may be full in "
        f"{left / 60:.0f} min"
    )
    return Measured(left, text)


def _memory_ceiling(now: Readings, _history: History, _watch: Watch) -> Measured | None:
    shares = [
        (1 - each.free_mib / each.total_mib, each.name) for each in now.memory if each.total_mib
    ]
    if not shares:
        return None
    used, name = max(shares)
    return Measured(used, f"{used:.0%} of {name} is in use")


def _gpu_memory_ceiling(now: Readings, history: History, _watch: Watch) -> Measured | None:
    """Returns the largest share, or None while the GPU with this share does not answer."""
    answers = {gpu.index for gpu in now.gpus if gpu.mem_used_mib is not None}
    share, index = max(((each, gpu) for gpu, each in history.gpu_memory.items()), default=(0.0, -1))
    if index not in answers:
        return None
    return Measured(share, f"{share:.0%} of the memory of GPU {index} is in use")


def _loader_slow(now: Readings, history: History, _watch: Watch) -> Measured | None:
    """Returns the largest share of fetch in the step time of a rank."""
    shares = [(share, r) for r, share in history.fetch_shares.items() if r in now.progress]
    if not shares or not history.is_current:
        return None
    share, rank = max(shares)
    return Measured(share, f"rank {rank} waits for data for {min(share, 1.0):.0%} of its step time")


def _ecc(now: Readings, history: History, _watch: Watch) -> Measured | None:
    if not history.ecc:
        return None
    parts = (f"{count} on GPU {gpu}" for gpu, count in history.ecc.items() if count)
    text = f"uncorrected memory errors in this attempt: {', '.join(parts)}"
    return Measured(float(sum(history.ecc.values())), text)


def _xid(now: Readings, _history: History, _watch: Watch) -> Measured | None:
    """Adds up the Xids, also of former attempts, of each GPU whose newest Xid is recent."""
    if not now.gpus:
        return None
    recent = [gpu for gpu in now.gpus if gpu.xid_count
              and (gpu.xid_ts is None or now.ts - gpu.xid_ts < RECENT_XID_S)]  # fmt: skip
    text = "; ".join(_xids_of(gpu, now.ts) for gpu in recent)
    return Measured(float(sum(gpu.xid_count for gpu in recent)), text)


def _xids_of(gpu: Gpu, now_ts: float) -> str:
    ts = gpu.xid_ts
    at = clock(now_ts if ts is None or not 0 <= ts <= now_ts else ts)
    text = f"{xid_words(gpu.xids or (gpu.xid or 0,), 1)} on GPU {gpu.index}"
    return f"{text} at {at}" if gpu.xid_count < 2 else f"{text}, {gpu.xid_count} times, last {at}"


def _gpu_silent(now: Readings, _history: History, _watch: Watch) -> Measured | None:
    if not now.gpus:
        return None
    silent: dict[str, list[int]] = {}
    for gpu in now.gpus:
        if gpu.state == "error":
            silent.setdefault(gpu.why, []).append(gpu.index)
    parts = (f"GPU {', '.join(map(str, gpus))} ({why})" for why, gpus in silent.items())
    text = f"NVML returns no values for {'; '.join(parts)}"
    return Measured(float(sum(map(len, silent.values()))), text)


def _gpus_with(
    applies: Callable[[Gpu], object], is_known: Callable[[Gpu], object], sentence: str
) -> Measure:  # fmt: skip
    """Returns a measure that counts the GPUs to which a condition applies.

    The text of the measure has one `sentence` for each such GPU. A GPU for which `is_known` is
    false neither raises nor clears the rule.
    """

    def measure(now: Readings, _history: History, _watch: Watch) -> Measured | None:
        found = [gpu for gpu in now.gpus if is_known(gpu) and applies(gpu)]
        if not now.gpus or (not found and not all(map(is_known, now.gpus))):
            return None
        return Measured(float(len(found)), "; ".join(sentence.format(gpu=gpu) for gpu in found))

    return measure


_gpu_lost = _gpus_with(
    lambda gpu: gpu.state == "lost", lambda gpu: gpu.state != "error",
    "GPU {gpu.index} is {gpu.why}",
)  # fmt: skip
_throttle = _gpus_with(
    lambda gpu: gpu.throttle, lambda gpu: gpu.state == "ok",
    "GPU {gpu.index} is throttled ({gpu.throttle})",
)  # fmt: skip


def _disk(now: Readings, _history: History, _watch: Watch) -> Measured | None:
    if now.disk_free_gib is None:
        return None
    needed = max(1.0, 2 * (now.checkpoint_gib or 0.0))
    ratio = now.disk_free_gib / needed
    text = f"the run's disk has {now.disk_free_gib:.1f} GiB free and needs {needed:.1f} GiB"
    return Measured(ratio, text)


def _clock(now: Readings, history: History, _watch: Watch) -> Measured | None:
    ahead = 0.0 if now.newest_ts is None else now.newest_ts - now.ts
    if ahead > history.jump_s:
        return Measured(ahead, f"the newest record is {ahead:.0f} s in the future")
    return Measured(history.jump_s, f"the wall clock jumped by {history.jump_s:.0f} s")


# --- second sources: why they do not confirm a rule, or "" -------------------------------------


def _by_kernel(_now: Readings, _history: History) -> str:
    """Always confirms the rule, because the kernel of this host measured the value."""
    return ""


def _by_records(now: Readings, _history: History) -> str:
    """Confirms a stall unless the readings have a `stall_doubt`."""
    return now.stall_doubt


def _by_pace(_now: Readings, history: History) -> str:
    """Confirms a drop of throughput from the steps of the ranks and the clock of this host."""
    if history.pace_ratio is None:
        return "the steps of the ranks do not show a pace yet"
    if history.pace_ratio > PACE_LOST:
        return f"the steps of the ranks show {history.pace_ratio:.0%} of the earlier pace"
    return ""


def _recorded(bad: Callable[[Progress], bool | None]) -> Corroborate:
    """Returns a function that confirms a bad figure of rank 0 from another rank or training.csv.

    `bad` returns whether a record shows the bad figure, or None if the record lacks the figure.
    """

    def confirm(now: Readings, _history: History) -> str:
        own = now.progress.get(0)
        if own is None:
            return "rank 0 has no record"
        if bad(own) is False:
            return "rank 0 records another value"
        others = {rank: p for rank, p in now.progress.items() if rank and bad(p) is not None}
        found = {rank: bad(p) for rank, p in others.items() if p.step >= own.step}
        if any(found.values()):
            return ""
        if found:
            return f"rank {min(found)} records another value"
        if others:
            return f"no other rank has recorded step {own.step} yet"
        row = now.csv
        if row is None or row.step != own.step or bad(row) is None:
            return "neither another rank nor training.csv records the value"
        return "" if bad(row) else f"training.csv has another value at step {row.step}"

    return confirm


_loss_recorded = _recorded(lambda p: None if p.loss is None else not math.isfinite(p.loss))
_gradient_recorded = _recorded(lambda p: None if p.grad_norm is None else p.grad_norm == 0)
_gate_recorded = _recorded(gate_collapsed)


def _by_loss(now: Readings, history: History) -> str:
    """Confirms a non-finite loss from records.

    With a single rank, training.csv may have no row, or no loss in its newest row. A count above 0
    in the pulse then confirms the non-finite loss.
    """
    alone = [rank.nonfinite_steps for rank in now.ranks] if len(now.ranks) == 1 else []
    if alone and alone[0] > 0 and (now.csv is None or now.csv.loss is None):
        return ""
    return _loss_recorded(now, history)


TABLE: tuple[Rule, ...] = (
    Rule("stall", "time without progress ÷ stall limit of the slowest rank", "limits",
         1.0, 0.9999, 0.0, _stall, _by_records, "crit", anomaly="heartbeat_stall"),
    Rule(THROUGHPUT_DROP, "tok/s as a share of the run's earlier tok/s", "share",
         0.7, 0.8, 60.0, _throughput_drop, _by_pace, severe=0.1,
         anomaly="throughput_flatline"),
    Rule("non_finite", "steps of this attempt whose loss or gradients are not finite", "steps",
         1, 0, 0.0, _non_finite, _by_loss, "crit", anomaly="nan_loss", again_s=600.0),
    Rule("zero_gradient", "gradient norm of exactly zero", "consecutive records",
         3, 0, 0.0, _zero_gradient, _gradient_recorded, "crit", anomaly="zero_grad"),
    Rule("gate_collapse",
         "attention gate uses nearly only one branch (mean entropy < 0.2 nats, or mean weight "
         "of the largest branch > 0.9, or entropy < 0.1 nats in over half of tokens and heads)",
         "consecutive records", 3, 0, 60.0, _gate_collapse, _gate_recorded,
         anomaly="gate_collapse"),
    Rule("gate_never_learned", "entropy of the attention gate within 1 % of its maximum", "steps",
         1000, 0, 0.0, _gate_never_learned),
    Rule("memory_growth",
         "time until the host's memory, or the limit of the cgroup, is full at the present growth",
         "s", 3600, 7200, 120.0, _memory_growth),
    Rule("memory_ceiling", "share of the host's memory, or of the limit of the cgroup, in use",
         "share", 0.95, 0.92, 30.0, _memory_ceiling, _by_kernel),
    Rule("gpu_memory_ceiling", "share of a GPU's memory in use", "share",
         0.985, 0.97, 60.0, _gpu_memory_ceiling),
    Rule("loader_slow", "share of fetch in the step time", "share", 0.5, 0.4, 120.0, _loader_slow),
    Rule("gpu_lost", "GPUs that fell off the bus", "GPUs", 1, 0, 0.0, _gpu_lost, level="crit",
         again_s=10.0),
    Rule("gpu_silent", "GPUs for which NVML returns no values", "GPUs", 1, 0, 10.0, _gpu_silent),
    Rule("xid", "critical driver errors (Xids) of the GPUs with an Xid in the last 10 min",
         "errors", 1, 0, 0.0, _xid, level="crit", again_s=10.0),
    Rule("ecc", "uncorrected memory errors of the GPUs in this attempt", "errors",
         1, 0, 0.0, _ecc, level="crit", again_s=10.0),
    Rule("throttle", "GPUs throttled by heat or power", "GPUs", 1, 0, 60.0, _throttle),
    Rule("disk", "free space ÷ max(2 checkpoints, 1 GiB)", "ratio", 1.0, 1.2, 5.0, _disk,
         _by_kernel, "crit"),
    Rule("clock", "jump of the wall clock, or records from the future", "s", 5.0, 1.0, 0.0, _clock),
    *truth.ROWS,
)  # fmt: skip

RULES: dict[str, Rule] = {rule.name: rule for rule in TABLE}
HALTING = tuple(rule.name for rule in TABLE if rule.anomaly)
"""The rules for which `watchdog --halt` can halt a run, even if the plan gives them no action."""


def check(watch: Watch, where: str) -> None:
    """Raises UsageError for an unknown rule, an action that it cannot have, or a wrong share."""
    for name, given in watch.rules.items():
        if name not in RULES:
            raise UsageError(f"{where}: there is no watch rule {name!r}{did_you_mean(name, RULES)}")
        if given.action in STRONG and RULES[name].corroborate is None:
            raise UsageError(
                f"{where}: the watch rule {name!r} cannot have the action {given.action}, because "
                "it has no second source; use warn or dump"
            )
        if RULES[name].unit == "share" and (given.threshold or 0) >= 1:
            raise UsageError(
                f"{where}: the threshold of the rule {name!r} is a share below 1: 0.9 for 90 %"
            )


def with_plan(watch: Watch, actions: Mapping[str, str]) -> tuple[Rule, ...]:
    """Returns the table with a plan's changes.

    A rule in `actions` has that action, unless the plan gives the rule another action. The value
    that clears a rule changes as in `Rule.clear_for`.
    """
    rules = []
    for rule in TABLE:
        given = watch.rules.get(rule.name)
        action = actions.get(rule.name, rule.action)
        if given is not None:
            threshold = rule.threshold if given.threshold is None else given.threshold
            rule = replace(
                rule, threshold=threshold, clear=rule.clear_for(threshold),
                for_s=rule.for_s if given.for_s is None else given.for_s,
            )  # fmt: skip
            action = given.action or action
        rules.append(replace(rule, action=action))
    return tuple(rules)
