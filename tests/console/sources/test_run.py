"""The state of a run directory, from its documents, records and processes."""

from __future__ import annotations

import json
import os
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from console import status_text
from console.sources import liveness
from console.sources.run import RunSource
from console.sources.run_records import RECENT_BYTES
from tests.console.sources import directory
from trainers.contract import rundir
from trainers.contract.pulse import PulseWriter

DEAD = directory.DEAD


def test_the_status_shows_the_backend_of_each_branch_without_escapes(launch, run):
    held = {"cmp": "masked", "win": "banded (flash-attn is not installed)\x1b[31m\x1b]0;x\x07"}
    directory.document(run / rundir.ENV, {"v": 1, "backend": held})
    lines = list(status_text.status_lines(RunSource(launch).poll()))
    assert "  attention: cmp masked, win banded (flash-attn is not installed)" in lines


def test_the_newest_recorded_figures_are_shown_if_the_last_step_has_none(launch, run):
    for step, figures in enumerate(({"loss": 3.0}, {"loss": 2.5}, {}, {"loss": None}), start=1):
        directory.beat(run, 0, step, steps_dt_s=[0.1], **figures)
    state = RunSource(launch).poll()
    loss = state.figures["loss"]
    assert (loss.value, loss.window, state.step) == (2.5, "step 2", 4)


def test_a_launch_shows_its_current_run_with_figures_windows_and_ages(launch, run):
    for step in (1, 2, 3):
        for rank in (0, 1):
            directory.beat(run, rank, step, loss=5.5 - step, toks_per_s=1000.0 * step,
                           steps_dt_s=[0.1, 0.3], gate_branch_shares=[0.2, 0.3, 0.5])  # fmt: skip
    directory.sample(run, ranks=[{"rank": 1, "state": "S", "cpu_pct": 99.0, "rss_mib": 512.0}])
    state = RunSource(launch).poll()
    shown = (state.id, state.state, state.step, state.steps_planned)
    assert shown == ("toy/0-first", "running", 3, 100)
    loss = state.figures["loss"]
    assert (loss.value, loss.unit, loss.window) == (2.5, "nats/token", "step 3")
    assert state.figures["toks_per_s"].window == "last 2 steps"
    assert state.figures["step_p99_s"].value == 0.3
    assert state.figures["gate_share_win"].value == 0.5
    assert state.figures["disk_free_gib"].value == 3.5
    assert state.ranks[1].cpu_pct == 99.0
    assert state.data_age_s is not None
    assert state.data_age_s < 60
    assert state.environment == {"NSA_LR": "0.2"}
    assert state.decided == {"NSA_ACCUM": "4", "NSA_OPT_FUSED": "1"}
    assert state.launch is not None
    assert state.launch.next_flags[0].value == "0.1"
    assert state.launch.phases[1].state == "later"


@pytest.mark.parametrize(
    ("state", "has_eta"), [("running", True), ("halting", False), ("stopping", False)]
)
def test_a_run_that_is_being_ended_has_no_time_until_its_last_step(launch, run, state, has_eta):
    for step in range(1, 20):
        directory.beat(run, 0, step, steps_dt_s=[0.1], ts=time.time() - 20 + step)
    directory.change(run / rundir.SUPERVISOR, state=state)
    assert (RunSource(launch).poll().eta_s is not None) == has_eta


def test_a_directory_of_a_legacy_run_opens_with_the_values_that_it_has(tmp_path):
    path = directory.legacy(tmp_path / "old", 60, 5)
    state = RunSource(path).poll()
    assert (state.state, state.step, state.attempt) == ("unsupervised", 60, 1)
    assert [rank.rank for rank in state.ranks] == [0, 1]
    assert state.figures["loss"].value == 5.72
    assert state.figures["gate_entropy_mean"].value == pytest.approx(1.0986, abs=1e-4)
    assert "grad_norm" not in state.figures
    again = rundir.heartbeat(path, 0).read_text().replace("22412", "22413").replace(": 60,", ": 7,")
    with rundir.heartbeat(path, 0).open("a") as stream:
        stream.write(again)
    state = RunSource(path).poll()
    assert (state.attempt, state.step) == (2, 7)


