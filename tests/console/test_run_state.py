"""The state of a run from recorded evidence: one definition each."""

from __future__ import annotations

import select

import pytest

from console.ending import End, error_of
from console.run_state import Facts, View, decide
from console.sources import crash_log, liveness
from console.supervisor.run_files import DEATH
from console.supervisor.tree import Tree
from tests import owners
from tests.console.sources.told import Told

PEER = "a collective failed, another rank is gone or stuck: Connection closed by peer"


def over(**facts):
    return decide(Facts(spawned=True, over=True, world=2, **facts))


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        ({}, "starting"),
        ({"spawned": True}, "starting"),
        ({"spawned": True, "step": 1}, "running"),
        ({"step": 9, "verdict": "rank 1 is stopped"}, "stalled"),
        ({"step": 9, "halt_file": True}, "halting"),
        ({"step": 9, "halting_ranks": 1}, "halting"),
        ({"step": 9, "asked": "halt", "by": "me"}, "halting"),
        ({"step": 9, "asked": "halt", "verdict": "rank 1 is stopped"}, "stalled"),
        ({"step": 9, "asked": "stop", "verdict": "rank 1 is stopped"}, "stopping"),
        ({"step": 9, "asked": "kill"}, "stopping"),
        ({"step": 9, "ending": "rank 1 is gone", "verdict": "rank 1 is stopped"}, "stopping"),
    ],
)
def test_live_states(facts, state):
    assert decide(Facts(**facts))[0] == state


def test_a_halt_of_a_stalled_run_is_said_to_be_pending():
    why = decide(Facts(step=9, halt_file=True, verdict="rank 1 is stopped"))[1]
    assert why == "rank 1 is stopped; a halt is pending"


def test_a_halt_before_the_start_is_a_halt():
    facts = Facts(over=True, asked="halt", by="ada", failure="halt was asked before the start")
    assert decide(facts) == ("halted", "halted, asked by ada")


def test_all_ranks_done():
    ends = (End(0, 0, None, 100), End(1, 0, None, 100))
    done = ("completed", "all ranks done after step 100")
    assert over(agent_code=0, ends=ends, step=100) == done
    assert over(agent_code=0, ends=ends, step=100, reason="done") == done


def test_a_run_that_needed_fewer_steps_than_planned_says_why():
    told = Told()
    told.take({"rank": 0, "msg": "exit", "step": 95, "reason": "bytes_right reached"})
    why = over(agent_code=0, step=95, reason=told.heads[0].reason)[1]
    assert why == 'all ranks done after step 95; the ranks say "bytes_right reached"'


def test_a_halt_names_the_step_and_who_asked():
    state, why = over(agent_code=0, asked="halt", by="ada", halt_steps={0: 41, 1: 41})
    assert (state, why) == ("halted", "all 2 ranks halted at step 41, asked by ada")


def test_a_halt_whose_records_the_disk_did_not_take_is_a_halt():
    assert over(agent_code=0, halt_file=True, told=False)[0] == "halted"
    assert over(agent_code=0, halt_file=True)[0] == "completed"


def test_without_the_ranks_records_a_good_end_is_believed_only_where_nothing_speaks_against_it():
    ends = (End(0, 0, None, 9), End(1, 0, None, 9))
    assert over(agent_code=0, ends=ends, told=False)[0] == "completed"
    unread = "the run directory cannot be read: [Errno 2] No such file or directory"
    for against in ({"agent_code": 1}, {"agent_code": 0, "failure": unread}):
        state, why = over(ends=ends, step=9, told=False, **against)
        assert (state, why.startswith("all ranks ended with exit 0 after step 9")) == ("lost", True)
        assert over(ends=ends, told=True, **against)[0] == "completed"
    for ended_by in ({"asked": "stop", "by": "me"}, {"agent_code": 1, "agent_signal": "SIGTERM"}):
        assert over(ends=ends, told=False, **{"agent_code": 0, **ended_by})[0] == "stopped"


def test_a_signal_to_torchrun_stops_and_is_named():
    state, why = over(agent_code=1, agent_signal="SIGHUP", ends=(End(0, None, "SIGHUP", 3),))
    assert (state, why) == ("stopped", "stopped by SIGHUP to torchrun")
    state, why = over(agent_code=1, agent_signal="SIGTERM", halt_steps={0: 4, 1: 4},
                      ends=(End(0, 0, None, 4), End(1, 0, None, 4)))  # fmt: skip
    assert (state, why) == ("halted", "all 2 ranks halted at step 4 (SIGTERM to torchrun)")


