"""Adoptions: from another shell, of attempts that have not started, and with open alerts."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from console import actions
from console.run_state import Facts
from console.sources.record_files import RecordFiles
from console.sources.run import RunSource
from console.supervisor import cross_check, former_documents, launch_spec
from console.supervisor.attempt import Attempt
from console.supervisor.launch_spec import PROJECT
from console.supervisor.run_files import Files
from tests.console.sources.directory import change
from tests.launches import PROGRAMS, STUB, phase
from trainers.contract import jsonl, rundir
from trainers.contract.errors import RefusedError

WRAPPER = f"""import runpy, sys
at = sys.argv.index("--config")
del sys.argv[at : at + 2]
runpy.run_path({str(PROGRAMS / "member.py")!r}, run_name="__main__")
"""
OF_LAUNCH, OF_ADOPTER = {"HF_HOME": "/of/launch"}, {"HF_HOME": "/x", "TIKTOKEN_CACHE_DIR": "/x"}


@pytest.fixture
def orphan(begin, tmp_path, monkeypatch):
    """A launch without a supervisor, of a plan with relative paths; the test has another shell."""
    for name in OF_ADOPTER:
        monkeypatch.delenv(name, raising=False)
    work = tmp_path / "work"
    work.mkdir()
    (work / "train.py").write_text(WRAPPER)
    (work / "some.yaml").touch()
    relative = {"script": "train.py", "config": "some.yaml"}
    monkeypatch.chdir(work)
    started = begin(
        {"name": "one", "args": ["5", "until", str(tmp_path / "go")], **relative},
        {"name": "two", "args": ["5"], **relative}, shell={**STUB, **OF_LAUNCH},
    )  # fmt: skip
    started.wait_steps(3)
    started.kill_supervisor()
    monkeypatch.chdir(tmp_path)
    for name, value in OF_ADOPTER.items():
        monkeypatch.setenv(name, value)
    return started


def test_a_launch_that_another_shell_adopts_continues_as_it_was_launched(orphan, tmp_path):
    actions.adopt(orphan.path)
    # A command line is public, so it has no argument of the operator's hooks.
    assert Path(f"/proc/{orphan.owner['pid']}/cmdline").read_bytes().endswith(b"\0--adopt\0")
    (tmp_path / "go").touch()
    ended = orphan.wait_end()
    assert [entry["state"] for entry in ended["phases"]] == ["completed"] * 2, ended["why"]
    record = rundir.read_json(orphan.run(1) / rundir.RUN) or {}
    assert record["cwd"] == str(tmp_path / "work")
    assert {name: record["environment"].get(name) for name in OF_ADOPTER} == {
        "HF_HOME": "/of/launch", "TIKTOKEN_CACHE_DIR": None,
    }  # fmt: skip


def test_an_attempt_whose_torchrun_was_never_started_begins_after_the_adoption(begin):
    started = begin(phase("one", "member.py", 3), phase("two", "member.py", 3), shell=STUB)
    owner = started.owner
    started.wait(lambda: (started.run(1) / rundir.RUN).exists(), every_s=0.0005)
    os.kill(owner["pid"], signal.SIGKILL)
    started.wait(lambda: not any(map(rundir.is_alive, (owner, owner["child"]))))
    actions.adopt(started.path)
    ended = started.wait_end()
    assert [entry["state"] for entry in ended["phases"]] == ["completed"] * 2, ended["why"]
    assert "running → starting" not in " ".join(each["text"] for each in started.events(1))


@pytest.mark.parametrize("sign", ["logs", "unreadable", "record", "checkpoint", "halt", "event"])
def test_torchrun_was_started_where_one_sign_says_so_or_cannot_be_read(tmp_path, sign):
    """supervisor.json is missing, for example because the disk was full."""
    run = tmp_path / "0-one"
    run.mkdir()
    assert cross_check.never_started(run, {}, 1)
    if sign == "unreadable":
        (run / "logs").symlink_to("logs")
    elif sign in ("logs", "checkpoint"):
        (rundir.logs(run, 1) if sign == "logs" else run / rundir.CHECKPOINTS).mkdir(parents=True)
    elif sign == "event":
        begun = {"v": 1, "kind": "phase", "attempt": 1, "text": "torchrun started"}
        (run / rundir.EVENTS).write_bytes(jsonl.encode(begun))
    else:
        (run / rundir.HALT if sign == "halt" else rundir.heartbeat(run, 0)).touch()
    assert not cross_check.never_started(run, {}, 1)


def test_torchrun_of_a_later_attempt_was_not_started_without_its_logs(tmp_path):
    run = tmp_path / "0-one"
    run.mkdir()
    rundir.heartbeat(run, 0).touch()
    rundir.logs(run, 1).mkdir(parents=True)
    (run / rundir.HALT).touch()  # for `Run.prepare`, which then ends the run as halted
    waiting = {"state": "starting", "attempt": 2, "torchrun": None, "asked": ""}
    assert cross_check.never_started(run, waiting, 2)
    assert not cross_check.never_started(run, waiting | {"torchrun": {"pid": 7}}, 2)
    assert not cross_check.never_started(run, waiting | {"asked": "stop"}, 2)
    assert not cross_check.never_started(run, waiting | {"state": "running"}, 2)
    rundir.logs(run, 2).mkdir()
    assert not cross_check.never_started(run, waiting, 2)


@pytest.mark.parametrize("halts", [False, True])
def test_an_attempt_that_a_dead_supervisor_had_not_started_starts_unless_halted(begin, halts):
    started = begin(
        phase("one", "member.py", 100_000, "leave"), shell=STUB,
        restart={"when": "crash", "attempts": 2, "backoff_s": 6},
    )  # fmt: skip
    started.wait_state("restarting")
    run = started.run()
    blocking = run / "logs" / "attempt2"
    blocking.touch()  # a file where the directory of the logs should be
    started.wait(lambda: started.state()["attempt"] == 2 and started.alerts("restart-waits"))
    started.kill_supervisor()
    blocking.unlink()
    if halts:
        (run / rundir.HALT).touch()
    actions.adopt(started.path)
    (phase_state,) = started.wait_end()["phases"]
    assert phase_state["state"] == ("halted" if halts else "crashed"), phase_state["why"]
    begun = [each["attempt"] for each in started.events(0) if each["kind"] == "phase"]
    assert begun == ([1] if halts else [1, 2])


def test_a_document_in_a_folder_that_cannot_be_read_is_not_missing(tmp_path):
    assert former_documents.document(tmp_path / "none", rundir.SUPERVISOR) == {}
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(RefusedError, match="cannot be read as a JSON document"):
        former_documents.document(tmp_path / "loop", rundir.SUPERVISOR)


def test_a_later_run_that_cannot_be_read_may_have_started(tmp_path):
    runs = [tmp_path / "0-one", tmp_path / "1-two"]
    cross_check.check_phase(0, runs, idle=False)
    runs[1].symlink_to("1-two")
    with pytest.raises(RefusedError, match="1-two has started"):
        cross_check.check_phase(0, runs, idle=False)


def test_an_adoption_needs_the_working_directory_of_the_launch(orphan, tmp_path):
    work, refused = tmp_path / "work", f"was started in '{tmp_path / 'work'}', which is not a dir"
    away = work.rename(tmp_path / "away")
    for make in (lambda: None, work.touch):
        make()
        with pytest.raises(RefusedError, match=refused):
            actions.adopt(orphan.path)
    work.unlink()
    away.rename(work)
    if os.geteuid() == 0:
        os.chown(work, 4242, -1)
        with pytest.raises(RefusedError, match=refused):
            actions.adopt(orphan.path)


def test_a_refused_adoption_leaves_no_event(orphan):
    phases = (rundir.read_json(orphan.path / rundir.PLAN) or {})["phases"]
    change(orphan.path / rundir.PLAN, phases=[phases[0] | {"args": ["9"]}, phases[1]])
    before = orphan.events()
    with pytest.raises(RefusedError, match="differ in argv; the launch is not adopted"):
        actions.adopt(orphan.path)
    assert orphan.events() == before


def test_a_recorded_environment_replaces_the_own_one_except_removed_logins(monkeypatch):
    own = {"http_proxy": "http://me:secret@proxy", "HF_HOME": "/own", "TZ": "UTC"}
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("https_proxy", raising=False)
    recorded = launch_spec.without_logins(own) | {
        "https_proxy": f"http://{launch_spec.REMOVED}@proxy", "HF_HOME": "/recorded",
        "TZ": "a\0b", "LANG": 7, "LD_PRELOAD": "/evil.so", "PYTHONPATH": "/a",
    }  # fmt: skip
    assert {k: v for k, v in launch_spec.inherited(recorded).items() if v} == {
        "http_proxy": own["http_proxy"], "HF_HOME": "/recorded", "PYTHONPATH": f"{PROJECT}:/a",
    }  # fmt: skip


def test_open_alerts_stay_open_after_an_adoption_and_end_with_the_attempt(begin, tmp_path):
    started = begin(phase("one", "member.py", 5, "until", tmp_path / "go"), shell=STUB)
    started.wait_steps(3)
    former = started.kill_supervisor()
    raised = {
        name: {"v": 1, "attempt": 1, "ts": time.time(), "kind": "alert", "level": "crit",
               "text": "x", "alert": name, "key": ""}
        for name in ("checkpoint-load", "loader_slow", "stall", "observer-records", "halt-failed")
    }  # fmt: skip
    with (started.run() / rundir.EVENTS).open("ab") as stream:
        stream.writelines(map(jsonl.encode, raised.values()))
    garbage = {"x": 7, "y": {"alert": "z"}}
    change(started.run() / rundir.SUPERVISOR, alerts=raised | garbage)
    actions.adopt(started.path)
    started.wait(
        lambda: (
            (state := started.state())["pid"] != former["pid"]
            and state["alerts"].keys() == {"checkpoint-load", "loader_slow"}
        )
    )
    assert started.ask("ack", started.run(), alert="checkpoint-load")["ok"]
    (tmp_path / "go").touch()
    started.wait_over()
    (kept,) = RunSource(started.path).poll().alerts  # an attempt's end clears no checkpoint alert
    assert (kept.id, kept.acknowledged) == ("checkpoint-load", True)


def test_a_run_is_watched_as_soon_as_its_heartbeats_are_read_while_samples_wait(tmp_path):
    """The samples of some days take minutes."""
    rundir.samples(tmp_path, "h").write_bytes(jsonl.encode({"v": 1, "pad": "x" * 4000}) * 2000)
    files, seen = Files(tmp_path, 1, 1, RecordFiles(tmp_path)), []
    attempt = SimpleNamespace(
        _caught_up=False, _observers=SimpleNamespace(run=lambda *_: True), known=Facts(world=1),
        _reducer=SimpleNamespace(mark_old=lambda: None), _learn=lambda **_: None, _records_at=0.0,
        _sampler=SimpleNamespace(),
    )  # fmt: skip
    for step in range(1, 11):
        record = {"v": 1, "rank": 0, "attempt": 1, "step": step, "ts": 1.0, "msg": "progress"}
        with rundir.heartbeat(tmp_path, 0).open("ab") as stream:
            stream.write(jsonl.encode(record) * (15_000 if step == 1 else 1))
        news = files.poll(True)
        Attempt.take(cast(Attempt, attempt), news)
        steps = {each.get("step") for batch in news.batches for each in batch.records}
        seen.append((step in steps - {1}, attempt._caught_up))
        assert news.behind
    assert seen[0] == (False, False)
    assert seen[-5:] == [(True, True)] * 5
    assert all(is_newest == caught_up for is_newest, caught_up in seen)
