"""A launch that ended early continues in a new launch, with the same options."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from console import actions, cli, rest_of_launch
from console.actions import LaunchOptions
from console.sources import json_documents, launches
from console.sources.run import RunSource
from console.supervisor import launcher, run_files
from console.supervisor.next_flags import set_words
from tests.console.sources import directory
from tests.launches import STUB, phase
from trainers import manifest
from trainers.contract import jsonl, rundir
from trainers.contract.errors import RefusedError


def ended(folder, checkpoint="step_00000001", sets=None, **state):
    """Writes a launch of cpu_smoke that ended in its first phase; returns its directory."""
    options = LaunchOptions(
        "cpu_smoke", flags={"NSA_LR": "0.5"}, sets={"train.seed": "7"} | (sets or {}), nproc=1,
        root=folder / "artifacts",
    )  # fmt: skip
    old = actions.prepare(options)
    run = old.directory / "0-sanity"
    (run / rundir.CHECKPOINTS).mkdir(parents=True)
    if checkpoint:
        found = {"format": manifest.FORMAT, "step": int(checkpoint[5:]), "tokens_total": 1,
                 "data": {}, "files": {"x": [1, "0"]}}  # fmt: skip
        (run / rundir.CHECKPOINTS / checkpoint).mkdir()
        rundir.write_json(run / rundir.CHECKPOINTS / checkpoint / manifest.MANIFEST, found)
        (run / rundir.CHECKPOINTS / rundir.LATEST).write_text(f"{checkpoint}\n")
    rundir.write_json(old.directory / rundir.PLAN, old.spec.as_dict(1.0))
    record = json.loads(json.dumps(dict(old.phases[0])))
    # as if an operator had set the flag in a launch that this launch resumed
    record["flags"]["NSA_LR"]["origin"] = "operator ann@host"
    record["flags"]["NCCL_DEBUG"] = {"value": "WARN", "origin": "operator ann@host"}
    record["flags"]["NCCL_ALGO"] = {"value": "Tree", "origin": "operator nobody"}
    answers = [
        ("NCCL_DEBUG", "WARN", "sanity", "next"), ("NSA_LR", "0.1", "sanity", "all"),
        ("NSA_TB_DISABLE", "1", "plumbing", "next"), ("NCCL_PROTO", "LL", "plumbing", "next"),
    ]  # fmt: skip
    with (old.directory / rundir.EVENTS).open("wb") as stream:
        stream.writelines(
            jsonl.encode({"v": 1, "kind": "answer", "ok": True, "text": set_words(*answer)})
            for answer in answers
        )
    rundir.write_json(run / rundir.RUN, record)
    phases = [{"name": "sanity", "state": "halted", "result": "unknown", "dir": "0-sanity"}]
    held = {"v": 1, "state": "ended", "phase": 0, "phases": phases} | state
    rundir.write_json(old.directory / rundir.PLAN_STATE, held)
    return old.directory


def resumed(launch, again=False):
    return actions.prepare(LaunchOptions(resume=launch, root=launch.parents[1], again=again))


def test_the_options_of_the_old_launch_and_the_flags_of_its_operator_are_repeated(tmp_path):
    launch = ended(tmp_path)
    found = resumed(launch)
    assert [phase["phase"] for phase in found.phases] == ["sanity", "plumbing", "recall"]
    first, second, _ = found.phases
    assert first["settings"]["checkpoint.resume"] == {
        "value": str(launch / "0-sanity"), "origin": "resume",
    }  # fmt: skip
    assert second["settings"]["checkpoint.resume"]["value"] == ""
    assert first["flags"]["NCCL_DEBUG"] == {"value": "WARN", "origin": "operator ann@host"}
    assert "NCCL_DEBUG" not in second["flags"]
    for each in found.phases:
        assert each["nproc"] == 1
        assert each["settings"]["train.seed"] == {"value": 7, "origin": "--set"}
        assert each["flags"]["NSA_LR"] == {"value": "0.5", "origin": "--flag"}
    assert found.directory != launch


def test_flags_of_later_phases_are_repeated_if_an_answer_confirms_them(tmp_path):
    flag = {"by": "ann@host", "ts": 1.0}
    pending = {
        "NSA_LR": flag | {"value": "0.1", "phases": "all"},
        "NSA_TB_DISABLE": flag | {"value": "1", "phases": "next"},
        "NCCL_PROTO": flag | {"value": "LL", "phases": "all"},  # the answer was for one phase
    }
    launch, said = ended(tmp_path, next_flags=pending), list[str]()
    options = LaunchOptions(resume=launch, root=launch.parents[1])
    first, second, third = actions.prepare(options, said.append).phases
    assert [text for text in said if "of an operator" in text] == [
        f"{flag} of an operator is not used: no answer to a request confirms it"
        for flag in ("NCCL_PROTO=LL", "NCCL_ALGO=Tree")
    ]
    assert "NCCL_ALGO" not in first["flags"], "no answer confirms this flag"
    assert [each["flags"]["NSA_LR"]["value"] for each in (first, second, third)] == [
        "0.5", "0.1", "0.1",
    ]  # fmt: skip
    assert second["flags"]["NSA_LR"]["origin"] == "operator ann@host"
    assert ["NSA_TB_DISABLE" in each["flags"] for each in (first, second, third)] == [
        False, True, False,
    ]  # fmt: skip
    assert not any("NCCL_PROTO" in each["flags"] for each in (first, second, third))


def test_a_resumed_phase_names_the_gates_whose_override_ends(tmp_path):
    launch, said = ended(tmp_path), list[str]()
    event = {"v": 1, "kind": "override", "gate": "loss_falls", "reason": "a short run", "by": "ann"}
    (launch / "0-sanity" / rundir.EVENTS).write_bytes(jsonl.encode(event))
    actions.prepare(LaunchOptions(resume=launch, root=launch.parents[1]), said.append)
    assert "gate loss_falls is evaluated again, without its override" in said


def test_a_flag_of_the_shell_does_not_replace_an_option_or_the_flag_of_an_operator(
    tmp_path, monkeypatch
):
    flag = {"by": "ann@host", "ts": 1.0, "value": "1", "phases": "next"}
    launch, said = ended(tmp_path, next_flags={"NSA_TB_DISABLE": flag}), list[str]()
    shell = {"NSA_LR": "0.9", "NSA_TB_DISABLE": "0", "NSA_SDPA_AUDIT": "1", "NCCL_PROTO": "LL"}
    for name, value in shell.items():
        monkeypatch.setenv(name, value)
    found = actions.prepare(LaunchOptions(resume=launch, root=launch.parents[1]), said.append)
    first, second, third = (each["flags"] for each in found.phases)
    assert first["NSA_LR"] == {"value": "0.5", "origin": "--flag"}
    assert second["NSA_TB_DISABLE"] == {"value": "1", "origin": "operator ann@host"}
    assert "NSA_TB_DISABLE" not in third
    assert third["NSA_SDPA_AUDIT"] == {"value": "1", "origin": "shell"}
    assert sorted(said) == [
        "NCCL_ALGO=Tree of an operator is not used: no answer to a request confirms it",
        "NSA_LR=0.9 of the shell is not used; the launch to resume has 0.5",
        "NSA_SDPA_AUDIT=1 of the shell is used; the launch to resume has no value",
        "NSA_TB_DISABLE=0 of the shell is not used; the launch to resume has 1 and no value",
    ]
    (shell,) = (check for check in found.checks if check.name == "shell")
    assert shell.text.startswith("handed to the training: NSA_SDPA_AUDIT")
    assert "NSA_LR" not in shell.text
    assert "not handed to the training: NCCL_PROTO, NSA_TB_DISABLE; launch" in shell.text


def continued(root, run, name, created_ts):
    """Writes a launch that continued the launch of `run` and was halted; returns it."""
    new = directory.launch(root, "cpu_smoke", name)
    phases, former = [{"name": "sanity", "dir": "0-sanity"}], {str(run.parent): "former"}
    plan = {"phases": phases, "created_ts": created_ts, "launch": name, "continues": former}
    directory.change(new / rundir.PLAN, **plan)
    directory.beat(directory.run(new / "0-sanity", state="halted"), 0, 168)
    directory.end(new)
    return new


def test_a_launch_that_another_continues_is_resumed_only_with_a_confirmation(tmp_path, capsys):
    old = ended(tmp_path)
    root = old.parents[1]
    named = ["--root", str(root), "resume", str(old), "--dry-run"]
    cli.main(named)
    assert "is already continued" not in capsys.readouterr().err
    first = continued(root, old / "0-sanity", "one", 1.6e9)
    continued(root, first / "0-sanity", "two", 1.7e9)
    cli.main(named)
    assert "is already continued by two, which is halted at step 168 of sanity" in (
        capsys.readouterr().err.replace("\n", " ")
    )
    assert cli.main(named[:-1]) == 4
    assert "add --yes to resume this one" in capsys.readouterr().err.replace("\n", " ")
    assert rest_of_launch.continued_words(first / "0-sanity", root).startswith("one is already")
    assert rest_of_launch.continued_words(root / "cpu_smoke" / "two", root) == ""


def test_status_and_report_name_the_launches_before_and_after_a_resume(tmp_path, capsys):
    old = ended(tmp_path)
    root = old.parents[1]
    cli.main(["--root", str(root), "status", str(old)])
    assert f"to resume, run: nsa-console resume {old}" in capsys.readouterr().out
    new = continued(root, old / "0-sanity", "one", 1.6e9)
    cli.main(["--root", str(root), "status", str(old)])
    found = capsys.readouterr().out
    assert f"{launches.launch_id(old)} is already continued by one, which is halted" in found
    assert "to resume, run" not in found
    cli.main(["--root", str(root), "status", str(new)])
    assert "    continues former\n" in capsys.readouterr().out
    cli.main(["--root", str(root), "report", str(new)])
    assert "This launch continues former." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("checkpoint", "says"),
    [("step_00000001", "sanity resumes from {run}/checkpoints/step_00000001 if it is intact"),
     ("", "sanity starts at its first step")],
)  # fmt: skip
def test_the_checkpoint_from_which_a_phase_resumes_is_said(tmp_path, checkpoint, says):
    launch = ended(tmp_path, checkpoint)
    assert resumed(launch).start() == says.format(run=launch / "0-sanity")


@pytest.mark.parametrize("latest", ["garbage", "../../etc\n", "step_00000009\n", None])
def test_a_checkpoint_that_the_file_latest_does_not_name_is_resumed(tmp_path, latest):
    launch = ended(tmp_path)
    folder = launch / "0-sanity" / rundir.CHECKPOINTS
    (folder / rundir.LATEST).unlink()
    if latest is not None:
        (folder / rundir.LATEST).write_text(latest)
    found = resumed(launch).phases[0]["settings"]["checkpoint.resume"]
    assert found["value"] == str(launch / "0-sanity")
    state = RunSource(launch).poll()
    assert (state.checkpoint, state.can_resume) == ("step_00000001", True)
    assert run_files.newest_checkpoint(launch / "0-sanity") == 1


@pytest.mark.parametrize("damage", ["not a directory", "no manifest", "too many names"])
def test_a_phase_whose_newest_checkpoint_is_not_known_is_not_resumed_at_step_1(
    tmp_path, damage, monkeypatch
):
    launch = ended(tmp_path, sets={"checkpoint.resume": "/old/0-sanity"})
    run = launch / "0-sanity"
    folder = run / rundir.CHECKPOINTS
    (folder / rundir.LATEST).unlink()
    if damage == "no manifest":
        (folder / "step_00000001" / manifest.MANIFEST).unlink()
    elif damage == "not a directory":
        folder.rename(run / "moved")
        folder.write_text("in the way")
    else:
        monkeypatch.setattr(json_documents, "MAX_NAMES", 4)
        for number in range(4):
            (folder / f"step_{number}").symlink_to("/etc")
    with pytest.raises(RefusedError, match=f"the newest checkpoint in {folder} is not known"):
        resumed(launch)
    assert RunSource(run).poll().checkpoint == ""
    assert run_files.newest_checkpoint(run) is None


def test_an_ended_run_names_the_checkpoint_that_the_trainer_would_load(tmp_path):
    """A save may have been killed before `latest`; a name alone is no checkpoint."""
    launch = ended(tmp_path)
    folder = launch / "0-sanity" / rundir.CHECKPOINTS
    shutil.copytree(folder / "step_00000001", folder / "step_00000002")
    for name in ("step_00000009", "step_00000008"):
        (folder / name).symlink_to("step_00000002/nothing")
    assert RunSource(launch).poll().checkpoint == "step_00000002"


@pytest.mark.parametrize("is_in_config", [False, True])
def test_a_launch_that_resumed_an_older_launch_resumes_from_its_own_newest_checkpoint(
    tmp_path, is_in_config
):
    older = {"checkpoint.resume": "/old/0-sanity", "checkpoint.from_step": "7"}
    launch = ended(tmp_path, sets={} if is_in_config else older)
    if is_in_config:
        config = tmp_path / "rewind.yaml"
        config.write_text("checkpoint: {resume: /old/0-sanity, from_step: 7}\n")
        directory.change_at(launch / rundir.PLAN, "phases", 0, "config", to=str(config))
    settings = resumed(launch).phases[0]["settings"]
    assert settings["checkpoint.resume"]["value"] == str(launch / "0-sanity")
    assert settings["checkpoint.from_step"] == {"value": 0, "origin": "resume"}


def test_a_launch_that_has_not_ended_or_is_not_confirmed_is_refused(tmp_path):
    launch = ended(tmp_path, state="running")
    with pytest.raises(RefusedError, match=r"has not ended \(it is running\); halt it first$"):
        resumed(launch)
    dead = rundir.identity() | directory.DEAD
    directory.change(launch / rundir.PLAN_STATE, supervisor=dead)
    why = rf"\(no supervisor is running; no .*\); nsa-console adopt {launch} starts a supervisor on"
    with pytest.raises(RefusedError, match=why):
        resumed(launch)
    passed = [{"name": "sanity", "state": "completed", "result": "pass", "dir": "0-sanity"}]
    ended(tmp_path / "other", phases=passed)
    launch = next((tmp_path / "other").rglob(rundir.PLAN)).parent
    with pytest.raises(RefusedError, match="its records do not confirm it"):
        resumed(launch)
    with pytest.raises(RefusedError, match="belongs to no launch"):
        resumed(tmp_path / "a" / "b")


@pytest.mark.parametrize("there", [directory.ELSEWHERE, {}])
def test_a_launch_whose_supervisor_is_gone_is_resumed_only_with_a_confirmation(tmp_path, there):
    owner = rundir.identity() | directory.DEAD | there
    launch = ended(tmp_path, state="running", supervisor=owner, updated_ts=1.7e9)
    with pytest.raises(RefusedError, match=r"and no rank is alive there, add --yes to resume it$"):
        resumed(launch)
    assert resumed(launch, again=True).phases[0]["phase"] == "sanity"
    lock = os.open(launch / rundir.LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(RefusedError, match="a process holds its lock"):
        resumed(launch, again=True)
    os.close(lock)


def test_a_launch_that_was_adopted_after_the_checks_of_a_resume_is_not_resumed(tmp_path):
    launch = ended(tmp_path, state="running", supervisor=rundir.identity() | directory.DEAD)
    prepared = resumed(launch, again=True)
    directory.change(launch / rundir.PLAN_STATE, supervisor=rundir.identity())
    with pytest.raises(RefusedError, match=r"has not ended \(it is running\); halt it first$"):
        actions.begin(prepared, "tester")
    assert not prepared.directory.exists()


def test_a_launch_without_a_supervisor_is_not_resumed_while_a_rank_is_alive(tmp_path):
    dead = rundir.identity() | directory.DEAD
    launch = ended(tmp_path, state="running", supervisor=dead)
    rank = rundir.identity() | {"rank": 0}
    rundir.write_json(launch / "0-sanity" / rundir.SUPERVISOR, dead | {"workers": [rank]})
    with pytest.raises(RefusedError, match=r"rank 0 still runs.* not possible, halt it first$"):
        resumed(launch, again=True)
    directory.change(launch / rundir.PLAN_STATE, supervisor=rundir.identity())
    with pytest.raises(RefusedError, match="has not ended"):
        resumed(launch, again=True)


SWEEP = """
phases:
  - name: lr
    set: {train.steps: 30}
    rounds: 9
    variants: {low: {flags: {NSA_LR: 1e-4}}, high: {flags: {NSA_LR: 1e-3}}}
  - {name: after, set: {train.steps: 2}}
