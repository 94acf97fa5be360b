"""Measures how fast the task recall is learned: `python -m benchmarks.recall`.

The two cases are the whole layer and the window branch alone. Each case trains
`configs/tiny_cpu.yaml` with batch 16 in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.common import ROOT, publish, table
from trainers.contract import environ, rundir

MARKS = (50, 100, 150, 200, 300, 400, 600, 800)
CASES: dict[str, dict[str, str]] = {
    "a span, 64 bytes back": {},
    "the same, window branch alone": {"NSA_FORCE_BRANCH": "win"},
}
SHARED = {
    "data.source": "recall", "train.batch_size": 16, "train.steps": MARKS[-1],
    "report.log_every": 10, "report.disable_tb": True, "report.disable_csv": True,
    "checkpoint.at_end": False,
}  # fmt: skip


def curve(name: str) -> tuple[str, ...]:
    """Trains a case; returns name, share of bytes right at each mark, seconds of all steps."""
    words = [part for key, value in SHARED.items() for part in ("--set", f"{key}={value}")]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "trainers.ddp", "--config", "configs/tiny_cpu.yaml"]
        variables = environ.snapshot() | CASES[name] | {"OMP_NUM_THREADS": "1"}
        subprocess.run(
            [*command, "--run-dir", str(run), *words], cwd=ROOT, check=True, env=variables,
            capture_output=True,
        )  # fmt: skip
        lines = rundir.heartbeat(run, 0).read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["msg"] == "progress"]
    right = {record["step"]: record["bytes_right"] for record in records}
    seconds = sum(sum(record["steps_dt_s"]) for record in records)
    return name, *(f"{right[mark]:.3f}" for mark in MARKS), f"{seconds:.0f}"


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()  # no options, only --help
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        rows = list(pool.map(curve, CASES))
    publish(
        "recall",
        "How fast the forms of recall are learned",
        table(("share of copied bytes right at step", *map(str, MARKS), "s in all"), rows),
        "`configs/tiny_cpu.yaml`, batch 16, one process and thread each. Chance is 0.004.",
    )


if __name__ == "__main__":
    main()
