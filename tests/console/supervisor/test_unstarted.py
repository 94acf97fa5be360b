"""A torchrun that does not start its ranks, and a rank that does not end after its exit record."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from console import status_text
from console.sources.run import RunSource
from console.supervisor.run import BUSY_S, IDLE_S, Run
from tests.launches import STUB, console, phase


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
    pid = started.state()["torchrun"]["pid"]
    assert re.search(rf"\(pid {pid}, state [RSD]\)", alert["text"])  # it polls for the file
    go.touch()
    started.wait(lambda: started.alerts("not-started")[1:])
    assert started.alerts("not-started")[1]["text"] == "all ranks have started"
    assert started.ask("halt")["text"].startswith(".HALT is written; ")
    assert started.wait_end()["phases"][0]["state"] == "halted"


def begin_plain(begin, folder, busy_ranks: str, startup_s: float):
    """Starts two ranks that never call `join`. They compute or sleep until the file `go` exists."""
    program = folder / "plain.py"
    program.write_text(
        f"import os, time\nwhile not os.path.exists({str(folder / 'go')!r}):\n"
        f"    sum(range(10_000)) if os.environ['RANK'] in {busy_ranks!r} else time.sleep(0.5)\n"
    )
    return begin(
        {"name": "one", "script": str(program), "nproc": 2},
        watch={"startup_s": startup_s, "stall_floor_s": 60, "grace_s": 1}, shell=STUB,
    )  # fmt: skip


def test_a_program_that_does_not_call_join_and_uses_the_cpu_is_not_stalled(begin, tmp_path):
    started = begin_plain(begin, tmp_path, "01", 3)
    (alert,) = started.wait(lambda: started.alerts("not-joined"))
    assert alert["level"] == "warn"
    assert alert["text"].startswith("ranks 0-1 did not call join: their steps are not known")
    assert started.state()["state"] == "starting"
    unjoined = "no rank has called join yet: their steps are not known, and a halt has no effect"
    assert started.state()["why"].startswith(f"{unjoined} until then")
    (tmp_path / "go").touch()
    assert started.wait_end()["phases"][0]["state"] == "completed"
    assert (started.alerts("stall"), started.state()["stalls"]) == ([], 0)


def test_a_program_that_does_not_call_join_ends_by_a_stop_at_no_known_step(begin, tmp_path):
    started = begin_plain(begin, tmp_path, "01", 60)
    started.wait(lambda: "no rank has called join" in started.state().get("why", ""))
    assert started.ask("halt")["ok"]
    halting = started.wait_state("halting")
    assert halting["why"].endswith(
        "it has no effect until the ranks call join; stop ends the run now"
    )
    assert started.ask("stop")["ok"]
    (ended,) = started.wait_end()["phases"]
    assert (ended["state"], ended["steps"]) == ("stopped", None)
    state = RunSource(started.path).poll()
    assert (state.step, status_text.progress(state)) == (None, "no step known")
    assert [rank.exit for rank in state.ranks] == 2 * ["killed (SIGTERM)"]


@pytest.mark.parametrize("busy_ranks", ["", "1"])
def test_a_rank_that_did_not_call_join_and_uses_no_cpu_is_a_stall(begin, tmp_path, busy_ranks):
    """A rank that uses no CPU waits, for example for a rank that builds an index."""
    started = begin_plain(begin, tmp_path, busy_ranks, 8)
    (alert, *_) = started.wait(lambda: started.alerts("stall"))
    assert "stalled in start-up (no pulse)" in alert["text"]
    started.wait_state("stalled")  # the event is written before it
    (tmp_path / "go").touch()
    assert started.wait_end()["phases"][0]["state"] == "completed"


def begin_hanging(begin, folder, hangs: str, after: str = ""):
    """Starts two ranks whose end waits while `hangs`; `after` follows their last step."""
    program = folder / "hangs.py"
    program.write_text(
        "import atexit, os, time\n"
        f"rank, go = os.environ['RANK'], {str(folder)!r} + '/go'\n"
        f"def hang():\n    while {hangs}:\n        time.sleep(0.5)\n"
        "atexit.register(hang)\n"
        "from trainers.contract.member import join\nrun = join()\n"
        f"for step in range(1, 4):\n    run.step(step, loss=1.0)\n{after}"
    )
    return begin(
        {"name": "one", "script": str(program), "nproc": 2},
        watch={"stall_floor_s": 2, "grace_s": 1}, shell=STUB,
    )  # fmt: skip


def test_a_rank_that_hangs_after_its_exit_record_alerts(begin, tmp_path):
    moves = (
        "while rank == '0' and not os.path.exists(go + rank):\n"
        "    run.pulse.set(3, 'forward')\n    time.sleep(0.05)\n"
    )
    started = begin_hanging(begin, tmp_path, "not os.path.exists(go + rank)", moves)
    (alert,) = started.wait(lambda: started.alerts("exit-hangs"))
    assert (alert["level"], alert["key"]) == ("crit", "K")
    assert alert["text"].startswith("rank 1 still runs 2 s after the exit record, so the run ")
    (tmp_path / "go1").touch()
    (_, cleared) = started.wait(lambda: started.alerts("exit-hangs")[1:] and
                                started.alerts("exit-hangs"))  # fmt: skip
    assert (cleared["kind"], started.state()["state"]) == ("clear", "running")
    (tmp_path / "go0").touch()
    assert started.wait_end()["phases"][0]["state"] == "completed"


def test_a_rank_that_hangs_after_its_exit_record_is_named_by_a_verdict(begin, tmp_path):
    started = begin_hanging(begin, tmp_path, "rank == '1' and not os.path.exists(go)")
    found = started.wait(lambda: (v := started.state().get("verdict")) and v["cause"] == "sleep"
                         and v)  # fmt: skip
    assert (found["rank"], found["phase"], found["step"]) == (1, "exit", 3)
    assert found["sentence"].startswith("rank 1 has been stalled in exit of step 3 since ")
    assert found["sentence"].endswith("it waits for a timer; rank 0 exited (code 0)")
    assert "a stop costs" not in found["action"]
    # No rank steps any more, so no gate counts this stall; the alert is `exit-hangs`.
    assert (started.state()["stalls"], started.alerts("stall")) == (0, [])
    started.wait(lambda: started.alerts("exit-hangs"))
    code, said, _ = console("diagnose", started.path)
    assert (code, "rank 1 has been stalled in exit of step 3" in said) == (1, True), said
    started.kill_supervisor()
    code, said, _ = console("diagnose", started.path)
    assert (code, "rank 1 has been stalled in exit of step 3" in said) == (1, True), said
    assert "waits for a timer" in said
    (tmp_path / "go").touch()
    started.wait_gone()


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
