"""The gate of the phase `recall`, from the command line, with two broken models."""

from __future__ import annotations

import json

import pytest

from tests.launches import console


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["no_attention", "first_value"])
def test_recall_fails_its_gate_in_all_its_steps_without_attention(tmp_path, phase):
    code, out, errors = console(
        "--root", tmp_path, "launch", "tests/e2e/broken_recall.yaml", "--phase", phase, "--wait",
        "--json",
    )  # fmt: skip
    assert code == 1, errors
    state = json.loads(out)
    failed = [gate["name"] for gate in state["gates"] if gate["result"] != "pass"]
    assert failed == ["bytes_right"]
    assert state["step"] == 600
