"""An exception in an observer raises an alert and ends no rank."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from console import action_table
from console.supervisor import observers as observers_module
from console.supervisor.alerts import Alerts
from console.supervisor.inbox import Request
from console.supervisor.launch import Launch
from console.supervisor.observers import Observers
from console.supervisor.rundir_io import Directory
from tests import broken, owners
from tests.launches import Started, phase
from trainers.contract import rundir

ALWAYS, ONCE = "len(begun) > 1", "len(begun) == 2"
"""The first call of an observer does not fail."""
OBSERVERS = {
    "processes and pulses": "sampling.Sampler.sample",
    "watch rules": "monitor.Monitor.poll",
    "records": "attempt.Attempt._take_records",
    "files": "run_files.Files.poll",
    "stack dumps": "dump.Dumps.poll",
    "alert hook": "hooks.Hooks.poll",
    "the run directory": "alerts.Alerts.check_directory",
    "the supervisor heartbeat": "live_directory.Live.write_status",
    "the snapshot": "snapshot_writer.Snapshots.poll",
    "supervisor.json": "ends.Ends.documents",
}
GATES = {"loss_finite": True, "no_stall": True, "steps_done": 5}
"""`steps_done` needs the last records; pulses are enough for the other two gates."""
CASES = [*((name, ALWAYS) for name in OBSERVERS), ("processes and pulses", ONCE), ("files", ONCE)]


@pytest.fixture(scope="module")
def launched(begin, tmp_path_factory):
    """A launch for each case; the launches run at the same time.

    The observer of the case fails in its second call only, or in each call after its first. The
    ranks end after all alerts are raised and all requests are answered.
    """
    begun, go = {}, tmp_path_factory.mktemp("observers") / "go"
    for name, when in CASES:
        harm = f"if {when}: raise ArithmeticError('broken on purpose')"
        shell = broken.shell(tmp_path_factory.mktemp("broken"), OBSERVERS[name], harm)
        one = phase("one", "member.py", 5, "until", go, nproc=1, gates=GATES)
        begun[name, when] = begin(one, shell=shell, watch={"grace_s": 2})
    answers = {}
    for (name, when), started in begun.items():
        started.wait(lambda started=started, name=name: alerts_of(started, name))
        answers[name, when] = started.ask("note", text="is served")
    go.touch()
    return {case: (started, answers[case]) for case, started in begun.items()}


def alerts_of(started: Started, name: str) -> list[str]:
    alert = f"observer-{name.replace(' ', '-')}"
    return [e["text"] for e in started.events(0) if e.get("alert") == alert]


@pytest.mark.parametrize(("name", "when"), CASES)
def test_the_ranks_reach_their_end_and_an_alert_names_what_failed(launched, name, when):
    started, answer = launched[name, when]
    assert answer["ok"]
    ended = started.wait_end()
    # Without the files, it is unknown whether the ranks completed or halted.
    expected = "lost" if (name, when) == ("files", ALWAYS) else "completed"
    assert started.state()["state"] == expected, started.state()["why"]
    (end,) = [event for event in started.events(0) if event.get("state") == expected]
    assert end["level"] == ("crit" if expected == "lost" else "info"), "crit starts the hook"
    if name != "supervisor.json":
        assert started.state()["workers"][0]["exit"]["code"] == 0
    failed = f"the observer of {name} failed (ArithmeticError: broken on purpose)"
    assert failed in alerts_of(started, name)[0]
    assert "Traceback" in (started.path / rundir.SUPERVISOR_LOG).read_text()
    whole = when == ONCE or name not in ("records", "files")
    assert ended["phases"][0]["result"] == ("pass" if whole else "unknown")


class Trial:
    """Observers, the kinds of the events that they wrote, and the text of the open alert."""

    def __init__(self, directory: Directory):
        self.kinds: list[str] = []
        self.alerts = Alerts(self._event, directory)

    def _event(self, kind: str, text: str, *_: object, **more: object) -> dict[str, str]:
        self.kinds.append(kind)
        return {"text": text}

    def observers(self) -> Observers:
        return Observers(self.alerts, owners.absent())

    def text(self) -> str:
        (alert,) = self.alerts.open().values()
        return alert["text"]


@pytest.fixture
def trial():
    directory = Directory()
    yield Trial(directory)
    directory.close()


def test_every_request_has_its_method_and_without_one_it_is_answered(trial):
    names = [action.name for action in action_table.TABLE if action.mailboxes]
    assert not [name for name in names if not hasattr(Launch, f"_do_{name.replace('-', '_')}")]
    begun = SimpleNamespace(state="running", _observers=trial.observers(), _requested=set())
    request = Request(Path(), "r1", "explode", {}, "x")
    assert Launch._execute(begun, request)[0] is False
    assert "AttributeError" in trial.text()


def test_an_observer_is_skipped_after_a_failure_and_switched_off_after_three(trial, monkeypatch):
    now = 100.0
    monkeypatch.setattr(observers_module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(observers_module, "WAITS_S", (0.1, 0.2, math.inf))
    monkeypatch.setattr(observers_module, "SETTLED_S", 0.3)
    observers, calls = trial.observers(), []

    def run(fails: bool) -> str:
        def look() -> str:
            calls.append(fails)
            if fails:
                raise ArithmeticError("broken on purpose")
            return "seen"

        return observers.run("it", look, "nothing")

    assert [run(True), run(False)] == ["nothing"] * 2
    assert (len(calls), "tried again in 0.1 s" in trial.text()) == (1, True)
    for wait_s in (0.15, 0.3):
        now += wait_s
        assert run(False) == "seen"
    assert trial.kinds == ["alert", "clear"]
    for wait_s in (0.15, 0.25, 0.25):
        run(True)
        now += wait_s
    assert "it is switched off" in trial.text()
    count = len(calls)
    assert run(False) == "nothing"
    assert len(calls) == count
    trial.alerts.clear_all("the attempt has ended")
    observers.report_switched_off()
    assert trial.text() == "it: this observer failed repeatedly; it is switched off"
