"""The documents of a former supervisor, and the second sources that must confirm them."""

from __future__ import annotations

import os
import select
import signal
import sys
import time

import pytest

from console import actions
from console.cli import main
from console.plan import Restart
from console.plans import gate_check, plan_file
from console.run_state import Facts, decide
from console.sources import process
from console.supervisor import cross_check, launch_spec
from console.supervisor.ends import end_of, take_log
from console.supervisor.next_flags import MAY_IGNORE, NextFlags
from console.supervisor.process_tree import Tree, Worker
from console.supervisor.restart import AttemptEnd, next_attempt
from tests import owners
from tests.console.sources.directory import change
from tests.console.sources.recorded import Recorded
from tests.console.test_go import BOUNDS, completed
from tests.launches import HANG_GUARD_S, STUB, phase, write_plan
from trainers.contract import environ, jsonl, rundir
from trainers.contract.errors import RefusedError

TOKEN = "0123456789abcdef"
DONE = {"kind": "answer", "action": "set-flag", "request": "s1", "ok": True}


@pytest.fixture
def launch(tmp_path):
    """The documents of a launch of two phases; its supervisor and its processes have ended."""
    file = write_plan(
        tmp_path, phases=[phase("one", "member.py", 9, gates={"steps_done": 9}), phase("two", "x")]
    )
    given = launch_spec.LaunchSpec("here", plan_file.load(file), "tester")
    path = tmp_path / "here"
    run = path / "0-one"
    run.mkdir(parents=True, mode=0o700)
    contract = {
        environ.RUN_DIR: str(run), environ.RUN_ID: "here/0-one", environ.ATTEMPT: "1",
        environ.TOKEN: TOKEN,
    }  # fmt: skip
    rundir.write_json(path / rundir.PLAN, given.as_dict(1.0))
    rundir.write_json(run / rundir.RUN, given.run_record(0, run, given.flags(0, {}), contract))
    held = {"v": 1, "state": "running", "attempt": 1, "asked": "", "workers": []}
    rundir.write_json(run / rundir.SUPERVISOR, held)
    rundir.write_json(path / rundir.PLAN_STATE, {"v": 1, "state": "running", "phase": 0})
    return path


def tell(folder, *events):
    with (folder / rundir.EVENTS).open("ab") as stream:
        stream.writelines(jsonl.encode({"v": 1, "attempt": 1, "ts": 1.0} | e) for e in events)


def read_run(launch):
    return cross_check.check_run(launch / "0-one", launch_spec.load(launch), 0)


def read_launch(launch):
    runs = [launch / "0-one", launch / "1-two"]
    state = rundir.read_json(launch / rundir.PLAN_STATE) or {}
    evidence = cross_check.Evidence(launch, runs)
    return cross_check.check_launch(state, launch_spec.load(launch), 0, runs, evidence)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("", ""), ("restart", ""), ("stop", "is not continued: request it again"),
        ("halt", "halt was requested from the former supervisor; no further attempt"), ("x", ""),
    ],
)  # fmt: skip
def test_an_end_that_was_requested_is_said_and_not_continued(launch, asked, words):
    change(launch / "0-one" / rundir.SUPERVISOR, asked=asked, asked_by="x")
    warnings = read_run(launch)[2]
    assert len(warnings) == bool(words)
    assert words in " ".join(warnings)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"watch": {"rules": {"rss_growth": {"action": "stop"}}}}, "watch"),
        ({"watch": {"stall_act_s": 1.0}}, "watch"), ({"restart": {"when": "stall"}}, "restart"),
        ({"name": "other"}, "plan"), ({"launch": "other"}, "launch"),
    ],
)  # fmt: skip
def test_a_plan_that_says_otherwise_than_the_run_is_not_taken_over(launch, changed, named):
    plan = rundir.read_json(launch / rundir.PLAN)
    for key, value in changed.items():
        changed[key] = plan[key] | value if isinstance(value, dict) else value
    change(launch / rundir.PLAN, **changed)
    with pytest.raises(RefusedError, match=rf"differ in {named}; the launch is not adopted"):
        read_run(launch)
    change(launch / "0-one" / rundir.RUN, **{named: ...})
    assert read_run(launch)[2] == []


