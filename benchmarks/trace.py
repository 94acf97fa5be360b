"""A fixed workload for the screen: a synthetic launch, as docs/run-directory.md defines it.

    python -m benchmarks.trace DIR [--ranks 8] [--no-gpus] [--seconds 60] [--backlog 600]

Every second, the utilisation, power and temperature of each GPU change at random, and each rank
writes one progress record. Every ten seconds, a log line is written. The same seed gives the same
numbers.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path
from typing import Any

from trainers.contract import rundir

LOG_EVERY_S = 10
PHASES = (
    ("sanity", "The ranks start, connect and finish one step.", 1),
    ("plumbing", "Data, loss, optimizer and all-reduce are connected.", 120_000),
    ("recall", "Attention works.", 600),
)
CURRENT = 1


class Trace:
    """Writes one launch whose second phase runs; `tick` writes one second of the phase."""

    def __init__(self, launch: Path, ranks: int = 8, gpus: bool = True, seed: int = 7):
        self.launch, self.ranks, self.gpus = launch, ranks, gpus
        self.run = launch / f"{CURRENT}-{PHASES[CURRENT][0]}"
        self.random = random.Random(seed)
        self.step = 41_000
        self.ticks = 0
        self.lost_gpu: int | None = None
        self.name = f"{launch.parent.name}-{launch.name}"

    def write_documents(self) -> None:
        """Writes the documents of a launch and a run before the first record."""
        logs = rundir.logs(self.run, 1)
        logs.mkdir(parents=True, exist_ok=True)
        owner = rundir.identity()
        now = time.time()
        phases = [{"name": n, "proves": p, "set": {"train.steps": s}} for n, p, s in PHASES]
        rundir.write_json(self.launch / rundir.PLAN, {
            "v": 1, "launch": self.name, "name": self.launch.parent.name, "phases": phases,
        })  # fmt: skip
        rundir.write_json(self.launch / rundir.PLAN_STATE, {
            "v": 1, "launch": self.name, "state": "running", "why": "", "phase": CURRENT,
            "between": "ask", "next_flags": {}, "supervisor": owner, "updated_ts": now,
            "phases": [
                {"name": "sanity", "state": "completed", "result": "pass", "steps": 1,
                 "started_ts": now - 4000, "ended_ts": now - 3900, "dir": "0-sanity"},
                {"name": "plumbing", "state": "running", "started_ts": now - 3600,
                 "dir": self.run.name},
                {"name": "recall", "state": "next", "dir": ""},
            ],
        })  # fmt: skip
        rundir.write_json(self.run / rundir.RUN, {
            "v": 1, "run": f"{self.name}/{self.run.name}", "host": owner["host"],
            "world_size": self.ranks, "settings": {"train.steps": {"value": PHASES[CURRENT][2]}},
            "flags": {"OMP_NUM_THREADS": {"value": "1", "origin": "plan"}},
            "argv": ["torchrun", "--nproc-per-node", str(self.ranks), "-m", "trainers.ddp",
                     "--config", "configs/tiny_cpu.yaml"],
        })  # fmt: skip
        self.write_supervisor("running", now - 3600)

    def write_supervisor(
        self, state: str, since: float, verdict: Any = None, why: str = ""
    ) -> None:
        owner = rundir.identity()
        workers = [{"rank": r, "local_rank": r, "exit": None, **owner} for r in range(self.ranks)]
        rundir.write_json(self.run / rundir.SUPERVISOR, {
            "v": 1, "run": f"{self.name}/{self.run.name}", "state": state, "why": why,
            "since_ts": since, "attempt": 1, "launch": self.name, "workers": workers,
            "armed": "on stall (60 s): alert, then dump", "verdict": verdict,
            "updated_ts": time.time(), **owner,
        })  # fmt: skip

    def tick(self, at: float) -> None:
        """Writes the records of one second."""
        self.ticks += 1
        self.step += 1
        self._append(rundir.samples(self.run, rundir.host_name()), self._sample(at))
        for rank in range(self.ranks):
            self._append(rundir.heartbeat(self.run, rank), self._progress(rank, at))
        if self.ticks % LOG_EVERY_S == 0:
            line = f"{time.strftime('%H:%M:%S', time.localtime(at))} step={self.step} loss=2.31\n"
            with rundir.rank_log(self.run, 1, 0).open("a", encoding="utf-8") as log:
                log.write(line)

    def _append(self, path: Path, record: dict[str, Any]) -> None:
        with path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record) + "\n")

    def _near(self, value: float, by: float) -> float:
        return round(value + self.random.uniform(-by, by), 2)

    def _sample(self, at: float) -> dict[str, Any]:
        gpus = [
            {"index": i, "uuid": f"GPU-{i}", "name": "H200", "state": "ok",
             "util_pct": self._near(94, 6), "power_w": self._near(612, 40), "power_limit_w": 700,
             "mem_used_mib": self._near(61_000, 900), "mem_total_mib": 81_920,
             "temp_c": self._near(63, 3), "sm_mhz": 1700, "why": ""}
            if i != self.lost_gpu
            else {"index": i, "name": "H200", "state": "lost", "why": "Xid 79: fallen off the bus"}
            for i in range(self.ranks if self.gpus else 0)
        ]  # fmt: skip
        ranks = [
            {"rank": r, "pid": rundir.identity()["pid"], "state": "R",
             "cpu_pct": self._near(97, 3), "rss_mib": self._near(1240, 9),
             "pulse": {"step": self.step, "phase": self.random.choice(("forward", "backward")),
                       "since_s": 0.2, "age_s": 0.0, "collectives": 3 * self.step,
                       "device_step": self.step, "device_phase": "forward"}}
            for r in range(self.ranks)
        ]  # fmt: skip
        return {
            "v": 1, "ts": at, "mono": time.monotonic(), "host": rundir.host_name(), "attempt": 1,
            "gpus": gpus, "ranks": ranks, "disk": {"free_gib": 812.0, "total_gib": 1800.0},
            "load1": self._near(9, 1),
        }  # fmt: skip

    def _progress(self, rank: int, at: float) -> dict[str, Any]:
        falling = 2.3 + 0.9 * math.exp(-self.ticks / 300)
        return {"v": 1, "run": self.name, "attempt": 1, "ts": at, "mono": time.monotonic(),
                "host": rundir.host_name(), "pid": rundir.identity()["pid"], "rank": rank,
                "local_rank": rank, "world": self.ranks, "step": self.step, "msg": "progress",
                "loss": self._near(falling, 0.01), "lr": 2.4e-4, "grad_norm": self._near(0.9, 0.2),
                "toks_per_s": self._near(41_000, 700), "tokens_total": self.step * 32_768,
                "steps_dt_s": [self._near(0.8, 0.02)], "dt_fetch_s": 0.012, "mfu": 0.43,
                "gate_entropy_mean": self._near(0.93, 0.01), "gate_entropy_min": 0.41,
                "gate_entropy_layers": [self._near(0.95, 0.02) for _ in range(11)] + [0.41],
                "gate_branch_shares": [0.33, 0.37, 0.30],
                "gpu_mem_reserved": self._near(71_000, 300), "rss_mib": 1240.0}  # fmt: skip

    def write_backlog(self, seconds: int) -> None:
        """Writes the records of the last `seconds`."""
        now = time.time()
        for second in range(seconds, 0, -1):
            self.tick(now - second)

    def play(self, seconds: float) -> None:
        """Calls `tick` once per second."""
        end = time.monotonic() + seconds
        due = time.monotonic()
        while due < end:
            self.tick(time.time())
            due += 1.0
            time.sleep(max(0.0, due - time.monotonic()))


def main() -> int:
    parser = argparse.ArgumentParser(description="Writes a synthetic launch and keeps it alive.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--no-gpus", action="store_true")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--backlog", type=int, default=600)
    options = parser.parse_args()
    trace = Trace(options.directory, options.ranks, not options.no_gpus)
    trace.write_documents()
    trace.write_backlog(options.backlog)
    trace.play(options.seconds)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
