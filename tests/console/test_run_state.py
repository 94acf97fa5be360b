"""The state of a run, and its reason, from recorded evidence."""

from __future__ import annotations

import select
from dataclasses import replace

import pytest

from console.rank_end import RankEnd, error_of
from console.run_state import Facts, ReaderView, decide
from console.sources import crash_log, json_documents, liveness, process
from console.supervisor.ends import take_log
from console.supervisor.process_tree import Tree, Worker
from console.supervisor.run_files import DEATH
from tests import owners
from tests.console.sources.recorded import Recorded
from trainers.contract import rundir

PEER = "a collective failed: Connection closed by peer"
GOOD = (RankEnd(0, 0, None, 9), RankEnd(1, 0, None, 9))
LOST_PEER = RankEnd(0, 14, None, 40, PEER)
KILLED = RankEnd(1, None, "SIGKILL", 41)
BLAMED = "rank 1 was killed by SIGKILL at step 41"
HALTED = {0: 41, 1: 41}


def over(**facts):
    return decide(
        Facts(**({"spawned": True, "over": True, "world": 2, "torchrun_code": 1} | facts))
    )


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        ({}, "starting"),
        ({"spawned": True}, "starting"),
        ({"spawned": True, "step": 1}, "running"),
        ({"spawned": True, "step": 4, "torchrun_signal": "SIGTERM"}, "running"),
        ({"step": 9, "verdict": "rank 1 is stopped"}, "stalled"),
        ({"step": 9, "halt_file": True}, "halting"),
        ({"step": 9, "halting_ranks": 1}, "halting"),
        ({"step": 9, "requested": "halt", "by": "me"}, "halting"),
        ({"step": 9, "requested": "halt", "verdict": "rank 1 is stopped"}, "stalled"),
        ({"step": 9, "requested": "stop", "verdict": "rank 1 is stopped"}, "stopping"),
        ({"step": 9, "requested": "kill"}, "stopping"),
        ({"step": 9, "rank_failure": "rank 1 is gone", "verdict": "rank 1 is stopped"}, "stopping"),
    ],
)
def test_live_states(facts, state):
    assert decide(Facts(**facts))[0] == state


def test_the_ranks_do_not_continue_without_torchrun_after_their_ends():
    for ends, words in (((), "torchrun is not running; the ranks continue"), (GOOD, "")):
        state, why = decide(Facts(spawned=True, step=9, torchrun_gone=True, ends=ends, world=2))
        assert (state, why[:43]) == ("running", words)


def test_a_stalled_run_shows_its_pending_halt():
    why = decide(Facts(step=9, halt_file=True, verdict="rank 1 is stopped"))[1]
    assert why == "rank 1 is stopped; a halt is pending"


