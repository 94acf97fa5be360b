"""Directories in a launch that are copies of a run or were renamed: readers and actions."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from console import actions, cli
from console.sources import launches
from console.sources.run import RunSource
from console.status_text import exit_code, is_over
from tests.console.sources import directory
from tests.console.sources.directory import DEAD
from tests.console.test_targets import made, said
from trainers.contract import environ, rundir
from trainers.contract.errors import RefusedError


def in_second(path: Path) -> Path:
    """Makes phase 1 of a launch the phase that runs; phase 0 is completed."""
    directory.change(path / "0-first" / rundir.SUPERVISOR, state="completed", why="all done")
    directory.run(path / "1-second")
    directory.change(path / rundir.PLAN_STATE, phase=1)
    for index, state in enumerate(("completed", "running")):
        directory.change_at(path / rundir.PLAN_STATE, "phases", index, "state", to=state)
    return path


COPIES = {
    "of the phase that runs": ("1-second", "1-second.bak", {}),
    "of an earlier phase": ("0-first", "0-first.bak", {}),
    "with the name of no phase": ("1-second", "7-other", {}),
    "with the token of another run": ("1-second", "1-second.bak", {environ.TOKEN: "b" * 32}),
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_of_a_run_in_its_launch_changes_nothing(tmp_path, monkeypatch, name):
    of, to, changed = COPIES[name]
    path = in_second(made(tmp_path / "r1"))
    with directory.owned(path):
        before = RunSource(path).poll()
        copy = Path(shutil.copytree(path / of, path / to))
        for key, value in changed.items():
            directory.change_at(copy / rundir.RUN, "environment", key, to=value)
        state = RunSource(path).poll()
        assert (state.path, state.state, is_over(state)) == (before.path, "running", False)
        assert (exit_code(state, whole=True), state.launch) == (0, before.launch)
        with pytest.raises(RefusedError, match=rf"{copy} is a .* name {path / of}; give that dir"):
            actions.send(copy, "halt", {}, "tester")
        for target in (path, path / "1-second"):
            assert actions.send(target, "halt", {}, "tester"), "a request was written"
        assert launches.find("r1/1", tmp_path, act=True) == path / "1-second"
        monkeypatch.chdir(tmp_path)
        assert RunSource(Path("r1")).poll().state == "running"
        (path / rundir.PLAN).write_text("garbage")
        state = RunSource(path).poll()
        assert (state.path, state.state) == (before.path, "running")
    assert not list(path.glob(f"*/{rundir.HALT}"))


@pytest.mark.parametrize("forged", ["copy", "original"])
def test_a_forged_directory_in_a_copy_or_its_original_never_makes_the_copy_the_run(
    tmp_path, forged
):
    path = made(tmp_path / "r1")
    directory.run(path / "0-first", **DEAD, workers=[{"rank": 0, **rundir.identity()}])
    directory.told(path, "", **DEAD)
    copy = Path(shutil.copytree(path / "0-first", path / "0-first.bak"))
    for each in (copy, path / "0-first")[: 1 + (forged == "original")]:
        directory.change_at(each / rundir.RUN, "environment", environ.RUN_DIR, to=str(copy))
    state = RunSource(path).poll()
    assert (state.path, state.launch.state) == (str(path / "0-first"), "unsupervised")
    if forged == "copy":
        assert actions.send(path, "halt", {}, "tester") == "", "the halt is written directly"
        assert [each.parent for each in path.glob(f"*/{rundir.HALT}")] == [path / "0-first"]
        return
    with pytest.raises(RefusedError, match="move it back to act on it"):
        actions.send(path, "halt", {}, "tester")


@pytest.mark.parametrize("words", ["halt {}", "stop {}", "adopt {}", "watchdog {} --halt"])
def test_a_run_renamed_in_its_launch_is_to_be_moved_back(tmp_path, capsys, words):
    path = made(tmp_path / "r1")
    copy = (path / "0-first").rename(path / "0-first.bak")
    for target in (path, copy):
        code, err = said(capsys, *words.format(target).split())
        text = f"{copy} is a copy or was moved: its records name {path / '0-first'}; move it back"
        assert (code, text in err) == (4, True), err


def test_the_name_of_a_moved_run_sends_no_escape_sequence_to_the_terminal(tmp_path, capsys):
    directory.run(tmp_path / "a").rename(tmp_path / "b\x1b[31m\x07")
    assert cli.main(["--root", str(tmp_path), "runs"]) == 0
    out = capsys.readouterr().out
    assert f"{tmp_path / 'b�'} is a copy or was moved" in out
    assert "\x1b" not in out
