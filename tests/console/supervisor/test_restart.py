"""Restarts by the policy, and adoptions by a new supervisor."""

from __future__ import annotations

import os
import signal
import time

import pytest

from console import actions, status_text
from console.model import State
from console.plan import Restart
from console.plans import plan_file
from console.sources import process
from console.sources.run import RunSource
from console.supervisor import restart
from console.supervisor.restart import AttemptEnd, NextAttempt
from tests import broken
from tests.console.sources import directory
from tests.launches import PROGRAMS, STUB, phase
from trainers.contract import environ, jsonl, rundir
from trainers.contract.errors import RefusedError

CRASH = Restart("crash", attempts=3, backoff_s=10)


def crashed(checkpoint=0, state: State = "crashed", **more):
    return AttemptEnd(state, "why", checkpoint, **more)


@pytest.mark.parametrize(
    ("ended", "policy", "says"),
    [
        *(([crashed(state=state)], CRASH, "")
          for state in ("halted", "stopped", "killed", "completed")),
        ([crashed()], Restart(), ""),
        ([crashed(20)] * 4, CRASH, "not restarted: 3 attempts without a new checkpoint"),
        ([crashed(signature="x")] * 2, CRASH,
         "not restarted: two attempts with the same error, no new checkpoint between them"),
        ([crashed(hopeless=True)], CRASH, "not restarted: the same error would occur again"),
    ],
)  # fmt: skip
def test_a_run_is_not_restarted(ended, policy, says):
    assert restart.next_attempt(ended, policy) == says


@pytest.mark.parametrize(
    ("ended", "policy"),
    [
        ([crashed()], Restart("stall")), ([crashed(20)] * 3, CRASH),
        *(([crashed(signature="x"), other], CRASH)
          for other in (crashed(5, signature="x"), crashed(signature="y"), crashed())),
    ],
)  # fmt: skip
def test_a_run_is_restarted(ended, policy):
    assert isinstance(restart.next_attempt(ended, policy), NextAttempt)


@pytest.mark.parametrize(
    ("checkpoint", "is_ours", "says"),
    [
        (0, True, "from the start of the run"), (20, True, "from the checkpoint of step 20"),
        (0, False, "with the same command"), (20, False, "with the same command"),
    ],
)  # fmt: skip
def test_where_a_foreign_program_continues_is_not_known(checkpoint, is_ours, says):
    again = restart.next_attempt([crashed(checkpoint)], CRASH)
    assert isinstance(again, NextAttempt)
    assert again.sentence(2, is_ours) == f"attempt 2 starts in 10 s {says}"


def test_the_back_off_doubles_without_progress_and_begins_anew_with_it():
    ended = [crashed()]
    waits = []
    for checkpoint in (0, 20, 20, 40):
        again = restart.next_attempt(ended, CRASH)
        assert isinstance(again, NextAttempt)
        waits.append(again.wait_s)
        ended.append(crashed(checkpoint))
    assert waits == [10, 20, 10, 10]
    assert restart.restarts_left(ended, CRASH, saved=41) == 3
    assert restart.restarts_left(ended, CRASH) == 2


def test_the_policy_in_the_documents_is_one_that_a_plan_takes(tmp_path):
    page = (PROGRAMS.parents[1] / "docs" / "plans.md").read_text()
    (line,) = [line.strip() for line in page.splitlines() if line.strip().startswith("restart: {")]
    path = tmp_path / "plan.yaml"
    path.write_text(f"name: x\nphases: [{{name: one}}]\n{line}\n")
    assert plan_file.load(path).restart == Restart("crash", 3, 10.0)


def test_a_killed_rank_begins_a_new_attempt_with_its_own_logs_and_records(begin, tmp_path):
    one = phase("one", "member.py", 5, "until", tmp_path / "go")
    started = begin(one, restart={"when": "crash", "backoff_s": 0.5}, shell=STUB)
    started.wait_steps(3)
    first = started.pids()
    os.kill(first[1], signal.SIGKILL)
    (waiting,) = started.wait(
        lambda: [e for e in started.events(0) if e.get("state") == "restarting"]
    )
    assert "rank 1 was killed by SIGKILL" in waiting["text"]
    assert "attempt 2 starts in 0.5 s with the same command" in waiting["text"]
    again = started.wait(lambda: (s := started.state())["attempt"] == 2 and s["workers"] and s)
    assert "restart, 1 left" in again["armed"]
    assert again["armed_short"].endswith(" ↻1")
    (tmp_path / "go").touch()
    assert started.wait_end()["phases"][0]["state"] == "completed"
    assert set(started.pids().values()).isdisjoint(first.values())
    records = rundir.heartbeat(started.run(), 0).read_bytes().splitlines()
    assert {jsonl.decode(line)["attempt"] for line in records} == {1, 2}
    for attempt in (1, 2):
        assert (rundir.logs(started.run(), attempt) / rundir.TORCHRUN_LOG).exists()
    assert RunSource(started.path).poll().attempt == 2


