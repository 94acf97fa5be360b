"""Runs all benchmarks that need no GPU, and commits nothing: `make bench`."""

import runpy
import sys

for name in (
    "step_cost",
    "loader",
    "trainer",
    "recall",
    "nsa_cpu",
    "screen",
    "answers",
    "watch_hours",
):
    sys.argv = [name]
    runpy.run_module(f"benchmarks.{name}", run_name="__main__")
