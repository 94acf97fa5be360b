"""Late results of launches, requests and checks, and the screen until they arrive."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import threading
from pathlib import Path

import pytest

from console.launch_options import LaunchOptions
from console.tui import background
from console.tui.confirmations import CannotAsk
from tests.console.sources import directory
from tests.console.tui import recorded
from tests.console.tui.recorded import Asked, app_on, driven, lines, picture, play, see, until
from tests.launches import STUB, phase, wait_for, write_plan
from tests.terminal import Terminal
from trainers.contract.errors import ContractError, RefusedError

ROOT = Path(__file__).parents[3]


class Slow(Asked):
    """Launches, requests and (with `slow_checks`) checks return only when `go` is set."""

    def __init__(self, **given):
        super().__init__(**given)
        self.go, self.checks, self._check = threading.Event(), [], self.prepare
        self.prepare, self.slow_checks = self._prepare, False

    def launch(self, options):
        found = super().launch(options)
        self.go.wait(600)
        if not self.ok:
            raise RefusedError(self.text)
        return found

    def request(self, path, action, args):
        self.go.wait(600)
        return super().request(path, action, args)

    def _prepare(self, options):
        self.checks.append(options)
        if self.slow_checks:
            self.go.wait(600)
        return self._check(options)


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(background, "LIMIT_S", 0.5)


async def launch(pilot, app):
    await play(pilot, "…✓ torch", "L")
    await see(pilot, "Launch cpu_smoke?", "y yes")
    await pilot.press("y")


@pytest.mark.parametrize("ok", [True, False])
async def test_a_launch_that_takes_long_is_told_and_no_second_one_is_asked_about(tmp_path, ok):
    asked = Slow(ok=ok, text="the supervisor did not start")
    async with driven(app_on(root=tmp_path, actions=asked)) as (app, pilot):
        await launch(pilot, app)
        await until(pilot, lambda: bool(asked.launched))
        for _ in range(2):
            await play(pilot, "L", "…the launch of cpu_smoke is still starting")
            assert app.overlay is None
            await pilot.press("escape")
            await until(pilot, lambda: "launch of cpu_smoke: no answer for" in lines(app)[1])
        asked.go.set()
        if ok:
            await see(pilot, "✓ launched cpu_smoke in /nowhere/launched")
            assert app.feed._path == asked.directory
            await until(pilot, lambda: app.view_name == "dashboard")
        else:
            await play(pilot, "…✗ the supervisor did not start", "L", "…Launch cpu_smoke?")
        await until(pilot, lambda: "no answer for" not in lines(app)[1])
        assert len(asked.launched) == 1


@pytest.mark.parametrize(("key", "ok"), [("H", True), ("D", False)])
async def test_a_late_answer_blocks_no_key_and_is_shown(key, ok):
    asked = Slow(ok=ok, text="rank 1 does as well")
    app = app_on(recorded.running(), actions=asked)
    action = {"H": "halt", "D": "dump"}[key]
    async with driven(app) as (_, pilot):
        await play(pilot, key, "…y yes", "y")
        for view, name in zip("2341", ("launch", "stall", "logs", "dashboard"), strict=True):
            await pilot.press(view)
            await until(pilot, lambda name=name: app.view_name == name)
        waits = f"! WARN {action} of 1-plumbing: no answer for"
        await until(pilot, lambda: lines(app)[1].startswith(waits))
        assert "still waiting" in lines(app)[1]
        asked.go.set()
        sign = "✓" if ok else "✗"
        await until(pilot, lambda: f"{sign} rank 1 does as well" in picture(app))
        await until(pilot, lambda: "no alert" in lines(app)[1])


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_launch_that_is_requested_during_the_check_is_asked_about_after_it(
    tmp_path, leaves
):
    asked = Slow()
    asked.slow_checks = True
    async with driven(app_on(recorded.crashed(), root=tmp_path, actions=asked)) as (app, pilot):
        await play(pilot, "L", "…still being checked")
        assert app.overlay is None
        if leaves:
            await pilot.press("1")
            await until(pilot, lambda: app.view_name == "dashboard")
        asked.go.set()
        await until(pilot, lambda: app.draft.is_checked)
        if leaves:
            await asyncio.sleep(0.2)
            assert app.overlay is None, "no question about a view that is not shown"
            await pilot.press("L")
        await see(pilot, "Launch cpu_smoke?", "y yes")


async def test_only_the_result_of_the_newest_check_is_used(tmp_path):
    class Refusing(Slow):
        """Rejects a draft without flags, here the first draft."""

        def _prepare(self, options):
            prepared = super()._prepare(options)
            if not options.flags:
                raise RefusedError("the first draft is refused")
            return prepared

    asked = Refusing()
    asked.slow_checks = True
    async with driven(app_on(root=tmp_path, actions=asked)) as (app, pilot):
        await until(pilot, lambda: bool(asked.checks))
        await play(pilot, "…NSA_OPT_FUSED", "space", "j", "j", "j", "space", "L")
        await see(pilot, "still being checked")
        assert len(asked.checks) == 1
        results = []
        take = app.draft.take
        app.draft.take = lambda options, *more: (results.append(options), take(options, *more))
        asked.go.set()
        await until(pilot, lambda: bool(results))
        assert [each.flags for each in results] == [{"NSA_OPT_FUSED": "1"}]
        assert [each.between for each in results] == ["go"]
        assert len(asked.checks) == 2
        assert (app.draft.trouble, app.draft.plan.phases[0].flags["NSA_OPT_FUSED"]) == ("", "1")


WAITS = (
    "import console.settings_file as s, console.tui.background as b, sys, time; "
    "b.request = s.charts = lambda *given: time.sleep(600); "
    "from console.cli import main; sys.exit(main(sys.argv[1:]))"
)
"""Starts the console; requests, and reads of charts from the settings file, never return."""


def test_leaving_says_which_answers_are_open_and_nothing_of_the_settings(tmp_path):
    path = directory.launch(tmp_path)
    words = [sys.executable, "-c", WAITS, "--root", str(tmp_path)]
    directory.run(path / "0-first")
    with (
        directory.owned(path),
        Terminal(words, ROOT, {"XDG_STATE_HOME": str(tmp_path)}, (250, 40)) as terminal,
    ):
        terminal.play("…RUNNING", "H", "…y yes", "y", "…halt: sent …")
        terminal.settle(1.0)  # the console then waits for the settings file too
        terminal.leave()
        told = (
            f"no answer yet to halt of 0-first; nsa-console status {path}/0-first shows the state"
        )
        assert told in " ".join(terminal.text.split())
        assert terminal.text.count("no answer yet") == 1


SLOW_START = """
import os, sys, time
while "launch" in sys.orig_argv and os.path.exists({!r}):
    time.sleep(0.05)
