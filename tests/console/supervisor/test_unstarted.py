"""A torchrun that does not start its ranks, for example because the disk of its packages hangs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from console.supervisor.run import BUSY_S, IDLE_S, Run
from tests.launches import STUB, phase


def late_torchrun(folder: Path, go: Path) -> dict[str, str]:
    """Returns variables for a launch whose torchrun starts the ranks when the file `go` exists."""
    package = folder / "torch" / "distributed"
    package.mkdir(parents=True)
    for each in (package.parent, package):
        (each / "__init__.py").touch()
    small = Path(STUB["PYTHONPATH"]) / "torch" / "distributed" / "run.py"
    (package / "run.py").write_text(
        "import pathlib, runpy, time\n"
        f"while not pathlib.Path({str(go)!r}).exists():\n    time.sleep(0.05)\n"
        f"runpy.run_path({str(small)!r}, run_name='__main__')\n"
    )
    return {"PYTHONPATH": str(folder)}


def test_a_torchrun_without_ranks_alerts_until_it_starts_them(begin, tmp_path):
    go = tmp_path / "go"
    started = begin(
        phase("one", "member.py", 100_000), shell=late_torchrun(tmp_path / "late", go),
        watch={"startup_s": 3, "stall_floor_s": 60, "grace_s": 3},
    )  # fmt: skip
    (alert,) = started.wait(lambda: started.alerts("not-started"))
    assert (alert["level"], alert["key"]) == ("crit", "K")
    assert alert["text"].startswith("0 of 2 ranks were found within 3 s of the start of torchrun")
    assert f"pid {started.state()['torchrun']['pid']}, state S" in alert["text"]
    go.touch()
    started.wait(lambda: started.alerts("not-started")[1:])
    assert started.alerts("not-started")[1]["text"] == "all ranks have started"
    assert started.ask("halt")["text"].endswith("this project then save a checkpoint")
    assert started.wait_end()["phases"][0]["state"] == "halted"


@pytest.mark.parametrize(("alerts", "pace_s"), [({}, BUSY_S), ({"not-started": {}}, IDLE_S)])
def test_the_loop_is_slower_when_ranks_are_late(alerts, pace_s):
    tree = SimpleNamespace(incomplete=True, alive=list, agent_over=False)
    run = SimpleNamespace(
        attempt=SimpleNamespace(stage="run", tree=tree, behind=False), state="starting",
        phase=SimpleNamespace(nproc=2), _next_at=None, alerts=SimpleNamespace(open=lambda: alerts),
    )  # fmt: skip
    read = Run.pace_s.fget
    assert read is not None
    assert read(run) == pace_s
