"""Sources that are wrong, missing or of another run end no rank; true ones have their effect."""

from __future__ import annotations

import itertools
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import time

import pytest

from console import actions
from console.commands.watchdog import make_watchdog
from console.sources import process
from console.sources.run import RunSource
from console.supervisor import offline
from tests import broken
from tests.console.sources import directory
from tests.faults.conftest import WATCH
from tests.faults.scene import all_run, console, order, plant_kill, sentence_of, state_of, status
from tests.launches import STUB, phase
from trainers.contract import environ, rundir

ACTED_S = 6.0
"""Longer than the time until a watch rule restarts a run: three limits, and the polls."""
decision = pytest.mark.decision


LINES = ("Sending process 5 closing signal SIGTERM", "Received 15 death signal, shutting down")


@decision("end-others", "lie")
@pytest.mark.fault("e")
def test_lines_in_torchruns_log_end_no_rank_and_refuse_no_restart(scene, launch, orders):
    started = launch(restart={"when": "crash", "attempts": 3, "backoff_s": 0.2})
    pids = started.pids()
    for words in LINES:
        order(orders, 1, f"speak {words}")
    time.sleep(WATCH["grace_s"] + 1.5)
    scene.goes_on(started, pids)
    started.wait_state("running")
    os.kill(pids[1], signal.SIGKILL)
    started.wait(lambda: started.state()["attempt"] == 2 and started.pids())
    scene.note("nothing to see; a rank that is killed then is restarted all the same")


@decision("end-others", "absent")
@pytest.mark.fault("e", "an exit without a failure")
def test_a_rank_that_ends_well_ends_no_other(scene, launch, orders):
    started = launch(restart={"when": "never"}, watch=WATCH | {"stall_floor_s": 60})
    pids = started.pids()
    order(orders, 1, "exit 0")
    started.wait(lambda: process.state(pids[1]) in (process.GONE, "Z"))
    time.sleep(WATCH["grace_s"] + 1.5)
    assert process.state(pids[0]) in "RSD"
    assert not [e for e in started.events(0) if e["kind"] == "alert"]


@decision("act-on-stall", "true")
@pytest.mark.fault("h", "a real stall")
def test_a_stall_that_pulses_and_records_show_is_restarted_in_time(scene, launch, orders):
    started = launch()
    begun = time.monotonic()
    order(orders, 1, "sleep 3600")
    started.wait(lambda: started.state()["attempt"] == 2 and started.pids())
    scene.note("restart, by the watch rule stall", time.monotonic() - begun)


@decision("act-on-stall", "lie")
@pytest.mark.fault("h", "pulse")
def test_a_pulse_that_stands_still_while_records_show_steps_restarts_nothing(scene, launch, orders):
    started = launch()
    pids = started.pids()
    words = scene.inject(started, lambda: order(orders, 1, "mute"), sentence_of("pulse"))
    assert words.startswith("rank 1 records later steps than its pulse shows")
    scene.goes_on(started, pids, ACTED_S)
    started.wait_state("running")


@pytest.mark.fault("h", "records of a rank that are lost")
def test_records_of_a_rank_that_are_lost_raise_one_alert_until_they_are_read_again(
    scene, launch, orders, tmp_path
):
    setup = "from console.supervisor import monitor; monitor.UNWRITTEN_S = 3.0"
    started = launch(shell=broken.shell(tmp_path, "launch.Launch.tick", "pass", setup))
    pids = started.pids()
    words = scene.inject(started, lambda: order(orders, 1, "limit 1024"), sentence_of("records"))
    found = re.fullmatch(
        r"records of rank 1 are lost or delayed \(rank 1: newest record read (\d+), newest queued "
        r"(\d+)\): gates may be unknown; check the disk, its quota and ulimit -f", words,
    )  # fmt: skip
    assert found is not None, words
    assert 0 < int(found[1]) < int(found[2])
    order(orders, 1, "limit -1")
    started.wait(lambda: len(started.alerts("records")) == 2)
    raised, cleared = started.alerts("records")
    assert (raised["kind"], raised["level"], cleared["kind"]) == ("alert", "warn", "clear")
    scene.goes_on(started, pids)


@decision("act-on-figure", "lie")
@pytest.mark.fault("h", "record")
def test_a_nan_that_one_rank_alone_records_halts_nothing(scene, launch, orders):
    rules = {"non_finite": {"action": "halt"}}
    started = launch(watch=WATCH | {"stall_floor_s": 60, "rules": rules})
    pids = started.pids()
    lie = "figures " + json.dumps({"loss": "nan"})
    words = scene.inject(
        started, lambda: order(orders, 0, lie), sentence_of("non_finite-withheld")
    )  # fmt: skip
    assert words.startswith("halt withheld, no second source confirms it: ")
    scene.goes_on(started, pids)
    assert not (started.run() / rundir.HALT).exists()
    order(orders, 1, lie)
    started.wait_state("halted")
    assert (started.run() / rundir.ANOMALY).read_text() == "nan_loss\n"
    scene.ended(started, "halted", 4)