def test_a_flag_of_the_run_needs_the_plan_an_answer_or_a_process(launch, monkeypatch):
    run = launch / "0-one"
    record = rundir.read_json(run / rundir.RUN)
    lie = {"NSA_LR": {"value": "9.5", "origin": "operator x"}}
    change(run / rundir.RUN, flags=record["flags"] | lie)
    with pytest.raises(RefusedError, match=r"says NSA_LR=9\.5, plan\.json says no"):
        read_run(launch)
    environment = record["environment"] | {"NSA_LR": "9.5"}
    monkeypatch.setattr(process, "with_token", lambda token, home: [1])
    monkeypatch.setattr(process, "environment", lambda pid: environment)
    assert read_run(launch)[0]["flags"]["NSA_LR"]["value"] == "9.5"
    tell(launch, DONE | {"text": "NSA_LR=9.5 for one only"})
    environment["NSA_LR"] = "0.1"
    with pytest.raises(RefusedError, match=r"processes of the run have NSA_LR=0\.1"):
        read_run(launch)
    monkeypatch.setattr(process, "with_token", lambda token, home: [])
    assert read_run(launch)[0]["flags"]["NSA_LR"]["value"] == "9.5"
    change(run / rundir.RUN, flags={})
    with pytest.raises(RefusedError, match=r"says no OMP_NUM_THREADS, plan\.json says"):
        read_run(launch)


@pytest.mark.parametrize(
    ("phases", "answer", "is_confirmed"),
    [
        ("next", "", False), ("next", "NSA_LR=0.4 for two only", False),
        ("next", "NSA_LR=0.5 for two only", True), ("all", "NSA_LR=0.5 for two only", False),
        ("all", "NSA_LR=0.5 for two and all later phases", True),
        ("next", "NSA_LR=0.5 for one only", False),
        ("next", f"NSA_LR=0.5 for two only{MAY_IGNORE}", True),
    ],
)  # fmt: skip
def test_a_flag_for_the_next_phase_needs_the_answer_to_its_request(
    launch, phases, answer, is_confirmed
):
    flag = {"NSA_LR": {"value": "0.5", "by": "x", "phases": phases}}
    change(launch / rundir.PLAN_STATE, next_flags=flag)
    tell(launch, DONE | {"text": answer})
    flags, warnings = read_launch(launch)
    assert [(name, each["phases"]) for name, each in flags.items()] == (
        [("NSA_LR", phases)] if is_confirmed else []
    )
    assert ("NSA_LR=0.5" in "".join(warnings)) is not is_confirmed


def test_an_adoption_with_another_interpreter_than_that_of_the_run_says_so(launch):
    argv = (rundir.read_json(launch / "0-one" / rundir.RUN) or {})["argv"]
    change(launch / "0-one" / rundir.RUN, argv=["/other/bin/python", *argv[1:]])
    assert read_run(launch)[2] == [
        f"later attempts and phases start with {sys.executable}, not with /other/bin/python as "
        "this run did"
    ]


def test_a_flag_of_all_later_phases_stays_until_it_is_undone_and_is_confirmed_for_each(launch):
    flags = NextFlags(launch_spec.load(launch))
    assert flags.set(0, {"name": "OMP_NUM_THREADS", "value": "2"}, "x")[0]
    every = {"name": "NCCL_DEBUG", "phases": "all"}
    done, answer = flags.set(0, every | {"value": "warn"}, "x")
    tell(launch, DONE | {"text": answer, "ok": False})
    assert not cross_check.Evidence(launch, []).confirms_flag("NCCL_DEBUG", "WARN", ["one"])
    assert (done, answer) == (True, "NCCL_DEBUG=WARN for one and all later phases")
    assert set(flags.values()) == {"NCCL_DEBUG", "OMP_NUM_THREADS"}
    flags.started()
    assert set(flags.values()) == {"NCCL_DEBUG"}, "the other flag was for one phase"
    tell(launch, DONE | {"text": answer})
    evidence = cross_check.Evidence(launch, [])
    assert evidence.confirms_flag("NCCL_DEBUG", "WARN", ["one", "two"])
    assert evidence.confirms_flag("NCCL_DEBUG", "WARN", ["one"])
    assert not evidence.confirms_flag("NCCL_DEBUG", "WARN", ["two"])
    for value in ("INFO", None):
        done, text = flags.set(1, {"name": "NCCL_DEBUG", "value": value}, "x")
        assert (done, "pass phases=all to change it" in text) == (False, True)
    done, text = flags.set(1, every, "x")
    assert (done, text.endswith(" for two and all later phases")) == (True, True)
    assert not flags.pending