def test_each_rank_of_a_legacy_run_has_its_attempts_although_only_the_ends_are_read(tmp_path):
    """The second start is in the end of the shorter file only."""
    path = directory.legacy(tmp_path / "old", 60, 5)
    for rank, padding in ((0, "x" * 200), (1, "")):
        lines = rundir.heartbeat(path, rank).read_text()
        for pid in (22412, 22413):
            for step in range(1, 1301):
                record = {"ts": time.time(), "pid": pid, "rank": rank, "step": step, "msg": "beat"}
                lines += json.dumps(record | {"more": padding}) + "\n"
        rundir.heartbeat(path, rank).write_text(lines)
    halves = [rundir.heartbeat(path, rank).stat().st_size // 2 for rank in (0, 1)]
    assert halves[1] < RECENT_BYTES - 1000 < RECENT_BYTES + 1000 < halves[0]
    for reads in ("recent", "all"):
        state = RunSource(path, reads=reads).poll()
        assert (state.attempt, [rank.rank for rank in state.ranks]) == (2, [0, 1]), reads
    os.truncate(rundir.heartbeat(path, 1), 1 << 40)  # more than the memory of the machine
    assert RunSource(path).poll().attempt == 2


def second_phase(launch):
    """Starts the second phase of a launch."""
    directory.run(launch / "1-second")
    phases = [{"name": "first", "state": "completed", "dir": "0-first"},
              {"name": "second", "state": "running", "dir": "1-second"}]  # fmt: skip
    directory.change(launch / rundir.PLAN_STATE, phase=1, phases=phases)


def test_the_next_phase_replaces_the_run_and_its_history(launch, run):
    directory.beat(run, 0, 7, loss=5.0)
    source = RunSource(launch)
    assert source.poll().step == 7
    second_phase(launch)
    after = source.poll()
    assert after.id == "toy/1-second"
    assert after.figures == {}
    assert source.series.points("loss") == ()


def test_live_pulses_are_read_from_shared_memory(launch, run, shared_memory):
    writer = PulseWriter(rundir.pulse(shared_memory, 0), 0)
    writer.set(12, "backward")
    directory.run(run, live_dir=str(shared_memory))
    alert = {"alert": "stall", "ts": time.time(), "level": "crit", "text": "rank 1 hangs"}
    directory.document(
        shared_memory / rundir.LIVE_STATUS,
        {"v": 1, "ts": time.time(), "state": "stalled", "why": "rank 1", "alerts": [alert]},
    )
    state = RunSource(launch).poll()
    assert (state.state, [a.text for a in state.alerts]) == ("stalled", ["rank 1 hangs"])
    found = state.ranks[0].pulse
    assert found is not None
    assert (found.step, found.phase, found.live) == (12, "backward", True)
    assert found.since_s < 60


@pytest.mark.parametrize("reused", [False, True])
def test_the_pulse_of_a_process_whose_pid_was_reused_is_not_live(
    launch, run, shared_memory, reused
):
    PulseWriter(rundir.pulse(shared_memory, 0), 0).set(12, "backward")
    directory.run(run, live_dir=str(shared_memory))
    worker = rundir.identity() | {"rank": 0, "exit": None}
    worker["start_ticks"] -= reused
    directory.change(run / rundir.SUPERVISOR, workers=[worker])
    assert (RunSource(launch).poll().ranks[0].pulse is None) == reused


def test_the_supervisor_heartbeat_outweighs_events_on_alerts(launch, run, shared_memory):
    now = time.time()
    directory.run(run, live_dir=str(shared_memory))
    stall = {"alert": "stall", "ts": now - 60, "level": "crit", "text": "rank 1 hangs"}
    directory.event(run, "alert", **stall)
    directory.event(run, "ack", alert="stall", ts=now - 50)
    told = {"v": 1, "ts": now, "state": "stalled", "why": "rank 1", "alerts": [stall]}
    directory.document(shared_memory / rundir.LIVE_STATUS, told)
    for at in (now - 30, now + 1e6):
        directory.event(run, "clear", alert="stall", ts=at)
        directory.event(run, "alert", alert="forged", ts=at, level="crit", text="all is lost")
        assert [a.text for a in RunSource(launch).poll().alerts] == ["rank 1 hangs"]
    again = stall | {"ts": now - 5, "text": "rank 1 hangs again"}
    for ts in (now, now - 60):
        directory.change(shared_memory / rundir.LIVE_STATUS, ts=ts, alerts=[again])
        found = {a.text: a.acknowledged for a in RunSource(launch).poll().alerts}
        assert found.get("rank 1 hangs again", False) is False
    assert "all is lost" in found


def test_a_blocked_write_is_shown_only_while_the_supervisor_heartbeat_is_recent(
    launch, run, shared_memory
):
    directory.run(run, live_dir=str(shared_memory))
    for age_s, blocked_s in ((0, 47), (3600, 0)):
        status = {"v": 1, "ts": time.time() - age_s, "state": "running", "blocked_s": 47}
        directory.document(shared_memory / rundir.LIVE_STATUS, status)
        assert RunSource(launch).poll().directory_blocked_s == blocked_s


EARLIER, PRESENT = (
    {"sentence": f"rank {rank} is stopped", "rank": rank, "cause": "stopped", "sure": "high"}
    for rank in (1, 0)
)


@pytest.mark.parametrize("source", ["event", "heartbeat"])
def test_a_state_newer_than_the_document_has_its_own_verdict_or_none(
    launch, run, shared_memory, source
):
    """A full disk keeps the document, which has the verdict on an earlier stall."""
    directory.run(run, state="stalled", verdict=EARLIER, live_dir=str(shared_memory),
                  updated_ts=time.time() - 300)  # fmt: skip
    assert RunSource(launch).poll().verdict.rank == 1
    if source == "event":
        directory.event(run, "state", attempt=1, state="stalled", why="rank 0 is stopped")
        assert RunSource(launch).poll().verdict is None
        return
    told = {"v": 1, "ts": time.time(), "state": "stalled", "why": "", "verdict": PRESENT}
    directory.document(shared_memory / rundir.LIVE_STATUS, told)
    assert RunSource(launch).poll().verdict.rank == 0


def test_an_unsupervised_run_has_no_verdict_because_its_stall_may_be_over(launch, run):
    worker = {"rank": 0, **rundir.identity(), "exit": None}
    directory.run(run, 1, "stalled", verdict=EARLIER, workers=[worker], **DEAD)
    directory.event(run, "alert", alert="stall", level="crit", text=EARLIER["sentence"])
    directory.event(run, "alert", alert="disk", level="crit", text="3 GiB are free")
    state = RunSource(launch).poll()
    assert (state.state, state.verdict) == ("unsupervised", None)
    assert [alert.id for alert in state.alerts] == ["disk"]
    directory.change(run / rundir.SUPERVISOR, workers=[worker | DEAD])
    state = RunSource(launch).poll()
    assert (state.state, state.verdict.rank) == ("lost", 1)
    assert "stall" not in [alert.id for alert in state.alerts]


def test_without_shared_memory_the_sampled_pulse_ages(launch, run):
    held = {"step": 9, "phase": "forward", "since_s": 4.0, "collectives": 2}
    directory.sample(run, ts=time.time() - 30, ranks=[{"rank": 0, "state": "S", "pulse": held}])
    found = RunSource(launch).poll().ranks[0].pulse
    assert found is not None
    assert not found.live
    assert 29 < found.age_s < 60
    assert 33 < found.since_s < 64


def test_a_state_event_that_is_newer_than_the_document_counts(launch, run):
    directory.run(run, world=0, updated_ts=time.time() - 5, **DEAD)
    directory.event(run, "state", state="crashed", why="rank 1 was killed by SIGKILL")
    state = RunSource(launch).poll()
    assert (state.state, state.why) == ("crashed", "rank 1 was killed by SIGKILL")
    directory.run(run, state="halted", updated_ts=time.time() + 5)
    assert RunSource(launch).poll().state == "halted"


def test_the_last_record_counts_where_a_sample_is_older(launch, run):
    held = {"step": 7, "phase": "forward", "since_s": 0.1, "collectives": 2}
    directory.sample(run, ranks=[{"rank": 0, "state": "S", "pulse": held}])
    directory.beat(run, 0, 9, "exit", reason="done")
    directory.run(run, state="completed")
    state = RunSource(launch).poll()
    assert state.step == 9
    assert state.ranks[0].pulse is not None
    assert (state.ranks[0].pulse.step, state.ranks[0].pulse.phase) == (9, "exit")
    assert state.ranks[0].exit == "exited (code 0)"


def test_the_last_step_counts_although_its_record_was_lost(launch, run):
    directory.beat(run, 0, 9)
    ends = [{"attempt": attempt, "rank": 0, "step": step} for attempt, step in ((1, 70), (2, 20))]
    directory.run(run, state="completed", attempt=2, ends=ends)
    assert RunSource(launch).poll().step == 20


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"v": 99, "state": "running"}', "is of version 99; this console reads 1"),
        (b"garbage", "cannot be read as a JSON object"),
    ],
)
def test_a_document_that_cannot_be_shown_is_named_and_ignored(launch, run, content, says):
    (launch / rundir.PLAN_STATE).write_bytes(content)
    (run / rundir.SUPERVISOR).write_bytes(content)
    state = RunSource(run).poll()
    texts = {alert.text for alert in state.alerts}
    assert texts == {f"{rundir.PLAN_STATE} {says}", f"{rundir.SUPERVISOR} {says}"}
    assert state.state == "queued"
    assert state.launch is not None
    assert (state.launch.state, state.launch.why) == ("unknown", f"{rundir.PLAN_STATE} {says}")


