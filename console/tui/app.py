"""Opens the screen: looks at the terminal first, and imports what paints only then."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

from console.tui.terminal import detect
from trainers.contract import environ

FAILED = 5
REFUSAL = (
    "nsa-console: this terminal cannot show the screen (TERM is dumb, or it is no terminal); "
    "use `nsa-console watch RUN --plain`\n"
)


def run(path: Path | None, plan: str, root: Path, mouse: bool | None) -> int:
    """Opens the screen on a run, or on the plan that fits; returns the exit code.

    Garbage is not collected until the first picture stands: nothing of the start-up is garbage.
    """
    terminal = detect(environ.snapshot(), mouse)
    if terminal.dumb or not (sys.stdin.isatty() and sys.stdout.isatty()):
        sys.stderr.write(REFUSAL)
        return 2
    gc.disable()
    from console.tui import palette
    from console.tui.main import ConsoleApp

    palette.use(terminal.plain if terminal.ascii_only else None)
    app = ConsoleApp(path, plan, root, terminal)
    app.run(mouse=terminal.mouse)
    app.feed.stop()
    return FAILED if app.return_code else 0
