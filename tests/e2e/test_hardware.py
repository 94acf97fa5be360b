"""Eight GPUs on the screen, of which one is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from console import actions
from console.sources.run import RunSource
from tests.e2e.test_main_job import CONSOLE, ROOT
from tests.fakes import nvml as fake
from tests.launches import HANG_GUARD_S, wait_for
from tests.terminal import Terminal


def screen(root: Path, size: tuple[int, int] = (80, 24)) -> Terminal:
    return Terminal([*CONSOLE, "--root", str(root)], ROOT, size=size)


def end(path: Path) -> None:
    actions.answer(path, actions.send(path, "halt", {}, "tester"), HANG_GUARD_S)
    wait_for(lambda: RunSource(path).poll().launch.state == "ended")


def test_eight_gpu_rows_appear_and_a_lost_one_is_marked_lost(tmp_path):
    """The supervisor samples through the real pynvml over a fake of NVML's C library."""
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
            figures = ("97% █", "322W", " 64 ", "60/80G")

            def with_figures(text: str) -> int:
                return sum(all(each in line for each in figures) for line in text.splitlines())

            terminal.wait(lambda text: with_figures(text) == 8 and "watt °C" in text)
            fake.write(tmp_path / "nvml", gpu3={"state": "lost"})
            terminal.wait(lambda text: with_figures(text) == 7 and any(
                line.startswith("3 ") and "lost" in line.lower() for line in text.splitlines()
            ))  # fmt: skip
            terminal.leave()
    finally:
        end(path)