def test_a_restart_is_due_where_the_last_event_says_so_too(launch):
    run = launch / "0-one"
    change(run / rundir.SUPERVISOR, state="restarting")
    for event_state, found in (("", "crashed"), ("restarting", "restarting"), ("x", "crashed")):
        tell(run, {"kind": "state", "state": event_state})
        _, document, warnings = read_run(launch)
        assert (document["state"], len(warnings)) == (found, found == "crashed")


def test_a_phase_is_behind_where_its_run_and_its_records_say_that_it_passed(tmp_path):
    plan = {"phases": [{"name": name, "gates": BOUNDS} for name in ("first", "second")]}
    run = completed(tmp_path / "0-first")
    rundir.write_json(tmp_path / rundir.PLAN, {"v": 1} | plan)
    told = [{"name": "first", "dir": "0-first", "state": "completed", "result": "pass"},
            {"name": "second", "dir": "1-second", "state": "next"}]  # fmt: skip
    state = {"v": 1, "state": "waiting", "phase": 0, "phases": told}
    rundir.write_json(tmp_path / rundir.PLAN_STATE, state)
    for held in ({"phase": 1}, {"phase": 0, "state": "waiting"}, {"phase": -5}, {}):
        gate_check.check_former(tmp_path, plan, held)
    (run / rundir.GATES).unlink()
    with pytest.raises(
        RefusedError, match="reports first as passed, and its records do not confirm it"
    ):
        gate_check.check_former(tmp_path, plan, {"phase": 1})
    change(run / rundir.SUPERVISOR, state="running")
    with pytest.raises(RefusedError, match=r"its state is running in supervisor\.json"):
        gate_check.check_former(tmp_path, plan, {"phase": 0, "state": "waiting"})


def test_an_end_of_the_plan_that_only_the_document_says_is_in_a_note_and_starts_no_torchrun(launch):
    change(launch / rundir.PLAN_STATE, ended_by="stop requested by x")
    expected = (
        "stop requested by x, according to plan_state.json; no further attempt or phase starts"
    )
    assert read_launch(launch)[1] == [expected]
    change(launch / "0-one" / rundir.SUPERVISOR, state="starting")
    given = owners.absent(), launch / "0-one", launch_spec.load(launch), 0
    assert not cross_check.read_run(*given, is_last=True).is_unstarted
    assert cross_check.read_run(*given, is_last=False).is_unstarted


@pytest.mark.parametrize(("name", "other"), [("between", "ask"), ("phases", [{"name": "other"}])])
def test_a_copy_in_plan_state_must_not_differ(launch, name, other):
    change(launch / rundir.PLAN_STATE, **{name: other})
    with pytest.raises(RefusedError, match=f"differ in {name}"):
        read_launch(launch)


def test_a_phase_that_has_begun_is_not_begun_again(launch):
    (launch / "1-two").mkdir()
    rundir.write_json(launch / "1-two" / rundir.RUN, {"v": 1})
    with pytest.raises(RefusedError, match="phase 0 was started last, but 1-two has started"):
        read_launch(launch)


def worker(code=None, signal_name=None, **more):
    handle = process.Handle(4194303, -1, 0)
    return Worker(0, 0, handle, over_ts=1.0, code=code, signal=signal_name, **more)


