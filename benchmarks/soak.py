"""A training of half an hour under random faults, with restarts: `make soak`.

Two ranks of `trainers.ddp` train on text; a seed decides the faults, their ranks and their times.
`python -m benchmarks.soak [--minutes M] [--faults N] [--seed S]`; the exit code is 1 if a line
of the result does not hold. With `--faults 0` no fault is injected. In a short soak the faults
follow each other too closely for the bound on the effective time. Such a soak with `--dry`, which
writes no result, tests all other lines.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import steps
from benchmarks.chaos import (
    AGENT,
    DISK_MIB,
    EVERY,
    KILLED,
    Chaos,
    Fault,
    Injected,
    inject,
    schedule,
)
from benchmarks.common import ROOT, median, publish, table
from benchmarks.supervisor import BUDGET_MIB
from console import actions
from console.sources import process, verdicts
from tests.launches import Started, console, write_plan
from tests.mounts import ext4
from trainers import manifest
from trainers.contract import environ, jsonl, rundir
from trainers.failures import CheckpointError

RATIO = 0.92
PLAN = {
    "name": "soak",
    "restart": {"when": "stall", "attempts": 3, "backoff_s": 1},
    "watch": {
        "stall_floor_s": 3, "stall_act_s": 3, "save_s": 5, "startup_s": 60, "grace_s": 3,
        "rules": {"disk": {"threshold": 0.05, "for_s": 1}},
    },
    "phases": [{
        "name": "soak", "config": str(ROOT / "configs" / "tiny_cpu.yaml"),
        "set": {
            "data.source": "text", "train.steps": 10_000_000, "report.log_every": 10,
            "train.batch_size": 4, "checkpoint.every": EVERY, "checkpoint.keep_last": 2,
        },
    }],
}  # fmt: skip
IDLE_S, READ_EVERY_S = 0.25, 10.0
HIDDEN = (rundir.HALT, ".metadata")
"""Hidden files that belong to a run: the request for a halt, and the index of a checkpoint."""
CALM_S = (2.0, 6.0)
"""Range of the random least time between a recovery and the next fault."""
MAX_VERDICTS, MAX_EVENT_BYTES = 10_000, 64 << 20


class Readers:
    """Runs `nsa-console status --json` repeatedly while faults are injected."""

    def __init__(self, path: Path, variables: dict[str, str]):
        self._words = [sys.executable, "-m", "console", "status", str(path), "--json"]
        self._variables = environ.snapshot() | variables
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, name="readers")
        self.took_s: list[float] = []
        self.failed: list[str] = []

    def _read(self) -> None:
        while not self._over.wait(READ_EVERY_S):
            begun = time.monotonic()
            try:
                done = subprocess.run(
                    self._words, cwd=ROOT, capture_output=True, text=True, timeout=30,
                    env=self._variables,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                self.failed.append("no answer within 30 s")
                continue
            self.took_s.append(time.monotonic() - begun)
            if '"state"' not in done.stdout or done.stderr:
                self.failed.append(done.stderr[-200:] or f"exit {done.returncode}")

    def __enter__(self) -> Readers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """Yields the path of a file system for the run alone, or None if none can be mounted here."""
    with contextlib.ExitStack() as stack:
        try:
            disk = stack.enter_context(ext4(folder, DISK_MIB))
        except pytest.skip.Exception as reason:
            print(f"the disk is not filled: {reason}")
            disk = None
        yield disk


def soak(chaos: Chaos, due: list[tuple[float, Fault]], span_s: float) -> list[Injected]:
    """Injects the due faults one after the other; returns their results.

    Ends after `span_s`, or at the first fault without a recovery.
    """
    began, done = time.monotonic(), list[Injected]()
    quiet_until = 0.0
    for at_s, fault in due:
        while (elapsed := time.monotonic() - began) < max(at_s, quiet_until):
            chaos.memory_mib()
            time.sleep(IDLE_S)
        if elapsed > span_s:
            break
        if fault is AGENT and chaos.agent is None:
            fault = KILLED  # only a restart brings another torchrun
        done.append(inject(chaos, fault))
        over = f"over after {chaos.since_s:.1f} s, attempt {chaos.now.attempt}"
        print(f"{elapsed:7.1f} s  {fault.name}: {over}", flush=True)
        if not done[-1].recovered:
            return done
        quiet_until = time.monotonic() - began + chaos.rng.uniform(*CALM_S)
    time.sleep(max(0.0, began + span_s - time.monotonic()))
    return done


def end(chaos: Chaos) -> str:
    """Halts the run, by a request or by SIGTERM to a rank; returns the state and reason of the run.

    The run has up to 60 s to end.
    """
    if chaos.rng.random() < 0.5:
        actions.send(chaos.started.path, "halt", {}, "soak")
    else:
        chaos.signal_rank(signal.SIGTERM)
    with contextlib.suppress(AssertionError):
        chaos.started.wait_end(60)
    state = chaos.look()
    return f"{state.state}: {state.why}"


def settle(found: list[Injected], done: list[steps.Step]) -> None:
    """Sets, by fault, the time to the first step of a later attempt, if any, and the lost steps."""
    firsts = steps.firsts(done)
    ended = {(step.attempt, step.number): step.ts for step in done}
    for each in found:
        first = firsts.get(each.attempt_after)
        if each.attempt_after > each.attempt and first is not None:
            each.back_s = first.ts - each.ts
            each.lost = max(0, each.furthest - (first.number - 1))
            saved_ts = ended.get((each.attempt, first.number - 1), firsts[each.attempt].ts)
            each.lost_s = each.ts - saved_ts if each.lost else 0.0


Line = tuple[str, str, str, bool]
"""One line of the result: its name, the measured value, the bound, and whether it holds."""


def verified(run: Path) -> tuple[str, bool]:
    """Verifies the kept checkpoints; returns a text, and whether these and `latest` are right."""
    kept, bad = manifest.newest_first(run), []
    for path in kept:
        try:
            manifest.verify(path)
        except CheckpointError as error:
            bad.append(str(error))
    latest = jsonl.read_bytes(run / rundir.CHECKPOINTS / rundir.LATEST, 256).decode().strip()
    if bad or not kept or latest != kept[0].name:
        return "; ".join(bad) or "latest does not name the newest", False
    return f"{latest} and {len(kept) - 1} before it", True


def left_behind(started: Started, home: Path) -> list[str]:
    """Returns the processes, shared memory and files that remain after the run but should not."""
    token = started.token()
    left = [f"process {pid}" for pid in process.with_token(token)]
    owner = started.plan_state["supervisor"]
    left += [f"supervisor {owner['pid']}"] if rundir.is_alive(owner) else []
    left += [path.name for path in rundir.SHARED_MEMORY.iterdir() if token in path.name]
    hidden = (path for path in started.path.rglob(".*") if path.name not in HIDDEN)
    outside = (path for path in home.rglob("*") if not path.is_dir())
    return left + [str(path) for path in (*hidden, *outside)]


def sizes(started: Started) -> str:
    """Returns the sizes of logs, heartbeats, samples and events of the run, in MiB."""
    run = started.run()
    groups = {
        "logs": run.rglob("*.log*"), "heartbeats": run.glob("heartbeat_*"),
        "samples": run.glob("samples_*"), "events": run.glob("events.jsonl"),
    }  # fmt: skip
    found = {name: sum(path.stat().st_size for path in paths) for name, paths in groups.items()}
    return ", ".join(f"{name} {size / 2**20:.1f}" for name, size in found.items()) + " MiB"


def false_alarms(run: Path, found: list[Injected]) -> list[Line]:
    """Returns the lines about verdicts and watch rules at times without a fault."""
    spans = [(each.ts, each.ts + each.over_s + CALM_S[0]) for each in found]

    def is_healthy(ts: float) -> bool:
        return not any(begin <= ts <= end for begin, end in spans)

    said = [each for each in verdicts.stored(run, MAX_VERDICTS) if is_healthy(each.ts)]
    high = [f"{each.cause}: {each.sentence}" for each in said if each.sure == "high"]
    events = jsonl.read_bytes(run / rundir.EVENTS, MAX_EVENT_BYTES, 0).splitlines()
    acts = [
        each
        for line in events
        if (each := jsonl.decode(line))
        and each.get("kind") == "watch"
        and is_healthy(jsonl.number(each, "ts") or 0.0)
    ]
    return [
        ("verdicts of high confidence without a fault", "; ".join(high[:3]) or "0", "0", not high),
        ("other verdicts without a fault", f"{len(said) - len(high)}", "", True),
        ("actions of watch rules without a fault", f"{len(acts)}", "0", not acts),
    ]  # fmt: skip


def judge(
    chaos: Chaos, found: list[Injected], done: list[steps.Step], wanted: int
) -> list[Line]:  # fmt: skip
    """Returns the lines about the training, its faults and its checkpoints."""
    ended = [each for each in found if each.fault.ends]
    disruptive = [each for each in found if not each.fault.harmless and each.recovered]
    ratio = steps.effective_s(done) / steps.total_s(done)
    most = max((each.lost for each in ended), default=0)
    most_s = max((each.lost_s for each in ended), default=0.0)
    down = sorted(each.back_s for each in ended if each.back_s is not None)
    unseen = [e.fault.name for e in found if e.seen_s is None and not e.fault.harmless]
    extra = chaos.now.attempt - 1 - len(ended)
    text, good = verified(chaos.run)
    return [
        ("effective-time ratio", f"{ratio:.3f}", f"≥ {RATIO}", ratio >= RATIO),
        ("disruptive faults, all recovered from", f"{len(disruptive)}", f"≥ {wanted}",
         len(disruptive) >= wanted and all(each.recovered for each in found)),
        ("most lost work", f"{most} steps, {most_s:.1f} s",
         f"≤ {EVERY} steps, a checkpoint interval", most <= EVERY),
        ("checkpoints that verify at the end", text, "all", good),
        ("restarts that no fault caused", f"{extra}", "0", extra == 0),
        ("disruptive faults that a console did not show", ", ".join(unseen) or "0", "0",
         not unseen),
        ("from a fault to the next attempt's first step, median and most",
         f"{median(down):.1f} s, {down[-1]:.1f} s" if down else "none", "", True),
    ]  # fmt: skip


def judge_surroundings(
    chaos: Chaos, readers: Readers, first_mib: float, last_mib: float, word: str, home: Path
) -> list[Line]:
    """Returns the lines about the end, things left behind, readers, memory and records."""
    left, took = left_behind(chaos.started, home), readers.took_s or [0.0]
    return [
        ("how it ended", word, "halted", word.startswith("halted: ")),
        ("left behind: processes, shared memory, files", ", ".join(left) or "0", "0", not left),
        ("answers of `status --json`: number, longest",
         f"{len(readers.took_s)}, {max(took):.1f} s"
         + "".join(f"; {reason}" for reason in readers.failed[:3]), "all", not readers.failed),
        ("memory of the supervisor: first, last, most",
         f"{first_mib:.1f}, {last_mib:.1f}, {chaos.most_mib:.1f} MiB", f"≤ {BUDGET_MIB:g} MiB",
         chaos.most_mib <= BUDGET_MIB),
        ("records", sizes(chaos.started), "", True),
    ]  # fmt: skip


def rows(found: list[Injected], began_ts: float) -> list[tuple[str, ...]]:
    return [
        (each.fault.name, f"{each.ts - began_ts:.0f}",
         "" if each.seen_s is None else f"{each.seen_s:.2f}",
         "" if each.back_s is None else f"{each.back_s:.1f}",
         f"{each.lost}" if each.fault.ends else "", f"{each.attempt}",
         "" if each.recovered else f"not recovered: {each.words}")
        for each in found
    ]  # fmt: skip


def run(options: argparse.Namespace, folder: Path) -> tuple[str, list[Line], int]:
    """Soaks once; returns the tables, the lines, and how many faults were injected."""
    home, span_s = folder / "home", options.minutes * 60
    home.mkdir()
    variables = {"HOME": str(home), "TMPDIR": str(home), "XDG_CONFIG_HOME": str(home)}
    with small_disk(folder) as disk:
        plan = write_plan(folder, **PLAN)
        root = (disk or folder) / "artifacts"
        code, said, why = console("--root", root, "launch", plan, "--json", env=variables)
        if code:
            raise SystemExit(f"the soak was not launched: {why}")
        started = Started(Path(json.loads(said)["path"]))
        try:
            started.wait_steps(8)
            rng = random.Random(options.seed)
            chaos = Chaos(started, rng, disk)
            first_mib = chaos.memory_mib()
            due = schedule(rng, options.faults, span_s, disk is not None)
            with Readers(started.path, variables) as readers:
                found = soak(chaos, due, span_s)
            last_mib, word = chaos.memory_mib(), end(chaos)
            done = steps.read(rundir.heartbeat(chaos.run, 0))
            settle(found, done)
            time.sleep(1.0)  # the supervisor exits in this time
            lines = judge(chaos, found, done, options.faults) + false_alarms(chaos.run, found)
            lines += judge_surroundings(chaos, readers, first_mib, last_mib, word, home)
        finally:
            started.clean()
    began_ts = done[0].ts - done[0].dt_s
    return report(found, lines, began_ts), lines, len(found)


def report(found: list[Injected], lines: list[Line], began_ts: float) -> str:
    header = ("fault", "at s", "seen in s", "first new step in s", "lost steps", "attempt", "")
    judged = [(*line[:3], "holds" if line[3] and line[2] else "" if line[3] else "does not hold")
              for line in lines]  # fmt: skip
    return "\n\n".join((
        table(("what", "measured", "bound", ""), judged), table(header, rows(found, began_ts)),
    ))  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument(
        "--faults", type=int, default=10, help="number of disruptive faults; 0: no faults"
    )
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--dry", action="store_true", help="print, write no result")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        text, lines, count = run(options, Path(folder))
    notes = (
        f"Seed {options.seed}, {options.minutes:g} minutes, {count} faults. The "
        "effective time is the sum of the surviving steps; each counts once, for at most four "
        "medians. The ratio is this sum ÷ the time from the first to the last step. If a rank "
        "is stopped for good, the stall rule restarts the run after three stall limits of "
        f"{PLAN['watch']['stall_floor_s']} s."
    )  # fmt: skip
    if options.dry:
        print(f"{text}\n\n{notes}")
    elif options.faults:
        publish("soak", "A training under faults at random", text, notes)
    else:
        publish("soak_healthy", "A training without faults", text, notes, "soak")
    return 0 if all(line[3] for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
