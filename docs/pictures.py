"""Makes the pictures of the pages, most of them from a real run: `make pictures`.

Runs the screen without a terminal, before and during a launch of the plan of the end-to-end test,
and exports the screen as SVG.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from console import actions
from console.sources import liveness
from console.sources.run import RunSource
from console.tui.app import ConsoleApp
from console.tui.terminal import detect

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "pictures"
PLAN = ROOT / "tests" / "e2e" / "main_job.yaml"
TERM = {"TERM": "xterm-256color", "COLORTERM": "truecolor", "LANG": "C.UTF-8"}
SMALL, WIDE = (80, 24), (120, 40)


def without_root(svg: str) -> str:
    """Returns the picture with paths relative to the repository, padded to the same width."""
    prefix = f"{ROOT}/"
    return re.sub(
        rf"{re.escape(prefix)}([^<]*)", lambda found: found[1] + "&#160;" * len(prefix), svg
    )


async def capture(
    path: Path | None, root: Path, size: tuple[int, int], keys_of: dict[str, str]
) -> None:
    """Opens the screen; for each picture presses its keys and writes `<name>.svg`."""
    app = ConsoleApp(path, "cpu_smoke", root, detect(TERM, False))
    async with app.run_test(size=size) as pilot:
        await pilot.pause(3.0)
        for name, keys in keys_of.items():
            for key in keys:
                await pilot.press(key)
                await pilot.pause(1.5)
            svg = app.export_screenshot(title="nsa-console", simplify=True)
            (FOLDER / f"{name}.svg").write_text(without_root(svg))
            sys.stdout.write(f"docs/pictures/{name}.svg\n")
        app.feed.stop()


def wait_for(condition: Callable[[], object], seconds: float = 300.0) -> None:
    """Waits until the condition holds. Raises SystemExit after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"pictures: the run is not ready for a picture after {seconds:g} s")
        time.sleep(0.2)


def capture_run(path: Path, root: Path, source: RunSource) -> None:
    """Makes the pictures of a running phase, and of a stalled rank."""
    wait_for(lambda: (source.poll().step or 0) >= 150)
    asyncio.run(capture(path, root, SMALL, {"dashboard-80x24": "", "flags-80x24": "2"}))
    asyncio.run(capture(path, root, WIDE, {"dashboard-120x40": ""}))
    pid = source.poll().ranks[1].pid
    actions.answer(path, actions.send(path, "dump", {}, actions.who()), 20)
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(lambda: source.poll().state == "stalled")
        asyncio.run(capture(path, root, SMALL, {"stall-80x24": "3"}))
        asyncio.run(capture(path, root, WIDE, {"stall-120x40": "3"}))
    finally:
        os.kill(pid, signal.SIGCONT)


def main() -> None:
    """Makes all pictures: before a launch, of a running phase, and of a stalled rank."""
    argparse.ArgumentParser(prog="python -m docs.pictures", description=__doc__).parse_args()
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        asyncio.run(capture(None, root, SMALL, {"launch-80x24": ""}))
        options = actions.LaunchOptions(plan=str(PLAN), root=root, between="go")
        path = actions.launch(options, actions.who())
        source = RunSource(path)
        try:
            capture_run(path, root, source)
        finally:
            actions.send(path, "stop", {}, actions.who())
            wait_for(lambda: not liveness.is_locked(path))  # the supervisor has written its report


if __name__ == "__main__":
    main()
