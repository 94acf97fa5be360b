"""What is known of a training before its start: facts, the entries to choose, useless sweeps."""

from __future__ import annotations

from pathlib import Path

from console import actions, cli
from console.plans import launch_facts
from console.tui.widgets.chooser import entries
from tests.console.plans.test_preflight import row
from trainers.contract import rundir

NONE = "not known: no recent run of phase plumbing with these settings has completed"


def test_the_facts_of_a_plan_and_the_time_that_it_took_before(tmp_path, capsys):
    options = actions.LaunchOptions("cpu_smoke", phase="plumbing", root=tmp_path)
    prepared = actions.prepare(options)
    facts = dict(prepared.training)
    assert facts["parameters"] == "450,712"
    assert (facts["sequence"], facts["tokens per step"]) == ("128 tokens", "2,048")
    assert (facts["device"], facts["checkpoint"]) == ("cpu ×2", "5.2 MiB")
    assert facts["time"] == NONE
    phase = {"name": "plumbing", "state": "completed", "dir": "0-plumbing",
             "started_ts": 100.0, "ended_ts": 142.0}  # fmt: skip
    (prepared.directory / "0-plumbing").mkdir(parents=True)
    rundir.write_json(prepared.directory / rundir.PLAN, {"v": 1, "launch": "before"})
    state = {"v": 1, "state": "ended", "phases": [phase]}
    rundir.write_json(prepared.directory / rundir.PLAN_STATE, state)
    rundir.write_json(prepared.directory / "0-plumbing" / rundir.RUN, dict(prepared.phases[0]))
    assert dict(actions.prepare(options).training)["time"] == "about 42s, as in the newest runs"
    other = actions.LaunchOptions(
        "cpu_smoke", phase="plumbing", sets={"train.steps": "7"}, root=tmp_path
    )
    assert dict(actions.prepare(other).training)["time"] == NONE
    assert cli.main(["--root", str(tmp_path), "check", "cpu_smoke"]) == 0
    assert "training time: not known: no recent run of phase sanity with" in capsys.readouterr().out


def test_a_foreign_program_has_no_facts():
    phase = {"plan": "mine", "phase": "one", "host": "a", "world": 1, "settings": {}}
    assert launch_facts.facts(Path("/nowhere"), [phase])[0] == ("settings", launch_facts.FOREIGN)


def test_launches_runs_by_hand_and_plans_can_be_chosen(tmp_path):
    rundir.write_json(_made(tmp_path / "mine") / rundir.RUN, {"v": 1})
    rundir.write_json(_made(tmp_path / "cpu_smoke" / "20261120-031500") / rundir.PLAN, {"v": 1})
    found = {(entry.kind, entry.name) for entry in entries(tmp_path)[0]}
    assert {("by hand", "mine"), ("launch", "cpu_smoke-20261120-031500"),
            ("plan", "cpu_smoke")} <= found  # fmt: skip


def _made(path):
    path.mkdir(parents=True)
    return path


def test_a_sweep_whose_runs_are_too_short_to_be_compared_is_refused(tmp_path):
    sweep = {"rounds": 9, "variants": {"a": {}, "b": {"flags": {"NSA_LR": 0.5}}}}
    for steps, wanted in (("29", "fail"), ("30", "pass")):
        result, text = row("config one b", tmp_path, {"train.steps": steps}, phase=sweep)
        assert result == wanted, text
        assert ("train.steps is 29, and a run of a sweep needs at least 30" in text) == (
            wanted == "fail"
        )


def test_a_warning_says_that_a_sweep_of_a_foreign_program_is_not_compared(tmp_path):
    (tmp_path / "t.py").touch()
    foreign = {"script": "t.py", "config": ""}
    assert row("config one", tmp_path, phase=foreign)[0] == "pass"
    sweep = {"rounds": 9, "variants": {"a": {}, "b": {"flags": {"NCCL_PROTO": "Simple"}}}}
    result, text = row("config one b", tmp_path, phase=foreign | sweep)
    assert (result, text.startswith("runs of a foreign program are not compared")) == (
        "unknown", True
    ), text  # fmt: skip


def test_a_sweep_whose_variants_have_the_same_value_is_refused(tmp_path):
    for value, wanted in (("2.5e-3", "fail"), ("0.5", "pass")):
        sweep = {"rounds": 9, "variants": {"a": {}, "b": {"flags": {"NSA_LR": value}}}}
        result, text = row("config one b", tmp_path, {"train.steps": "30"}, phase=sweep)
        assert result == wanted, text
        same = "train.lr is 0.0025 in all variants of one, although they should differ in it"
        assert text.startswith(same) == (wanted == "fail"), text
    library = {"rounds": 9, "variants": {"a": {}, "b": {"flags": {"NCCL_PROTO": "Simple"}}}}
    for env, start in (({}, "99 settings"), ({"NCCL_PROTO": "Simple"}, "NCCL_PROTO is Simple in")):
        _, text = row("config one b", tmp_path, {"train.steps": "30"}, phase=library, env=env)
        assert text.startswith(start), text
