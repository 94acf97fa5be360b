"""`nsa-console`: every action of the screen as a subcommand, and the screen without one.

Textual, yaml and psutil are imported only where a command needs them, so that `status --json`
costs what Python costs.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from console.commands import output
from console.commands.output import OutputError
from console.sources import launches
from trainers.contract import environ, rundir
from trainers.contract.errors import ContractError, UsageError

EXITS: dict[int, str] = {
    0: "done; healthy; completed with all gates passed",
    1: "a gate or a check failed; not healthy now: stalled, unsupervised",
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
FAILED, INTERRUPTED = 5, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns a documented exit code, never a traceback for bad input."""
    words = sys.argv[1:] if argv is None else list(argv)
    output.prepare()
    rundir.keep_own_rights()
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
    """Opens the screen on a run, or on the plan that fits this machine.

    Garbage is not collected until the first picture stands: nothing of the start-up is garbage.
    """
    if not output.is_terminal():
        raise UsageError("the screen needs a terminal; use a subcommand (nsa-console --help)")
    path = launches.find(options.run, options.root) if options.run else None
    from console.tui.terminal import detect

    terminal = detect(environ.snapshot(), options.mouse)
    if terminal.dumb:
        raise UsageError(
            "this terminal cannot show the screen (TERM is dumb or not set); "
            "use `nsa-console watch RUN --plain`"
        )
    gc.disable()
    from console.tui import styles
    from console.tui.app import ConsoleApp

    styles.ascii_only = terminal.ascii_only
    app = ConsoleApp(path, options.plan, options.root, terminal)
    app.run(mouse=terminal.mouse)
    app.feed.stop()
    for each in app.pending:
        if each.label != "check":
            then = "nsa-console runs shows what became of it"
            output.tell(f"left before the answer to {each}; {then}")
    return FAILED if app.return_code else 0


def watch(options: argparse.Namespace) -> int:
    """Follows one run until it ends: the screen, or one sentence a change."""
    if not (options.plain or options.json or options.until_waiting):
        return screen(options)
    from console.commands import query

    return query.watch(options)


# --- words -----------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """Raises UsageError for wrong words instead of printing a usage and leaving.

    That of a command learns its options when it is asked for them: a start pays for one command.
    """

    def __init__(self, row: Command | None = None, **more: Any):
        more.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **more)
        self.row = row

    def fill(self) -> None:
        """Takes in the options and examples of its command."""
        row, self.row = self.row, None
        if row is None:
            return
        more = row.more if isinstance(row.more, str) else row.more()
        self.description, self.epilog = row.about, _epilog(row.examples, more)
        self.set_defaults(command=row, acts=row.module == "control")
        for names, given in (JSON, *row.options):
            self.add_argument(*names, **given)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        self.fill()
        return super().parse_known_args(args, namespace)

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


def at_least(least: int, what: str) -> Callable[[str], int]:
    """Returns a converter to whole numbers from `least` on."""

    def convert(text: str) -> int:
        with contextlib.suppress(ValueError):
            if (value := int(text)) >= least:
                return value
        raise argparse.ArgumentTypeError(f"{text} is not {what}")

    return convert


def log_name(text: str) -> int | str:
    """Returns a rank, or the name of another log of a run."""
    return text if text in ("sup", "torchrun") else at_least(0, "a rank; ranks count from 0")(text)


# --- commands --------------------------------------------------------------------------------

Option = tuple[tuple[str, ...], dict[str, Any]]


def option(*names: str, **more: Any) -> Option:
    """Returns the words of one `add_argument`."""
    return names, more


def _run(metavar: str = "RUN", also: str = "") -> Option:
    where = "directory, id (PLAN-TIME or PLAN-TIME/PHASE), unique beginning of an id, or latest"
    return option("run", type=run_or_plan, metavar=metavar, help=also + where)


def _listed(heading: str, rows: Iterable[tuple[str, str]]) -> str:
    """Returns a table as help: the name of a row, and its text wrapped beside it."""
    wrapped = (
        textwrap.fill(f"{name}{text}", 79, subsequent_indent=" " * len(name)) for name, text in rows
    )
    return "\n".join((heading, *wrapped)) + "\n"


def _actions() -> str:
    """Returns the table of actions as help; arguments in brackets may be left out."""
    from console.request_schema import TABLE

    rows = []
    for action in TABLE:
        given = (f"{a.name}=…" if a.required else f"[{a.name}=…]" for a in action.args)
        rows.append((f"  {' '.join((action.name, *given)):<25} ", action.help))
    return _listed("actions:", rows)


def _rules() -> str:
    """Returns the table of watch rules as help."""
    from console.diagnose.rules import HALTING, TABLE

    rows = []
    for rule in TABLE:
        sign = "≥" if rule.threshold > rule.clear else "≤"
        held = f", {rule.for_s:g} s" if rule.for_s else ""
        text = f"{rule.says}: {sign} {rule.threshold:g} {rule.unit}{held}"
        rows.append((f" {'*' if rule.name in HALTING else ' '}{rule.name:<19} ", text))
    heading = "rules (* halts with --halt, when it has stood three times as long):"
    legacy = "A directory of the ancestor system does as well: what it lacks is not judged."
    return f"{_listed(heading, rows)}{legacy}\n"


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand: the function of its name in `console.commands.<module>`, or `act`."""

    name: str
    about: str
    examples: tuple[str, ...]
    options: tuple[Option, ...] = ()
    more: str | Callable[[], str] = ""
    module: str = "query"
    act: Callable[[argparse.Namespace], int] | None = None

    def __call__(self, options: argparse.Namespace) -> int:
        if self.act is not None:
            return self.act(options)
        return getattr(import_module(f"console.commands.{self.module}"), self.name)(options)


