"""Looks at a launch: what others write wakes whoever waits for it, long before it is due."""

from __future__ import annotations

import math
import threading

import pytest

from console.supervisor.directory import Directory
from console.supervisor.lookout import Lookout
from trainers.contract import rundir


@pytest.fixture
def woken():
    return threading.Event()


@pytest.fixture
def directory(woken):
    held = Directory(woken.set)
    yield held
    held.close(20)


def looked(lookout, woken, runs):
    """Looks until there is nothing more to look at, and returns what was found."""
    found = []
    while lookout.begin(runs, None, math.inf):
        while (new := lookout.take()) is None:
            assert woken.wait(20)
            woken.clear()
        found += new
    return found


def test_a_request_wakes_and_is_found_where_looks_are_due_by_a_change_alone(
    tmp_path, directory, woken
):
    run = tmp_path / "0-one"
    box = run / rundir.REQUESTS
    rundir.make_directory(box)
    lookout = Lookout(directory, tmp_path)
    for name in ("first", "second"):
        assert looked(lookout, woken, [run]) == []
        rundir.write_json(box / f"{name}.json", {
            "v": 1, "id": name, "action": "note", "args": {"text": "x"}, "by": "x",
        })  # fmt: skip
        while not directory.changed:
            assert woken.wait(20)
            woken.clear()
        assert {request.id for request in looked(lookout, woken, [run])} == {name}
        (box / f"{name}.json").unlink()


def test_no_two_looks_are_under_way_at_once(tmp_path, directory, woken):
    lookout = Lookout(directory, tmp_path)
    assert lookout.begin([], None, 0.0)
    assert not lookout.begin([], None, 0.0)
    while lookout.take() is None:
        assert woken.wait(20)
        woken.clear()
    assert lookout.begin([], None, 0.0)
