"""The commands runs, status, check, compare, report, logs, flags and plans.

`check --end-leftovers` ends processes, and `report --output` writes files. Otherwise these commands
do not change a launch or run.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

from console import access, status_text
from console.commands.output import (
    Changes,
    print_error,
    print_line,
    show,
    show_progress,
)
from console.commands.table import regex
from console.model import ENDED_EARLY, LIVE_STATES, RESULTS, UNHEALTHY_STATES, RunState
from console.plans.gate_check import poll_confirmed, so_far
from console.sources import launches, liveness
from console.sources.process import command, program
from console.sources.run import RunSource
from console.sources.sanitize import clean
from trainers.contract import rundir
from trainers.contract.errors import NotFoundError, RefusedError, UsageError

LOGS_POLL_S, FOLLOW_POLL_S = 0.5, 1.0
FULL_BYTES = 8 << 20


def source(options: argparse.Namespace) -> RunSource:
    return RunSource(launches.find(options.run, options.root))


def runs(options: argparse.Namespace) -> int:
    """Lists the newest launches and runs without a launch, at most `--limit`, newest first."""
    access.check_listable(options.root)
    if options.root != launches.ROOT and not options.root.is_dir():
        raise NotFoundError(f"there is no directory {options.root}, so there are no launches")
    rows, lines = [], [("launch", "phase", "state", "step", "why")]
    for path in launches.launches_and_bare_runs(options.root)[: options.limit]:
        state = poll_confirmed(RunSource(path))
        launch = state.launch
        name, plan, of_launch, current, phase = str(path), None, None, "-", "by hand"
        if launch is not None:
            name, plan, of_launch, current = launch.id, launch.plan, launch.state, launch.current
            phase = launch.phases[launch.phase].numbered if launch.phases else "-"
        word, why = status_text.outcome(state)
        rows.append({
            "id": name, "path": str(path), "plan": plan, "launch": of_launch,
            "phase": current or "-", "state": word, "step": state.step, "why": why,
            "attempt": state.attempt, "exit_code": status_text.exit_code(state, whole=True),
        })  # fmt: skip
        step = "-" if state.step is None else f"{state.step:,}"
        again = f"attempt {state.attempt}; " if state.attempt > 1 else ""
        lines.append((clean(name, 200), phase, word, step, again + why))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    none = f"no launches under {options.root}; start one with {program()} launch PLAN"
    shown = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
    show(options.json, rows, shown if rows else [none])
    return 0


def status(options: argparse.Namespace) -> int:
    """Prints the state, ranks, alerts and gates of a run."""
    run = source(options)
    state = poll_confirmed(run)
    lines = status_text.status_lines(state, run.is_launch, options.all)
    resume = (f"  {line}" for line in resume_lines(state, options.root))
    show(options.json, status_text.as_json(state, run.is_launch), [*lines, *resume])
    return status_text.exit_code(state, run.is_launch)


def resume_lines(state: RunState, root: Path) -> list[str]:
    """Returns the lines on how an ended or unsupervised launch can continue, if any.

    If another launch already continues it, the line names this launch. Otherwise each line has a
    command that resumes an ended launch, starts its phase again or accepts a gate. For a copied or
    moved launch, the line says why there is no command.
    """
    launch, own = state.launch, state.own_phase
    if launch is None or own is None or launch.state not in ("ended", "unsupervised"):
        return []
    from console import rest_of_launch

    if text := rest_of_launch.continued_words(Path(launch.path), root):
        return [text]
    if launch.state == "unsupervised":
        return []
    path = Path(launch.path)
    path = path.resolve() if path.is_symlink() else path  # an action on a link is rejected
    if state.can_resume or state.state in ENDED_EARLY:
        how = "resume" if state.can_resume else f"start {own.sweep or own.name} again"
        found = [f"to {how}, run: {command('resume', path)}"]
    else:
        gates = [each.name for each in state.gates if each.blocks and state.state == "completed"]
        words = ("override", path, "--phase", own.name, "--reason", "TEXT", "--gate")
        found = [f"to accept this result, run: {command(*words, name)}" for name in gates]
    moved = next(filter(None, map(launches.why_not_in_place, launches.run_directories(path))), "")
    return [f"it cannot continue from here: {moved}"] if moved and found else found


def follow(run: RunSource, options: argparse.Namespace, until_waiting: bool = False) -> int:
    """Prints changes, and the result at the end of a run or launch; returns the last exit code.

    With the option `--json` only the last state is printed. With `until_waiting` the function also
    returns when the launch waits for confirmation.
    """
    changes = Changes()
    while True:
        state = poll_confirmed(run)
        for sentence in changes.sentences(state, time.monotonic()):
            if not options.json:
                print_line(sentence)
        waits = state.launch is not None and state.launch.state == "waiting"
        if status_text.is_over(state, run.is_launch) or (until_waiting and waits):
            break
        time.sleep(FOLLOW_POLL_S)
    code = status_text.exit_code(state, run.is_launch)
    result = [] if waits else [_result(state, run.is_launch, code)]
    lines = [*result, *resume_lines(state, options.root)]
    show(options.json, status_text.as_json(state, run.is_launch), lines)
    return code


def check(options: argparse.Namespace) -> int:
    """Prints go or no go, for a plan or a run."""
    from console.plans import catalog

    if catalog.is_plan(options.run):
        return _check_plan(options)
    if options.measure or options.end_leftovers:
        text = f"--measure and --end-leftovers need a plan; {options.run!r} is not a plan"
        raise UsageError(text)
    try:
        return _check_run(options)
    except NotFoundError as error:
        raise NotFoundError(f"{error}; {command('plans')} lists the plans") from None


def _check_plan(options: argparse.Namespace) -> int:
    from console import actions

    if options.end_leftovers:
        _end_leftovers(options.yes)
    chosen = actions.LaunchOptions(
        plan=options.run, root=options.root, assume_gpus=options.assume_gpus or "",
        measure=options.measure or None,
    )  # fmt: skip
    prepared = actions.prepare(chosen, print_error)
    lines = prepared.lines()[: len(prepared.checks) + len(prepared.training)]
    go = f"go if this machine had {chosen.assume_gpus}" if chosen.assume_gpus else "go"
    end = f"{go if prepared.ok else 'no go'}: preflight of the plan {prepared.plan.name}"
    show(options.json, prepared.as_dict(), [*lines, end])
    return 0 if prepared.ok else 1


def _end_leftovers(confirmed: bool) -> None:
    """Lists trainers without a supervisor, and ends the leftovers among them.

    Raises UsageError if there are leftovers and `confirmed` is False.
    """
    from console import leftovers

    found, others = leftovers.find()
    for text in (*others, *(f"{each.name} can be ended" for each in found)):
        print_error(text)
    if found and not confirmed:
        adopt = f"{program()} adopt RUN continues their run instead"
        raise UsageError(f"nothing was ended; add --yes to end these processes; {adopt}")
    for text in leftovers.end(found) if found else ["no process is a leftover of a launch"]:
        print_error(text)


def _check_run(options: argparse.Namespace) -> int:
    run = _read_all(options) if options.full else source(options)
    state = poll_confirmed(run)
    is_live = state.state in LIVE_STATES
    if is_live:
        state = replace(state, gates=so_far(run, state))
    code = status_text.exit_code(state, run.is_launch) or int(is_live)
    end = _so_far(state) if is_live and code <= 1 else _result(state, run.is_launch, code)
    gates, basis = status_text.as_json(state)["gates"], _basis(run, state)
    record = {"id": state.id, "state": state.state, "gates": gates, "basis": basis,
              "so_far": is_live, "exit_code": code}  # fmt: skip
    gate_lines = map(status_text.gate_line, state.gates)
    show(options.json, record, [*gate_lines, *filter(None, [basis]), end])
    return code


def _so_far(state: RunState) -> str:
    """Returns the state of a live run, and how many gates have passed, failed and are unknown."""
    counts = Counter(gate.result for gate in state.gates)
    words = [f"{counts[result]} {status_text.RESULT_WORDS[result]}" for result in reversed(RESULTS)]
    has_gates = state.own_phase is not None and state.own_phase.has_gates
    none = "no gate has been evaluated yet" if has_gates else "it has no gates"
    gates = f"gates so far: {', '.join(words)}" if state.gates else none
    why = f": {state.why}" if state.state in UNHEALTHY_STATES else ""
    failed = ", ".join(gate.name for gate in state.gates if gate.result == "fail" and gate.blocks)
    no_go = f"no go without an override of {failed}" if failed else "no go yet"
    return f"{no_go}; {state.id} is {state.state}{why}; {gates}"


def _basis(run: RunSource, state: RunState) -> str:
    """Returns the files and records that the gates are based on, or "" for a run without gates."""
    if not state.gates:
        return ""
    is_live = state.state in LIVE_STATES
    if not is_live and (state.state != "completed" or any(gate.blocks for gate in state.gates)):
        return f"based only on {rundir.GATES}"
    has_snapshot, ts, count = run.counted
    records = status_text.counted(count, "record")
    if has_snapshot:
        age = status_text.age(liveness.age(ts))
        records = f"{rundir.SNAPSHOT} of {age} ago and {records} after it"
    else:
        has_all = run.has_all_records and not state.behind_bytes
        records = f"all {records}" if has_all else f"the {records} that were read"
    return f"based on {'' if is_live else f'{rundir.GATES} and '}{records}"


def _read_all(options: argparse.Namespace) -> RunSource:
    """Returns a source that has read all records; on a terminal, shows the progress."""
    run = RunSource(launches.find(options.run, options.root), FULL_BYTES, reads="all")
    most = 0

    def show_left(left: int) -> None:
        nonlocal most
        most = max(most, left)
        show_progress(1 - left / most, f"of {status_text.size(most)}")

    run.read_all(show_left)
    show_progress(None)
    return run


def _result(state: RunState, whole: bool, code: int) -> str:
    """Returns "go" or "no go" with the reasons, for the exit code of a run or launch."""
    return _no_go(state, whole) if code else _go(state, whole)


def _no_go(state: RunState, whole: bool) -> str:
    """Returns the text of the alert `NO_GO`, or else "no go" with the reasons."""
    if text := status_text.no_go(state):
        return text
    word, why = status_text.outcome(state, whole)
    name = state.launch.id if whole and state.launch and word != state.state else state.id
    names_no_gate = state.state == "completed" and word in ("completed", "waiting", "unsupervised")
    missed = status_text.not_passed(state.gates) if names_no_gate else ""
    doubt = state.launch.doubt if state.launch else ""
    doubt = "" if doubt in why else doubt
    reasons = filter(None, (status_text.with_word(word, why), missed, doubt))
    return f"no go; {name}: {'; '.join(reasons)}"


def _go(state: RunState, whole: bool) -> str:
    """Returns "go", "go so far" with the phases that have not started, or "go; no gates"."""
    launch = state.launch if whole else None
    if rest := [phase.name for phase in launch.rest] if launch else []:
        return f"go so far; not started: {', '.join(rest)}"
    has_gates = any(phase.has_gates for phase in launch.phases) if launch else state.gates
    return "go" if has_gates else "go; no gates"


def compare(options: argparse.Namespace) -> int:
    """Prints the comparison of each sweep of a launch."""
    from console.plans import sweep

    path = launches.find(options.run, options.root)
    found = sweep.sweeps(launches.launch_of(path) or path)
    lines = [clean(line, 400) for each in found for line in each.lines()]
    show(options.json, [each.as_dict() for each in found], lines)
    return 1 if any(each.refusal for each in found) else 0


def report(options: argparse.Namespace) -> int:
    """Prints the report as Markdown, or writes the report and its charts to files."""
    from console.plans import report as reports

    path = launches.find(options.run, options.root)
    output = options.output
    if output is None:
        *_, files = reports.versions(path)
        show(options.json, {"path": str(path), "report": files[path]}, [files[path].rstrip("\n")])
        return 0
    if output.suffix != ".md" or not output.parent.is_dir():
        raise UsageError(f"--output {output}: it must be NAME.md, in an existing directory")
    try:
        *_, files = reports.versions(path, output)
        reports.save(files)
    except OSError as error:
        raise RefusedError(f"cannot write {output}: {error.strerror}") from error
    names = [str(each) for each in files]
    show(options.json, {"path": str(path), "files": names}, [f"wrote {', '.join(names)}"])
    return 0


def logs(options: argparse.Namespace) -> int:
    """Prints the logs of one attempt, merged or one of them; --follow prints new lines."""
    from console.sources.logs import LogSource

    run = source(options)
    state = run.poll()
    if run.run_path is None:
        raise NotFoundError(f"{options.run} has no run yet, so it has no logs")
    if run.launch_path is None and not rundir.logs(run.run_path, state.attempt).is_dir():
        raise NotFoundError(f"{state.id} has no logs; a run that was started by hand writes none")
    if options.attempt:
        _must_have_attempt(run.run_path, state, options)
        state = replace(state, attempt=options.attempt)
    if isinstance(options.rank, int) and not options.follow:
        _must_have_rank(run.run_path, state, options.rank)
    pattern = options.grep or regex("")
    reader = LogSource(run.run_path, state.attempt)
    wanted = f"r{options.rank}" if isinstance(options.rank, int) else options.rank
    over = not options.follow or status_text.is_over(state, run.is_launch)
    while True:
        changed = (reader.run, reader.attempt) != (run.run_path, state.attempt)
        while (fresh := reader.poll(over or changed)) or reader.is_behind:
            for line in fresh:
                if wanted in (None, line.source) and pattern.search(line.text):
                    text = f"{line.source:<8} {line.text}"
                    show(options.json, {"source": line.source, "text": line.text}, [text])
        if changed:
            reader = reader.next(run.run_path, state.attempt)
        elif over:
            return 0
        else:
            time.sleep(LOGS_POLL_S)
            state = run.poll()
            over = status_text.is_over(state, run.is_launch)


def _must_have_attempt(run: Path, state: RunState, options: argparse.Namespace) -> None:
    """Raises NotFoundError for an attempt without logs, and UsageError with `--follow`."""
    from console.sources.logs import attempts

    if options.follow:
        raise UsageError("--follow prints the newest attempt; omit --attempt")
    if options.attempt not in (known := attempts(run)):
        numbers = ", ".join(status_text.spans(known)) or "none"
        text = f"{state.id} has no logs of attempt {options.attempt}; attempts with logs: {numbers}"
        raise NotFoundError(text)


def _must_have_rank(run: Path, state: RunState, rank: int) -> None:
    """Raises NotFoundError for an unknown rank that has no log."""
    known = [each.rank for each in state.ranks]
    if rank not in known and not rundir.rank_log(run, state.attempt, rank).exists():
        has = f"it has ranks {known[0]} to {known[-1]}" if known else "it has no rank yet"
        raise NotFoundError(f"{state.id} has no rank {rank}; {has}")


def flags(options: argparse.Namespace) -> int:
    """Prints the registry of environment flags."""
    from trainers.contract.flags import FLAGS, expected

    records = [
        {
            "name": flag.name, "default": flag.default, "takes": expected(flag),
            "group": flag.group, "help": flag.key.help, "setting": flag.setting,
        }
        for flag in FLAGS.values()
    ]  # fmt: skip
    lines = []
    for group, found in itertools.groupby(FLAGS.values(), key=lambda flag: flag.group):
        lines.append(group)
        for flag in found:
            default = f"default {flag.default or 'empty'}" if flag.setting else "default: unset"
            lines.append(f"  {flag.name:<26} {flag.key.help} ({expected(flag)}; {default})")
    show(options.json, records, lines)
    return 0


def plans(options: argparse.Namespace) -> int:
    """Prints the registry of plans."""
    from console.plans import catalog

    found, wrong = catalog.plans()
    lines = []
    for plan in found:
        names = dict.fromkeys(
            f"{phase.sweep} (sweep)" if phase.sweep else phase.name for phase in plan.phases
        )
        lines.append(f"{plan.name}: {plan.about} Phases: {', '.join(names)}")
    show(options.json, [plan.as_dict() for plan in found], lines)
    for sentence in wrong:
        print_error(sentence)
    return UsageError.exit_code if wrong else 0
