"""Formats the state of a run: text lines, sentences, exit code and JSON."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from console.model import (
    CLOCK_S,
    END_MISSING,
    EXIT_CODES,
    LIVE_STATES,
    NO_GO,
    RANK_GONE,
    UNHEALTHY_STATES,
    Gate,
    LaunchState,
    PhaseState,
    Rank,
    RunState,
)

NOT_GOOD = 1
MOST_SPANS = 8
DASH = "–"
BRIEF = "<1s"
"""The time of a rank in its phase if it is below 1 s; most phases of a fast step are."""
NO_AGE = "age not available (its time is in the future or missing)"
OLD_S, STALLED_OLD_S = 30.0, 3.0
"""A live run, or a stalled run, shows the age of a figure only above this age."""
SHOWN = (
    "toks_per_s", "step_p50_s", "step_p99_s", "loss", "bytes_right", "grad_norm",
    "gate_entropy_mean", "gate_entropy_min", "gate_share_cmp", "gate_share_sel", "gate_share_win",
    "mfu", "gpu_mem_reserved", "rss_mib", "stalls",
)  # fmt: skip
"""The figures that `status` prints without `--all`."""
COUNTED = ("records", "restarts", "stalls", "steps", "non-finite steps")
"""Units that are shown in the singular for the value 1."""
RESULT_WORDS: Mapping[str, str] = {"pass": "passed", "fail": "failed", "unknown": "unknown"}
"""The words for the result of a gate."""


def age(seconds: float | None, least: str = "1s") -> str:
    """Returns an age in a few characters: `1s`, `74s`, `12m`, `3h05`, `2d`; `–` if not known.

    Seconds are rounded up, and an age below 1 s is `least`, so that a value that is always new
    shows a steady text. The age of a time that is more than `CLOCK_S` in the future is not known.
    """
    if seconds is None or not -CLOCK_S <= seconds < math.inf:
        return DASH
    if seconds <= 90:
        return least if seconds < 1 else f"{math.ceil(seconds)}s"
    if seconds < 5400:
        return f"{seconds / 60:.0f}m"
    if seconds < 48 * 3600:
        return f"{int(seconds // 3600)}h{int(seconds % 3600 // 60):02d}"
    return f"{seconds / 86400:.0f}d"


def clock(ts: float, form: str = "%H:%M:%S", utc: bool = False) -> str:
    """Returns a time as text, local by default.

    A record may have any number as its time, so the time is limited to the years 1970 to 4147.
    """
    convert = time.gmtime if utc else time.localtime
    return time.strftime(form, convert(max(0.0, min(ts, 1 << 36))))


def counted(count: int, thing: str) -> str:
    """Returns a count with its noun: "1 record", "2 records"."""
    plural = "" if count == 1 else "es" if thing.endswith("s") else "s"
    return f"{count:,} {thing}{plural}"


def spans(numbers: Iterable[int], dash: str = "-") -> list[str]:
    """Returns numbers as sorted ranges: ["0-2", "4"]."""
    found: list[list[int]] = []
    for each in sorted(numbers):
        if found and each == found[-1][1] + 1:
            found[-1][1] = each
        else:
            found.append([each, each])
    return [str(a) if a == b else f"{a}{dash}{b}" for a, b in found]


def rank_names(ranks: Iterable[int], one: str = "", many: str = "") -> str:
    """Returns the names of ranks, and a verb if given: "rank 3 waits", "ranks 0-2, 4 wait".

    If there are more than `MOST_SPANS` ranges, the number of all ranks replaces the later ranges.
    """
    numbers = list(ranks)
    found = spans(numbers)
    listed = ", ".join(found[:MOST_SPANS])
    if len(found) > MOST_SPANS:
        listed += f", … ({len(numbers):,} in all)"
    words = ("rank", listed, one) if len(numbers) == 1 else ("ranks", listed, many)
    return " ".join(words).rstrip()


def number(value: float | None, digits: int = 4) -> str:
    """Returns a number as text, or "-" for None.

    Numbers from 1e15 on, and fractions below 10 ** `digits`, have at most `digits` significant
    digits. Other finite numbers have no decimals, and a separator for thousands.
    """
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    if 10**digits - 0.5 <= abs(value) < 1e15 or (value == int(value) and abs(value) < 1e6):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def size(size_bytes: int) -> str:
    """Returns a size in the largest unit that fits."""
    for unit_bytes, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_bytes >= unit_bytes:
            return f"{size_bytes / unit_bytes:,.1f} {name}"
    return f"{size_bytes} bytes"


def exit_code(state: RunState, whole: bool = False) -> int:
    """Returns the documented exit code for the state of a run.

    With `whole`, if run and launch are over, the code is that of the launch. A live run of which a
    rank failed (`RANK_GONE`) is treated as crashed. Each of these facts turns the code 0 into 1: a
    gate blocks; the launch is in doubt; the records do not confirm the success (`no_go`); a live
    state needs an operator.
    """
    if whole and state.launch and is_over(state):
        return launch_exit_code(state.launch) or NOT_GOOD * bool(no_go(state))
    code = EXIT_CODES.get(state.state, 0)
    if state.state in LIVE_STATES and any(alert.id == RANK_GONE for alert in state.alerts):
        code = EXIT_CODES["crashed"]
    is_blocked = no_go(state) or any(gate.blocks for gate in state.gates)
    in_doubt = state.launch is not None and state.launch.doubt
    return code or NOT_GOOD * bool(is_blocked or in_doubt or state.state in UNHEALTHY_STATES)


def no_go(state: RunState) -> str:
    """Returns the text of the alert `NO_GO`, or "" without this alert."""
    return next((alert.text for alert in state.alerts if alert.id == NO_GO), "")


def launch_exit_code(launch: LaunchState) -> int:
    """Returns the exit code of a launch that is over.

    The first phase that ended badly decides. If no phase ended badly, the code is 1 if the
    documents of the launch have no phases or are in doubt, and 0 if all phases have completed. If a
    phase has not completed, the code is that of `lost` as long as the launch has not ended. After
    its end, the code is that of `halted` if an action or a `.HALT` ended it, or else 1.
    """
    for phase in launch.phases:
        code = EXIT_CODES.get(phase.state, 0)  # type: ignore[call-overload]
        if code:
            return code
        if phase.result not in ("", "pass"):
            return NOT_GOOD
    if launch.doubt or not launch.phases:
        return NOT_GOOD
    if all(phase.state == "completed" for phase in launch.phases):
        return 0
    if launch.state != "ended":
        return EXIT_CODES["lost"]
    return EXIT_CODES["halted"] if launch.ended_by else NOT_GOOD


def outcome(state: RunState, whole: bool = True) -> tuple[str, str]:
    """Returns a word and a sentence on a no go, else on a launch with `whole`, else on the run.

    The launch counts if it ended badly. It also counts if the run has completed and the next phase
    waits for an operator or has no supervisor.
    """
    launch = state.launch if whole else None
    code = launch_exit_code(launch) if launch and launch.state == "ended" else 0
    if no_go(state):
        return "gate unknown", no_go(state)
    left = f"; not started: {launch.not_started}" if launch and launch.not_started else ""
    is_blocked = left and state.state == "completed"
    if launch and is_blocked and launch.state in ("waiting", "unsupervised"):
        return launch.state, launch.why + left
    if launch is None or code == 0:
        return state.state, state.why
    results = {phase.result for phase in launch.phases}
    failed = "fail" in results
    if launch.doubt and code == NOT_GOOD and not failed:
        return "unknown", launch.doubt
    gates = "gate failed" if failed else "gate unknown" if "unknown" in results else "incomplete"
    words = {NOT_GOOD: gates, EXIT_CODES["halted"]: "halted"}
    word = words.get(code, state.state) if state.state == "completed" else state.state
    return word, launch.why + left


def with_word(word: str, why: str) -> str:
    """Returns "WORD: SENTENCE", or only the sentence if it contains the word."""
    return ": ".join(filter(None, (word * (word not in why), why)))


def as_json(state: RunState, whole: bool = False) -> dict[str, Any]:
    """Returns a run's state as JSON data; docs/json.md describes the keys."""
    return dataclasses.asdict(state) | {"exit_code": exit_code(state, whole)}


