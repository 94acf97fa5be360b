"""The gates of a phase: a new gate is one row in `TABLE`, evaluated over the records of the run.

A gate names its span: all attempts, or the surviving steps (steps that no later attempt repeated).
A gate passes only if the numbered records of its ranks cover that span without a gap.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from console.model import RESULTS, Gate, Result
from console.sources.rank_totals import FIRST_LOSSES, RankTotals
from console.sources.summary import Summary
from console.status_text import counted
from trainers.contract.errors import UsageError, did_you_mean

Bound = Literal["yes", "at least", "above", "at most", "fall"]
Span = Literal["all attempts", "surviving steps"]
BOUNDS: Mapping[Bound, tuple[str, Callable[[float, float], bool]]] = {
    "yes": ("=", operator.eq), "at least": ("≥", operator.ge), "above": (">", operator.gt),
    "at most": ("≤", operator.le), "fall": ("≥", operator.ge),
}  # fmt: skip
"""The sign of each kind of bound, and the test that a value passes."""
LEAST_FALL_NATS = 0.1
MEDIAN_RECORDS = 50
LARGEST_BOUND = 1e300
UNCOUNTED = "non-finite steps are not counted, and some steps have no record with a loss"
RANK0, RANKS = "heartbeat_rank0.jsonl", "heartbeat_rank*.jsonl"
EVENTS = "events.jsonl"


@dataclass(frozen=True, slots=True)
class Measured:
    """The value of a gate (None if there is none), its window, and in `why` an explanation.

    A gate with a `doubt` does not pass, whatever its value.
    """

    value: float | None
    window: str = ""
    why: str = ""
    doubt: str = ""


def _steps_done(s: Summary) -> Measured:
    """Returns the step that every rank has completed; two sources must agree for each rank."""
    done: list[int] = []
    newest = [totals.attempts.get(totals.newest) for totals in s.ranks.values()]
    exits = [part.exit[0] for part in newest if part is not None and part.exit is not None]
    for rank, totals in sorted(s.ranks.items()):
        step, doubt = _steps_of(s, totals, exits)
        if doubt:
            return Measured(None, doubt=f"rank {rank}: {doubt}")
        if step or rank == 0:
            done.append(step)
    return Measured(float(min(done)) if s.of_rank(0).progress else None)


def _steps_of(s: Summary, totals: RankTotals, exits: list[int]) -> tuple[int, str]:
    """Returns the last step of a rank, and the contradiction between its sources, or "" for none.

    Progress records are not written at every step, so the exit record may have a later step. The
    rank's pulse, or another rank, must then confirm that step.
    """
    part, end = totals.attempts.get(totals.newest), s.ends.get((totals.newest, totals.rank))
    if part is None or part.exit is None:
        if end is not None and part is not None and part.step > end.step:
            return 0, f"its newest record has step {part.step}, its pulse step {end.step}"
        return totals.step, ""
    step, code = part.exit
    if part.start is None and step == 0:
        return totals.step, ""  # no step was left
    if end is not None and end.step != step:
        return 0, f"its exit record has step {step}, its pulse step {end.step}"
    if part.step > step:
        return 0, f"its newest record has step {part.step}, its exit record step {step}"
    confirmed = code == 0 and (end is not None or exits.count(step) > 1)
    return step if confirmed else min(step, totals.step), ""


def steps_done(summary: Summary) -> int:
    """Returns the number of surviving steps, or 0 if the records contradict each other."""
    return int(_steps_done(summary).value or 0)


def _loss_finite(s: Summary) -> Measured:
    """Counts the steps with a non-finite loss in all attempts, from records and pulses."""
    worst: dict[int, int] = {}
    first, doubt, known = "", "", False
    for attempt, rank, part, end in s.all_parts():
        by_pulse = end.nonfinite_steps if end is not None else -1
        count = max(part.counted or 0, part.bad_losses, by_pulse)
        worst[attempt] = max(count, worst.get(attempt, 0))
        has_losses = part.counted is not None or part.losses > 0
        known = known or (has_losses and rank == 0)
        if part.first_bad is not None and not first:
            first = f"first non-finite loss on record: step {part.first_bad} of attempt {attempt}"
        counts = part.exit is not None and part.counts_at_last
        counts = counts or by_pulse >= 0 or not part.has_stepped(end)
        if (has_losses or rank == 0) and not counts and not part.every_loss_is_recorded(end):
            doubt = doubt or f"rank {rank}, attempt {attempt}: {UNCOUNTED}"
    total = sum(worst.values())
    return Measured(float(total) if known or total else None, "", first, doubt)


def _mean(values: Sequence[float]) -> float:
    """Returns the mean, or nan if the sum of the values overflows."""
    try:
        return math.fsum(values) / len(values)
    except (OverflowError, ValueError):
        return math.nan


def _loss_fall(s: Summary) -> Measured:
    window, last = s.of_rank(0).window, s.of_rank(0).window.last("loss", FIRST_LOSSES)
    few = window.losses < 2 * FIRST_LOSSES or len(window.first) < FIRST_LOSSES
    if last is None or len(last) < FIRST_LOSSES or few:
        needs = f"{2 * FIRST_LOSSES} progress records are needed, {window.losses} exist"
        return Measured(None, why=needs)
    before, after = _mean([loss for _, loss in window.first]), _mean(last)
    text = f"mean of the first {FIRST_LOSSES} records minus mean of the last {FIRST_LOSSES}"
    return Measured(before - after, text, f"{before:.3f} to {after:.3f}")


def _toks_per_s(s: Summary) -> Measured:
    found = s.of_rank(0).window.last("toks_per_s", MEDIAN_RECORDS)
    if found is None:
        return Measured(None, why="too few records of the steps before the restart are kept")
    ordered = sorted(found)
    median = ordered[len(ordered) // 2] if ordered else None
    return Measured(median, f"median of the last {counted(len(ordered), 'record')}")


def _bytes_right(s: Summary) -> Measured:
    found = [each for each in s.of_rank(0).window.newest if each.bytes_right is not None]
    if not found:
        return Measured(None)
    return Measured(found[-1].bytes_right, f"record of step {found[-1].step}")


def _grad_norm(s: Summary) -> Measured:
    totals = s.of_rank(0)
    return Measured(totals.norm_min, f"lowest of {counted(totals.norms, 'record')}")


def _memory(s: Summary) -> Measured:
    largest = [totals.memory_mib.value for totals in s.ranks.values()]
    return Measured(
        max((v for v in largest if v is not None), default=None), "largest of all ranks"
    )


def _stalls(s: Summary) -> Measured:
    lost = "" if s.stalls is not None else "the count of earlier stalls is not available"
    return Measured(float(s.stalls_seen), doubt=lost)


def _restarts(s: Summary) -> Measured:
    return Measured(None if s.attempts is None else float(s.attempts - 1))


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table of gates.

    The bound "yes" requires the value zero; "fall" accepts true or a number of nats. With `source`
    RANK0 the gate needs only the records of rank 0. `missing` is the reason shown if there is no
    value. A `certain` gate that fails stays failed, whatever records are missing. With `tails` the
    pulse of a killed rank replaces the last records that the rank could not write.
    """

    name: str
    unit: str
    bound: Bound
    measure: Callable[[Summary], Measured]
    span: Span
    source: str
    missing: str = ""
    certain: bool = False
    tails: bool = False

    def gap(self, summary: Summary) -> str:
        """Returns why the records do not cover the span of the gate, or "" if they do."""
        ranks = range(1 if self.source == RANK0 else summary.world)
        return summary.gap(ranks, self.span == "surviving steps", self.tails)


