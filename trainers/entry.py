"""What the entry points share: words -> settings -> membership -> training -> exit code.

torch is imported after the settings are right, so a wrong configuration is said at once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from trainers import failures, settings
from trainers.contract import dumps, environ, rundir
from trainers.contract.errors import ContractError, RefusedError, UsageError
from trainers.contract.member import Member, open_run
from trainers.report import Report, write_metrics
from trainers.settings import Resolved


def main(words: Sequence[str] | None = None) -> int:
    """Parses, resolves, trains and closes. Returns the exit code of docs/run-directory.md."""
    dumps.ignore_until_installed()
    variables = environ.snapshot()
    try:
        arguments = _parse(words)
        overrides = dict(_override(word) for word in arguments.set)
        resolved = settings.resolve(arguments.config, variables, overrides)
        if arguments.check:
            sys.stdout.write(json.dumps(resolved.as_dict(), indent=1) + "\n")
            return failures.DONE
        member = _join(arguments, variables)
    except (ContractError, OSError) as error:
        return _refuse(error, variables)
    return _train(resolved, member)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, like everything else here."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; python -m trainers.ddp --help shows the options")


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(prog="trainers.ddp", description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", type=Path, help="YAML file of settings")
    set_help = "override one setting, e.g. train.steps=10; may be repeated"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=set_help)
    run_help = "run directory (default artifacts/<config>/<UTC time>)"
    parser.add_argument("--run-dir", type=Path, help=run_help)
    check_help = "print all settings with their origins as JSON and stop"
    parser.add_argument("--check", action="store_true", help=check_help)
    return parser.parse_args(words)


def _override(word: str) -> tuple[str, str]:
    key, separator, value = word.partition("=")
    if not separator or not key:
        raise UsageError(f"--set {word!r} has no value; write --set KEY=VALUE")
    return key, value


def _join(arguments: argparse.Namespace, variables: Mapping[str, str]) -> Member:
    """Returns the membership of this rank. Raises RefusedError for a directory in use."""
    run, variables = open_run(arguments.run_dir or _default_run(arguments.config, variables))
    supervised = environ.RUN_ID in variables
    mine = rundir.heartbeat(run, int(variables.get("RANK", "0")))
    if not supervised and mine.exists():
        raise RefusedError(f"{run} already holds a run ({mine.name}); give another with --run-dir")
    return Member(run, variables)


def _default_run(config: Path | None, variables: Mapping[str, str]) -> Path:
    """Returns a directory that all ranks of one torchrun name alike, without talking."""
    if int(variables.get("GROUP_WORLD_SIZE", "1")) > 1:
        raise UsageError("ranks on several hosts need one run directory; give it with --run-dir")
    started = time.time()
    if "RANK" in variables:
        started = _started_at(os.getppid()) or started
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(started))
    return Path("artifacts") / (config.stem if config else "default") / stamp


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
