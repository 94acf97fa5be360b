"""Snapshots of real runs with restarts, replaced working processes and adoptions."""

from __future__ import annotations

import json
import os
import signal
from itertools import pairwise
from typing import Any

import pytest

from console.sources import snapshot
from console.sources.run_records import RunRecords
from console.sources.series import SPANS_S
from tests.console.sources.snapshots import same_state
from tests.launches import STUB, Started, phase
from trainers.contract import rundir

OFTEN = """
import sys
if "console.supervisor" in sys.orig_argv:
    from console.supervisor import snapshot_writer
    snapshot_writer.EVERY_S = 0.5
"""


@pytest.fixture
def shell(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(OFTEN)
    return {"PYTHONPATH": f"{tmp_path}:{STUB['PYTHONPATH']}"}


def check_history(started: Started) -> None:
    """Checks that the history has each span of samples, and that lines on one span are equal."""
    for level in range(len(SPANS_S)):
        path, found = snapshot.history(started.run(), level), {}
        for line in path.read_bytes().splitlines() if path.exists() else ():
            record = json.loads(line)
            key = record["of"], record["ts"]
            assert found.setdefault(key, record) == record
        begins = sorted(ts for of, ts in found if of.startswith("samples"))
        assert all(after - ts == SPANS_S[level] for ts, after in pairwise(begins))


def test_a_replaced_process_goes_on_from_the_snapshot_that_its_owner_keeps(begin, tmp_path, shell):
    one = phase("one", "member.py", 5, "until", tmp_path / "go", gates={"loss_finite": True})
    started = begin(one, shell=shell, nproc=2)
    for _ in range(2):
        started.wait(lambda: (started.run() / rundir.SNAPSHOT).exists())
        held = started.run() / rundir.SNAPSHOT
        held.unlink()
        started.wait(held.exists)
        child = started.child()
        os.kill(child, signal.SIGSTOP)
        held.write_text("[garbage")
        os.kill(child, signal.SIGKILL)
        started.wait(lambda child=child: started.child() != child)
    started.wait((started.run() / "history_10s.jsonl").exists)
    (tmp_path / "go").touch()
    ended = started.wait_end()["phases"][0]
    assert (ended["state"], ended["result"]) == ("completed", "pass"), ended
    assert RunRecords(started.run(), "recent").has_snapshot
    check_history(started)


def test_the_snapshot_of_a_run_that_crashed_and_was_restarted_tells_what_its_records_tell(
    begin, shell
):
    started = begin(
        phase("one", "member.py", 100_000), shell=shell, nproc=2, watch={"grace_s": 2},
        restart={"when": "crash", "attempts": 2, "backoff_s": 0.1},
    )  # fmt: skip
    started.wait_steps(5)
    os.kill(started.pids()[1], signal.SIGKILL)
    started.wait(lambda: started.state().get("attempt") == 2)
    started.wait_steps(20)
    assert started.ask("stop")["ok"]
    started.wait_end()
    records = RunRecords(started.run(), "recent")
    assert records.has_snapshot
    same_state(started.run())
    check_history(started)


SLOW = """
if "console.supervisor" in sys.orig_argv:
    import time
    from console.sources import snapshot
    load = snapshot.load
    snapshot.load = lambda *given: time.sleep(5) or load(*given)
"""


def test_a_stop_before_a_replaced_process_has_read_the_snapshot_forgets_nothing(
    begin, tmp_path, shell
):
    (tmp_path / "sitecustomize.py").write_text(OFTEN + SLOW)
    started = begin(
        phase("one", "member.py", 100, "leave", gates={"loss_finite": True}), shell=shell, nproc=2,
        watch={"grace_s": 2}, restart={"when": "crash", "attempts": 2, "backoff_s": 600},
    )  # fmt: skip
    since_ts = started.wait_state("restarting")["since_ts"]

    def newer(ts: float) -> dict[str, Any]:
        found = rundir.read_json(started.run() / rundir.SNAPSHOT) or {"ts": 0.0}
        return found if found["ts"] > ts else {}

    # When the second snapshot is written, the owner has the first, which has all records too.
    first = started.wait(lambda: newer(since_ts))
    written = started.wait(lambda: newer(first["ts"]))
    (phase_one,) = started.plan_state["phases"]
    assert phase_one["state"] == "restarting"
    before = phase_one["steps"]
    child, owner = started.child(), started.plan_state["supervisor"]["pid"]
    os.kill(child, signal.SIGSTOP)
    os.kill(owner, signal.SIGTERM)
    os.kill(child, signal.SIGKILL)
    ended = started.wait_end()["phases"][0]
    assert (ended["state"], ended["steps"]) == ("stopped", before)
    assert rundir.read_json(started.run() / rundir.SNAPSHOT)["folds"] == written["folds"]
    gate = rundir.read_json(started.run() / rundir.GATES)["gates"][0]
    assert (gate["result"], gate["why"]) == ("unknown", "the records were not read")