TABLE: tuple[Rule, ...] = (
    Rule("steps_done", "steps", "at least", _steps_done, "surviving steps", RANKS,
         "no progress record"),
    Rule("loss_finite", "steps", "yes", _loss_finite, "all attempts", RANKS,
         "no loss was recorded", certain=True, tails=True),
    Rule("grad_norm_above", "", "above", _grad_norm, "all attempts", RANK0,
         "no grad_norm was recorded", certain=True),
    Rule("no_stall", "stalls", "yes", _stalls, "all attempts", EVENTS, certain=True, tails=True),
    Rule("stalls_at_most", "stalls", "at most", _stalls, "all attempts", EVENTS, certain=True,
         tails=True),
    Rule("restarts_at_most", "restarts", "at most", _restarts, "all attempts", EVENTS,
         certain=True, tails=True),
    Rule("loss_falls", "nats/token", "fall", _loss_fall, "surviving steps", RANK0),
    Rule("bytes_right", "share", "at least", _bytes_right, "surviving steps", RANK0,
         "no bytes_right was recorded; only data.source recall records it"),
    Rule("toks_per_s_above", "tok/s", "above", _toks_per_s, "surviving steps", RANK0,
         "no toks_per_s was recorded"),
    Rule("gpu_mem_below_mib", "MiB", "at most", _memory, "surviving steps", RANKS,
         "no gpu_mem_reserved was recorded", certain=True),
)  # fmt: skip

