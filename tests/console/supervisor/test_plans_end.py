"""Where a plan ends: a halt is never lost between phases, no question is left without an answer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from console import plain
from console.sources.run import RunSource
from trainers.contract import rundir


def sleeper(folder: Path, name: str, seconds: float) -> dict[str, object]:
    """A phase of one process that knows nothing of us."""
    script = folder / f"{name}.py"
    script.write_text(f"import time\nprint('begun', flush=True)\ntime.sleep({seconds})\n")
    return {"name": name, "script": str(script), "nproc": 1}


@pytest.mark.parametrize("how", ["request", "file"])
def test_a_halt_that_the_program_does_not_obey_ends_the_plan_and_leaves_nothing_outside(
    begin, tmp_path, monkeypatch, how
):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    started = begin(sleeper(tmp_path, "one", 3), sleeper(tmp_path, "two", 0))
    log = rundir.logs(started.path / "0-one", 1) / rundir.TORCHRUN_LOG
    started.wait(lambda: log.exists() and b"begun" in log.read_bytes())
    if how == "file":
        (started.run() / rundir.HALT).touch()
    else:
        assert started.ask("halt")["ok"]
    ended = started.wait_end()
    assert [phase["state"] for phase in ended["phases"]] == ["completed", "later"]
    why = {"request": "halt asked by tester", "file": ".HALT is there"}[how]
    assert ended["why"] == f"one: {why}"
    state = RunSource(started.path).poll()
    assert state.launch is not None
    assert plain.launch_exit_code(state.launch) == 4
    assert os.listdir(temporary) == []
    assert log.with_suffix("").is_dir()


def test_a_request_to_a_former_run_is_answered(begin, tmp_path):
    started = begin(sleeper(tmp_path, "one", 0), sleeper(tmp_path, "two", 0), between="ask")
    started.wait(lambda: started.plan_state.get("state") == "waiting")
    request = {"v": 1, "id": "late", "action": "dump", "args": {}, "by": "tester"}
    rundir.write_json(started.run() / rundir.REQUESTS / "late.json", request)
    answer = started.wait(lambda: [e for e in started.events(0) if e["kind"] == "answer"], 5)
    assert (answer[0]["request"], answer[0]["ok"]) == ("late", False)
    assert started.ask("halt")["ok"]
    assert started.wait_end()["why"] == "halt asked by tester before the next phase"
