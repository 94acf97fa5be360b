"""Looks at a launch: what others write wakes whoever waits for it, long before it is due."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace

import pytest

from console.supervisor.lookout import Lookout
from console.supervisor.rundir_io import Directory
from tests import owners
from trainers.contract import rundir


@pytest.fixture
def woken():
    return threading.Event()


@pytest.fixture
def directory(woken):
    held = Directory(woken.set)
    yield held
    held.close(20)


def wait(lookout, directory, woken):
    """Waits for the end of a look."""
    while lookout.under_way:
        assert woken.wait(20)
        woken.clear()
        directory.deliver()


def look(lookout, directory, woken, runs):
    """Looks until there is nothing more to look at."""
    while lookout.begin(runs, None, math.inf):
        wait(lookout, directory, woken)


def test_a_request_wakes_and_is_found_where_looks_are_due_by_a_change_alone(
    tmp_path, directory, woken
):
    run = tmp_path / "0-one"
    box = run / rundir.REQUESTS
    rundir.make_directory(box)
    found = []
    lookout = Lookout(directory, tmp_path, found.extend, lambda: None, owners.absent())
    for name in ("first", "second"):
        look(lookout, directory, woken, [run])
        assert found == []
        rundir.write_json(box / f"{name}.json", {
            "v": 1, "id": name, "action": "note", "args": {"text": "x"}, "by": "x",
        })  # fmt: skip
        while not directory.changed:
            assert woken.wait(20)
            woken.clear()
        look(lookout, directory, woken, [run])
        assert {request.id for request in found} == {name}
        found.clear()
        (box / f"{name}.json").unlink()


def test_no_two_looks_are_under_way_at_once(tmp_path, directory, woken):
    lookout = Lookout(directory, tmp_path, lambda found: None, lambda: None, owners.absent())
    assert lookout.begin([], None, 0.0)
    assert not lookout.begin([], None, 0.0)
    wait(lookout, directory, woken)
    assert lookout.begin([], None, 0.0)


def test_a_request_is_found_also_where_the_run_directory_cannot_be_read(tmp_path, directory, woken):
    def unreadable(_):
        raise PermissionError(13, "Permission denied")

    box = tmp_path / rundir.REQUESTS
    rundir.make_directory(box)
    request = {"v": 1, "id": "stop", "action": "stop", "args": {}, "by": "x"}
    rundir.write_json(box / "stop.json", request)
    files = SimpleNamespace(watched=(), look=unreadable)
    attempt, found = SimpleNamespace(files=files, stage="run", behind=False), []
    lookout = Lookout(directory, tmp_path, found.extend, lambda: None, owners.absent())
    assert lookout.begin([], attempt, 0.0)
    wait(lookout, directory, woken)
    assert [each.id for each in found] == ["stop"]
