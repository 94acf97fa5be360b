"""The actions of the keys that mean the same in every view."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from functools import partial, partialmethod
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from textual.app import App

from console.model import LaunchState, RunState
from console.status_text import counted
from console.tui import confirmations
from console.tui.background import Pending, beside
from console.tui.confirmations import CannotAsk, Choice, Question, Target
from console.tui.format import age
from trainers.contract import rundir

if TYPE_CHECKING:
    from console.tui.app import ConsoleApp


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
        return self.me._actions or import_module("console.actions")

    @property
    def state(self) -> RunState | None:
        """The run on the screen."""
        return self.me.snapshot.state if self.me.snapshot else None

    def _go(self, name: str) -> Coroutine[Any, Any, None]:
        self.me.chosen_by_hand = True
        return self.me.show_view(name)

    do_dashboard, do_stall_view = partialmethod(_go, "dashboard"), partialmethod(_go, "stall")
    do_launch_view, do_logs_view = partialmethod(_go, "launch"), partialmethod(_go, "logs")
    do_flags = do_launch_view

    def do_acknowledge(self) -> None:
        notice = self.me.alert.notice
        alert, text = (notice.alert, notice.text) if notice else ("", "")
        self.ask_or_say(lambda: confirmations.acknowledge(self.state, alert, text))

    def do_next_alert(self) -> None:
        self.me.alert.turn()

    def ask_or_say(
        self, make: Callable[[], Question], then: Callable[[Choice], object] | None = None
    ) -> None:
        """Opens a question; what it is about is decided now and not when it is answered."""
        from console.tui.widgets.confirm import Confirm

        try:
            question = make()
        except CannotAsk as reason:
            self.me.say(str(reason), "error")
            return
        self.me.open_overlay(Confirm(question, then or partial(self._send, question.target)))

    def _send(self, target: Target, choice: Choice) -> None:
        self.send(Path(target.path), choice.action, dict(choice.args))

    def send(self, path: Path, action: str, args: dict[str, Any]) -> None:
        """Asks the supervisor for something, beside the screen, and shows its answer."""
        self.me.say(f"{action}: asked …", "wait")
        work = partial(self.me.request, path, action, args)
        beside(self.me, action, work, self.me.say, about=path.name)

    # --- launching -----------------------------------------------------------------------------

    def prepare(self) -> None:
        """Checks the draft beside the screen, one check at a time; nothing is written.

        A change during a check starts another one at its end, and the older result is not used.
        """
        app, draft = self.me, self.me.draft
        if self._pending("check"):
            return
        options = draft.options(self.actions)

        def ended(prepared: Any, trouble: str = "") -> None:
            if options != draft.options(self.actions):
                self.prepare()
                return
            draft.take(options, prepared, trouble)
            app.repaint_view()

        work = partial(self.actions.prepare, options)
        beside(app, "check", work, ended, partial(ended, None), options.plan)

    def _pending(self, label: str) -> Pending | None:
        return next((each for each in self.me.pending if each.label == label), None)

    def _is_starting(self) -> bool:
        """Says whether a launch has no result yet; then says so on the screen too."""
        if held := self._pending("launch"):
            text = f"a launch is still starting: {held.about}, for {age(held.waited_s)} now; its "
            self.me.say(f"{text}result will be shown here", "error")
        return held is not None

    async def do_launch(self) -> None:
        """Goes on with the launch that waits, or asks whether to launch the draft."""
        app, state = self.me, self.state
        if self._is_starting():
            return
        if app.snapshot is not None and app.snapshot.at < app.feed.followed_at:
            app.say("the new launch is being read; press L again in a moment", "error")
            return
        if state is not None and state.launch is not None and state.launch.under_way:
            launch = Path(state.launch.path)
            self.ask_or_say(lambda: confirmations.proceed(state), partial(self._proceed, launch))
            return
        if app.view_name != "launch":
            await app.show_view("launch")
        options, plan = app.draft.checked, app.draft.plan
        self.ask_or_say(
            lambda: app.draft.question(rundir.host_name()), lambda _: self._launch(options, plan)
        )

    def _proceed(self, launch: Path, choice: Choice) -> None:
        self.send(launch, choice.action, dict(choice.args))
        self.me.run_worker(self.me.show_view("dashboard"))

    def _launch(self, options: Any, plan: Any) -> None:
        """Launches what was asked about: `plan` as it was checked, or nothing."""
        app, actions = self.me, self.actions
        if self._is_starting():
            return
        app.say(f"launches {options.plan} …", "wait")

        def launched(path: Path) -> None:
            app.say(f"launched {options.plan} in {path}; q leaves, the run goes on")
            app.feed.follow(path)
            app.run_worker(app.show_view("dashboard"))

        work = partial(actions.launch, options, actions.who(), plan)
        beside(app, "launch", work, launched, about=options.plan)

    def set_flag(self, launch: LaunchState, name: str, value: str | None) -> None:
        """Asks the supervisor to change a flag for the next phase."""
        if not launch.rest:
            self.me.say(f"{name} cannot change: {launch.id} has no phase after this one", "error")
            return
        self.send(Path(launch.path), "set-flag", {"name": name, "value": value})

    # --- the picture ---------------------------------------------------------------------------

    def do_pause(self) -> None:
        self.me.hold(not self.me.paused)

    def do_copy(self) -> None:
        from console.tui.clipboard import save

        text = self.me.view.copied()
        if not text:
            self.me.say("there is nothing to copy here", "error")
            return
        self.me.copy_to_clipboard(text)
        copied = f"copied {counted(len(text.splitlines()), 'line')} to the clipboard"
        try:
            self.me.say(f"{copied} and to {save('copied.txt', text)}")
        except OSError as error:
            self.me.say(f"{copied}; not to a file: {error.strerror}", "error")

    do_panel, do_panel_back = App.action_focus_next, App.action_focus_previous

    def do_back(self) -> None:
        self.me.answer.clear()
        self.me.screen.set_focus(None)
        self.me.view.arrive()

    def do_palette(self) -> None:
        from console.tui.command_palette import Commands

        self.me.open_overlay(Commands(self.me.view_name))

    def do_help(self) -> None:
        from console.tui.screens.help import Reader, help_rows

        view, width = self.me.view_name, self.me.size.width
        self.me.open_overlay(Reader(f"Keys in {view}", help_rows(view, width - 2)))

    def do_leave(self) -> None:
        self.me.feed.stop()
        self.me.exit(0)
