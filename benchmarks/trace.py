"""A fixed workload: a synthetic launch, as docs/run-directory.md defines it.

    python -m benchmarks.trace DIR [--ranks 8] [--no-gpus] [--seconds 60] [--backlog 600]

Every second, the utilisation, power and temperature of each GPU change at random. Each rank also
writes a progress record every second, and rank 0 a log line every ten seconds. The seed is fixed,
so traces with the same options have the same random numbers.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from pathlib import Path
from typing import Any

from trainers.contract import heartbeat, jsonl, rundir

LOG_EVERY_S = 10
PHASES = (
    ("sanity", "The ranks start, connect and finish one step.", 1),
    ("plumbing", "Data, loss, optimizer and all-reduce are connected.", 120_000),
    ("recall", "Attention works.", 600),
)
CURRENT = 1
GATES = {"loss_finite": True}


class Trace:
    """Writes a launch whose second phase began at `began_ts`; `tick` adds a second of records."""

    def __init__(
        self, launch: Path, ranks: int = 8, gpus: bool = True, began_ts: float | None = None,
        first_step: int = 41_000, steps: int = PHASES[CURRENT][2], step_s: float = 1.0,
        every: int = 1,
    ):  # fmt: skip
        """The records of a rank are `every` steps of `step_s` apart, and follow `first_step`."""
        self.launch, self.ranks, self.gpus = launch, ranks, gpus
        self.run = launch / f"{CURRENT}-{PHASES[CURRENT][0]}"
        self.name = f"{launch.parent.name}-{launch.name}"
        self.began_ts = time.time() - 3600 if began_ts is None else began_ts
        self.first_step, self.steps, self.step_s, self.every = first_step, steps, step_s, every
        self.random = random.Random(7)
        self.ticks = 0
        self.owner = rundir.identity()

    def write_documents(self) -> None:
        """Writes the documents of a launch and a run before the first record."""
        logs, began = rundir.logs(self.run, 1), self.began_ts
        for each in (logs, self.launch / rundir.REQUESTS, self.run / rundir.REQUESTS):
            each.mkdir(parents=True, exist_ok=True)
        phases = [{"name": n, "proves": p, "set": {"train.steps": s}} for n, p, s in PHASES]
        rundir.write_json(self.launch / rundir.PLAN, {
            "v": 1, "launch": self.name, "name": self.launch.parent.name, "created_ts": began,
            "phases": phases,
        })  # fmt: skip
        rundir.write_json(self.launch / rundir.PLAN_STATE, {
            "v": 1, "launch": self.name, "state": "running", "why": "", "phase": CURRENT,
            "between": "ask", "next_flags": {}, "supervisor": self.owner,
            "updated_ts": time.time(),
            "phases": [
                {"name": "sanity", "state": "completed", "result": "pass", "steps": 1,
                 "started_ts": began - 400, "ended_ts": began - 300, "dir": "0-sanity"},
                {"name": "plumbing", "state": "running", "started_ts": began,
                 "dir": self.run.name},
                {"name": "recall", "state": "next", "dir": ""},
            ],
        })  # fmt: skip
        rundir.write_json(self.run / rundir.RUN, {
            "v": 1, "run": f"{self.name}/{self.run.name}", "host": self.owner["host"],
            "world": self.ranks, "nproc": self.ranks, "gates": GATES, "created_ts": began,
            "settings": {"train.steps": {"value": self.steps, "origin": "plan"}},
            "flags": {"OMP_NUM_THREADS": {"value": "1", "origin": "plan"}},
            "argv": ["torchrun", "--nproc-per-node", str(self.ranks), "-m", "trainers.ddp",
                     "--config", "configs/tiny_cpu.yaml"],
        })  # fmt: skip
        workers = [
            {"rank": r, "local_rank": r, "exit": None, **self.owner} for r in range(self.ranks)
        ]
        rundir.write_json(self.run / rundir.SUPERVISOR, {
            "v": 1, "run": f"{self.name}/{self.run.name}", "state": "running", "why": "",
            "since_ts": began, "attempt": 1, "launch": self.name, "workers": workers,
            "armed": "on stall (60 s): alert, then dump", "verdict": None,
            "updated_ts": time.time(), **self.owner,
        })  # fmt: skip

    def tick(self, at: float) -> None:
        """Writes the records of one second."""
        self.ticks += 1
        step = self.first_step + self.ticks
        sample = jsonl.encode(self.sample(at, step))
        _append(rundir.samples(self.run, self.owner["host"]), sample)
        for rank in range(self.ranks):
            record = heartbeat.encode(self.progress(rank, self.ticks, at))
            _append(rundir.heartbeat(self.run, rank), record)
        if self.ticks % LOG_EVERY_S == 0:
            line = f"{time.strftime('%H:%M:%S', time.localtime(at))} step={step} loss=2.31\n"
            _append(rundir.rank_log(self.run, 1, 0), line.encode())

    def _near(self, value: float, by: float) -> float:
        return round(value + self.random.uniform(-by, by), 2)

    def sample(self, at: float, step: int) -> dict[str, Any]:
        """Returns the sample of one second, while the ranks are at `step`."""
        draw, phases = self.random, ("fetch", "forward", "backward", "optimizer")
        gpus = [
            {"index": index, "name": "H200", "uuid": f"GPU-{index}",
             "util_pct": float(draw.randint(88, 100)),
             "mem_used_mib": 60_100.0 + draw.randint(0, 1800), "mem_total_mib": 81_920.0,
             "power_w": round(draw.gauss(612, 25), 1), "power_limit_w": 700.0,
             "temp_c": float(draw.randint(58, 66)),
             "sm_mhz": float(draw.randrange(1700, 1981, 15)), "state": "ok", "why": "",
             "throttle": "", "ecc_uncorrected": 0, "xid_count": 0}
            for index in range(self.ranks if self.gpus else 0)
        ]  # fmt: skip
        ranks = [
            {"rank": rank, "pid": self.owner["pid"], "state": draw.choice("RRRS"),
             "cpu_pct": round(draw.gauss(97, 2), 1), "rss_mib": round(draw.gauss(1240, 9), 1),
             "pulse": {"step": step, "phase": draw.choice(phases),
                       "since_s": round(draw.random() / 4, 3), "age_s": round(draw.random(), 3),
                       "collectives": 40 * step + draw.randint(0, 40), "device_step": step,
                       "device_phase": draw.choice(phases)}}
            for rank in range(self.ranks)
        ]  # fmt: skip
        return {
            "v": 1, "ts": at, "mono": at - self.began_ts, "host": self.owner["host"], "attempt": 1,
            "gpus": gpus, "ranks": ranks, "disk": {"free_gib": 812.0, "total_gib": 1800.0},
            "load1": self._near(9, 1),
        }  # fmt: skip

    def progress(self, rank: int, number: int, at: float) -> dict[str, Any]:
        """Returns the progress record `number` of a rank."""
        step, step_s, near = self.first_step + number * self.every, self.step_s, self._near
        return {
            "v": 1, "n": number, "run": self.name, "attempt": 1, "ts": at,
            "mono": at - self.began_ts, "host": self.owner["host"], "pid": self.owner["pid"],
            "rank": rank, "local_rank": rank, "world": self.ranks, "step": step, "msg": "progress",
            "loss": near(2.3 + 0.9 * math.exp(-number / 300), 0.01), "lr": 2.4e-4,
            "grad_norm": near(0.9, 0.2), "toks_per_s": near(41_000, 700),
            "toks_per_s_rank": near(5100, 90), "tokens_total": step * 32_768, "mfu": 0.43,
            "steps_dt_s": [near(0.8 * step_s, 0.02) for _ in range(self.every)],
            "dt_fetch_s": 0.012 * step_s, "dt_forward_s": 0.3 * step_s,
            "dt_backward_s": 0.45 * step_s, "dt_optimizer_s": 0.03 * step_s,
            "gate_entropy_mean": near(0.93, 0.01), "gate_entropy_min": 0.41,
            "gate_entropy_layers": [near(0.95, 0.02) for _ in range(11)] + [0.41],
            "gate_branch_shares": [0.33, 0.37, 0.30], "gpu_mem_reserved": near(71_000, 300),
            "rss_mib": 1240.0, "nonfinite_loss_steps": 0, "skipped_steps": 0,
        }  # fmt: skip

    def write_backlog(self, seconds: int) -> None:
        """Writes the records of the last `seconds`."""
        now = time.time()
        for second in range(seconds, 0, -1):
            self.tick(now - second)

    def play(self, seconds: float) -> None:
        """Calls `tick` once per second, for `seconds`."""
        end = time.monotonic() + seconds
        due = time.monotonic()
        while due < end:
            self.tick(time.time())
            due += 1.0
            time.sleep(max(0.0, due - time.monotonic()))


def _append(path: Path, line: bytes) -> None:
    with path.open("ab") as stream:
        stream.write(line)


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
