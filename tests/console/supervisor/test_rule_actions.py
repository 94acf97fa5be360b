"""The actions of watch rules."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from console.supervisor.rule_actions import Policy


@pytest.mark.parametrize(
    ("end", "executed"), [("", ["restart"]), ("collect", []), ("over", []), ("next", [])]
)
def test_an_action_needs_the_processes_of_its_attempt(end, executed):
    """The ranks may end while their stacks are dumped; the next attempt may then be due."""
    ended: list[str] = []
    change = SimpleNamespace(rule=SimpleNamespace(name="stall"), action="restart")
    monitor = SimpleNamespace(
        pop_dump_wanted=frozenset, pop_actions=lambda: [change], is_raised=lambda _: True
    )
    tree = SimpleNamespace(handles=dict)
    attempt = SimpleNamespace(stage="run", monitor=monitor, tree=tree)
    run: Any = SimpleNamespace(
        attempt=attempt, path=Path(), live=None, over=False, end=lambda name, _: ended.append(name)
    )
    dumps: Any = SimpleNamespace(busy=True, start=lambda *_: None)
    nothing: Any = None
    policy = Policy(nothing, dumps, nothing)
    policy.apply(run)
    dumps.busy, monitor.pop_actions = False, list
    if end == "next":
        run.attempt = SimpleNamespace(stage="run", monitor=monitor, tree=tree)
    elif end:
        attempt.stage = end
    policy.apply(run)
    assert ended == executed
