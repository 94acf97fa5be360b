"""The main task of a new user, in a real terminal of 80×24, on a real run."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from console import actions
from console.sources import launches
from console.sources.run import RunSource
from tests.launches import CONSOLE, HANG_GUARD_S, ROOT, Started, wait_for
from tests.terminal import Terminal
from tests.trainers.runs import heartbeats
from trainers import manifest
from trainers.contract import flags, rundir

PLAN = ROOT / "tests/e2e/main_job.yaml"
FLAG = "NSA_DISABLE_CSV_LOGS"


def console(root: Path) -> Terminal:
    return Terminal([*CONSOLE, "--root", str(root), "--plan", str(PLAN)], ROOT)


def workers(run: Path) -> list[dict]:
    record = rundir.read_json(run / rundir.SUPERVISOR) or {}
    return [worker for worker in record.get("workers", []) if worker.get("exit") is None]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = tmp_path_factory.mktemp("artifacts")
    yield path
    for launch in launches.launches(path):
        Started(launch).clean()


@pytest.fixture(scope="module")
def launch(root):
    """A launch from the screen: the first phase is done, a flag is set, the second phase runs."""
    with console(root) as terminal:
        terminal.play("…main_job", "…sanity", "…checks passed", "L", "…Launch main_job?", "y")
        terminal.wait(lambda text: "tok/s" in text and "loss" in text and "5." in text)
        path = wait_for(lambda: next(iter(launches.launches(root)), None))
        terminal.wait("plumbing")
        wait_for(lambda: RunSource(path).poll().launch.state == "waiting")
        terminal.press("E")
        for flag in flags.FLAGS.values():
            terminal.wait(flag.key.help[:20])  # or else a slow screen would scroll too far
            if flag.name == FLAG:
                break
            terminal.press("down")
        terminal.press("space")
        wait_for(lambda: RunSource(path).poll().launch.next_flags)
        terminal.play("L", "…Start phase plumbing?", "y")
        wait_for(lambda: len(workers(path / "1-plumbing")) == 2)
        terminal.leave()
    return path


def test_the_toggled_flag_is_in_the_next_phase_and_not_in_the_one_before(launch):
    run = launch / "1-plumbing"
    for worker in wait_for(lambda: workers(run)):
        environment = Path(f"/proc/{worker['pid']}/environ").read_bytes().split(b"\0")
        assert f"{FLAG}=1".encode() in environment
    born = rundir.read_json(run / rundir.RUN)
    assert born["flags"][FLAG]["value"] == "1"
    assert "operator" in born["flags"][FLAG]["origin"]
    before = rundir.read_json(launch / "0-sanity" / rundir.RUN)
    assert before["flags"].get(FLAG, {}).get("value", "0") in ("0", "")
    assert (launch / "0-sanity" / "training.csv").exists()
    wait_for(lambda: heartbeats(run, 0, "progress"))
    assert not (run / "training.csv").exists()


def test_opening_again_shows_the_run_and_a_dump_shows_both_stacks(launch, root):
    run = launch / "1-plumbing"
    with console(root) as terminal:
        terminal.wait(lambda text: "plumbing" in text and "RUNNING" in text.upper())
        terminal.play("D", "…Dump the stacks", "y")
        wait_for(lambda: len(list(run.glob("stackdump_rank?_*.txt"))) >= 2)
        terminal.press("3")
        terminal.wait(lambda text: text.count(".py:") >= 6 and "innermost first" in text)
        terminal.leave()
    for rank in (0, 1):
        dump = next(run.glob(f"stackdump_rank{rank}_*.txt"))
        wait_for(lambda dump=dump: "trainers/loop.py" in dump.read_text())


@pytest.mark.parametrize("end", ["kill", "hang up", "leave"])
def test_the_run_continues_when_the_console_ends(launch, root, end):
    run = launch / "1-plumbing"
    terminal = console(root)
    try:
        terminal.wait("plumbing")
        if end == "kill":
            os.kill(terminal.pid, signal.SIGKILL)
        elif end == "hang up":
            terminal.hang_up()
        else:
            terminal.press("q")
        wait_for(lambda: os.waitpid(terminal.pid, os.WNOHANG)[0])
        terminal.pid = 0
    finally:
        terminal.close()
    step = wait_for(lambda: RunSource(run).poll().step)
    wait_for(lambda: (RunSource(run).poll().step or 0) > step + 3)


def test_a_button_works_by_click(launch, root):
    with console(root) as terminal:
        terminal.wait(lambda text: "RUNNING" in text and "[ Halt ]" in text)
        terminal.settle()
        terminal.click("[ Halt ]")
        terminal.play("…Halt this run", "enter")
        terminal.wait(lambda text: "Halt this run" not in text)
        wait_for(lambda: RunSource(launch).poll().state == "running")
        terminal.leave()


def test_a_stopped_rank_is_named_until_it_resumes(launch, root):
    run = launch / "1-plumbing"
    pid = next(w["pid"] for w in workers(run) if w["rank"] == 1)
    with console(root) as terminal:
        terminal.wait("plumbing")
        os.kill(pid, signal.SIGSTOP)
        try:
            terminal.wait(lambda text: "rank 1" in text and "stopped" in text)
            state = wait_for(lambda: (s := RunSource(launch).poll()).verdict and s)
            assert state.verdict.rank == 1
            terminal.wait(state.verdict.phase)
            assert state.eta_s is None
        finally:
            os.kill(pid, signal.SIGCONT)
        terminal.wait(lambda text: "stopped" not in text)
        wait_for(lambda: RunSource(launch).poll().state == "running")
        terminal.leave()


def test_a_checkpoint_and_a_profile_are_made_when_asked_for(launch, root):
    run = launch / "1-plumbing"
    with console(root) as terminal:
        terminal.play("…plumbing", "C", "…Save a checkpoint now", "y", "….CHECKPOINT is written")
        terminal.leave()
    saved = wait_for(lambda: heartbeats(run, 0, "checkpoint"))
    assert manifest.verify(run / rundir.CHECKPOINTS / saved[0]["path"]).step == saved[0]["step"]
    asked = actions.send(run, "profile", {}, "tester")
    assert (actions.answer(run, asked, HANG_GUARD_S) or {}).get("ok")
    wait_for(lambda: len(list((run / "profiles").glob("*_rank?.json"))) == 2)


def test_z_halt_stops_both_ranks_at_the_same_step_with_a_checkpoint(launch, root):
    run = launch / "1-plumbing"
    with console(root) as terminal:
        terminal.play("…plumbing", "H", "…Halt this run", "y")
        terminal.wait(lambda text: "HALTED" in text.upper())
        terminal.leave()
    halts = [heartbeats(run, rank, "halt")[0] for rank in (0, 1)]
    assert halts[0]["step"] == halts[1]["step"] > 0
    name = (run / rundir.CHECKPOINTS / rundir.LATEST).read_text().strip()
    assert name == f"step_{halts[0]['step']:08d}"
    assert any((run / rundir.CHECKPOINTS / name).iterdir())
    assert json.loads((run / rundir.METRICS).read_text())
    wait_for(lambda: RunSource(launch).poll().launch.state == "ended")
    assert RunSource(launch).poll().state == "halted"
