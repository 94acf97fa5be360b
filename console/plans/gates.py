"""The acceptance rules of a phase: one row each, evaluated over what the run recorded.

A `Summary` takes in the records of a run once, as they come; a gate is a function over it.
"""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from console.model import RESULTS, Gate, Result
from console.plain import counted
from trainers.contract import jsonl
from trainers.contract.errors import UsageError, did_you_mean

Bound = Literal["yes", "at least", "above", "at most", "fall"]
BOUNDS: Mapping[Bound, tuple[str, Callable[[float, float], bool]]] = {
    "yes": ("=", operator.eq), "at least": ("≥", operator.ge), "above": (">", operator.gt),
    "at most": ("≤", operator.le), "fall": ("≥", operator.ge),
}  # fmt: skip
"""The sign of each kind of bound, and when a value keeps to its limit."""
EDGE_RECORDS = 5
LEAST_FALL_NATS = 0.1
LARGEST_BOUND = 1e300
RANK0 = "heartbeat_rank0.jsonl"


@dataclass(slots=True)
class Summary:
    """What the gates need to know of a run, in constant memory."""

    steps: int = 0
    records: int = 0
    nonfinite: int = 0
    first_nonfinite_step: int | None = None
    grad_norm_min: float | None = None
    bytes_right: float | None = None
    bytes_right_step: int | None = None
    toks_per_s: deque[float] = field(default_factory=lambda: deque(maxlen=50))
    first_losses: list[float] = field(default_factory=list)
    last_losses: deque[float] = field(default_factory=lambda: deque(maxlen=EDGE_RECORDS))
    stalls: int = 0
    memory_mib: float | None = None

    def take(self, record: Mapping[str, Any]) -> None:
        """Takes in one heartbeat of any rank."""
        if record.get("msg") != "progress":
            return
        step = jsonl.integer(record, "step") or 0
        self.steps = max(self.steps, step)
        reserved = jsonl.number(record, "gpu_mem_reserved")
        if reserved is not None:
            self.memory_mib = max(reserved, self.memory_mib or 0.0)
        if record.get("rank") != 0:
            return
        self.records += 1
        self._take_loss(record, step)
        norm = jsonl.number(record, "grad_norm")
        if norm is not None:
            lowest = self.grad_norm_min
            if lowest is None or math.isnan(norm) or norm < lowest:
                self.grad_norm_min = norm
        right = jsonl.number(record, "bytes_right")
        if right is not None:
            self.bytes_right, self.bytes_right_step = right, step
        speed = jsonl.number(record, "toks_per_s")
        if speed is not None:
            self.toks_per_s.append(speed)

    def _take_loss(self, record: Mapping[str, Any], step: int) -> None:
        loss = jsonl.number(record, "loss")
        if loss is None:
            return
        if not math.isfinite(loss):
            self.nonfinite += 1
            if self.first_nonfinite_step is None:
                self.first_nonfinite_step = step
            return
        if len(self.first_losses) < EDGE_RECORDS:
            self.first_losses.append(loss)
        self.last_losses.append(loss)

    def take_metrics(self, metrics: Mapping[str, Any] | None) -> None:
        """Takes in metrics.json: it knows the last step also when no progress record was due."""
        for key in ("steps", "steps_done", "step"):
            self.steps = max(self.steps, jsonl.integer(metrics or {}, key) or 0)


@dataclass(frozen=True, slots=True)
class Measured:
    """A gate's value, None while there is none, with its window and what else there is to say."""

    value: float | None
    window: str
    why: str = ""


def _loss_finite(s: Summary) -> Measured:
    first = s.first_nonfinite_step
    why = f"first non-finite loss at step {first}" if first is not None else ""
    seen = s.nonfinite or s.last_losses
    return Measured(
        float(s.nonfinite) if seen else None, f"all {counted(s.records, 'record')}", why
    )


def _loss_fall(s: Summary) -> Measured:
    if len(s.first_losses) < EDGE_RECORDS or s.records < 2 * EDGE_RECORDS:
        return Measured(None, "", f"needs {2 * EDGE_RECORDS} progress records, has {s.records}")
    first = math.fsum(s.first_losses) / len(s.first_losses)
    last = math.fsum(s.last_losses) / len(s.last_losses)
    window = f"mean of the first {EDGE_RECORDS} records less that of the last {EDGE_RECORDS}"
    return Measured(first - last, window, f"{first:.3f} to {last:.3f}")