RULES: dict[str, Rule] = {rule.name: rule for rule in TABLE}


def check(bounds: Mapping[str, Any], where: str) -> None:
    """Raises UsageError for an unknown gate, or for a bound that the gate does not accept."""
    for name, bound in bounds.items():
        rule = RULES.get(name)
        if rule is None:
            raise UsageError(f"{where}: there is no gate {name!r}{did_you_mean(name, RULES)}")
        number = isinstance(bound, int | float) and not isinstance(bound, bool)
        number = number and abs(bound) < LARGEST_BOUND
        given = "true" if bound is True else "number" if number else "nothing"
        takes = {"yes": "true", "fall": "true or a number"}.get(rule.bound, "a number")
        if given not in takes:
            raise UsageError(f"{where}: the gate {name} cannot be {bound!r}; use {takes}")


def evaluate(summary: Summary, bounds: Mapping[str, Any]) -> tuple[Gate, ...]:
    """Returns every gate of a phase with its value, window, source, bound and result."""
    return tuple(_gate(RULES[name], bound, summary) for name, bound in bounds.items())


def unknown(bounds: Mapping[str, Any], why: str) -> tuple[Gate, ...]:
    """Returns the gates of a phase as unknown, with the reason why they cannot be evaluated."""
    rules = (RULES[name] for name in bounds)
    return tuple(Gate(r.name, None, r.unit, r.span, r.source, "", "unknown", why) for r in rules)


def _gate(rule: Rule, bound: Any, summary: Summary) -> Gate:
    found = rule.measure(summary)
    sign, holds = BOUNDS[rule.bound]
    limit = 0.0 if rule.bound == "yes" else LEAST_FALL_NATS if bound is True else float(bound)
    result: Result = "unknown"
    why = rule.gap(summary) or found.doubt
    if found.value is None:
        why = why or found.why or rule.missing
    elif holds(found.value, limit):
        result = "unknown" if why else "pass"
    elif rule.certain or not why:
        result = "fail"
    why = found.why if result != "unknown" else why
    window = ", ".join(filter(None, (rule.span, found.window)))
    return Gate(
        rule.name, found.value, rule.unit, window, rule.source, f"{sign} {limit:g}", result, why
    )


def overall(gates: tuple[Gate, ...]) -> Result:
    """Returns the result of a phase: failed if a gate failed, else unknown if a gate is unknown."""
    results = {gate.result for gate in gates}
    worst: list[Result] = [result for result in RESULTS if result in results]
    return worst[0] if worst else "pass"
