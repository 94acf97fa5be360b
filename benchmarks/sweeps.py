"""How often a sweep finds a difference, false or true: `python -m benchmarks.sweeps`.

Records the step times of a real run, then replays sweeps from them: each run draws its steps from
the record, and random periods of other load make steps longer. In a third of the sweeps, both
variants do the same work. In the others, the steps of one variant take 15 % or 30 % longer. At the
end, two variants with the same work run live beside processes that load all cores.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import subprocess
import sys
import tempfile
from bisect import bisect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common import publish, table
from console.plan import highest_p
from console.plans import sweep
from console.sources.run import RunSource

START_S = 4.0
STEPS = 100
SPAN_S, SHARE, SLOWER = (2.0, 120.0), (0.05, 0.4), (1.1, 1.8)
"""Ranges of the mean span of the load, its share of the time, and its factor on a step."""
REPLAY = (
    f"A run has {STEPS} steps, whose times are drawn from the record of a real run. In each sweep, "
    f"other load comes in spans of {SPAN_S[0]:g} to {SPAN_S[1]:g} s in the mean, lasts "
    f"{SHARE[0]:.0%} to {SHARE[1]:.0%} of the time, and makes a step longer by a factor of "
    f"{SLOWER[0]:g} to {SLOWER[1]:g}. {START_S:g} s pass between two runs."
)
PLAN: dict[str, Any] = {
    "name": "sweeps", "nproc": 2, "config": "configs/tiny_cpu.yaml",
    "flags": {"OMP_NUM_THREADS": 1}, "watch": {"stall_floor_s": 60, "startup_s": 300},
}  # fmt: skip
SAME: dict[str, Any] = {
    "name": "same", "set": {"data.source": "synthetic", "train.steps": 60}, "rounds": 9,
    "gates": {"steps_done": 60, "loss_finite": True},
    "variants": {"mb25": {"flags": {"NSA_DDP_BUCKET_MB": 25}},
                 "mb50": {"flags": {"NSA_DDP_BUCKET_MB": 50}}},
}  # fmt: skip
RECORD: dict[str, Any] = {
    "name": "record", "set": {"data.source": "synthetic", "train.steps": 200},
}  # fmt: skip


def launched(root: Path, phase: dict[str, Any]) -> Path:
    """Runs a plan of one phase or sweep to its end; returns the launch directory."""
    path = root / "sweeps.yaml"
    path.write_text(yaml.safe_dump(PLAN | {"phases": [phase]}))
    command = [sys.executable, "-m", "console", "--root", str(root), "launch", str(path), "--wait"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return max((root / "sweeps").iterdir())


class Load:
    """Random periods of other load during one sweep."""

    def __init__(self, rng: random.Random, total_s: float):
        span_s = SPAN_S[0] * (SPAN_S[1] / SPAN_S[0]) ** rng.random()
        share = rng.uniform(*SHARE)
        at, on = 0.0, rng.random() < share
        self._ends: list[float] = []
        self._factors: list[float] = []
        while at < total_s:
            at += rng.expovariate(1 / (span_s if on else span_s * (1 - share) / share))
            self._ends.append(at)
            self._factors.append(rng.uniform(*SLOWER) if on else 1.0)
            on = not on

    def factor(self, at: float) -> float:
        """Returns the factor on the time of a step that begins at `at`."""
        return self._factors[min(bisect(self._ends, at), len(self._ends) - 1)]


def replayed(rng: random.Random, recorded_s: Sequence[float], rounds: int, factor: float) -> float:
    """Returns the p-value of one sweep; the second variant's steps take `factor` times as long."""
    mean_s = sum(recorded_s) / len(recorded_s)
    load = Load(rng, 2 * rounds * (START_S + 3 * STEPS * mean_s))
    figures: tuple[list[float], list[float]] = ([], [])
    at = 0.0
    for number in range(rounds):
        for of in (0, 1) if number % 2 == 0 else (1, 0):
            at += START_S
            steps_s = []
            for _ in range(STEPS):
                step_s = rng.choice(recorded_s) * (factor if of else 1.0) * load.factor(at)
                steps_s.append(step_s)
                at += step_s
            figures[of].append(1 / sweep.fast_s(steps_s))
    return sweep.p_value(*figures)


@contextlib.contextmanager
def loaded() -> Iterator[None]:
    """Loads every core while the context lasts."""
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(os.cpu_count() or 1)
    ]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def main() -> None:
    """Runs the benchmark and publishes its table."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.sweeps", description=__doc__)
    options.add_argument("--sweeps", type=int, default=1000, help="number per row and column")
    options.add_argument("--rounds", type=int, nargs="*", default=[9, 12, 14])
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        run = RunSource(next(launched(root, RECORD).glob("0-*")), reads="all")
        run.read_all()
        recorded_s = run.series.newest_steps_s(sweep.WARM_UP_STEPS)
        rows = []
        for rounds in given.rounds:
            cells = []
            for factor in (1.0, 1.15, 1.3):
                rng = random.Random(f"{rounds} {factor}")
                found = sum(
                    replayed(rng, recorded_s, rounds, factor) <= highest_p(2)
                    for _ in range(given.sweeps)
                )
                cells.append(f"{found} of {given.sweeps} ({found / given.sweeps:.1%})")
            rows.append([rounds, *cells])
        with loaded():
            live = sweep.sweeps(launched(root, SAME))[0]
    publish(
        "sweeps",
        "How often a sweep finds a difference",
        table(("rounds", "same work: false", "15 % slower: found", "30 % slower: found"), rows),
        f"{REPLAY}\n\nTwo variants with the same work, live, beside processes that load all "
        "cores:\n\n" + "\n".join(f"    {line}" for line in live.lines()),
    )


if __name__ == "__main__":
    main()