def test_a_rank_that_fails_after_torchrun_has_exited_ends_the_others_and_a_new_attempt_begins(
    begin,
):
    started = begin(
        phase("one", "member.py", 100_000), restart={"when": "crash", "backoff_s": 0.5},
        watch={"grace_s": 1}, shell=STUB,
    )  # fmt: skip
    started.wait_steps(3)
    os.kill(started.state()["torchrun"]["pid"], signal.SIGKILL)
    (alert,) = started.wait(lambda: started.alerts("torchrun-gone"))
    assert "ranks 0-1 still run" in alert["text"]
    os.kill(started.pids()[1], signal.SIGKILL)
    state = started.wait(lambda: (s := started.state())["attempt"] == 2 and s)
    assert "rank 1 was killed by SIGKILL" in state["ended"][0]["why"]
    assert started.ask("stop")["ok"]
    assert started.wait_end()["phases"][0]["state"] == "stopped"


def test_a_new_supervisor_adopts_what_lives_and_goes_on_with_the_plan(begin, tmp_path):
    one = phase("one", "member.py", 5, "until", tmp_path / "go")
    started = begin(one, phase("two", "member.py", 5), shell=STUB)
    started.wait_steps(3)
    with pytest.raises(RefusedError, match="has a supervisor"):
        actions.adopt(started.path)
    pids, former = started.pids(), started.kill_supervisor()
    started.wait(lambda: RunSource(started.path).poll().state == "unsupervised")
    assert "a new supervisor has adopted" in actions.adopt(started.run())
    state = started.wait(lambda: (s := started.state())["pid"] != former["pid"] and s)
    assert (state["state"], started.pids()) == ("running", pids)
    step = started.wait(lambda: RunSource(started.path).poll().step)
    started.wait(lambda: (RunSource(started.path).poll().step or 0) > step + 5)
    assert started.ask("dump")["ok"]
    (tmp_path / "go").touch()
    ended = started.wait_end()
    assert [p["state"] for p in ended["phases"]] == ["completed", "completed"]
    with pytest.raises(RefusedError, match="has ended; there is nothing to adopt"):
        actions.adopt(started.path)


def waiting(begin, backoff_s: float, attempts: int = 2):
    """Returns a run between two attempts; the first ended because rank 1 exited with code 7."""
    started = begin(
        phase("one", "member.py", 100_000, "leave"), shell=STUB,
        restart={"when": "crash", "attempts": attempts, "backoff_s": backoff_s},
    )  # fmt: skip
    started.wait_state("restarting")
    return started


def test_a_halt_ends_the_wait_for_the_next_attempt(begin):
    started = waiting(begin, 600)
    assert started.ask("halt")["ok"]
    assert started.wait_end()["phases"][0]["state"] == "halted"
    assert not process.with_token(started.token())


def test_two_stops_in_one_poll_are_one_stop(begin, tmp_path):
    """Systemd and a shutdown send TERM to owner and working process; the owner counts both."""
    twice = "self.run and self.run._next_at is not None and [self.end('stop', 'x') for _ in 'xy']"
    started = begin(
        phase("one", "member.py", 100_000, "leave"),
        shell=broken.shell(tmp_path, "launch.Launch.tick", twice),
        restart={"when": "crash", "attempts": 2, "backoff_s": 600},
    )  # fmt: skip
    assert started.wait_end()["phases"][0]["state"] == "stopped"
    states = [event["text"] for event in started.events(0) if event["kind"] == "state"]
    assert states[-1].startswith("restarting → stopped")


@pytest.mark.parametrize("blocked", [False, True])
def test_a_halt_file_made_by_hand_keeps_the_next_attempt_from_starting(begin, blocked):
    started = waiting(begin, 6 if blocked else 600)
    run = started.run()
    if blocked:
        (run / "logs" / "attempt2").touch()  # a file where the directory of the logs should be
        started.wait(lambda: started.alerts("restart-waits"))
    (run / rundir.HALT).touch()
    (phase_state,) = started.wait_end()["phases"]
    assert phase_state["state"] == "halted"
    assert phase_state["why"].startswith("a .HALT file exists; previous end: rank 1: ")
    assert not process.with_token(started.token())


@pytest.mark.parametrize(
    ("method", "answer"),
    [
        ("_spawn", "no rank is running; torchrun is not started"),
        ("_read_rest", "the ranks have ended already; no further attempt or phase starts"),
    ],
)
def test_a_stop_before_or_after_the_processes_starts_no_attempt(begin, tmp_path, method, answer):
    harm = 'len(begun) == 1 and self._run.event("note", self._run.end("stop", "x"))'
    started = begin(
        phase("one", "member.py", 100_000, "leave"),
        shell=broken.shell(tmp_path, f"attempt.Attempt.{method}", harm),
        restart={"when": "crash", "attempts": 2, "backoff_s": 0},
    )  # fmt: skip
    started.wait_end()
    assert started.state()["attempt"] == 1
    assert answer in [event["text"] for event in started.events(0)]
    is_begun = "torchrun started as pid" in str(started.events(0))
    assert is_begun == (method == "_read_rest")


