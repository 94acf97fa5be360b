"""What the keys that mean the same in every view do."""

from __future__ import annotations

import time
from collections.abc import Coroutine
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from console.tui import questions
from console.tui.questions import CannotAsk, Choice, Question

if TYPE_CHECKING:
    from console.tui.main import ConsoleApp
    from console.tui.screens.view import View


LATER = (
    "console.tui.widgets.confirm",
    "console.tui.screens.help",
    "console.tui.screens.launch",
    "console.tui.screens.stall",
    "console.tui.screens.logs",
    "console.actions",
)
"""Not needed for the first picture, wanted at once when a key asks for it."""


def preload(wait_s: float = 0.5) -> None:
    """Imports what comes later, in a thread beside the screen, with pauses for the keys."""
    for name in LATER:
        time.sleep(wait_s)
        import_module(name)
        wait_s = 0.05


class Doing:
    """The app's half that does. Its methods are named by the table of keys."""

    @property
    def me(self) -> ConsoleApp:
        return self  # type: ignore[return-value]

    @property
    def actions(self) -> Any:
        """`console.actions`, imported when something is first done."""
        if self.me._actions is None:
            from console import actions

            self.me._actions = actions
        return self.me._actions

    @property
    def host(self) -> str:
        from trainers.contract import rundir

        return rundir.host_name()

    def make_view(self, name: str) -> View:
        module = import_module(f"console.tui.screens.{name}")
        return module.make(self.me)

    def do_dashboard(self) -> Coroutine[Any, Any, None]:
        return self._go("dashboard")

    def do_launch_view(self) -> Coroutine[Any, Any, None]:
        return self._go("launch")

    def do_stall_view(self) -> Coroutine[Any, Any, None]:
        return self._go("stall")

    def do_logs_view(self) -> Coroutine[Any, Any, None]:
        return self._go("logs")

    def do_flags(self) -> Coroutine[Any, Any, None]:
        return self._go("launch")

    def _go(self, name: str) -> Coroutine[Any, Any, None]:
        self.me.chosen_by_hand = True
        return self.me.show_view(name)

    def do_dump(self) -> None:
        self.ask_or_say(lambda: questions.dump(self._state()))

    def do_halt(self) -> None:
        self.ask_or_say(lambda: questions.halt(self._state()))

    def do_kill(self) -> None:
        self.ask_or_say(lambda: questions.kill(self._state()))

    def do_acknowledge(self) -> None:
        worst = self.me.alert.worst
        alert, text = (worst.alert, worst.text) if worst else ("", "")
        self.ask_or_say(lambda: questions.acknowledge(self._state(), alert, text))

    def _state(self) -> Any:
        return self.me.snapshot.state if self.me.snapshot else None

    def ask_or_say(self, make: Any) -> None:
        """Opens a question; what it is about is decided now and not when it is answered."""
        try:
            question = make()
        except CannotAsk as reason:
            self.me.say(str(reason), "error")
            return
        self.ask(question, partial(self._send, question))

    def ask(self, question: Question, then: Any) -> None:
        from console.tui.widgets.confirm import Confirm

        self.me.open_overlay(Confirm(question, then))

    def _send(self, question: Question, choice: Choice) -> None:
        self.send(Path(question.target.path), choice.action, dict(choice.args))

    def send(self, path: Path, action: str, args: dict[str, Any]) -> None:
        """Asks the supervisor for something, beside the screen, and shows its answer."""
        self.me.say(f"{action}: asked …", "wait")
        work = partial(self.me.request, path, action, args)
        self.me.deeds.start(action, work, self.me.say)

    def do_pause(self) -> None:
        """Holds the picture; the header says so, and goes on to tell state and age."""
        app = self.me
        app.paused = not app.paused
        app.header.paused = app.paused
        app.header.redraw()
        if not app.paused and app.snapshot is not None:
            app._paint(app.snapshot)

    def do_copy(self) -> None:
        from console.tui.copying import save

        text = self.me.view.copied()
        if not text:
            self.me.say("there is nothing to copy here", "error")
            return
        self.me.copy_to_clipboard(text)
        where = save("copied.txt", text)
        self.me.say(f"copied {len(text.splitlines())} lines to the clipboard and to {where}")

    def do_panel(self) -> None:
        self.me.action_focus_next()

    def do_panel_back(self) -> None:
        self.me.action_focus_previous()

    def do_back(self) -> None:
        self.me.answer.clear()
        self.me.screen.set_focus(None)
        self.me.view.arrive()

    def do_palette(self) -> None:
        from console.tui.commands import Commands

        self.me.open_overlay(Commands(self.me.view_name))

    def do_help(self) -> None:
        from console.tui.screens.help import open_help

        self.me.open_overlay(open_help(self.me.view_name, self.me.size.width))

    def do_leave(self) -> None:
        self.me.feed.stop()
        self.me.exit(0)