def test_a_bad_exit_outweighs_the_good_one_of_torchrun():
    killed = (End(0, 0, None, 9), End(1, None, "SIGKILL", 9))
    assert over(agent_code=0, ends=killed, order=(1,))[0] == "crashed"
    assert over(agent_code=0, ends=(End(0, 7, None, 9), End(1, 0, None, 9)))[0] == "crashed"


def test_only_signals_that_end_torchrun_are_taken_from_its_log():
    assert DEATH.search(b"Received 9 death signal") is None
    assert DEATH.search(b"Received 15 death signal")[1] == b"15"


@pytest.mark.decision("refuse-restart", "lie")
def test_a_signal_that_only_a_log_names_does_not_stop_a_run_whose_rank_failed():
    for end in (End(1, None, "SIGKILL", 4), End(1, 7, None, 4), End(1, None, "SIGSEGV", 4)):
        state, why = over(agent_code=1, agent_signal="SIGTERM", ends=(End(0, 0, None, 4), end))
        assert (state, why.startswith("rank 1")) == ("crashed", True)
    done = (End(0, 0, None, 4), End(1, 0, None, 4))
    assert over(agent_code=0, agent_signal="SIGTERM", ends=done)[0] == "completed"
    assert decide(Facts(spawned=True, step=4, agent_signal="SIGTERM"))[0] == "running"


def test_stop_is_stop_also_when_the_ranks_halted_in_time():
    assert over(agent_code=1, asked="stop", halt_steps={0: 9, 1: 9})[0] == "stopped"
    assert over(agent_code=-9, asked="kill")[0] == "killed"


def test_a_run_that_was_done_before_the_stop_is_completed():
    assert over(agent_code=0, asked="stop")[0] == "completed"


def test_ranks_that_outlived_torchrun_and_ended_well_are_completed():
    ends = (End(0, 0, None, 9), End(1, 0, None, 9))
    assert over(agent_code=-9, agent_gone=True, ends=ends)[0] == "completed"
    assert over(agent_code=-9, agent_gone=True, ends=ends[:1])[0] == "crashed"


def test_the_peer_of_a_killed_rank_is_secondary_whatever_came_first():
    ends = (End(0, 14, None, 40, PEER), End(1, None, "SIGKILL", 41))
    state, why = over(agent_code=1, ends=ends, order=(0, 1))
    blamed = "rank 1 was killed by SIGKILL at step 41"
    assert state == "crashed"
    assert why == f"{blamed}; rank 0 exited earlier, with the error of a lost peer"
    _, why = over(agent_code=1, ends=ends, order=(1, 0))
    assert why == f"{blamed}; rank 0 ended because of it"


def test_a_lost_peer_that_exited_before_who_is_blamed_is_told():
    """Its words may be wrong, so both are named."""
    ends = (End(0, 3, None, 40), End(1, 1, None, 40, log=f"RuntimeError: {PEER}"))
    lost = "; rank 1 exited earlier, with the error of a lost peer"
    assert over(agent_code=1, ends=ends, order=(1, 0))[1].endswith(lost)
    assert over(agent_code=1, ends=ends, order=(0, 1))[1].endswith("; rank 1 ended because of it")


def test_a_rank_that_was_killed_after_the_failure_of_another_is_not_blamed():
    ends = (End(0, None, "SIGKILL", 4, culled=True), End(1, 1, None, 5, log="ValueError: broken"))
    state, why = over(agent_code=1, ends=ends, order=(0, 1))
    assert state == "crashed"
    assert why.startswith("rank 1: ValueError: broken at step 5")


def test_a_rank_that_ended_before_it_was_found_is_known_from_torchruns_summary():
    log = b"""Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : -11 (pid: 4711)  (SIGSEGV)
"""
    tree = Tree("token", 2, select.poll(), owners.absent())
    tree.take_log(log)
    assert (tree.workers[1].signal, tree.workers[1].handle.pid) == ("SIGSEGV", 4711)
    assert tree.order == [1]


def test_a_named_error_is_failed_and_the_rank_told_to_end_is_secondary():
    ends = (End(0, None, "SIGTERM", 7), End(1, 10, None, 7, "loss stayed non-finite for 5 steps"))
    state, why = over(agent_code=1, ends=ends, order=(0, 1))
    assert state == "failed"
    assert why.startswith("rank 1: loss stayed non-finite for 5 steps at step 7 (exit 10)")


def test_native_crash_and_bare_exit_code():
    assert "native code (SIGSEGV)" in over(agent_code=1, ends=(End(1, None, "SIGSEGV", 3),))[1]
    state, why = over(agent_code=1, ends=(End(1, 7, None, 3),))
    assert (state, "exit 7" in why) == ("crashed", True)
    assert over(agent_code=1, ends=(End(1, 12, None, 3),))[0] == "failed"


