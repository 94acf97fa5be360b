"""The cost of heartbeat and pulse per step, on the training thread.

Each step is a busy loop and one measured call: a full progress record of about 0.84 kB, or a change
of the pulse. The writer thread runs as in a training. For comparison, the same run also encodes and
writes the record in the training thread, as the simplest trainer would do.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.common import median, publish, quantile, table
from trainers.contract import heartbeat, rundir
from trainers.contract.member import Member

ROUNDS, CALLS, STEP_S = 7, 400, 0.001
FIGURES = {
    "loss": 2.3456789, "lr": 3e-4, "grad_norm": 0.91234, "toks_per_s": 41020.5,
    "toks_per_s_rank": 20510.2, "tokens_total": 123456789, "mfu": 0.41, "steps_dt_s": [0.8] * 20,
    "dt_fetch_s": 0.001, "dt_forward_s": 0.3, "dt_backward_s": 0.4, "dt_optimizer_s": 0.05,
    "fetch_p50_ms": 0.9, "fetch_p95_ms": 1.4, "gpu_mem_alloc": 61000.0, "gpu_mem_reserved": 71200.0,
    "skipped_steps": 0, "gate_entropy_mean": 0.93, "gate_entropy_min": 0.41,
    "gate_entropy_layers": [0.9] * 12, "gate_max_gate": 0.5, "gate_collapse_frac": 0.0,
    "gate_branch_shares": [0.33, 0.37, 0.30], "sel_distance_mean": 512.0, "sel_forced_share": 0.2,
}  # fmt: skip


def spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def sample(call: Callable[[int], object]) -> list[float]:
    """Returns the microseconds of each call; each step has one call."""
    costs = []
    for step in range(CALLS):
        spin(STEP_S)
        begin = time.perf_counter_ns()
        call(step)
        costs.append((time.perf_counter_ns() - begin) / 1e3)
    return costs


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()  # no options, only --help
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory)
        live = run / "live"
        live.mkdir()
        variables = {"NSA_CONSOLE_LIVE_DIR": str(live), "WORLD_SIZE": "8", "RANK": "0"}
        member = Member(run, variables)
        fd = rundir.open_append(run / "inline.jsonl")

        def inline(step: int) -> None:
            record = {"v": 1, "step": step, "ts": time.time(), "msg": "progress"} | FIGURES
            os.write(fd, heartbeat.encode(record))

        calls: dict[str, Callable[[int], object]] = {
            "heartbeat (`member.record`, full record)": lambda s: member.record(
                "progress", s, **FIGURES
            ),
            "pulse change (`pulse.set`)": lambda s: member.pulse.set(s, "forward"),
            "for comparison: the record written in line": inline,
        }
        costs: dict[str, list[list[float]]] = {name: [] for name in calls}
        for _ in range(ROUNDS):
            for name, call in calls.items():
                costs[name].append(sample(call))
        member.close(0)
    budgets = ("≤ 8", "≤ 3", "–")
    rows = [
        (
            name,
            f"{median([quantile(r, 0.5) for r in rounds]):.2f}",
            f"{median([quantile(r, 0.99) for r in rounds]):.2f}",
            budget,
        )
        for (name, rounds), budget in zip(costs.items(), budgets, strict=True)
    ]
    publish(
        "step_cost",
        "Cost of heartbeat and pulse per step",
        table(("what", "p50 µs", "p99 µs", "budget p50 µs"), rows),
        f"Medians of {ROUNDS} rounds of {CALLS} calls. Each step of {STEP_S * 1e3:g} ms has one "
        "call. The three rows are measured in turn, in one process.",
    )


if __name__ == "__main__":
    main()
