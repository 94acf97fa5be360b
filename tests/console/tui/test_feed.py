"""The snapshots of the feed: parts that are read only after a change, and polls that fail."""

from __future__ import annotations

import errno
import os

from console import plan
from console.supervisor.launch_spec import LaunchSpec
from console.tui.feed import Feed
from tests.console.sources import directory
from tests.console.tui import recorded
from tests.console.tui.recorded import app_on, charted, driven, lines, picture, until
from trainers.contract import rundir


def test_planned_flags_are_read_again_when_the_plan_can_be_read_again(tmp_path):
    path = directory.launch(tmp_path)
    (path / rundir.PLAN).write_text("{")
    feed = Feed(str, path, tmp_path)
    feed.wants_coming = True
    found = feed.take()
    assert "contains no readable plan.json" in found.coming_trouble
    phases = [{"name": name, "script": "x.py", "flags": {"NSA_LR": 0.5}} for name in ("a", "b")]
    given = plan.parse({"name": "toy", "phases": phases}, "test")
    rundir.write_json(path / rundir.PLAN, LaunchSpec("toy", given, "ann").as_dict(1.0))
    found = feed.take()
    assert (found.coming_trouble, found.coming.get("NSA_LR")) == ("", "0.5")


async def test_data_age_while_the_run_directory_cannot_be_read():
    def fail():
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    async with driven(app_on(recorded.running())) as (app, pilot):
        shown = await charted(pilot)
        app.feed._source.poll = fail
        await until(pilot, lambda: "Stale file handle" in lines(app)[1])
        await until(pilot, lambda: "s old" in lines(app)[0])
        assert picture(app).splitlines()[2:] == shown.splitlines()[2:]
