"""`nsa-console`: every action of the screen as a subcommand, and the screen without one.

Textual, yaml and psutil are imported only where a command needs them, so that `status --json`
costs what Python costs.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from console.commands import output
from console.commands.output import OutputError
from console.sources import launches
from console.supervisor.requests import TABLE as ACTIONS
from trainers.contract.errors import ContractError, UsageError

EXITS: dict[int, str] = {
    0: "done; healthy; completed with all gates passed",
    1: "a gate or a check failed",
    2: "wrong words",
    3: "no such run",
    4: "refused; halted or stopped by someone",
    5: "failed, crashed or lost; not answered in time",
    6: "standard output takes nothing; what was asked for is done",
    130: "left by ctrl+c; runs go on",
}
ANSWER_S = 15.0
LONGEST_S = 86_400.0
LONGEST_NAME_BYTES, LONGEST_PATH_BYTES = 255, 4095
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns a documented exit code, never a traceback for bad input."""
    words = sys.argv[1:] if argv is None else list(argv)
    output.prepare()
    options = argparse.Namespace()
    try:
        parser = build_parser()
        for given in words:
            if given.startswith("--") and given.endswith("=--"):
                parser.error(f"{given}: -- is no value")  # argparse would make it an empty list
        parser.parse_args(words, options)
        return options.command(options)
    except SystemExit as ended:
        return int(ended.code or 0)
    except OutputError as error:
        if error.reader_left and not getattr(options, "acts", False):
            output.discard()
            return error.exit_code
        return output.complain(error, as_json=False)
    except ContractError as error:
        return output.complain(error, "--json" in words)
    except OSError as error:
        where = f"{os.fsdecode(error.filename)}: " if error.filename else ""
        return output.complain(ContractError(f"{where}{error.strerror}"), "--json" in words)
    except KeyboardInterrupt:
        output.tell("left; nothing was stopped, runs go on")
        return INTERRUPTED


def screen(options: argparse.Namespace) -> int:
    """Opens the screen on a run, or on the plan that fits this machine."""
    if not output.is_terminal():
        raise UsageError("the screen needs a terminal; use a subcommand (nsa-console --help)")
    path = launches.find(options.run, options.root) if options.run else None
    from console.tui.app import run

    return run(path, options.plan, options.root, options.mouse)


def watch(options: argparse.Namespace) -> int:
    """Follows one run until it ends: the screen, or one sentence a change."""
    if not options.plain and not options.json:
        return screen(options)
    from console.commands import looking

    return looking.watch(options)


# --- words -----------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """Raises UsageError for wrong words instead of printing a usage and leaving."""

    def __init__(self, **more: Any):
        more.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **more)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")

    def _print_message(self, message: str, file: Any = None) -> None:
        output.say(message.rstrip())


def word(text: str) -> str:
    """Returns a word that is not empty and holds no control character."""
    if not text.strip() or any(ord(character) < 32 for character in text):
        raise argparse.ArgumentTypeError(f"{text!r} is empty or holds control characters")
    return text


def path(text: str) -> Path:
    """Returns a path that a file system may know."""
    name = os.fsencode(word(text))
    longest = max(map(len, name.split(b"/")))
    if len(name) > LONGEST_PATH_BYTES or longest > LONGEST_NAME_BYTES:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}… is too long for a path")
    return Path(text)


def run_or_plan(text: str) -> str:
    """Returns a run's or a plan's name, or its path."""
    path(text)
    return text


def seconds(text: str) -> float:
    """Returns a time span in seconds."""
    value = float(text)
    if not (math.isfinite(value) and 0 < value <= LONGEST_S):
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most {LONGEST_S:g} seconds")
    return value