def progress(state: RunState) -> str:
    if state.step is None:
        return "no step yet" if state.state in LIVE_STATES else "no step known"
    if state.steps_planned:
        share = 100 * state.step // state.steps_planned
        eta = f", ETA {age(state.eta_s)}" if state.eta_s else ""
        return f"step {state.step:,} of {state.steps_planned:,} ({share} %){eta}"
    return f"step {state.step:,}"


def is_unjoined(state: RunState) -> bool:
    """Returns whether a foreign program runs and none of its ranks has called `join`."""
    is_foreign = bool(state.ranks) and not state.decided
    return is_foreign and state.step is None and state.state in LIVE_STATES


def checkpoint_text(state: RunState) -> str:
    """Returns the checkpoint from which a resume would continue, or "" without one."""
    resumed = f"step {state.resumed_step:,}, from which this run resumed"
    return state.checkpoint or (resumed if state.resumed_step else "")


def status_lines(state: RunState, whole: bool = False, all_figures: bool = True) -> Iterator[str]:
    """Yields the lines of `status`, for example the state, ranks, figures, alerts and gates."""
    yield from _state_lines(state, whole)
    if state.data_age_s is not None or (state.ranks and state.state in LIVE_STATES):
        aged = NO_AGE if state.data_age_s is None else f"{age(state.data_age_s)} old"
        yield f"  newest data: {aged}"
    if state.armed and state.state in LIVE_STATES:
        yield f"  policy: {state.armed}"
    if state.backend:
        yield f"  attention: {state.backend}"
    if state.directory_blocked_s >= 1:
        blocked = age(state.directory_blocked_s)
        yield f"  no write to the run directory has finished for {blocked}; training continues"
    if state.skipped_records:
        yield f"  {skipped(state)} and {'is' if state.skipped_records == 1 else 'are'} skipped"
    yield from (f"  {rank_line(rank)}" for rank in state.ranks)
    yield from _figure_lines(state, all_figures)
    for alert in state.alerts:
        if alert.text == state.why and not alert.acknowledged:
            continue  # the second line says so
        yield f"  {alert.level.upper()} {'acknowledged: ' * alert.acknowledged}{alert.text}"
    if state.verdict:
        is_told = state.verdict.sentence == state.why
        said = "see above" if is_told else state.verdict.sentence
        yield f"  verdict ({state.verdict.sure}): {said}"
        yield from (f"    {mark} {line}" for mark, line in state.verdict.signs())
        if state.verdict.action:
            yield f"    next: {state.verdict.action}"
    yield from (f"  {gate_line(gate)}" for gate in state.gates)
    if saved := checkpoint_text(state):
        yield f"  checkpoint {saved}"
    if state.launch:
        yield from launch_lines(state.launch)


