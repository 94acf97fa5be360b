"""The actions of watch rules."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from console.diagnose.rules import RULES
from console.diagnose.watchdog import Change
from console.run_state import Facts
from console.supervisor import rule_actions
from console.supervisor.alerts import HALT_FAILED, Alerts
from console.supervisor.rule_actions import Policy
from tests.launches import STUB, phase


@pytest.mark.parametrize(
    ("end", "executed"),
    [("", ["restart"]), ("collect", []), ("over", []), ("next", []), ("halt", []), (".HALT", []),
     ("cleared", [])],
)  # fmt: skip
def test_an_action_needs_its_alert_and_the_processes_of_its_attempt_and_a_restart_no_halt(
    end, executed
):
    """The alert or the ranks may end, or a halt may begin, while the stacks are dumped."""
    ended: list[str] = []
    change = SimpleNamespace(rule=SimpleNamespace(name="stall"), action="restart")
    monitor = SimpleNamespace(
        pop_dump_wanted=frozenset, pop_actions=lambda: [change],
        is_raised=lambda _: end != "cleared",
    )  # fmt: skip
    tree = SimpleNamespace(handles=dict)
    known = Facts(halt_file=end == ".HALT")
    attempt = SimpleNamespace(stage="run", monitor=monitor, tree=tree, known=known)
    run: Any = SimpleNamespace(
        attempt=attempt, path=Path(), live=None, over=False, end=lambda name, _: ended.append(name),
        is_final=end == "halt", event=lambda *_: None,
        alerts=SimpleNamespace(clear=lambda *_: None),
    )  # fmt: skip
    dumps: Any = SimpleNamespace(busy=True, start=lambda *_: None)
    nothing: Any = None
    policy = Policy(nothing, dumps, nothing)
    policy.apply(run)
    dumps.busy, monitor.pop_actions = False, list
    if end == "next":
        run.attempt = SimpleNamespace(stage="run", monitor=monitor, tree=tree)
    elif end in ("collect", "over"):
        attempt.stage = end
    policy.apply(run)
    assert ended == executed


def test_a_halt_that_is_no_longer_wanted_clears_the_alert_on_its_failure(monkeypatch):
    """Its text names the action stop, which costs the work since the last checkpoint."""
    monkeypatch.setattr(rule_actions, "HALT_AGAIN_S", 0.0)
    raised, changes, events = (
        {"disk"},
        [Change("act", RULES["disk"], "full", 0.1, "crit", "halt")],
        [],
    )

    def event(kind: str, text: str, *_: object, **more: object) -> dict[str, str]:
        events.append((kind, text))
        return {"text": text}

    directory: Any = SimpleNamespace(
        reported_job=lambda *_: None,
        write_request=lambda _run, _name, _by, then: then(
            "cannot write .HALT: Disk quota exceeded"
        ),
    )
    monitor = SimpleNamespace(
        pop_dump_wanted=frozenset, is_raised=raised.__contains__,
        pop_actions=lambda: [changes.pop()] if changes else [],
    )  # fmt: skip
    tree, alerts = SimpleNamespace(handles=dict), Alerts(event, directory)
    attempt = SimpleNamespace(monitor=monitor, stage="run", tree=tree, known=Facts())
    run: Any = SimpleNamespace(
        attempt=attempt, path=Path(), live=None, is_final=False, alerts=alerts
    )
    dumps: Any = SimpleNamespace(busy=False, start=lambda *_: None)
    policy = Policy(directory, dumps, lambda *_: "")
    for _ in range(3):
        policy.apply(run)
        assert list(alerts.open()) == [HALT_FAILED], "the halt is tried again"
    raised.clear()
    policy.apply(run)
    assert not alerts.open()
    assert [kind for kind, _ in events] == ["alert", "clear"]


def test_the_policy_promises_no_restart_while_a_halt_is_pending(begin):
    started = begin(phase("one", "member.py", 100_000), shell=STUB, restart={"when": "stall"})
    started.wait_steps(3)
    rank = started.pids()[1]
    os.kill(rank, signal.SIGSTOP)  # so the halt waits for this rank
    before = started.state()["armed"]
    assert "later restart; on crash: restart, 2 left" in before
    assert started.ask("halt")["ok"]
    after = started.wait(lambda: (s := started.state())["armed"] != before and s)
    text = "on stall: alert only; on crash: no restart, because the end of the run was requested"
    assert (after["armed"], after["armed_short"]) == (text, "alert ↻0")
    os.kill(rank, signal.SIGCONT)
    assert started.wait_end()["phases"][0]["state"] == "halted"
