"""What the screen says of hardware: eight GPUs of which one is lost, a directory that is frozen."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from console import actions
from console.sources.run import RunSource
from tests.e2e.test_main_job import CONSOLE, PLAN, ROOT, wait_for
from tests.fakes import nvml as fake
from tests.mounts import ext4
from tests.terminal import Terminal
from trainers.contract import jsonl, rundir

FROZEN_S = 15.0


def screen(root: Path, size: tuple[int, int] = (80, 24)) -> Terminal:
    return Terminal([*CONSOLE, "--root", str(root)], ROOT, size=size)


def end(path: Path) -> None:
    actions.answer(path, actions.send(path, "halt", {}, "tester"), 30)
    wait_for(lambda: RunSource(path).poll().launch.state == "ended")


def test_eight_gpu_rows_appear_and_a_lost_one_is_marked_lost(tmp_path):
    """The supervisor samples through the real pynvml over a fake of NVML's C interface."""
    (tmp_path / "nvml").mkdir()
    fake.build(tmp_path / "nvml")
    root = tmp_path / "artifacts"
    plan = tmp_path / "gpus.yaml"
    program = ROOT / "tests/programs/member.py"
    plan.write_text(
        f"name: gpus\nnproc: 8\nenv: {{OMP_NUM_THREADS: 1}}\n"
        f"phases:\n  - {{name: one, script: {program}, args: [100000]}}\n"
    )
    launched = subprocess.run(
        [sys.executable, "-m", "console", "--root", str(root), "launch", str(plan)],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path / "nvml")},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert launched.returncode == 0, launched.stderr
    path = next(iter(root.glob("gpus/*")))
    try:
        wait_for(lambda: RunSource(path).poll().step)
        with screen(root) as terminal:
            shown = terminal.wait(lambda text: text.count("97%") == 8, 30)
            lines = [line for line in shown.splitlines() if "97%" in line]
            assert "watt °C" in shown
            for words in ("322W", " 64 ", "60/80G"):
                assert all(words in line for line in lines), shown
            fake.write(tmp_path / "nvml", gpu3={"state": "lost"})
            shown = terminal.wait(lambda text: text.count("97%") == 7, 30)
            row = next(line for line in shown.splitlines() if line.startswith("3 "))
            assert "lost" in row.lower()
            terminal.press("q")
            assert terminal.wait_exit() == 0
    finally:
        end(path)


@pytest.fixture
def mounted(tmp_path):
    """A small ext4 on a loop device, thawed and unmounted whatever happens."""
    with ext4(tmp_path, 3 << 10) as mount:
        yield mount


@pytest.mark.slow
def test_training_goes_on_while_the_directory_is_frozen_and_the_screen_says_so(mounted):
    root = mounted / "artifacts"
    options = actions.LaunchOptions(plan=str(PLAN), phase="plumbing", root=root)
    path = actions.launch(options, "tester")
    try:
        source = RunSource(path)
        wait_for(lambda: (source.poll().step or 0) > 3)
        with screen(root) as terminal:
            terminal.wait("RUNNING")
            subprocess.run(["fsfreeze", "-f", str(mounted)], check=True)
            begun = time.monotonic()
            try:
                before = source.poll().step or 0
                terminal.wait("does not answer", 20)
                while time.monotonic() - begun < FROZEN_S:
                    terminal.settle(1.0)
                moved = (source.poll().step or 0) - before
            finally:
                subprocess.run(["fsfreeze", "-u", str(mounted)], check=True)
            assert moved > 5
            terminal.wait(lambda text: "does not answer" not in text, 20)
            terminal.press("q")
            assert terminal.wait_exit() == 0
    finally:
        end(path)
    run = next(iter(path.glob("0-*")))
    lines = rundir.heartbeat(run, 0).read_bytes().splitlines()
    beats = [record for line in lines if (record := jsonl.decode(line))]
    progress = [beat for beat in beats if beat["msg"] == "progress"]
    durations = [duration for beat in progress for duration in beat["steps_dt_s"]]
    assert len(durations) == progress[-1]["step"]
    assert max(durations) < FROZEN_S / 2
    assert beats[-1]["dropped_records"] == 0