JSON = option("--json", action="store_true", help="print data: one JSON document a line")
RANK = option(
    "--rank", type=at_least(0, "a rank; ranks count from 0"), metavar="R",
    help="only this rank, from 0",
)  # fmt: skip
TIMEOUT = option(
    "--timeout", type=seconds, default=ANSWER_S, metavar="SECONDS",
    help="longest wait for the answer (default: %(default)s)",
)  # fmt: skip

LOOKING: tuple[Command, ...] = (
    Command("runs", "List launches, newest first.", ("runs", "runs --limit 5 --json"), (
        option("--limit", type=at_least(1, "a whole number of at least 1"), default=50,
               metavar="N", help="at most N (default: %(default)s)"),
    )),
    Command("status", "Say how one run is: state, ranks, alerts, gates.",
            ("status latest", "status latest --json"), (_run(),)),
    Command("watch", "Follow one run until it ends.",
            ("watch latest", "watch latest --plain", "watch cpu_smoke-20261121-060500 --json"), (
        _run(),
        option("--plain", action="store_true", help="one sentence a change, no screen"),
        option("--until-waiting", action="store_true",
               help="as --plain, and return when the plan waits for `do RUN proceed`"),
        option("--interval", type=seconds, default=1.0, metavar="SECONDS",
               help="time between two looks (default: %(default)s)"),
    ), "Without --plain and --json: the screen. --json prints the status at the end.\n",
       act=watch),
    Command("watchdog", "Hold the watch rules against a run until it ends.", (
        "watchdog latest", "watchdog artifacts/m7c_125m_2xa100_prod --halt --interval 30",
    ), (
        _run("DIR"),
        option("--halt", action="store_true",
               help="write .anomaly_type and .HALT, once, for what the runbooks halt for"),
        option("--interval", type=seconds, default=1.0, metavar="SECONDS",
               help="time between two looks (default: %(default)s)"),
    ), _rules, "watchdog"),
    Command("check", "Say go or no go: for a plan, or for a run so far.",
            ("check cpu_smoke", "check latest"),
            (_run("PLAN|RUN", "a plan's name or YAML file; or a run: "),
             option("--full", action="store_true",
                    help="read all records of the run, and not its snapshot; may take minutes")),
            "A plan: can it start here and now? A run: its gates.\n"),
    Command("logs", "Print the logs of a run, merged or of one rank.",
            ("logs latest", "logs latest --rank 0 -f", "logs latest --grep 'Error|warn'"), (
        _run(),
        option("--rank", type=log_name, metavar="R", help="only this rank, or sup, torchrun"),
        option("--grep", type=word, metavar="RE", help="only lines with this regex"),
        option("-f", "--follow", action="store_true", help="go on until the run ends"),
    )),
    Command("flags", "Print the registry of environment flags.", ("flags",)),
    Command("plans", "Print the registry of plans.", ("plans", "plans --json")),
)  # fmt: skip

