"""Opens the screen: looks at the terminal first, and imports what paints only then."""

from __future__ import annotations

import gc
from pathlib import Path

from console.tui.terminal import detect
from trainers.contract import environ
from trainers.contract.errors import UsageError

FAILED = 5


def run(path: Path | None, plan: str, root: Path, mouse: bool | None) -> int:
    """Opens the screen on a run, or on the plan that fits; returns the exit code.

    Raises UsageError where nothing can be painted.

    Garbage is not collected until the first picture stands: nothing of the start-up is garbage.
    """
    terminal = detect(environ.snapshot(), mouse)
    if terminal.dumb:
        raise UsageError(
            "this terminal cannot show the screen (TERM is dumb or not set); "
            "use `nsa-console watch RUN --plain`"
        )
    gc.disable()
    from console.tui import palette
    from console.tui.main import ConsoleApp

    palette.use(terminal.plain if terminal.ascii_only else None)
    app = ConsoleApp(path, plan, root, terminal)
    app.run(mouse=terminal.mouse)
    app.feed.stop()
    return FAILED if app.return_code else 0
