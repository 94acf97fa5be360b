"""Writes the report of a launch or run as Markdown, with charts as SVG.

Text from the run directory is cleaned and shortened; in tables it is also escaped. A separate
section lists what was not measured.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from console import status_text
from console.model import LIVE_STATES, OPERATOR, RESULTS, LaunchState, RunState
from console.plans import gates, sweep
from console.plans.gate_check import poll_confirmed, so_far
from console.plans.line_chart import svg
from console.sources import json_documents, launches, verdicts
from console.sources.gate_files import SPEED
from console.sources.rank_totals import FIGURES, LAST_STEPS
from console.sources.record_files import read_end
from console.sources.run import RunSource
from console.sources.sanitize import clean
from console.status_text import clock, counted, number
from trainers.contract import jsonl, rundir
from trainers.contract.errors import ContractError

NAME, MAX_CELL, MAX_ROWS = "report.md", 600, 1024
MARKS = re.compile(r"[\\|`*\[\]!#]")
HOUR_S, EVENT_BYTES = 3600.0, 8 << 20
CHARTS = (("loss", "loss"), ("toks_per_s", "speed"))
"""The series of each chart, and the word in its file name."""
FILES = (
    "run.json", "env.json", "metrics.json", "gates.json", "training.csv", "heartbeat_rank0.jsonl",
    "k_stats", "fallback_counters", "dtypes_report", "opt_state", "git_sha.txt", "collect_env.txt",
    "nvidia_smi.xml", "mem_", "checkpoints",
)  # fmt: skip
"""Names or prefixes of the files that the runbooks require, and of the files that replace them."""
OF_OPERATORS = ("note", "request", "answer", "ack", "override")
"""The kinds of events in the table of notes and requests."""
ON_CUDA_ONLY = ("nvidia_smi.xml", "mem_")
NOT_COMPARED = ("", "## Sweeps", "", "The sweeps have not been compared yet.")
ENVIRONMENT = (
    "config", "parameters", "tokens_per_step", "python", "versions", "cuda", "device",
    "device_count", "world", "strategy", "comm_backend", "comm_hook", "backend", "host", "machine",
    "git", "mfu_missing",
)  # fmt: skip
"""Keys that are read from env.json, or else from run.json."""


@dataclass(frozen=True, slots=True)
class Phase:
    """The sources of the report for one run."""

    name: str
    path: Path
    source: RunSource
    state: RunState
    run: Mapping[str, Any]
    env: Mapping[str, Any]
    planned: Mapping[str, Any]
    """The entry of the phase in plan.json."""

    @property
    def figures(self) -> Mapping[str, float | None]:
        """The `FIGURES` of rank 0; all of them are None if some records have not been read."""
        summary = self.source.summary
        if summary is None or not self.source.has_all_records:
            return dict.fromkeys(FIGURES)
        return summary.of_rank(0).figures()


def versions(path: Path, output: Path | None = None) -> Iterator[dict[Path, str]]:
    """Yields versions of the report of a launch or run: the content of each file, Markdown first.

    The comparison of sweeps may take minutes, so the first version of a report with a sweep lacks
    it. Without `output`, the key of the Markdown is `path`, and there are no charts.
    """
    source = RunSource(path)
    state = poll_confirmed(source)
    phases = list(_phases(path, source))
    charts = _charts(phases, output.stem) if output and phases else {}
    before = (
        _head(path, source, state, phases), _gates(phases), _stalls(phases), _speed(phases),
        _figures(phases),
    )  # fmt: skip
    after = (
        _expected(phases), _environment(phases), _files(phases), _notes(source, phases),
        _not_measured(phases), ("", *(f"![{name}]({name})" for name in charts)),
    )  # fmt: skip
    first, last = ([line for part in parts for line in part] for parts in (before, after))
    output = output or path
    drawn = {output.with_name(name): chart for name, chart in charts.items()}
    has_sweep = source.is_launch and any(jsonl.text(each.planned, "sweep") for each in phases)
    for sweeps in (NOT_COMPARED, _sweeps(path)) if has_sweep else ((),):
        yield {output: "\n".join([*first, *sweeps, *last]) + "\n"} | drawn


def save(files: Mapping[Path, str]) -> None:
    """Writes one of the `versions`. Raises OSError."""
    for each, content in files.items():
        rundir.write_atomic(each, content)


def _phases(path: Path, source: RunSource) -> Iterator[Phase]:
    """Yields the phases of a launch that have a run directory, or the single run at `path`."""
    launch = source.launch_path
    plan = rundir.read_json(launch / rundir.PLAN, below=launch) or {} if launch else {}
    entries = enumerate(jsonl.entries(plan, "phases"))
    planned = {f"{index}-{jsonl.text(entry, 'name')}": entry for index, entry in entries}
    runs = launches.run_directories(path) if source.is_launch else [path]
    for each in runs:
        run = RunSource(each, reads="charts", only=dict(CHARTS))
        run.read_all()
        state = run.poll()  # with a snapshot, only this call reads the series
        if state.state in LIVE_STATES:
            state = replace(state, gates=so_far(run, state))
        born, env = json_documents.run_record(each), rundir.read_json(each / rundir.ENV, below=each)
        yield Phase(each.name, each, run, state, born, env or {}, planned.get(each.name, {}))


# --- Markdown ------------------------------------------------------------------------------------


def cell(value: object) -> str:
    """Returns a value as one line of text for a table; HTML and most Markdown marks are escaped.

    Other marks, for example `_` and `~`, are not escaped. A bare address may become a link.
    """
    text = number(value) if isinstance(value, float) else "–" if value is None else value
    text = MARKS.sub(r"\\\g<0>", clean(str(text), MAX_CELL))
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """Yields a section with a table; yields nothing if there are no rows."""
    found = list(rows)
    if not found:
        return
    yield from ("", f"## {title}", "", f"| {' | '.join(head)} |", "| --- " * len(head) + "|")
    yield from (f"| {' | '.join(map(cell, row))} |" for row in found[:MAX_ROWS])
    if len(found) > MAX_ROWS:
        yield f"\n{len(found) - MAX_ROWS} more rows are left out."


def _head(
    path: Path, source: RunSource, state: RunState, phases: Sequence[Phase]
) -> Iterator[str]:  # fmt: skip
    launch = state.launch if source.is_launch else None
    word, why = status_text.outcome(state, source.is_launch)
    result = "no go" if status_text.exit_code(state, source.is_launch) else "go"
    over = status_text.is_over(state, source.is_launch)
    result = result if over else "no go yet: the run has not ended"
    stamp = f"{_utc(time.time())} UTC"
    count = sum(gate.result != "pass" and not gate.blocks for p in phases for gate in p.state.gates)
    overridden = f" with {counted(count, 'override')}" if count else ""
    yield from (f"# Report of {cell(launch.id if launch else state.id)}", "")
    yield from (f"**{result}**{overridden}: {cell(word)}. {cell(why)}", "", f"Written {stamp}.")
    if launch and (former := status_text.continues_text(launch)):
        yield from ("", f"This launch {cell(former)}.")
    yield from _table(
        "Phases", ("phase", "state", "steps", "attempts", "stalls", "gates", "why"),
        (_phase_row(each, launch) for each in phases),
    )  # fmt: skip


def _phase_row(phase: Phase, launch: LaunchState | None) -> tuple[object, ...]:
    state, summary = phase.state, phase.source.summary
    result = next((p.result for p in launch.phases if p.dir == phase.name), "") if launch else ""
    counts = Counter(gate.result for gate in state.gates)
    words = [f"{counts[r]} {status_text.RESULT_WORDS[r]}" for r in reversed(RESULTS)]
    planned = f" of {state.steps_planned:,}" if state.steps_planned else ""
    steps = status_text.DASH if state.step is None else f"{state.step:,}{planned}"
    stalls = None if summary is None else summary.stalls
    result = result or "so far" * (state.state in LIVE_STATES)
    text = ": ".join(filter(None, (result, ", ".join(words)))) if state.gates else "none"
    return phase.name, state.state, steps, state.attempt, stalls, text, state.why


def _gates(phases: Sequence[Phase]) -> Iterator[str]:
    """Yields the gates with expected and actual values, and the reason of each override.

    The gates that did not pass come first, because the table has at most `MAX_ROWS` rows.
    """
    found = [(each, gate) for each in phases for gate in each.state.gates]
    found.sort(key=lambda pair: RESULTS.index(pair[1].result))
    rows = (
        (each.name, gate.result.upper() if gate.blocks else gate.result, gate.name,
         status_text.gate_value(gate), gate.bound, gate.window, gate.source, gate.why,
         gate.override)
        for each, gate in found
    )  # fmt: skip
    head = ("phase", "", "gate", "actual", "expected", "window", "file", "why", "override")
    yield from _table("Gates", head, rows)


def _stalls(phases: Sequence[Phase]) -> Iterator[str]:
    """Yields the last verdict on each stall, from the newest `MAX_ROWS` verdicts of each phase."""
    rows: list[Sequence[object]] = []
    for each in phases:
        stored = [*verdicts.stored(each.path, MAX_ROWS)]
        if len(stored) == MAX_ROWS:
            rows.append((each.name, "", "older verdicts are left out", "", ""))
        rows += [
            (each.name, _utc(found.ts), found.of_past().sentence,
             _utc(found.end_ts) if found.end_ts else None, found.end)
            for found in reversed(stored[: MAX_ROWS - 1]) if found.end != verdicts.REPLACED
        ]  # fmt: skip
    yield from _table("Stalls", ("phase", "time (UTC)", "verdict", "ended (UTC)", "end"), rows)


def _speed(phases: Sequence[Phase]) -> Iterator[str]:
    """Yields the table that the runbooks require: flags, mean and deviation of the speed."""
    rows = []
    for each in phases:
        found = each.figures
        if found["toks_per_s"] is not None:
            values, origins = each.state.environment, each.state.origins
            own = {name: values[name] for name in values if origins[name].startswith(OPERATOR)}
            own = jsonl.mapping(each.planned, "flags") | own | jsonl.mapping(each.planned, "set")
            text = " ".join(f"{name}={value}" for name, value in own.items())
            rows.append((
                each.name, text or "none", found["toks_per_s"], found["toks_per_s_stdev"],
                f"last {found['steps'] or 0:.0f} steps", f"{each.name}/{gates.RANK0}",
            ))  # fmt: skip
    head = ("phase", "its flags and settings", "mean tok/s", "± stdev", "window", "file")
    yield from _table("Speed", head, rows)


def _figures(phases: Sequence[Phase]) -> Iterator[str]:
    rows: list[Sequence[object]] = []
    for each in phases:
        found = each.figures
        for name, (unit, window, _) in FIGURES.items():
            if (value := found[name]) is not None:
                text = window.format(steps=f"{found['steps'] or 0:.0f}")
                rows.append((each.name, name, value, unit, text, f"{each.name}/{gates.RANK0}"))
        for name, figure in each.state.figures.items():
            rows.append((each.name, name, figure.value, figure.unit, figure.window,
                         f"{each.name}, record or sample of {_utc(figure.at)} UTC"))  # fmt: skip
    head = ("phase", "figure", "value", "unit", "window", "file")
    yield from _table("Figures", head, rows)


def _utc(ts: float) -> str:
    return clock(ts, "%Y-%m-%d %H:%M:%S", utc=True)


def _sweeps(path: Path) -> Iterator[str]:
    """Yields the comparison of each sweep, or why the sweeps cannot be compared."""
    yield from ("", "## Sweeps", "")
    try:
        found = sweep.sweeps(path)
    except ContractError as error:
        yield f"    not compared: {clean(str(error), MAX_CELL)}"
        return
    yield from (f"    {clean(line, MAX_CELL)}" for each in found for line in each.lines())


def _expected(phases: Sequence[Phase]) -> Iterator[str]:
    """Yields what the plan expects, what was measured, and the times that the gates imply."""
    rows = [row for each in phases for row in _expectations(each)]
    yield from _table("Expected and actual", ("phase", "figure", "expected", "actual", ""), rows)


def _expectations(phase: Phase) -> Iterator[Sequence[object]]:
    settings = jsonl.mapping(phase.run, "settings")
    actual = {name: jsonl.integer(phase.env, name) for name in ("parameters", "tokens_per_step")}
    actual["seq_len"] = jsonl.integer(jsonl.mapping(settings, "data.seq_len"), "value")
    for name, value in actual.items():
        expected = jsonl.integer(jsonl.mapping(phase.planned, "expects"), name)
        if expected is not None:
            same = "" if expected == value else "DIFFERS"
            yield phase.name, name, f"{expected:,}", value and f"{value:,}", same
    yield from _durations(phase, actual["tokens_per_step"])


def _durations(phase: Phase, tokens: int | None) -> Iterator[Sequence[object]]:
    """Yields the time of all planned steps: expected, at the gate's speed, and as measured."""
    steps, speed = phase.state.steps_planned, phase.figures["toks_per_s"]
    if not steps or not tokens:
        return
    measured = _hours(steps * tokens, speed)
    if hours := jsonl.number(jsonl.mapping(phase.planned, "expects"), "hours"):
        yield phase.name, "time of all steps", f"{number(hours)} h", measured, "hours of the plan"
    bound = gates.demand(jsonl.mapping(phase.run, "gates").get(SPEED)).bound
    if type(bound) in (int, float) and bound > 0:
        implied = _hours(steps * tokens, bound)
        note = f"the bound of {SPEED} implies {implied} for {steps:,} steps of {tokens:,} tokens"
        yield phase.name, "time of all steps", implied, measured, note