def oldest_s(state: RunState) -> float:
    """Returns the age above which a figure of a live run is shown with its age."""
    return STALLED_OLD_S if state.state == "stalled" else OLD_S


def _figure_lines(state: RunState, all_figures: bool) -> Iterator[str]:
    shown = [each for each in state.figures.items() if all_figures or each[0] in SHOWN]
    for name, figure in shown:
        old_s = time.time() - figure.at
        ago = f", {age(old_s)} ago" * (old_s > oldest_s(state) or state.state not in LIVE_STATES)
        yield f"  {name:<20} {number(figure.value):>12} {figure.unit:<10} {figure.window}{ago}"
    if left := len(state.figures) - len(shown):
        yield f"  {counted(left, 'more figure')}: status --all"


def _state_lines(state: RunState, whole: bool) -> Iterator[str]:
    word, why = outcome(state)
    if whole and state.launch and word != state.state:
        yield f"{state.launch.id}  {word.upper()}  {why}"
    again = f"attempt {state.attempt}  " if state.attempt > 1 else ""
    yield f"{state.id}  {state.state.upper()}  {again}{progress(state)}"
    if state.why:
        yield f"  {state.why}"


def skipped(state: RunState) -> str:
    """Returns how many records cannot be read; if only a part was read, names this part."""
    text = f"{counted(state.skipped_records, 'record')} cannot be read"
    return f"at least {text} ({state.skipped_in})" if state.skipped_in else text


