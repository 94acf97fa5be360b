"""The cost of reading a run that has trained for days: `python -m benchmarks.long_run`.

The run directory is synthetic: 8 ranks, 8 GPUs, a sample each second, and a record of each rank
every 20 steps of 0.3 s. The costs of a command are its peak memory and its CPU time, also as a
multiple of the CPU time of `nsa-console flags`, which reads no run. The commands are measured in
turn. The time of the charts is wall time.
"""

from __future__ import annotations

import argparse
import gzip
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, median, publish, table
from benchmarks.trace import Trace
from console.sources import record_files, snapshot
from console.sources.record_files import RecordFiles
from console.sources.reducer import Reducer
from console.sources.series import SPANS_S, Series
from console.supervisor.rotation import GZIP_LEVEL, PART_BYTES
from trainers.contract import heartbeat, jsonl, rundir

RANKS, STEP_S, EVERY = 8, 0.3, 20
SAMPLES_MIB_A_DAY = 40
BUDGETS = {"status": 4.0, "check": 10.0, "status, no snapshot": 6.0, "runs": 6.0}
LOOK_BYTES = 4 << 20
DAY_S = 86_400


def write(folder: Path, span_s: int) -> Path:
    """Writes a launch whose run began `span_s` ago and has no end; returns the run directory."""
    began, steps = time.time() - span_s, int(span_s / STEP_S)
    trace = Trace(
        folder / "long" / "20261101-000000", RANKS, began_ts=began, first_step=0, steps=2 * steps,
        step_s=STEP_S, every=EVERY,
    )  # fmt: skip
    trace.write_documents()
    for rank in range(RANKS):
        with rundir.heartbeat(trace.run, rank).open("wb") as stream:
            stream.writelines(
                heartbeat.encode(trace.progress(rank, number, began + number * EVERY * STEP_S))
                for number in range(1, steps // EVERY)
            )
    samples = (trace.sample(began + second, int(second / STEP_S)) for second in range(span_s))
    write_samples(rundir.samples(trace.run, rundir.host_name()), map(jsonl.encode, samples))
    return trace.run


def write_samples(path: Path, lines: Iterator[bytes]) -> None:
    """Writes samples as a supervisor does: compressed parts, and the newest file."""
    part, size = [], 0
    for line in lines:
        part.append(line)
        size += len(line)
        if size >= PART_BYTES:
            number = len(record_files.parts(path)) + 1
            whole = record_files.part(path, number).with_name(
                f"{path.name}.{number:04d}{record_files.GZIP}"
            )
            whole.write_bytes(gzip.compress(b"".join(part), GZIP_LEVEL))
            part, size = [], 0
    path.write_bytes(b"".join(part))


def observe(run: Path) -> None:
    """Writes the snapshot and the history of a supervisor that has read all records."""
    reducer, ended = Reducer(Series(keeps=False)), []
    reading = RecordFiles(run)
    while batches := list(reading.poll(LOOK_BYTES)):
        for batch in batches:
            reducer.add(batch)
        ended += reducer.series.ended
        reducer.series.ended.clear()
    for level in range(len(SPANS_S)):
        told = sorted((span for span in ended if span.level == level), key=lambda span: span.ts)
        lines = (jsonl.encode(snapshot.plain(span)) for span in told)
        snapshot.history(run, level).write_bytes(b"".join(lines))
    rundir.write_json(run / rundir.SNAPSHOT, snapshot.document(reducer, "long", time.time()))


def in_child(work: Callable[..., Any], *given: Any) -> Any:
    """Runs `work` in a child process, so that this process does not grow; returns the result."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(work, *given).result()


def multiply(run: Path, count: int) -> None:
    """Adds `count - 1` launches: plan.json, plan_state.json, and links to the run's files."""
    launch = run.parent
    plan = rundir.read_json(launch / rundir.PLAN) or {}
    state = rundir.read_json(launch / rundir.PLAN_STATE) or {}
    for number in range(1, count):
        other = launch.with_name(f"{number:04d}")
        (other / run.name).mkdir(parents=True)
        rundir.write_json(other / rundir.PLAN, plan | {"launch": f"long-{number:04d}"})
        rundir.write_json(other / rundir.PLAN_STATE, state)
        for path in run.iterdir():
            if path.is_file():
                os.link(path, other / run.name / path.name)


def charted(run: Path) -> float:
    """Returns the seconds in which the screen's source reads the history after its first poll."""
    code = (
        "import sys, time; from pathlib import Path; from console.tui.feed import open_source; "
        "source = open_source(Path(sys.argv[1])); state = source.poll()\n"
        "began = time.perf_counter(); state = source.poll()\n"
        "while state.behind_bytes: state = source.poll()\n"
        "names = ['loss', 'toks_per_s', *(f'gpu_mem_mib:{i}' for i in range(8))]\n"
        "points = [source.series.points(name) for name in names]\n"
        "took_s = time.perf_counter() - began\n"
        "whole_s = min(p[-1][0] - p[0][0] for p in points); print(took_s, whole_s)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(run)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    took_s, whole_s = map(float, done.stdout.split())
    if whole_s < 0.98 * (time.time() - rundir.read_json(run / rundir.RUN)["created_ts"]):
        raise SystemExit(f"the charts show only the last {whole_s:.0f} s of the run")
    return took_s


def cost(words: list[str]) -> tuple[float, float]:
    """Returns CPU seconds and the peak memory in MiB of one command."""
    child = subprocess.Popen(
        [sys.executable, "-m", "console", *words], cwd=ROOT, stdout=subprocess.DEVNULL
    )
    _, _, used = os.wait4(child.pid, 0)
    child.returncode = 0
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--launches", type=int, default=1000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = in_child(write, Path(folder), int(options.days * DAY_S))
        samples_mib = sum(path.stat().st_size for path in run.glob("samples_*")) / (1 << 20)
        size_mib = sum(path.stat().st_size for path in run.iterdir()) / (1 << 20)
        in_child(observe, run)
        snapshot_kib = (run / rundir.SNAPSHOT).stat().st_size / 1024
        bare = Path(shutil.copytree(run.parent, Path(folder) / "bare", copy_function=os.link))
        (bare / run.name / rundir.SNAPSHOT).unlink()
        multiply(run, options.launches)
        commands = {
            "flags": ["flags"], "status": ["status", str(run)], "check": ["check", str(run)],
            "status, no snapshot": ["status", str(bare / run.name)],
            "check, no snapshot": ["check", str(bare / run.name)],
            "runs": ["--root", folder, "runs"],
            f"runs --limit {options.launches}":
                ["--root", folder, "runs", "--limit", str(options.launches)],
        }  # fmt: skip
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        charts_s = []
        for _ in range(options.repeats):
            for name, words in commands.items():
                found[name].append(cost(words))
            charts_s.append(charted(run))
    base = median([cpu_s for cpu_s, _ in found["flags"]])
    rows = []
    for name, costs in found.items():
        cpu_s, budget = median([each for each, _ in costs]), BUDGETS.get(name)
        rows.append((
            name, f"{cpu_s:.2f}", f"{cpu_s / base:.1f}", f"≤ {budget:g}" if budget else "",
            f"{max(mib for _, mib in costs):.0f}",
        ))  # fmt: skip
    rows.append(("whole history on the charts, s", "", f"{median(charts_s):.2f}", "≤ 1 s", ""))
    rows.append(("snapshot, KiB", "", f"{snapshot_kib:.1f}", "≤ 64 KiB", ""))
    rows.append(("samples on disk, MiB a day", "", f"{samples_mib / options.days:.1f}",
                 f"≤ {SAMPLES_MIB_A_DAY} MiB", ""))  # fmt: skip
    publish(
        "long_run",
        f"Cost of reading a run that has trained for {options.days:g} days",
        table(("command", "CPU s", "× flags", "budget", "peak MiB"), rows),
        f"Medians of {options.repeats}; {RANKS} ranks, {size_mib:,.0f} MiB of records, "
        f"{options.launches} launches, each with as many records.",
    )


if __name__ == "__main__":
    main()