def _hours(tokens: float, toks_per_s: float | None) -> str:
    return f"{number(tokens / toks_per_s / HOUR_S, 3)} h" if toks_per_s else "not measured"


def _environment(phases: Sequence[Phase]) -> Iterator[str]:
    """Yields the facts of `ENVIRONMENT`; phases with the same value share a row."""
    found: dict[tuple[str, str], list[str]] = {}
    for each in phases:
        for name in ENVIRONMENT:
            value = each.env.get(name, each.run.get(name))
            if isinstance(value, Mapping):
                value = ", ".join(
                    f"{clean(str(k), 40)} {clean(str(x), 80)}" for k, x in value.items()
                )
            if value not in (None, ""):
                found.setdefault((name, str(value)), []).append(each.name)
    rows = ((*fact, "all" if len(names) == len(phases) else ", ".join(names))
            for fact, names in found.items())  # fmt: skip
    yield from _table("Environment", ("fact", "value", "phases"), rows)


def _files(phases: Sequence[Phase]) -> Iterator[str]:
    """Yields the present and missing `FILES` of each phase; a CPU run needs no `ON_CUDA_ONLY`."""
    rows = []
    for each in phases:
        on_cpu = jsonl.mapping(each.env, "device").get("type") == "cpu"
        there = rundir.names(each.path) or []
        wanted = [name for name in FILES if not (on_cpu and name in ON_CUDA_ONLY)]
        missing = [x for x in wanted if not any(name.startswith(x) for name in there)]
        found = [name for name in there if name.startswith(FILES)]
        rows.append((each.name, ", ".join(found), ", ".join(missing) or "none"))
    yield from _table("Artefacts", ("phase", "present", "missing"), rows)


