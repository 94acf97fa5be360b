"""Shared by all tests: where the project is, and what a machine without a GPU skips by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).parents[1]

settings.register_profile(
    "ci",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("ci")


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in item.keywords and not Path("/proc/driver/nvidia/version").exists():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; none on this machine"))
        if "slow" in item.keywords and not item.config.getoption("-m"):
            item.add_marker(pytest.mark.skip(reason="full suite only: pytest -m slow"))


@pytest.fixture(scope="session")
def smoke(tmp_path_factory):
    """`nsa-console launch cpu_smoke --wait --json`, once: exit code, status, launch directory."""
    root = tmp_path_factory.mktemp("smoke")
    done = subprocess.run(
        [sys.executable, "-m", "console", "--root", str(root), "launch", "cpu_smoke", "--wait",
         "--json"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout), next((root / "cpu_smoke").iterdir())
