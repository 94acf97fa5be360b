"""`nsa-console`: every action of the screen as a subcommand, and the screen without one.

Textual, yaml and psutil are imported only where a command needs them, so that `status --json`
costs what Python costs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from console import plain
from console.sources import launches
from console.sources.sanitize import clean
from trainers.contract.errors import ContractError, UsageError

if TYPE_CHECKING:
    from console.actions import LaunchOptions

EXITS = """exit codes: 0 done, healthy, or completed with all gates passed; 1 a gate or check
failed; 2 wrong words; 3 no such run; 4 refused, halted or stopped by someone; 5 failed,
crashed or lost"""
ANSWER_S = 15.0
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the documented exit code, never a traceback for bad input."""
    options = build_parser().parse_args(argv)
    try:
        return options.command(options)
    except ContractError as error:
        if getattr(options, "json", False):
            emit({"error": str(error), "exit_code": error.exit_code})
        print(f"nsa-console: {clean(str(error))}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    except KeyboardInterrupt:
        say("left; nothing was stopped, runs go on")
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


def emit(record: Any) -> None:
    say(json.dumps(record, indent=1, default=str))


def source(options: argparse.Namespace) -> Any:
    from console.sources.run import RunSource

    return RunSource(launches.find(options.run, options.root))


# --- looking ---------------------------------------------------------------------------------


def screen(options: argparse.Namespace) -> int:
    """Opens the screen on a run, or on the plan that fits this machine."""
    if not sys.stdout.isatty() or not sys.stdin.isatty():
        raise UsageError("the screen needs a terminal; use a subcommand (nsa-console --help)")
    path = launches.find(options.run, options.root) if options.run else None
    from console.tui.app import run

    return run(path, options.plan, options.root, options.mouse)


def runs(options: argparse.Namespace) -> int:
    """Lists launches, newest first."""
    from console.sources.run import RunSource

    rows = []
    for path in launches.launches(options.root)[: options.limit]:
        state = RunSource(path).poll()
        launch = state.launch
        if launch is None:
            continue
        phase = launch.phases[launch.phase].name if launch.phases else "-"
        rows.append(
            {
                "id": launch.id, "path": str(path), "plan": launch.plan, "launch": launch.state,
                "phase": phase, "state": state.state, "step": state.step, "why": state.why,
            }
        )  # fmt: skip
    if options.json:
        emit(rows)
    elif not rows:
        say(f"no runs under {options.root}; start one with nsa-console launch PLAN")
    for row in rows if not options.json else ():
        step = "-" if row["step"] is None else f"{row['step']:,}"
        say(f"{row['id']:<32} {row['phase']:<12} {row['state']:<12} step {step:<8} {row['why']}")
    return 0


def status(options: argparse.Namespace) -> int:
    """Says how one run is."""
    state = source(options).poll()
    if options.json:
        emit(plain.as_json(state))
    else:
        for line in plain.status_lines(state):
            say(line)
    return plain.exit_code(state)


def watch(options: argparse.Namespace) -> int:
    """Follows one run until it ends: one sentence a change, or the screen."""
    if not options.plain and not options.json:
        return screen(options)
    return follow(source(options), options.json, options.interval)


def follow(run: Any, as_json: bool, interval_s: float = 1.0) -> int:
    """Says what changes until nothing more comes; returns the exit code of the end."""
    changes = plain.Changes()
    while True:
        state = run.poll()
        for sentence in changes.sentences(state, time.monotonic()):
            if not as_json:
                say(sentence)
        if plain.is_over(state):
            break
        time.sleep(interval_s)
    code = plain.launch_exit_code(state.launch) if state.launch else plain.exit_code(state)
    if as_json:
        emit(plain.as_json(state) | {"exit_code": code})
    return code


def logs(options: argparse.Namespace) -> int:
    """Prints the logs of a run, merged or of one rank."""
    from console.sources.logs import LogSource

    run = source(options)
    state = run.poll()
    if run.run_path is None:
        raise UsageError(f"{options.run} has no run yet, so no logs")
    try:
        pattern = re.compile(options.grep) if options.grep else None
    except re.error as error:
        raise UsageError(f"--grep {options.grep!r} is no regular expression: {error}") from None
    reader = LogSource(run.run_path, state.attempt)
    wanted = None if options.rank is None else f"r{options.rank}"
    over = not options.follow
    while True:
        while fresh := reader.poll():
            for line in fresh:
                shown = (wanted is None or line.source == wanted) and (
                    pattern is None or pattern.search(line.text)
                )
                if shown and options.json:
                    emit({"source": line.source, "text": line.text})
                elif shown:
                    say(f"{line.source:<8} {line.text}")
        state = run.poll()
        if (reader.run, reader.attempt) != (run.run_path, state.attempt):
            reader = LogSource(run.run_path, state.attempt)
        elif over:
            return 0
        else:
            time.sleep(0.5)
        over = plain.is_over(state)


def flags(options: argparse.Namespace) -> int:
    """Prints the registry of environment flags."""
    from trainers.contract.flags import TABLE, expected

    if options.json:
        emit(
            [
                {
                    "name": flag.name, "default": flag.default, "takes": expected(flag),
                    "group": flag.group, "help": flag.help, "setting": flag.setting,
                }
                for flag in TABLE
            ]
        )  # fmt: skip
        return 0
    for group in dict.fromkeys(flag.group for flag in TABLE):
        say(f"{group}")
        for flag in TABLE:
            if flag.group == group:
                default = f"default {flag.default}" if flag.default else "unset: config decides"
                say(f"  {flag.name:<26} {flag.help} ({expected(flag)}; {default})")
    return 0


def plans(options: argparse.Namespace) -> int:
    """Prints the registry of plans."""
    from console.plans import catalog

    found = catalog.plans()
    if options.json:
        emit([plan.as_dict() for plan in found])
        return 0
    for plan in found:
        say(f"{plan.name}: {plan.about}")
        for phase in plan.phases:
            gates = ", ".join(f"{name} {bound}" for name, bound in phase.gates.items())
            say(f"  {phase.name:<12} {phase.nproc} processes; {phase.proves}")
            say(f"  {'':<12} gates: {gates or 'none'}")
    return 0


# --- acting ----------------------------------------------------------------------------------


def pairs(words: Sequence[str], option: str) -> dict[str, str]:
    """Splits NAME=VALUE words. Raises UsageError for a word without `=`."""
    result = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise UsageError(f"{option} {word!r} is not NAME=VALUE")
        result[name] = value
    return result


def launch_options(options: argparse.Namespace) -> LaunchOptions:
    from console.actions import LaunchOptions

    return LaunchOptions(
        plan=options.plan,
        phase=options.phase,
        flags=pairs(options.flag, "--flag"),
        sets=pairs(options.set, "--set"),
        nproc=options.nproc,
        devices=options.devices,
        run_dir=options.run_dir,
        between=options.between,
        root=options.root,
    )


def launch(options: argparse.Namespace) -> int:
    """Starts a plan and returns, or waits for its end."""
    from console import actions

    chosen = launch_options(options)
    if options.dry_run:
        prepared = actions.prepare(chosen)
        if options.json:
            emit(prepared.as_dict())
        else:
            for line in prepared.lines():
                say(line)
        return 0 if prepared.ok else 1
    path = actions.launch(chosen, actions.who())
    name = launches.launch_id(path)
    if not options.wait:
        if options.json:
            emit({"id": name, "path": str(path)})
        else:
            say(f"launched {name} in {path}; watch it: nsa-console watch {name}")
        return 0
    if not options.json:
        say(f"launched {name} in {path}; ctrl+c leaves, the run goes on")
    from console.sources.run import RunSource

    return follow(RunSource(path), options.json)


def check(options: argparse.Namespace) -> int:
    """Says go or no-go: the preflight of a plan, or the gates of a run so far."""
    from console import actions
    from console.plans import catalog

    if catalog.is_plan(options.what):
        prepared = actions.prepare(actions.LaunchOptions(plan=options.what, root=options.root))
        if options.json:
            emit(prepared.as_dict())
        else:
            for item in prepared.checks:
                say(f"{item.result:<8} {item.name}: {item.text}")
            say("go" if prepared.ok else "no go")
        return 0 if prepared.ok else 1
    options.run = options.what
    state = source(options).poll()
    failed = [gate for gate in state.gates if gate.result != "pass"]
    if options.json:
        emit({"id": state.id, "state": state.state, "gates": plain.as_json(state)["gates"]})
    else:
        for gate in state.gates:
            say(plain.gate_line(gate))
        if not state.gates:
            say(f"{state.id} is {state.state}; its gates are evaluated when it ends")
        else:
            say("no go" if failed else "go")
    return 1 if failed else 0


def ask(options: argparse.Namespace, action: str, args: dict[str, Any]) -> int:
    """Sends one request and prints the answer."""
    from console import actions

    path = launches.find(options.run, options.root)
    request = actions.send(path, action, args, actions.who())
    event = actions.answer(path, request, options.timeout)
    if event is None:
        event = {
            "request": request,
            "ok": False,
            "text": f"no answer to {action} within {options.timeout:g} s; the request stays, "
            f"look at nsa-console logs {options.run}",
        }
    if options.json:
        emit(event)
    else:
        say(clean(str(event.get("text", ""))))
        for line in event.get("detail") or ():
            say(f"  {clean(str(line))}")
    return 0 if event.get("ok") else 4


def dump(options: argparse.Namespace) -> int:
    """Takes the stacks of all ranks, or of one."""
    return ask(options, "dump", {} if options.rank is None else {"rank": options.rank})


def halt(options: argparse.Namespace) -> int:
    """Asks all ranks to stop at the same step and to save."""
    return ask(options, "halt", {})


def stop(options: argparse.Namespace) -> int:
    """Sends TERM, waits the grace time, then KILL, to the whole tree."""
    if options.kill and not options.yes:
        raise UsageError("stop --kill ends all ranks without a checkpoint; add --yes to mean it")
    return ask(options, "kill" if options.kill else "stop", {"yes": True} if options.kill else {})


def do(options: argparse.Namespace) -> int:
    """Sends any request of the contract: ACTION name=value …"""
    return ask(options, options.action, dict(pairs(options.args, "argument")))


# --- words -----------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="nsa-console",
        description="Launch, watch and diagnose NSA pre-training. Without a command: the screen.",
        epilog=EXITS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--root", type=Path, default=launches.ROOT, help="where launches lie")
    parser.add_argument("--plan", default="cpu_smoke", help="the plan that the screen offers")
    parser.add_argument(
        "--mouse", action=argparse.BooleanOptionalAction, help="mouse (default: off over SSH)"
    )
    parser.set_defaults(command=screen, run=None)
    commands = parser.add_subparsers(metavar="COMMAND")
    _add_launch(commands)
    _add_looking(commands)
    _add_acting(commands)
    return parser


def _command(
    commands: Any, name: str, function: Callable[[argparse.Namespace], int], run: bool = False
) -> argparse.ArgumentParser:
    text = (function.__doc__ or "").strip().splitlines()[0]
    command = commands.add_parser(name, help=text, description=text, epilog=EXITS)
    command.set_defaults(command=function)
    command.add_argument("--json", action="store_true", help="print data")
    if run:
        command.add_argument("run", metavar="RUN", help="directory, id, unique prefix or 'latest'")
    return command


def _add_launch(commands: Any) -> None:
    command = _command(commands, "launch", launch)
    command.add_argument("plan", metavar="PLAN", help="a name from `plans`, or a YAML file")
    command.add_argument("--phase", default="", help="only this phase")
    command.add_argument("--flag", action="append", default=[], metavar="NAME=VALUE")
    command.add_argument("--set", action="append", default=[], metavar="key=value")
    command.add_argument("--nproc", type=int, help="processes of every phase")
    command.add_argument("--devices", default="", help="GPUs, as CUDA_VISIBLE_DEVICES")
    command.add_argument("--run-dir", type=Path, help="this directory instead of a new one")
    command.add_argument("--between", choices=("go", "ask"), default="", help="between phases")
    command.add_argument("--wait", action="store_true", help="wait for the end")
    command.add_argument("--dry-run", action="store_true", help="print command and environment")


def _add_looking(commands: Any) -> None:
    command = _command(commands, "runs", runs)
    command.add_argument("--limit", type=int, default=50)
    _command(commands, "status", status, run=True)
    command = _command(commands, "watch", watch, run=True)
    command.add_argument("--plain", action="store_true", help="one sentence a change")
    command.add_argument("--interval", type=float, default=1.0, help="seconds between looks")
    command = _command(commands, "check", check)
    command.add_argument("what", metavar="PLAN|RUN")
    command = _command(commands, "logs", logs, run=True)
    command.add_argument("--rank", type=int)
    command.add_argument("--grep", default="", metavar="RE")
    command.add_argument("-f", "--follow", action="store_true")
    _command(commands, "flags", flags)
    _command(commands, "plans", plans)


def _add_acting(commands: Any) -> None:
    command = _command(commands, "dump", dump, run=True)
    command.add_argument("--rank", type=int)
    _command(commands, "halt", halt, run=True)
    command = _command(commands, "stop", stop, run=True)
    command.add_argument("--kill", action="store_true", help="KILL at once, no checkpoint")
    command.add_argument("--yes", action="store_true")
    command = _command(commands, "do", do, run=True)
    command.add_argument("action", metavar="ACTION")
    command.add_argument("args", nargs="*", metavar="name=value")
    for name in ("dump", "halt", "stop", "do"):
        commands.choices[name].add_argument("--timeout", type=float, default=ANSWER_S)


if __name__ == "__main__":
    sys.exit(main())