ACTING: tuple[Command, ...] = (
    Command("launch", "Start a plan and return, or wait for its end.", (
        "launch cpu_smoke",
        "launch cpu_smoke --phase recall --wait",
        "launch cpu_smoke --flag NSA_LR=0.0005 --dry-run",
        "launch cpu_smoke --set train.steps=20 --run-dir /data/runs/first",
    ), (
        option("plan", type=run_or_plan, metavar="PLAN",
               help="a name from `plans`, or a YAML file"),
        option("--phase", type=word, help="only this phase"),
        option("--flag", action="append", default=[], metavar="NAME=VALUE",
               help="an environment flag of every phase, see `flags`; may be repeated"),
        option("--set", action="append", default=[], metavar="KEY=VALUE",
               help="a setting of every phase, e.g. train.steps=20; may be repeated"),
        option("--nproc", type=int, metavar="N", help="processes of every phase, 1-1024"),
        option("--devices", type=word, metavar="LIST", help="GPUs, as CUDA_VISIBLE_DEVICES"),
        option("--run-dir", type=path, metavar="DIR",
               help="this launch directory instead of a new one"),
        option("--between", choices=("go", "ask"), default="",
               help="after a passed phase: go on, or wait for `do RUN proceed` "
               "(default: as planned)"),
        option("--wait", action="store_true", help="wait for the end"),
        option("--dry-run", action="store_true",
               help="print checks, commands and environment; no start"),
    ), "--wait returns the exit code of the launch's end, and with --json prints its\n"
       "status then. Without --wait, 0 means: the launch has begun.\n", "control"),
    Command("adopt", "Give a run whose supervisor is gone a new one.", ("adopt latest",),
            (_run(), option("--yes", action="store_true",
                            help="mean it where the host has started anew since")),
            "Ranks that live go on and are watched again; what ended meanwhile is\n"
            "judged by its records, and the plan goes on.\n", "control"),
    Command("dump", "Take the stacks of all ranks, or of one.",
            ("dump latest", "dump latest --rank 1"), (_run(), RANK, TIMEOUT), module="control"),
    Command("halt", "Ask all ranks to stop at the same step and to save.",
            ("halt latest",), (_run(), TIMEOUT), module="control"),
    Command("stop", "Send TERM, wait the grace time, KILL what is left.",
            ("stop latest", "stop latest --kill --yes"), (
        _run(),
        option("--kill", action="store_true", help="KILL at once, no checkpoint"),
        option("--yes", action="store_true", help="mean it; --kill asks for it"),
        TIMEOUT,
    ), module="control"),
    Command("do", "Send any request, for instance set-flag or note.", (
        "do latest note text='disk was full'", "do latest set-flag name=NSA_LR value=0.0005",
    ), (
        _run(),
        option("action", type=word, metavar="ACTION", help="one of those below"),
        option("args", nargs="*", metavar="NAME=VALUE", help="its arguments"),
        TIMEOUT,
    ), _actions, "control"),
)  # fmt: skip


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
    for row in (*LOOKING, *ACTING):
        commands.add_parser(row.name, help=row.about, row=row)
    return parser


if __name__ == "__main__":
    sys.exit(main())
