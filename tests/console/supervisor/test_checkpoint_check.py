"""New checkpoints are loaded by another process, which may fail, hang or end too late."""

from __future__ import annotations

import os
import time

import pytest

from console.plan import Checkpoints
from console.sources.record_files import Batch, Cursor
from console.sources.reducer import Reducer
from console.sources.run import RunSource
from console.sources.series import Series
from console.sources.summary import Summary
from console.supervisor import program
from console.supervisor.alerts import Alerts
from console.supervisor.checkpoint_check import CheckpointCheck
from console.supervisor.rundir_io import Directory, event_record
from tests import broken
from tests.console.sources import directory
from tests.launches import HANG_GUARD_S
from trainers.contract import rundir

FINE = "echo some line; echo fine"
WAITS = 'while [ ! -e "{}" ]; do sleep 0.02; done; '
"""The start of a script that waits for a file, which the test creates later."""


class Trial:
    """A check with a shell script in place of the loading program, and the recorded events."""

    def __init__(self, folder, script=FINE, **plan):
        self.run, self.events, self.summary = folder, [], Summary(2, 1, 0)
        self.reducer, directory = Reducer(Series(keeps=False), self.summary), Directory()
        self.alerts = Alerts(self.event, directory)
        self.check = CheckpointCheck(
            folder, Checkpoints(**{"load": True, **plan}), self.event, self.alerts, self.reducer,
            ("sh", "-c", script, "sh"),
        )  # fmt: skip
        directory.close()

    def event(self, kind, text, level="info", **more):
        self.events.append(event_record(1, kind, text, level, **more))
        return self.events[-1]

    def results(self):
        return [(each["what"], each["step"], each["result"], each["level"])
                for each in self.events if each["kind"] == "checkpoint"]  # fmt: skip

    def saved(self, *steps, is_recorded=True):
        for step in steps:
            path = self.run / rundir.CHECKPOINTS / f"step_{step:08d}"
            path.mkdir(parents=True, exist_ok=True)
            path.with_name(rundir.LATEST).write_text(f"{path.name}\n")
            if is_recorded:
                self.check.poll(1, step)
        return self

    def read(self, rank, msg, step, attempt=1, **fields):
        record = {"rank": rank, "msg": msg, "step": step, "attempt": attempt} | fields
        name = rundir.heartbeat(self.run, rank).name
        self.reducer.add(Batch(name, [record], Cursor()))

    def finish(self, attempt=1, step=0):
        until = time.monotonic() + HANG_GUARD_S
        while self.check.doing:
            assert time.monotonic() < until, self.events
            time.sleep(0.01)
            self.check.poll(attempt, step)
        return self.results()


def test_a_checkpoint_is_loaded_once_for_each_save_and_counts_for_the_gate(tmp_path):
    trial = Trial(tmp_path, 'nice; echo "$CUDA_VISIBLE_DEVICES"; test -d "$1" && echo fine')
    assert trial.saved(5).finish(1, 5) == [("load", 5, "pass", "info")]
    assert (trial.events[-1]["text"], trial.summary.loaded) == (
        "checkpoint step 5 is loaded: fine", {5: 1},
    )  # fmt: skip
    read = Summary(1, 1, 0)
    read.add_event(trial.events[-1])
    assert read.loaded == {5: 1}, "a reader counts the load from the event"
    assert len(trial.saved(5).finish()) == 1
    assert len(trial.finish()) == 1
    trial.check.poll(2, 5)
    again = len(trial.finish(2, 5)), trial.summary.loaded
    assert again == (2, {5: 2}), "attempt 2 has saved the step again"


def test_a_checkpoint_that_is_removed_while_a_newer_one_exists_is_no_failure(tmp_path):
    """The load may end before the record of the newer checkpoint is read."""
    script = WAITS.format(tmp_path / "go") + "rmdir $1; exit 15"
    trial = Trial(tmp_path, script).saved(5).saved(6, is_recorded=False)
    (tmp_path / "go").touch()
    assert trial.finish(1, 5)[0] == ("load", 5, "unknown", "info")