def _notes(source: RunSource, phases: Sequence[Phase]) -> Iterator[str]:
    """Yields events of operators: at most `MAX_ROWS`, from the last `EVENT_BYTES` of each file."""
    launch = source.launch_path if source.is_launch else None
    rows: list[Sequence[object]] = []
    for folder in (*([launch] if launch else []), *(each.path for each in phases)):
        if jsonl.size_bytes(folder / rundir.EVENTS) > EVENT_BYTES:
            rows.append((folder.name, "", "", "", "the file is long; older events are left out"))
        for line in read_end(folder / rundir.EVENTS, EVENT_BYTES, folder).split(b"\n"):
            event = jsonl.decode(line) or {}
            kind = jsonl.text(event, "kind")
            by = jsonl.text(event, "asked_by" if kind == "answer" else "by")
            if kind in OF_OPERATORS and by not in ("", "supervisor"):
                at, text = jsonl.number(event, "ts") or 0.0, jsonl.text(event, "text")
                rows.append((folder.name, _utc(at), by, kind, text))
    head = ("in", "time (UTC)", "by", "kind", "text")
    if len(rows) > MAX_ROWS:
        left = len(rows) - MAX_ROWS + 1
        rows = [("", "", "", "", f"{left:,} rows before the next row are left out"), *rows[left:]]
    yield from _table("Notes and requests", head, rows)


