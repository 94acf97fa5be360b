"""A hook that fails runs again with its alerts, after pauses that double."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from console.settings_file import Settings
from console.supervisor import hooks
from console.supervisor.context import Services
from console.supervisor.hooks import Alive, Hooks
from tests.console.supervisor.test_hooks import alert


class Inline:
    """Runs a job at once, in the place of a thread."""

    def __init__(self, *_: object):
        pass

    def submit(self, job, *words) -> Future:
        done: Future = Future()
        done.set_result(job(*words))
        return done


@pytest.fixture
def failing(tmp_path, monkeypatch):
    """A hook that always fails, started every 30 s, and a clock; `starts` has the time of each."""
    found = SimpleNamespace(now=0.0, starts=[], texts=[])

    def run(_argv: object, document: dict, _limit_s: float) -> str:
        found.starts.append(found.now)
        found.texts.append([document["text"], *document["earlier"]])
        return "exited (code 6)"

    def wait_until(end: float) -> None:
        while found.now < end:
            found.hooks.poll()
            found.now += 1

    clock = {"monotonic": lambda: found.now, "sleep": lambda _: None, "time": time.time}
    monkeypatch.setattr(hooks, "time", SimpleNamespace(**clock))
    monkeypatch.setattr(hooks, "ThreadPoolExecutor", Inline)
    monkeypatch.setattr(hooks, "run", run)
    found.settings = Settings(("page",), alive=("ping",), alive_every_s=60.0, hook_every_s=30.0)
    found.hooks, found.wait_until = Hooks(found.settings, lambda *_: None), wait_until
    return found


def test_a_hook_that_always_fails_runs_after_growing_pauses_and_not_for_ever(failing):
    failing.hooks.alert(alert("first"))
    failing.wait_until(86_400)
    pauses = [after - before for before, after in itertools.pairwise(failing.starts)]
    assert pauses == [60, 120, 240, 480, 960, *[1800] * 15]
    failing.hooks.alert(alert("second"))
    failing.hooks.poll()
    assert failing.texts[-1] == ["second"], "a new alert does not wait for the pause"
    failing.hooks.alert(alert("third"))
    failing.wait_until(failing.now + 40)
    assert failing.texts[-1] == ["third", "second"]
    count = len(failing.starts)
    failing.hooks.close()
    failing.wait_until(failing.now + 86_400)
    assert len(failing.starts) == count + 1, "the end of a launch waits for no other try"


def test_a_cleared_alert_is_not_passed_on_again(failing):
    directory = SimpleNamespace(
        event=lambda _folder, _attempt, kind, text, level, **more: alert(
            text, kind=kind, level=level, **{"alert": ""} | more
        )
    )
    services = Services(directory, *[None] * 2, failing.hooks, *[None] * 3)  # type: ignore[arg-type]
    event = partial(services.event, Path(), "run")
    event("running", 1, "alert", "stalled", "crit", alert="stall")
    event("running", 1, "alert", "the disk is full", "crit", alert="disk")
    event("restarting", 1, "state", "it restarts", "crit", state="restarting")
    event("running", 1, "state", "running → stalled", "crit", state="stalled")
    failing.wait_until(10)
    assert len(failing.texts) == 1
    event("stalled", 1, "clear", "the ranks step again", alert="stall")
    event("stalled", 1, "state", "stalled → running", state="running")
    failing.wait_until(70)
    assert failing.texts[1:] == [["it restarts", "the disk is full"]]
    failing.hooks.clear("run", "", "restarting")
    event("running", 1, "alert", "not sent yet", "crit", alert="rank-gone")
    event("running", 1, "clear", "the attempt has ended", alert="rank-gone")
    event("running", 1, "clear", "the disk has space again", alert="disk")
    failing.wait_until(110)
    assert failing.texts[2:] == [["not sent yet"]], "it was cleared before its first page"


def test_a_hook_that_runs_at_the_end_and_fails_is_run_once_more(failing, monkeypatch):
    jobs = list[Future]()
    pool = SimpleNamespace(submit=lambda *_: jobs.append(Future()) or jobs[-1])
    monkeypatch.setattr(failing.hooks, "_runs", pool)
    failing.hooks.alert(alert("the launch has ended"))
    failing.hooks.poll()

    def end(_s: float) -> None:
        if not jobs[-1].done():
            jobs[-1].set_result("exited (code 22)")

    monkeypatch.setattr(hooks.time, "sleep", end)
    failing.hooks.close()
    assert len(jobs) == 2


def test_the_alive_hook_keeps_its_interval_when_it_fails(failing):
    failing.hooks = SimpleNamespace(poll=lambda: alive.beat("tested", "running"))
    alive = Alive(failing.settings, lambda *_: None)
    failing.wait_until(301)
    assert failing.starts == [0, 60, 120, 180, 240, 300]
