"""Runs the benchmarks of the list below, which need no GPU: `make bench`."""

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