@pytest.mark.decision("next-phase", "lie")
@pytest.mark.parametrize(
    ("ended", "pulse_step", "state", "says"),
    [
        (worker(0, observed=True), 0, "completed", ""),
        (worker(0, confirmed=True), 0, "completed", ""),
        (worker(), 9, "completed", ""),
        (worker(), 0, "lost", "no supervisor observed it, and it has no pulse"),
        (worker(), 4, "lost", "no supervisor observed it, and its pulse is of step 4"),
        (worker(7), 9, "lost", "but a log or a document says exit 7"),
        (worker(None, "SIGKILL"), 9, "lost", "but a log or a document says SIGKILL"),
        (worker(7, confirmed=True), 9, "crashed", "(code 7)"),
        (worker(7, observed=True), 9, "crashed", "(code 7)"),
    ],
)
def test_a_good_end_that_nobody_saw_needs_a_second_source(ended, pulse_step, state, says):
    told = Recorded()
    for step, msg in ((9, "progress"), (9, "exit")):
        told.take({"rank": 0, "step": step, "msg": msg, "ts": 1.0, "exit_code": 0})
    end = end_of(ended, told.heads[0], step=pulse_step)
    found, why = decide(Facts(spawned=True, over=True, ends=[end], world=1))
    assert (found, says in why) == (state, True), why
    again = next_attempt([AttemptEnd(found, why)], Restart("crash"))
    assert isinstance(again, str) == (state != "crashed")


@pytest.mark.parametrize(
    ("ended", "state"),
    [(worker(), "lost"), (worker(0, confirmed=True), "completed"),
     (worker(2, confirmed=True), "crashed")],
)  # fmt: skip
def test_an_exit_record_without_a_code_shows_neither_success_nor_failure(ended, state):
    told = Recorded()
    for msg in ("progress", "exit"):
        told.take({"rank": 0, "step": 9, "msg": msg, "ts": 1.0, "exit_code": None})
    end = end_of(ended, told.heads[0], step=9)
    assert decide(Facts(spawned=True, over=True, ends=[end], world=1))[0] == state


def test_torchruns_log_names_no_rank_that_the_run_does_not_have():
    line = b"rank : %d (local_rank: 0)\n exitcode : 9 (pid: 4242)\n"
    tree = Tree("x", 2, select.poll(), owners.absent())
    absurd_pid = line.replace(b"4242", b"9" * 5000)
    take_log(tree, line % 7 + line % 1 + absurd_pid % 0)
    assert [(rank, w.code, w.confirmed) for rank, w in tree.workers.items()] == [(1, 9, False)]


@pytest.mark.decision("stop", "lie")
def test_what_one_file_alone_says_ends_nothing_at_a_take_over(begin, tmp_path):
    started = begin(
        phase("one", "member.py", 5, "until", tmp_path / "go"), phase("two", "member.py", 5),
        shell=STUB,
        restart={"when": "crash", "attempts": 2, "backoff_s": 0},
    )  # fmt: skip
    started.wait_steps(3)
    pids = started.pids()
    started.kill_supervisor()
    change(started.path / rundir.PLAN_STATE, phase=1)
    with pytest.raises(
        RefusedError, match="reports one as passed, and its records do not confirm it"
    ):
        actions.adopt(started.path)
    hopeless = {"state": "crashed", "why": "x", "hopeless": True}
    change(started.run() / rundir.SUPERVISOR, asked="kill", asked_by="x", state="completed",
           ended=[hopeless], attempt=2)  # fmt: skip
    flag = {"NSA_LR": {"value": "9.5", "by": "x", "ts": 1}}
    forged = {"next_flags": flag, "ended_by": "stop requested by x"}
    change(started.path / rundir.PLAN_STATE, phase=0, **forged)
    request = {"v": 1, "id": "old", "action": "kill", "args": {"yes": True}, "by": "x", "ts": 4e9}
    old = started.run() / rundir.REQUESTS / "old.json"
    rundir.write_json(old, request)
    os.utime(old, times=(4e9, 4e9))
    actions.adopt(started.path)
    answer = actions.answer(started.path, "old", HANG_GUARD_S)
    assert (answer["ok"], "older than this supervisor" in answer["text"]) == (False, True)
    assert started.pids() == pids
    assert all(process.state(pid) in "RSD" for pid in pids.values())
    notes = " ".join(e["text"] for i in (None, 0) for e in started.events(i) if e["kind"] == "note")
    assert "kill was requested from the former supervisor and is not continued" in notes
    assert "stop requested by x, according to plan_state.json; no further" in notes
    assert "plan_state.json sets NSA_LR=9.5 for later phases; no answer" in notes
    (tmp_path / "go").touch()
    ended = started.wait_end()
    assert [entry["state"] for entry in ended["phases"]] == ["completed", "later"]
    assert ended["why"] == "one: stop requested by x"


