"""`nsa-console watchdog`: the watch rules alone, over any run directory, without a supervisor."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from console import actions
from console.commands.output import emit, say
from console.diagnose.rules import HALTING, STRONG
from console.diagnose.watch import Change, Watchdog
from console.sources import launches
from console.sources.sanitize import clean
from console.supervisor import offline
from trainers.contract import rundir


def watchdog(options: argparse.Namespace) -> int:
    """Holds the watch rules against a run until it ends; returns the exit code of its end."""
    path = launches.find(options.run, options.root, act=options.halt)
    if options.halt:
        rundir.check_ours(path)
        launches.check_in_place(path)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    source = offline.Contract(path)
    dog: Watchdog | None = None
    watched: tuple[Path, int] | None = None
    halted: set[Path] = set()
    while True:
        now = source.poll()
        if now is not None and source.of is not None:
            if dog is None or watched != source.of:
                watched, dog = source.of, _watchdog(source, options)
            for change in dog.update(now):
                _take(change, source.of[0], halted, options)
        if source.over:
            _tell(options.json, {"kind": "end", "text": clean(source.over)})
            return source.exit_code
        time.sleep(options.interval)


def _watchdog(source: offline.Contract, options: argparse.Namespace) -> Watchdog:
    """Returns the rules with no action but a halt, and that only where it was asked for."""
    watch = source.watch
    strong = [name for name, rule in watch.rules.items() if rule.action in STRONG]
    rules = {name: replace(rule, action=None) for name, rule in watch.rules.items()}
    wanted = dict.fromkeys((*HALTING, *strong), "halt") if options.halt else {}
    return Watchdog(replace(watch, rules=rules), wanted, options.interval, source.settings)


def _take(change: Change, run: Path, halted: set[Path], options: argparse.Namespace) -> None:
    rule = change.rule
    told = {
        "kind": change.kind, "rule": rule.name, "level": change.level, "action": change.action,
        "value": change.value, "unit": rule.unit, "text": clean(change.text),
    }  # fmt: skip
    if change.kind == "act":
        if run in halted:
            return
        halted.add(run)
        told["text"] = f"{_halt(run, rule.anomaly or rule.name)}: {told['text']}"
    _tell(options.json, told)


def _halt(run: Path, anomaly: str) -> str:
    """Writes `.anomaly_type` and `.HALT`, unless somebody halts already; returns what was done."""
    if (run / rundir.HALT).exists():
        return f"{rundir.HALT} is there already"
    actions.halt(run, f"watchdog {actions.who()}")
    # A full disk takes the empty .HALT, and may not take its reason.
    with contextlib.suppress(OSError):
        rundir.write_atomic(run / rundir.ANOMALY, f"{anomaly}\n")
    return f"{rundir.HALT} is written"


def _tell(as_json: bool, told: dict[str, Any]) -> None:
    if as_json:
        return emit({"ts": time.time()} | told)
    names = [told.get("level", ""), told["kind"], told.get("rule", "")]
    words = " ".join(name for name in names if name)
    return say(f"{time.strftime('%H:%M:%S')} {words}: {told['text']}")
