"""The commands that act: they start launches and supervisors, and send requests."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from console import access, actions, rest_of_launch
from console.action_table import ACTIONS
from console.actions import LaunchOptions
from console.commands.output import OutputError, print_error, print_line, show
from console.commands.query import follow
from console.sources import launches, liveness
from console.sources.process import command, program
from console.sources.run import RunSource
from console.sources.sanitize import clean
from trainers.contract.errors import ContractError, RefusedError, UsageError

SPARE_S = 1.0
"""Time that a request may take in addition to the time limit of its answer."""
T = TypeVar("T")


def pairs(words: Sequence[str], option: str) -> dict[str, str]:
    """Splits NAME=VALUE words. Raises UsageError for any other word."""
    result: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise UsageError(f"{option} {word!r} is not NAME=VALUE")
        result[name] = value
    return result


def _chosen(options: argparse.Namespace) -> LaunchOptions:
    """Returns the options of a launch. Raises UsageError if they do not fit together."""
    if (options.plan is None) == (options.config is None):
        raise UsageError(
            f"launch needs either PLAN or --config FILE; see {program()} launch --help"
        )
    if options.trainer and options.config is None:
        raise UsageError("--trainer needs --config; the phases of a plan name their own trainer")
    return LaunchOptions(
        plan=options.plan or "", config=options.config, trainer=options.trainer or "",
        phase=options.phase or "", flags=pairs(options.flag, "--flag"),
        sets=pairs(options.set, "--set"), nproc=options.nproc, devices=options.devices or "",
        run_dir=options.run_dir, between=options.between, root=options.root,
        assume_gpus=options.assume_gpus or "", digest=options.digest or "",
    )  # fmt: skip


def launch(options: argparse.Namespace) -> int:
    """Launches a plan or a config; --wait waits for the end; --dry-run launches nothing."""
    return _begin(_chosen(options), options)


def resume(options: argparse.Namespace) -> int:
    """Launches the rest of an ended launch: its phases from the first that did not pass."""
    access.check_working_directory()
    path = launches.find(options.run, options.root, act=True)
    if text := rest_of_launch.continued_words(path, options.root):
        if not (options.yes or options.dry_run):
            raise RefusedError(f"{text}; resume that launch, or add --yes to resume this one")
        print_error(f"warning: {text}")
    root, note = launches.root_to_resume(path, options.root), ""
    folder = rest_of_launch.working_directory(path)
    if folder is not None:
        path, root = path.absolute(), root.absolute()
        note = f"the working directory of the new launch is {folder}"
        os.chdir(folder)
    return _begin(LaunchOptions(resume=path, again=options.yes, root=root), options, note)


def _begin(chosen: LaunchOptions, options: argparse.Namespace, note: str = "") -> int:
    chosen = replace(chosen, measure=False) if options.dry_run else chosen
    prepared = actions.prepare(chosen, print_error)
    if note and prepared.ok:
        print_error(note)
    if options.dry_run:
        show(options.json, prepared.as_dict(), prepared.lines())
        return 0 if prepared.ok else 1
    for check in prepared.checks:
        if prepared.ok and check.result == "unknown":
            print_error(f"warning: {check.name}: {check.text}")
    path = actions.begin(prepared, actions.who())
    name = launches.launch_id(path)
    start = [f"{name}: {prepared.start()}"] if chosen.resume else []
    if options.wait:
        if not options.json:
            print_line(f"launched {name} in {path}; ctrl+c leaves, the run continues")
            for text in start:
                print_line(text)
        return follow(RunSource(path), options)
    known = chosen.run_dir is None and chosen.root == launches.ROOT
    line = f"launched {name} in {path}; to follow it: {command('watch', name if known else path)}"
    show(options.json, {"id": name, "path": str(path)}, [line, *start])
    return 0


def adopt(options: argparse.Namespace) -> int:
    """Starts a new supervisor for a launch whose supervisor has died."""
    path = launches.find(options.run, options.root, act=True)
    text = actions.adopt(path, options.yes, options.root)
    show(options.json, {"ok": True, "text": text}, (clean(text),))
    return 0


def act(options: argparse.Namespace) -> int:
    """Sends the action that the command, or an option of the command, selects."""
    name = getattr(options, "action", None) or options.command.name
    given = {each.name: getattr(options, each.name) for each in ACTIONS[name].args}
    return _request(options, name, {key: value for key, value in given.items() if value})


def do(options: argparse.Namespace) -> int:
    """Sends the action named on the command line: ACTION NAME=VALUE …"""
    return _request(options, options.action, pairs(options.args, "argument"))


def _request(options: argparse.Namespace, action: str, args: dict[str, Any]) -> int:
    """Sends one request and prints the answer. Raises ContractError if no answer comes in time."""
    path = launches.find(options.run, options.root, act=True)

    def answer() -> dict[str, Any] | None:
        request = actions.send(path, action, args, actions.who())
        return actions.answer(path, request, options.timeout)

    limit = f"within {options.timeout:g} s"
    unknown = f"delivery of {action} unknown; send {action} again"
    try:
        event = within(options.timeout + SPARE_S, answer)
    except TimeoutError:
        raise ContractError(
            f"the file system of {path} does not answer {limit}: {unknown} when the file system "
            "answers"
        ) from None
    except EOFError:
        raise ContractError(f"the process that accesses {path} died: {unknown}") from None
    if event is None:
        raise ContractError(
            f"no answer to {action} {limit}; the request remains and may still be executed; see "
            f"{command('status', path)}"
        )
    detail = event.get("detail")
    more = (f"  {clean(str(line))}" for line in (detail if isinstance(detail, list) else ()))
    name = launches.launch_id(launches.launch_of(path) or path)
    is_done = event.get("ok") is True
    try:
        show(options.json, event, (f"{name}: {clean(str(event.get('text', '')))}", *more))
    except OutputError as error:
        error.exit_code = error.exit_code if is_done else RefusedError.exit_code
        raise
    if is_done and action == "override":
        _update_report(launches.launch_of(path) or path)
    return 0 if is_done else RefusedError.exit_code


def _update_report(launch: Path) -> None:
    """Writes the report of an ended launch again; a sweep may take minutes."""
    from console.plans import report  # other commands do not need it

    output = launch / report.NAME
    if not output.exists() or liveness.is_locked(launch):
        return
    try:
        *_, files = report.versions(launch, output)
        report.save(files)
    except OSError as error:
        then = f"to write it, run: {command('report', launch, '--output', output)}"
        print_error(f"{output} is older than the override ({error.strerror}); {then}")


def within(limit_s: float, work: Callable[[], T]) -> T:
    """Runs `work` in a child process, because a disk may hang; returns its result.

    Raises the error of `work`, or EOFError if the child dies.

    A process that waits for a hung file system may survive KILL. So after `limit_s` seconds this
    function sends KILL and raises TimeoutError without a wait for the child.
    """
    reading, writing = Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        _work_in_child(work, writing.send)
    writing.close()
    try:
        if not reading.poll(limit_s):
            raise TimeoutError
        result, error = reading.recv()
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    os.waitpid(child, 0)
    if error is not None:
        raise error
    return result


def _work_in_child(work: Callable[[], T], answer: Callable[[object], None]) -> NoReturn:
    """Sends the result or the error of `work`, and ends the process.

    Descriptors 0-2 lead to /dev/null. Otherwise a program that reads the command's output would
    wait until this process ends.
    """
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        try:
            outcome = (work(), None)
        except Exception as error:
            outcome = (None, error)
        answer(outcome)
    finally:
        os._exit(0)
