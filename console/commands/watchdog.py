"""`nsa-console watchdog`: evaluates the watch rules from a run's files, without a supervisor."""

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
from console.commands.output import emit, print_line
from console.diagnose.rules import HALTING, STRONG
from console.diagnose.watchdog import Change, Watchdog
from console.plan import Watch
from console.sources import launches
from console.sources.sanitize import clean
from console.supervisor.offline import OfflineRun
from trainers.contract import rundir


def watchdog(options: argparse.Namespace) -> int:
    """Evaluates the watch rules on a run until the run ends; returns the exit code of its end."""
    path = launches.find(options.run, options.root, act=options.halt)
    if options.halt:
        access.check_ours(path)
        launches.check_in_place(path)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    source = OfflineRun(path)
    dog: Watchdog | None = None
    watched: tuple[Path, int] | None = None
    halted: set[Path] = set()
    while True:
        now = source.poll()
        if now is not None:
            if dog is None or watched != source.of:
                watched = source.of
                dog = make_watchdog(source.watch, source.settings, options.halt, options.interval)
            for change in dog.update(now):
                _report(change, source.run, halted, options)
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


def _report(change: Change, run: Path, halted: set[Path], options: argparse.Namespace) -> None:
    """Prints a change. The first action that is due halts the run; later actions are ignored."""
    rule = change.rule
    record = {
        "kind": change.kind, "rule": rule.name, "level": change.level, "action": change.action,
        "value": change.value, "unit": rule.unit, "text": clean(change.text),
    }  # fmt: skip
    if change.kind == "act":
        if run in halted:
            return
        halted.add(run)
        record["text"] = f"{_halt(run, rule.anomaly or rule.name)}: {record['text']}"
    _print(options.json, record)


def _halt(run: Path, anomaly: str) -> str:
    """Writes `.HALT` and, if possible, `.anomaly_type`, unless `.HALT` exists."""
    if (run / rundir.HALT).exists():
        return f"{rundir.HALT} already exists"
    actions.halt(run, f"watchdog {actions.who()}")
    # A full disk has room for an empty .HALT, but perhaps not for the reason.
    with contextlib.suppress(OSError):
        rundir.write_atomic(run / rundir.ANOMALY, f"{anomaly}\n")
    return f"{rundir.HALT} is written"


def _print(as_json: bool, record: dict[str, Any]) -> None:
    if as_json:
        return emit({"ts": time.time()} | record)
    names = [record.get("level", ""), record["kind"], record.get("rule", "")]
    words = " ".join(name for name in names if name)
    return print_line(f"{time.strftime('%H:%M:%S')} {words}: {record['text']}")
