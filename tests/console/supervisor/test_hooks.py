"""The operator's hooks have a time limit, and a poll of a hook does not wait."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from console import plan
from console.settings_file import Settings
from console.sources import process
from console.supervisor import launch_spec, program
from console.supervisor.hooks import Alive, Hooks, document, variables
from tests.launches import HANG_GUARD_S, STUB, phase, set_hook
from trainers.contract import rundir

PROGRAM = Path(__file__).parents[2] / "programs" / "hook.py"
LIMIT_S = 6.0
"""The time limit of a hook that hangs. Even a busy machine starts Python in less time."""


class Trial:
    """Hooks of one test, the records of their program, and the events that were written."""

    def __init__(self, folder: Path, *words: str, program: str = "", **more):
        self.kept = folder / "kept"
        self.kept.mkdir(exist_ok=True)
        argv = (program,) if program else (sys.executable, str(PROGRAM), str(self.kept), *words)
        limit_s = more.pop("limit_s", HANG_GUARD_S)
        settings = Settings(argv, **{"hook_every_s": 0.05, **more})
        self.events: list[tuple[str, str, str]] = []
        self.hooks = Hooks(settings, lambda *e: self.events.append(e), limit_s)

    def run(self, **more) -> None:
        """Runs the hook on one alert, and waits for its end."""
        self.hooks.alert(alert(**more))
        self.hooks.close()

    def records(self) -> list[dict]:
        return [json.loads(path.read_text()) for path in sorted(self.kept.glob("*.json"))]

    def until(self, reached, between=lambda: None):
        deadline = time.monotonic() + HANG_GUARD_S
        while not (found := reached()):
            assert time.monotonic() < deadline, (self.events, self.records())
            between()
            self.hooks.poll()
            time.sleep(0.01)
        return found


def alert(text: str = "rank 1 is gone", **more) -> dict:
    return {"v": 1, "ts": 1.5, "kind": "alert", "level": "crit", "text": text,
            "alert": "rank-gone", "run": "tested/0-one", "state": "running"} | more  # fmt: skip


def is_gone(pid: int) -> bool:
    return process.state(pid) in (process.GONE, "Z")


def test_an_alert_is_told_in_the_environment_and_on_stdin(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "x")
    monkeypatch.setenv("NSA_CONSOLE_TOKEN", "of-the-run")
    t = Trial(tmp_path, "ok", "; rm -rf $HOME", "$(id)", "a b\nc")
    t.run()
    (kept,) = t.records()
    assert kept["argv"][1:] == ["ok", "; rm -rf $HOME", "$(id)", "a b\nc"], "there is no shell"
    names = {k.removeprefix("NSA_ALERT_"): v for k, v in kept["env"].items() if "_ALERT_" in k}
    assert names == {
        "NAME": "rank-gone", "LEVEL": "crit", "TEXT": "rank 1 is gone", "RUN": "tested/0-one",
        "STATE": "running", "TS": "1.5", "COUNT": "1",
    }  # fmt: skip
    assert not {"SECRET_KEY", "NSA_CONSOLE_TOKEN"} & set(kept["env"])
    document = json.loads(kept["stdin"])
    assert kept["stdin"].count("\n") == 1
    assert (document["text"], document["count"], document["earlier"]) == ("rank 1 is gone", 1, [])
    assert kept["cwd"] == "/", "a directory of the launch may be on a server that does not answer"
    assert kept["sid"] != os.getsid(0), "the program has a session of its own"
    assert t.events == []


def test_what_a_run_says_cannot_break_out_of_its_variable():
    nasty = alert("a\x1b]52;c;aGk=\x07b\nLD_PRELOAD=/evil.so\0" + "x" * 5000, run="r\nx", ts="soon")
    for each in (variables(document([nasty], 1)), document([nasty], 1)):
        for value in each.values():
            assert len(str(value)) <= 1000
            assert not any(ord(c) < 32 for c in str(value))


def test_levels_that_were_not_asked_for_and_no_hook_start_nothing(tmp_path):
    t = Trial(tmp_path)
    t.run(level="warn")
    t.hooks = Hooks(Settings(), lambda *e: t.events.append(e))
    t.run()
    without = Alive(Settings(("no-such-program",)), lambda *e: t.events.append(e))
    without.beat("tested", "running")
    without.end("tested")
    assert (t.records(), t.events) == ([], [])


def test_the_worst_of_several_alerts_is_the_one_in_the_variables(tmp_path):
    t = Trial(tmp_path, hook_levels=("warn", "crit"), hook_every_s=3600.0)
    t.run(text="first")
    t.hooks.alert(alert("before", level="warn"))
    t.hooks.alert(alert("GPU 3 is lost"))
    for n in range(20):
        t.hooks.alert(alert(f"flood {n}", level="warn"))
    t.hooks.close()
    _, kept = t.records()
    told = [kept["env"][f"NSA_ALERT_{key}"] for key in ("LEVEL", "TEXT", "COUNT")]
    assert told == ["crit", "GPU 3 is lost", "22"]
    assert json.loads(kept["stdin"])["earlier"] == [f"flood {n}" for n in range(4, 20)]


def test_what_comes_meanwhile_is_told_at_once_with_its_count(tmp_path):
    t = Trial(tmp_path, hook_every_s=3600.0)
    t.hooks.alert(alert("first"))
    t.until(t.records)
    for n in range(40):
        t.hooks.alert(alert(f"flood {n}"))
        t.hooks.poll()
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        t.hooks.poll()
    assert len(t.records()) == 1, "at least every_s lies between two starts"
    t.hooks.close()
    first, second = t.records()
    assert first["env"]["NSA_ALERT_COUNT"] == "1"
    assert second["env"]["NSA_ALERT_COUNT"] == "40"
    assert second["env"]["NSA_ALERT_TEXT"] == "flood 39"
    assert json.loads(second["stdin"])["earlier"] == [f"flood {n}" for n in range(23, 39)]


def test_a_hook_that_hangs_is_ended_with_everything_it_started_and_nothing_waits_for_it(tmp_path):
    t = Trial(tmp_path, "hang", limit_s=LIMIT_S)
    slowest = 0.0

    def measured() -> None:
        nonlocal slowest
        begun = time.monotonic()
        t.hooks.poll()
        slowest = max(slowest, time.monotonic() - begun)

    t.hooks.alert(alert())
    t.until(lambda: t.events, measured)
    (kept,) = t.records()
    assert is_gone(kept["pid"])
    assert is_gone(kept["child"])
    ((kind, text, level),) = t.events
    assert (kind, level) == ("hook", "warn")
    assert f"ran longer than {LIMIT_S:g} s and was ended" in text
    assert slowest < program.GRACE_S, "no call waited for the program, which ignored TERM"


def test_what_a_hook_leaves_behind_is_ended(tmp_path):
    t = Trial(tmp_path, "leave")
    t.run()
    (kept,) = t.records()
    assert is_gone(kept["child"])
    assert t.events == []


def test_a_hook_lives_no_longer_when_the_supervisor_is_gone(tmp_path):
    t = Trial(tmp_path, "hang", limit_s=LIMIT_S)
    child = os.fork()
    if child == 0:
        try:
            t.hooks.alert(alert())
            t.until(t.records)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    (kept,) = t.records()
    t.until(lambda: is_gone(kept["pid"]) and is_gone(kept["child"]))


def test_a_failure_that_repeats_is_told_once_and_then_that_it_works_again(tmp_path):
    works = tmp_path / "works"
    t = Trial(tmp_path, "fail-until", str(works))

    def again() -> None:
        t.hooks.alert(alert())

    t.until(lambda: len(t.records()) >= 4, again)
    assert t.events == [("hook", f"the alert hook {sys.executable} exited (code 7)", "warn")]
    works.touch()
    t.until(lambda: len(t.events) == 2, again)
    t.hooks.close()
    assert t.events[1][1:] == (f"the alert hook {sys.executable} works again", "info")


def test_the_alert_of_a_failed_hook_is_passed_on_again_until_the_hook_works(tmp_path):
    works = tmp_path / "works"
    t = Trial(tmp_path, "fail-until", str(works))
    t.hooks.alert(alert("rank 3 is stalled"))
    t.until(lambda: len(t.records()) >= 2)
    works.touch()
    t.until(lambda: len(t.events) == 2)
    t.hooks.close()
    *_, last = t.records()
    told = [last["env"][f"NSA_ALERT_{key}"] for key in ("TEXT", "COUNT")]
    assert told == ["rank 3 is stalled", "1"]
    count = len(t.records())
    t.run(text="next")
    *_, last = t.records()
    assert (len(t.records()), json.loads(last["stdin"])["earlier"]) == (count + 1, [])


@pytest.mark.parametrize("program", ["/no/such/program", str(PROGRAM)])
def test_a_hook_that_cannot_be_started_is_a_failure(tmp_path, program):
    t = Trial(tmp_path, program=program)
    t.run()
    ((kind, text, level),) = t.events
    assert (kind, level) == ("hook", "warn")
    assert f"the alert hook {program} exited (code 12" in text


@pytest.mark.parametrize(
    "error", [OSError(errno.EMFILE, "Too many open files"), MemoryError("no memory")]
)
def test_an_error_of_the_machine_is_a_failure_and_the_next_start_works(
    tmp_path, monkeypatch, error
):
    def refuse(*_: object) -> None:
        raise error

    t = Trial(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", refuse)
        t.hooks.alert(alert("first"))
        t.until(lambda: t.events)
    text = f"the alert hook {sys.executable} cannot be started: {error}"
    assert t.events == [("hook", text, "warn")]
    t.hooks.alert(alert("second"))
    t.until(lambda: len(t.events) == 2)
    assert t.events[1][1].endswith("works again")


def test_a_machine_without_threads_is_a_failure_and_the_alert_is_sent_once(tmp_path, monkeypatch):
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    t = Trial(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        t.hooks.alert(alert("first"))
        t.hooks.poll()
    text = f"the alert hook {sys.executable} cannot be started: can't start new thread"
    assert t.events == [("hook", text, "warn")]
    t.until(lambda: len(t.events) == 2)
    t.hooks.alert(alert("second"))
    t.hooks.close()
    assert [each["env"]["NSA_ALERT_TEXT"] for each in t.records()] == ["first", "second"]


def test_the_alive_hook_runs_at_its_interval_and_once_more_at_the_end(tmp_path):
    t = Trial(tmp_path)
    argv = (sys.executable, str(PROGRAM), str(t.kept))
    settings = Settings(("no-hook",), alive=argv, alive_every_s=0.3)
    hook, begun = Alive(settings, lambda *e: t.events.append(e)), time.monotonic()
    while len(t.records()) < 3:
        assert time.monotonic() < begun + HANG_GUARD_S
        hook.beat("tested/0-one", "running")
        time.sleep(0.01)
    assert time.monotonic() - begun >= 0.6
    hook.end("tested")
    found = [{k: r["env"][f"NSA_ALERT_{k}"] for k in ("NAME", "RUN", "STATE")} for r in t.records()]
    *before, last = found
    assert before == len(before) * [{"NAME": "alive", "RUN": "tested/0-one", "STATE": "running"}]
    assert last == {"NAME": "alive", "RUN": "tested", "STATE": "ended"}
    texts = [record["env"]["NSA_ALERT_TEXT"] for record in t.records()]
    assert texts[-2:] == ["the supervisor works; tested/0-one is running",
                          "the launch tested has ended"]  # fmt: skip
    assert t.events == []


def test_the_hook_of_the_settings_is_told_when_a_run_crashes(begin, tmp_path, monkeypatch):
    kept = tmp_path / "kept"
    kept.mkdir()
    set_hook(tmp_path, monkeypatch, str(kept))
    settings = tmp_path / "nsa-console" / "settings.yaml"
    is_alive = tmp_path / "is-alive"
    touch = {"alive": ["touch", str(is_alive)], "alive_every_s": 1}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | touch))
    started = begin(phase("one", "member.py", 100_000), shell=STUB)
    started.wait_steps(2)
    first = started.wait(lambda: is_alive.exists() and is_alive.stat().st_mtime)
    started.wait(lambda: is_alive.stat().st_mtime > first)
    os.kill(started.pids()[1], signal.SIGKILL)
    started.wait_end()
    started.wait(lambda: not rundir.is_alive(started.plan_state["supervisor"]))
    found = [json.loads(path.read_text()) for path in sorted(kept.iterdir())]
    said = " ".join(run["stdin"] for run in found)
    assert "rank 1 failed" in said
    assert "crashed: rank 1 was killed by SIGKILL" in said
    assert all("NSA_CONSOLE_TOKEN" not in run["env"] for run in found)
    assert {run["usr1"] for run in found} == {str(signal.SIG_DFL.value)}


def test_no_child_of_git_stays(tmp_path, monkeypatch):
    """Such a child would become an orphan of the supervisor and delay the end of a run."""
    git, pid = tmp_path / "git", tmp_path / "pid"
    git.write_text(f"#!/bin/sh\nsleep 60 >/dev/null 2>&1 &\necho $! > {pid}\nexit 1\n")
    git.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(launch_spec, "GIT_S", HANG_GUARD_S)
    assert launch_spec.git_facts(tmp_path) == {}
    until = time.monotonic() + HANG_GUARD_S
    while process.state(int(pid.read_text())) not in (process.GONE, "Z"):
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("program", "folder"),
    [({}, launch_spec.PROJECT), ({"module": "trainers.fsdp"}, launch_spec.PROJECT),
     ({"module": "mine.train"}, Path()), ({"script": "/code/train.py"}, Path("/code"))],
)  # fmt: skip
def test_the_commit_is_that_of_the_code_that_runs(program, folder):
    given = plan.parse({"name": "x", "phases": [{"name": "one", **program}]}, "test")
    assert launch_spec.code_folder(given.phases[0]) == folder


@pytest.mark.parametrize("action", ["proceed", "halt"])
def test_the_hook_is_told_when_a_plan_waits_and_when_it_ends_without_a_request(
    begin, tmp_path, monkeypatch, action
):
    kept, script = tmp_path / "kept", tmp_path / "short.py"
    kept.mkdir()
    script.write_text("print('a foreign program')\n")
    set_hook(tmp_path, monkeypatch, str(kept))
    one = {"name": "one", "script": str(script), "nproc": 1}
    two = {**one, "name": "two", "gates": {"steps_done": 5}}
    started = begin(one, two, {**one, "name": "three"}, shell=STUB, between="ask")
    started.wait(lambda: started.plan_state.get("state") == "waiting")
    started.wait(lambda: list(kept.glob("*.json")))
    assert started.ask(action)["ok"]
    name = started.wait_over()["launch"]
    found = [json.loads(json.loads(p.read_text())["stdin"]) for p in sorted(kept.glob("*.json"))]
    assert [(each["run"], each["state"], each["name"], each["level"]) for each in found] == [
        (name, state, "state", "crit") for state in ["waiting", "ended"][: 1 + (action != "halt")]
    ]
    assert found[0]["text"].startswith("one is done; to start two: ")
    assert action == "halt" or found[1]["text"].startswith("the launch has ended: two: ")