@pytest.mark.parametrize(
    ("facts", "state", "why"),
    [
        ({"torchrun_code": 0, "ends": GOOD, "step": 9}, "completed", "all ranks done after step 9"),
        ({"torchrun_code": 0, "ends": GOOD, "step": 9, "reasons": {0: "done"}}, "completed",
         "all ranks done after step 9"),
        ({"torchrun_code": 0, "requested": "halt", "by": "ada", "halt_steps": HALTED}, "halted",
         "all 2 ranks halted at step 41, requested by ada"),
        # A full disk may lose the record of the halt of some ranks.
        ({"torchrun_code": 0, "world": 4, "halt_steps": HALTED}, "halted",
         "ranks 0-1 halted at step 41"),
        ({"torchrun_code": 0, "halt_steps": {1: 41}}, "halted", "rank 1 halted at step 41"),
        ({"spawned": False, "requested": "halt", "by": "ada", "failure": "halt before the start"},
         "halted", "halted, requested by ada"),
        ({"torchrun_code": 0, "requested": "stop"}, "completed", ""),
        ({"requested": "stop", "halt_steps": HALTED}, "stopped", ""),
        ({"torchrun_code": -9, "requested": "kill"}, "killed", ""),
        ({"torchrun_code": -9, "torchrun_gone": True, "ends": GOOD}, "completed", ""),
        ({"torchrun_code": -9, "torchrun_gone": True, "ends": GOOD[:1]}, "crashed", ""),
        ({"failure": "torchrun cannot be started: no such file"}, "crashed",
         "torchrun cannot be started: no such file"),
        # A halt whose records a full disk lost.
        ({"torchrun_code": 0, "halt_file": True, "has_exit_records": False}, "halted", ""),
        ({"torchrun_code": 0, "halt_file": True}, "completed", ""),
        # A signal to torchrun.
        ({"torchrun_signal": "SIGHUP", "ends": (RankEnd(0, None, "SIGHUP", 3),)}, "stopped",
         "stopped by SIGHUP to torchrun"),
        ({"torchrun_signal": "SIGTERM", "halt_steps": HALTED, "ends": GOOD}, "halted",
         "all 2 ranks halted at step 41 (SIGTERM to torchrun)"),
        # The exit of a rank outweighs that of torchrun.
        ({"torchrun_code": 0, "ends": (GOOD[0], KILLED), "order": (1,)}, "crashed", ""),
        ({"torchrun_code": 0, "ends": (RankEnd(0, 7, None, 9), GOOD[1])}, "crashed", ""),
        # The rank to blame.
        ({"ends": (LOST_PEER, KILLED), "order": (0, 1)}, "crashed",
         f"{BLAMED}; rank 0 exited earlier, in a failed collective"),
        ({"ends": (LOST_PEER, KILLED), "order": (1, 0)}, "crashed",
         f"{BLAMED}; rank 0 ended because of it"),
        ({"ends": (replace(LOST_PEER, late=True), replace(KILLED, late=True)), "order": (0, 1)},
         "crashed", f"{BLAMED}; rank 0 also exited, in a failed collective"),
        ({"ends": (replace(GOOD[0], late=True), replace(LOST_PEER, rank=1, late=True)),
          "order": (0, 1)}, "crashed",
         "rank 0 exited (code 0) at step 9, while the others continued"),
        ({"ends": (RankEnd(0, None, "SIGKILL", 4, killed_after_failure=True),
                   RankEnd(1, 1, None, 5, log="ValueError: broken")), "order": (0, 1)}, "crashed",
         "rank 1: ValueError: broken at step 5"),
        ({"ends": (RankEnd(0, None, "SIGTERM", 7), RankEnd(1, 10, None, 7, "loss is not finite")),
          "order": (0, 1)}, "failed", "rank 1: loss is not finite at step 7 (code 10)"),
        ({"ends": (RankEnd(0, 7, None, 3), RankEnd(1, 9, None, 3)), "order": (1, 0)}, "crashed",
         "rank 1"),
        ({"ends": (replace(KILLED, phase="backward"),)}, "crashed", f"{BLAMED} in backward"),
        ({"ends": (RankEnd(1, None, "SIGSEGV", 3),)}, "crashed",
         "rank 1 crashed in native code (SIGSEGV)"),
        ({"ends": (RankEnd(1, 12, None, 3),)}, "failed", "rank 1: data error at step 3 (code 12)"),
    ],
)  # fmt: skip
def test_ends(facts, state, why):
    found, text = over(**facts)
    assert (found, text[: len(why)]) == (state, why)


def test_every_rank_that_ended_because_of_another_is_named():
    lost = [replace(LOST_PEER, rank=rank) for rank in range(12)]
    why = over(ends=(*lost, replace(KILLED, rank=12)), world=13)[1]
    assert why == "rank 12 was killed by SIGKILL at step 41; ranks 0-11 ended because of it"