@pytest.mark.parametrize(
    ("harm", "backoff_s"),
    [
        ("self.run._next_at is not None and (setattr(self, '_ended_by', 'stop requested by x'), "
         "self._publish())", 3),
        ("self.run.attempt.stage == 'collect' and self.end('stop', 'x')", 0),
    ],
    ids=["while a restart is due", "after the processes"],
)  # fmt: skip
def test_a_stop_also_counts_for_the_next_working_process(begin, tmp_path, harm, backoff_s):
    """The first working process dies after it has published the stop, before the run ends."""
    die = f"""(self.run and not self._services.link.state.former_end and {harm}
            and os.kill(os.getpid(), 9))"""
    started = begin(
        phase("one", "member.py", 100_000, "leave"),
        shell=broken.shell(tmp_path, "launch.Launch.tick", die),
        restart={"when": "crash", "attempts": 2, "backoff_s": backoff_s},
    )  # fmt: skip
    started.wait_end()
    assert started.alerts("supervisor-replaced")
    assert (started.state()["attempt"], started.state()["state"]) == (1, "crashed")
    assert started.plan_state["ended_by"] == "stop requested by x"


@pytest.mark.slow
def test_a_supervisor_that_adopts_between_two_attempts_waits_on_and_knows_why(begin):
    started = waiting(begin, 12)
    before = started.state()
    started.wait(lambda: time.time() - before["since_ts"] > 6)
    started.kill_supervisor()
    # `hopeless` in a document does not prevent a restart for which a supervisor waited.
    before["ended"] = [before["ended"][0] | {"hopeless": True}]
    rundir.write_json(started.run() / rundir.SUPERVISOR, before)
    actions.adopt(started.path)
    after = started.wait(lambda: (s := started.state())["pid"] != before["pid"] and s)
    for key in ("why", "ended", "since_ts"):
        assert after[key] == before[key]
    assert after["state"] == "restarting"
    ended = started.wait_end()
    assert "rank 1: no reason recorded" in ended["why"]
    assert "not restarted: 2 attempts without a new checkpoint" in ended["why"]
    assert started.state()["attempt"] == 2
    adopted, begun = (
        next(e["ts"] for e in started.events(0) if key in (e.get("state"), e["text"]))
        for key in ("a new supervisor watches this run", "starting")
    )
    assert begun - max(adopted, before["since_ts"] + 12) < 5, "the wait began anew"


def test_a_run_that_lost_its_supervisor_between_two_attempts_is_not_over_and_takes_a_halt(begin):
    started = waiting(begin, 600, attempts=3)
    started.kill_supervisor()
    state = RunSource(started.path).poll()
    assert (state.state, status_text.exit_code(state)) == ("lost", 5)
    assert "attempt 2 does not start" in state.why
    assert actions.send(started.path, "halt", {}, "tester") == ""
    long_ago = started.state() | {"since_ts": time.time() - 3600}
    rundir.write_json(started.run() / rundir.SUPERVISOR, long_ago)
    actions.adopt(started.path)
    assert started.wait_end()["phases"][0]["state"] == "halted"
    assert started.state()["attempt"] == 1


def test_an_attempt_whose_torchrun_cannot_start_now_is_tried_again(begin, tmp_path):
    harm = "if len(begun) in (2, 3): raise BlockingIOError(11, 'Resource temporarily unavailable')"
    started = begin(
        phase("one", "member.py", 100_000, "leave"),
        shell=broken.shell(tmp_path, "link.Link.spawn", harm),
        restart={"when": "crash", "attempts": 2, "backoff_s": 0},
    )  # fmt: skip
    assert "not restarted: 2 attempts without a new checkpoint" in started.wait_end()["why"]
    raised, cleared = started.alerts("restart-waits")
    assert raised["text"] == (
        "cannot start torchrun: [Errno 11] Resource temporarily unavailable; attempt 2 starts when "
        "this is possible"
    )
    assert cleared["text"] == "torchrun started"


def test_an_attempt_waits_for_a_directory_that_is_away(begin):
    started = waiting(begin, 6)
    run = started.run()
    away = run.rename(started.path / "away")
    started.wait(lambda: b"restart-waits" in (away / rundir.EVENTS).read_bytes())
    assert not process.with_token(rundir.read_json(away / rundir.RUN)["environment"][environ.TOKEN])
    away.rename(run)
    started.wait_end()
    assert started.state()["attempt"] == 2


def test_an_attempt_that_waits_for_its_directory_does_not_start_in_that_of_another_run(begin):
    started = waiting(begin, 6)
    run = started.run()
    (run / "logs" / "attempt2").touch()  # a file where the directory of the logs should be
    started.wait(lambda: started.alerts("restart-waits"))
    directory.change_at(run / rundir.RUN, "environment", environ.TOKEN, to="0123456789abcdef")
    assert "belongs to another run; no further attempt starts" in started.wait_end()["why"]
