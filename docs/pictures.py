"""Makes the pictures of the documents from a real run: `make pictures`.

Launches the plan of the main job, drives the screen over it without a terminal, and exports what
it shows as SVG.
"""

from __future__ import annotations

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
from console.sources.run import RunSource
from console.tui.app import ConsoleApp
from console.tui.terminal import detect

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "pictures"
PLAN = ROOT / "tests" / "e2e" / "main_job.yaml"
TERM = {"TERM": "xterm-256color", "COLORTERM": "truecolor", "LANG": "C.UTF-8"}
SMALL, WIDE = (80, 24), (120, 40)


def without_root(svg: str) -> str:
    """The picture with paths below the repository relative to it; the text keeps its width."""
    prefix = f"{ROOT}/"
    return re.sub(
        rf"{re.escape(prefix)}([^<]*)", lambda found: found[1] + "&#160;" * len(prefix), svg
    )


async def shoot(
    path: Path | None, root: Path, size: tuple[int, int], shots: dict[str, str]
) -> None:
    """Opens the screen; for each name presses the keys and keeps the picture."""
    app = ConsoleApp(path, "cpu_smoke", root, detect(TERM, False))
    async with app.run_test(size=size) as pilot:
        await pilot.pause(3.0)
        for name, keys in shots.items():
            for key in keys:
                await pilot.press(key)
                await pilot.pause(1.5)
            svg = app.export_screenshot(title="nsa-console", simplify=True)
            (FOLDER / f"{name}.svg").write_text(without_root(svg))
            sys.stdout.write(f"docs/pictures/{name}.svg\n")
        app.feed.stop()


def wait_for(condition: Callable[[], object], seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("pictures: the run did not come as far as the picture needs")
        time.sleep(0.2)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        asyncio.run(shoot(None, root, SMALL, {"launch-80x24": ""}))
        options = actions.LaunchOptions(plan=str(PLAN), root=root, between="go")
        path = actions.launch(options, actions.who())
        source = RunSource(path)
        wait_for(lambda: (source.poll().step or 0) >= 150)
        asyncio.run(shoot(path, root, SMALL, {"dashboard-80x24": "", "flags-80x24": "2"}))
        asyncio.run(shoot(path, root, WIDE, {"dashboard-120x40": ""}))
        pid = source.poll().ranks[1].pid
        actions.answer(path, actions.send(path, "dump", {}, actions.who()), 20)
        os.kill(pid, signal.SIGSTOP)
        try:
            wait_for(lambda: source.poll().state == "stalled")
            asyncio.run(shoot(path, root, SMALL, {"stall-80x24": "3"}))
            asyncio.run(shoot(path, root, WIDE, {"stall-120x40": "3"}))
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_for(lambda: source.poll().state == "running")
        actions.answer(path, actions.send(path, "halt", {}, actions.who()), 20)
        wait_for(lambda: source.poll().launch.state == "ended")  # type: ignore[union-attr]


if __name__ == "__main__":
    main()
