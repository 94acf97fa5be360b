"""The second sources of the watch rules: who is asked before an action interrupts or ends a run.

Each returns "" where the second source agrees, else why no strong action is due. It reads nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from console.diagnose.readings import Past, Readings, gate_collapsed
from console.sources.pace import Progress

Second = Callable[[Readings, Past], str]
STEPS_ON = 0.5
"""At more than this share of their own pace, the ranks do not confirm that throughput is gone."""


def of_the_kernel(_now: Readings, _past: Past) -> str:
    """Agrees: the kernel of this host measured it itself, no writer and no file is between."""
    return ""


def stall(now: Readings, _past: Past) -> str:
    return now.stall_doubt


def pace(_now: Readings, past: Past) -> str:
    """Asks the steps that the pulses show by this host's clock."""
    if past.pace_ratio is None:
        return "the pulses do not show a pace yet"
    if past.pace_ratio > STEPS_ON:
        return f"the ranks step at {past.pace_ratio:.0%} of their own pace before"
    return ""


def _confirmed(bad: Callable[[Progress], bool | None]) -> Second:
    """Asks another rank's record of that step; where no other rank records it, training.csv.

    `bad` says what a record shows, None where it does not have the figure.
    """

    def second(now: Readings, _past: Past) -> str:
        own = now.progress.get(0)
        if own is None:
            return "rank 0 has no record"
        others = {rank: p for rank, p in now.progress.items() if rank and bad(p) is not None}
        found = {rank: bad(p) for rank, p in others.items() if p.step >= own.step}
        if any(found.values()):
            return ""
        if found:
            return f"rank {min(found)} records it otherwise"
        if others:
            return f"no other rank has recorded step {own.step} yet"
        row = now.csv
        if row is None or row.step != own.step or bad(row) is None:
            return "neither another rank nor training.csv records it"
        return "" if bad(row) else f"training.csv says otherwise at step {row.step}"

    return second


def loss(now: Readings, past: Past) -> str:
    """Asks as `_confirmed` does; in a run of one rank its pulse does as well, which counts."""
    doubt = _loss_recorded(now, past)
    alone = [seen.nonfinite_steps for seen in now.seen] if len(now.seen) == 1 else []
    return "" if alone and alone[0] > 0 and (now.csv is None or now.csv.loss is None) else doubt


_loss_recorded = _confirmed(lambda p: None if p.loss is None else not math.isfinite(p.loss))
norm = _confirmed(lambda p: None if p.grad_norm is None else p.grad_norm == 0)
gate = _confirmed(gate_collapsed)
