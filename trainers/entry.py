"""The common part of the entry points: arguments, settings, run, training, exit code.

torch is imported after the settings are resolved, so that an error in the settings is reported
without the delay of this import.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from trainers import failures, settings
from trainers.command_line import Arguments, parse
from trainers.contract import dumps, environ, jsonl, rundir
from trainers.contract.errors import ContractError, RefusedError, UsageError
from trainers.contract.member import Member, open_run
from trainers.run_records import Report, write_document
from trainers.settings import AUTO, Resolved


def main(argv: Sequence[str] | None = None, entry: str = "trainers.ddp") -> int:
    """Trains; with --check prints the settings. Returns an exit code of docs/run-directory.md."""
    dumps.ignore()
    variables = environ.snapshot()
    try:
        arguments = parse(argv, entry, variables)
        resolved = settings.resolve(
            arguments.config, variables, arguments.overrides, entry, arguments.origins
        )
        if arguments.check:
            sys.stdout.write(json.dumps(resolved.as_dict(), indent=1) + "\n")
            return failures.DONE
        member = _join(arguments, variables, resolved)
    except (ContractError, OSError) as error:
        return _refuse(error, variables, entry)
    return _train(resolved, member, entry)


def exit_now(code: int) -> NoReturn:
    """Flushes stdout and stderr, then ends the process without further clean-up.

    This function destroys no process group, because destroying one can hang forever: with two gloo
    groups, 2 of 16 exits hung.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # as in `_say`
            stream.flush()
    os._exit(code)


def _say(text: str) -> None:
    """Writes to stderr if that is possible.

    Stderr may be a log on a full disk, and the exit code must not depend on this.
    """
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


def _join(arguments: Arguments, variables: Mapping[str, str], resolved: Resolved) -> Member:
    """Returns this rank's `Member` of its run.

    Raises UsageError, for example if --run-dir is needed and missing. Raises RefusedError if the
    directory cannot be used, for example because a training in it is alive.
    """
    supervised = environ.RUN_ID in variables
    resumes = resolved.settings.checkpoint.resume == AUTO and not supervised
    if resumes and arguments.run_dir is None:
        raise UsageError("--resume needs the run directory; name it with --run-dir")
    run, variables = open_run(arguments.run_dir or _default_run(arguments, variables, resolved))
    rank = environ.integer(variables, "RANK", 0)
    mine = rundir.heartbeat(run, rank)
    if not (supervised or resumes) and mine.exists():
        raise RefusedError(
            f"{run} already contains a run ({mine.name}); pass another with --run-dir, or resume "
            "it with --set checkpoint.resume=auto"
        )
    rundir.lock_rank(run, rank)
    if resumes:
        # Each rank reads the number of earlier attempts before rank 0 writes env.json again. An
        # attempt that failed before its resume has written only metrics.json.
        documents = (rundir.read_json(run / name) or {} for name in (rundir.ENV, rundir.METRICS))
        earlier = max(jsonl.integer(each, "attempt") or 0 for each in documents)
        variables = variables | {environ.ATTEMPT: str(earlier + 1)}
    return Member(run, variables)


def _default_run(arguments: Arguments, variables: Mapping[str, str], resolved: Resolved) -> Path:
    """Returns a directory whose name is the start time of torchrun, or else the present time."""
    started = _started_at(os.getppid()) if "RANK" in variables else None
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(started))
    name = arguments.config.stem if arguments.config else "default"
    return Path(resolved.settings.report.out_dir or f"artifacts/{name}") / stamp


def _started_at(pid: int) -> float | None:
    """Returns the start time of a process in unix seconds, or None if it is not available."""
    ticks = rundir.start_ticks(pid)
    boot = re.search(r"^btime (\d+)$", Path("/proc/stat").read_text(encoding="ascii"), re.MULTILINE)
    if ticks is None or boot is None:
        return None
    return int(boot[1]) + ticks / os.sysconf("SC_CLK_TCK")


def _refuse(error: ContractError | OSError, variables: Mapping[str, str], entry: str) -> int:
    """Writes one sentence to stderr and, if a supervisor started this rank, to the run.

    Without a supervisor, the run gets no records, because a directory that was named by hand may
    belong to another run. Returns the exit code.
    """
    code, sentence = failures.CONFIG, str(error)
    directory, member = variables.get(environ.RUN_DIR), None
    try:
        if directory and environ.RUN_ID in variables:
            member = Member(Path(directory), variables)
    except (UsageError, OSError) as unusable:
        sentence += f" (and the run gets no record: {unusable})"
    _say(f"{entry}: {sentence}\n")
    if member is not None:
        write_document(member, rundir.METRICS, steps_done=0, reason=sentence, exit_code=code)
        _fail(member, code, sentence, type(error).__name__)
    return code


def _train(resolved: Resolved, member: Member, entry: str) -> int:
    """Trains and records the end. Returns the exit code."""
    member.start()
    member.record("boot", 0)
    report = Report(resolved, member)
    try:
        from trainers.loop import train

        reason = train(resolved.settings, member, report)
    except Exception as error:
        code, sentence = failures.classify(error)
        _say(traceback.format_exc() if code == failures.BUG else f"{entry}: {sentence}\n")
        report.metrics(sentence, code)
        return _fail(member, code, sentence, type(error).__name__)
    report.metrics(reason, failures.DONE)
    member.close(report.steps_done, reason=reason, exit_code=failures.DONE)
    return failures.DONE


def _fail(member: Member, code: int, sentence: str, kind: str) -> int:
    """Writes the last records of a failed run. Returns `code`."""
    step = member.pulse.step
    member.record("error", step, error=sentence, error_class=kind, exit_code=code)
    member.close(step, reason=sentence, exit_code=code)
    return code