@pytest.mark.parametrize("asked", ["stop requested by x", ""])
def test_without_run_json_no_second_attempt_starts_beside_living_ranks(begin, tmp_path, asked):
    """Once the ranks have ended, the plan ends if a stop was requested; else the phase starts."""
    started = begin(
        phase("one", "member.py", 100_000, "until", tmp_path / "go"), phase("two", "member.py", 5),
        shell=STUB,
    )  # fmt: skip
    started.wait_steps(3)
    pids = started.pids()
    started.kill_supervisor()
    born = started.run() / rundir.RUN
    born.rename(tmp_path / "kept")
    change(started.path / rundir.PLAN_STATE, ended_by=asked)
    with pytest.raises(RefusedError, match="ranks 0-1 still run"):
        actions.adopt(started.path)
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    (tmp_path / "kept").rename(born)
    started.wait_gone()
    born.unlink()
    actions.adopt(started.path)
    if asked:
        assert started.wait_end()["why"] == asked
        assert not born.exists()
    else:
        started.wait(lambda: started.pids().keys() == {0, 1})


def forge_the_end(started, least: int) -> None:
    """Appends records of further steps and of an exit to the heartbeats of both ranks."""
    told = [started.heartbeats(rank=rank) for rank in (0, 1)]
    # On a busy machine, the pulse of a rank may be many steps ahead of its records.
    last = max(least, *(records[-1]["step"] + 500 for records in told))
    for rank, records in enumerate(told):
        newest = [record for record in records if record["msg"] == "progress"][-1]
        end = {"msg": "exit", "exit_code": 0, "reason": "done", "nonfinite_loss_steps": 0}
        steps = range(records[-1]["step"] + 1, last + 1)
        forged = [*({"step": step} for step in steps), end | {"step": last}]
        with rundir.heartbeat(started.run(), rank).open("ab") as stream:
            for n, fields in enumerate(forged, records[-1]["n"] + 1):
                stream.write(jsonl.encode(newest | fields | {"n": n, "mono": time.monotonic()}))


@pytest.mark.decision("next-phase", "absent")
@pytest.mark.parametrize("pulses", ["stale", "true"])
def test_an_end_that_nobody_saw_is_a_good_one_where_the_pulses_confirm_it(begin, tmp_path, pulses):
    steps = 20
    started = begin(
        phase("one", "member.py", steps, "until", tmp_path / "go", gates={"steps_done": steps}),
        phase("two", "member.py", 5), shell=STUB,
    )  # fmt: skip
    started.wait_steps(5)
    started.wait(lambda: "progress" in str(started.heartbeats(rank=1)))
    pids = process.with_token(started.token())
    started.kill_supervisor()
    if pulses == "stale":
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    (tmp_path / "go").touch()
    started.wait_gone()
    if pulses == "stale":
        forge_the_end(started, steps)
    actions.adopt(started.path)
    ended = started.wait_end()
    states = ["completed", "completed"] if pulses == "true" else ["lost", "later"]
    assert [entry["state"] for entry in ended["phases"]] == states, ended["why"]
    assert main(["check", str(started.path)]) == (0 if pulses == "true" else 5)
