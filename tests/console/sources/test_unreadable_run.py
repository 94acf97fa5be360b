"""The state of an unreadable run comes from its launch and the supervisor heartbeat."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from console import cli, status_text
from console.commands import query
from console.sources import launches
from console.sources import run as run_module
from console.sources.json_documents import Document
from console.sources.run import RunSource
from tests.console.sources import directory
from tests.console.sources.snapshots import Observer
from trainers.contract import rundir

DEAD = directory.DEAD
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("how", ["unreadable", "gone", "link", "file", "stale"])
@pytest.mark.parametrize(
    ("phase", "owner", "expected"),
    [
        ({"state": "running", "steps": 7}, {}, "stalled"),
        ({"state": "running"}, DEAD, "lost"),
        ({"state": "stopped", "why": "stopped, requested by me", "ended_ts": 5.0}, DEAD, "stopped"),
    ],
)  # fmt: skip
def test_a_run_with_an_unreadable_directory_has_the_state_in_its_launch(
    launch, tmp_path, shared_memory, monkeypatch, how, phase, owner, expected
):
    """The completed phase before this run is not shown in place of the run."""
    directory.run(launch / "0-first", world=0, state="completed")
    run = directory.run(launch / "1-second")
    alert = {"alert": "dropped", "ts": time.time(), "level": "warn", "text": "takes no records"}
    directory.document(
        shared_memory / rundir.LIVE_STATUS,
        {"v": 1, "ts": time.time(), "state": "stalled", "why": "rank 1", "alerts": [alert]},
    )
    state = json.loads((launch / rundir.PLAN_STATE).read_text())
    state["phases"][1] = {"name": "second", "dir": run.name} | phase
    ended = expected == "stopped"
    directory.document(launch / rundir.PLAN_STATE, state | {
        "phase": 1, "supervisor": rundir.identity() | owner, "updated_ts": time.time() - 1,
        "live_dir": str(shared_memory) if expected == "stalled" else "",
        "state": "ended" if ended else "running",
    })  # fmt: skip
    away = run.rename(tmp_path / "away")
    if how == "unreadable":
        run.mkdir()
    elif how == "link":
        run.symlink_to(away)
    elif how == "file":
        run.touch()
    elif how == "stale":
        away.rename(run)
        directory.unreadable(monkeypatch, run)(True)
    seen = RunSource(launch).poll()
    assert seen.state == expected, seen.why
    assert seen.path == str(run)
    words = {alert.id: alert.text for alert in seen.alerts}
    missing = f"{run} cannot be read"
    if how == "unreadable":
        missing = "supervisor.json of 1-second is missing"
    newest = "plan_state.json, the live directory and earlier reads"
    assert words["directory"] == f"{missing}; the run's state is the newest in {newest}"
    assert ("dropped" in words) == (expected == "stalled")
    assert status_text.exit_code(seen) == {"stalled": 1, "lost": 5, "stopped": 4}[expected]


def test_a_run_that_may_not_be_entered_does_not_hide_its_launch(launch):
    """Root loses the right to ignore file modes, so that it is like any other user."""
    (launch / "0-first").chmod(0)
    anybody = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    done = subprocess.run(
        [*(anybody if os.geteuid() == 0 else ()), sys.executable, "-c",
         "import sys\nfrom pathlib import Path\nfrom console.sources import launches, run\n"
         "top = Path(sys.argv[1])\nprint(launches.run_directories(top))\n"
         "print(launches.is_launch(top / '0-first'), run.RunSource(top).poll().state)", launch],
        cwd=ROOT, text=True, capture_output=True,
    )  # fmt: skip
    (launch / "0-first").chmod(0o700)
    assert (done.stdout, done.stderr) == ("[]\nFalse running\n", "")


@pytest.mark.parametrize("away", ["", "0-first"])
def test_a_moment_without_the_directory_does_not_end_what_follows_a_run_and_its_loss_does(
    launch, run, monkeypatch, capsys, away
):
    owner = subprocess.Popen(["sleep", "600"])
    known = {"pid": owner.pid, "start_ticks": rundir.start_ticks(owner.pid)}
    directory.run(run, workers=[{"rank": 0, "exit": None, **rundir.identity(), **DEAD}], **known)
    directory.change(launch / rundir.PLAN_STATE, supervisor=rundir.identity() | known)
    directory.beat(run, 0, 7)
    set_away = directory.unreadable(monkeypatch, launch / away)

    def lose() -> None:
        shutil.rmtree(launch / away)
        owner.kill()
        owner.wait()

    steps = iter([lambda: set_away(True), lambda: set_away(False), lambda: None, lose])
    monkeypatch.setattr(query.time, "sleep", lambda _: next(steps)())
    assert cli.main(["watch", str(launch), "--plain"]) == 5
    lines = capsys.readouterr().out.splitlines()
    texts = [line for line in lines if "directory" in line]
    assert f"{run} cannot be read" in texts[0], lines
    assert "The alert directory is no longer open" in texts[1]
    assert lines[-1].startswith("no go; "), lines


def test_an_unreadable_directory_does_not_hide_the_others_in_a_list(launch, tmp_path, monkeypatch):
    other = directory.launch(tmp_path, "other").rename(tmp_path / "own")
    directory.unreadable(monkeypatch, other)(True)
    assert launches.launches_and_bare_runs(tmp_path) == [launch]


def test_only_a_phase_that_has_not_started_is_queued(launch):
    shutil.rmtree(launch / "0-first")
    for named, expected in (("next", "queued"), ("starting", "starting")):
        directory.change_at(launch / rundir.PLAN_STATE, "phases", 0, "state", to=named)
        seen = RunSource(launch).poll()
        assert (seen.state, seen.alerts) == (expected, ())


def test_an_end_that_only_the_launch_recorded_counts(launch):
    state = json.loads((launch / rundir.PLAN_STATE).read_text())
    end = {"state": "stopped", "why": "stopped, requested by me", "ended_ts": time.time() + 1}
    state["phases"][0] |= end
    directory.document(launch / rundir.PLAN_STATE, state | {"state": "ended"})
    directory.run(launch / "0-first", workers=[], **DEAD)
    seen = RunSource(launch).poll()
    assert (seen.state, seen.why) == ("stopped", end["why"])


@pytest.mark.parametrize("reads", ["recent", "charts"])
def test_a_snapshot_behind_a_link_is_not_read(launch, tmp_path, reads):
    """The records are read again when the run's own directory is back."""
    other = directory.run(tmp_path / "other")
    directory.beat(other, 0, 77, loss=1.0)
    directory.event(other, "alert", alert="ecc", level="crit", text="of another run", attempt=1)
    directory.event(other, "state", state="stalled", why="of another run", attempt=1)
    observer = Observer(other)
    observer.read()
    observer.write()
    directory.change(launch / rundir.PLAN_STATE, updated_ts=time.time() - 5)
    own = (launch / "0-first").rename(tmp_path / "own")
    directory.beat(own, 0, 5, loss=1.0)
    (launch / "0-first").symlink_to(other)
    source = RunSource(launch, reads=reads)
    for _ in range(2):
        seen = source.poll()
        assert (seen.state, [alert.id for alert in seen.alerts]) == ("running", ["directory"])
        assert (source.series.points("loss"), source.reducer.all_heads) == ((), {})
    (launch / "0-first").unlink()
    own.rename(launch / "0-first")
    assert source.poll().step == 5


