"""Overrides of gates that did not pass, each with a reason and the name of the operator."""

from __future__ import annotations

import os
import time

import pytest

from console import actions
from console.actions import LaunchOptions
from console.cli import main
from console.commands import table
from console.commands.control import SPARE_S
from console.plans import report
from console.supervisor import overrides
from tests.console.sources import directory
from tests.launches import HANG_GUARD_S, STUB, phase
from trainers.contract import rundir
from trainers.contract.errors import RefusedError

GATES = {"steps_done": 5, "loss_falls": True, "grad_norm_above": 5}


def given(path, **args):
    """Sends an override as the command does; returns the answer."""
    found = {"phase": "one", "gate": "loss_falls", "reason": "It is planted."} | args
    return actions.answer(path, actions.send(path, "override", found, "ann@host"), HANG_GUARD_S)


def test_a_plan_that_stopped_at_gates_goes_on_after_they_are_overridden(begin, capsys):
    phases = (phase("one", "member.py", 6, gates=GATES), phase("two", "member.py", 6))
    started = begin(*phases, shell=STUB)
    assert "gate loss_falls unknown" in started.wait_over()["why"]
    assert main(["check", str(started.path)]) == 1
    for wrong, sentence in (
        ({"phase": "on"}, "no phase 'on'"), ({"gate": "loss_fall"}, "of a gate 'loss_fall'"),
        ({"gate": "steps_done"}, "steps_done passed"), ({"phase": "two"}, "has not completed"),
    ):  # fmt: skip
        with pytest.raises(RefusedError, match=sentence):
            given(started.path, **wrong)
    with (started.run() / rundir.EVENTS).open("ab") as events:
        events.write(b'{"v": 1, "kind": "no')  # as after a full disk
    assert "grad_norm_above failed" in given(started.path)["text"]
    with pytest.raises(RefusedError, match=r"overridden already: It is planted. \(ann@host, 2"):
        given(started.path)
    assert (started.plan_state["phases"][0]["result"], main(["check", str(started.run())])) == (
        "fail", 1,
    )  # fmt: skip
    words = ["--phase", "one", "--gate", "grad_norm_above", "--reason", "A second one."]
    documents = started.run() / rundir.GATES, started.path / rundir.PLAN_STATE
    before = [path.read_bytes() for path in documents]
    assert b"nats" not in before[0], "the loss of a foreign program has no known unit"
    assert main(["override", str(started.path), *words]) == 0
    for missing in (1, 2):  # as if the first request had failed before these writes
        for path, data in list(zip(documents, before, strict=True))[:missing]:
            path.write_bytes(data)
        assert main(["override", str(started.path), *words]) == 0
        assert started.plan_state["phases"][0]["result"] == "pass"
    assert "resume starts the next one" in capsys.readouterr().out
    assert main(["check", str(started.run())]) == 0
    assert main(["status", str(started.path)]) == 1, "nobody halted the launch"
    assert "INCOMPLETE" in capsys.readouterr().out
    found = actions.prepare(LaunchOptions(resume=started.path, root=started.path.parents[1]))
    assert [each["phase"] for each in found.phases] == ["two"]
    assert main(["report", str(started.path)]) == 0
    report = capsys.readouterr().out
    assert "It is planted. (ann@host, 2" in report
    assert "| 0-one |" in report.partition("Notes and requests")[2], "with operator and time"
    directory.change_at(started.run() / rundir.GATES, "gates", 1, "override", to="forged")
    assert main(["check", str(started.run())]) == 1, "the event and gates.json must agree"


def test_a_gate_that_failed_is_overridden_while_its_phase_runs(begin, tmp_path):
    gates, go = {"grad_norm_above": 5, "steps_done": 120}, tmp_path / "go"
    one = phase("one", "member.py", 120, "until", go, gates=gates)
    phases = (one, phase("two", "member.py", 3))
    started = begin(*phases, shell=STUB)
    started.wait_steps(10)
    wanted = {"phase": "one", "reason": "It is planted."}
    refusal = "no result of a gate 'steps_don'; known: grad_norm_above"
    # `grad_norm_above` has a result only after the supervisor has read enough records.
    started.wait(lambda: refusal in started.ask("override", gate="steps_don", **wanted)["text"])
    answer = started.ask("override", gate="steps_done", **wanted)
    assert answer["text"] == "the gate steps_done has no result yet; nothing is overridden"
    later = wanted | {"phase": "two", "gate": "steps_done"}
    assert "two is not the phase that runs" in started.ask("override", **later)["text"]
    answer = started.ask("override", gate="grad_norm_above", **wanted)
    assert answer["ok"], answer
    os.kill(started.child(), 9)  # the next working process finds the override in the events
    go.touch()
    assert started.wait_end()["why"] == "all phases are done"
    assert main(["check", str(started.path)]) == 0
    (event,) = (each for each in started.events(0) if each["kind"] == "override")
    assert (event["by"], event["gate"]) == ("tester", "grad_norm_above")


def ended(tmp_path):
    """Returns an ended launch whose gates all failed."""
    launch = directory.launch(tmp_path)
    failed = {"name": "steps_done", "value": 20.0, "bound": "≥ 21", "result": "fail"}
    for name in ("0-first", "1-second"):
        directory.completed(launch / name, {"steps_done": 21}, [failed])
    directory.end(launch, "fail", "fail")
    return launch


def test_an_override_during_the_last_work_of_a_supervisor_says_so(tmp_path, monkeypatch):
    assert overrides.FREE_S < table.ANSWER_S, "the command gives up before the reason is known"
    monkeypatch.setattr(overrides, "FREE_S", 0.1)
    launch = ended(tmp_path)
    with (
        directory.owned(launch),
        pytest.raises(RefusedError, match="still writes the report or runs a hook; nothing is ov"),
    ):
        given(launch, phase="first", gate="steps_done")


@pytest.mark.parametrize(("phase_name", "is_last"), [("first", False), ("second", True)])
def test_the_answer_promises_a_next_phase_only_if_one_is_left(tmp_path, phase_name, is_last):
    launch = ended(tmp_path)
    (launch / rundir.LOCK).touch()
    answer = given(launch, phase=phase_name, gate="steps_done")["text"]
    assert not (launch / report.NAME).exists(), "the launch had no report"
    assert "the phase has passed" in answer
    assert ("resume starts the next one" in answer) is not is_last


def test_the_report_in_the_directory_of_an_ended_launch_has_a_later_override(
    tmp_path, capsys, monkeypatch
):
    """The report may take longer than the answer to the request."""
    launch, written = ended(tmp_path), report.versions

    def slowly(*paths):
        time.sleep(1 + SPARE_S)
        return written(*paths)

    monkeypatch.setattr(report, "versions", slowly)
    (launch / rundir.LOCK).touch()
    words = ["override", str(launch), "--gate", "steps_done", "--reason", "It is early."]
    (launch / report.NAME).mkdir()
    assert main([*words, "--timeout", "1", "--phase", "first"]) == 0
    assert f"{launch / report.NAME} is older than the override (Is a d" in capsys.readouterr().err
    (launch / report.NAME).rmdir()
    (launch / report.NAME).write_text("**no go**")
    assert main([*words, "--timeout", "1", "--phase", "second"]) == 0
    assert "the phase has passed" in capsys.readouterr().out
    text = (launch / report.NAME).read_text()
    assert text.startswith("# Report of toy-")
    assert text.count("It is early. (") == 2
