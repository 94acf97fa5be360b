"""The table of the gates, and their evaluation. A new gate is one row in `TABLE`.

A gate has a span: all attempts, or only the surviving steps (steps that no later attempt repeated).
A gate passes only if the numbered records of its ranks cover that span without a gap. A killed rank
cannot write its last records. Its last pulse replaces these records for the gates with `tails`, and
for `steps_done` if a later run loaded the last checkpoint.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from console.model import LOSS_UNIT, RESULTS, Gate, Result
from console.plan import Phase
from console.plans import measures
from console.plans.measures import Measured
from console.sources.gate_files import SPEED
from console.sources.rank_totals import LIVE_STEPS
from console.sources.summary import Summary
from trainers.contract.errors import UsageError, did_you_mean

Bound = Literal["yes", "at least", "above", "at most", "fall"]
Span = Literal["all attempts", "surviving steps"]
BOUNDS: Mapping[Bound, tuple[str, Callable[[float, float], bool]]] = {
    "yes": ("=", operator.eq), "at least": ("≥", operator.ge), "above": (">", operator.gt),
    "at most": ("≤", operator.le), "fall": ("≥", operator.ge),
}  # fmt: skip
"""The sign of each kind of bound, and the function that compares a value with the bound."""
LEAST_FALL_NATS, SCALING = 0.1, "scaling_above"
OF_LAST_STEPS = (*measures.OF_LAST_STEPS, SCALING)
OF_CHECKPOINTS = ("checkpoints_at_least", "checkpoints_loaded_at_least")
"""Gates that count over all steps; a run that resumed another run needs its share of the bound."""
OF_STATISTICS = ("entropy_min", "collapse_max")
OF_GPU_MEMORY = ("memory_mib", "memory_growth_mib")
LARGEST_BOUND = 1e300
DEMAND_KEYS, MAX_REASON = ("bound", "at", "override"), 200
RANK0, RANKS = "heartbeat_rank0.jsonl", "heartbeat_rank*.jsonl"
EVENTS, SAMPLES, SINGLE = "events.jsonl", "samples_*.jsonl", "gates.json of that phase"


@dataclass(frozen=True, slots=True)
class GateRule:
    """One row of the table of gates.

    With the bound "yes", the plan says `true`, and the measured count must be 0. With "fall", the
    plan says by how much the loss must fall, in its unit; `true` means 0.1. If `source` is RANK0,
    the gate needs only the records of rank 0. A `certain` gate that fails stays failed, even if
    records are missing. With `tails`, the pulse of a killed rank replaces the last records that the
    rank could not write.
    """

    name: str
    unit: str
    bound: Bound
    measure: Callable[..., Measured]
    span: Span
    source: str
    certain: bool = False
    tails: bool = False
    figure: str = ""
    """One of the `FIGURES`, or "". Only a gate with a figure can be evaluated at `LIVE_STEPS`."""

    @property
    def is_final(self) -> bool:
        """True if a failure remains: no record changes it, and no restart repeats its step."""
        return self.certain and self.span == "all attempts"

    def value(self, summary: Summary, at: int) -> Measured:
        """Returns the value of the gate at a step, or its newest value if `at` is 0.

        A gate without a figure has only the newest value.
        """
        if not self.figure:
            return self.measure(summary)
        ranks = range(1 if self.source == RANK0 else summary.world)
        worst = min if self.bound in ("at least", "above") else max
        return self.measure(summary, self.figure, ranks, worst, at)

    def gap(self, summary: Summary) -> str:
        """Returns why the records do not cover the span of the gate, or "" if they do."""
        ranks = range(1 if self.source == RANK0 else summary.world)
        is_loaded = self.measure is measures.steps_reached and summary.loaded_step > 0
        return summary.gap(ranks, self.span == "surviving steps", self.tails or is_loaded)


TABLE: tuple[GateRule, ...] = (
    GateRule("steps_done", "steps", "at least", measures.steps_reached, "surviving steps", RANKS),
    GateRule("loss_finite", "non-finite steps", "yes", measures.loss_finite, "all attempts", RANKS,
             certain=True, tails=True),
    GateRule("grad_norm_above", "", "above", measures.grad_norm, "all attempts", RANK0,
             certain=True),
    GateRule("no_stall", "stalls", "yes", measures.stalls, "all attempts", EVENTS, certain=True,
             tails=True),
    GateRule("stalls_at_most", "stalls", "at most", measures.stalls, "all attempts", EVENTS,
             certain=True, tails=True),
    GateRule("restarts_at_most", "restarts", "at most", measures.restarts, "all attempts", EVENTS,
             certain=True, tails=True),
    GateRule("loss_falls", LOSS_UNIT, "fall", measures.loss_fall, "surviving steps", RANK0),
    GateRule("bytes_right", "share", "at least", measures.bytes_right, "surviving steps", RANK0),
    GateRule("gpu_mem_below_mib", "MiB", "at most", measures.figure, "surviving steps", RANKS,
             certain=True, figure="memory_mib"),
    GateRule("gpu_mem_growth_below_mib", "MiB", "at most", measures.figure, "surviving steps",
             RANKS, figure="memory_growth_mib"),
    GateRule("toks_per_s_50_above", "tok/s", "above", measures.figure, "surviving steps", RANK0,
             figure="toks_per_s"),
    GateRule("step_ratio_below", "", "at most", measures.figure, "surviving steps", RANK0,
             figure="step_ratio"),
    GateRule("entropy_above", "nats", "above", measures.figure, "all attempts", RANK0, certain=True,
             figure="entropy_min"),
    GateRule("collapse_below", "share", "at most", measures.figure, "all attempts", RANK0,
             certain=True, figure="collapse_max"),
    GateRule("fetch_below_s", "s", "at most", measures.figure, "all attempts", RANKS, certain=True,
             figure="fetch_max_s"),
    GateRule("heartbeats_complete", "records", "yes", measures.heartbeats, "all attempts", RANKS),
    GateRule("checkpoints_at_least", "checkpoints", "at least", measures.checkpoints,
             "surviving steps", RANK0),
    GateRule("checkpoints_loaded_at_least", "loads", "at least", measures.loads, "all attempts",
             RANK0),
    GateRule("checkpoint_mib_above", "MiB", "above", measures.checkpoint_size, "surviving steps",
             "checkpoints/"),
    GateRule(SCALING, "", "above", measures.scaling, "surviving steps", SINGLE),
    GateRule("no_log_errors", "lines", "yes", measures.log_errors, "all attempts", "logs/",
             certain=True),
    GateRule("comm_hook_active", "starts", "yes", measures.without_hook, "all attempts", RANKS,
             certain=True),
    GateRule("gpu_util_above_pct", "%", "above", measures.gpu_use, "all attempts", SAMPLES),
    GateRule("gpu_balance_below_pct", "%", "at most", measures.gpu_balance, "all attempts",
             SAMPLES),
)  # fmt: skip

GATE_ALERT = "gate-"
"""Prefix of the alert on a result of a live run that blocks; the name of the gate follows."""
RULES: dict[str, GateRule] = {rule.name: rule for rule in TABLE}


@dataclass(frozen=True, slots=True)
class Demand:
    """The bound and override of a gate, and the steps at which it is evaluated before the end."""

    bound: Any
    at: tuple[int, ...] = ()
    override: str = ""


def demand(value: Any) -> Demand:
    """Parses the bound of a gate in a plan: a value, or a mapping with the `DEMAND_KEYS`."""
    if not isinstance(value, Mapping):
        return Demand(value)
    at = value.get("at", ())
    steps = tuple(at) if isinstance(at, list | tuple) else (at,)
    override = value.get("override", "")
    return Demand(value.get("bound"), steps, " ".join(str(override).split())[:MAX_REASON])


def check(bounds: Mapping[str, Any], where: str) -> None:
    """Raises UsageError for an unknown gate, and for a bound, key or value that is not valid."""
    for name, value in bounds.items():
        rule = RULES.get(name)
        if rule is None:
            raise UsageError(f"{where}: there is no gate {name!r}{did_you_mean(name, RULES)}")
        wanted = demand(value)
        bound = wanted.bound
        number = isinstance(bound, int | float) and not isinstance(bound, bool)
        number = number and abs(bound) < LARGEST_BOUND
        given = "true" if bound is True else "number" if number else "nothing"
        takes = {"yes": "true", "fall": "true or a number"}.get(rule.bound, "a number")
        if given not in takes:
            raise UsageError(f"{where}: the gate {name} cannot be {bound!r}; use {takes}")
        _check_mapping(rule, value, wanted, where)


def why_no_single(phases: Sequence[Phase], index: int) -> str:
    """Returns why a phase cannot pass its gate `SCALING`, or ""."""
    bound = phases[index].gates.get(SCALING)
    single = next((each for each in reversed(phases[:index]) if each.nproc == 1), None)
    if bound is None or demand(bound).override or (single and SPEED in single.gates):
        return ""
    why = f"{single.name!r} has no gate {SPEED}" if single else "there is none"
    return f"the gate {SCALING} needs the speed of the newest earlier phase with nproc 1, and {why}"


def _check_mapping(rule: GateRule, value: Any, wanted: Demand, where: str) -> None:
    """Raises UsageError for a key not in `DEMAND_KEYS`, and for a wrong `at` or `override`."""
    if not isinstance(value, Mapping):
        return
    for key in value:
        if key not in DEMAND_KEYS:
            hint = did_you_mean(str(key), DEMAND_KEYS)
            raise UsageError(f"{where}: the gate {rule.name} has no key {key!r}{hint}")
    steps = " or ".join(map(str, LIVE_STEPS))
    if wanted.at and not rule.figure:
        raise UsageError(f"{where}: the gate {rule.name} is evaluated at the end only; remove 'at'")
    if any(type(step) is not int or step not in LIVE_STEPS for step in wanted.at):
        raise UsageError(f"{where}: 'at' of the gate {rule.name} must be step {steps}")
    if "override" in value and not (isinstance(value["override"], str) and wanted.override):
        raise UsageError(f"{where}: 'override' of the gate {rule.name} needs a reason in words")


def evaluate(
    summary: Summary, bounds: Mapping[str, Any], is_live: bool = False
) -> tuple[Gate, ...]:
    """Returns every gate of a phase as a `Gate`.

    A gate with `at` has one more result for each step in `at`, with the name `NAME@STEP`. If the
    run `is_live`, its newest records do not count as missing, because the run still writes them. A
    gate that fails so far is then unknown, except an `is_final` gate and a gate at a step. A gate
    at a step that only an earlier run has made is left out.
    """
    summary.is_live = is_live
    begin, planned = (summary.former or summary).begin, _planned(bounds)
    return tuple(
        _gate(rule, wanted, summary, at, planned) for rule, wanted, at in _each(bounds, begin)
    )  # fmt: skip


def _each(bounds: Mapping[str, Any], begin: int = 0) -> Iterator[tuple[GateRule, Demand, int]]:
    """Yields three values per evaluation of a gate: rule, demand, and step (0 means the end).

    The steps up to `begin` are left out.
    """
    for name, value in bounds.items():
        wanted = demand(value)
        yield RULES[name], wanted, 0
        yield from ((RULES[name], wanted, at) for at in wanted.at if at > begin)


def _planned(bounds: Mapping[str, Any]) -> float:
    """Returns the last step that the gates of a phase demand, or 0."""
    return demand(bounds.get("steps_done")).bound or 0


def named(rule: GateRule, at: int) -> str:
    """Returns the name of a gate at a step; 0 means the end."""
    return f"{rule.name}@{at}" if at else rule.name


def reached(summary: Summary, bounds: Mapping[str, Any]) -> tuple[Gate, ...]:
    """Returns the results of a live run that do not change any more.

    These are the results at each step in `at` that all its ranks have reached, and each gate that
    has failed and can no longer pass.
    """
    summary.is_live = True
    ranks = summary.different(range(summary.world))
    marks = [{row.at for row in summary.of_rank(rank).live} for rank in ranks]
    found = [
        _gate(rule, wanted, summary, at, 0) for rule, wanted, at in _each(bounds, summary.begin)
        if (all(at in mark for mark in marks) if at else rule.is_final)
    ]  # fmt: skip
    return tuple(gate for gate in found if "@" in gate.name or gate.result == "fail")


def unknown(bounds: Mapping[str, Any], why: str) -> tuple[Gate, ...]:
    """Returns all gates of a phase with the result unknown and the reason `why`."""
    return tuple(
        Gate(named(rule, at), None, rule.unit, rule.span, rule.source, "", "unknown", why,
             wanted.override)
        for rule, wanted, at in _each(bounds)
    )  # fmt: skip


def _share(summary: Summary, totals: Summary, limit: float, planned: float) -> tuple[float, str]:
    """Returns the share of a bound that a resumed run needs, and a text on the share.

    The share is that of the steps after the checkpoint, but at least 1. The whole bound remains if
    no step follows the checkpoint, or if the last step of a live run is not known.
    """
    begin, step = totals.begin, totals.of_rank(0).step
    last = max(step, planned)
    if not 0 < begin < last or (summary.is_live and planned <= step):
        return limit, ""
    text = f"bound for {last - begin:,.0f} of {last:,.0f} steps"
    return max(min(limit, 1.0), limit * (last - begin) // last), text


def _gate(rule: GateRule, wanted: Demand, summary: Summary, at: int, planned: float) -> Gate:
    """Returns a gate at a step, or at the end if `at` is 0; `planned` is as in `_planned`."""
    totals = summary.former or summary
    found = rule.value(totals, at)
    sign, holds = BOUNDS[rule.bound]
    bound = wanted.bound
    limit = 0.0 if rule.bound == "yes" else LEAST_FALL_NATS if bound is True else float(bound)
    result: Result = "unknown"
    share = ""
    if rule.name in OF_CHECKPOINTS:
        limit, share = _share(summary, totals, limit, planned)
    why = rule.gap(totals) or found.doubt
    if found.value is None:
        why = why or found.why or f"no value in {rule.source}; see docs/gates.md"
    elif holds(found.value, limit):
        result = "unknown" if why else "pass"
    elif rule.certain or not why:
        result = "fail"
    why = found.why if result != "unknown" else why
    is_open = summary.is_live and not at
    if is_open and result == "fail" and not rule.is_final:
        result, why = "unknown", why or "not met so far; the run has not ended"
    windows = rule.span, found.window, share, totals.name, "so far" * is_open
    window = ", ".join(filter(None, windows))
    unit = totals.loss_unit if rule.unit == LOSS_UNIT else rule.unit
    return Gate(
        named(rule, at), found.value, unit, window, rule.source, f"{sign} {limit:g}", result,
        why, summary.overrides.get(named(rule, at), wanted.override),
    )  # fmt: skip


def overall(gates: tuple[Gate, ...]) -> Result:
    """Returns the worst result of the gates of a phase, or "pass" if no gate failed or is unknown.

    Gates with an override are left out.
    """
    results = {gate.result for gate in gates if gate.blocks}
    worst: list[Result] = [result for result in RESULTS if result in results]
    return worst[0] if worst else "pass"


def steps_done(summary: Summary) -> int:
    """Returns the number of surviving steps, or 0 if it is not known."""
    return int(measures.steps_reached(summary).value or 0)