def test_a_phase_that_starts_during_a_poll_is_no_contradiction(launch, run, monkeypatch):
    """The supervisor names the phase in plan_state.json first, and then makes its directory."""

    def start_second(path: Path) -> list[Path]:
        if not (launch / "1-second").exists():
            state = json.loads((launch / rundir.PLAN_STATE).read_text())
            state["phases"][1] |= {"state": "starting"}
            directory.document(launch / rundir.PLAN_STATE, state | {"phase": 1})
            directory.run(launch / "1-second", state="starting")
        return launches.run_directories(path)

    monkeypatch.setattr(run_module, "run_directories", start_second)
    state = RunSource(launch).poll()
    assert state.launch
    assert (state.launch.doubt, state.alerts) == ("", ())
    assert state.id == "toy/1-second"


def test_a_document_that_could_not_be_opened_for_a_moment_is_read_again(launch):
    """During the first read no descriptor is free; the file does not change."""
    document = Document(launch / rundir.PLAN)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        found = document.read()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert (found, document.trouble) == ({}, "plan.json cannot be read as a JSON object")
    assert (document.read()["name"], document.trouble) == ("toy", "")


def test_a_removed_directory_does_not_raise(launch, run):
    source = RunSource(launch)
    directory.beat(run, 0, 5, loss=1.0)
    source.poll()
    shutil.rmtree(launch)
    source.poll()
