"""`nsa-console watchdog`: evaluates the watch rules on a run, outside the supervisor."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from console import access, actions
from console.commands.output import emit, print_error, print_line
from console.diagnose.rules import HALTING, STRONG
from console.diagnose.watchdog import Change, Watchdog
from console.plan import Watch
from console.sources import launches
from console.sources.sanitize import clean
from console.supervisor.offline import OfflineRun
from trainers.contract import rundir
from trainers.contract.errors import RefusedError


def watchdog(options: argparse.Namespace) -> int:
    """Evaluates the watch rules on a run or launch until its end; returns the end's exit code."""
    path = launches.find(options.run, options.root, act=options.halt)
    if options.halt:
        access.check_ours(path)
        launches.check_in_place(path)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    source = OfflineRun(path)
    dog: Watchdog | None = None
    watched: tuple[Path, int] | None = None
    due: list[Change] = []
    halted: dict[Path, bool] = {}  # whether the halt of a run succeeded
    while True:
        now = source.poll()
        if now is not None:
            if dog is None or watched != source.of:
                watched = source.of
                dog = make_watchdog(source.watch, source.settings, options.halt, options.interval)
            for change in dog.update(now):
                if change.kind == "act":
                    due.append(change)
                else:
                    _report(change, change.text, options.json)
            due = [change for change in due if change.rule.name in dog.raised()]
            # The first action that is due halts the run; later actions are ignored.
            if due and not halted.get(run := source.run):
                halted[run] = _try_halt(run, due[0], run not in halted, options.json)
        if source.over:
            _print(options.json, {"kind": "end", "text": clean(source.over)})
            return source.exit_code
        time.sleep(options.interval)


def make_watchdog(
    watch: Watch, settings: Mapping[str, Any], halt: bool, interval_s: float
) -> Watchdog:
    """Returns a watchdog that only warns; if `halt` is set, some rules also halt the run.

    These are the rules in `HALTING`, and the rules to which the plan gives an action in `STRONG`.
    """
    strong = [name for name, rule in watch.rules.items() if rule.action in STRONG]
    rules = {name: replace(rule, action=None) for name, rule in watch.rules.items()}
    wanted = dict.fromkeys((*HALTING, *strong), "halt") if halt else {}
    return Watchdog(replace(watch, rules=rules), wanted, interval_s, settings)


def _report(change: Change, text: str, as_json: bool) -> None:
    rule = change.rule
    _print(as_json, {
        "kind": change.kind, "rule": rule.name, "level": change.level, "action": change.action,
        "value": change.value, "unit": rule.unit, "text": clean(text),
    })  # fmt: skip


def _try_halt(run: Path, change: Change, is_first: bool, as_json: bool) -> bool:
    """Writes `.HALT` and, if possible, `.anomaly_type`; prints the result.

    A `.HALT` that exists is written too, because resumed ranks ignore one from before their start.
    Returns False if `.HALT` cannot be written. Failures after the first try are not printed.
    """
    try:
        actions.halt(run, f"watchdog {actions.who()}")
    except RefusedError as error:
        if is_first:
            print_error(f"{error}; retrying; further failures are not reported")
        return False
    # A full disk has room for an empty .HALT, but perhaps not for the reason.
    with contextlib.suppress(OSError):
        rundir.write_atomic(run / rundir.ANOMALY, f"{change.rule.anomaly or change.rule.name}\n")
    _report(change, f"{rundir.HALT} is written: {change.text}", as_json)
    return True


def _print(as_json: bool, record: dict[str, Any]) -> None:
    if as_json:
        return emit({"ts": time.time()} | record)
    words = " ".join(filter(None, map(record.get, ("level", "kind", "rule"))))
    return print_line(f"{time.strftime('%H:%M:%S')} {words}: {record['text']}")
