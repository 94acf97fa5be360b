"""The monitor of one attempt, also of ranks that ran before the monitor started."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from console.diagnose.evidence import Evidence
from console.diagnose.rank_evidence import RankEvidence
from console.model import Verdict
from console.plan import Phase, Watch
from console.sources.reducer import LatestRecords, Reducer
from console.sources.series import Series
from console.sources.summary import Summary
from console.stop_cost import completed, stop_cost
from console.supervisor import monitor, sampling
from console.supervisor.alerts import Alerts
from console.supervisor.monitor import Monitor
from console.supervisor.rundir_io import Directory, event_record
from trainers.contract import rundir

WATCH = Watch(stall_floor_s=10, startup_s=60, stall_act_s=20)
SAMPLE = SimpleNamespace(rss_mib={}, gpus=(), disk={}, csv=None, env={})


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Stops the clocks of the monitor, so that a pause of this process does not change a stall."""
    found = SimpleNamespace(at=time.monotonic(), now=time.time())
    found.time, found.monotonic = lambda: found.now, lambda: found.at
    found.CLOCK_BOOTTIME, found.clock_gettime = time.CLOCK_BOOTTIME, lambda _: found.monotonic()
    for module in (monitor, sampling):
        monkeypatch.setattr(module, "time", found)
    return found


class Stage:
    """A monitor of two ranks, and the events that the monitor writes."""

    def __init__(self, path, settings=None, late=False, actions=None, heads=dict):
        self.events, self.directory, self.path = [], Directory(), path / "run"
        (self.path / rundir.VERDICTS).mkdir(parents=True)
        self.context = SimpleNamespace(
            watch=WATCH, phase=Phase("one"), actions=actions or {}, path=self.path,
            reducer=Reducer(Series(keeps=False), Summary(2, 1, 0)),
            observers=SimpleNamespace(
                alerts=Alerts(self.event, self.directory),
                run=lambda name, look, otherwise: look(),
            ),
            services=SimpleNamespace(directory=self.directory),
        )  # fmt: skip
        run = SimpleNamespace(event=self.event, publish=lambda: None, settings=settings or {})
        self.dog = Monitor(self.context, run, heads, late)

    def event(self, kind, text, level="info", **more):
        self.events.append((kind, level, text))
        return {}

    def poll(
        self, still, ending="", states="SS", step=50, phases=("backward", "fetch"), halting=False
    ):
        seen = [
            RankEvidence(rank, -1, state, step, phase, still, records_s=still)
            for rank, (state, phase) in enumerate(zip(states, phases, strict=True))
        ]
        self.dog.poll(SAMPLE, [] if ending else seen, ending, halting, unread="")

    def alerts(self):
        """Returns level and text of each alert that was raised."""
        return [(level, text) for kind, level, text in self.events if kind == "alert"]

    def ends(self):
        """Returns the ends of all verdicts in the run directory, the oldest first."""
        self.directory.close()
        paths = sorted((self.path / rundir.VERDICTS).iterdir(), key=lambda path: int(path.stem))
        return [(rundir.read_json(path) or {}).get("end", "none") for path in paths]


@pytest.mark.decision("act-on-stall", "lie")
@pytest.mark.parametrize("late", [True, False])
def test_who_comes_late_acts_on_no_pulse_that_it_has_not_seen_change(tmp_path, clock, late):
    """Pulses and records that do not change may be copies, while the ranks make progress."""
    stage, second = Stage(tmp_path, late=late, actions={"stall": "restart"}), 0
    clock.monotonic = lambda: second

    def actions(first: int, step: int) -> list[str]:
        nonlocal second
        for second in range(first, first + 60):
            stage.poll(float(second - first), step=step, phases=("forward", "forward"))
        return [change.action for change in stage.dog.pop_actions()]

    assert actions(1000, step=50) == ([] if late else ["restart"])
    texts = [text for kind, _, text in stage.events if kind == "alert"]
    unseen = [text for text in texts if "rank 0 has not changed since the supervisor" in text]
    assert len(unseen) == late
    assert actions(2000, step=51) == ["restart"]
    stage.directory.close()


MOVES = RankEvidence(0, -1, "S", 50, "step", 0.2, records_s=0.2)
WAITS = RankEvidence(0, -1, "S", 0, "boot", 500.0)
SILENT = RankEvidence(1, -1, "S", 0, "", 500.0)


