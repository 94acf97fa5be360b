"""Two lists to choose from: one of runs and plans, and one of charts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from console.model import EXIT_CODES
from console.sources.process import program
from console.status_text import gates_text, launch_exit_code
from console.tui import format as fmt
from console.tui.background import run_in_background
from console.tui.charts import CATALOG
from console.tui.rows import Row, columns
from console.tui.widgets.picker import Reader
from trainers.contract import jsonl, rundir

MOST_RUNS = 30
HINT = "enter opens, esc closes"
CHARTS_HINT = "space shows or hides, enter saves (none: default charts), esc cancels"


@dataclass(frozen=True, slots=True)
class Entry:
    """A plan to launch, or the directory of a launch or run to watch."""

    kind: str
    name: str
    text: str
    path: Path | None = None

    def row(self) -> Row:
        return *columns([(self.kind, 9, "dim"), (self.name, 34, "strong")]), (f" {self.text}", "")


def entries(root: Path) -> tuple[list[Entry], int]:
    """Returns two values: launches, runs without a launch and valid plans; the number left out.

    The newest launches and runs are listed, and older launches whose lock a process holds.
    """
    from console.plans import catalog
    from console.sources import launches, liveness

    known, by_hand = launches.launches(root), launches.bare_runs(root)
    listed = [*known[:MOST_RUNS], *filter(liveness.is_locked, known[MOST_RUNS:])]
    found = [_of_launch(path, launches.launch_id(path)) for path in listed]
    found += [Entry("by hand", path.name, f"in {path.parent}", path)
              for path in by_hand[:MOST_RUNS]]  # fmt: skip
    left = len(known) + len(by_hand) - len(found)
    for plan in catalog.plans()[0]:
        found.append(Entry("plan", plan.name, ", ".join(phase.name for phase in plan.phases)))
    return found, left


def _of_launch(path: Path, name: str) -> Entry:
    from console.sources import launch_documents

    held = rundir.read_json(path / rundir.PLAN_STATE) or {}
    launch = launch_documents.launch_state(path, name, {}, held)
    if launch.state != "ended" or not launch.phases:
        return Entry("launch", name, launch.state, path)
    last, at = launch.phases[launch.phase], jsonl.number(held, "updated_ts")
    word = last.state if last.result in ("", "pass") else gates_text(last) or last.state
    code = launch_exit_code(launch)
    if last.state == "completed" and code == EXIT_CODES["halted"]:
        word = "halted"
    elif word == "completed" and code:
        word = "incomplete"  # a gate ended the launch, and was overridden later
    place = f" in {last.numbered}" if launch.rest or word != "completed" else ""
    age = f", {fmt.age(time.time() - at)} ago" if at else ""
    return Entry("launch", name, f"{word}{place}{age}", path)


class Chooser(Reader):
    """A list of entries, read in a thread; enter calls `then` with the entry under the cursor."""

    least, below = 14, 6

    def __init__(self, root: Path, then: Callable[[Entry], object]):
        self._root, self._then = root, then
        self._entries: list[Entry] = []
        super().__init__("runs and plans", self._rows, "reading …", cursor=True)

    def on_mount(self) -> None:
        app: Any = self.app
        super().on_mount()
        run_in_background(app, "list of runs", lambda: entries(self._root), self._fill)

    def _fill(self, found: tuple[list[Entry], int]) -> None:
        self._entries, left = found
        older = f"; {left:,} older: {program()} runs" if left else ""
        self.list.fill(self._rows(), f"{HINT}{older}")

    def _rows(self, _width: int = 0) -> list[Row]:
        return [entry.row() for entry in self._entries]

    def do_open(self) -> None:
        if self._entries:
            self.close()
            self._then(self._entries[self.list.cursor])


class ChartList(Reader):
    """Lists the charts; enter calls `then` with the chosen titles in order, () for the defaults."""

    def __init__(self, shown: Sequence[str], then: Callable[[Sequence[str]], object]):
        self._shown, self._then = list(shown), then
        super().__init__("charts", self._rows, CHARTS_HINT, cursor=True)

    def _rows(self, _width: int = 0) -> list[Row]:
        places = {title: place for place, title in enumerate(self._shown, 1)}
        return [
            columns([(str(places.get(chart.title, "–")), -2, "strong"), (chart.title, 14, ""),
                     (chart.unit_word, 12, "dim")])
            for chart in CATALOG
        ]  # fmt: skip

    def do_toggle(self) -> None:
        """Adds the chart under the cursor to the end of the choice, or removes the chart."""
        title = CATALOG[self.list.cursor].title
        if title in self._shown:
            self._shown.remove(title)
        else:
            self._shown.append(title)
        self.list.fill(self._rows(), CHARTS_HINT)

    def do_open(self) -> None:
        self.close()
        self._then(tuple(self._shown))
