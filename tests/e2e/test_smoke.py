"""The shipped plan from the command line: it passes, and without attention it does not."""

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


def test_the_smoke_plan_passes_all_gates(smoke):
    code, state, _ = smoke
    assert code == state["exit_code"] == 0
    assert [(p["name"], p["state"], p["result"]) for p in state["launch"]["phases"]] == [
        (name, "completed", "pass") for name in ("sanity", "plumbing", "recall")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["no_attention", "first_value"])
def test_recall_fails_its_gate_in_all_its_steps_without_attention(tmp_path, phase):
    code, state = launch(tmp_path, "tests/e2e/broken_recall.yaml", "--phase", phase)
    assert code == 1
    failed = [gate["name"] for gate in state["gates"] if gate["result"] != "pass"]
    assert failed == ["bytes_right"]
    assert state["step"] == 600