def test_the_reason_of_many_scattered_ranks_is_not_cut_by_its_readers():
    ends = [replace(LOST_PEER, rank=rank) for rank in range(1, 1024, 2)]
    why = over(world=1024, ends=(replace(KILLED, rank=0), *ends), order=(0,))[1]
    text = json_documents.line({"why": why}, "why", "")
    assert text == why
    assert why.endswith("ranks 1, 3, 5, 7, 9, 11, 13, 15, … (512 in all) ended because of it")


def test_a_run_that_needed_fewer_steps_than_planned_gives_the_reason():
    recorded = Recorded()
    recorded.take({"rank": 0, "msg": "exit", "step": 95, "reason": "bytes_right reached"})
    why = over(torchrun_code=0, step=95, reasons={0: recorded.heads[0].reason})[1]
    assert why == 'all ranks done after step 95; reason: "bytes_right reached"'


def test_without_exit_records_a_success_counts_only_where_nothing_contradicts_it():
    assert over(torchrun_code=0, ends=GOOD, has_exit_records=False)[0] == "completed"
    unread = "the run directory cannot be read: [Errno 2] No such file or directory"
    for against in ({"torchrun_code": 1}, {"torchrun_code": 0, "failure": unread}):
        state, why = over(ends=GOOD, step=9, has_exit_records=False, **against)
        assert (state, why.startswith("all ranks exited with code 0 after step 9")) == (
            "lost", True,
        )  # fmt: skip
        assert over(ends=GOOD, **against)[0] == "completed"
    for ended_by in (
        {"requested": "stop", "by": "me"},
        {"torchrun_code": 1, "torchrun_signal": "SIGTERM"},
    ):
        facts = {"torchrun_code": 0} | ended_by
        assert over(ends=GOOD, has_exit_records=False, **facts)[0] == "stopped"


def test_only_signals_that_end_torchrun_are_read_from_its_log():
    assert DEATH.search(b"Received 9 death signal") is None
    assert DEATH.search(b"Received 15 death signal")[1] == b"15"


@pytest.mark.decision("reject-restart", "lie")
def test_a_signal_that_only_a_log_names_does_not_stop_a_run_whose_rank_failed():
    for code, signal in ((None, "SIGKILL"), (7, None), (None, "SIGSEGV")):
        ends = (GOOD[0], RankEnd(1, code, signal, 4))
        state, why = over(torchrun_signal="SIGTERM", ends=ends)
        assert (state, why.startswith("rank 1")) == ("crashed", True)
    assert over(torchrun_code=0, torchrun_signal="SIGTERM", ends=GOOD)[0] == "completed"


def test_a_rank_that_ended_before_it_was_found_is_known_from_torchruns_summary():
    log = b"""Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : -11 (pid: 4711)  (SIGSEGV)
"""
    tree = Tree("token", 2, select.poll(), owners.absent())
    take_log(tree, log)
    assert (tree.workers[1].signal, tree.workers[1].handle.pid) == ("SIGSEGV", 4711)
    assert tree.order == [1]
    assert tree.workers[1].late, "torchrun's log has no exact time"


def test_a_further_supervisor_knows_that_nobody_observed_an_end():
    found = Worker(0, 0, process.Handle(4194303, -1, 0), over_ts=5.0, late=True)
    tree = Tree("token", 1, select.poll(), owners.absent())
    tree._adopt_named(0, found.as_dict(), None)
    assert (tree.workers[0].late, tree.workers[0].over_ts) == (True, 5.0)


def test_code_0_of_torchrun_replaces_no_exit_that_the_kernel_reported():
    tree = Tree("token", 1, select.poll(), owners.absent())
    tree.workers[0] = worker = Worker(0, 0, process.Handle(4194303, -1, 0))
    worker.ended(7)
    tree.agent_status = 0
    take_log(tree, b"")
    assert (worker.code, worker.observed) == (7, True)


def test_errors_are_found_in_records():
    assert error_of({"msg": "error", "error": "out of memory"}) == "out of memory"
    assert error_of({"msg": "progress", "error": "x"}) == ""
    assert crash_log.read(b"[rank1]: RuntimeError: boom\n").error == "RuntimeError: boom"
    assert crash_log.read(b"\xff\0nothing").error == ""


