"""Real launches that end with the module; what they are made of is in tests/launches.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.launches import ENDED, PROGRAMS, Begin, Started, phase, write_plan

__all__ = ["ENDED", "PROGRAMS", "Begin", "Started", "begin", "phase", "write_plan"]


@pytest.fixture(scope="module")
def begin(tmp_path_factory) -> Iterator[Begin]:
    launches = Begin(tmp_path_factory)
    yield launches
    launches.clean()
