"""The end of a plan: after requests, after failed starts and after failed reads and writes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from console import actions, status_text
from console.run_state import Facts
from console.sources.run import RunSource
from console.supervisor.attempt import Attempt
from console.supervisor.launch import Launch
from tests import broken
from tests.faults.scene import ROOT
from tests.launches import STUB, phase, set_hook
from trainers.contract import rundir


def sleeper(folder: Path, name: str) -> dict[str, object]:
    """Returns a phase of one process, which is not instrumented and ends when `go` exists."""
    script = folder / f"{name}.py"
    script.write_text(
        "import os, time\nprint('begun', flush=True)\n"
        f"while not os.path.exists({str(folder / 'go')!r}):\n    time.sleep(0.02)\n"
    )
    return {"name": name, "script": str(script), "nproc": 1}


@pytest.mark.parametrize("how", ["request", "file"])
def test_a_halt_that_the_program_does_not_obey_ends_the_plan_and_leaves_nothing_outside(
    begin, tmp_path, monkeypatch, how
):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    started = begin(sleeper(tmp_path, "one"), sleeper(tmp_path, "two"))
    log = rundir.logs(started.path / "0-one", 1) / rundir.TORCHRUN_LOG
    started.wait(lambda: log.exists() and b"begun" in log.read_bytes())
    if how == "file":
        (started.run() / rundir.HALT).touch()
    else:
        assert started.ask("halt")["ok"]
    (tmp_path / "go").touch()
    ended = started.wait_end()
    assert [phase["state"] for phase in ended["phases"]] == ["completed", "later"]
    why = {"request": "halt requested by tester", "file": ".HALT exists"}[how]
    assert ended["why"] == f"one: {why}"
    state = RunSource(started.path).poll()
    assert state.launch is not None
    assert status_text.launch_exit_code(state.launch) == 4
    assert os.listdir(temporary) == []
    assert log.with_suffix("").is_dir()


def test_a_halt_file_in_the_last_phase_does_not_end_a_plan_early_that_has_passed(begin, tmp_path):
    started = begin(sleeper(tmp_path, "one"), shell=STUB)
    log = rundir.logs(started.path / "0-one", 1) / rundir.TORCHRUN_LOG
    started.wait(lambda: log.exists() and b"begun" in log.read_bytes())
    (started.run() / rundir.HALT).touch()
    (tmp_path / "go").touch()
    assert (level_of_the_end(started), started.plan_state["why"]) == ("info", "all phases are done")


@pytest.mark.parametrize("dies", ["the working process", "the supervisor"])
def test_a_requested_end_is_known_as_requested_to_a_new_process(begin, tmp_path, dies):
    """A requested end has the level info, for which the hook does not run by default."""
    started = begin(sleeper(tmp_path, "one"), sleeper(tmp_path, "two"), shell=STUB)
    log = rundir.logs(started.path / "0-one", 1) / rundir.TORCHRUN_LOG
    started.wait(lambda: log.exists() and b"begun" in log.read_bytes())
    assert started.ask("halt")["ok"]
    if dies == "the supervisor":
        started.replace_supervisor()
    else:
        child = started.child()
        os.kill(child, signal.SIGKILL)
        started.wait(lambda: started.plan_state["supervisor"]["child"]["pid"] != child)
    (tmp_path / "go").touch()
    assert level_of_the_end(started) == "info"


def level_of_the_end(started):
    text = f"the launch has ended: {started.wait_end()['why']}"
    return started.wait(lambda: [e["level"] for e in started.events() if e["text"] == text])[0]


def test_a_document_of_an_ended_run_is_the_same_after_its_second_write(begin, tmp_path):
    """A new working process writes the document again, from the copy of the owner."""
    (tmp_path / "go").touch()
    started = begin(sleeper(tmp_path, "one"), sleeper(tmp_path, "two"), between="ask", shell=STUB)
    started.wait(lambda: started.plan_state.get("state") == "waiting")
    child, before = started.child(), started.state()
    os.kill(child, signal.SIGKILL)
    started.wait(lambda: started.plan_state["supervisor"]["child"]["pid"] != child)
    (replaced,) = [e for e in started.events() if "a new one has replaced it" in e["text"]]
    assert replaced["level"] == "crit", "the hook does not run"
    assert started.ask("halt")["ok"]
    started.wait_over()
    assert started.state() == before


def test_a_request_to_a_former_run_is_answered(begin, tmp_path):
    (tmp_path / "go").touch()
    started = begin(sleeper(tmp_path, "one"), sleeper(tmp_path, "two"), between="ask", shell=STUB)
    started.wait(lambda: started.plan_state.get("state") == "waiting")
    why = started.plan_state["why"]
    assert why.startswith("one is done; to start two: ")
    assert why.endswith(f"nsa-console do {started.path} proceed")
    request = {"v": 1, "id": "late", "action": "dump", "args": {}, "by": "tester"}
    rundir.write_json(started.run() / rundir.REQUESTS / "late.json", request)
    answer = started.wait(lambda: [e for e in started.events(0) if e["kind"] == "answer"])
    assert (answer[0]["request"], answer[0]["ok"]) == ("late", False)
    assert started.ask("halt")["ok"]
    assert started.wait_end()["why"] == "halt requested by tester before the next phase"


@pytest.mark.parametrize(
    ("stage", "spawned", "words"),
    [
        ("collect", True, "the ranks have ended already; no further attempt or phase starts"),
        ("collect", False, "no rank was started; no further attempt or phase starts"),
        ("run", True, "restart is in progress, requested by a rule; no attempt follows"),
    ],
)
def test_a_request_after_an_attempt_or_in_its_restart_says_what_follows(stage, spawned, words):
    """A `stop` or `halt` right after `proceed` may end the phase before torchrun starts."""
    attempt = SimpleNamespace(
        stage=stage, _cut_short=False, tree=SimpleNamespace(spawned=spawned), _grace_s=1.0,
        known=Facts(requested="restart", by="a rule"),
    )  # fmt: skip
    assert Attempt.end(cast(Attempt, attempt), "halt", "x") == words


def test_a_kill_is_sent_while_a_stop_is_in_progress():
    sent = list[str]()
    attempt = SimpleNamespace(
        stage="run", known=Facts(requested="stop", by="x"), _grace_s=1.0, _learn=lambda **_: None,
        _run=SimpleNamespace(publish=lambda: None),
        tree=SimpleNamespace(kill=lambda: sent.append("KILL")),
    )  # fmt: skip
    assert Attempt.end(cast(Attempt, attempt), "kill", "y").startswith("KILL is sent")
    assert sent == ["KILL"]


@pytest.mark.parametrize("action", ["dump", "checkpoint"])
def test_a_request_before_the_ranks_exist_says_so(action):
    starting = SimpleNamespace(
        state="starting",
        path=Path("/launch/1-two"),
        attempt=SimpleNamespace(tree=SimpleNamespace(handles=dict)),
    )
    launch = SimpleNamespace(_addressed=lambda _: starting)
    launch._without_ranks = partial(Launch._without_ranks, launch)
    request = SimpleNamespace(action=action, args={})
    ok, text, _ = getattr(Launch, f"_do_{action}")(launch, request)
    assert (ok, text) == (False, f"1-two is starting, so no rank is running yet; send {action} "
                          "again in a few seconds")  # fmt: skip


def test_a_phase_whose_config_became_invalid_cannot_start_and_leaves_no_shared_memory(
    begin, tmp_path
):
    memory, config = tmp_path / "memory", tmp_path / "two.yaml"
    memory.mkdir()
    shutil.copyfile(ROOT / "configs" / "tiny_cpu.yaml", config)
    moved = f"rundir.SHARED_MEMORY = pathlib.Path({str(memory)!r})"
    shell = broken.shell(
        tmp_path, "launch.Launch.tick", "pass", f"from trainers.contract import rundir; {moved}"
    )
    started = begin(
        phase("one", "member.py", 3, "until", tmp_path / "go"),
        {"name": "two", "module": "trainers.ddp", "config": str(config)}, shell=shell,
    )  # fmt: skip
    started.wait_steps(3)
    assert len(os.listdir(memory)) == 1
    config.write_text("no_such_setting: 1\n")
    (tmp_path / "go").touch()
    ended = started.wait_over()
    assert [entry["state"] for entry in ended["phases"]] == ["completed", "failed"]
    assert ended["why"].startswith("two cannot start: ")
    assert os.listdir(memory) == []


@pytest.mark.parametrize("lost", ["config", "working directory"])
def test_a_proceed_says_that_the_phase_cannot_start(begin, tmp_path, monkeypatch, lost):
    config, work = tmp_path / "two.yaml", tmp_path / "work"
    shutil.copyfile(ROOT / "configs" / "tiny_cpu.yaml", config)
    work.mkdir()
    monkeypatch.chdir(work)
    two = {"name": "two", "module": "trainers.ddp", "config": str(config)}
    started = begin(phase("one", "member.py", 3), two, between="ask", shell=STUB)
    monkeypatch.chdir(ROOT)
    started.wait(lambda: started.plan_state.get("state") == "waiting")
    if lost == "config":
        config.write_text("no_such_setting: 1\n")
    else:
        work.rmdir()
    answer = started.ask("proceed")
    assert (answer["ok"], answer["text"][:18]) == (False, "two cannot start: "), answer
    ended = started.wait_over()
    assert [entry["state"] for entry in ended["phases"]] == ["completed", "failed"]


def test_an_unexpected_error_at_the_start_of_a_phase_is_left_to_the_next_process(begin, tmp_path):
    harm = "if self.phase.name == 'two' and not self._link.state.former_end: raise KeyError('x')"
    started = begin(
        phase("one", "member.py", 3), phase("two", "member.py", 3), between="ask",
        shell=broken.shell(tmp_path, "run.Run._new_record", harm),
    )  # fmt: skip
    started.wait(lambda: started.plan_state.get("state") == "waiting")
    answer = started.ask("proceed", phase="two")
    assert (answer["ok"], "two is running" in answer["text"]) == (True, True), answer
    assert started.wait_end(60)["why"] == "all phases are done"


@pytest.mark.parametrize(("how", "state", "code"), [("TERM", "lost", 5), ("stop", "stopped", 4)])
def test_an_end_whose_records_cannot_be_read_is_not_completed_and_starts_no_phase(
    begin, tmp_path, how, state, code
):
    started = begin(
        phase("one", "member.py", 100_000), phase("two", "member.py", 1), shell=STUB
    )  # fmt: skip
    started.wait_steps(3)
    agent = started.state()["torchrun"]["pid"]
    started.wait(lambda: started.plan_state["phases"][0]["state"] == "running")
    started.run().rename(tmp_path / "away")
    seen = RunSource(started.path).poll()
    assert (seen.state, seen.id) == ("running", f"{started.path.parent.name}-"
                                     f"{started.path.name}/0-one")  # fmt: skip
    if how == "TERM":
        started.path.joinpath("0-one").touch()
        os.kill(agent, signal.SIGTERM)
    else:
        assert actions.send(started.path, "stop", {}, "tester")
    ended = started.wait_end()
    assert [phase["state"] for phase in ended["phases"]] == [state, "later"], ended
    assert how == "stop" or "cannot read the run directory" in ended["why"]
    seen = RunSource(started.path).poll()
    assert (seen.state, status_text.exit_code(seen)) == (state, code)
    assert seen.launch is not None
    assert status_text.launch_exit_code(seen.launch) == code


def test_a_plan_waits_after_a_sweep_and_not_between_its_runs(begin, tmp_path):
    (tmp_path / "short.py").touch()
    one = {"name": "one", "script": str(tmp_path / "short.py"), "nproc": 1}
    sweep = one | {"rounds": 9, "variants": {"a": {}, "b": {"flags": {"NCCL_PROTO": "Simple"}}}}
    started = begin(sweep, one | {"name": "two"}, between="ask", shell=STUB)
    started.wait(lambda: started.plan_state["state"] == "waiting")
    states = [entry["state"] for entry in started.plan_state["phases"]]
    assert states == ["completed"] * 18 + ["next"]
    assert started.ask("halt")["ok"]
    started.wait_end()


def test_a_directory_that_is_moved_while_a_plan_waits_pages(begin, tmp_path, monkeypatch):
    kept = tmp_path / "kept"
    kept.mkdir()
    set_hook(tmp_path, monkeypatch, str(kept))
    started = begin(
        phase("one", "member.py", 3), phase("two", "member.py", 3), between="ask", shell=STUB
    )
    started.wait(lambda: started.plan_state["state"] == "waiting")
    started.path.rename(tmp_path / "away")
    pages = started.wait(lambda: [
        text for path in kept.glob("*.json")
        if "was moved" in (text := json.loads(path.read_text())["env"]["NSA_ALERT_TEXT"])
    ])  # fmt: skip
    assert pages[0].startswith("stop the run with kill -TERM")
    (tmp_path / "away").rename(started.path)
    started.wait(lambda: [e for e in started.events() if e.get("alert") == "own-directory"])
    assert started.ask("halt")["ok"]
    started.wait_end()


def test_the_reason_of_an_end_names_writes_that_failed_at_that_time(begin):
    started = begin(phase("one", "member.py", 100_000), nproc=1, shell=STUB)
    started.wait_steps(2)
    live = Path(started.state()["live_dir"]) / rundir.LIVE_STATUS
    with immutable(started.run()):
        started.wait(lambda: "dropped" in [
            alert["alert"] for alert in (rundir.read_json(live) or {}).get("alerts", ())
        ])  # fmt: skip
        os.kill(started.pids()[0], signal.SIGKILL)
        why = started.wait_end()["phases"][0]["why"]
    assert "rank 0 was killed by SIGKILL" in why
    assert "; alert at the end: writes to the run directory fail (Operation not permitted" in why


@contextmanager
def immutable(folder: Path) -> Iterator[None]:
    """Prevents new files in `folder` during a `with` block, or skips the test."""
    if (
        os.geteuid()
        or subprocess.run(["chattr", "+i", str(folder)], capture_output=True).returncode
    ):
        pytest.skip("needs root and a file system with immutable folders")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", str(folder)], check=True)


def test_a_halt_that_cannot_be_written_is_answered_so_and_the_run_goes_on(begin):
    started = begin(phase("one", "member.py", 100_000), nproc=1, shell=STUB)
    started.wait_steps(2)
    run = started.run()
    with immutable(run):
        refused = started.ask("halt")
    assert (refused["ok"], "cannot write .HALT" in refused["text"]) == (False, True)
    assert not (run / rundir.HALT).exists()
    started.wait_steps(5)
    assert started.state()["state"] == "running"
    (started.path / rundir.HALT).touch()
    assert level_of_the_end(started) == "crit", "the request did not end the plan"
    assert started.plan_state["phases"][0]["state"] == "halted"


def test_a_halt_of_a_watch_rule_that_cannot_be_written_alerts_and_is_tried_again(begin, tmp_path):
    program = tmp_path / "diverged.py"
    program.write_text(
        "import itertools, time\nfrom trainers.contract.member import join\nrun = join()\n"
        "for step in itertools.count(1):\n"
        "    if run.step(step, loss=float('nan')):\n        break\n"
        "    time.sleep(0.1)\n"
    )
    rules = {"non_finite": {"action": "halt", "for_s": 0}}
    started = begin(
        {"name": "one", "script": str(program), "nproc": 1}, watch={"rules": rules}, shell=STUB
    )
    started.wait_steps(1)
    with immutable(started.run()):
        (alert,) = started.wait(lambda: started.alerts("halt-failed"))
    assert alert["text"].startswith("cannot write .HALT: Operation not permitted; the ranks ")
    ended = started.wait_end()
    assert [phase["state"] for phase in ended["phases"]] == ["halted"], ended["why"]
    cleared = [each for each in started.events(0) if each["kind"] == "clear"]
    assert ".HALT is written" in [each["text"] for each in cleared], cleared


@pytest.mark.parametrize(
    ("action", "state", "then"),
    [
        ("restart", "completed", "the watch rule disk does not restart the run"),
        ("stop", "stopped", "stop, requested by the watch rule disk"),
    ],
)
def test_a_rule_stops_a_run_whose_halt_is_pending_but_does_not_end_it_for_a_restart(
    begin, tmp_path, action, state, then
):
    rules = {"disk": {"threshold": 1e7, "for_s": 0.5, "action": action}}
    started = begin(
        sleeper(tmp_path, "one"), watch={"rules": rules}, restart={"when": "crash"}, shell=STUB
    )
    assert started.ask("halt")["ok"]
    started.wait(lambda: [event for event in started.events(0) if then in event["text"]])
    (tmp_path / "go").touch()
    assert [phase["state"] for phase in started.wait_end()["phases"]] == [state]