NO_SUPERVISOR = "the supervisor (pid 7) is not running"
RANK = "rank 1 still runs"


@pytest.mark.parametrize(
    ("view", "state", "why"),
    [
        ({"state": "running", "why": "said", "has_supervisor": True, "living": RANK}, "running",
         "said"),
        ({"state": "halted", "why": "said"}, "halted", "said"),
        ({"state": "halted", "living": RANK}, "unsupervised",
         f"its documents say that the run is halted, but {RANK}; {NO_SUPERVISOR}"),
        ({"state": "running", "living": RANK}, "unsupervised", f"{NO_SUPERVISOR}; {RANK}"),
        ({"living": RANK, "has_supervisor": True}, "unsupervised",
         f"no document has a state; {RANK}"),
        ({"state": "restarting", "why": "soon: exit 1", "next_attempt": 3}, "lost",
         f"{NO_SUPERVISOR}, so attempt 3 does not start until you adopt the run; "
         "previous end: exit 1"),
        ({"trouble": "garbage"}, "queued", "garbage; no record yet"),
        ({"newest_record": "record 9 s old"}, "unsupervised", "no supervisor; record 9 s old"),
        ({"state": "running", "is_elsewhere": True, "newest_record": "young"}, "unsupervised",
         f"{NO_SUPERVISOR}; young"),
        ({"state": "restarting", "is_elsewhere": True}, "unsupervised", NO_SUPERVISOR),
        ({"state": "restarting", "moved": "it is a copy"}, "lost", "it is a copy"),
        ({"state": "halted", "why": "asked", "moved": "it is a copy"}, "halted", "asked"),
        ({"state": "restarting", "behind": True}, "unsupervised",
         f"{NO_SUPERVISOR}; the records are still being read"),
        ({"state": "running"}, "lost",
         f"{NO_SUPERVISOR}, no rank is alive, and no exit record gives a reason"),
    ],
)  # fmt: skip
def test_a_reader_accepts_the_newest_state_unless_processes_contradict_it(view, state, why):
    view = ReaderView(no_supervisor=NO_SUPERVISOR, **view)
    assert decide(Facts(is_reader=True, view=view)) == (state, why)


def test_without_an_end_in_a_document_the_exit_records_of_all_ranks_decide():
    facts = {"is_reader": True, "over": True, "spawned": True, "ends": GOOD, "world": 2}
    found = decide(Facts(view=ReaderView("running"), **facts))
    assert found == ("completed", "all ranks done, according to their exit records")
    assert decide(Facts(view=ReaderView("lost", "said"), **facts)) == ("lost", "said")


@pytest.mark.parametrize(
    ("facts", "state", "why"),
    [
        ({"next_attempt": "attempt 2 starts in 5 s"}, "restarting",
         "attempt 2 starts in 5 s: exit 1"),
        ({"requested": "stop", "by": "ada"}, "stopped",
         "stop requested by ada before the next attempt; previous end: exit 1"),
        ({"requested": "halt", "by": "ada", "halt_file": True}, "halted",
         "halt requested by ada before the next attempt; previous end: exit 1"),
        ({"halt_file": True}, "halted", "a .HALT file exists; previous end: exit 1"),
    ],
)  # fmt: skip
def test_between_two_attempts_only_requests_count(facts, state, why):
    assert decide(Facts(previous_end="exit 1", **facts)) == (state, why)


@pytest.mark.parametrize(
    ("ranks", "words"), [([], ""), ([3], "rank 3 still runs"), (range(9), "ranks 0-8 still run")]
)
def test_living_ranks_are_named(ranks, words):
    workers = [rundir.identity() | {"rank": rank, "exit": None} for rank in ranks]
    assert liveness.living_ranks({"workers": workers}) == words
