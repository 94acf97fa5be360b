"""The parts of a snapshot that the feed reads only after a change."""

from __future__ import annotations

from console import plan
from console.supervisor.launch_spec import LaunchSpec
from console.tui.feed import Feed
from tests.console.sources import directory
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
