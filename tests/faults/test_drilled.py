"""Faults in a real trainer, one after the other, in one launch with a restart.

`NSA_DRILL` causes two stalls and a kill at given steps; the tests read the records on them.
"""

from __future__ import annotations

import pytest

from console.diagnose.verdict import BEING_READ
from console.status_text import counted
from tests.launches import Begin, Started
from tests.trainers.runs import CONFIG, heartbeats, small
from trainers.contract import rundir

EVERY, HOOK, LOADER, KILLED = 10, 12, 25, 97
STALL_S = 8.0
"""Longer than the stall limit, the time until the next poll, and a dump together."""
DRILLS = f"backward@{HOOK}:1:{STALL_S},loader@{LOADER}:0:{STALL_S},kill@{KILLED}:1"
WATCH = {"stall_floor_s": 2, "startup_s": 60, "grace_s": 2, "rules": {"stall": {"action": "dump"}}}
SAVED = KILLED - KILLED % EVERY


def trainer(drills: str, **changes: object) -> dict[str, object]:
    """Returns a phase that runs the real trainer with these drills."""
    return {
        "name": "one", "config": str(CONFIG), "flags": {"NSA_DRILL": drills},
        "set": small(report__log_every=1, data__prefetch=1, **changes),
    }  # fmt: skip


@pytest.fixture(scope="module")
def ended(begin: Begin) -> Started:
    """The launch after its second attempt."""
    started = begin(
        trainer(DRILLS, train__steps=KILLED + 5, checkpoint__every=EVERY),
        watch=WATCH, restart={"when": "crash", "attempts": 1, "backoff_s": 0.5},
    )  # fmt: skip
    started.wait_end()
    return started


def fired(started: Started, kind: str, rank: int) -> dict[str, object]:
    """Returns the record that a rank wrote before its drill began."""
    found = heartbeats(started.run(), rank, "drill")
    return next(r for r in found if r["state"] == "fires" and r["drill"].startswith(f"{kind}@"))


def verdict(started: Started, kind: str, rank: int) -> tuple[dict[str, object], float]:
    """Returns the first verdict after the start of a drill, and its seconds after this start."""
    struck = fired(started, kind, rank)["ts"]
    paths = sorted((started.run() / rundir.VERDICTS).iterdir())
    found = [rundir.read_json(path) for path in paths]
    first = next(each for each in found if each["ts"] > struck)
    return first, first["ts"] - struck


def steps_after(started: Started, attempt: int, rank: int = 0) -> list[int]:
    records = heartbeats(started.run(), rank, "progress")
    return [r["step"] for r in records if r["attempt"] == attempt]


@pytest.mark.fault("6")
def test_a_rank_that_hangs_in_a_backward_hook_is_named_and_its_stack_has_the_line(scene, ended):
    said, seconds = verdict(ended, "backward", 1)
    assert (said["rank"], said["phase"], said["step"]) == (1, "backward", HOOK)
    assert said["sentence"].startswith(f"rank 1 has been stalled in backward of step {HOOK} since ")
    assert said["sentence"].endswith(f"; rank 0 waits in backward; {BEING_READ}")
    struck_ms = fired(ended, "backward", 1)["ts"] * 1000
    dumps = sorted(ended.run().glob("stackdump_rank1_*.txt"))
    dump = next(path for path in dumps if int(path.stem.split("_")[2]) > struck_ms).read_text()
    assert "trainers/faults.py" in dump
    assert "<lambda>" in dump
    assert steps_after(ended, 1)[-1] > HOOK
    saved = HOOK - HOOK % EVERY
    lost = counted(HOOK - 1 - saved, "step")
    assert f"costs {lost} (newest checkpoint: step {saved})" in said["action"]
    scene.note(said["sentence"], seconds)


def test_a_stall_that_ended_by_itself_is_called_slow_afterwards(ended):
    """The last document of each stall has its end."""
    paths = sorted((ended.run() / rundir.VERDICTS).iterdir())
    found = [rundir.read_json(path) for path in paths]
    for kind, rank, step in (("backward", 1, HOOK), ("loader", 0, LOADER)):
        struck = fired(ended, kind, rank)["ts"]
        ends = [each["end"] for each in found if each["step"] == step and each["ts"] > struck]
        assert " (slow); " in ends.pop(), found
        assert set(ends) <= {"replaced by the next verdict"}


@pytest.mark.fault("7", "stall")
def test_a_loader_that_stalls_is_named_as_the_fetch_of_its_rank(scene, ended):
    said, seconds = verdict(ended, "loader", 0)
    assert (said["rank"], said["phase"], said["step"]) == (0, "fetch", LOADER)
    assert said["sentence"].startswith(f"rank 0 has been stalled in fetch of step {LOADER} since ")
    assert said["sentence"].endswith(f"; rank 1 waits in backward; {BEING_READ}")
    assert steps_after(ended, 1)[-1] > LOADER
    scene.note(said["sentence"], seconds)


@pytest.mark.fault("1", "restart")
def test_a_killed_rank_goes_on_from_the_checkpoint_before_it(scene, ended):
    events = ended.events(0)
    again = next(event for event in events if event.get("state") == "restarting")
    assert f"rank 1 was killed by SIGKILL at step {KILLED}" in again["text"]
    assert f"attempt 2 starts in 0.5 s from the checkpoint of step {SAVED}" in again["text"]
    lost = steps_after(ended, 1)[-1] - SAVED
    assert 0 <= lost <= EVERY
    assert steps_after(ended, 2)[:5] == [*range(SAVED + 1, SAVED + 6)]
    scene.note(again["text"], again["ts"] - fired(ended, "kill", 1)["ts"])
