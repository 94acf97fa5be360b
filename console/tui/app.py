"""The Textual app: shows the feed's snapshots in one view at a time, and dispatches keys."""

from __future__ import annotations

import gc
import threading
import time
import traceback
from functools import partial, partialmethod
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult, ScreenStackError
from textual.binding import Binding, BindingType
from textual.events import Key
from textual.widget import Widget

from console.sources.sanitize import clean
from console.status_text import counted
from console.tui import keys
from console.tui.background import Pending, run_in_background
from console.tui.draft import Draft
from console.tui.driver import TerminalDriver
from console.tui.feed import Feed, ScreenData
from console.tui.operator import Operator, preload
from console.tui.terminal import Terminal
from console.tui.views.dashboard import Dashboard
from console.tui.views.view import Body, Main, View
from console.tui.widgets.alertline import AlertLine
from console.tui.widgets.bars import ActionBar, Footer
from console.tui.widgets.header import PUNCTUAL_S, Header
from console.tui.widgets.loglines import LogBook
from console.tui.widgets.overlay import Answer, Drawer, Overlay
from trainers.contract import environ, rundir

if TYPE_CHECKING:
    from console.tui.widgets.chooser import Entry

TICK_S = 1.0
LEAVE = "ctrl+c"
CLASSES = {"launch": "Launch", "stall": "Stall", "logs": "LogView"}
"""The module and the class of each view except the Dashboard."""


def bindings() -> list[Binding]:
    """Returns the key bindings of the table of keys; ctrl+c exits even from a field."""
    leave = Binding(LEAVE, "quit_now", keys.KEYS["leave"].help, show=False, priority=True)
    return [leave] + [
        Binding(name, f"key('{key.id}')", key.help, show=False)
        for key in keys.TABLE for name in key.keys if name != LEAVE
    ]  # fmt: skip


def save_text(name: str, text: str) -> Path:
    """Writes text to a file in the user's state directory; returns its path. Raises OSError."""
    state = environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    folder = Path(state) / "nsa-console"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / name
    rundir.write_atomic(path, text + "\n")
    return path