def test_a_document_of_an_earlier_run_raises_no_alert_in_the_next_run(launch, run):
    source = RunSource(launch)
    (run / rundir.SUPERVISOR).write_bytes(b"garbage")
    assert "document supervisor.json" in {alert.id for alert in source.poll().alerts}
    second_phase(launch)
    after = source.poll()
    assert (after.id, after.alerts) == ("toy/1-second", ())


def test_a_launch_that_lost_its_supervisor_before_it_had_a_run_is_lost(tmp_path):
    path = directory.launch(tmp_path)
    directory.change(path / rundir.PLAN_STATE, supervisor=rundir.identity() | DEAD)
    assert RunSource(path).poll().state == "lost"


def test_an_old_sample_shows_no_use(launch, run):
    """The sample of rank 1 is 30 s old; that of rank 3 may be from before the exit of rank 3."""
    used = {"state": "R", "cpu_pct": 99.0, "rss_mib": 512.0}
    directory.sample(run, ts=time.time() - 30, ranks=[used | {"rank": 1}])
    directory.sample(run, ts=time.time() - 1, host="other", ranks=[used | {"rank": 2}])
    directory.sample(run, ts=time.time() - 1, host="third", ranks=[used | {"rank": 3}])
    directory.beat(run, 3, 5, "exit", exit_code=0)
    old, new, exited = RunSource(launch).poll().ranks[1:]
    assert (exited.exit, exited.cpu_pct, exited.rss_mib) == ("exited (code 0)", None, None)
    assert (old.state, old.cpu_pct, old.rss_mib) == ("", None, None)
    assert (new.state, new.cpu_pct, new.rss_mib) == ("R", 99.0, 512.0)


