"""Injects one fault in each of many real runs, and scores the console's verdicts: `make drills`.

`python -m benchmarks.drills [--author 1|2] [--only PATTERN] [--sample N] [--seed S] [--jobs N]
[--json FILE] [--add FILE] [--record DIR] [--publish] [--list]`. Without a selection, or with
`--publish`, the result is written to `benchmarks/results/diagnosis.md`. If the run of a case has
not ended, `--record` writes the inputs of its verdict for `benchmarks.drill_without`. The
processes of the runs are ended, also after SIGINT or SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import drill_evidence
from benchmarks.common import ROOT, publish
from benchmarks.drill_cases import CASES, Case, chosen, truth
from benchmarks.drill_faults import AUTHORS
from benchmarks.drill_fuse import Unavailable
from benchmarks.drill_inject_more import INJECT, PREPARE
from benchmarks.drill_score import Result, Said, report, said_by, score
from console import actions
from console.sources import process
from console.sources.run import RunSource
from tests.launches import ENDED, Started, phase, write_plan
from trainers.contract import rundir
from trainers.contract.errors import ContractError

FLOOR_S = 5
START_S, BOOT_START_S = 120, 30
"""`watch.startup_s`. The shorter limit is for faults before the first step."""
VERDICT_S, STABLE_S = 25.0, 6.0
"""Longest wait for a verdict on a fault after start-up, and the time after which an unchanged
verdict is final."""
REACH_S, LOOK_EVERY_S, CLEAN_S = 180.0, 0.1, 15.0
ENDED_BY = re.compile(r"\brank (\d+)(?:: |\b.*?\b(?:killed|exited|crashed|SIG[A-Z]+)\b)")
ENDED_IN = re.compile(r" at step \d+ in (\w+)")
"""Patterns in the reason for the end of a run: the rank that exited or failed, and its phase."""

FAILED = (
    OSError, AssertionError, LookupError, ValueError, RuntimeError, ContractError,
    subprocess.SubprocessError,
)  # fmt: skip
"""Errors after which a case counts as not run; the other cases are run."""


class Interrupted(Exception):
    """All cases end, because of a signal or an unexpected error."""


class Drill:
    """One running case. When `stop` is set, all cases end."""

    def __init__(
        self, case: Case, folder: Path, stack: ExitStack, stop: threading.Event,
        record: Path | None = None,
    ):  # fmt: skip
        self._case, self._folder, self._stack, self._stop = case, folder, stack, stop
        self._record = record
        self._mechanism = case.fault.rpartition("-")[0]
        self._started: Started

    def run(self) -> Result:
        """Launches, injects the fault and waits for the verdict; returns the result."""
        if self._mechanism in PREPARE:
            PREPARE[self._mechanism](self._folder, self._stack)
        self._launch()
        struck = self._inject()
        limit_s = VERDICT_S + (BOOT_START_S if self._case.in_boot else 0)
        result = Result(self._case, self._verdict(struck, limit_s))
        if self._record and (inputs := drill_evidence.collected(self._started.path)):
            name = re.sub(r"\W+", "-", self._case.name)
            drill_evidence.write(self._record / f"{name}.json", inputs, **document(result))
        return result

    def _launch(self) -> None:
        case = self._case
        workers = CASES.index(case) % 2 if case in CASES else 0
        (self._folder / "fault").write_text(case.words)
        words = [self._folder, "--workers", workers, *(["--phases"] if case.phases else [])]
        plan = write_plan(
            self._folder, nproc=case.world, phases=[phase("drilled", "drilled_ddp.py", *words)],
            watch={
                "stall_floor_s": FLOOR_S, "save_s": FLOOR_S, "eval_s": FLOOR_S, "grace_s": 3,
                "startup_s": BOOT_START_S if case.in_boot else START_S,
            },
        )  # fmt: skip
        options = actions.LaunchOptions(plan=str(plan), root=self._folder / "artifacts")
        self._started = Started(actions.launch(options, "drills"))
        self._stack.callback(clean, self._started)

    def _until(self, reached: Callable[[], Any], limit_s: float) -> Any:
        """Returns the first true value of `reached`, or a false one after `limit_s`."""
        deadline = time.monotonic() + limit_s
        while not (value := reached()) and time.monotonic() < deadline:
            if self._stop.wait(LOOK_EVERY_S):
                raise Interrupted
        return value

    def _inject(self) -> float:
        """Waits until the place of the fault is reached; returns the time of the fault.

        Injects the fault if `INJECT` has its mechanism.
        """
        inject, rank = INJECT.get(self._mechanism), self._case.rank
        # A rank that is stopped before the place of its fault would be in another phase.
        wanted = self._case.world if inject and rank is None else 1

        def marks() -> list[Path]:
            return list(self._folder.glob("reached.*"))

        self._until(lambda: len(marks()) >= wanted or self._ended(), REACH_S)
        if not marks():
            reason = RunSource(self._started.path).poll().why
            raise Unavailable(f"the fault was not reached: {reason or 'no reason given'}")
        if inject is None:
            return max(float(mark.read_text()) for mark in marks())
        for each in range(self._case.world) if rank is None else (rank,):
            inject(self._started, each, self._folder, self._stack)
        return time.time()

    def _ended(self) -> bool:
        return self._started.state().get("state") in ENDED

    def _verdict(self, struck: float, limit_s: float) -> Said | None:
        """Returns the newest verdict when it has stopped changing, the run has ended or time is up.

        Without a verdict, returns that of `diagnose`, or else the reason for the end, or None.
        """
        run, said, seen_at = self._started.run(), None, time.monotonic()
        until = time.monotonic() + limit_s

        def final() -> bool:
            nonlocal said, seen_at
            ended = self._ended()
            found = newest(run, struck)
            after_s = time.time() - struck
            if found is not None:
                first_s = said.first_s if said else after_s
                new = said_by(found, first_s, after_s)
                if said is None or same(said) != same(new):
                    said, seen_at = new, time.monotonic()
            still = said is not None and time.monotonic() - seen_at >= STABLE_S
            return ended or still or (said is None and time.monotonic() >= until)

        self._until(final, limit_s + STABLE_S)
        if said is not None:
            return said
        if self._goes_on():
            raise Unavailable("the run continued in spite of the fault")
        after_s = time.time() - struck
        found = asked(self._started.path) or self._end_reason()
        return said_by(found, after_s, after_s) if found else None

    def _goes_on(self) -> bool:
        """Returns whether the run has not ended, and a rank has just logged a step."""
        written = [path.stat().st_mtime for path in self._folder.glob("log_rank*.txt")]
        return not self._ended() and time.time() - max(written, default=0.0) < FLOOR_S / 2

    def _end_reason(self) -> dict[str, Any] | None:
        """Returns a verdict from the reason for the end, or None if the run has not ended."""
        if not self._ended():
            return None
        return ended_by(RunSource(self._started.path).poll().why)


def ended_by(why: str) -> dict[str, Any]:
    """Returns a verdict with the rank and phase that the reason for the end of a run names."""
    named, phase = ENDED_BY.search(why), ENDED_IN.search(why)
    cause, rank = ("exited", int(named[1])) if named else ("unknown", None)
    return {"cause": cause, "rank": rank, "phase": phase[1] if phase else "", "sentence": why}


def same(said: Said) -> tuple[object, ...]:
    return said.cause, said.rank, said.phase, said.sure


def newest(run: Path, since: float) -> dict[str, Any] | None:
    """Returns the newest document in `verdicts/`, or None if there is none since the fault."""
    names = sorted((run / rundir.VERDICTS).glob("*.json"), key=lambda path: int(path.stem))
    found = rundir.read_json(names[-1]) if names else None
    return found if found and found.get("ts", 0.0) >= since else None


def asked(path: Path) -> dict[str, Any] | None:
    """Returns the verdict that `nsa-console diagnose --json` prints, or None if it has no cause."""
    words = [sys.executable, "-m", "console", "diagnose", str(path), "--json"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    try:
        found = json.loads(done.stdout)
    except ValueError:
        return None
    found = found.get("verdict", found) if isinstance(found, dict) else None
    return found if isinstance(found, dict) and found.get("cause") else None


def clean(started: Started) -> None:
    """Ends the processes of a launch, and waits at most `CLEAN_S` until they have exited."""
    until = time.monotonic() + CLEAN_S
    while True:
        started.clean()
        tokens = [(rundir.read_json(run / rundir.RUN) or {}) for run in started.runs()]
        names = [born.get("environment", {}).get("NSA_CONSOLE_TOKEN") for born in tokens]
        left = [pid for name in names if name for pid in process.with_token(name)]
        owned = rundir.is_alive(started.plan_state.get("supervisor", {}))
        if not (left or owned) or time.monotonic() > until:
            return
        time.sleep(LOOK_EVERY_S)


def drill(case: Case, stop: threading.Event, record: Path | None = None) -> Result:
    """Runs one case in a temporary directory; stores its evidence in `record`, if that is set."""
    if stop.is_set():
        raise Interrupted
    try:
        with tempfile.TemporaryDirectory(prefix="drill-") as name, ExitStack() as stack:
            return Drill(case, Path(name), stack, stop, record).run()
    except Unavailable as reason:
        return Result(case, not_run=str(reason))
    except FAILED as error:
        return Result(case, not_run=f"{type(error).__name__}: {error}")


def drill_all(
    cases: list[Case], jobs: int, heard: Callable[[Result], None], record: Path | None = None
) -> list[Result]:  # fmt: skip
    """Runs up to `jobs` cases at a time; returns the results in the order of the cases."""
    stop, found = threading.Event(), dict[Case, Result]()
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(drill, case, stop, record) for case in cases]
        try:
            for future in as_completed(futures):
                result = future.result()
                found[result.case] = result
                heard(result)
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    return [found[case] for case in cases]


def document(result: Result) -> dict[str, Any]:
    """Returns a result as JSON data, with the truth and the score."""
    right = truth(result.case)
    return {
        "case": {**asdict(result.case), "author": result.case.author}, "not_run": result.not_run,
        "truth": {
            "ranks": sorted(right.ranks, key=str), "phases": sorted(right.phases),
            "cause": right.cause,
        },
        "said": asdict(result.said) if result.said else None,
        "right": None if result.not_run else asdict(score(right, result.said)),
    }  # fmt: skip


def earlier(path: Path) -> list[Result]:
    """Returns the results in a file that `--json` wrote."""
    found = []
    for entry in json.loads(path.read_text()):
        case = Case(**{key: entry["case"][key] for key in ("fault", "world", "rank", "phases")})
        said = Said(**entry["said"]) if entry["said"] else None
        found.append(Result(case, said, entry["not_run"]))
    return found


def line(result: Result) -> str:
    said = result.said
    words = f"{said.cause}, rank {said.rank}, {said.phase}, {said.sure}" if said else "no verdict"
    after = f", after {said.first_s:.1f} and {said.final_s:.1f} s" if said else ""
    return f"{result.case.name}: " + (f"not run: {result.not_run}" if result.not_run
                                      else words + after)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", default="", metavar="PATTERN", help="regular expression for the names"
    )
    parser.add_argument("--author", type=int, choices=AUTHORS, help="cases of one author")
    parser.add_argument("--sample", type=int, default=0, help="number of cases, drawn by the seed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="cases at the same time")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument(
        "--add", type=Path, action="append", default=[], metavar="FILE",
        help="file of --json from an earlier run; its results are reported too",
    )  # fmt: skip
    parser.add_argument("--record", type=Path, help="directory for the evidence of each case")
    parser.add_argument("--publish", action="store_true", help="write the result of a selection")
    parser.add_argument("--list", action="store_true", help="print the cases, run none")
    options = parser.parse_args()
    cases = chosen(options.only, options.sample, options.seed, options.author)
    if options.list:
        print("\n".join(f"{case.name}: {truth(case).cause}" for case in cases))
        return 0
    if options.record:
        options.record.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    heard: list[dict[str, Any]] = []

    def hear(result: Result) -> None:
        heard.append(document(result))
        print(f"{len(heard)}/{len(cases)} {line(result)}", flush=True)
        if options.json:
            rundir.write_atomic(options.json, json.dumps(heard, indent=1))

    try:
        results = drill_all(cases, options.jobs, hear, options.record)
    except KeyboardInterrupt:
        print("interrupted; the processes of all cases are ended", file=sys.stderr)
        return 130
    results = [each for path in options.add for each in earlier(path)] + results
    if not (len(cases) == len(CASES) or options.publish):
        print(report(results))
        return 0
    publish(
        "diagnosis", "Verdicts on injected faults (CPU, gloo)", report(results),
        f"{len(results)} cases of a foreign DDP program with gloo on CPU, one fault each, "
        f"`stall_floor_s` {FLOOR_S}. A verdict is final when it has not changed for "
        f"{STABLE_S:g} s. Without a verdict in time, the verdict of `nsa-console diagnose` or the "
        "reason for the end of the run is scored; a missing verdict, and the cause `unknown`, "
        "count as wrong. Programs with three lines report no phases; their phase is not scored. "
        "A verdict of high confidence is wrong when its rank, phase or cause is wrong. Author 2 "
        "wrote mechanisms for the same classes of causes without knowledge of the rules.",
        "drills",
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
