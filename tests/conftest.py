"""For all tests: generated examples, the order of the files, skipped tests, launches."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.launches import Begin

settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,  # every run has the same examples
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("random", settings.get_profile("ci"), derandomize=False)
settings.load_profile("ci")

LONGEST = (
    "test_learning", "test_attention", "test_main_job", "test_restart", "test_run",
    "test_parallel", "test_hardware", "test_truth", "test_dumps",
)  # fmt: skip
"""Test files that take long. They start first, so that the workers end at about the same time."""

# A background job of a shell may ignore SIGINT, and the processes of the tests would inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    # pytest resets the filter that `trainers.checkpoint` sets.
    config.addinivalue_line("filterwarnings", "ignore:torch.distributed is disabled:UserWarning")


def pytest_collection_modifyitems(items):
    rank = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(LONGEST)))
    for item in items:
        if item.get_closest_marker("gpu") and not Path("/proc/driver/nvidia/version").exists():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; none on this machine"))
        if item.get_closest_marker("slow") and not item.config.getoption("-m"):
            item.add_marker(pytest.mark.skip(reason="full suite only: pytest -m slow"))


@pytest.fixture(scope="module")
def begin(tmp_path_factory) -> Iterator[Begin]:
    """Starts real launches; they end with the module."""
    from tests.launches import Begin  # not for tests without launches

    launches = Begin(tmp_path_factory)
    yield launches
    launches.clean()
