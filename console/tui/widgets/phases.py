"""Renders phases, gates and preflight checks as rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from console.model import LIVE_STATES, Gate, PhaseState
from console.sources import launch_documents
from console.status_text import COUNTED, counted, gate_value, gates_text
from console.tui import format as fmt
from console.tui.rows import Row, columns, fill, labelled, rule, text_of, width_of, wrap
from console.tui.styles import STATE_STYLE
from console.tui.widgets.lines import WHOLE

STEPS = 12
CELL = 38
"""Least width in cells of one of several columns of gates or checks."""
CHECKS = "preflight"
SIGNS = {"fail": ("✗", "crit"), "unknown": ("?", "warn"), "pass": ("✓", "ok"), "": ("·", "dim")}
"""Sign and style of a result, the worst first; "" stands for a result that is not known yet."""


def planned_phases(plan: Any) -> tuple[PhaseState, ...]:
    """Returns the phases of a plan that has not been launched."""
    planned = {"phases": [asdict(phase) for phase in plan.phases]}
    state = {"phases": [{"state": "next"}]}
    return launch_documents.launch_state(Path(), plan.name, planned, state).phases


def phase_rows(
    phases: Sequence[PhaseState], current: int, note: str, width: int, height: int,
    now: float, step: int | None = None, gates: Sequence[Gate] = (), title: str = "phases",
) -> list[Row]:  # fmt: skip
    """Returns the phases with their states.

    The phase in focus is the current phase, or the next phase if the current phase has completed. A
    low panel shows only the phases around it. If there is room, the panel shows what it proves.
    With `WHOLE` as height, the panel shows what each phase proves, and why it has its state.
    """
    is_whole = height >= WHOLE
    finished = bool(phases) and phases[current].state == "completed"
    focus = min(current + finished, len(phases) - 1)
    proves = _proves(phases[focus], width, 2) if phases else []
    if 1 + len(phases) + len(proves) > height:
        proves = []
    room = max(1, height - 1 - len(proves))
    start = max(0, min(focus - room // 2, len(phases) - room))
    shown = phases[start : start + room]
    part = f"{start + 1}–{start + len(shown)} of {len(phases)}  " * (len(shown) < len(phases))
    rows = [rule(title, width, part + note)]
    passed = f"gates {sum(gate.result == 'pass' for gate in gates)}/{len(gates)}" if gates else ""
    results = [(phase.index == current and passed) or gates_text(phase) for phase in phases]
    longest = max(map(len, results), default=0)
    name = min(max(len(phase.numbered) for phase in phases), width - 35 - longest) if phases else 0
    for phase, result in zip(shown, results[start:], strict=False):
        is_current = phase.index == current
        row = _phase_row(
            phase, is_current, width, now, step if is_current else None, result, max(12, name)
        )
        lines = proves if phase.index == focus else []
        if is_whole:
            why = "" if phase.why in text_of(row) else phase.why
            lines = [*wrap(why, width - 4), *_proves(phase, width)]
        rows += [row, *(((f"    {line}", "dim"),) for line in lines)]
    return rows[:height]


def _proves(phase: PhaseState, width: int, limit: int = 99) -> list[str]:
    return wrap(f"proves: {phase.proves}" if phase.proves else "", width - 4, limit)


def _phase_row(
    phase: PhaseState, is_current: bool, width: int, now: float, step: int | None,
    result: str, name: int,
) -> Row:  # fmt: skip
    done = step if step is not None else phase.steps
    if done is None and not phase.started_ts:
        done = 0
    steps = fmt.whole(done) if done else ""
    if phase.steps_planned:
        steps = f"{fmt.whole(done)}/{phase.steps_planned:,}"
        if len(steps) > STEPS:
            steps = f"{fmt.short(done)}/{fmt.short(phase.steps_planned)}"
    took = ""
    ended = phase.ended_ts or (now if phase.state in LIVE_STATES else None)
    if phase.started_ts and ended:
        took = fmt.age(ended - phase.started_ts)
    style = "crit" if phase.result == "fail" else ""
    mark, strong = ("▸", "strong") if is_current else (" ", "")
    row = columns([
        (mark, 1, "now"), (phase.numbered, name, strong),
        (phase.state, 12, STATE_STYLE.get(phase.state, "dim")),
        (steps, -STEPS, ""), (took, -5, "dim"), (result, len(result), style),
    ])  # fmt: skip
    fits = phase.why and width_of(row) + 2 + len(phase.why) <= width
    return (*row, (f"  {phase.why}", "dim")) if fits else row


def gate_rows(
    gates: Sequence[Gate], bounds: Mapping[str, str], width: int, height: int, heading: str,
    alerts: Collection[str] = (),
) -> list[Row]:  # fmt: skip
    """Returns the gates with value and bound, failed gates first, as `grid` arranges them.

    Before the gates are evaluated, only the bounds are shown. The ids of the open `alerts` show the
    gates that can no longer pass.
    """
    if not gates and bounds:
        from console.plans.gates import GATE_ALERT

        failed = {name for name in bounds if f"{GATE_ALERT}{name}" in alerts}
        pending = [("fail" * (name in failed), _pending(name, bounds[name])) for name in bounds]
        return grid(pending, width, height, heading, "evaluated when the phase ends")
    cells = [
        (
            gate.result,
            f"{'overridden ' * bool(gate.override)}{gate.name}: {gate_value(gate)}"
            + f" ({gate.bound})" * bool(gate.bound),
        )
        for gate in gates
    ]
    if not gates:
        return [rule(heading, width), (("no gates", "dim"),)]
    passed = sum(gate.result == "pass" for gate in gates)
    return grid(cells, width, height, heading, f"{passed} of {len(gates)} passed")


def _pending(name: str, bound: str) -> str:
    from console.plans.gates import RULES

    rule = RULES.get(name)
    if rule is None or rule.bound == "yes" or bound == "True":
        return name
    unit = rule.unit.removesuffix("s") if bound == "1" and rule.unit in COUNTED else rule.unit
    return f"{name}: {rule.bound} {bound} {unit}".rstrip()


def check_rows(checks: Sequence[Any], width: int, height: int) -> list[Row]:
    """Returns the checks before a launch, failed checks first."""
    cells = [(check.result, f"{check.name}: {check.text}") for check in checks]
    failed = sum(check.result == "fail" for check in checks)
    passed = sum(check.result == "pass" for check in checks)
    note = f"go: {passed} of {counted(len(checks), 'check')} passed"
    if failed:
        note = f"no go: {counted(failed, 'check')} failed"
    return grid(cells, width, height, CHECKS, note if checks else "")


def grid(
    cells: Sequence[tuple[str, str]], width: int, height: int, heading: str, note: str
) -> list[Row]:
    """Returns a heading and cells of (result, text), failed cells first.

    Each cell gets its own row if there are enough rows. Otherwise the cells are in as many columns
    as fit, and the heading counts the hidden cells. With `WHOLE` as height, no text is cut.
    """
    if not cells:
        return [rule(heading, width, note), (("none yet", "dim"),)]
    cells = sorted(cells, key=lambda cell: [*SIGNS].index(cell[0]))
    if height >= WHOLE:
        rows = [rule(heading, width, note)]
        for result, text in cells:
            rows += labelled((f"{SIGNS[result][0]} ", SIGNS[result][1]), wrap(text, width - 2))
        return rows
    per_row = 1 if len(cells) < height else max(1, width // CELL)
    each, hidden = width // per_row, len(cells) - per_row * (height - 1)
    rows = [rule(heading, width, f"+{hidden} more: z   {note}" if hidden > 0 else note)]
    for start in range(0, len(cells), per_row):
        row: list[tuple[str, str]] = []
        for result, text in cells[start : start + per_row]:
            sign, style = SIGNS[result]
            row += [(f"{sign} ", style), (fill(text, each - 3), ""), (" ", "")]
        rows.append(tuple(row))
    return rows[:height]