def count(text: str) -> int:
    """Returns a whole number of at least 1."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return value


def rank(text: str) -> int:
    """Returns a rank, 0 or above."""
    if (value := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"{text} is not a rank; ranks count from 0")
    return value


def _epilog(examples: Sequence[str], more: str = "") -> str:
    lines = ["examples:", *(f"  nsa-console {example}".rstrip() for example in examples), ""]
    lines += [more] if more else []
    lines += ["exit codes:", *(f"  {code:<3} {means}" for code, means in EXITS.items())]
    return "\n".join(lines)


def build_parser() -> Parser:
    """Returns the parser of all commands."""
    parser = Parser(
        prog="nsa-console",
        description="Launch, watch and diagnose NSA pre-training. Without a command: the screen.\n"
        "Options of this page stand before the command.",
        epilog=_epilog(("", "launch cpu_smoke", "status latest", "--root /data/runs runs")),
    )
    parser.add_argument(
        "--root", type=path, default=launches.ROOT, metavar="DIR",
        help="folder of the launches (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--plan", type=run_or_plan, default="cpu_smoke",
        help="plan that the screen offers (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--mouse", action=argparse.BooleanOptionalAction, help="mouse (default: off over SSH)"
    )
    parser.set_defaults(command=screen, run=None)
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")
    _add_looking(commands)
    _add_acting(commands)
    return parser


def _command(
    commands: Any, name: str, about: str, examples: Sequence[str], more: str = "",
    act: Callable[[argparse.Namespace], int] | None = None, module: str = "looking",
) -> Parser:  # fmt: skip
    """Adds a command; its function is the one of that name in `console.commands.<module>`."""

    def later(options: argparse.Namespace) -> int:
        return getattr(import_module(f"console.commands.{module}"), name)(options)

    command = commands.add_parser(
        name, help=about, description=about, epilog=_epilog(examples, more)
    )
    command.set_defaults(command=act or later, acts=module == "acting")
    command.add_argument("--json", action="store_true", help="print data: one JSON document a line")
    return command


def _add_run(command: Parser, metavar: str = "RUN", also: str = "") -> None:
    command.add_argument(
        "run", type=run_or_plan, metavar=metavar,
        help=f"{also}directory, id (PLAN-TIME or PLAN-TIME/PHASE), unique beginning of an id, "
        "or latest",
    )  # fmt: skip


def _add_looking(commands: Any) -> None:
    command = _command(
        commands, "runs", "List launches, newest first.", ("runs", "runs --limit 5 --json")
    )
    command.add_argument(
        "--limit", type=count, default=50, metavar="N", help="at most N (default: %(default)s)"
    )
    command = _command(
        commands, "status", "Say how one run is: state, ranks, alerts, gates.",
        ("status latest", "status latest --json"),
    )  # fmt: skip
    _add_run(command)
    command = _command(
        commands, "watch", "Follow one run until it ends.",
        ("watch latest", "watch latest --plain", "watch cpu_smoke-20261121-060500 --json"),
        "Without --plain and --json: the screen. --json prints the status at the end.\n", watch,
    )  # fmt: skip
    _add_run(command)
    command.add_argument("--plain", action="store_true", help="one sentence a change, no screen")
    command.add_argument(
        "--interval", type=seconds, default=1.0, metavar="SECONDS",
        help="time between two looks (default: %(default)s)",
    )  # fmt: skip
    command = _command(
        commands, "check", "Say go or no go: for a plan, or for a run so far.",
        ("check cpu_smoke", "check latest"),
        "A plan: can it start here and now? A run: its gates.\n",
    )  # fmt: skip
    _add_run(command, "PLAN|RUN", "a plan's name or YAML file; or a run: ")
    command = _command(
        commands, "logs", "Print the logs of a run, merged or of one rank.",
        ("logs latest", "logs latest --rank 0 -f", "logs latest --grep 'Error|warn'"),
    )  # fmt: skip
    _add_run(command)
    command.add_argument("--rank", type=rank, metavar="R", help="only this rank, from 0")
    command.add_argument("--grep", type=word, metavar="RE", help="only lines with this regex")
    command.add_argument("-f", "--follow", action="store_true", help="go on until the run ends")
    _command(commands, "flags", "Print the registry of environment flags.", ("flags",))
    _command(commands, "plans", "Print the registry of plans.", ("plans", "plans --json"))


def _add_acting(commands: Any) -> None:
    _add_launch(commands)
    command = _command(
        commands, "dump", "Take the stacks of all ranks, or of one.",
        ("dump latest", "dump latest --rank 1"), module="acting",
    )  # fmt: skip
    _add_run(command)
    command.add_argument("--rank", type=rank, metavar="R", help="only this rank, from 0")
    command = _command(
        commands, "halt", "Ask all ranks to stop at the same step and to save.",
        ("halt latest",), module="acting",
    )  # fmt: skip
    _add_run(command)
    command = _command(
        commands, "stop", "Send TERM, wait the grace time, KILL what is left.",
        ("stop latest", "stop latest --kill --yes"), module="acting",
    )  # fmt: skip
    _add_run(command)
    command.add_argument("--kill", action="store_true", help="KILL at once, no checkpoint")
    command.add_argument("--yes", action="store_true", help="mean it; --kill asks for it")
    command = _command(
        commands, "do", "Send any request, for instance set-flag or note.",
        ("do latest note text='disk was full'", "do latest set-flag name=NSA_LR value=0.0005"),
        _actions(), module="acting",
    )  # fmt: skip
    _add_run(command)
    command.add_argument("action", type=word, metavar="ACTION", help="one of those below")
    command.add_argument("args", nargs="*", metavar="NAME=VALUE", help="its arguments")
    for name in ("dump", "halt", "stop", "do"):
        commands.choices[name].add_argument(
            "--timeout", type=seconds, default=ANSWER_S, metavar="SECONDS",
            help="longest wait for the answer (default: %(default)s)",
        )  # fmt: skip


def _actions() -> str:
    """Returns the table of actions as help; arguments in brackets may be left out."""
    lines = ["actions:"]
    for action in ACTIONS:
        given = (f"{a.name}=…" if a.required else f"[{a.name}=…]" for a in action.args)
        call = f"  {' '.join((action.name, *given)):<25} "
        lines.append(textwrap.fill(f"{call}{action.help}", 79, subsequent_indent=" " * len(call)))
    return "\n".join(lines) + "\n"


def _add_launch(commands: Any) -> None:
    command = _command(
        commands, "launch", "Start a plan and return, or wait for its end.",
        (
            "launch cpu_smoke",
            "launch cpu_smoke --phase recall --wait",
            "launch cpu_smoke --flag NSA_LR=0.0005 --dry-run",
            "launch cpu_smoke --set train.steps=20 --run-dir /data/runs/first",
        ),
        "--wait returns the exit code of the launch's end, and with --json prints its\n"
        "status then. Without --wait, 0 means: the launch has begun.\n",
        module="acting",
    )  # fmt: skip
    command.add_argument(
        "plan", type=run_or_plan, metavar="PLAN", help="a name from `plans`, or a YAML file"
    )
    command.add_argument("--phase", type=word, help="only this phase")
    command.add_argument(
        "--flag", action="append", default=[], metavar="NAME=VALUE",
        help="an environment flag of every phase, see `flags`; may be repeated",
    )  # fmt: skip
    command.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE",
        help="a setting of every phase, e.g. train.steps=20; may be repeated",
    )  # fmt: skip
    command.add_argument("--nproc", type=int, metavar="N", help="processes of every phase, 1-1024")
    command.add_argument(
        "--devices", type=word, metavar="LIST", help="GPUs, as CUDA_VISIBLE_DEVICES"
    )
    command.add_argument(
        "--run-dir", type=path, metavar="DIR", help="this launch directory instead of a new one"
    )
    command.add_argument(
        "--between", choices=("go", "ask"), default="",
        help="after a passed phase: go on, or wait for `do RUN proceed` (default: as planned)",
    )  # fmt: skip
    command.add_argument("--wait", action="store_true", help="wait for the end")
    command.add_argument(
        "--dry-run", action="store_true", help="print checks, commands and environment; no start"
    )


if __name__ == "__main__":
    sys.exit(main())
