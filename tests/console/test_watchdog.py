"""`nsa-console watchdog` on run directories of this project and of the legacy system."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from console.commands.watchdog import make_watchdog
from console.diagnose.rank_evidence import slowest
from console.supervisor import offline
from tests.console.sources import directory
from trainers.contract import rundir
from trainers.contract.member import Member
from trainers.contract.pulse import PulseWriter

ROOT = Path(__file__).parents[2]
QUICK = {"stall_floor_s": 0.5, "startup_s": 0.5, "stall_act_s": 1.0}
PATIENT = QUICK | {"stall_floor_s": 15.0, "stall_act_s": 16.0}
"""Limits for a live run: longer than a delay of its writer, and shorter than the run."""
HANG_GUARD_S = 150


@contextmanager
def watchdog(path: Path, *words: str):
    """Yields a running `nsa-console watchdog`, and kills it afterwards."""
    process = subprocess.Popen(
        [sys.executable, "-m", "console", "watchdog", str(path), "--json", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def until(seen, process) -> None:
    end = time.monotonic() + HANG_GUARD_S
    while not seen():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)


def told(process, rule: str) -> list[dict]:
    """Returns the lines of a watchdog up to its first line about a rule."""
    lines = [json.loads(process.stdout.readline())]
    while lines[-1]["rule"] != rule:
        lines.append(json.loads(process.stdout.readline()))
    return lines


@pytest.fixture
def run(tmp_path):
    """A run without pulses whose supervisor is alive; every 20th step has a record."""
    path = directory.run(tmp_path / "0-first")
    directory.change(path / rundir.RUN, watch=QUICK)
    (path / rundir.TRAINING_CSV).write_text("step,loss\n80,2.0\n")
    for step in range(0, 100, 20):
        for rank in (0, 1):
            directory.beat(path, rank, step)
    return path


def test_a_run_that_has_gone_silent_is_halted_once(run):
    with watchdog(run, "--halt", "--interval", "0.1") as process:
        until((run / rundir.ANOMALY).exists, process)
        assert "watchdog" in (run / rundir.HALT).read_text()
        (run / rundir.HALT).unlink()
        directory.beat(run, 0, 100, loss="nan")
        lines = told(process, "non_finite")
        time.sleep(0.5)  # in this time, a second halt would be written
        process.send_signal(signal.SIGTERM)
        lines += map(json.loads, process.stdout)
        assert process.wait(HANG_GUARD_S) == 0
    assert (run / rundir.ANOMALY).read_text() == "heartbeat_stall\n"
    assert not (run / rundir.HALT).exists()
    assert [(c["kind"], c["rule"]) for c in lines if c["rule"] == "stall"] == [
        ("raise", "stall"), ("act", "stall"),
    ]  # fmt: skip
    assert "no record since" in lines[0]["text"]


def changes(path: Path, halt: bool = True) -> list[tuple[str, str, str]]:
    """Returns the changes of the rules in a simulated minute with an unchanged directory."""
    source = offline.OfflineRun(path)
    now = source.poll()
    dog = make_watchdog(source.watch, source.settings, halt, 1.0)
    found = []
    for second in range(60):
        seen = tuple(replace(each, unchanged_s=each.unchanged_s + second) for each in now.ranks)
        moment = replace(now, mono=now.mono + second, ts=now.ts + second, ranks=seen)
        found += [(c.kind, c.rule.name, c.text) for c in dog.update(moment)]
    return found


@pytest.mark.decision("act-on-stall", "lie")
def test_a_run_whose_records_stop_while_its_other_files_grow_is_not_halted(run):
    os.utime(run / rundir.TRAINING_CSV, (time.time() + 60, time.time() + 60))
    raised, withheld = changes(run)
    assert (raised[:2], withheld[:2]) == (("raise", "stall"), ("withhold", "stall"))
    says = "halt withheld, no second source confirms it: training.csv was written"
    assert withheld[2].startswith(says)


@pytest.mark.decision("act-on-stall", "absent")
def test_without_another_file_that_a_training_writes_silence_is_only_said(run):
    (run / rundir.TRAINING_CSV).unlink()
    assert offline.stall_doubt(run) == "only its records show whether the run makes progress"
    assert [kind for kind, _, _ in changes(run)] == ["raise", "withhold"]
    (run / rundir.TRAINING_CSV).touch()
    assert offline.stall_doubt(run) == ""
    later_ts = time.time() + 3600  # as if the clock was set back after the write
    os.utime(rundir.heartbeat(run, 0), (later_ts, later_ts))
    assert offline.stall_doubt(run) == "the newest record is in the future"


def test_a_run_that_cannot_be_read_for_a_moment_is_watched_further(run, monkeypatch):
    set_away = directory.unreadable(monkeypatch, run)
    source = offline.OfflineRun(run)
    set_away(True)
    assert source.poll() is None
    set_away(False)
    assert source.poll() is not None
    assert source.watch.stall_floor_s == QUICK["stall_floor_s"], "run.json is read later too"
    set_away(True)
    assert source.poll().stall_doubt, "its files confirm no stall"
    set_away(False)
    assert source.poll().stall_doubt == ""


@pytest.mark.parametrize(("attempt", "said"), [(1, ["model_size", "stall"]), (2, ["stall"])])
def test_env_json_of_this_attempt_is_checked_and_that_of_another_is_not(run, attempt, said):
    record = {"v": 1, "attempt": attempt, "config": "m7c_125m.yaml", "parameters": 254_499}
    directory.document(run / rundir.ENV, record)
    assert sorted(rule for _, rule, _ in changes(run, halt=False)) == said


def test_without_halt_it_only_says_so(run):
    assert [found[:2] for found in changes(run, halt=False)] == [("raise", "stall")]


def test_a_healthy_run_is_left_alone_to_its_end(run):
    directory.change(run / rundir.RUN, watch=PATIENT)

    def train() -> None:
        for step in range(100, 1500, 20):
            for rank in (0, 1):
                directory.beat(run, rank, step, loss=2.0, grad_norm=1.0, steps_dt_s=[0.005] * 20)
            time.sleep(0.3)
        directory.change(run / rundir.SUPERVISOR, state="completed")

    trainer = threading.Thread(target=train)
    trainer.start()
    with watchdog(run, "--halt", "--interval", "0.5") as process:
        out, err = process.communicate(timeout=HANG_GUARD_S)
    trainer.join()
    assert (process.returncode, err) == (0, "")
    assert json.loads(out.splitlines()[-1])["text"] == "toy/0-first is completed"
    assert not (run / rundir.HALT).exists()
    assert not (run / rundir.ANOMALY).exists()


@pytest.mark.parametrize(
    ("step", "text"),
    [(81, "rank 1 has been stalled in forward of step 81 since"), (41, "no record since")],
    ids=["pulses", "pulses that the records disprove"],
)
def test_pulses_tell_which_rank_stands_still(run, step, text):
    live = rundir.SHARED_MEMORY / f"{rundir.LIVE_PREFIX}test-{secrets.token_hex(4)}"
    live.mkdir(mode=0o700)
    try:
        for rank, phase in ((0, "backward"), (1, "forward")):
            PulseWriter(rundir.pulse(live, rank), rank).set(step, phase)
        directory.change(run / rundir.SUPERVISOR, live_dir=str(live))
        with watchdog(run, "--interval", "0.1") as process:
            line = json.loads(process.stdout.readline())
    finally:
        shutil.rmtree(live)
    assert line["text"].startswith(text)


@pytest.mark.parametrize("settings", [{}, {"train.steps": {"value": 900}}])
def test_only_in_a_trainer_an_evaluation_is_known_to_come_last_in_a_step(run, settings):
    pulses = [{"step": 81, "phase": phase, "since_s": 1.0, "age_s": 1.0, "collectives": 0}
              for phase in ("eval", "backward")]  # fmt: skip
    directory.change(run / rundir.RUN, settings=settings, watch={"eval_s": 100})
    directory.sample(run, ranks=[{"rank": n, "pulse": each} for n, each in enumerate(pulses)])
    found = slowest(offline.OfflineRun(run).poll().ranks)
    assert [each.phase for each in found] == (["backward"] if settings else ["eval", "backward"])


def test_a_halt_from_before_a_resume_is_requested_again_with_the_new_reason(run):
    """The rank ignores the `.HALT` of the training that it resumes in the same directory."""
    (run / rundir.HALT).write_text("by hand\n")
    (run / rundir.ANOMALY).write_text("heartbeat_stall\n")
    rank = Member(run, {})
    rank._watcher.start()
    try:
        directory.beat(run, 0, 100, loss="nan")
        directory.beat(run, 1, 100, loss="nan")
        assert not rank.halt_reason
        with watchdog(run, "--halt", "--interval", "0.1") as process:
            until(lambda: rank.halt_reason == rundir.HALT, process)
            act = next(c for c in map(json.loads, process.stdout) if c["kind"] == "act")
    finally:
        rank.close(100)
    assert (act["rule"], act["text"].startswith(".HALT is written: ")) == ("non_finite", True)
    assert (run / rundir.HALT).read_text().startswith("by hand\nrequested by watchdog ")
    assert (run / rundir.ANOMALY).read_text() == "nan_loss\n"


def test_a_halt_that_cannot_be_written_is_tried_again_at_each_poll(run):
    """`.HALT` is a dangling link, so it cannot be written, as on a full disk."""
    (run / rundir.HALT).symlink_to("nowhere")
    with watchdog(run, "--halt", "--interval", "0.1") as process:
        assert "retrying; further failures are not reported" in process.stderr.readline()
        time.sleep(0.5)  # in this time, a second failure would be reported
        assert process.poll() is None
        (run / rundir.HALT).unlink()
        until((run / rundir.ANOMALY).exists, process)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=HANG_GUARD_S)
    lines = [json.loads(line) for line in out.splitlines()]
    assert [(c["kind"], c["rule"]) for c in lines] == [("raise", "stall"), ("act", "stall")]
    assert (lines[1]["text"].startswith(".HALT is written: "), err) == (True, "")


def test_a_halt_that_failed_is_not_tried_again_after_its_rule_cleared(run):
    (run / rundir.HALT).symlink_to("nowhere")
    going = threading.Event()

    def train() -> None:
        step = 100
        while not going.wait(0.1):
            step += 1
            for rank in (0, 1):
                directory.beat(run, rank, step, loss=2.0, grad_norm=1.0)

    with watchdog(run, "--halt", "--interval", "0.1") as process:
        assert "retrying" in process.stderr.readline()
        trainer = threading.Thread(target=train)
        trainer.start()
        try:
            while json.loads(process.stdout.readline())["kind"] != "clear":
                pass
            (run / rundir.HALT).unlink()
            time.sleep(0.5)  # in this time, the halt would be tried again
            assert not (run / rundir.HALT).exists()
        finally:
            going.set()
            trainer.join()


def test_nothing_is_written_through_a_link(run, tmp_path):
    (tmp_path / "link").symlink_to(run)
    with watchdog(tmp_path / "link", "--halt") as process:
        assert process.wait(HANG_GUARD_S) == 4
        assert "is a link" in process.stderr.read()
        assert "stall" not in process.stdout.read()


def test_a_slow_run_of_the_legacy_system_is_no_stall_and_its_zero_gradient_none(tmp_path):
    """A record comes every 35 minutes, rank 1 records no progress, and the gradient norm is 0."""
    assert changes(directory.legacy(tmp_path / "slow", 35 * 60, 34 * 60)) == []


def test_a_silent_run_of_the_legacy_system_is_seen_by_its_own_rhythm_until_it_ends(tmp_path):
    path = directory.legacy(tmp_path / "silent", 60, 3600)
    with watchdog(path, "--halt", "--interval", "0.1") as process:
        line = json.loads(process.stdout.readline())
        assert (line["kind"], line["rule"]) == ("raise", "stall")
        assert "(step 60); the stall limit is 300 s" in line["text"]
        (path / "metrics.json").write_text("{}")
        process.communicate(timeout=HANG_GUARD_S)
    assert process.returncode == 4, "metrics.json does not say whether the run completed"
    assert not (path / rundir.HALT).exists()


def test_a_loss_that_is_not_finite_halts_a_run_of_the_legacy_system(tmp_path):
    path = directory.legacy(tmp_path / "nan", 60, 1, loss="NaN")
    with watchdog(path, "--halt", "--interval", "0.1") as process:
        until((path / rundir.ANOMALY).exists, process)
    assert (path / rundir.HALT).exists()
    assert (path / rundir.ANOMALY).read_text() == "nan_loss\n"


def test_in_words_a_change_is_a_line_with_the_time_of_day(tmp_path):
    path = directory.legacy(tmp_path / "nan", 60, 1, loss="NaN")
    (path / "metrics.json").write_text("{}")
    os.utime(path / "metrics.json")
    done = subprocess.run(
        [sys.executable, "-m", "console", "watchdog", str(path)],
        cwd=ROOT, capture_output=True, text=True, timeout=HANG_GUARD_S,
    )  # fmt: skip
    first, last = done.stdout.splitlines()
    text = "the loss was not finite in 4 steps of this attempt, last at step 60 or before"
    assert first[8:] == f" crit raise non_finite: {text}"
    assert "the run has ended" in last
