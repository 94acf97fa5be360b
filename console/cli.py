"""`nsa-console`: parses the command line, and runs its command or opens the screen.

Only the commands that need Textual or yaml import them, because the import takes time.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn

from console import access
from console.commands import output
from console.commands.output import OutputError
from console.commands.table import JSON, TABLE, Command, path, word
from console.sources import launches
from console.sources.process import NAME, program
from trainers.contract.errors import ContractError, UsageError

EXITS: dict[int, str] = {
    0: "success",
    1: "a check or a drill failed, or compare has no result",
    2: "usage error",
    3: "no such run or launch",
    4: "rejected",
    5: "another error, for example no answer in time",
    6: "cannot write to standard output; a requested action was still executed",
    130: "ended by ctrl+c; runs continue",
}
RUN_EXITS: dict[int, str] = {
    0: "live, not stalled; or completed, and each gate passed or has an override",
    1: "stalled, unsupervised, unknown; or a gate without an override did not pass",
    4: "halted, stopped or killed",
    5: "failed, crashed or lost",
}
OF_A_RUN = "exit codes for a run (status, watch, diagnose, watchdog, check, --wait):"
INTERRUPTED = 130
WORDS = "docs/words.md"
"""The document that explains the words of the console."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command, or opens the screen; returns a documented exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    output.prepare()
    access.set_safe_umask()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # waitpid fails if it is ignored
    options = argparse.Namespace()
    try:
        build_parser().parse_args(words, options)
        return options.command(options)
    except SystemExit as ended:
        return int(ended.code or 0)
    except OutputError as error:
        if error.is_broken_pipe and not getattr(options, "acts", False):
            output.discard()  # the output pipe is closed
            return error.exit_code
        return output.report_error(error, as_json=False)
    except ContractError as error:
        return output.report_error(error, "--json" in words)
    except OSError as error:
        where = f"{os.fsdecode(error.filename)}: " if error.filename else ""
        return output.report_error(ContractError(f"{where}{error.strerror}"), "--json" in words)
    except KeyboardInterrupt:
        output.print_error("ended by ctrl+c; runs continue")
        return INTERRUPTED


class Parser(argparse.ArgumentParser):
    """A parser that raises UsageError for a wrong command line; argparse itself would exit.

    The parser of a command adds its options only when that command is parsed.
    """

    def __init__(self, row: Command | None = None, **more: Any):
        more.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **more)
        self.row = row

    def fill(self) -> None:
        """Adds the options and examples of the parser's command."""
        row, self.row = self.row, None
        if row is None:
            return
        more = row.more if isinstance(row.more, str) else row.more()
        self.description = textwrap.fill(row.about, 80)
        self.epilog = _epilog(row.examples, more, row.exits_by_run)
        self.set_defaults(command=row, acts=row.target.startswith("control"))
        for names, given in (JSON, *row.options):
            self.add_argument(*names, **given)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        self.fill()
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog.replace(NAME, program(), 1)} --help")

    def _print_message(self, message: str, file: Any = None) -> None:
        output.print_line(message.rstrip())


def _epilog(examples: Sequence[str], more: str = "", by_run: bool = True) -> str:
    called = program()
    lines = ["examples:", *(f"  {called} {example}".rstrip() for example in examples), ""]
    lines += [more] if more else []
    lines += ["exit codes:", *(f"  {code:<3} {means}" for code, means in EXITS.items())]
    if by_run:
        lines += ["", OF_A_RUN, *(f"  {code:<3} {means}" for code, means in RUN_EXITS.items())]
    return "\n".join(lines)


def build_parser() -> Parser:
    """Returns the parser of all commands."""
    parser = Parser(
        prog=NAME,
        description="Launch, watch and diagnose NSA pre-training. Without a command: the screen.\n"
        "Write the options below before the command.",
        epilog=_epilog(("", "launch cpu_smoke", "status latest", "--root /data/runs runs"))
        + f"\n\nwords: {WORDS}",
    )
    parser.add_argument(
        "--root", type=path, default=launches.ROOT, metavar="DIR",
        help="directory of the launches (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--plan", type=word, default="cpu_smoke",
        help="plan that the key L launches (default: the plan of the displayed launch, or else "
        "%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--mouse", action=argparse.BooleanOptionalAction,
        help="use the mouse (default: on, but off over SSH)",
    )  # fmt: skip
    screen = Command("screen", "", (), target="screen.screen")
    parser.set_defaults(command=screen, run=None)
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")
    for row in TABLE:
        commands.add_parser(row.name, help=row.about, row=row)
    return parser


if __name__ == "__main__":
    sys.exit(main())
