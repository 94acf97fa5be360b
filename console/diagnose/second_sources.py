"""The second sources of the watch rules: each function says why it does not confirm a rule, or "".

A strong action of a rule needs the confirmation of the rule's second source. No file is read here.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from console.diagnose.readings import History, Readings, gate_collapsed
from console.diagnose.rule import Corroborate
from console.sources.pace import Progress

PACE_LOST = 0.5
"""A drop of throughput is confirmed if the pace is at most this many times the earlier pace."""


def by_kernel(_now: Readings, _history: History) -> str:
    """Always confirms the rule, because the kernel of this host measured the value."""
    return ""


def by_records(now: Readings, _history: History) -> str:
    """Confirms a stall unless the readings have a `stall_doubt`."""
    return now.stall_doubt


def by_pace(_now: Readings, history: History) -> str:
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


loss_recorded = _recorded(lambda p: None if p.loss is None else not math.isfinite(p.loss))
gradient_recorded = _recorded(lambda p: None if p.grad_norm is None else p.grad_norm == 0)
gate_recorded = _recorded(gate_collapsed)


def by_loss(now: Readings, history: History) -> str:
    """Confirms a non-finite loss from records.

    If the run has one rank, and training.csv has no newest row with a loss, a count above 0 in the
    pulse confirms the non-finite loss.
    """
    alone = [rank.nonfinite_steps for rank in now.ranks] if len(now.ranks) == 1 else []
    if alone and alone[0] > 0 and (now.csv is None or now.csv.loss is None):
        return ""
    return loss_recorded(now, history)
