"""The cost of the supervisor: `python -m benchmarks.supervisor [--seconds S] [--records N]`.

Eight ranks of a program without torch report one step a second, with the figures of a trainer. Then
eight ranks report a million records, as fast as these are written to files, while the memory of the
supervisor is measured.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import psutil
import yaml

from benchmarks.common import median, publish, table
from console import actions
from trainers.contract import rundir

PROGRAM = """
import sys, time
from trainers.contract.member import join
steps, pause, size = int(sys.argv[1]), float(sys.argv[2]), 12
run = join()
figures = dict(loss=2.5, lr=3e-4, grad_norm=0.7, toks_per_s=12345.6, toks_per_s_rank=1543.2,
    mfu=0.31, tokens_total=10**9, dt_fetch_s=0.001,
    dt_forward_s=0.3, dt_backward_s=0.6, dt_optimizer_s=0.05,
    fetch_p50_ms=0.8, fetch_p95_ms=1.9, rss_mib=1234.5, skipped_steps=0, gate_entropy_mean=0.93,
    gate_entropy_min=0.71, gate_entropy_layers=[0.9] * size, gate_max_gate=0.8,
    gate_collapse_frac=0.0, gate_branch_shares=[0.3, 0.3, 0.4])
for step in range(1, steps + 1):
    if run.step(step, **figures):
        break
    if pause:
        time.sleep(pause)
    elif step % 200 == 0:
        while run.recorder.waiting > 64:
            time.sleep(0.001)
"""
RANKS = 8
BUDGET_MIB, BUDGET_PCT = 48.0, 0.7


def processes(supervisor: psutil.Process) -> list[psutil.Process]:
    """Returns both processes of a supervisor: the owner and the working process."""
    own = supervisor.cmdline()
    return [supervisor, *(each for each in supervisor.children() if each.cmdline() == own)]


def memory_mib(supervisor: psutil.Process) -> float:
    """Returns the sum of the proportional set sizes (PSS) of both processes, in MiB."""
    return sum(each.memory_full_info().pss for each in processes(supervisor)) / 2**20


class Launched:
    """A launch of `PROGRAM`, with its supervisor."""

    def __init__(self, folder: Path, steps: int, pause_s: float):
        script, plan = folder / "program.py", folder / "measured.yaml"
        script.write_text(PROGRAM)
        plan.write_text(yaml.safe_dump({
            "name": "measured", "phases": [{
                "name": "one", "nproc": RANKS, "script": str(script),
                "args": [str(steps), str(pause_s)],
            }],
        }))  # fmt: skip
        self.path = actions.launch(actions.LaunchOptions(plan=str(plan), root=folder), "benchmark")
        state = rundir.read_json(self.path / rundir.PLAN_STATE) or {}
        self.supervisor = psutil.Process(state["supervisor"]["pid"])
        self.run = self.path / "0-one"

    def memory_mib(self) -> float:
        return memory_mib(self.supervisor)

    def cpu_s(self) -> float:
        used = [each.cpu_times() for each in processes(self.supervisor)]
        return sum(each.user + each.system for each in used)

    def records(self) -> int:
        """Estimates how many records all ranks have written, from the sizes of their files."""
        path = rundir.heartbeat(self.run, 0)
        if not path.exists() or not path.stat().st_size:
            return 0
        with path.open("rb") as stream:
            head = stream.read(1 << 16).splitlines()[1:-1]
        line = median([len(each) + 1 for each in head]) if head else 1
        sizes = (rundir.heartbeat(self.run, rank) for rank in range(RANKS))
        return round(sum(path.stat().st_size for path in sizes if path.exists()) / line)

    def until(self, count: int) -> None:
        while self.records() < count and self.supervisor.is_running():
            time.sleep(0.2)

    def end(self) -> None:
        actions.send(self.path, "halt", {}, "benchmark")
        psutil.wait_procs([self.supervisor], timeout=60)


def at_rest(seconds: float) -> tuple[float, float]:
    """Returns CPU in percent of a core and memory in MiB, for 8 ranks with a step per second."""
    with tempfile.TemporaryDirectory() as folder:
        launched = Launched(Path(folder), 100_000, 1.0)
        launched.until(5 * RANKS)
        begun, before = time.monotonic(), launched.cpu_s()
        time.sleep(seconds)
        used = (launched.cpu_s() - before) / (time.monotonic() - begun) * 100
        memory = launched.memory_mib()
        launched.end()
        return used, memory


def flood(records: int) -> list[tuple[str, float]]:
    """Returns the memory in MiB after each fifth of the records, and the largest until the end."""
    found: list[tuple[str, float]] = []
    most = 0.0
    with tempfile.TemporaryDirectory() as folder:
        launched = Launched(Path(folder), records // RANKS, 0.0)
        while True:
            try:
                memory = launched.memory_mib()
            except psutil.NoSuchProcess:
                break
            if not memory:
                break
            most = max(most, memory)
            count = launched.records()
            if count >= records * (len(found) + 1) // 5:
                found.append((f"after {count:,} records", memory))
            time.sleep(0.1)
        psutil.wait_procs([launched.supervisor], timeout=60)
        state = rundir.read_json(launched.run / rundir.SUPERVISOR) or {}
    return [*found, (f"at most, until its end ({state.get('state')})", most)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--records", type=int, default=1_000_000)
    options = parser.parse_args()
    cpu_pct, memory_mib = at_rest(options.seconds)
    seen = flood(options.records)
    rows = [
        ("CPU at 8 ranks, one step a second", f"{cpu_pct:.2f} % of a core", f"≤ {BUDGET_PCT} %"),
        ("memory (PSS) at the same load", f"{memory_mib:.1f} MiB", f"≤ {BUDGET_MIB:g} MiB"),
        *((f"memory {when}", f"{mib:.1f} MiB", "flat") for when, mib in seen),
    ]
    note = f"CPU over {options.seconds:g} s. A record has the figures of a trainer of 12 layers."
    publish(
        "supervisor", "Cost of the supervisor: owner and working process together", table(
            ("what", "measured", "budget"), rows),
        note,
    )  # fmt: skip


if __name__ == "__main__":
    main()