def test_alerts_are_raised_acknowledged_and_cleared(launch, run):
    source = RunSource(launch)
    directory.event(run, "alert", alert="a", level="warn", text="slow")
    directory.event(run, "alert", alert="b", level="crit", text="rank 1 is stopped", key="3")
    assert [a.id for a in source.poll().alerts] == ["b", "a"]
    directory.event(run, "ack", alert="b")
    assert [(a.id, a.acknowledged) for a in source.poll().alerts] == [("a", False), ("b", True)]
    directory.event(run, "clear", alert="a")
    assert [a.id for a in source.poll().alerts] == ["b"]


def test_lost_gpus_keep_their_row(launch, run):
    gpus = [
        {"index": 0, "name": "H200", "state": "ok", "util_pct": 97, "power_w": 412.5},
        {"index": 1, "name": "H200", "state": "lost", "why": "GPU is lost"},
    ]
    directory.sample(run, gpus=gpus, ranks=[{"rank": 0}, {"rank": 1}])
    state = RunSource(launch).poll()
    assert [(g.index, g.state) for g in state.gpus] == [(0, "ok"), (1, "lost")]
    assert state.ranks[0].gpu is not None
    assert state.ranks[0].gpu.power_w == 412.5


def test_a_rank_shows_the_gpu_of_cuda_visible_devices(launch, run):
    gpus = [{"index": i, "name": "H200", "state": "ok"} for i in range(4)]
    directory.sample(run, gpus=gpus)
    for devices, expected in (("2,3", [2, 3]), ("GPU-1a2b,3", [None, 3]), ("1", [1, None])):
        flags = {"CUDA_VISIBLE_DEVICES": {"value": devices, "origin": "--devices"}}
        directory.change(run / rundir.RUN, flags=flags)
        shown = [rank.gpu and rank.gpu.index for rank in RunSource(launch).poll().ranks]
        assert shown == expected, devices