"""
"""Delays `nsa-console launch`, as a long preflight does, while a file exists."""


@pytest.mark.parametrize("ends", ["q", "hang-up"])
def test_a_confirmed_launch_outlives_the_screen(tmp_path, begin, ends):
    hold = tmp_path / "hold"
    hold.touch()
    (tmp_path / "sitecustomize.py").write_text(SLOW_START.format(str(hold)))
    plan, root = write_plan(tmp_path, phases=[phase("one", "member.py", 3)]), tmp_path / "artifacts"
    words = [sys.executable, "-m", "console", "--root", str(root), "--plan", str(plan)]
    env = {"PYTHONPATH": f"{tmp_path}:{STUB['PYTHONPATH']}", "XDG_STATE_HOME": str(tmp_path)}
    with Terminal(words, ROOT, env, (500, 40)) as terminal:
        terminal.play("…checks passed", "L", "…y yes", "y", "…launching ")
        if ends == "q":
            terminal.leave()
            told = "".join(terminal.text.split())  # a long path makes a line too wide
            for part in (
                f"the launch of {plan} continues; ", f"nsa-console --root {root} runs lists it, "
                "unless its preflight fails nsa-console: if it fails, ",
                f"nsa-console check {plan} shows why",
            ):  # fmt: skip
                assert "".join(part.split()) in told
        else:
            terminal.hang_up()
            terminal.wait_exit()
    assert not root.exists()
    hold.unlink()
    started = begin.adopt(wait_for(lambda: next(root.glob("*/*/plan_state.json"))).parent)
    assert started.wait_end()["phases"][0]["state"] == "completed"


def test_a_resume_says_which_flags_of_the_shell_it_uses(begin, monkeypatch):
    old = begin(phase("one", "member.py", 100_000), shell=STUB, nproc=1)
    old.wait_steps(2)
    old.ask("halt")
    old.wait_over()
    monkeypatch.setenv("NSA_SDPA_AUDIT", "1")
    monkeypatch.setenv("PYTHONPATH", STUB["PYTHONPATH"])
    options = LaunchOptions(resume=old.path, root=old.path.parents[1])
    path, messages = background.launch(options)
    begin.adopt(path)
    told = "NSA_SDPA_AUDIT=1 of the shell is used; the launch to resume has no value"
    assert messages[0] == told
    with pytest.raises(ContractError, match="is already continued by"):
        background.launch(options)


async def test_a_question_is_about_the_options_that_were_checked(tmp_path):
    asked = Slow()
    async with driven(app_on(root=tmp_path, actions=asked)) as (app, pilot):
        await see(pilot, "✓ torch")
        app.draft.flags["NSA_LR"] = "0.5"
        with pytest.raises(CannotAsk, match="still being checked"):
            app.draft.question("gpu01")
        app.draft.flags.clear()
        asked.go.set()
        await launch(pilot, app)
        await until(pilot, lambda: bool(asked.launched))
        digest = app.draft.prepared.digest
        assert asked.launched == [dataclasses.replace(app.draft.checked, digest=digest)]


async def test_the_answer_to_a_resume_begins_with_its_messages():
    asked = Asked()
    asked.messages = ["NSA_LR=0.9 of the shell is not used; the launch to resume has 0.5"]
    state = dataclasses.replace(
        recorded.crashed(), checkpoint="step_00000138", decided={"NSA_LR": "0.5"}
    )
    async with driven(app_on(state, actions=asked), (250, 40)) as (app, pilot):
        await play(pilot, "R", "…y yes", "y", "…✓ NSA_LR=0.9 of the shell is not used;")
        assert "; launched the rest of /nowhere/cpu_smoke/20261120-031500 in" in picture(app)
