"""A resume that is typed in another directory than the launch."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from console import cli, rest_of_launch
from console.actions import LaunchOptions
from console.plans import catalog
from console.sources import launches
from tests.console.sources import directory
from tests.console.test_resume import continued, ended
from trainers.contract import rundir
from trainers.contract.errors import RefusedError


@pytest.fixture
def moved(tmp_path, monkeypatch):
    """An ended launch of `work`, whose config overrides the project's; the test is elsewhere.

    The other directory has a config of the same name.
    """
    for name, every in (("work", 77), ("other", 88)):
        config = tmp_path / name / "configs" / "tiny_cpu.yaml"
        config.parent.mkdir(parents=True)
        text = (catalog.PROJECT / "configs" / "tiny_cpu.yaml").read_text()
        config.write_text(text.replace("log_every: 5", f"log_every: {every}"))
    monkeypatch.chdir(tmp_path / "work")
    launch = ended(tmp_path)
    monkeypatch.chdir(tmp_path / "other")
    return launch


def resume_elsewhere(launch, capsys):
    """Returns the exit code, `report.log_every`, the directory and the messages."""
    path = os.path.relpath(launch)
    code = cli.main(["--root", "../artifacts", "resume", path, "--dry-run", "--json"])
    out, err = capsys.readouterr()
    found = json.loads(out)
    if code == 4:
        return code, None, None, found["error"]
    settings = found["phases"][0]["settings"]
    return code, settings["report.log_every"]["value"], found["directory"], err.replace("\n", " ")


def test_a_resume_from_another_directory_works_in_that_of_the_old_launch(moved, capsys, tmp_path):
    code, every, folder, said = resume_elsewhere(moved, capsys)
    assert (code, every, Path.cwd()) == (0, 77, tmp_path / "work")
    assert Path(folder).resolve().parent == tmp_path / "artifacts" / "cpu_smoke"
    assert f"the working directory of the new launch is {tmp_path / 'work'}" in said


def test_a_resume_in_a_directory_that_was_removed_is_rejected_with_a_sentence(
    moved, capsys, tmp_path, monkeypatch
):
    (tmp_path / "removed").mkdir()
    monkeypatch.chdir(tmp_path / "removed")
    (tmp_path / "removed").rmdir()
    assert cli.main(["resume", str(moved)]) == 4
    assert "the working directory does not exist" in capsys.readouterr().err


def test_a_launch_whose_directory_is_gone_is_not_resumed_elsewhere(moved, capsys, tmp_path):
    (tmp_path / "work").rename(tmp_path / "gone")
    code, *_, said = resume_elsewhere(moved, capsys)
    assert code == 4
    assert f"was started in {str(tmp_path / 'work')!r}, which is not a directory" in said
    assert said.endswith("restore it, or cd to it, and resume again")


def test_a_launch_that_was_resumed_is_not_resumed_again_from_another_directory(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    old = ended(tmp_path / "a")
    assert launches.STAMP.fullmatch(old.name)
    own = launches.root_of(old / "0-sanity")
    continued(own, old / "0-sanity", "one", 1.6e9)
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "b")
    assert cli.main(["resume", str(old)]) == 4
    assert "is already continued by one" in capsys.readouterr().err.replace("\n", " ")
    cli.main(["status", str(old)])
    assert "to resume, run" not in capsys.readouterr().out
    with pytest.raises(RefusedError, match="is already continued by one, which"):
        rest_of_launch.check_still_ended(LaunchOptions(resume=old))


@pytest.mark.parametrize(("root", "folder"), [([], "a/artifacts"), (["--root", "own"], "b/own")])
def test_a_resume_from_another_directory_starts_below_the_root_of_the_old_launch(
    tmp_path, monkeypatch, capsys, root, folder
):
    """So the next resume of the old launch finds the new launch, wherever it is typed."""
    monkeypatch.chdir(tmp_path)
    old = ended(tmp_path / "a")
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "b")
    cli.main([*root, "resume", str(old), "--dry-run", "--json"])
    new = Path(json.loads(capsys.readouterr().out)["directory"])
    assert new.parent == tmp_path / folder / "cpu_smoke"


@pytest.mark.parametrize("name", ["mine", "20261128-070929"])
def test_the_root_of_a_launch_with_its_own_directory_is_in_its_working_directory(tmp_path, name):
    old = ended(tmp_path)
    own = old.rename(tmp_path / name)
    directory.change(own / rundir.PLAN, cwd=str(tmp_path / "work"))
    root = tmp_path / "work" / "artifacts"
    assert launches.root_of(own / "0-sanity") == root
    assert launches.root_to_resume(own, launches.ROOT) == root
    assert launches.root_to_resume(own, tmp_path) == tmp_path


def test_launches_in_the_directory_of_an_earlier_launch_of_the_plan_are_found(tmp_path, capsys):
    """With `--run-dir ROOT/PLAN`, each later launch of the plan is in the directory of that one."""
    made = ended(tmp_path)
    root = made.parents[1]
    made.rename(tmp_path / "made")
    made.parent.rmdir()
    old = (tmp_path / "made").rename(root / "cpu_smoke")
    directory.change(old / rundir.PLAN, created_ts=1.6e9)
    new = continued(root, old / "0-sanity", "20261128-185230", 1.7e9)
    assert launches.launches(root) == [new, old]
    assert launches.find("latest", root) == new
    assert cli.main(["--root", str(root), "resume", str(old)]) == 4
    assert "is already continued by 20261128-185230" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize("link", [True, False])
def test_a_launch_that_was_resumed_is_not_resumed_again_after_the_root_was_moved(
    tmp_path, capsys, link
):
    """Without a link, the id and the last two names in the path identify the old launch."""
    old, big = ended(tmp_path), tmp_path / "big"
    root = old.parents[1]
    continued(root, old / "0-sanity", "one", 1.7e9)
    directory.change(root / "cpu_smoke" / "one" / rundir.PLAN,
                     continues={"\0": 5, str(old): launches.launch_id(old)})  # fmt: skip
    root.rename(big)
    if link:
        root.symlink_to(big)
    new_path = old if link else big / "cpu_smoke" / old.name
    assert rest_of_launch.continued_words(new_path, big, False).endswith("continued by one")
    if link:
        assert cli.main(["--root", str(root), "resume", str(old)]) == 4
        assert "is already continued by one" in capsys.readouterr().err.replace("\n", " ")


def test_a_launch_is_continued_by_the_last_of_a_chain_whose_middle_was_removed(tmp_path):
    old = ended(tmp_path)
    root, middle = old.parents[1], ended(tmp_path / "other")
    ids = [launches.launch_id(each) for each in (old, middle)]
    directory.change(middle / rundir.PLAN, continues={str(old): ids[0]})
    options = LaunchOptions(resume=middle, root=root)
    found = rest_of_launch.continues(options, [])
    assert found == {str(middle): ids[1], str(old): ids[0]}
    last = continued(root, middle / "0-sanity", "last", 1.7e9)
    directory.change(last / rundir.PLAN, continues=found)
    shutil.rmtree(middle)
    assert rest_of_launch.continuation(old, root) == last


def test_the_status_of_an_ended_launch_names_no_command_that_is_always_rejected(tmp_path, capsys):
    old = ended(tmp_path)
    moved = old.rename(old.with_name("good-run"))
    assert cli.main(["resume", str(moved)]) == 4
    capsys.readouterr()
    cli.main(["status", str(moved)])
    found = capsys.readouterr().out
    assert "to resume, run" not in found
    assert f"  it cannot continue from here: {moved} is a copy or was moved: its records" in found
    old.symlink_to(moved)
    cli.main(["status", str(old)])
    assert f"to resume, run: nsa-console resume {moved}\n" in capsys.readouterr().out
