"""Fixtures of the fault tests: a home directory, launches, and one scene for each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.scene import Scene
from tests.launches import STUB, Begin, Started, phase
from trainers.contract import rundir

ON_STALL = {"when": "stall", "attempts": 3, "backoff_s": 0.2}
WATCH = {"stall_floor_s": 1, "startup_s": 20, "grace_s": 1, "stall_act_s": 3}


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Iterator[Path]:
    """The directory that HOME, TMPDIR and XDG_CONFIG_HOME name in these tests."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        patch.setenv("TMPDIR", str(folder))
        patch.setenv("XDG_CONFIG_HOME", str(folder))
        yield folder


@pytest.fixture(scope="module")
def begin(home, begin) -> Begin:
    """Starts launches; `home` is the home directory of their processes."""
    return begin


@pytest.fixture
def injection(request) -> int:
    """The number of this injection; `make faults` repeats the timed injections."""
    return getattr(request, "param", 0)


@pytest.fixture
def scene(request, home, injection) -> Iterator[Scene]:
    """One injection of the row in the mark of the test, `fault(number, case="")`."""
    properties = request.node.user_properties
    stage = Scene(home, lambda found: properties.append(("fault", found)))
    yield stage
    stage.close()


@pytest.fixture
def orders(tmp_path_factory) -> Path:
    """The folder from which the ranks of `obedient.py` read their orders."""
    return tmp_path_factory.mktemp("orders")


@pytest.fixture
def full(request) -> bool:
    """True if pytest has a mark expression, as in `make faults`: all failures are injected."""
    return bool(request.config.option.markexpr)


@pytest.fixture
def launch(scene, begin, orders) -> Iterator[Callable[..., Started]]:
    """Starts two ranks under the small torchrun; by default, a stall or a crash restarts them.

    A launch that still runs at the end of the test is stopped.
    """
    found: list[Started] = []

    def start(*phases, steps: int = 100_000, shell=STUB, **plan) -> Started:
        phases = phases or (phase("one", "obedient.py", steps, orders),)
        plan = {"restart": ON_STALL, "watch": WATCH} | plan
        found.append(begin(*phases, shell=shell, **plan))
        found[-1].wait_steps(5)
        return found[-1]

    yield start
    for started in found:
        held = started.plan_state
        if held["state"] != "ended" and rundir.is_alive(held["supervisor"]):
            scene.stop(started)