def test_the_first_of_two_that_failed_is_named():
    ends = (End(0, 7, None, 3), End(1, 9, None, 3))
    assert over(agent_code=1, ends=ends, order=(1, 0))[1].startswith("rank 1")


def test_a_start_that_failed_says_why():
    state, why = over(failure="torchrun cannot be started: no such file")
    assert (state, why) == ("crashed", "torchrun cannot be started: no such file")


def test_errors_and_exceptions_are_found_in_records_and_logs():
    assert error_of({"msg": "error", "error": "out of memory"}) == "out of memory"
    assert error_of({"msg": "progress", "error": "x"}) == ""
    log = b"""Traceback (most recent call last):
  File "x.py", line 3
ValueError: broken batch
torch.distributed.elastic.multiprocessing.errors.ChildFailedError: x
"""
    assert crash_log.read(log).error == "ValueError: broken batch"
    assert crash_log.read(b"[rank1]: RuntimeError: boom\n").error == "RuntimeError: boom"
    assert crash_log.read(b"\xff\0nothing").error == ""


def test_the_99th_percentile_leaves_the_first_steps_out():
    told = Told()
    beat = {"rank": 0, "msg": "progress", "step": 5}
    told.take(beat | {"steps_dt_s": [90.0, 80.0]})
    assert told.heads[0].pace.p99_s() is None
    told.take(beat | {"steps_dt_s": [0.1] * 98 + [0.2, "nan", None, True, -1]})
    assert told.heads[0].pace.p99_s() == 0.2


GONE = "the supervisor (pid 7) is gone"
RANK = "rank 1 still runs"
LOST = f"{GONE} and so are all ranks; they left no reason"


@pytest.mark.parametrize(
    ("view", "state", "why"),
    [
        ({"state": "running", "why": "said", "lives": True, "living": RANK}, "running", "said"),
        ({"state": "halted", "why": "said"}, "halted", "said"),
        ({"state": "halted", "living": RANK}, "unsupervised",
         f"its documents say that the run is halted, but {RANK}; {GONE}"),
        ({"state": "running", "living": RANK}, "unsupervised", f"{GONE}; {RANK}"),
        ({"living": RANK, "lives": True}, "unsupervised", f"no document tells of it; {RANK}"),
        ({"state": "restarting", "why": "soon: exit 1", "next_attempt": 3}, "lost",
         f"{GONE}, attempt 3 does not begin without one; adopt it: exit 1"),
        ({"trouble": "garbage"}, "queued", "garbage; no record yet"),
        ({"newest": "record 9 s old"}, "unsupervised", "no supervisor; record 9 s old"),
        ({"state": "running", "goes_on": True, "newest": "young"}, "unsupervised",
         f"{GONE}; young"),
        ({"state": "restarting", "behind": True}, "unsupervised",
         "the supervisor is gone; the records are still being read"),
        ({"state": "running"}, "lost", LOST),
    ],
)  # fmt: skip
def test_a_reader_believes_the_newest_word_unless_processes_speak_against_it(view, state, why):
    assert decide(Facts(is_reader=True, view=View(gone=GONE, **view))) == (state, why)


def test_without_a_word_of_an_end_the_last_records_of_all_ranks_tell_it():
    ends = (End(0, 0, None, 9), End(1, 0, None, 9))
    facts = {"is_reader": True, "over": True, "spawned": True, "ends": ends, "world": 2}
    assert decide(Facts(view=View("running", gone=GONE), **facts))[0] == "completed"
    assert decide(Facts(view=View("lost", "said"), **facts)) == ("lost", "said")


@pytest.mark.parametrize(
    ("facts", "state", "why"),
    [
        ({"again": "attempt 2 begins in 5 s"}, "restarting", "attempt 2 begins in 5 s: exit 1"),
        ({"asked": "stop", "by": "ada"}, "stopped",
         "stop asked by ada before the next attempt; before: exit 1"),
        ({"asked": "halt", "by": "ada", "halt_file": True}, "halted",
         "halt asked by ada before the next attempt; before: exit 1"),
        ({"halt_file": True}, "halted", ".HALT is there; before: exit 1"),
    ],
)  # fmt: skip
def test_between_two_attempts_only_what_is_asked_counts(facts, state, why):
    assert decide(Facts(before="exit 1", **facts)) == (state, why)


@pytest.mark.parametrize(
    ("names", "said"),
    [([], ""), ([3], "rank 3 still runs"), ([0, 1], "ranks 0, 1 still run"),
     (range(9), "ranks 0, 1, 2, 3, 4, 5, 6, 7, … still run")],
)  # fmt: skip
def test_what_still_runs_is_said_of_one_and_of_many(names, said):
    assert liveness.still_run("rank", [*names]) == said