class ConsoleApp(App[int], inherit_bindings=False):
    """The Textual app. The exit of the app changes no run."""

    CSS = """
    Screen { layout: vertical; layers: base over; background: ansi_default; color: ansi_default; }
    """
    ENABLE_COMMAND_PALETTE = False
    AUTO_FOCUS = None
    BINDINGS: ClassVar[list[BindingType]] = [*bindings()]

    def __init__(self, path: Path | None, plan: str, root: Path, terminal: Terminal):
        super().__init__(driver_class=TerminalDriver, ansi_color=True)
        self.theme = "ansi-dark"
        self.animation_level = "none"
        self.terminal = terminal
        self.draft = Draft(plan, root)
        self.operator = Operator(self)
        self.book = LogBook()
        self.feed = Feed(partial(self.call_later, self.take), path, root)
        self.snapshot: ScreenData | None = None
        self.paused = False
        self.pending: list[Pending] = []
        self.view_name = "dashboard"
        self.overlay: Overlay | None = None
        self.header, self.alert = Header(id="header"), AlertLine(id="alert")
        self.answer, self.drawer, self.footer = Answer(), Drawer(), Footer()
        self.bar = ActionBar()
        self.body = Body()
        self.dashboard = Dashboard(self, "dashboard")
        self.views: dict[str, View] = {"dashboard": self.dashboard}

    def get_default_screen(self) -> Main:
        return Main(id="_default")

    def compose(self) -> ComposeResult:
        yield self.header
        yield self.alert
        with self.body:
            yield self.views["dashboard"]
        with self.drawer:
            yield self.answer
        yield self.bar
        yield self.footer

    def on_mount(self) -> None:
        self.footer.draw(self.view_name)
        self.call_after_refresh(self._painted)
        self.set_interval(TICK_S, self._tick)

    def exit(self, *given: Any, **named: Any) -> None:
        """Exits, even if the terminal reads nothing."""
        if isinstance(self._driver, TerminalDriver):
            self._driver.end_in_time()
        super().exit(*given, **named)

    def _fatal_error(self) -> None:
        """Saves the traceback of a bug, if possible; Textual then exits and prints a message."""
        try:
            where = f"in {save_text('crash.txt', traceback.format_exc())}"
        except OSError as error:
            where = f"lost ({error.strerror})"
        what = clean(traceback.format_exc(limit=0).splitlines()[-1], 200)
        self.panic(
            Text(f"nsa-console: the screen failed: {what}; runs continue; start the screen again; "
                 f"the traceback is {where}, please report it")
        )  # fmt: skip

    def _painted(self) -> None:
        """Starts the feed, the preload and garbage collection, after the first picture."""
        self.feed.start()
        threading.Thread(target=preload, name="preload", daemon=True).start()
        gc.freeze()
        gc.enable()

    @property
    def view(self) -> View:
        return self.views[self.view_name]

    def take(self, snapshot: ScreenData) -> None:
        """Shows a snapshot, except in a paused view; drops the snapshot if the app is exiting."""
        if not self.is_running:
            return
        if self.snapshot is None and snapshot.state is None:
            self.run_worker(self.show_view("launch"))  # there is no run to show
        self.snapshot = snapshot
        if snapshot.state is not None and snapshot.state.launch is not None:
            self.draft.offer(snapshot.state.launch.plan)
        self.book.take(snapshot)
        self.operator.take(snapshot.state)
        for panel in (self.header, self.alert, self.bar):
            panel.take(snapshot)
        if not self.paused:
            self.view.take(snapshot)
        self.feed.allow_next()

    def set_paused(self, paused: bool) -> None:
        """Pauses or resumes the view; the header and the alert line are still updated."""
        self.paused = self.feed.paused = self.header.paused = paused
        self.header.redraw()
        if not paused:
            self.repaint_view()
            self.feed.nudge()

    def _tick(self) -> None:
        """Clears an old message; redraws header and alert line while no new snapshot arrives."""
        self.answer.tick()
        if self.snapshot and time.monotonic() - self.snapshot.at < PUNCTUAL_S:
            return
        for panel in (self.header, self.alert):
            panel.redraw()

    async def show_view(self, name: str) -> None:
        """Shows a view; a view other than the Dashboard is created when it is first shown."""
        if not self.body.is_attached:
            return
        if name != self.view_name:
            self.answer.clear_error()
            if self.paused:
                self.set_paused(False)
        if name not in self.views:
            module = import_module(f"console.tui.views.{name}")
            self.views[name] = getattr(module, CLASSES[name])(self, name)
            await self._mount(self.body, self.views[name])
        for held, view in self.views.items():
            view.display = held == name
        self.view_name = name
        self.feed.wanted = ()
        self.feed.wants_stacks = name == "stall"
        self.feed.wants_coming = name == "launch"
        self.footer.draw(name)
        self.alert.redraw()
        self.view.focus_default()
        self.repaint_view()
        self.call_after_refresh(self.feed.nudge)

    async def action_key(self, key_id: str) -> None:
        """Executes a key: asks its `question`, or calls its method `do_<id>`.

        While an overlay is open, the method of the overlay is called. Without such a method, the
        key has no effect, with one exception: if the overlay `gives_way` and no text field has the
        focus, the overlay is closed and the key is executed. Without an overlay, a key with a
        question works in every view. A key without a question works in its `views`: the view, the
        app or the operator has its method.
        """
        key = keys.KEYS[key_id]
        if self.overlay is not None:
            work = getattr(self.overlay, f"do_{key_id}", None)
            if work is None and self.overlay.gives_way and not self.in_field:
                work = partial(self.action_after, key_id)
        elif key.question is not None:
            work = partial(self.operator.ask, key.question)
        elif self.view_name in key.views:
            places = (self.view, self, self.operator)
            work = next(filter(None, (getattr(each, f"do_{key_id}", None) for each in places)))
        else:
            work = None
        if work is None:
            if self.overlay is None:
                self.say(f"{key.shown} works only in {', '.join(key.views)}", "error")
            return
        result = work()
        if result is not None:
            await result

    async def action_after(self, key_id: str) -> None:
        """Closes the overlay, then executes a key."""
        if self.overlay is not None:
            await self.remove_overlay(self.overlay)
        await self.action_key(key_id)

    def on_key(self, event: Key) -> None:
        """Shows a message if a typed character has no function and no overlay is open."""
        bound = {event.key, event.character} & keys.BOUND
        if self.overlay is None and event.is_printable and not bound:
            self.say(f"{event.character} has no function; ? shows the keys", "error")

    @property
    def in_field(self) -> bool:
        """True if a text field has the focus. The thread of the input also reads this property."""
        try:
            focused = self.focused
        except ScreenStackError:  # before the first screen, or after the last
            return False
        return focused is not None and focused.check_consume_key("a", "a")

    def open_overlay(self, overlay: Overlay) -> None:
        if self.overlay is None:
            self.answer.clear()
            self.overlay = overlay
            self.call_next(self._mount, self.drawer, overlay)

    async def _mount(self, parent: Widget, child: Widget) -> None:
        """Mounts a widget with its children, and paints once when they are complete."""
        with self.batch_update():
            await parent.mount(child, before=0)
        self.screen.check_idle()

    async def remove_overlay(self, overlay: Overlay) -> None:
        """Removes an overlay, if it is still open."""
        if overlay is self.overlay:
            self.overlay = None
            await overlay.remove()
            self.screen.set_focus(None)
            self.view.focus_default()

    async def on_button_pressed(self, event: Any) -> None:
        await self.action_key(event.button.means)

    def repaint_view(self) -> None:
        """Draws the view again; a paused view keeps its snapshot."""
        if self.paused:
            self.view.draw_again()
        elif self.snapshot is not None:
            self.view.take(self.snapshot)

    def say(self, text: str, level: str = "ok") -> None:
        """Shows a message, for example the result of an action."""
        self.answer.say(text, level)

    # --- the keys that work in every view --------------------------------------------------------

    do_dashboard = partialmethod(show_view, "dashboard")
    do_launch_view = partialmethod(show_view, "launch")
    do_stall_view = partialmethod(show_view, "stall")
    do_logs_view = partialmethod(show_view, "logs")

    async def do_flags(self) -> None:
        await self.show_view("launch")
        self.say("the mark › is in the flags: ↓ ↑ move it; enter and space change the flag")

    do_panel, do_panel_back = App.action_focus_next, App.action_focus_previous

    def follow(self, path: Path) -> None:
        """Watches another launch or run in the Dashboard; resumes a paused display."""
        if self.paused:
            self.set_paused(False)
        self.feed.follow(path)
        self.run_worker(self.show_view("dashboard"))

    def do_choose(self) -> None:
        from console.tui.widgets.chooser import Chooser

        self.open_overlay(Chooser(self.draft.root, self._choose))

    def _choose(self, entry: Entry) -> None:
        """Watches the chosen launch or run, or prepares the launch of the chosen plan."""
        if entry.path is not None:
            self.follow(entry.path)
            return
        self.draft.choose(entry.name)
        launch = self.snapshot.state.launch if self.snapshot and self.snapshot.state else None
        if launch is not None and launch.under_way:
            self.say(f"L launches {entry.name} after {launch.id} has ended", "wait")
        self.run_worker(self.show_view("launch"))

    def do_next_alert(self) -> None:
        self.alert.turn()

    def do_pause(self) -> None:
        self.set_paused(not self.paused)

    def do_copy(self) -> None:
        text = self.view.copied()
        if not text:
            self.say("there is nothing to copy here", "error")
            return
        self.copy_to_clipboard(text)
        copied = f"copied {counted(len(text.splitlines()), 'line')} to the clipboard"

        def save() -> tuple[str, str]:
            try:
                return f"{copied} and to {save_text('copied.txt', text)}", "ok"
            except OSError as error:
                return f"{copied}; cannot write the file: {error.strerror}", "error"

        # The home directory may not answer.
        run_in_background(self, "copy", save, lambda said: self.say(*said))

    def do_back(self) -> None:
        self.answer.clear()
        self.screen.set_focus(None)
        self.view.focus_default()

    def do_redraw(self) -> None:
        self.screen.refresh()

    def do_palette(self) -> None:
        from console.tui.widgets.keylist import Commands

        self.open_overlay(Commands(self.view_name))

    def do_help(self) -> None:
        from console.tui.widgets.keylist import help_rows
        from console.tui.widgets.picker import Reader

        view = self.view_name
        self.open_overlay(Reader(f"Keys in {view}", lambda width: help_rows(view, width - 2)))

    def do_leave(self) -> None:
        self.feed.stop()
        self.exit(0)

    action_quit_now = do_leave