def test_a_failed_save_is_an_alert_until_all_ranks_record_a_later_save(tmp_path):
    trial = Trial(tmp_path, load=False)
    for rank in (0, 1):
        trial.read(rank, "resume", 40)
        trial.read(rank, "checkpoint_failed", 60, error="No space left on device")
        trial.check.poll(1, 0)
    ((name, alert),) = trial.alerts.open().items()
    assert (name, alert["level"]) == ("checkpoint-save", "crit")
    assert alert["text"] == "a save failed: No space left on device; newest checkpoint: step 40"
    trial.alerts.clear_all("the attempt has ended")
    trial.read(0, "resume", 40, attempt=2)
    trial.check.poll(2, 0)
    assert trial.alerts.open(), "attempt 2 has not saved yet"
    trial.read(0, "checkpoint", 80, attempt=2)
    trial.check.poll(2, 80)
    assert not trial.alerts.open()
    assert [each["kind"] for each in trial.events] == ["alert", "clear"]


def test_a_failed_save_stays_an_alert_while_a_rank_has_recorded_no_later_save(tmp_path):
    trial = Trial(tmp_path, load=False)
    for rank, msg, open_alerts in (
        (0, "checkpoint", 0), (1, "checkpoint_failed", 1), (0, "checkpoint_failed", 1),
        (0, "checkpoint", 1), (1, "checkpoint", 0),
    ):  # fmt: skip
        trial.read(rank, msg, 60)
        trial.check.poll(1, 60)
        assert len(trial.alerts.open()) == open_alerts


def test_without_a_thread_no_check_is_waited_for(tmp_path):
    trial = Trial(tmp_path)
    trial.check._threads.shutdown()  # no thread starts, as at the limit of processes
    with pytest.raises(RuntimeError):
        trial.saved(5)
    assert (trial.check.doing, trial.results()) == ("", [])


def test_a_load_holds_for_the_file_of_its_own_attempt(tmp_path):
    summary = Summary(1, 2, 0)
    for attempt, result in ((1, "pass"), (2, "fail"), (2, "pass")):
        facts = {"step": 5, "what": "load", "result": result}
        summary.add_event(event_record(attempt, "checkpoint", "", **facts))
        assert summary.loaded == ({5: attempt} if result == "pass" else {})


def test_a_program_that_succeeds_is_a_success_however_late_it_is_noticed():
    ended = program.run(["true"], dict(os.environ), 3.0, stopped=lambda: bool(time.sleep(4)))
    assert (ended.code, ended.failure) == (0, "")


@pytest.mark.parametrize(
    ("script", "result", "level", "text"),
    [
        ("echo bad file; exit 15", "fail", "crit", "does not load: bad file"),
        ("sleep 600", "unknown", "warn", "ran longer than 0.3 s and was ended"),
        ("trap '' TERM; sleep 1 & wait; wait", "unknown", "warn", "ran longer than 0.3 s"),
        ("kill -9 $$", "unknown", "warn", "was killed (SIGKILL)"),
        ("echo no module; exit 1", "unknown", "warn", "exited (code 1) no module"),
        ("rmdir $1; exit 15", "fail", "crit", "does not load"),
    ],
)
def test_a_load_that_does_not_succeed_says_why(tmp_path, script, result, level, text):
    limit = {"load_s": 0.3} if "ran longer" in text else {}
    trial = Trial(tmp_path, script, backup=("touch", str(tmp_path / "backup")), **limit)
    assert trial.saved(5).finish() == [("load", 5, result, level)]
    assert text in next(each for each in trial.events if each["kind"] == "checkpoint")["text"]
    opened = trial.alerts.open()
    assert list(opened) == ["checkpoint-load"] * (level != "info"), opened
    assert not (tmp_path / "backup").exists()
    assert trial.summary.loaded == {}
    trial.alerts.raise_("stall", "rank 1 is stalled")
    trial.alerts.clear_all("the attempt has ended")
    assert trial.alerts.open() == opened, "the end of an attempt repairs no checkpoint"
    trial.check._loads, trial.check._plan = ("sh", "-c", FINE, "sh"), Checkpoints(load=True)
    trial.saved(10).finish()
    assert not trial.alerts.open(), "the next checkpoint loads"


def test_the_newest_checkpoint_replaces_those_that_wait_and_a_stop_ends_it(tmp_path):
    trial = Trial(tmp_path, WAITS.format(tmp_path / "go") + "echo fine").saved(5, 10, 15)
    (tmp_path / "go").touch()
    assert trial.finish(1, 15) == [("load", 5, "pass", "info"), ("load", 15, "pass", "info")]
    slow = Trial(tmp_path, f"sleep {2 * HANG_GUARD_S}").saved(20)
    slow.check.stop()
    assert slow.finish(1, 25) == [("load", 20, "unknown", "info")]
    assert slow.alerts.open() == {}


