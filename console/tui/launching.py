"""The launch that is being prepared, and the way from `L` to a running one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from console.model import LaunchState
from console.tui import questions
from console.tui.questions import CannotAsk, Choice


class Draft:
    """What would be launched: a plan with the operator's flags, and what its preflight said.

    Launched from the screen it asks between phases, unless the operator says `go`.
    """

    def __init__(self, plan_name: str, root: Path):
        self.plan_name, self.root = plan_name, root
        self.flags: dict[str, str] = {}
        self.between = "ask"
        self.prepared: Any = None
        self.trouble = ""

    def options(self, actions: Any) -> Any:
        return actions.LaunchOptions(
            plan=self.plan_name, flags=dict(self.flags), between=self.between, root=self.root
        )

    @property
    def plan(self) -> Any:
        return self.prepared.plan if self.prepared is not None else None

    @property
    def checks(self) -> tuple[Any, ...]:
        return self.prepared.checks if self.prepared is not None else ()

    def shell(self) -> str:
        """Returns the exact command of the first phase, with its flags."""
        return self.prepared.phases[0].shell() if self.prepared is not None else ""

    def planned_flags(self) -> Mapping[str, str]:
        """Returns the flags that the plan itself gives its first phase."""
        plan = self.plan
        return {**plan.env, **plan.phases[0].flags} if plan is not None else {}

    def question(self, host: str) -> questions.Question:
        """Returns what is asked before the launch. Raises CannotAsk when it would be refused."""
        if self.trouble:
            raise CannotAsk(self.trouble)
        if self.prepared is None:
            raise CannotAsk("the plan is still being checked; press L again in a moment")
        failed = [check for check in self.checks if check.result == "fail"]
        if failed:
            raise CannotAsk(f"not launched: {failed[0].text}")
        plan = self.plan
        ranks = max(phase.nproc for phase in plan.phases)
        names = [phase.name for phase in plan.phases]
        where = str(self.prepared.directory)
        return questions.launch(plan.name, ranks, names, where, host, self.flags, self.between)


class Launching:
    """The app's half that prepares, launches and goes on."""

    draft: Draft

    def prepare(self) -> None:
        """Checks the draft beside the screen; nothing is written."""
        app: Any = self
        draft = self.draft

        def done(prepared: Any) -> None:
            draft.prepared, draft.trouble = prepared, ""
            app.repaint_view()

        def failed(sentence: str) -> None:
            draft.trouble = sentence
            app.repaint_view()

        options = draft.options(app.actions)
        app.deeds.start("check", lambda: app.actions.prepare(options), done, failed)

    def do_launch(self) -> Any:
        """Goes on with the launch that waits, or asks whether to launch the draft."""
        app: Any = self
        state = app.snapshot.state if app.snapshot else None
        launch = state.launch if state is not None else None
        if state is not None and launch is not None and launch.state in ("running", "waiting"):
            app.ask_or_say(lambda: questions.proceed(state))
            return None
        return self._ask_launch()

    async def _ask_launch(self) -> None:
        app: Any = self
        if app.view_name != "launch":
            await app.show_view("launch")
        try:
            question = self.draft.question(app.host)
        except CannotAsk as reason:
            app.say(str(reason), "error")
            return
        options = self.draft.options(app.actions)
        app.ask(question, lambda choice: self._launch(choice, options))

    def _launch(self, _choice: Choice, options: Any) -> None:
        app: Any = self
        app.say(f"launches {options.plan} …", "wait")
        actions = app.actions

        def launched(path: Path) -> None:
            app.say(f"launched {options.plan} in {path}; q leaves, the run goes on")
            app.feed.follow(path)
            app.run_worker(app.show_view("dashboard"))

        app.deeds.start("launch", lambda: actions.launch(options, actions.who()), launched)

    def set_flag(self, launch: LaunchState, name: str, value: str | None) -> None:
        """Asks the supervisor to change a flag for the next phase."""
        app: Any = self
        if launch.phase + 1 >= len(launch.phases):
            app.say(f"{name} cannot change: {launch.id} has no phase after this one", "error")
            return
        app.send(Path(launch.path), "set-flag", {"name": name, "value": value})
