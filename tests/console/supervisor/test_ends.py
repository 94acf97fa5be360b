"""Ends of runs: a hang that is stopped, a launcher that dies. Real signals, real torchrun."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.launches import PROGRAMS, phase


def test_a_torchrun_that_rejects_its_command_line_is_quoted(begin, tmp_path):
    module = tmp_path / "torch" / "distributed" / "run.py"
    module.parent.mkdir(parents=True)
    for folder in module.parents[:2]:
        (folder / "__init__.py").touch()
    module.write_text("import argparse\nargparse.ArgumentParser('torchrun').parse_args()\n")
    started = begin(phase("one", "member.py", 5), shell={"PYTHONPATH": str(tmp_path)})
    started.wait_end()
    assert started.state()["state"] == "crashed"
    why = started.state()["why"]
    assert why.startswith("torchrun started no rank: torchrun: error: unrecognized arguments")


def test_torchrun_before_torch_2_12_gets_no_shutdown_timeout(tmp_path):
    """It rejects the option: with torch 2.11 no launch could start."""
    program = (
        "from pathlib import Path\nfrom console.supervisor.launch_spec import argv\n"
        "from trainers.contract.plan import Phase\n"
        "print(argv(Phase(name='one', module='trainers.ddp'), 5.0, Path('logs')))"
    )
    for version, expected in (("2.11.0", False), ("2.12.0a0+git1", True), ("3.0", True)):
        folder = tmp_path / version / f"torch-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True,
            cwd=PROGRAMS.parents[1], env=os.environ | {"PYTHONPATH": str(folder.parent)},
        )  # fmt: skip
        assert ("--shutdown-timeout" in done.stdout) is expected, version
