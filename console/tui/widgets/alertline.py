"""The second line: the worst that is not acknowledged, with the key that deals with it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from console.model import BAD_STATES, LEVELS, Gate, LaunchState, Level, RunState
from console.tui import format as fmt
from console.tui.feed import Snapshot
from console.tui.palette import LEVEL_STYLE
from console.tui.rows import Row, cut, spread, width_of
from console.tui.widgets.lines import Panel

BLOCKED_S = 2.0
SILENT_S = 5.0
WORDS: dict[Level, str] = {"crit": "! CRIT", "warn": "! WARN", "info": "  note"}


@dataclass(frozen=True, slots=True)
class Notice:
    """One thing to know. `hint` says which key deals with it, `alert` is what A acknowledges."""

    level: Level
    text: str
    hint: str = ""
    alert: str = ""


def notices(snapshot: Snapshot, late_s: float = 0.0) -> list[Notice]:
    """Returns all that the alert line could say, worst first."""
    found: list[Notice] = []
    if snapshot.trouble:
        found.append(Notice("crit", snapshot.trouble))
    if late_s > SILENT_S:
        text = f"the run directory has not answered for {fmt.age(late_s)}; what is shown is old"
        found.append(Notice("crit", text))
    state = snapshot.state
    if state is None:
        return found
    if state.directory_blocked_s > BLOCKED_S:
        blocked = fmt.age(state.directory_blocked_s)
        text = f"the run directory does not answer writes for {blocked}; training goes on"
        found.append(Notice("crit", text))
    for alert in state.alerts:
        if not alert.acknowledged:
            hint = f"{alert.key} {KEY_WORDS.get(alert.key, 'look')}  " if alert.key else ""
            found.append(Notice(alert.level, alert.text, f"{hint}A ack", alert.id))
    found += _of_state(state, bool(found))
    found += _of_launch(state.launch)
    found += _of_gates(state.gates)
    if state.skipped_records:
        found.append(Notice("info", f"{state.skipped_records:,} records could not be read"))
    return sorted(found, key=lambda notice: LEVELS.index(notice.level))


KEY_WORDS = {"3": "diagnose", "4": "logs", "L": "go on", "E": "flags", "D": "dump", "H": "halt"}


def _of_state(state: RunState, has_more: bool) -> list[Notice]:
    if state.state == "stalled":
        said = state.verdict.sentence if state.verdict else state.why or "no rank moves on"
        return [] if has_more else [Notice("crit", said, "3 diagnose")]
    if state.state in BAD_STATES:
        return [Notice("crit", f"{state.state}: {state.why or 'no reason was left'}", "4 logs")]
    if state.state == "unsupervised":
        return [Notice("warn", state.why or "the supervisor is gone; the ranks still run")]
    if state.state in ("halting", "halted", "stopping", "stopped", "restarting") and state.why:
        return [Notice("info", f"{state.state}: {state.why}")]
    return []


def _of_launch(launch: LaunchState | None) -> list[Notice]:
    if launch is None or launch.state != "waiting":
        return []
    name = launch.rest[0].numbered if launch.rest else "the next phase"
    return [Notice("warn", f"waits for you before phase {name}", "L go on  E flags  H end")]


def _of_gates(gates: tuple[Gate, ...]) -> list[Notice]:
    failed = [gate for gate in gates if gate.result == "fail"]
    if failed:
        first = failed[0]
        why = first.why or f"{gate_value(first)}, must be {first.bound}"
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        return [Notice("warn", f"gate {first.name} failed: {why}{more}", "2 gates")]
    passed = sum(gate.result == "pass" for gate in gates)
    if gates and passed == len(gates):
        return [Notice("info", f"all {passed} gates of this phase pass")]
    return []


def gate_value(gate: Gate) -> str:
    """Returns the measured value of a gate in its unit."""
    if gate.value is None:
        return "not measured"
    if gate.unit in ("share", "s", "MiB", "GiB", "ms"):
        return fmt.figure(gate.value, gate.unit)
    return f"{fmt.figure(gate.value, '')} {gate.unit}".strip()


def alert_row(found: list[Notice], width: int) -> Row:
    """Returns the line for the worst notice; calm words when there is none."""
    if not found:
        return (("  no alert", "dim"),)
    worst = found[0]
    others = f"  (1 of {len(found)})" if len(found) > 1 else ""
    tail: Row = ((worst.hint, "key"), (others, "dim"))
    style = LEVEL_STYLE[worst.level]
    room = width - width_of(tail) - 2 - len(WORDS[worst.level]) - 1
    return spread(
        ((WORDS[worst.level], style), (" ", ""), (cut(worst.text, room), style)), tail, width
    )


class AlertLine(Panel):
    """Knows what `A` would acknowledge."""

    worst: Notice | None = None

    def rows(self, snapshot: Snapshot, width: int, height: int) -> list[Row]:
        found = notices(snapshot, time.monotonic() - snapshot.at)
        self.worst = found[0] if found else None
        return [alert_row(found, width)]
