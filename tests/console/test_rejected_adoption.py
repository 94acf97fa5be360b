"""Adoptions that are rejected before a supervisor is started."""

from __future__ import annotations

import pytest

from console import cli
from console.supervisor import launcher
from tests.console.sources import directory
from tests.console.test_resume import continued, ended
from trainers.contract import rundir

DEAD = rundir.identity() | directory.DEAD


def adopted(launch, capsys, *words):
    """Returns the exit code and the message of `adopt`."""
    code = cli.main(["adopt", str(launch), *words])
    return code, capsys.readouterr().err.replace("\n", " ")


def test_a_rejected_adoption_names_the_resume_that_is_possible(tmp_path, capsys):
    launch = ended(tmp_path, state="running", supervisor=DEAD | directory.ELSEWHERE)
    way = f"nsa-console resume {launch} --yes"
    assert cli.main(["adopt", str(launch)]) == 4
    said = capsys.readouterr().err.replace("\n", " ")
    assert f"adopt it there; if no rank is alive there: {way}" in said
    directory.change(launch / rundir.PLAN_STATE, supervisor=DEAD)
    directory.change(launch / rundir.PLAN, cwd=str(tmp_path / "no directory"))
    assert cli.main(["adopt", str(launch)]) == 4
    said = capsys.readouterr().err.replace("\n", " ")
    assert f"restore it, and adopt again; or, if no rank is alive, cd to it: {way}" in said


@pytest.mark.parametrize("there", [directory.ELSEWHERE, {}])
def test_a_launch_that_another_continues_is_not_adopted(tmp_path, capsys, there):
    """Otherwise two launches would train the same steps."""
    owner = DEAD | there
    old = ended(tmp_path, state="running", supervisor=owner, updated_ts=1.7e9)
    continued(old.parents[1], old / "0-sanity", "one", 1.6e9)
    code, said = adopted(old, capsys)
    assert (code, said.endswith("or add --yes to adopt this one ")) == (4, True), said
    assert "is already continued by one, which is halted at step 168 of sanity, so no" in said
    cli.main(["status", str(old)])
    assert "is already continued by one" in capsys.readouterr().out


def test_a_launch_that_another_continues_is_adopted_while_a_rank_is_alive(
    tmp_path, capsys, monkeypatch
):
    """The rank needs a supervisor, and perhaps the other launch only loaded a checkpoint."""
    started = []
    monkeypatch.setattr(launcher, "_start_supervisor", lambda *_, **__: started.append(1))
    old = ended(tmp_path, state="running", supervisor=DEAD)
    continued(old.parents[1], old / "0-sanity", "one", 1.6e9)
    rank = rundir.identity() | {"rank": 0}
    rundir.write_json(old / "0-sanity" / rundir.SUPERVISOR, DEAD | {"workers": [rank]})
    assert adopted(old, capsys) == (0, "")
    assert started


@pytest.mark.parametrize(
    ("change", "why"),
    [({"boot_id": "x"}, "was not supervised since this host booted"),
     ({"pid_ns": 1}, "was supervised in another container of this host")],
)  # fmt: skip
def test_an_adoption_needs_a_confirmation_if_the_former_processes_cannot_be_seen(
    tmp_path, capsys, monkeypatch, change, why
):
    """A rank in another container may be alive; its command would be started a second time."""
    started = []
    monkeypatch.setattr(launcher, "_start_supervisor", lambda *_, **__: started.append(1))
    old = ended(tmp_path, state="running", supervisor=rundir.identity() | change)
    code, said = adopted(old, capsys)
    assert (code, started) == (4, [])
    assert why in said
    assert "--yes" in said
    assert adopted(old, capsys, "--yes") == (0, "")
    assert started