def rank_line(rank: Rank) -> str:
    where = "no pulse"
    if rank.pulse is not None:
        pulse = rank.pulse
        since = "" if pulse.since_s is None else f" for {age(pulse.since_s, BRIEF)}"
        where = f"step {pulse.step:,} {pulse.phase}{since}"
    name = f"rank {rank.rank} pid {rank.pid}" if rank.pid else f"rank {rank.rank}"
    parts = [f"{name} {rank.exit}" if rank.exit else f"{name} {rank.state or '?'}  {where}"]
    if rank.cpu_pct is not None:
        parts.append(f"CPU {rank.cpu_pct:.0f} %")
    if rank.rss_mib is not None:
        parts.append(f"{rank.rss_mib:,.0f} MiB")
    gpu = rank.gpu
    if gpu is not None and gpu.state != "ok":
        parts.append(f"GPU {gpu.index} {gpu.state.upper()} {gpu.why}")
    elif gpu is not None and (gpu.util_pct, gpu.power_w) != (None, None):
        parts.append(f"GPU {gpu.index} {number(gpu.util_pct)} % {number(gpu.power_w)} W")
    return "  ".join(parts)


def gate_value(gate: Gate) -> str:
    """Returns the measured value of a gate with its unit, or "not measured"."""
    if gate.value is None:
        return "not measured"
    unit = gate.unit.removesuffix("s") if gate.value == 1 and gate.unit in COUNTED else gate.unit
    return f"{number(gate.value)} {unit}".strip()


def not_passed(gates: Sequence[Gate]) -> str:
    """Returns the gates that did not pass and have no override, with value and bound, or ""."""
    return "; ".join(
        f"gate {gate.name} {RESULT_WORDS[gate.result]} ({gate_value(gate)}, bound {gate.bound})"
        + (f": {gate.why}" if gate.result == "unknown" and gate.why else "")
        for gate in gates if gate.blocks
    )  # fmt: skip


def gate_line(gate: Gate) -> str:
    mark = {"pass": "ok  ", "fail": "FAIL", "unknown": "??  "}[gate.result]
    why = f"; {gate.why}" if gate.why else ""
    why += f"; overridden: {gate.override}" if gate.override else ""
    return (
        f"{mark} {gate.name}: {gate_value(gate)} ({gate.bound}; {gate.window}; {gate.source}){why}"
    )


def gates_text(phase: PhaseState) -> str:
    """Returns the result of the gates, or "" if the phase is not completed or has no result."""
    if phase.state != "completed" or not phase.result:
        return ""
    if phase.result == "pass" and not phase.has_gates:
        return "no gates"
    return f"gates {RESULT_WORDS.get(phase.result, 'unknown')}"


def continues_text(launch: LaunchState) -> str:
    """Returns the launches that this launch continues, or "" if there are none."""
    return f"continues {', '.join(launch.continues)}" if launch.continues else ""


def launch_lines(launch: LaunchState) -> Iterator[str]:
    yield f"  launch {launch.id} {launch.state}{': ' + launch.why if launch.why else ''}"
    if text := continues_text(launch):
        yield f"    {text}"
    for phase in launch.phases:
        mark = ">" if phase.index == launch.phase else " "
        gates = gates_text(phase)
        yield f"  {mark} {phase.numbered:<14} {phase.state}{f'  {gates}' if gates else ''}"
    for flag in launch.next_flags:
        phases = "all later phases" if flag.phases == "all" else "next phase"
        yield f"    {phases}: {flag.name}={flag.value} (set by {flag.by})"


def quoted(word: str) -> str:
    """Returns a word, quoted for a shell; a word that is not printable becomes `$'…'`."""
    if word.isprintable():
        return shlex.quote(word)
    hidden = rb"[^ -&(-\[\]-~]"  # also the quote and the backslash
    escaped = re.sub(hidden, lambda byte: b"\\x%02x" % byte[0][0], os.fsencode(word))
    return f"$'{escaped.decode()}'"


def shell_line(argv: Sequence[str], environment: Mapping[str, str]) -> str:
    """Returns a command and its environment variables as one line for a shell."""
    words = [f"{name}={quoted(value)}" for name, value in environment.items()]
    return " ".join([*words, *map(quoted, argv)])


def is_over(state: RunState, whole: bool = True) -> bool:
    """Returns whether a run does not continue; with `whole`, its launch must not continue either.

    A launch in the state `unknown` is ignored. Without `whole`, the launch decides only if the run
    is live, or if supervisor.json lacks its end.
    """
    launch, over = state.launch, state.state not in LIVE_STATES
    is_written = not any(alert.id == END_MISSING for alert in state.alerts)
    if launch is None or launch.state == "unknown" or (over and is_written and not whole):
        return over
    return not launch.under_way and (over or launch.state == "ended" or state.state == "queued")
