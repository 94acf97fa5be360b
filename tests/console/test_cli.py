"""The command line: output, exit codes, and hostile text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from console import status_text
from console.commands.output import Changes
from console.model import LaunchState, PhaseState
from console.sources import process
from console.sources.run import RunSource
from tests.console.sources import directory
from tests.faults.scene import console as nsa_console
from tests.launches import HANG_GUARD_S
from trainers.contract import rundir

ROOT = Path(__file__).parents[2]


def cli(root: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "console", "--root", str(root), *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=150,
        stdin=subprocess.DEVNULL,
        env={"PATH": os.environ["PATH"], "HOME": str(root), "LANG": "C.UTF-8", **variables},
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = tmp_path_factory.mktemp("artifacts")
    launch = directory.launch(path)
    run = directory.run(launch / "0-first")
    directory.beat(run, 0, 3, loss=2.5)
    return path


def test_json_is_data_for_errors_too(root):
    done = cli(root, "status", "nope", "--json")
    assert json.loads(done.stdout)["exit_code"] == done.returncode == 3


def test_status_speaks_in_words_and_in_data(root):
    words = cli(root, "status", "latest")
    assert "RUNNING" in words.stdout
    assert "step 3 of 100" in words.stdout
    data = json.loads(cli(root, "status", "latest", "--json").stdout)
    assert (data["state"], data["step"], data["exit_code"]) == ("running", 3, 0)
    assert data["figures"]["loss"] == {
        "value": 2.5, "unit": "nats/token", "window": "step 3",
        "at": data["figures"]["loss"]["at"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("state", "code"),
    [("running", 0), ("completed", 0), ("halted", 4), ("stopped", 4), ("crashed", 5), ("lost", 5)],
)
def test_the_exit_code_says_how_the_run_is(tmp_path, state, code):
    run = directory.run(tmp_path / "0-x", state=state)
    assert status_text.exit_code(RunSource(run).poll()) == code


INTERRUPTED_IMPORT = """
import os, signal, sys
class Finder:
    def find_spec(self, name, *_):
        if name == "console.action_table":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from {} import {} as main
sys.exit(main())
"""


def test_ctrl_c_during_the_imports_is_one_sentence():
    """The imports take seconds on a slow file system."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    program = INTERRUPTED_IMPORT.format(*project["scripts"]["nsa-console"].split(":"))
    words = [sys.executable, "-c", program, "runs"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert done.stderr == "nsa-console: ended by ctrl+c; runs continue\n"
    assert done.returncode == 130


def test_the_next_command_starts_the_program_that_was_called(tmp_path, monkeypatch):
    called = tmp_path / "bin" / "nsa-console"
    called.parent.mkdir()
    called.touch(0o755)
    monkeypatch.setattr(sys, "argv", [str(called)])
    monkeypatch.setenv("PATH", "/usr/bin")
    assert process.program() == str(called)
    monkeypatch.setenv("PATH", str(called.parent))
    assert process.program() == "nsa-console"
    for module in ("console", "console/supervisor"):
        monkeypatch.setattr(sys, "argv", [str(ROOT / module / "__main__.py")])
        monkeypatch.setenv("PATH", str(called.parent))
        monkeypatch.setattr(sys, "executable", str(called.with_name("python")))
        assert process.program() == "nsa-console"
        monkeypatch.setenv("PATH", "/usr/bin")
        assert process.program() == str(called)
        monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
        assert process.program() == "/usr/bin/python3 -m console"


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["cpu_smoke"], "-m trainers.ddp --config /"),
        (
            ["--config", "configs/tiny_cpu.yaml"],
            f"trainers.ddp --config {ROOT}/configs/tiny_cpu.yaml",
        ),
        (["--config", "configs/tiny_cpu.yaml", "--trainer", "fsdp"], "-m trainers.fsdp --config"),
    ],
)
def test_dry_run_prints_the_command_and_writes_nothing(root, words, command):
    before = sorted(root.rglob("*"))
    done = cli(root, "launch", *words, "--dry-run", "--flag", "NSA_LR=0.5")
    assert done.returncode == 0
    assert "-m torch.distributed.run" in done.stdout
    assert command.rstrip("/") in done.stdout
    assert "NSA_LR=0.5" in done.stdout
    assert sorted(root.rglob("*")) == before


def test_hostile_text_reaches_the_terminal_as_plain_text(tmp_path):
    run = directory.run(
        tmp_path / "toy/20261121-010101", state="crashed", why="\x1b]52;c;eA==\x07\x1b[2Jx"
    )
    directory.document(tmp_path / "toy/20261121-010101" / rundir.PLAN, {"launch": "\x1b[2Jtoy"})
    directory.event(run, "alert", alert="a", level="crit", text="\x1b[31mred\u202e")
    for words in (["status", str(run)], ["status", "nope"], ["logs", "toy/\x1b[2Jx"]):
        done = cli(tmp_path, *words)
        assert "\x1b" not in done.stdout + done.stderr
        assert "\u202e" not in done.stdout


