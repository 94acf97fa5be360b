"""Launches with which another user could interfere are rejected or protected."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from console import actions
from console.actions import LaunchOptions
from console.supervisor.launcher import Claim
from tests.console.sources import directory
from tests.console.test_actions import MEMBER, ROOT, listing, options, plan
from tests.launches import STUB, Started
from trainers.contract import environ, rundir
from trainers.contract.errors import RefusedError, UsageError

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to somebody else")


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def claim(path: Path) -> None:
    taken = Claim(path)
    taken.take()
    taken.release()


# --- directories ------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [0o777, 0o770, 0o755])
def test_an_empty_directory_that_was_open_is_closed(tmp_path, before):
    for path, make in ((tmp_path / "launch", claim), (tmp_path / "run", rundir.make_directory)):
        path.mkdir()
        path.chmod(before)
        make(path)
        assert mode(path) == 0o700


def test_a_directory_that_is_refused_keeps_its_mode_and_content(tmp_path):
    (tmp_path / "home").mkdir(mode=0o755)
    (tmp_path / "home" / "thesis.txt").touch()
    with pytest.raises(RefusedError, match=r"not empty and contains no launch.*thesis.txt"):
        claim(tmp_path / "home")
    assert (mode(tmp_path / "home"), listing(tmp_path / "home")) == (0o755, ["thesis.txt"])


@pytest.mark.parametrize("name", ["link", "link/below"])
def test_a_link_as_a_launch_directory_is_refused_or_leads_where_it_says(tmp_path, name):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    if name == "link":
        with pytest.raises(RefusedError, match="is a link"):
            claim(tmp_path / name)
        assert listing(tmp_path / "real") == []
    else:
        claim(tmp_path / name)
        assert listing(tmp_path / "real") == ["below", "below/lock"]


@root_only
def test_a_directory_of_somebody_else_is_refused_for_launch_and_for_requests(tmp_path):
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 12345, 12345)
    with pytest.raises(RefusedError, match="belongs to user id 12345"):
        claim(tmp_path / "theirs")
    assert listing(tmp_path / "theirs") == []
    path = directory.launch(tmp_path)
    os.chown(path, 12345, 12345)
    with pytest.raises(RefusedError, match="belongs to user id 12345"):
        actions.send(path, "note", {"text": "x"}, "tester")
    assert rundir.REQUESTS not in listing(path)


def test_no_request_goes_where_everybody_may_write(tmp_path):
    path = directory.launch(tmp_path)
    path.chmod(0o777)
    with pytest.raises(RefusedError, match=r"every user can write into .*chmod go-w"):
        actions.send(path, "note", {"text": "x"}, "tester")
    path.chmod(0o700)
    (path / rundir.REQUESTS).mkdir()
    (path / rundir.REQUESTS).chmod(0o777)
    with directory.owned(path), pytest.raises(RefusedError, match="every user can write into"):
        actions.send(path, "note", {"text": "x"}, "tester")
    assert listing(path / rundir.REQUESTS) == []


def test_a_path_that_everybody_may_rename_is_refused_and_tmp_is_not(tmp_path):
    shared = tmp_path / "shared"
    (shared / "mine").mkdir(parents=True)
    shared.chmod(0o777)
    with pytest.raises(RefusedError, match=r"every user can rename files in .*shared"):
        claim(shared / "mine" / "launch")
    prepared = actions.prepare(options(tmp_path, run_dir=shared / "mine" / "launch"))
    assert any(c.name == "directory" and c.result == "fail" for c in prepared.checks)
    assert listing(shared) == ["mine"]
    shared.chmod(0o1777)
    claim(shared / "mine" / "launch")


def test_a_lock_that_is_another_file_too_is_not_written(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for name, make in (("hard", "hardlink_to"), ("symbolic", "symlink_to")):
        path = tmp_path / name
        path.mkdir()
        getattr(path / rundir.LOCK, make)(precious)
        with pytest.raises(RefusedError, match=r"hard link|cannot lock"):
            claim(path)
    (tmp_path / "fifo").mkdir()
    os.mkfifo(tmp_path / "fifo" / rundir.LOCK)
    with pytest.raises(RefusedError, match="it is a hard link, not a regular file"):
        claim(tmp_path / "fifo")
    assert precious.read_text() == "mine"


# --- programs, arguments and environment ------------------------------------------------------


@pytest.mark.parametrize(
    "env",
    [
        {"LD_PRELOAD": "/evil.so"},
        {"PYTHONPATH": "/evil"},
        {"PYTHONSAFEPATH": ""},
        {"PATH": "/evil"},
        {"NSA_CONSOLE_TOKEN": "x"},
        {"NSA_LR\nLD_PRELOAD": "1"},
        {"NCCL_ALGO": "Ring\nLD_PRELOAD=/evil.so"},
        {"NCCL_ALGO": "Ring\0"},
    ],
)
@pytest.mark.parametrize("where", ["env", "flags"])
def test_a_plan_sets_no_variable_but_a_flag_on_one_line(tmp_path, env, where):
    with pytest.raises(UsageError):
        actions.prepare(LaunchOptions(plan=plan(tmp_path, **{where: env}), root=tmp_path))


@pytest.mark.parametrize("key", ["script", "module"])
def test_a_program_that_looks_like_an_option_of_torchrun_is_refused(tmp_path, key):
    phases = [{"name": "one", key: "--rdzv-endpoint=evil:1"}]
    with pytest.raises(UsageError, match="cannot start with '-'"):
        actions.prepare(LaunchOptions(plan=plan(tmp_path, phases=phases), root=tmp_path))


def test_shell_metacharacters_in_args_are_one_argument_each(tmp_path):
    words = ["; touch pwned", "$(touch pwned)", "`id`", "a\nb", "&& x", "--max-restarts=9", "*"]
    phases = [{"name": "one", "script": str(MEMBER), "args": words}]
    prepared = actions.prepare(
        LaunchOptions(plan=plan(tmp_path, phases=phases, env={}), root=tmp_path)
    )
    (phase,) = prepared.phases
    assert phase["argv"][-len(words) - 1 :] == [str(MEMBER), *words]
    script = f"printf '%s\\0' {prepared.shell(0)}"
    read = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
    assert read.split("\0")[:-1] == phase["argv"]


def test_what_a_training_inherits_is_shown_before_the_start(tmp_path, monkeypatch):
    for name in ("SECRET_KEY", "NCCL_DEBUG", "LD_PRELOAD"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("HF_HOME", "/data/hf")
    prepared = actions.prepare(options(tmp_path))
    text, data = "\n".join(prepared.lines()), prepared.as_dict()
    assert "SECRET_KEY" not in text
    assert "    HF_HOME=/data/hf" in text
    assert set(data["inherited"]) <= set(data["may_inherit"]) == set(environ.INHERITED)
    for phase in data["phases"]:
        rest = set(phase["environment"]) - set(data["inherited"]) - set(phase["flags"])
        contract = {environ.RUN_DIR, environ.RUN_ID, environ.ATTEMPT}
        assert rest == {"PYTHONUNBUFFERED", *environ.DEVICE_ORDER} | contract


def test_modules_in_the_working_directory_are_not_taken_for_ours(tmp_path, monkeypatch):
    """The working directory of an operator may contain files of another user."""
    hostile = tmp_path / "unpacked"
    for package in ("console", "trainers", "torch"):
        (hostile / package).mkdir(parents=True)
        (hostile / package / "__init__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(hostile)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    phase = actions.prepare(LaunchOptions(plan="cpu_smoke", root=tmp_path)).phases[0]
    command = [sys.executable, "-m", "trainers.ddp", "--help"]
    subprocess.run(command, env=phase["environment"], timeout=300, check=True,
                   capture_output=True)  # fmt: skip
    assert not (tmp_path / "ran").exists()
    path = actions.launch(options(tmp_path), "tester")
    try:
        log = (path / rundir.SUPERVISOR_LOG).read_text()
    finally:
        Started(path).clean()
    assert "supervisor pid" in log
    assert str(ROOT) in phase["environment"]["PYTHONPATH"]


def planted(folder: Path) -> None:
    """Writes modules into a folder. An import of such a module creates the file `ran` there."""
    (folder / "console").mkdir()
    for name in ("argparse.py", "json.py", "console/__init__.py"):
        (folder / name).write_text(f"open({str(folder / 'ran')!r}, 'w')\nraise SystemExit(9)\n")


@pytest.mark.parametrize("start", ["-m console", "nsa-console", "torchrun"])
def test_a_command_imports_nothing_from_the_working_directory(tmp_path, monkeypatch, start):
    """With `-m console`, Python would import a planted `console`, so the test renames it."""
    planted(tmp_path)
    monkeypatch.setenv("PYTHONPATH", STUB["PYTHONPATH"])
    words = [str(Path(sys.executable).with_name("nsa-console")), "flags"]
    variables = dict(os.environ)
    if start == "-m console":
        (tmp_path / "console").rename(tmp_path / "elsewhere")
        words = [sys.executable, "-m", "console", "flags"]
    elif start == "torchrun":
        phase = actions.prepare(options(tmp_path)).phases[0]
        words, variables = [*phase["argv"][:4], "--help"], phase["environment"]
        assert words[-2] == "torch.distributed.run"
    done = subprocess.run(words, cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists()
