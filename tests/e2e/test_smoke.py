"""The gate of the phase `recall`, from the command line, with models without attention."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def launch(root: Path, *words: str) -> tuple[int, dict]:
    done = subprocess.run(
        [sys.executable, "-m", "console", "--root", str(root), "launch", *words,
         "--wait", "--json"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["no_attention", "first_value"])
def test_recall_fails_its_gate_in_all_its_steps_without_attention(tmp_path, phase):
    code, state = launch(tmp_path, "tests/e2e/broken_recall.yaml", "--phase", phase)
    assert code == 1
    failed = [gate["name"] for gate in state["gates"] if gate["result"] != "pass"]
    assert failed == ["bytes_right"]
    assert state["step"] == 600
