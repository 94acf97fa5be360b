"""Asks for confirmation, then sends requests and starts launches in background threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from console.model import RunState
from console.sources.process import command
from console.tui import background, confirmations
from console.tui.background import Pending, run_in_background
from console.tui.confirmations import CannotAsk, Choice, Question
from console.tui.draft import Draft
from console.tui.feed import ScreenData
from console.tui.format import age
from console.tui.terminal import Terminal
from console.tui.widgets.alertline import AlertLine
from console.tui.widgets.loglines import LogBook
from console.tui.widgets.overlay import Answer, Overlay
from trainers.contract import rundir

LATER = (
    "console.tui.widgets.confirm",
    "console.tui.widgets.keylist",
    "console.tui.views.launch",
    "console.tui.views.stall",
    "console.tui.views.logs",
    "console.supervisor.launch_spec",
)
"""Modules that the first picture does not need, but the next key may need."""


def preload(wait_s: float = 0.5) -> None:
    """Imports the modules of `LATER`, with pauses in which keys are handled."""
    for name in LATER:
        time.sleep(wait_s)
        import_module(name)
        wait_s = 0.05


class Console(background.Screen, Protocol):
    """The part of the app that views and the operator's actions use."""

    snapshot: ScreenData | None
    draft: Draft
    book: LogBook
    terminal: Terminal
    operator: Operator
    alert: AlertLine
    answer: Answer
    view_name: str

    def do_back(self) -> None: ...
    def open_overlay(self, overlay: Overlay) -> None: ...
    def repaint_view(self) -> None: ...
    def follow(self, path: Path) -> None: ...
    async def show_view(self, name: str) -> None: ...
    def run_worker(self, work: Any) -> Any: ...


class Operator:
    """Asks questions, sends requests and starts launches; `do_<id>` executes the key `<id>`.

    `work` has the functions `prepare`, `launch` and `request` of the module `background`.
    """

    def __init__(self, screen: Console, work: Any = background):
        self._screen, self._work = screen, work
        self._wanted: Any = None
        """The options of a launch that was requested before their check ended, or None."""
        self._unsaved = ("", 0)
        """Path and last saved step of the run that has yet to save a requested checkpoint."""

    @property
    def _state(self) -> RunState | None:
        """The run of the newest snapshot, or None."""
        return self._screen.snapshot.state if self._screen.snapshot else None

    # --- confirmations and requests ------------------------------------------------------------

    def ask(
        self,
        make: Callable[[RunState | None], Question],
        then: Callable[[Choice], object] | None = None,
    ) -> None:
        """Opens the question that `make` returns, or shows the message of its CannotAsk."""
        from console.tui.widgets.confirm import Confirm

        try:
            question = make(self._state)
        except CannotAsk as reason:
            self._screen.say(str(reason), "error")
            return
        then = then or partial(self._send, Path(question.path))
        self._screen.open_overlay(Confirm(question, then))

    def _send(self, path: Path, choice: Choice) -> None:
        if choice.action == "resume":
            from console.launch_options import LaunchOptions
            from console.sources.launches import root_to_resume

            root = root_to_resume(path, self._screen.draft.root)
            self._launch(LaunchOptions(resume=path, root=root))
            return
        self.send(path, choice.action, dict(choice.args))

    def send(self, path: Path, action: str, args: dict[str, Any]) -> None:
        """Requests an action in the background, and shows the answer."""
        self._screen.say(f"{action}: sent …", "wait")
        work, status = partial(self._work.request, path, action, args), command("status", path)
        later = f"no answer yet to {action} of {path.name}; {status} shows the state"
        state = self._state

        def answered(text: str) -> None:
            self._screen.say(text)
            if action == "checkpoint" and state is not None:
                self._unsaved = state.path, state.saved_step

        run_in_background(self._screen, action, work, answered, None, path.name, later)

    def take(self, state: RunState | None) -> None:
        """Shows a message when a run has saved the checkpoint that was requested."""
        path, step = self._unsaved
        if state is not None and state.path == path and state.saved_step > step:
            self._unsaved = ("", 0)
            self._screen.say(f"the checkpoint of step {state.saved_step:,} is saved")

    def do_ack(self) -> None:
        notice = self._screen.alert.notice
        alert, text = (notice.alert, notice.text) if notice else ("", "")
        self.ask(lambda state: confirmations.acknowledge(state, alert, text))

    # --- launching -----------------------------------------------------------------------------

    def prepare(self) -> None:
        """Checks the draft in the background, one check at a time; writes nothing.

        If the draft changes during a check, the result of the check is dropped and another check
        starts.
        """
        screen, draft = self._screen, self._screen.draft
        if self._pending("check"):
            return
        options = draft.options()

        def ended(prepared: Any, trouble: str = "") -> None:
            if options != draft.options():
                self.prepare()
                return
            draft.take(options, prepared, trouble)
            screen.repaint_view()
            wanted, self._wanted = self._wanted, None
            if wanted == options and screen.view_name == "launch":
                screen.run_worker(self.do_launch())

        work = partial(self._work.prepare, options)
        run_in_background(screen, "check", work, ended, partial(ended, None), options.plan)

    def _pending(self, label: str) -> Pending | None:
        return next((each for each in self._screen.pending if each.label == label), None)

    def _is_starting(self) -> bool:
        """Returns whether a launch has no result yet; if so, also shows a message."""
        if held := self._pending("launch"):
            text = f"the launch of {held.about} is still starting ({age(held.waited_s)}); its "
            self._screen.say(f"{text}result will be shown here", "error")
        return held is not None

    async def do_launch(self) -> None:
        """Asks whether to start the next phase of a launch in progress, or else the draft.

        The draft is checked first. The question follows if the Launch view is still shown, and if
        the draft has not changed.
        """
        screen, state = self._screen, self._state
        if self._is_starting():
            return
        if state is not None and state.launch is not None and state.launch.under_way:
            then = partial(self._proceed, Path(state.launch.path))
            self.ask(lambda _: confirmations.proceed(state), then)
            return
        if screen.view_name != "launch":
            await screen.show_view("launch")
        if not screen.draft.is_checked:
            self._wanted = screen.draft.options()
            self.prepare()
            screen.say("the plan is still being checked; the question follows", "wait")
            return
        options, prepared = screen.draft.checked, screen.draft.prepared
        self.ask(
            lambda _: screen.draft.question(rundir.host_name(), state),
            lambda _: self._launch(replace(options, digest=prepared.digest)),
        )

    def _proceed(self, launch: Path, choice: Choice) -> None:
        self._send(launch, choice)
        self._screen.run_worker(self._screen.show_view("dashboard"))

    def _launch(self, options: Any) -> None:
        """Starts a launch or a resume; while another launch is starting, only shows a message."""
        screen = self._screen
        if self._is_starting():
            return
        what = options.plan or f"the rest of {options.resume}"
        screen.say(f"launching {what} …", "wait")

        def launched(found: tuple[Path, list[str]]) -> None:
            path, messages = found
            text = f"launched {what} in {path}; q leaves, the run continues"
            screen.say("; ".join([*messages, text]))
            screen.follow(path)

        work, runs = partial(self._work.launch, options), command("--root", options.root, "runs")
        dry = ("check", options.plan) if options.plan else ("resume", options.resume, "--dry-run")
        later = f"the launch of {what} continues; {runs} lists it, unless its preflight fails"
        later += f"\nif it fails, {command(*dry)} shows why"
        run_in_background(screen, "launch", work, launched, about=what, later=later)