def test_a_program_that_no_signal_ends_does_not_hold_up_the_run(tmp_path, monkeypatch):
    # KILL comes too late, as on a disk that does not answer. TERM comes after the trap is set.
    monkeypatch.setattr(program, "GRACE_S", 60.0)
    monkeypatch.setattr(program, "SPARE_S", -59.7)
    deaf = "trap '' TERM; for second in 1 2 3 4 5 6 7 8 9; do sleep 1; done"
    trial = Trial(tmp_path, deaf, load_s=4.0)
    assert trial.saved(5).finish() == [("load", 5, "unknown", "warn")]
    assert "a hung disk?" in trial.events[0]["text"]
    stopped = Trial(tmp_path, deaf).saved(5)
    stopped.check.stop()
    assert stopped.finish() == [("load", 5, "unknown", "info")]


@pytest.mark.parametrize(
    ("group", "used_mib", "cached_mib", "result"),
    [(1, 600, 0, "unknown"), (1, 600, 200, "pass"), (1, 400, 0, "pass"), (0, 600, 0, "pass")],
)
def test_no_load_risks_the_training_where_one_oom_kill_ends_all(
    tmp_path, monkeypatch, group, used_mib, cached_mib, result
):
    directory.cgroup(tmp_path, monkeypatch, **{
        "memory.events": "oom_kill 0\n", "memory.max": f"{1 << 30}",
        "memory.oom.group": f"{group}", "memory.current": f"{used_mib << 20}",
        "memory.stat": f"anon 1\nactive_file {cached_mib << 20}\n",
    })  # fmt: skip
    trial = Trial(tmp_path).saved(5)
    assert trial.finish()[0][2] == result
    assert ("memory.oom.group=1" in trial.events[0]["text"]) is (result == "unknown")


@pytest.mark.parametrize(
    ("words", "result", "text"),
    [
        (("sh", "-c", 'echo "got $1"', "sh"), "pass", "is backed up: got {path}"),
        (("echo", "to={checkpoint}/x"), "pass", "is backed up: to={path}/x"),
        (("sh", "-c", "echo disk full; exit 3"), "fail", "sh exited (code 3): disk full"),
        (("no-such-program",), "fail", "(code 127): "),
        (("rmdir", "{checkpoint}", "/no"), "fail", "is not backed up: rmdir exited"),
        (("echo", "$HOME;id"), "pass", "is backed up: $HOME;id {path}"),
    ],
)
def test_a_back_up_gets_the_path_after_the_load(tmp_path, words, result, text):
    trial = Trial(tmp_path, backup=words).saved(5)
    assert [each[:3] for each in trial.finish()] == [("load", 5, "pass"), ("backup", 5, result)]
    (found,) = (each["text"] for each in trial.events if each.get("what") == "backup")
    assert text.format(path=tmp_path / rundir.CHECKPOINTS / "step_00000005") in found
    assert list(trial.alerts.open()) == ["checkpoint-backup"] * (result == "fail")


def test_a_run_waits_for_the_check_of_its_last_checkpoint_and_its_gate_counts_it(begin, tmp_path):
    # The load begins after the supervisor has recorded that all processes have ended.
    waits = (
        """while '"stopping"' not in (self._run / "events.jsonl").read_text(): time.sleep(0.05)"""
    )
    slow = broken.shell(tmp_path, "checkpoint_check.CheckpointCheck._load", waits)
    started = begin(
        {"name": "one"}, config="configs/tiny_cpu.yaml", module="trainers.ddp", shell=slow,
        set={"data.source": "synthetic", "train.steps": 4, "report.out_dir": str(tmp_path)},
        gates={"steps_done": 4, "checkpoints_loaded_at_least": 1}, checkpoints={"load": True},
    )  # fmt: skip
    assert "gate checkpoints_loaded_at_least failed (0 loads" in started.wait_end()["why"]
    (event,) = (each for each in started.events(0) if each["kind"] == "checkpoint")
    assert (event["step"], event["result"]) == (4, "unknown"), "the small torch loads nothing"
    (alert,) = started.alerts("checkpoint-load")
    assert (alert["kind"], alert["level"]) == ("alert", "warn"), "the end does not clear it"
    assert alert["text"] in [each.text for each in RunSource(started.run()).poll().alerts]
    kinds = [each["kind"] for each in started.events(0)]
    assert kinds.index("checkpoint") < len(kinds) - 1 - kinds[::-1].index("state")
    assert "stopping" in [each.get("state") for each in started.events(0)], "no rank runs any more"
