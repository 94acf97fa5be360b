"""The common part of the entry points: words -> settings -> membership -> training -> exit code.

torch is imported after the settings are right, so a wrong configuration is said at once.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from trainers import failures, settings
from trainers.command_line import Words, parse
from trainers.contract import dumps, environ, jsonl, rundir
from trainers.contract.errors import ContractError, RefusedError, UsageError
from trainers.contract.member import Member, open_run
from trainers.report import Report, write_metrics
from trainers.settings import AUTO, Resolved


def main(words: Sequence[str] | None = None, entry: str = "trainers.ddp") -> int:
    """Parses, resolves, trains and closes. Returns the exit code of docs/run-directory.md."""
    dumps.ignore()
    variables = environ.snapshot()
    try:
        said = parse(words, entry, variables)
        resolved = settings.resolve(said.config, variables, said.overrides, entry, said.origins)
        if said.check:
            sys.stdout.write(json.dumps(resolved.as_dict(), indent=1) + "\n")
            return failures.DONE
        member = _join(said, variables, resolved)
    except (ContractError, OSError) as error:
        return _refuse(error, variables)
    return _train(resolved, member)


def leave(code: int) -> NoReturn:
    """Ends this process at once; everything is written.

    Taking down process groups can hang for good: measured with two gloo groups, in 2 of 16 ends.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _join(said: Words, variables: Mapping[str, str], resolved: Resolved) -> Member:
    """Returns the membership of this rank. Raises RefusedError for a directory in use."""
    supervised = environ.RUN_ID in variables
    resumes = resolved.settings.checkpoint.resume == AUTO and not supervised
    if resumes and said.run_dir is None:
        raise UsageError("--resume goes on in a run directory; name it with --run-dir")
    run, variables = open_run(said.run_dir or _default_run(said, variables, resolved))
    mine = rundir.heartbeat(run, int(variables.get("RANK", "0")))
    if resumes:
        variables = dict(variables) | {environ.ATTEMPT: str(_attempts(run) + 1)}
    elif not supervised and mine.exists():
        raise RefusedError(
            f"{run} already holds a run ({mine.name}); give another with --run-dir, or go on "
            "with --set checkpoint.resume=auto"
        )
    return Member(run, variables)


def _attempts(run: Path) -> int:
    """Returns how many trainings this directory has seen; all ranks read it before any writes."""
    record = rundir.read_json(run / rundir.ENV) or {}
    return jsonl.integer(record, "attempt") or 0


def _default_run(said: Words, variables: Mapping[str, str], resolved: Resolved) -> Path:
    """Returns a directory that all ranks of one torchrun name alike, without talking."""
    if int(variables.get("GROUP_WORLD_SIZE", "1")) > 1:
        raise UsageError("ranks on several hosts need one run directory; give it with --run-dir")
    started = time.time()
    if "RANK" in variables:
        started = _started_at(os.getppid()) or started
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(started))
    out_dir = resolved.settings.report.out_dir
    return Path(out_dir or f"artifacts/{said.config.stem if said.config else 'default'}") / stamp


def _started_at(pid: int) -> float | None:
    """Returns when a process started, in unix seconds, None where the kernel does not say."""
    ticks = rundir.start_ticks(pid)
    lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
    boot = next((line.split()[1] for line in lines if line.startswith("btime ")), None)
    if ticks is None or boot is None:
        return None
    return int(boot) + ticks / os.sysconf("SC_CLK_TCK")


def _refuse(error: ContractError | OSError, variables: Mapping[str, str]) -> int:
    """Says one sentence on stderr and, where a run exists, in its heartbeat."""
    sentence = str(error)
    directory = Path(variables.get(environ.RUN_DIR, ""))
    if environ.RUN_DIR in variables and directory.is_dir():
        try:
            member = Member(directory, variables)
        except OSError as unwritable:
            sentence = f"{sentence} (and the run directory cannot be written: {unwritable})"
        else:
            _say(sentence)
            write_metrics(member, steps_done=0, reason=sentence, exit_code=failures.CONFIG)
            return _leave(member, failures.CONFIG, sentence, type(error).__name__)
    _say(sentence)
    return failures.CONFIG


def _train(resolved: Resolved, member: Member) -> int:
    """Trains and turns whatever happens into records and an exit code."""
    member.start()
    member.beat("boot", 0)
    report = Report(resolved, member)
    try:
        from trainers.loop import train

        reason = train(resolved.settings, member, report)
    except Exception as error:
        code, sentence = failures.classify(error)
        if code == failures.BUG:
            traceback.print_exc()
        else:
            _say(sentence)
        report.metrics(sentence, code)
        return _leave(member, code, sentence, type(error).__name__)
    report.metrics(reason, failures.DONE)
    member.close(report.steps_done, reason=reason, exit_code=failures.DONE)
    return failures.DONE


def _leave(member: Member, code: int, sentence: str, kind: str) -> int:
    """Writes the last records of a failed run."""
    step = member.pulse.step
    member.beat("error", step, error=sentence, error_class=kind, exit_code=code)
    member.close(step, reason=sentence, exit_code=code)
    return code


def _say(sentence: str) -> None:
    sys.stderr.write(f"trainers.ddp: {sentence}\n")
    sys.stderr.flush()
