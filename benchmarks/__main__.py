"""Runs benchmarks that need no GPU: `make bench`, or `make bench ARGS="loader screen"`."""

import argparse
import runpy
import sys

NAMES = (
    "step_cost",
    "loader",
    "trainer",
    "recall",
    "nsa_cpu",
    "screen",
    "answers",
    "watch_hours",
)


def main() -> None:
    """Runs the benchmarks that the command line names, or all that it can name."""
    parser = argparse.ArgumentParser("python -m benchmarks", description=main.__doc__)
    listed = f"one of {', '.join(NAMES)} (default: all of them)"
    parser.add_argument("names", nargs="*", choices=NAMES, metavar="NAME", help=listed)
    names = parser.parse_args().names
    for name in names or NAMES:
        sys.argv = [name]
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")


if __name__ == "__main__":
    main()
