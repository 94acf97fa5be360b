"""Describes the machine and the commit, and writes the result tables of benchmarks."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def machine() -> str:
    """Returns processor, cores, kernel and versions as text."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    versions = " ".join(f"{name} {metadata.version(name)}" for name in ("textual", "torch"))
    return (
        f"{model}, {os.cpu_count()} cores, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}, {versions}"
    )


def commit() -> str:
    """Returns the measured commit, with a mark if console, trainers or nsa differ from it."""
    sha = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    changed = subprocess.run(
        ["git", "-C", str(ROOT), "status", "--porcelain", "--", "console", "trainers", "nsa"],
        capture_output=True,
        text=True,
    ).stdout.strip()
    return f"{sha or 'unknown'}{' with changes' if changed else ''}"


def quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(q * (len(ordered) - 1)))]


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns a markdown table."""
    lines = ["| " + " | ".join(header) + " |", "| " + " | ".join("---" for _ in header) + " |"]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def publish(name: str, title: str, body: str, notes: str = "", module: str = "") -> None:
    """Prints a result and writes it to `results/<name>.md`.

    `module` is the module that ran, or "" if the module has the name `name`.
    """
    load = os.getloadavg()[0]
    text = (
        f"# {title}\n\n{body}\n\n{notes}\n\n"
        f"Command: `{' '.join(['python', '-m', f'benchmarks.{module or name}', *sys.argv[1:]])}`. "
        f"Commit: {commit()}. Machine: {machine()}. Load: {load:.1f}.\n"
    ).replace("\n\n\n\n", "\n\n")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(text)
    print(text)