def _toks_per_s(s: Summary) -> Measured:
    ordered = sorted(s.toks_per_s)
    median = ordered[len(ordered) // 2] if ordered else None
    return Measured(median, f"median of the last {counted(len(ordered), 'record')}")


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the registry. "yes" counts what must be zero; "fall" takes true or nats.

    `missing` says why there is no value.
    """

    name: str
    unit: str
    bound: Bound
    measure: Callable[[Summary], Measured]
    source: str
    missing: str = ""


TABLE: tuple[Rule, ...] = (
    Rule("steps_done", "steps", "at least",
         lambda s: Measured(s.steps if s.records else None, "whole run"),
         "heartbeat_rank*.jsonl, metrics.json", "no progress record"),
    Rule("loss_finite", "records", "yes", _loss_finite, RANK0, "no loss was recorded"),
    Rule("grad_norm_above", "", "above",
         lambda s: Measured(s.grad_norm_min, f"lowest of {counted(s.records, 'record')}"), RANK0,
         "no grad_norm was recorded"),
    Rule("no_stall", "stalls", "yes", lambda s: Measured(float(s.stalls), "whole run"),
         "events.jsonl"),
    Rule("loss_falls", "nats/token", "fall", _loss_fall, RANK0),
    Rule("bytes_right", "share", "at least",
         lambda s: Measured(s.bytes_right, f"record of step {s.bytes_right_step}"), RANK0,
         "no bytes_right was recorded; only recall counts it"),
    Rule("toks_per_s_above", "tok/s", "above", _toks_per_s, RANK0, "no toks_per_s was recorded"),
    Rule("gpu_mem_below_mib", "MiB", "at most",
         lambda s: Measured(s.memory_mib, "largest rank, whole run"), "heartbeat_rank*.jsonl",
         "no gpu_mem_reserved was recorded"),
)  # fmt: skip

RULES: dict[str, Rule] = {rule.name: rule for rule in TABLE}


def check(bounds: Mapping[str, Any], where: str) -> None:
    """Raises UsageError for a gate that is in no table, or a bound that it does not take."""
    for name, bound in bounds.items():
        rule = RULES.get(name)
        if rule is None:
            raise UsageError(f"{where}: there is no gate {name!r}{did_you_mean(name, RULES)}")
        number = isinstance(bound, int | float) and not isinstance(bound, bool)
        number = number and abs(bound) < LARGEST_BOUND
        if rule.bound == "yes" and bound is not True:
            raise UsageError(f"{where}: the gate {name} cannot be {bound!r}; it takes true")
        if rule.bound == "fall" and not (number or bound is True):
            raise UsageError(f"{where}: the gate {name} cannot be {bound!r}; true or a number")
        if rule.bound not in ("yes", "fall") and not number:
            raise UsageError(f"{where}: the gate {name} cannot be {bound!r}; it takes a number")


def evaluate(summary: Summary, bounds: Mapping[str, Any]) -> tuple[Gate, ...]:
    """Returns every gate of a phase with its value, window, source, bound and result."""
    return tuple(_gate(RULES[name], bound, RULES[name].measure(summary))
                 for name, bound in bounds.items())  # fmt: skip


def _gate(rule: Rule, bound: Any, found: Measured) -> Gate:
    sign, holds = BOUNDS[rule.bound]
    limit = 0.0 if rule.bound == "yes" else LEAST_FALL_NATS if bound is True else float(bound)
    words = f"{sign} {limit:g}"
    if found.value is None:
        why = found.why or rule.missing
        return Gate(rule.name, None, rule.unit, "", rule.source, words, "unknown", why)
    result: Result = "pass" if holds(found.value, limit) else "fail"
    return Gate(
        rule.name, found.value, rule.unit, found.window, rule.source, words, result,
        found.why,
    )  # fmt: skip


def overall(gates: tuple[Gate, ...]) -> Result:
    """Returns the result of a phase: any failed gate fails it, any unknown leaves it unknown."""
    results = {gate.result for gate in gates}
    worst: list[Result] = [result for result in RESULTS if result in results]
    return worst[0] if worst else "pass"