@decision("act-on-stall", "absent")
@pytest.mark.fault("f")
def test_removed_shared_memory_stalls_and_restarts_nothing(scene, launch):
    started = launch()
    pids = started.pids()
    live = started.state()["live_dir"]
    words = scene.inject(started, lambda: shutil.rmtree(live), sentence_of("live-directory"))
    assert "was removed during the run" in words
    scene.goes_on(started, pids, ACTED_S)
    state = started.wait(lambda: (s := RunSource(started.path).poll()).state == "running" and s)
    assert state.step is not None
    events = started.events(0)
    assert not [event for event in events if event["kind"] == "watch"]
    # On a busy machine, a rank may make no progress for longer than the stall limit.
    began = [record["mono"] for record in started.heartbeats()]
    longest_s = max(after - before for before, after in itertools.pairwise(began))
    assert longest_s > WATCH["stall_floor_s"] or not [e for e in events if e["kind"] == "verdict"]


@decision("own-directory", "absent")
@pytest.mark.fault("g", "moved away, launched into again")
def test_a_moved_launch_and_a_new_one_at_its_path_do_not_touch_each_other(
    scene, begin, orders, tmp_path
):
    plan = begin.options(phase("one", "obedient.py", 100_000, orders), watch=WATCH).plan
    path, away = tmp_path / "here", tmp_path / "away"
    first = begin.launch(actions.LaunchOptions(plan, run_dir=path), STUB)
    first.wait_steps(5)
    pids, owner = first.pids(), first.owner["pid"]
    first.path = path.rename(away)
    second = begin.launch(actions.LaunchOptions(plan, run_dir=path), STUB)
    second.wait_steps(5)
    assert {record["pid"] for record in second.heartbeats()} == {second.pids()[0]}
    assert second.ask("stop")["ok"]
    assert second.wait_over()["supervisor"]["pid"] != owner
    assert all_run(pids)
    told = first.wait(lambda: [e for e in first.events(0) if e.get("alert") == "own-directory"])
    shutil.rmtree(path)
    away.rename(path)
    first.path = path
    scene.goes_on(first, pids)
    scene.note(told[0]["text"])
    scene.stop(first)


@decision("own-directory", "lie")
@pytest.mark.fault("g", "replaced by a copy of a stopped one")
def test_a_copy_of_a_stopped_launch_in_its_place_stops_nothing(scene, launch, tmp_path):
    stopped = launch()
    assert stopped.ask("halt")["ok"]
    stopped.wait_over()
    started = launch()
    pids, away = started.pids(), tmp_path / "away"
    path = started.path
    path.rename(away)
    shutil.copytree(stopped.path, path)
    shutil.copyfile(away / rundir.LOCK, path / rundir.LOCK)
    planted = plant_kill(path / "0-one")
    time.sleep(3)
    assert all_run(pids)
    assert planted.exists()
    started.path = away
    owner = started.plan_state["supervisor"]
    os.kill(owner["pid"], signal.SIGTERM)
    started.wait(lambda: not rundir.is_alive(owner))
    assert not process.with_token(started.token())
    assert planted.exists()
    scene.note("nothing in the copy is obeyed; TERM to the supervisor ends the ranks")


@decision("own-directory", "true")
@pytest.mark.fault("n")
def test_a_halt_file_in_the_launch_directory_halts_the_run_and_the_plan(scene, launch, orders):
    phases = [phase(name, "obedient.py", 100_000, orders) for name in ("one", "two")]
    started = launch(*phases)
    scene.inject(started, (started.path / rundir.HALT).touch, state_of("halted"))
    ended = started.wait_end()
    assert [entry["state"] for entry in ended["phases"]] == ["halted", "later"]
    why = scene.ended(started, "halted", 4)
    assert "requested by .HALT in the launch directory" in why
    scene.note(why)


CLAIMS = (
    {"steps_dt_s": [1e308, 1e308]}, {"loss": 1e308, "grad_norm": -1e308, "toks_per_s": 1e308},
    {"step": 2**62, "attempt": 1}, {"attempt": 2**60}, {"ts": 1e308}, {"ts": -1e308},
    {"dt_forward_s": 1e308, "dt_fetch_s": 1e308, "steps_dt_s": [1e-308]},
    {"gate_entropy_mean": 1e308, "gate_entropy_layers": [[1]], "step": 3.5},
)  # fmt: skip


@pytest.mark.fault("i")
def test_records_that_no_program_writes_harm_nobody(scene, launch, orders):
    started = launch(watch=WATCH | {"stall_floor_s": 60})
    pids = started.pids()
    for claim in CLAIMS:
        order(orders, 1, f"claim {json.dumps(claim)}")
    time.sleep(2)
    scene.goes_on(started, pids)
    started.wait(lambda: status(started.path)[1]["state"] == "running")
    source = offline.OfflineRun(started.path)
    found = source.poll()
    make_watchdog(source.watch, source.settings, True, 1.0).update(found)