"""


def halted_in_sweep(folder, passed):
    """Writes a launch of `SWEEP` that was halted after `passed` runs; returns its directory."""
    (folder / "compared.yaml").write_text(SWEEP)
    old = actions.prepare(LaunchOptions(str(folder / "compared.yaml"), root=folder / "artifacts"))
    spec = old.spec.as_dict(1.0)
    rundir.make_directory(old.directory)
    rundir.write_json(old.directory / rundir.PLAN, spec)
    states = [("completed", "pass")] * passed + [("halted", "unknown")] + [("later", "")] * 18
    phases = [
        {"name": each["name"], "dir": f"{index}-{each['name']}", "state": state, "result": result}
        for index, (each, (state, result)) in enumerate(zip(spec["phases"], states, strict=False))
    ]
    for index, each in enumerate(phases[: passed + 1]):
        saved = old.directory / each["dir"] / rundir.CHECKPOINTS / "step_00000007"
        saved.mkdir(parents=True)
        found = {"format": manifest.FORMAT, "step": 7, "tokens_total": 1, "data": {},
                 "files": {"x": [1, "0"]}}  # fmt: skip
        rundir.write_json(saved / manifest.MANIFEST, found)
        record = json.loads(json.dumps(dict(old.phases[index])))
        rundir.write_json(old.directory / each["dir"] / rundir.RUN, record)
    flag = {"value": "WARN", "phases": "all", "by": "ann", "ts": 1.0}
    held = {"v": 1, "state": "ended", "phase": passed, "phases": phases}
    held["next_flags"] = {"NCCL_DEBUG": flag}
    rundir.write_json(old.directory / rundir.PLAN_STATE, held)
    text = set_words("NCCL_DEBUG", "WARN", phases[passed]["name"], "all")
    event = {"v": 1, "kind": "answer", "ok": True, "text": text}
    (old.directory / rundir.EVENTS).write_bytes(jsonl.encode(event))
    return old.directory


@pytest.mark.parametrize("passed", [0, 5])
def test_a_sweep_begins_again_because_runs_of_two_launches_are_not_compared(tmp_path, passed):
    launch, said = halted_in_sweep(tmp_path, passed), list[str]()
    found = actions.prepare(LaunchOptions(resume=launch, root=launch.parents[1]), said.append)
    names = [phase["phase"] for phase in found.phases]
    assert (len(names), names[0], names[-1]) == (19, "lr-1-low", "after")
    assert {each["settings"]["checkpoint.resume"]["value"] for each in found.phases} == {""}
    assert {each["flags"]["NCCL_DEBUG"]["value"] for each in found.phases} == {"WARN"}
    assert "the sweep lr begins again, because runs of two launches are not compared" in said


def test_a_halted_launch_goes_on_in_the_phase_that_it_was_in(begin):
    started = begin(phase("one", "member.py", 3), phase("two", "member.py", 100_000), shell=STUB)
    started.wait_steps(2, index=1)
    with pytest.raises(RefusedError, match="has not ended"):
        resumed(started.path)
    assert started.ask("halt")["ok"]
    started.wait_over()
    found = resumed(started.path)
    assert [phase["phase"] for phase in found.phases] == ["two"]
    assert found.phases[0]["argv"][-1] == "100000"
    assert found.plan.watch == actions.launch_spec.load(started.path).plan.watch


def test_of_two_resumes_that_were_prepared_the_second_is_rejected(tmp_path, monkeypatch):
    old = ended(tmp_path)
    prepared = resumed(old)

    def start(directory, spec):
        rundir.make_directory(directory)
        rundir.write_json(directory / rundir.PLAN, spec.as_dict(1.7e9))

    monkeypatch.setattr(launcher, "start", start)
    actions.begin(prepared, "x")
    with pytest.raises(RefusedError, match=r"is already continued by .*, so nothing was launched"):
        actions.begin(prepared, "x")
    again = replace(prepared, options=replace(prepared.options, again=True))
    assert isinstance(actions.begin(again, "x"), Path)


def test_a_launch_whose_checkpoint_a_setting_names_is_continued_too(tmp_path):
    old = ended(tmp_path)
    given = {"checkpoint.resume": str(old / "0-sanity")}
    chosen = LaunchOptions("cpu_smoke", phase="sanity", sets=given, root=old.parents[1])
    assert list(actions.prepare(chosen).spec.continues) == [str(old)]