@pytest.mark.parametrize(
    ("ranks", "settings", "level"),
    [
        ((replace(SILENT, rank=0), SILENT), {}, "warn"),
        ((MOVES, SILENT), {}, "warn"),
        ((WAITS, SILENT), {}, "crit"),
        ((replace(SILENT, rank=0), SILENT), {"train.steps": 9}, "crit"),
        ((MOVES, SILENT), {"train.steps": 9}, "crit"),
        ((MOVES, replace(SILENT, unchanged_s=50.0)), {}, ""),
    ],
    ids=["no rank joins", "one rank joins", "one rank waits for the other", "a trainer",
         "a rank of a trainer", "a rank may still join"],
)  # fmt: skip
def test_ranks_of_a_foreign_program_without_join_are_not_stalled(tmp_path, ranks, settings, level):
    stage = Stage(tmp_path, settings=settings)
    for _ in range(4):
        stage.dog.poll(SAMPLE, ranks, "", halting=False, unread="")
    raised = [(of, text) for kind, of, text in stage.events if kind == "alert"]
    assert [of for of, _ in raised] == ([level] if level else [])
    assert (stage.dog.verdict is not None) == (level == "crit")
    if level == "warn":
        assert " did not call join" in raised[0][1]
        assert raised[0][1].endswith("; see docs/extend.md")
    stage.directory.close()


@pytest.mark.parametrize(("heads", "unjoined"), [({}, True), ({0: LatestRecords()}, False)])
def test_a_program_whose_pulses_are_lost_has_joined_if_it_has_records(tmp_path, heads, unjoined):
    stage = Stage(tmp_path, heads=lambda: heads)
    stage.context.phase = replace(stage.context.phase, nproc=1)
    stage.dog.poll(SAMPLE, [replace(SILENT, rank=0, doubt="lost")], "", halting=True, unread="")
    assert stage.dog.unjoined is unjoined
    stage.directory.close()


@pytest.mark.parametrize(("settings", "rank"), [({}, None), ({"train.steps": 9}, 1)])
def test_only_in_a_trainer_an_evaluation_is_known_to_come_last_in_a_step(tmp_path, settings, rank):
    stage = Stage(tmp_path, settings=settings)
    stage.poll(59.0, phases=("eval", "backward"))
    assert (stage.dog.verdict and stage.dog.verdict.rank) == rank
    stage.poll(61.0, phases=("eval", "backward"))
    assert stage.dog.verdict is not None
    stage.directory.close()


