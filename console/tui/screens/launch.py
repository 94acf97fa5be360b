"""Launch: phases with what they prove, flags now and next, the exact command, checks or gates."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from textual.app import ComposeResult

from console.model import LaunchState
from console.tui.feed import Snapshot
from console.tui.launching import Draft
from console.tui.rows import Row, rule, wrap
from console.tui.screens.view import View
from console.tui.widgets import flags as flag_list
from console.tui.widgets.lines import Panel
from console.tui.widgets.phases import check_rows, current_phases, gate_rows, phase_rows
from console.tui.widgets.picker import GUTTER, Picker
from console.tui.widgets.scroll import Scrolls
from trainers.contract import flags as registry
from trainers.contract.errors import UsageError

if TYPE_CHECKING:
    from console.tui.main import ConsoleApp

WIDE = 110
WHOLE = 200
LEAST_FLAGS = 7
"""Rows that the list of flags keeps, its heading included."""


def live_launch(snapshot: Snapshot | None) -> LaunchState | None:
    """Returns the launch that is under way, None when a new one can be prepared."""
    launch = snapshot.state.launch if snapshot and snapshot.state else None
    return launch if launch is not None and launch.state in ("running", "waiting") else None


def shell_line(argv: Sequence[str], environment: dict[str, str]) -> str:
    """Returns the exact command as a line for a shell."""
    words = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    return " ".join([*words, *map(shlex.quote, argv)])


def command_rows(title: str, line: str, note: str, width: int, height: int) -> list[Row]:
    """Returns the command, wrapped; what is set in the environment stands out."""
    rows = [rule(title, width, note)]
    for text in wrap(line, width - 1, height - 1):
        words: list[tuple[str, str]] = []
        for word in text.split():
            name, is_set, _ = word.partition("=")
            style = "info" if is_set and name.isupper() and name[0].isalpha() else ""
            words += [(word, style), (" ", "")]
        rows.append(tuple(words))
    return rows


class Phases(Panel):
    draft: Draft

    def rows(self, snapshot: Snapshot, width: int, height: int) -> list[Row]:
        live = live_launch(snapshot)
        state = snapshot.state
        if live is not None and state is not None:
            return phase_rows(live.phases, live.phase, live.between, width, height, snapshot.now,
                              state.step, state.gates)  # fmt: skip
        plan = self.draft.plan
        if plan is None:
            return [rule("phases", width), ((self.draft.trouble or "reads the plan …", "dim"),)]
        rows = phase_rows(current_phases(None, plan), 0, self.draft.between, width, height,
                          snapshot.now)  # fmt: skip
        heading = rule(f"plan {plan.name}", width, f"{len(plan.phases)} phases, L launches")
        return [heading, *rows[1:]]


class Command(Panel):
    draft: Draft

    def line(self, snapshot: Snapshot) -> tuple[str, str]:
        """Returns the title and the command: the one that runs, or the one that would."""
        live, state = live_launch(snapshot), snapshot.state
        if live is not None and state is not None:
            name = live.phases[live.phase].name if live.phases else ""
            return f"command of phase {live.phase + 1} {name}", shell_line(
                state.argv, dict(state.environment)
            )
        return "command of the first phase", self.draft.shell()

    def rows(self, snapshot: Snapshot, width: int, height: int) -> list[Row]:
        title, line = self.line(snapshot)
        return command_rows(title, line or "…", "y copies it", width, height)


class Checks(Panel):
    draft: Draft

    def rows(self, snapshot: Snapshot, width: int, height: int) -> list[Row]:
        live, state = live_launch(snapshot), snapshot.state
        if live is not None and state is not None:
            name = live.phases[live.phase].name if live.phases else ""
            return gate_rows(state.gates, state.bounds, width, height, f"gates of {name}")
        if self.draft.trouble:
            rows = [rule("checks before the launch", width, "a launch is refused")]
            lines = wrap(self.draft.trouble, width, height - 1)
            return rows + [((line, "crit"),) for line in lines]
        return check_rows(self.draft.checks, width, height)


class Launch(Scrolls, View):
    DEFAULT_CSS = """
    Launch { layout: vertical; }
    Launch #plan { layout: vertical; height: 1fr; }
    Launch #plan.wide { layout: horizontal; }
    Launch #plan.wide Phases { width: 1fr; height: 1fr; margin-right: 2; }
    Launch #plan Picker { height: 1fr; width: 1fr; }
    """

    def __init__(self, draft: Draft):
        super().__init__(id="launch")
        self.draft = draft
        self._items: list[flag_list.Item] = []

    def compose(self) -> ComposeResult:
        from textual.containers import Container

        with Container(id="plan"):
            yield Phases("phases")
            yield Picker("flags", "flags")
        yield Command("command")
        yield Checks("checks")

    def on_mount(self) -> None:
        for panel in (*self.query(Phases), *self.query(Command), *self.query(Checks)):
            panel.draft = self.draft

    @property
    def console(self) -> ConsoleApp:
        return self.app  # type: ignore[return-value]

    def arrive(self) -> None:
        self.picker.focus()
        if live_launch(self.snapshot or self.console.snapshot) is None:
            self.console.prepare()

    def take(self, snapshot: Snapshot) -> None:
        super().take(snapshot)
        self._fill()

    def on_resize(self) -> None:
        super().on_resize()
        self.call_after_refresh(self._fill)

    def _fill(self) -> None:
        snapshot = self.snapshot
        if snapshot is None or not self.size.width:
            return
        live, state = live_launch(snapshot), snapshot.state
        if live is not None and state is not None:
            following = live.phases[live.phase + 1 :]
            when = f"{following[0].index + 1} {following[0].name}" if following else "no phase left"
            changed = {flag.name: flag.value for flag in live.next_flags}
            self._items = flag_list.items(state.environment, {}, changed, when, None)
            self.picker.heading = f"flags now → {when}"
        else:
            planned = self.draft.planned_flags()
            draft = self.draft
            self._items = flag_list.items({}, planned, draft.flags, "launch", draft.between)
            self.picker.heading = "flags now → next"
        self.picker.fill(
            flag_list.item_rows(self._items, self.picker.size.width - GUTTER), self._help()
        )

    def _help(self) -> str:
        cursor = self.picker.cursor
        return flag_list.help_of(self._items[cursor]) if cursor < len(self._items) else ""

    def fit_panels(self) -> None:
        width, height = self.size
        if not height:
            return
        plan = self.query_one("#plan")
        wide = width >= WIDE
        plan.set_class(wide, "wide")
        phases, checks = self.query_one(Phases), self.query_one(Checks)
        command = self.query_one(Command)
        if self.snapshot is None:
            return
        tall = height >= 30
        lines = len(wrap(command.line(self.snapshot)[1], width - 1, 7 if tall else 2)) or 1
        check = max(2, len(checks.rows(self.snapshot, width, 9 if tall else 3)))
        self.set_height(command, 1 + lines)
        self.set_height(checks, check)
        if wide:
            phases.styles.height = "1fr"
        else:
            room = max(2, height - LEAST_FLAGS - 1 - lines - check)
            self.set_height(phases, len(phases.rows(self.snapshot, width, room)))

    def scroll_by(self, by: int) -> None:
        self.picker.focus()
        self.picker.move(by)
        self.picker.note = self._help()
        self.picker.redraw()

    def _chosen(self) -> flag_list.Item | None:
        cursor = self.picker.cursor
        return self._items[cursor] if 0 <= cursor < len(self._items) else None

    def do_toggle(self) -> None:
        """Changes what the cursor is on, or opens a field for what must be typed."""
        item = self._chosen()
        if item is None:
            return
        if item.flag is None:
            self.draft.between = "go" if self.draft.between == "ask" else "ask"
            self._changed()
            return
        held = item.following if item.changed else None
        decided, value = flag_list.next_value(item.flag, item.now, held)
        if decided:
            self._set(item.flag.name, value)
        else:
            self.do_open()

    def do_zoom(self) -> None:
        """Opens all of what the panels show in part."""
        from console.tui.screens.help import Reader

        snapshot, width = self.snapshot, self.size.width
        if snapshot is not None:
            rows = [row for p in self.query(Panel) for row in p.rows(snapshot, width, WHOLE)]
            self.console.open_overlay(Reader("launch", rows))

    def do_open(self) -> None:
        """Opens a field for the flag under the cursor."""
        from console.tui.widgets.editor import Editor

        item = self._chosen()
        if item is None or item.flag is None:
            self.do_toggle()
            return
        name = item.flag.name
        hint = f"{registry.expected(item.flag)}; empty takes the change back.  {item.flag.help}"
        value = item.following if item.changed else ""
        self.console.open_overlay(
            Editor(name, value, hint, lambda text: _trouble(name, text),
                   lambda text: self._set(name, text or None))
        )  # fmt: skip

    def _set(self, name: str, value: str | None) -> None:
        live = live_launch(self.snapshot)
        if live is not None:
            self.console.set_flag(live, name, value)
            return
        if value is None:
            self.draft.flags.pop(name, None)
        else:
            self.draft.flags[name] = value
        self._changed()

    def _changed(self) -> None:
        self._fill()
        self.console.prepare()

    def copied(self) -> str:
        return self.query_one(Command).line(self.snapshot)[1] if self.snapshot else ""


def _trouble(name: str, text: str) -> str:
    """Returns what is wrong with a value for a flag, "" for nothing."""
    if not text.strip():
        return ""
    try:
        registry.parse(name, text)
    except UsageError as error:
        return str(error)
    return ""


def make(app: Any) -> Launch:
    return Launch(app.draft)
