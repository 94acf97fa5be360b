"""Builds records as ranks write them: numbered for each rank and attempt."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from console.plans.gates import evaluate
from console.sources.gate_files import GateFiles
from console.sources.summary import Summary
from trainers.contract.pulse import Pulse

Record = dict[str, Any]
EVERY_BOUND: Record = {
    "steps_done": 1, "loss_finite": True, "grad_norm_above": 0, "no_stall": True, "loss_falls": -1,
    "bytes_right": 0.5, "gpu_mem_below_mib": 100, "restarts_at_most": 9,
    "stalls_at_most": 9, "gpu_mem_growth_below_mib": 9, "toks_per_s_50_above": 1,
    "step_ratio_below": 99, "entropy_above": 0.1, "collapse_below": 0.5, "fetch_below_s": 5,
    "heartbeats_complete": True, "checkpoints_at_least": 1, "checkpoint_mib_above": 1,
    "checkpoints_loaded_at_least": 0,
    "no_log_errors": True, "scaling_above": 0.9, "comm_hook_active": True, "gpu_util_above_pct": 80,
    "gpu_balance_below_pct": 10,
}  # fmt: skip
"""A bound for every gate. A healthy run with complete records and files passes all of them."""
FIGURES = {
    "grad_norm": 1.0, "bytes_right": 1.0, "toks_per_s": 9.0, "gpu_mem_reserved": 1.0,
    "steps_dt_s": [1.0], "gate_entropy_mean": 0.9, "gate_collapse_frac": 0.0, "dt_fetch_s": 0.1,
}  # fmt: skip
"""Figures of a healthy record."""
_clock = itertools.count(1)


class Written:
    """The records of one rank in one attempt, whether or not they reached the file."""

    def __init__(self, rank: int = 0, attempt: int = 1):
        self.rank, self.attempt = rank, attempt
        self.records: list[Record] = []

    def add(self, msg: str, step: int, **figures: Any) -> Record:
        record = {
            "v": 1, "n": len(self.records) + 1, "attempt": self.attempt, "rank": self.rank,
            "ts": 1.0, "mono": float(next(_clock)), "step": step, "msg": msg,
        } | figures  # fmt: skip
        self.records.append(record)
        return record

    def pulse(self, step: int, nonfinite_steps: int = -1) -> Pulse:
        """Returns a pulse of the rank in `step`, after its newest record."""
        return Pulse(
            self.rank, 1, step, "forward", 0.0, 0.0, 0, step, "forward", len(self.records),
            nonfinite_steps,
        )  # fmt: skip


def attempt(
    number: int, steps: range, rank: int = 0, exit_code: int | None = 0, **figures: Any
) -> Written:
    """Returns the records of a rank in an attempt: of the start, of each step, and of the exit.

    If `steps` starts after step 1, the attempt has resumed. With None as `exit_code`, the rank was
    killed, and there is no exit record.
    """
    written = Written(rank, number)
    written.add("loader_ready", 0, comm_hook="bf16")
    if steps.start > 1:
        written.add("resume", steps.start - 1)
    for step in steps:
        written.add("progress", step, loss=1.0, nonfinite_loss_steps=0, **figures)
    if exit_code is not None:
        written.add("exit", steps.stop - 1, exit_code=exit_code, nonfinite_loss_steps=0)
    return written


def summed(*written: Written, **counted: int) -> Summary:
    """Returns the sums of the records, by default without a stall; `counted` changes counts."""
    newest = max((each.attempt for each in written), default=1)
    world = max((each.rank for each in written), default=0) + 1
    summary = Summary(**{"world": world, "attempts": newest, "stalls": 0} | counted)
    for record in lines(*written):
        summary.add(record)
    return summary


def lines(*written: Written) -> Iterator[Record]:
    for each in written:
        yield from each.records


def result(found, **bounds):
    (gate,) = evaluate(found, bounds)
    return gate


def killed_then_resumed(**figures):
    """Returns two attempts: the first was killed in step 26, the second resumed after step 20."""
    first = attempt(1, range(1, 26), exit_code=None, **figures)
    return first, attempt(2, range(21, 31), loss_of=1, **figures)


def whole(rank: int = 0) -> Written:
    return attempt(1, range(1, 61), rank, **FIGURES)


def saved() -> Written:
    """Returns complete records with a checkpoint before the exit record."""
    written = whole()
    last = written.records.pop()
    written.add("checkpoint", 60)
    written.add("exit", 60, exit_code=0, nonfinite_loss_steps=last["nonfinite_loss_steps"])
    return written


def with_files(*written: Written, use_pct: float = 95.0, **counted: int) -> Summary:
    """Returns the sums of records, with a checkpoint, 60 samples, and logs without an error."""
    found = summed(*written, **counted)
    found.files = GateFiles(
        checkpoint="step_00000060", checkpoint_mib=940.0, single="0-one", single_toks_per_s=9.0
    )
    for step in range(1, 61):
        gpus = [{"index": i, "state": "ok", "util_pct": use_pct} for i in range(found.world)]
        pulses = [{"pulse": {"phase": "forward", "step": step}}] * found.world
        found.gpus.add({"mono": float(step), "attempt": 1, "gpus": gpus, "ranks": pulses})
    return found