def _not_measured(phases: Sequence[Phase]) -> Iterator[str]:
    """Yields unknown gates, figures without a value, missing GPU samples, unreadable records."""
    rows: list[Sequence[object]] = []
    for each in phases:
        rows += [(each.name, f"gate {gate.name}", gate.why) for gate in each.state.gates
                 if gate.result == "unknown"]  # fmt: skip
        # A record may have a figure of the same name, but of another window.
        if lacking := [f"{name} ({window.format(steps=LAST_STEPS)})"
                       for name, (_, window, _) in FIGURES.items()
                       if each.figures[name] is None]:  # fmt: skip
            rows += [(each.name, ", ".join(lacking), "no value recorded, or records are missing")]
        if not each.state.gpus:
            rows.append((each.name, "use, power and memory of GPUs", "no sample has a GPU"))
        if each.state.skipped_records:
            rows.append((each.name, counted(each.state.skipped_records, "record"), "not readable"))
    yield from _table("Not measured", ("phase", "what", "why"), rows)


def _charts(phases: Sequence[Phase], stem: str) -> dict[str, str]:
    """Returns the charts of the phase with the most steps, by file name."""
    longest = max(phases, key=lambda each: each.state.step or 0)
    units = {name: figure.unit for name, figure in longest.state.figures.items()}
    drawn = {
        f"{stem}-{word}.svg": svg(
            f"{name} of {clean(longest.name, 60)}",
            units.get(name, ""),
            longest.source.series.points(name),
        )
        for name, word in CHARTS
    }
    return {name: text for name, text in drawn.items() if text}
