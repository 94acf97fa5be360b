"""`nsa-console drill`: the truth of each fault, the score from the files, and the clean-up."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from console import cli
from console.action_table import ACTIONS, NEUTRAL
from console.commands import drill
from console.diagnose.causes import CAUSES
from console.diagnose.rules import RULES
from console.model import EXIT_CODES
from console.sources import process
from tests.console.sources import directory
from tests.launches import STUB, phase, write_plan
from trainers.contract import jsonl, rundir
from trainers.contract.drill_kinds import KINDS, Drill

FAULT_TS = 1_800_000_000.0


def test_the_truth_of_each_drill_is_one_that_the_console_can_show():
    for name, kind in KINDS.items():
        truth = kind.truth
        assert sum(map(bool, (truth.cause, truth.ends, truth.alert))) == 1, name
        assert truth.cause in {"", *(cause.name for cause in CAUSES)}, name
        assert truth.ends in {"", *EXIT_CODES}, name
        assert truth.alert in {"", *RULES}, name
        assert set(truth.right) <= {"resume", *ACTIONS} - NEUTRAL, name


@pytest.fixture
def launched(tmp_path) -> Path:
    """A launch whose rank 1 has had the fault `stop`."""
    launch = directory.launch(tmp_path / "artifacts")
    run = directory.run(launch / "0-first", state="stalled")
    directory.beat(run, 1, 10, "drill", state="fires", drill="stop@10:1", ts=FAULT_TS)
    (run / "verdicts").mkdir()
    return launch


def say(launch: Path, after_s: float, rank: int, cause: str, of: str = "forward") -> None:
    ts = FAULT_TS + after_s
    record = {"ts": ts, "rank": rank, "phase": of, "cause": cause, "sentence": f"{cause} {rank}"}
    directory.document(launch / "0-first" / "verdicts" / f"{int(ts * 1000)}.json", record)


def ask(launch: Path, after_s: float, action: str, by: str = "ann") -> None:
    directory.event(launch, "request", action=action, by=by, ts=FAULT_TS + after_s)


def score(launch: Path) -> drill.Score:
    return drill.read_score(launch, Drill("stop", 10, 1))


def test_a_right_verdict_and_a_right_reaction_pass_with_their_times(launched):
    say(launched, 4.0, 1, "slowest-rank")
    assert not score(launched).right_verdict
    say(launched, 9.0, 1, "stopped")
    found = score(launched)
    assert found.right_verdict
    assert (found.shown_s, found.done, found.passed) == (9.0, False, False)
    assert {"ack", "dump", "note"} < NEUTRAL
    for name in sorted(NEUTRAL):
        assert ACTIONS[name].cost[1].startswith("all work"), name
        ask(launched, 12.0, name)
    assert not score(launched).done
    directory.event(launched / "0-first", "clear", alert="stall", text="the ranks step again",
                    ts=FAULT_TS + 20.0)  # fmt: skip
    found = score(launched)
    assert (found.reaction, found.passed, found.done) == (("resume", 20.0), True, True)
    assert "score     passed" in found.lines()


@pytest.mark.parametrize(
    ("rank", "cause", "of", "marks"),
    [(0, "stopped", "forward", "rank: no, phase: yes, cause: yes"),
     (1, "sleep", "forward", "rank: yes, phase: yes, cause: no"),
     (1, "stopped", "backward", "rank: yes, phase: no, cause: yes")],
)  # fmt: skip
def test_each_part_of_a_wrong_verdict_is_named(launched, rank, cause, of, marks):
    say(launched, 9.0, rank, cause, of)
    ask(launched, 12.0, "stop")
    found = score(launched)
    assert not found.passed
    assert f"correct   {marks}" in found.lines()


def test_the_end_or_the_alert_of_another_rank_is_not_the_one_of_the_drill(launched):
    said = "crashed: rank 12 exited with code 7"
    directory.document(launched / rundir.PLAN_STATE, {"v": 1, "state": "crashed", "why": said})
    directory.document(
        launched / "0-first" / "supervisor.json",
        {"v": 1, "state": "crashed", "why": said, "updated_ts": time.time()},
    )
    found = drill.read_score(launched, Drill("exit", 10, 1))
    assert (found.said[:8], found.right_rank, found.right_cause) == ("crashed:", False, True)
    directory.event(launched / "0-first", "alert", alert="imbalance", ts=FAULT_TS + 9.0,
                    text="rank 0 takes 3 times as long as the other ranks")  # fmt: skip
    found = drill.read_score(launched, Drill("slow", 10, 1))
    assert (found.right_rank, found.right_cause, found.shown_s) == (False, True, None)


def test_a_wrong_reaction_and_the_stop_of_the_drill_itself_do_not_pass(launched):
    say(launched, 9.0, 1, "stopped")
    ask(launched, 11.0, "stop", by="drill ann@host pid 1")
    assert score(launched).reaction is None
    ask(launched, 12.0, "halt", by="driller@host pid 1")
    ask(launched, 14.0, "stop")
    found = score(launched)
    assert (found.reaction, found.passed) == (("halt", 12.0), False)
    wrong = "reaction  halt after 12.0 s: not correct; correct: resume or stop or kill"
    assert wrong in found.lines()


def test_a_verdict_after_the_reaction_or_before_the_fault_does_not_count(launched):
    say(launched, -5.0, 1, "stopped")
    ask(launched, 3.0, "stop")
    say(launched, 9.0, 1, "stopped")
    assert score(launched).said == ""


def test_a_fault_counts_after_many_further_steps(launched):
    beats = rundir.heartbeat(launched / "0-first", 1)
    record = json.loads(beats.read_bytes()) | {"msg": "progress", "state": 1000 * "-"}
    with beats.open("ab") as stream:
        stream.writelines(jsonl.encode(record | {"step": step}) for step in range(11, 2000))
    assert beats.stat().st_size > drill.READ_BYTES
    assert score(launched).fault_ts == FAULT_TS


def practised(
    capsys, *words: str, sender: threading.Thread | None = None
) -> tuple[int, dict]:  # fmt: skip
    """Runs a drill in this process; after the end of `sender`, restores the signal handlers."""
    handlers = {number: signal.getsignal(number) for number in drill.SIGNALS}
    code = cli.main([*words, "--json"])
    if sender is not None:
        sender.join()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    out, err = capsys.readouterr()
    assert out, err
    return code, json.loads(out)


def test_a_run_whose_fault_does_not_happen_fails_the_drill_and_is_ended(
    tmp_path, capsys, monkeypatch
):
    """The program is foreign and has no drills, so no fault happens."""
    plan = write_plan(tmp_path, phases=[phase("drill", "member.py", 100_000)])
    monkeypatch.setattr(drill, "PLAN", plan)
    monkeypatch.setattr(drill, "STARTUP_S", 2.0)
    monkeypatch.setenv("PYTHONPATH", STUB["PYTHONPATH"])
    root = ("--root", str(tmp_path / "artifacts"))
    code, found = practised(capsys, *root, "drill", "kill", "--wait", "1")
    assert (code, found["fault_ts"], found["over"], found["passed"]) == (1, None, False, False)
    assert (rundir.read_json(Path(found["path"]) / rundir.PLAN_STATE) or {})["state"] == "ended"


def test_signals_end_a_drill_and_its_run(tmp_path, capsys, monkeypatch):
    """The first signal comes after the start, the other signals while the drill ends its run."""
    plan = write_plan(tmp_path, phases=[phase("drill", "member.py", 100_000)])
    monkeypatch.setattr(drill, "PLAN", plan)
    monkeypatch.setenv("PYTHONPATH", STUB["PYTHONPATH"])

    def interrupt() -> None:
        while not list(tmp_path.glob("artifacts/drills/*/*/0-drill/heartbeat_rank0.jsonl")):
            time.sleep(0.002)
        while signal.getsignal(signal.SIGTERM) is not drill._interrupt:
            time.sleep(0.002)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(os.getpid(), number)
            time.sleep(0.05)

    thread = threading.Thread(target=interrupt)
    thread.start()
    root = ("--root", str(tmp_path / "artifacts"))
    code, found = practised(capsys, *root, "drill", "kill", "--wait", "9", sender=thread)
    assert (code, found["passed"]) == (1, False)
    state = rundir.read_json(Path(found["path"]) / rundir.PLAN_STATE) or {}
    assert (state["state"], rundir.is_alive(state["supervisor"])) == ("ended", False)


@pytest.mark.slow
def test_a_real_drill_is_scored_without_a_terminal_and_leaves_nothing(tmp_path, capsys):
    root = ("--root", str(tmp_path))
    code, found = practised(capsys, *root, "drill", "kill", "--nproc", "1", "--wait", "50")
    assert (code, found["passed"]) == (0, True), found
    assert "rank 0 was killed by SIGKILL" in found["said"]
    assert 0 <= found["shown_s"] < 30
    run = Path(found["path"]) / "0-drill"
    token = (rundir.read_json(run / rundir.RUN) or {})["environment"]["NSA_CONSOLE_TOKEN"]
    assert not process.with_token(token)
