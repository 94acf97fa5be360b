"""The commands that open the screen.

Modules that the first picture does not need are imported later, so that the picture appears early.
"""

from __future__ import annotations

import argparse
import gc

from console.commands import output
from console.sources import launches
from console.sources.process import program
from trainers.contract import environ
from trainers.contract.errors import UsageError

FAILED = 5


def screen(options: argparse.Namespace) -> int:
    """Opens the screen, on the named run or else a live or the newest one; returns the exit code.

    The garbage collector is off until the first picture, because startup creates little garbage.
    """
    if not output.is_terminal():
        use = "add --plain" if options.run else f"use a subcommand ({program()} --help)"
        raise UsageError(f"the screen needs a terminal; {use}")
    path = launches.find(options.run, options.root) if options.run else None
    from console.tui.terminal import detect

    terminal = detect(environ.snapshot(), options.mouse)
    if terminal.dumb:
        raise UsageError(
            "this terminal cannot show the screen (TERM is dumb or not set); "
            f"use `{program()} watch RUN --plain`"
        )
    gc.disable()
    from console.tui import styles
    from console.tui.app import ConsoleApp

    styles.ascii_only = terminal.ascii_only
    app = ConsoleApp(path, options.plan, options.root, terminal)
    app.run(mouse=terminal.mouse)
    app.feed.stop()
    for each in app.pending:
        if each.later:
            for sentence in each.later.splitlines():
                output.print_error(sentence)
    return FAILED if app.return_code else 0


def watch(options: argparse.Namespace) -> int:
    """Follows one run on the screen, or prints its changes or its last state."""
    if not (options.plain or options.json or options.until_waiting):
        return screen(options)
    from console.commands.query import follow, source

    return follow(source(options), options, options.until_waiting)
