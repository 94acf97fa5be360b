"""The watchdog of one attempt: what it does to ranks that it did not see begin."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from console.diagnose.stall import RankEvidence
from console.sources.reducer import Reducer
from console.sources.series import Series
from console.sources.summary import Summary
from console.supervisor import monitor
from console.supervisor.alerts import Alerts
from console.supervisor.monitor import Monitor
from console.supervisor.rundir_io import Directory
from trainers.contract import rundir
from trainers.contract.plan import Watch

WATCH = Watch(stall_floor_s=10, startup_s=60, stall_act_s=20)
SAMPLE = SimpleNamespace(rss_mib={}, gpus=(), disk={}, csv=None, env={})


@pytest.mark.decision("act-on-stall", "lie")
@pytest.mark.parametrize("late", [True, False])
def test_who_comes_late_acts_on_no_pulse_that_it_has_not_seen_change(tmp_path, monkeypatch, late):
    """Pulses and records that stand still may be copies: the ranks themselves may step on."""
    events, second, directory = [], 0, Directory()
    (tmp_path / rundir.VERDICTS).mkdir()

    def event(kind, text, level="info", **more):
        events.append((kind, more.get("alert", more.get("rule", "")), text))
        return {}

    def looks(first: int, step: int) -> None:
        nonlocal second
        for second in range(first, first + 60):
            still = float(second - first)
            seen = tuple(
                RankEvidence(rank, 100, "S", step, "forward", still, records_s=still)
                for rank in (0, 1)
            )
            dog.poll(SAMPLE, seen, ending=False, halting=False, unread="")

    clock = SimpleNamespace(monotonic=lambda: second, time=time.time)
    monkeypatch.setattr(monitor, "time", clock)
    context = SimpleNamespace(
        watch=WATCH, actions={"stall": "restart"}, path=tmp_path,
        reducer=Reducer(Series(keeps=False), Summary(2, 1, 0)),
        observers=SimpleNamespace(
            alerts=Alerts(event, directory), run=lambda name, look, otherwise: look()
        ),
        services=SimpleNamespace(directory=directory),
    )  # fmt: skip
    run = SimpleNamespace(event=event, publish=lambda: None, settings={})
    dog = Monitor(context, run, dict, late)
    looks(1000, step=50)
    directory.close()
    assert [change.action for change in dog.pop_actions()] == ([] if late else ["restart"])
    withheld = [text for kind, name, text in events if name == "stall-withheld"]
    assert ["rank 0 has not changed since the supervisor started" in text for text in withheld] == (
        [True] if late else []
    )
    looks(2000, step=51)
    assert [change.action for change in dog.pop_actions()] == ["restart"]