@pytest.mark.fault("j")
def test_signals_that_mean_nothing_do_not_end_the_supervisor(scene, launch):
    started = launch()
    pids, owner = started.pids(), started.plan_state["supervisor"]
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT, signal.SIGALRM, signal.SIGHUP,
                   signal.SIGRTMIN + 1, signal.SIGVTALRM, signal.SIGPROF, signal.SIGIO,
                   signal.SIGPWR, signal.SIGXCPU):  # fmt: skip
        os.kill(owner["pid"], number)
        time.sleep(0.05)
    assert rundir.is_alive(owner)
    scene.goes_on(started, pids)


@decision("restart", "absent")
@pytest.mark.fault("k")
def test_a_restart_waits_for_a_directory_that_cannot_be_read(scene, launch):
    started = launch()
    born = started.run() / rundir.RUN
    kept, noise = born.with_name("kept"), born.with_name("noise")
    kept.write_bytes(born.read_bytes())
    noise.write_bytes(bytes(9))
    noise.replace(born)
    scene.inject(
        started, lambda: os.kill(started.pids()[1], signal.SIGKILL), sentence_of("restart-waits")
    )
    time.sleep(2)
    assert started.state()["attempt"] == 2
    kept.replace(born)
    started.wait(lambda: started.pids() and started.state()["state"] == "running")
    assert started.state()["attempt"] == 2


@decision("restart", "lie")
@pytest.mark.fault("k", "of another run")
def test_no_attempt_begins_in_the_directory_of_another_run(scene, launch):
    started = launch()
    token = started.token()
    born, other = started.run() / rundir.RUN, secrets.token_hex(8)
    directory.change_at(born, "environment", environ.TOKEN, to=other)
    os.kill(started.pids()[1], signal.SIGKILL)
    ended = started.wait_end()
    assert "belongs to another run; no further attempt starts" in ended["why"]
    assert not process.with_token(token)
    scene.note(ended["why"])


@decision("restart", "true")
@pytest.mark.fault("o")
def test_other_code_at_a_restart_is_said(scene, launch, orders, tmp_path):
    script = tmp_path / "repository" / "obedient.py"
    script.parent.mkdir()
    shutil.copy("tests/programs/obedient.py", script)
    git = ["git", "-C", str(script.parent), "-c", "user.name=x", "-c", "user.email=x@x"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    one = {"name": "one", "script": str(script), "args": ["100000", str(orders)]}
    started = launch(one, restart={"when": "stall", "attempts": 9, "backoff_s": 0.1})
    first = started.wait(lambda: started.state().get("git"))
    assert len(first["sha"]) == 40
    script.write_text(script.read_text() + "# changed\n")
    words = scene.inject(
        started, lambda: os.kill(started.pids()[1], signal.SIGKILL), sentence_of("code-changed")
    )
    assert words.startswith("the code changed since the launch or the last attempt: commit ")
    again = started.wait(lambda: (s := started.state())["attempt"] == 2 and s["git"] != first and s)
    assert (again["git"]["dirty"], again["ended"][0]["sha"]) == (True, first["sha"])
    (script.parent / ".git").rename(tmp_path / "away")
    os.kill(started.wait(lambda: started.pids().get(1)), signal.SIGKILL)
    third = started.wait(lambda: (s := started.state())["attempt"] == 3 and s["workers"] and s)
    assert third["git"] == {}, "the commit must not be that of a former attempt"


@decision("stop", "true")
@pytest.mark.fault("l")
def test_a_stop_of_a_stalled_run_says_nothing_untrue(scene, launch, orders):
    started = launch(restart={"when": "never"}, watch=WATCH | {"grace_s": 2})
    order(orders, 0, "deaf")
    order(orders, 1, "sleep 3600")
    started.wait_state("stalled")
    assert started.ask("halt", started.run())["ok"]
    source, pending = RunSource(started.path), sentence_of("halt-pending")
    assert "this run is stalled" in started.wait(lambda: pending(source.poll()))
    assert started.wait(lambda: source.poll().why.endswith("; a halt is pending"))
    assert started.ask("stop", started.run())["ok"]
    started.wait_end()
    events = [e["text"] for e in started.events(0) if e["kind"] in ("alert", "clear")]
    assert not [text for text in events if "torchrun" in text and "gone" in text], events
    assert "the ranks step again" not in events
    scene.note(scene.ended(started, "stopped", 4))


@decision("stop", "lie")
@pytest.mark.fault("26", "a stop")
def test_a_process_with_another_token_is_not_stopped(scene, launch):
    started = launch()
    environment = {**os.environ, "NSA_CONSOLE_TOKEN": secrets.token_hex(8)}
    with subprocess.Popen(["sleep", "60"], env=environment) as stranger:
        scene.stop(started)
        assert stranger.poll() is None
        stranger.kill()
    scene.note("only the processes of the run were ended")


@decision("stop", "absent")
@pytest.mark.fault("l", "nothing to signal")
def test_a_stop_of_a_run_that_has_ended_signals_nobody(scene, launch):
    started = launch()
    scene.stop(started)
    code, _, errors = console("stop", started.path)
    assert (code, "Traceback" in errors) == (4, False)
    scene.note(errors.strip())