@pytest.mark.parametrize(
    ("queued", "read", "unread", "alerts"),
    [
        (lambda s: s, lambda s: min(s, 10), "", 1),
        (lambda s: s, lambda s: 0, "", 1),
        (lambda s: s, lambda s: min(s, 10) if s < 70 else s - 1, "", 2),
        (lambda s: 10 * s, lambda s: 10 * (s - 2), "", 0),
        (lambda s: s // 50 * 1000, lambda s: (s - 1) // 50 * 1000, "", 0),
        (lambda s: 6, lambda s: 5, "", 0),  # a rank that is stopped or holds the GIL
        (lambda s: s, lambda s: min(s, 10), "not all records have been read", 0),
        (lambda s: 0, lambda s: 0, "", 0),  # a program without a pulse
    ],
)
def test_records_are_late_only_if_a_rank_queues_more_and_none_is_read(
    tmp_path, clock, queued, read, unread, alerts
):
    heads, start = {0: LatestRecords()}, clock.at
    stage = Stage(tmp_path, heads=lambda: heads)
    for second in range(1, 100):
        clock.at, heads[0].last = start + second, {"n": max(0, read(second)), "ts": 1.0}
        seen = [RankEvidence(0, -1, "S", second, "forward", 0.1, records=queued(second))]
        stage.dog.poll(SAMPLE, seen, "", halting=False, unread=unread)
    stage.directory.close()
    found = [event for event in stage.events if "newest record" in event[2]]
    assert [kind for kind, *_ in found] == ["alert", "clear"][:alerts], stage.events


@pytest.mark.parametrize(
    ("states", "ending", "end"),
    [
        ("SS", "", "12 s in fetch on rank 1 (slow); the ranks step again"),
        ("ST", "", "12 s in fetch on rank 1 (stopped); the ranks step again"),
        ("SS", "stop, requested by ada", "stop, requested by ada"),
    ],
)
def test_a_verdict_ends_with_its_true_reason(tmp_path, states, ending, end):
    """The event, the cleared alert and the document have the same reason."""
    stage = Stage(tmp_path)
    stage.poll(12.0, states=states)
    assert stage.dog.verdict is not None
    stage.poll(0.0, ending, step=51)
    assert stage.dog.verdict is None
    assert ("verdict", "info", f"ended: {end}") in stage.events
    assert ("clear", "info", end) in stage.events
    assert stage.ends() == [end]


@pytest.mark.parametrize("change_s", [-3600, 3600])
def test_a_changed_wall_clock_does_not_change_the_duration_of_a_stall(tmp_path, clock, change_s):
    stage = Stage(tmp_path)
    stage.poll(12.0)
    clock.now += change_s
    clock.at += 3
    stage.poll(15.0)
    stage.poll(0.0, step=51)
    assert stage.ends() == ["15 s in fetch on rank 1 (slow); the ranks step again"]


def test_the_open_stall_of_a_former_supervisor_is_raised_again_and_not_counted_again(
    tmp_path, clock
):
    stage = Stage(tmp_path, late=True)
    summary = stage.context.reducer.summary
    summary.stalled_ts = clock.now - 11
    stage.poll(12.0)
    assert (stage.dog.verdict is not None, summary.stalls) == (True, 0)
    stage.poll(0.0, step=51)
    stage.poll(10.5, step=51)
    assert summary.stalls == 1
    stage.directory.close()


def test_a_stall_that_no_step_ends_is_not_said_to_step_again(tmp_path, clock):
    """A stall also ends when a stopped process runs again, and when the ranks exit."""
    stage = Stage(tmp_path)
    stage.poll(4.0, states="ST")
    stage.poll(4.0)
    clock.now += 0.002  # the name of a verdict's file has the millisecond
    stage.poll(12.0)
    stage.poll(12.0, phases=("exit", "exit"))
    resumed, left = stage.ends()
    assert resumed.startswith("4 s in fetch on rank 1 (stopped); its process runs again")
    assert left == "the ranks exit, or their pulses cannot be trusted"


def test_a_verdict_that_changes_is_replaced_and_one_that_stays_is_not(tmp_path, clock):
    stage = Stage(tmp_path)
    for still in (12.0, 13.0, 14.0):
        stage.poll(still)
    clock.now += 0.002
    stage.poll(15.0, states="ST")
    stage.dog.close("the attempt has ended: completed")
    assert stage.ends() == ["replaced by the next verdict", "the attempt has ended: completed"]


def sampled(stage: Stage, causes: list[str]) -> list[str]:
    """Returns the causes in the events of a stall whose samples of the processes have `causes`.

    Three polls use each sample.
    """
    for number, cause in enumerate(causes, 1):
        stage.dog._evidence.complete = Evidence(ts=float(number))
        for poll in range(3):
            found = Verdict(number + poll / 8, f"it waits: {cause}", cause, 1, "log", 5, "high")
            stage.dog._set_verdict(found, [])
    return [text[10:] for kind, level, text in stage.events if (kind, level) == ("verdict", "crit")]


@pytest.mark.parametrize(
    ("causes", "said"),
    [
        (["timer", "none"] * 9, ["timer"]),
        (["timer", "none", "busy"] * 6, ["timer"]),
        (["timer", "none", "none", "none", "timer", "timer"], ["timer", "none", "timer"]),
    ],
)
def test_a_changed_cause_counts_after_two_equal_samples(tmp_path, causes, said):
    stage = Stage(tmp_path)
    assert sampled(stage, causes) == said
    assert len(stage.ends()) == len(said)


def test_a_stall_has_a_bounded_number_of_verdicts_of_which_the_last_is_current(tmp_path):
    stage = Stage(tmp_path)
    causes = [f"cause {number // 2}" for number in range(4 * monitor.MAX_DOCUMENTS)]
    assert len(sampled(stage, causes)) == monitor.MAX_DOCUMENTS
    assert stage.dog.verdict is not None
    assert stage.dog.verdict.cause == causes[-1]
    stage.dog.close("the attempt has ended: stopped")
    ends = stage.ends()
    assert (len(ends), ends[-1]) == (monitor.MAX_DOCUMENTS, "the attempt has ended: stopped")


@pytest.mark.parametrize(
    ("step", "saved", "reports", "words"),
    [
        (
            918,
            710,
            False,
            "a stop costs 208 steps (newest checkpoint: step 710)",
        ),
        (41, 0, True, "a stop costs all 41 steps (no checkpoint); a halt saves first"),
        (41, 0, False, ""),  # a foreign program may save without a record
        (0, 0, True, "a stop costs no completed step (no checkpoint); a halt saves first"),
        (None, 0, True, ""),
        (None, 710, True, ""),  # the step is not known
    ],
)
def test_the_cost_of_a_stop_is_said_where_it_is_known(step, saved, reports, words):
    found = stop_cost(step, saved, reports, "backward")
    assert found.startswith(words) if words else not found
    assert ("a halt saves" in found) is (reports and bool(words)), "another program may not save"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"checkpoint.every": 100}, "all ranks stop at the same step and save a checkpoint"),
        ({}, "only the trainers of this project save a checkpoint; stop ends it"),
    ],
)
def test_the_answer_to_a_halt_promises_no_more_than_the_program_does(tmp_path, settings, words):
    stage = Stage(tmp_path, settings)
    assert stage.dog.halt_answer().endswith(words)
    stage.directory.close()