@pytest.mark.parametrize(
    "named", ["/dev/shm/nsa-console-x/../../etc", "/dev/shm/nsa-console-none", "/etc", ""]
)
def test_only_a_live_directory_of_ours_is_one(named):
    assert liveness.live_directory(rundir.identity() | {"live_dir": named}) is None


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
NAMED = st.dictionaries(
    st.sampled_from(
        ["v", "state", "why", "attempt", "workers", "rank", "pid", "host", "phase", "phases",
         "next_flags", "supervisor", "verdict", "gates", "settings", "flags", "argv", "live_dir",
         "since_ts", "gpus", "ranks", "disk", "ts", "kind", "alert", "level", "text", "backend",
         "start_ticks", "boot_id", "updated_ts", "dir", "name"]
    ),
    VALUES | st.lists(st.dictionaries(st.sampled_from(["rank", "pid", "exit", "state", "name",
                      "dir", "index", "pulse", "result"]), VALUES, max_size=5), max_size=3),
    max_size=8,
)  # fmt: skip


@given(st.tuples(*[NAMED] * 7))
@settings(max_examples=60)
def test_no_document_makes_the_reader_raise(tmp_path_factory, documents):
    path = directory.launch(tmp_path_factory.mktemp("hostile"))
    run = directory.run(path / "0-first")
    plan, plan_state, born, supervisor, sample, event, beat = documents
    directory.document(path / rundir.PLAN_STATE, plan_state)
    directory.document(path / rundir.PLAN, {"phases": [{"dir": "0-first"}]} | plan)
    directory.document(run / rundir.RUN, born)
    directory.document(run / rundir.SUPERVISOR, supervisor)
    directory.document(run / rundir.GATES, plan)
    directory.document(run / rundir.ENV, born)
    directory.append(rundir.samples(run, "x"), {"ts": time.time()} | sample)
    directory.append(run / rundir.EVENTS, event)
    directory.beat(
        run, 0, 1, **{k: v for k, v in beat.items() if k not in ("rank", "v", "attempt")}
    )
    RunSource(path).poll()
    RunSource(run).poll()