def test_watch_says_one_sentence_a_change(tmp_path):
    changes, launch = Changes(), directory.launch(tmp_path)
    run = directory.run(launch / "0-first")
    source, said = RunSource(launch), []
    for second in range(4):
        if second == 2:
            directory.event(run, "alert", alert="s", level="crit", text="rank 1 is stopped")
        said += changes.sentences(source.poll(), float(second))
    assert any("is running" in line for line in said)
    assert [line for line in said if "rank 1 is stopped" in line] == ["CRIT: rank 1 is stopped."]


def test_watch_gives_the_reason_of_an_end_once(tmp_path):
    changes, launch = Changes(), directory.launch(tmp_path)
    why = "rank 1 was killed"
    run = directory.run(launch / "0-first", state="crashed", why=why)
    directory.event(run, "alert", alert="rank-gone", level="crit", text=why)
    phases = [{"name": "first", "state": "crashed", "result": "unknown", "dir": "0-first"},
              {"name": "second", "state": "later", "dir": "1-second"}]  # fmt: skip
    ended = {"state": "ended", "phase": 0, "why": f"first: crashed: {why}", "phases": phases}
    directory.change(launch / rundir.PLAN_STATE, **ended)
    said = list(changes.sentences(RunSource(launch).poll(), 0.0))
    assert [line for line in said if why in line] == [f"toy/0-first is crashed: {why}."]
    assert said[-1].endswith(" is ended: not started: second.")


def launch_state(*phases: tuple[str, str], state: str = "ended", ended_by: str = "") -> LaunchState:
    """Returns a launch; each of `phases` has the state and the result of a phase."""
    shown = tuple(
        PhaseState(i, f"p{i}", "", phase, "", result, 1, 1, None, None, f"{i}-p")
        for i, (phase, result) in enumerate(phases)
    )
    return LaunchState("x", "/x", "x", state, "", 0, shown, "go", ended_by=ended_by)


@pytest.mark.parametrize(
    ("phases", "state", "code"),
    [
        ([("completed", "pass"), ("completed", "pass")], "ended", 0),
        ([("completed", "pass"), ("later", "")], "ended", 1),
        ([("completed", "unknown"), ("later", "")], "ended", 1),
        ([("completed", "fail"), ("later", "")], "ended", 1),
        ([("completed", "pass"), ("crashed", "fail")], "ended", 5),
        ([("completed", "pass"), ("next", "")], "unsupervised", 5),
        ([("running", "")], "unsupervised", 5),
    ],
)
def test_the_exit_code_of_a_launch_is_0_only_when_all_its_phases_passed(phases, state, code):
    assert status_text.launch_exit_code(launch_state(*phases, state=state)) == code
    halted = launch_state(*phases, state=state, ended_by="halt requested by x")
    left = phases[-1] == ("later", "") and phases[0][1] == "pass"
    assert status_text.launch_exit_code(halted) == (4 if left else code)


def test_followed_logs_go_on_with_the_next_phase(tmp_path):
    launch = directory.launch(tmp_path)
    for name in ("0-first", "1-second"):
        log = rundir.rank_log(directory.run(launch / name), 1, 0)
        log.parent.mkdir(parents=True)
        log.write_text(f"words of {name}\nlast words of {name}")
    process = subprocess.Popen(
        [sys.executable, "-m", "console", "logs", str(launch), "-f"],
        stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    try:
        assert process.stdout.readline().strip() == "r0       words of 0-first"
        directory.run(launch / "1-second", state="completed")
        directory.change(launch / rundir.PLAN_STATE, phase=1, state="ended")
        told = process.communicate(timeout=HANG_GUARD_S)[0]
        last = "r0       words of 1-second\nr0       last words of 1-second\n"
        assert told == f"r0       last words of 0-first\n{last}"
        assert process.returncode == 0
        assert nsa_console("logs", launch) == (0, last, "")
    finally:
        process.kill()


def test_followed_logs_print_an_event_once_although_a_restart_follows(tmp_path):
    run = directory.run(directory.launch(tmp_path) / "0-first")
    directory.event(run, "alert", text="the first event")
    process = subprocess.Popen(
        [sys.executable, "-m", "console", "logs", str(run), "-f"],
        stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    try:
        assert "the first event" in process.stdout.readline()
        log = rundir.rank_log(run, 2, 0)
        log.parent.mkdir(parents=True)
        log.write_text("words of attempt 2\n")
        directory.event(run, "attempt", text="attempt 2 begins")
        directory.change(run / rundir.SUPERVISOR, attempt=2, state="completed")
        told = process.communicate(timeout=HANG_GUARD_S)[0]
        assert told.count("words of attempt 2") == told.count("attempt 2 begins") == 1, told
        assert "the first event" not in told
    finally:
        process.kill()
