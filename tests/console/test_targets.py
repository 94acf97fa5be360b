"""The run and the supervisor of an action: two sources must agree, or the action is rejected."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from console import actions, cli, rest_of_launch
from console.sources import launches
from console.sources.run import RunSource
from console.tui import feed
from console.tui.widgets import chooser
from tests.console.sources import directory
from tests.console.test_actions import listing
from tests.launches import STUB, phase
from trainers.contract import environ, rundir
from trainers.contract.errors import RefusedError

ROOT = Path(__file__).parents[2]
NOW, DEAD = time.time(), directory.DEAD


def made(path: Path, name: str = "", created: object = None, written: float | None = None) -> Path:
    """Writes a launch whose supervisor is alive, with one run, at `path`."""
    made_at = directory.launch(path.parent / f".{path.name}").rename(path)
    shutil.rmtree(path.parent / f".{path.name}")
    told = {} if created is None else {"created_ts": created}
    directory.change(path / rundir.PLAN, launch=name or path.name, **told)
    if written is not None:
        os.utime(path / rundir.PLAN, (written, written))
    directory.run(path / "0-first")
    return made_at


def said(capsys, *words: object) -> tuple[int, str]:
    """Returns exit code and standard error of a command."""
    code = cli.main([str(word) for word in words])
    return code, capsys.readouterr().err


# --- target-id --------------------------------------------------------------------------------


@pytest.mark.decision("target-id", "true")
def test_an_id_whose_run_records_its_directory_is_that_launch(tmp_path, capsys):
    path = made(tmp_path / "r1")
    for name in ("r1", "r", "r1/first"):
        assert launches.find(name, tmp_path, act=True) in (path, path / "0-first")
    with directory.owned(path):
        code, err = said(capsys, "--root", tmp_path, "do", "r1", "note", "text=x", "--timeout=3")
    assert (code, len(list((path / rundir.REQUESTS).iterdir()))) == (5, 1), err


@pytest.mark.decision("target-id", "lie")
@pytest.mark.parametrize(
    "words", ["halt {}", "stop {}", "adopt {}", "dump {}", "do {} note text=x"]
)
def test_one_id_of_two_launches_is_refused_with_both(tmp_path, capsys, words):
    first, second = made(tmp_path / "a" / "exp"), made(tmp_path / "b" / "exp")
    before = listing(tmp_path)
    code, err = said(capsys, "--root", tmp_path, *words.format("exp").split())
    assert (code, str(first) in err, str(second) in err) == (2, True, True), err
    assert listing(tmp_path) == before


@pytest.mark.decision("target-id", "lie")
@pytest.mark.parametrize("how", ["copied", "moved"])
@pytest.mark.parametrize("words", ["halt {}", "stop {}", "adopt {}", "watchdog {} --halt"])
def test_a_directory_that_is_a_copy_or_was_moved_is_only_looked_at(tmp_path, capsys, how, words):
    path = made(tmp_path / "real")
    directory.run(path / "0-first", **directory.DEAD)
    other = tmp_path / "other"
    shutil.copytree(path, other) if how == "copied" else path.rename(other)
    for target in (other, other / "0-first"):
        code, err = said(capsys, *words.format(target).split())
        assert (code, f"is a copy or was moved: its records name {path}; " in err) == (
            4, True,
        ), err  # fmt: skip
    assert ("give that directory" in err) == (how == "copied")
    assert not (other / "0-first" / rundir.HALT).exists()
    assert RunSource(other).poll().id == "toy/0-first"


@pytest.mark.parametrize("how", ["copied", "moved"])
def test_no_reader_believes_the_processes_of_a_copy_or_of_a_moved_directory(tmp_path, capsys, how):
    path, there = made(tmp_path / "a" / "real"), tmp_path / "b" / "other"
    assert (cli.main(["status", str(path)]), feed.find_live([path])) == (0, path)
    there.parent.mkdir()
    shutil.copytree(path, there) if how == "copied" else path.rename(there)
    capsys.readouterr()
    text = f"{there} is a copy or was moved: its records name {path}"
    readers = ("status", "check", "diagnose", "watch --plain", "watchdog")
    for words in (*(f"{name} {there}" for name in readers), f"status {there / '0-first'}"):
        assert (cli.main(words.split()), text in capsys.readouterr().out) == (5, True), words
    assert cli.main(["diagnose", str(there)]) == 5
    assert "no verdict is recorded" in capsys.readouterr().out
    assert cli.main(["--root", str(there.parent), "runs", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)[0]
    assert (row["state"], row["launch"], text in row["why"]) == ("lost", "unsupervised", True)
    state = RunSource(there).poll()
    assert [(alert.text, alert.key) for alert in state.alerts] == [(state.why, "")]
    assert feed.find_live([there]) is None
    assert next(entry.text for entry in chooser.entries(there.parent)[0]) == "unsupervised"
    directory.change(there / "0-first" / rundir.SUPERVISOR, state="completed", why="all done")
    assert RunSource(there / "0-first").poll().state == "completed", "a recorded end is believed"


def test_a_directory_of_another_host_is_a_copy_only_if_the_original_is_here(tmp_path):
    path, other = made(tmp_path / "real"), tmp_path / "other"
    record = json.loads((path / "0-first" / rundir.RUN).read_text())
    record["environment"][environ.TOKEN] = "a" * 32
    directory.document(path / "0-first" / rundir.RUN, record | {"host": "elsewhere"})
    shutil.copytree(path, other)
    assert "is a copy or was moved" in launches.why_not_in_place(other / "0-first")
    directory.change(path / "0-first" / rundir.RUN, environment={environ.TOKEN: "b" * 32})
    assert launches.why_not_in_place(other / "0-first") == "", "another run has this path here"
    shutil.rmtree(path)
    assert launches.why_not_in_place(other / "0-first") == "", "the path means nothing here"


@pytest.mark.decision("target-id", "absent")
def test_a_run_without_a_recorded_directory_needs_a_directory_as_name(tmp_path):
    path = made(tmp_path / "r1")
    directory.change(path / "0-first" / rundir.RUN, environment={})
    assert launches.find("r1", tmp_path) == path
    with pytest.raises(RefusedError, match="give the directory"):
        launches.find("r1", tmp_path, act=True)
    assert launches.find(str(path), tmp_path, act=True) == path


def test_a_run_seen_through_a_link_above_it_is_in_its_place(tmp_path):
    path = made(tmp_path / "real" / "r1")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    launches.check_in_place(tmp_path / "link" / "r1")
    assert launches.find("r1", tmp_path, act=True) == path, "the two paths are one launch"


def test_a_directory_here_comes_before_an_id_and_a_folder_that_is_no_run_is_no_name(
    tmp_path, monkeypatch
):
    here, there = made(tmp_path / "here" / "exp"), made(tmp_path / "root" / "exp")
    monkeypatch.chdir(here.parent)
    assert launches.find("exp", there.parent, act=True) == Path("exp")
    (tmp_path / "here" / "other").mkdir()
    second = made(tmp_path / "root" / "other", created=time.time() + 60)
    assert launches.find("other", there.parent) == second
    Path("latest").symlink_to(here)
    assert launches.find("latest", there.parent) == second
    assert launches.find("./latest", there.parent) == Path("latest")


# --- target-latest ----------------------------------------------------------------------------


@pytest.mark.decision("target-latest", "true")
def test_the_latest_is_the_newest_by_creation_whatever_its_name(tmp_path, capsys):
    old = made(tmp_path / "z" / "20991231-000000", "old", NOW - 9, NOW - 9)
    new = made(tmp_path / "a", "new", NOW - 5, NOW - 5)
    assert launches.launches(tmp_path) == [new, old]
    for act in (False, True):
        assert launches.find("latest", tmp_path, act) == new
    assert cli.main(["--root", str(tmp_path), "runs", "--json"]) == 0
    assert [row["id"] for row in json.loads(capsys.readouterr().out)] == ["new", "old"]


def test_a_copy_of_a_launch_beside_it_changes_no_id_and_no_latest(tmp_path):
    path = made(tmp_path / "toy" / "20261121-060500", "toy-20261121-060500", NOW - 9)
    copy = Path(shutil.copytree(path, path.with_name(f"{path.name}.bak")))
    for name in ("latest", "toy-20261121-060500", "toy", "toy-20261121-060500/0"):
        for act in (False, True):
            assert path in (found := launches.find(name, tmp_path, act), found.parent)
    assert set(launches.launches(tmp_path)) == {path, copy}, "it is listed"
    shutil.rmtree(path)
    assert launches.find("latest", tmp_path) == copy


def test_a_launch_that_was_moved_out_of_the_root_is_found_by_the_link_to_it(tmp_path):
    """A link to a launch that is in the root too adds nothing, whatever its name."""
    root, away = tmp_path / "root", tmp_path / "away"
    old = made(root / "toy" / "20261121-060500", "toy-20261121-060500", NOW - 9)
    new = made(root / "toy" / "20261121-060600", "toy-20261121-060600", NOW - 5)
    by_hand = directory.run(root / "toy" / "mine")
    directory.change(new / rundir.PLAN, continues={str(old): launches.launch_id(old)})
    (old.parent / "1st").symlink_to(old)
    (root / "current").symlink_to(directory.run(old / "0-first"))
    for path in (new, by_hand):
        away.mkdir(exist_ok=True)
        path.rename(away / path.name)
        path.symlink_to(away / path.name)
    assert launches.launches(root) == [new, old]
    assert launches.bare_runs(root) == [by_hand]
    assert {launches.find(name, root) for name in ("latest", "toy-20261121-060600")} == {new}
    assert rest_of_launch.continuation(old, root) == new


@pytest.mark.decision("target-latest", "lie")
@pytest.mark.parametrize(
    ("created", "written"),
    [((5, 9), (9, 5)), ((5, 5), (5, 5)), ((5, 5), (9, 5))],
    ids=["they disagree", "a copy that kept its times", "a copy"],
)
def test_an_uncertain_latest_is_refused_with_both(tmp_path, capsys, created, written):
    pair = [
        made(tmp_path / name, name, NOW - back, NOW - file_back)
        for name, back, file_back in zip("ab", created, written, strict=True)
    ]
    assert launches.find("latest", tmp_path) == pair[created[1] <= created[0]]
    before = listing(tmp_path)
    for words in ("halt latest", "stop latest", "dump latest", "adopt latest", "do latest halt"):
        code, err = said(capsys, "--root", tmp_path, *words.split())
        assert (code, *(str(path) in err for path in pair)) == (4, True, True), err
    assert listing(tmp_path) == before


@pytest.mark.decision("target-latest", "absent")
@pytest.mark.parametrize(
    "created", [None, "x", "nan", 1e300, -5.0, 7.0, pytest.param(NOW + 1e6, id="later")]
)
def test_without_a_valid_creation_time_the_stamp_counts_and_an_action_is_refused(tmp_path, created):
    old = made(tmp_path / "20200101-000000", "old", created, NOW - 5)
    new = made(tmp_path / "20200102-000000", "new", None, NOW - 9)
    assert launches.find("latest", tmp_path) == new
    with pytest.raises(
        RefusedError, match=rf"{new} has the latest creation time.*{old} has a newer"
    ):
        launches.find("latest", tmp_path, act=True)


# --- target-supervisor ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def launched(begin):
    """A real launch of one rank under the small torchrun."""
    started = begin(phase("one", "member.py", 100000), shell=STUB, nproc=1)
    started.wait_steps(1)
    return started


@pytest.mark.decision("target-supervisor", "true")
def test_a_supervisor_that_holds_the_lock_with_its_token_takes_the_request(launched):
    for path in (launched.path, launched.run()):
        assert launched.ask("note", path, text=f"to {path.name}")["ok"]


@pytest.mark.decision("target-supervisor", "lie")
@pytest.mark.parametrize("action", ["halt", "stop", "dump", "note"])
def test_documents_of_a_living_supervisor_in_a_copy_are_refused(launched, tmp_path, action):
    """The copy is also refused if its records are changed to name its own directory."""
    with launched.stopped():  # so that no file is replaced during the copy
        copy = Path(shutil.copytree(launched.path, tmp_path / "copy"))
    args = {"text": "x"} if action == "note" else {}
    with pytest.raises(RefusedError, match=f"its records name {launched.path}; give that"):
        actions.send(copy, action, args, "tester")
    born = copy / launched.run().name / rundir.RUN
    directory.change_at(born, "environment", environ.RUN_DIR, to=str(born.parent))
    with pytest.raises(RefusedError, match=r"the lock in it is not held, so it is a copy"):
        actions.send(copy, action, args, "tester")
    assert not list(copy.glob(f"*/{rundir.REQUESTS}/*"))
    assert not list(copy.glob(f"**/{rundir.HALT}"))


@pytest.mark.decision("target-supervisor", "lie")
def test_a_lock_of_another_owner_is_not_the_supervisors(tmp_path):
    path = made(tmp_path / "r1")
    with directory.owned(path):
        for token in ("0123456789abcdef", ""):
            directory.told(path, token)
            for target in (path, path / "0-first"):
                with pytest.raises(
                    RefusedError, match="the lock in it is that of another supervisor"
                ):
                    actions.send(target, "halt", {}, "tester")
    assert not (path / rundir.REQUESTS).exists()


@pytest.mark.decision("target-supervisor", "absent")
@pytest.mark.parametrize("words", ["dump {}", "stop {}", "do {} note text=x"])
def test_a_request_to_an_unsupervised_run_is_refused_with_advice(tmp_path, capsys, words):
    path = made(tmp_path / "r1")
    mine = rundir.identity()
    directory.run(path / "0-first", workers=[{"rank": 0, **mine, "exit": None}], **directory.DEAD)
    directory.told(path, "", **directory.DEAD)
    document = path / "0-first" / rundir.SUPERVISOR
    for target in (path, document.parent, path):
        code, err = said(capsys, *words.format(target).split())
        assert (code, "has ended" in err, "is over" in err) == (4, False, False)
        assert f"nsa-console adopt {path} starts a new supervisor" in err
        document.unlink(missing_ok=True)  # a run has no such document while it starts


def test_the_answer_to_a_halt_of_a_lost_run_names_no_living_ranks(tmp_path, capsys):
    path = made(tmp_path / "r1")
    directory.run(path / "0-first", workers=[{"rank": 0, "exit": None} | DEAD], **DEAD)
    directory.told(path, "", **DEAD)
    assert RunSource(path).poll().state == "lost"
    assert cli.main(["halt", str(path)]) == 0
    out = capsys.readouterr().out
    assert ".HALT is written without a request; ranks that are alive halt" in out
    assert (path / "0-first" / rundir.HALT).exists()


# --- documents that cannot be read, and paths in them -----------------------------------------


@pytest.mark.parametrize("kind", ["directory", "fifo", "garbage"])
@pytest.mark.parametrize("words", ["halt {}", "stop {}", "dump {}", "do {} note text=x"])
def test_an_unreadable_document_is_named_and_the_action_refused(tmp_path, capsys, kind, words):
    path = made(tmp_path / "r1")
    for broken, targets in (
        (path / "0-first" / rundir.SUPERVISOR, [path / "0-first"]),
        (path / rundir.PLAN_STATE, [path]),
    ):
        broken.unlink()
        if kind == "directory":
            broken.mkdir()
        elif kind == "fifo":
            os.mkfifo(broken)
        else:
            broken.write_text("garbage")
        for target in targets:
            code, err = said(capsys, *words.format(target).split())
            assert (code, f"{broken} cannot be read as a JSON document" in err) == (4, True), err
            assert "adopt" not in err
            assert "over" not in err
    code, err = said(capsys, "adopt", path)
    assert code == 4
    assert "cannot be read as a JSON document, so the launch is not adopted" in err
    assert not (path / "0-first" / rundir.HALT).exists()
    assert cli.main(["status", str(path)]) == 1
    assert f"{rundir.PLAN_STATE} cannot be read as a JSON object" in capsys.readouterr().out


@pytest.mark.parametrize("named", ["..", ".", "../0-first", "0-first/..", "/etc", "0-", "\0", "-1"])
def test_a_phase_directory_that_is_none_is_not_followed(tmp_path, capsys, named):
    path = made(tmp_path / "plan" / "r1")
    directory.run(path.parent)
    directory.beat(path.parent, 0, 7)
    for name in (rundir.PLAN_STATE, rundir.PLAN):
        directory.change_at(path / name, "phases", 0, "dir", to=named)
    seen = RunSource(path).poll()
    assert (seen.path, seen.step) == (str(path / "0-first"), None), "the live run is shown"
    assert seen.launch.why == "the directory of phase 0 is not named <n>-<phase>"
    before = listing(tmp_path)
    for words in (("dump", path), ("halt", path), ("logs", path)):
        code, err = said(capsys, *words)
        assert (code, "Traceback" in err) == (0 if words[0] == "logs" else 4, False), err
    assert listing(tmp_path) == before


@pytest.mark.parametrize("umask", ["777", "0", "077"])
def test_a_launch_works_and_is_closed_to_others_under_any_umask(begin, tmp_path, umask):
    """Root loses the right to ignore file modes, so that it is like any other user."""
    anybody = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    plan = begin.options(phase("one", "member.py", 3), nproc=1).plan
    path = tmp_path / "deep" / "launch"
    done = subprocess.run(
        [*(anybody if os.geteuid() == 0 else ()), "sh", "-c", f'umask {umask}; exec "$@"', "sh",
         sys.executable, "-m", "console", "launch", plan, "--run-dir", str(path), "--wait"],
        cwd=ROOT, capture_output=True, text=True, timeout=150, env={**os.environ, **STUB},
    )  # fmt: skip
    started = begin.adopt(path)
    assert done.returncode == 0, done.stdout + done.stderr
    started.wait_over()  # or else a temporary file may disappear before its mode is read
    modes = {(each.is_dir(), each.stat().st_mode & 0o777) for each in tmp_path.rglob("*")}
    assert modes == {(True, 0o700), (False, 0o600)}
