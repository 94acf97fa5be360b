"""The stage of the faults: a home of its own, launches that end, one scene a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.scene import Scene
from tests.launches import Begin


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Iterator[Path]:
    """What every process of these tests takes for its home and its temporary directory."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        patch.setenv("TMPDIR", str(folder))
        patch.setenv("XDG_CONFIG_HOME", str(folder))
        yield folder


@pytest.fixture(scope="module")
def begin(home, tmp_path_factory) -> Iterator[Begin]:
    launches = Begin(tmp_path_factory)
    yield launches
    launches.clean()


@pytest.fixture
def injection(request) -> int:
    """Which of several injections this is; `make faults` repeats those that are timed."""
    return getattr(request, "param", 0)


@pytest.fixture
def scene(request, home, injection) -> Iterator[Scene]:
    """One injection of the row that the test is marked with: `fault(number, case="")`."""
    properties = request.node.user_properties
    stage = Scene(home, lambda found: properties.append(("fault", found)))
    yield stage
    stage.close()


@pytest.fixture
def orders(tmp_path_factory) -> Path:
    """Where the ranks of `obedient.py` look for what to do."""
    return tmp_path_factory.mktemp("orders")


@pytest.fixture
def full(request) -> bool:
    """Says whether everything is injected, as `make faults` does."""
    return bool(request.config.option.markexpr)
