"""The acceptance rules of a phase: one row each, evaluated over what the run recorded.

A `Summary` takes in the records of a run once, as they come; a gate is a function over it. The
supervisor feeds it live, a reader from the files, and both get the same answer.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from console.model import Gate, Result
from trainers.contract import heartbeat, jsonl, rundir
from trainers.contract.errors import UsageError, did_you_mean

Bound = Literal["yes", "at least", "above", "at most", "fall"]
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

    def take_event(self, event: Mapping[str, Any]) -> None:
        """Takes in one event: a stall is an alert of that name."""
        if event.get("kind") == "alert" and event.get("alert") == "stall":
            self.stalls += 1

    def take_metrics(self, metrics: Mapping[str, Any] | None) -> None:
        """Takes in metrics.json: it knows the last step also when no progress record was due."""
        for key in ("steps", "steps_done", "step"):
            self.steps = max(self.steps, jsonl.integer(metrics or {}, key) or 0)


def summarize(run: Path, world: int) -> Summary:
    """Returns the summary of a run on disk."""
    summary = Summary()
    for rank in range(world):
        tail = heartbeat.tail(rundir.heartbeat(run, rank))
        while (records := tail.poll()) or tail.offset < tail.size_bytes:
            for record in records:
                summary.take(record)
    events = jsonl.Tail(run / rundir.EVENTS, lambda record: record)
    while (records := events.poll()) or events.offset < events.size_bytes:
        for record in records:
            summary.take_event(record)
    summary.take_metrics(rundir.read_json(run / rundir.METRICS))
    return summary


@dataclass(frozen=True, slots=True)
class Measured:
    """A gate's value with its window; None says in `why` what is missing."""

    value: float | None
    window: str
    why: str = ""


def _steps_done(s: Summary) -> Measured:
    return Measured(s.steps, "whole run") if s.records else Measured(None, "", "no progress record")


def _loss_finite(s: Summary) -> Measured:
    finite = len(s.last_losses) > 0
    if not finite and not s.nonfinite:
        return Measured(None, "", "no loss was recorded")
    first = s.first_nonfinite_step
    why = f"first non-finite loss at step {first}" if first is not None else ""
    return Measured(float(s.nonfinite), f"all {s.records} records", why)


def _grad_norm(s: Summary) -> Measured:
    if s.grad_norm_min is None:
        return Measured(None, "", "no grad_norm was recorded")
    return Measured(s.grad_norm_min, f"lowest of {s.records} records")


def _stalls(s: Summary) -> Measured:
    return Measured(float(s.stalls), "whole run")


def _loss_fall(s: Summary) -> Measured:
    if len(s.first_losses) < EDGE_RECORDS or s.records < 2 * EDGE_RECORDS:
        return Measured(None, "", f"needs {2 * EDGE_RECORDS} progress records, has {s.records}")
    first = math.fsum(s.first_losses) / len(s.first_losses)
    last = math.fsum(s.last_losses) / len(s.last_losses)
    window = f"mean of the first {EDGE_RECORDS} records less that of the last {EDGE_RECORDS}"
    return Measured(first - last, window, f"{first:.3f} to {last:.3f}")


def _bytes_right(s: Summary) -> Measured:
    if s.bytes_right is None:
        return Measured(None, "", "no bytes_right was recorded; only recall counts it")
    return Measured(s.bytes_right, f"record of step {s.bytes_right_step}")


def _toks_per_s(s: Summary) -> Measured:
    if not s.toks_per_s:
        return Measured(None, "", "no toks_per_s was recorded")
    ordered = sorted(s.toks_per_s)
    return Measured(ordered[len(ordered) // 2], f"median of the last {len(ordered)} records")


def _memory(s: Summary) -> Measured:
    if s.memory_mib is None:
        return Measured(None, "", "no gpu_mem_reserved was recorded")
    return Measured(s.memory_mib, "largest rank, whole run")


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the registry. "yes" counts what must be zero; "fall" takes true or nats."""

    name: str
    unit: str
    bound: Bound
    measure: Callable[[Summary], Measured]
    source: str
    doc: str


TABLE: tuple[Rule, ...] = (
    Rule("steps_done", "steps", "at least", _steps_done, "heartbeat_rank*.jsonl, metrics.json",
         "So many steps are finished."),
    Rule("loss_finite", "records", "yes", _loss_finite, RANK0, "No loss is NaN or infinite."),
    Rule("grad_norm_above", "", "above", _grad_norm, RANK0, "Every gradient norm lies above."),
    Rule("no_stall", "stalls", "yes", _stalls, "events.jsonl", "The run never stalled."),
    Rule("loss_falls", "nats/token", "fall", _loss_fall, RANK0,
         f"The loss falls by so much; true: {LEAST_FALL_NATS}."),
    Rule("bytes_right", "share", "at least", _bytes_right, RANK0,
         "So large a share of the copied bytes is right."),
    Rule("toks_per_s_above", "tok/s", "above", _toks_per_s, RANK0, "Throughput of all ranks."),
    Rule("gpu_mem_below_mib", "MiB", "at most", _memory, "heartbeat_rank*.jsonl",
         "Memory that the allocator reserved on the fullest GPU."),
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
    limit, words = _limit(rule, bound)
    result: Result = "unknown"
    if found.value is not None:
        result = "pass" if _holds(rule.bound, found.value, limit) else "fail"
    return Gate(
        rule.name, found.value, rule.unit, found.window, rule.source, words, result, found.why
    )


def _limit(rule: Rule, bound: Any) -> tuple[float, str]:
    if rule.bound == "yes":
        return 0.0, "= 0"
    limit = LEAST_FALL_NATS if bound is True else float(bound)
    sign = {"at least": "≥", "above": ">", "at most": "≤", "fall": "≥"}[rule.bound]
    return limit, f"{sign} {limit:g}"


def _holds(kind: Bound, value: float, limit: float) -> bool:
    return {
        "yes": value == 0, "at least": value >= limit, "above": value > limit,
        "at most": value <= limit, "fall": value >= limit,
    }[kind]  # fmt: skip


def overall(gates: tuple[Gate, ...]) -> Result:
    """Returns the result of a phase: any failed gate fails it, any unknown leaves it unknown."""
    results = {gate.result for gate in gates}
    return "fail" if "fail" in results else "unknown" if "unknown" in results else "pass"
