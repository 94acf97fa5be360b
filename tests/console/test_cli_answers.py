"""The answers of commands about a run and its launch, and the next step that they name."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace

import pytest

from console import actions, cli, status_text
from console.commands import query
from console.diagnose.watchdog import Watchdog
from console.model import Gate, RunState
from console.plan import Watch
from console.sources import launches
from console.sources.record_files import rotated_log
from console.sources.run import RunSource
from tests.console.sources import directory
from trainers.contract import rundir


def said(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = cli.main([str(word) for word in words])
    return code, *capsys.readouterr()


@pytest.fixture
def launch(tmp_path):
    return directory.launch(tmp_path / "artifacts")


@pytest.mark.parametrize("command", ["status", "check"])
@pytest.mark.parametrize(
    ("state", "supervisor"), [("stalled", {}), ("running", directory.DEAD)]
)  # fmt: skip
def test_a_run_that_is_stalled_or_unsupervised_is_not_healthy(
    launch, capsys, command, state, supervisor
):
    directory.run(launch / "0-first", state=state, **supervisor)
    code, out, _ = said(capsys, command, launch)
    assert code == 1
    if command == "check":
        assert "no go yet; toy/0-first is " in out
    assert not status_text.is_over(RunSource(launch).poll()), (
        "a command that waits for the end continues to wait"
    )


def test_a_live_run_with_a_gate_that_can_no_longer_pass_is_no_go_without_an_override():
    failed = Gate("no_stall", 1.0, "stalls", "run", "events", "≤ 0", "fail")
    state = RunState("toy/0-first", "", "running", "", gates=(failed,))
    assert query._so_far(state).startswith("no go without an override of no_stall; toy/0-first is")
    accepted = replace(state, gates=(replace(failed, override="known"),))
    assert query._so_far(accepted).startswith("no go yet; ")


def test_nothing_is_armed_where_no_supervisor_lives(launch, capsys):
    promised = "on stall (10 s): alert, then restart"
    directory.run(launch / "0-first", armed=promised, **directory.DEAD)
    _, out, _ = said(capsys, "status", launch)
    assert (promised in out, "policy: none (no supervisor)" in out) == (False, True)


@pytest.mark.parametrize(
    ("action", "act_s", "text"),
    [
        ("warn", 1800, "on stall (10 s): alert only"),
        ("dump", 1800, "on stall (10 s): alert, then dump"),
        ("restart", 35, "on stall (10 s): alert, and 25 s later restart"),
        ("stop", 5, "on stall (10 s): alert, and 20 s later stop"),
    ],
)
def test_what_is_armed_says_when_it_comes(action, act_s, text):
    watch = Watch(stall_floor_s=10, stall_act_s=act_s)
    assert Watchdog(watch, {"stall": action}).stall_policy() == text


def test_a_further_attempt_is_told_in_status_and_in_the_list(launch, capsys):
    run = directory.run(launch / "0-first")
    assert "attempt" not in said(capsys, "status", launch)[1]
    directory.run(run, attempt=2)
    assert "RUNNING  attempt 2" in said(capsys, "status", launch)[1]
    assert "attempt 2" in said(capsys, "--root", launch.parents[1], "runs")[1]


def ended(launch, why: str, result: str, gate: str) -> None:
    """Changes the launch to one that ended after its first phase had completed."""
    gates = [{"name": "no_stall", "value": 1.0, "bound": "= 0", "result": gate}]
    directory.completed(launch / "0-first", {"no_stall": True}, gates)
    phases = [
        {"name": "first", "state": "completed", "result": result, "dir": "0-first"},
        {"name": "second", "state": "later", "dir": "1-second"},
    ]
    directory.change_at(launch / rundir.PLAN, "phases", 0, "gates", to={"no_stall": True})
    halted = why.removesuffix(" before the next phase") if "halt" in why else ""
    change = {"state": "ended", "why": why, "phases": phases, "ended_by": halted}
    directory.change(launch / rundir.PLAN_STATE, **change)


@pytest.mark.parametrize(
    ("why", "gate", "code", "word"),
    [
        ("first: gate no_stall failed (1 stall, bound = 0)", "fail", 1, "gate failed"),
        ("halt requested by ann before the next phase", "pass", 4, "halted"),
        ("first: gate no_stall failed; the gate is overridden", "pass", 1, "incomplete"),
    ],
)
def test_the_end_of_a_launch_is_the_same_wherever_it_is_asked_for(
    launch, capsys, why, gate, code, word
):
    ended(launch, why, gate, gate)
    listed = said(capsys, "--root", launch.parents[1], "runs")[1]
    assert f" {word} " in listed
    assert f"{why}; not started: second" in listed
    (row,) = json.loads(said(capsys, "--root", launch.parents[1], "runs", "--json")[1])
    assert row["exit_code"] == code
    for command in ("status", "check", "watch --plain", "watchdog"):
        told, out, _ = said(capsys, *command.split(), launch)
        assert (command, told) == (command, code)
        assert "not started: second" in out or command == "watchdog"
        assert "\ngo\n" not in out
    assert said(capsys, "status", launch)[1].startswith(f"toy-20261121-030000  {word.upper()}  ")
    assert said(capsys, "status", launch / "0-first")[0] == (1 if gate == "fail" else 0)


@pytest.mark.parametrize(
    ("owner", "word", "why", "code", "end"),
    [
        ({}, "waiting", "waits for proceed", 0, "go so far; not started: second"),
        (directory.DEAD, "unsupervised", "no supervisor is running; no further phase starts", 5,
         "no go; toy-20261121-030000: unsupervised: no supervisor is running; no further phase "
         "starts; not started: second"),
    ],
)  # fmt: skip
def test_a_launch_with_a_phase_left_is_not_completed_before_its_end(
    launch, capsys, owner, word, why, code, end
):
    run = directory.completed(launch / "0-first", {}, [])
    directory.change(run / rundir.SUPERVISOR, workers=[])
    phases = [{"name": "first", "state": "completed", "result": "pass", "dir": "0-first"},
              {"name": "second", "state": "next", "dir": "1-second"}]  # fmt: skip
    told = {"state": "waiting", "why": "waits for proceed", "phases": phases}
    directory.change(launch / rundir.PLAN_STATE, **told)
    directory.told(launch, "", **owner)
    (row,) = json.loads(said(capsys, "--root", launch.parents[1], "runs", "--json")[1])
    assert (row["state"], row["why"]) == (word, f"{why}; not started: second")
    head = f"toy-20261121-030000  {word.upper()}  {why}; not started: second\n"
    assert said(capsys, "status", launch)[1].startswith(head)
    assert (found := said(capsys, "check", launch))[0] == code, found
    assert found[1].splitlines()[-1] == end
    assert f"{word}. {why}; not started: second" in said(capsys, "report", launch)[1]
    for words, text in (("status", "toy/0-first  COMPLETED"), ("report", "**go**: completed. ")):
        assert text in said(capsys, words, launch / "0-first")[1]


def test_a_broken_plan_hides_no_other(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "configs" / "plans"
    folder.mkdir(parents=True)
    (folder / "broken.yaml").write_text("phases: [")
    monkeypatch.chdir(tmp_path)
    code, out, err = said(capsys, "plans")
    assert (code, "cpu_smoke: " in out) == (2, True)
    (line,) = [line for line in out.splitlines() if line.startswith("ddp_validation: ")]
    assert "bucket (sweep), " in line
    assert len(out.splitlines()) < 10
    assert ("broken.yaml" in err, len(err.splitlines())) == (True, 1)
    code, out, _ = said(capsys, "plans", "--json")
    assert (code, "cpu_smoke" in [plan["name"] for plan in json.loads(out)]) == (2, True)


def test_a_live_run_without_gates_is_no_go_yet(launch, capsys):
    directory.run(launch / "0-first", state="starting")
    code, out, _ = said(capsys, "check", launch)
    assert (code, out) == (1, "no go yet; toy/0-first is starting; it has no gates\n")


def test_the_gates_of_a_run_that_has_not_started_are_not_evaluated_yet(launch, capsys):
    directory.change(launch / rundir.PLAN, phases=[{"name": "first", "gates": {"steps_done": 9}}])
    with directory.owned(launch):
        code, out, _ = said(capsys, "check", launch)
    assert (code, out.endswith("; no gate has been evaluated yet\n")) == (1, True), out


def test_runs_of_a_folder_that_is_not_there_are_not_none(tmp_path, capsys):
    code, _, err = said(capsys, "--root", tmp_path / "nowhere", "runs")
    assert (code, f"there is no directory {tmp_path / 'nowhere'}" in err) == (3, True)


@pytest.mark.parametrize("words", ["runs --json", "status latest", "halt latest", "status toy"])
def test_a_root_that_cannot_be_listed_is_not_empty(tmp_path, capsys, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "artifacts").symlink_to("artifacts")
    code, _, err = said(capsys, *words.split())
    text = "cannot list the launches in artifacts: Too many levels of symbolic links"
    assert (code, text in err) == (3, True), err


def test_the_list_names_runs_by_hand_among_the_launches(launch, capsys):
    directory.run(launch / "0-first")
    root = launch.parents[1]
    for at_ts, name in ((4e9, "newer"), (1e9, "older")):
        run = directory.run(root / "tiny" / name)
        os.utime(run, (at_ts, at_ts))
    (root / "link").symlink_to(root / "tiny")
    rows = json.loads(said(capsys, "--root", root, "runs", "--json")[1])
    ids = [str(root / "tiny" / "newer"), "toy-20261121-030000", str(root / "tiny" / "older")]
    assert [row["id"] for row in rows] == ids
    by_hand = [(row["launch"], row["plan"], row["phase"]) == (None, None, "-") for row in rows]
    assert by_hand == [True, False, True]
    assert rows[0].keys() == rows[1].keys()
    first = said(capsys, "--root", root, "runs", "--limit", 1)[1]
    head, row = first.splitlines()
    assert (head.split(), row.startswith(f"{ids[0]}  by hand ")) == (
        ["launch", "phase", "state", "step", "why"], True,
    )  # fmt: skip
    assert said(capsys, "status", ids[2])[0] == rows[2]["exit_code"]


@pytest.mark.parametrize(
    ("unit", "value", "text"),
    [
        ("stalls", 1.0, "1 stall"), ("stalls", 0.0, "0 stalls"), ("stalls", 2.0, "2 stalls"),
        ("share", 0.004, "0.004 share"), ("nats/token", None, "not measured"),
        ("", 0.5, "0.5"), ("non-finite steps", 1.0, "1 non-finite step"),
    ],
)  # fmt: skip
def test_the_value_of_a_gate_stands_in_the_unit_of_its_bound(unit, value, text):
    gate = Gate("g", value, unit, "whole run", "s", "≥ 0.9", "fail")
    assert status_text.gate_value(gate) == text


def test_watching_returns_when_the_plan_waits_if_that_is_asked(launch, capsys):
    directory.run(launch / "0-first", state="completed")
    directory.change(launch / rundir.PLAN_STATE, state="waiting", why="proceed")
    code, out, _ = said(capsys, "watch", launch, "--until-waiting")
    assert (code, "is waiting: proceed." in out) == (0, True)


@pytest.fixture
def ended_phase(launch, monkeypatch):
    """The completed first phase of a launch whose second phase runs; a sleep fails the test."""
    run = directory.completed(launch / "0-first", {}, [])
    directory.run(launch / "1-second")
    rundir.rank_log(run, 1, 0).parent.mkdir(parents=True)
    phases = [{"name": "first", "state": "completed", "result": "pass", "dir": "0-first"},
              {"name": "second", "state": "running", "dir": "1-second"}]  # fmt: skip
    directory.change(launch / rundir.PLAN_STATE, phase=1, phases=phases)

    def sleep(_: float) -> None:
        raise AssertionError("the command waits for the end of the launch")

    monkeypatch.setattr(time, "sleep", sleep)
    return run


WAITING = ["watch --plain", "watch --json", "watchdog", "logs -f", "report"]


@pytest.mark.parametrize("words", WAITING)
def test_a_phase_has_ended_although_its_launch_continues(ended_phase, capsys, words):
    code, out, _ = said(capsys, *words.split(), ended_phase)
    assert code == 0
    assert "not ended" not in out
    assert words != "report" or "**go**: completed" in out
    launch = RunSource(ended_phase.parent).poll()
    assert not status_text.is_over(launch)


def test_a_phase_whose_end_is_not_in_supervisor_json_yet_has_not_ended(ended_phase):
    """The event of the end is written first; without an end in supervisor.json, a run is no go."""
    run, gone = ended_phase, {"rank": 0, "exit": {"code": 0, "signal": None, "ts": 1.0}}
    stale = {"state": "stopping", "workers": [gone], "updated_ts": time.time() - 1}
    directory.change(run / rundir.SUPERVISOR, **stale)
    state = RunSource(run).poll()
    assert (state.state, status_text.is_over(state, whole=False)) == ("stopping", False)
    directory.change(run / rundir.SUPERVISOR, state="completed")
    assert status_text.is_over(RunSource(run).poll(), whole=False)


def test_status_marks_an_acknowledged_alert(launch, capsys):
    run = directory.run(launch / "0-first")
    for kind in ("alert", "ack"):
        directory.event(run, kind, alert="slow", level="warn", text="the ranks are slow")
    assert "  WARN acknowledged: the ranks are slow\n" in said(capsys, "status", launch)[1]


def test_a_halted_run_says_how_to_go_on_from_its_checkpoint(tmp_path, capsys, monkeypatch):
    launch = directory.launch(tmp_path / "artifacts", "cpu_smoke")
    why = "all 2 ranks halted at step 88"
    run = directory.run(launch / "0-first", state="halted", why=why)
    assert f"no go; toy/0-first: {why}\n" in said(capsys, "check", launch)[1]
    assert "resume" not in said(capsys, "status", launch)[1]
    (run / rundir.CHECKPOINTS / "step_00000088").mkdir(parents=True)
    (run / rundir.CHECKPOINTS / rundir.LATEST).write_text("step_00000088\n")
    monkeypatch.setattr("sys.argv", ["bin/nsa-console"])
    sentence = f"to resume, run: bin/nsa-console resume {launch}\n"
    assert sentence not in said(capsys, "status", launch)[1]  # the supervisor still ends the plan
    directory.change(launch / rundir.PLAN_STATE, state="ended")
    assert sentence in said(capsys, "status", launch)[1]
    assert sentence in said(capsys, "watch", launch, "--plain")[1]


def test_logs_of_the_supervisor_are_asked_for_as_the_screen_names_them(launch, capsys):
    run = directory.run(launch / "0-first")
    directory.event(run, "note", text="the disk was full", level="info")
    rundir.rank_log(run, 1, 0).parent.mkdir(parents=True)
    rundir.rank_log(run, 1, 0).write_text("words of a rank\n")
    code, out, _ = said(capsys, "logs", launch, "--rank", "sup")
    assert (code, "the disk was full" in out, "words of a rank" in out) == (0, True, False)


def test_logs_print_each_line_of_a_long_log_and_of_its_rotated_file(launch, capsys):
    log = rundir.rank_log(directory.run(launch / "0-first"), 1, 0)
    log.parent.mkdir(parents=True)
    every = ["Traceback: step 3", *(f"r0 line {i:060}" for i in range(20_000)), "the end"]
    rotated_log(log).write_text("\n".join(every[:9000]) + "\nr0 li")
    log.write_text("\n".join(every[9000:]).removeprefix("r0 li"))
    code, out, _ = said(capsys, "logs", launch, "--grep", "Traceback")
    assert (code, out) == (0, "r0       Traceback: step 3\n")
    _, out, _ = said(capsys, "logs", launch, "--rank", 0)
    assert [line[9:] for line in out.splitlines()] == every


def test_logs_print_the_lines_after_many_blank_ones(launch, capsys):
    log = rundir.rank_log(directory.run(launch / "0-first"), 1, 0)
    log.parent.mkdir(parents=True)
    log.write_text("begin\n" + "\n" * 600_000 + "Traceback: the cause\n")
    _, out, _ = said(capsys, "logs", launch)
    assert [line[9:] for line in out.splitlines()] == ["begin", "Traceback: the cause"]


def test_logs_print_the_newest_attempt_or_the_one_that_was_named(launch, capsys):
    run = directory.run(launch / "0-first", attempt=4)
    for attempt, text in ((1, "Traceback: the crash"), (2, "step 2"), (4, "step 4")):
        log = rundir.rank_log(run, attempt, attempt)
        log.parent.mkdir(parents=True)
        log.write_text(text)
    assert said(capsys, "logs", launch)[1] == "r4       step 4\n"
    words = ("logs", launch, "--attempt", 1, "--rank", 1)
    assert said(capsys, *words) == (0, "r1       Traceback: the crash\n", "")
    code, _, err = said(capsys, "logs", launch, "--attempt", 3)
    assert (code, "has no logs of attempt 3; attempts with logs: 1-2, 4\n" in err) == (3, True)
    code, _, err = said(capsys, "logs", launch, "--attempt", 1, "-f")
    assert (code, "--follow prints the newest attempt; omit --attempt" in err) == (2, True)


def test_a_run_that_was_started_by_hand_has_no_logs(tmp_path, capsys):
    code, _, err = said(capsys, "logs", directory.run(tmp_path / "mine"))
    assert (code, "mine has no logs; a run that was started by hand" in err) == (3, True)


def test_a_request_without_an_answer_is_not_denied(launch, capsys, monkeypatch):
    monkeypatch.setattr(actions, "send", lambda *_: "1")
    code, out, err = said(capsys, "do", launch, "note", "text=x", "--timeout", 0.1)
    assert (code, out) == (5, "")
    assert "no answer to note within 0.1 s; the request remains and may still" in err
    assert "; see nsa-console status " in err.replace("\n", " ")


def test_an_answer_of_another_form_is_no_success_and_no_traceback(launch, capsys, monkeypatch):
    def send(*_):
        directory.event(launch, "answer", request="7-x", ok="no", text=5, detail=7)
        return "7-x"

    monkeypatch.setattr(actions, "send", send)
    code, out, _ = said(capsys, "dump", launch)
    assert (code, out.splitlines()) == (4, [f"{launches.launch_id(launch)}: 5"])