def test_a_halt_of_a_program_whose_ranks_have_joined_is_not_said_to_be_ignored(tmp_path):
    joined = dict.fromkeys(range(2), LatestRecords())
    stage = Stage(tmp_path, heads=lambda: joined)
    stage.context.phase = replace(stage.context.phase, nproc=2)
    said = ".HALT is written; all ranks stop at the same step; the program saves a checkpoint only"
    assert stage.dog.halt_answer().startswith(said)
    stage.directory.close()


def test_a_verdict_of_our_program_names_the_cost_of_a_stop(tmp_path):
    stage = Stage(tmp_path, {"checkpoint.every": 100})
    stage.poll(12.0)
    assert stage.dog.verdict.action.startswith("a stop costs all 49 steps (no checkpoint)")
    stage.directory.close()


@pytest.mark.parametrize(
    ("step", "phase", "done"),
    [(50, "fetch", 49), (50, "step", 49), (50, "log", 50), (1, "fetch", 0), (0, "boot", None)],
)
def test_a_stop_costs_only_completed_steps(step, phase, done):
    assert completed(step, phase) == done


def test_the_alert_on_a_stall_precedes_that_on_a_pending_halt(tmp_path):
    """A stop loses steps, and the end of the stall completes the halt with a checkpoint."""
    stage = Stage(tmp_path, {"checkpoint.every": 100})
    stage.poll(12.0, halting=True)
    (stall, of_stall), (halt, of_halt) = stage.alerts()
    assert (stall, halt, "been stalled in" in of_stall) == ("crit", "warn", True)
    assert of_halt.startswith("a halt is pending, and this run is stalled: it halts when the cause")
    stage.directory.close()


def test_a_gate_that_can_no_longer_pass_is_named_while_the_run_continues(tmp_path):
    stage = Stage(tmp_path)
    stage.context.phase = replace(stage.context.phase, gates={"no_stall": True, "bytes_right": 0.9})
    stage.poll(0.1)
    assert stage.alerts() == []
    for _ in range(3):
        stage.poll(12.0)
    (_, _), (level, text) = stage.alerts()
    assert (level, text.partition(" (")[0]) == (
        "warn", "this gate needs an override: FAIL no_stall: 1 stall",
    )  # fmt: skip
    alerts = stage.context.observers.alerts
    alerts.raise_("gate-gpu_mem_below_mib@100", "a restart may repeat its steps")
    alerts.clear_all("the attempt has ended")
    assert list(alerts.open()) == ["gate-no_stall"], "no later attempt can change it"
    alerts.clear_gates("the run has ended")
    assert not alerts.open()
    stage.directory.close()


def test_an_overridden_gate_needs_no_override_after_an_adoption(tmp_path):
    """supervisor.json has the stall; the override is an event, which is read later."""
    stage = Stage(tmp_path)
    stage.context.phase = replace(stage.context.phase, gates={"no_stall": True})
    stage.context.reducer.summary = summary = Summary(2, 1, stalls=1)
    stage.dog.poll(SAMPLE, [], "", halting=False, unread="not read", has_read=False)
    assert stage.alerts() == []
    stage.poll(0.1)
    alerts = stage.context.observers.alerts
    assert list(alerts.open()) == ["gate-no_stall"], "no override has been read"
    summary.add_event(event_record(1, "override", "a switch", gate="no_stall", reason="a switch"))
    stage.poll(0.1)
    assert not alerts.open()
    assert [kind for kind, _, _ in stage.events] == ["alert", "clear"]
    stage.directory.close()


def test_a_halt_whose_checkpoint_is_slow_is_not_said_to_wait_for_a_step(tmp_path):
    stage = Stage(tmp_path, {"checkpoint.every": 100})
    stage.poll(400.0, phases=("save", "save"), halting=True)
    said = f"{stage.dog.verdict.action}. {stage.dog.halt_answer()}"
    assert "a stop costs all 50 steps (no checkpoint); a halt loses no step, but waits" in said
    assert "it halts only when the save ends; stop loses the checkpoint" in said
    assert "step again" not in said
    stage.directory.close()
