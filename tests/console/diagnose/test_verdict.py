"""The verdict on a stalled run from positions and process states, without stacks."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.diagnose.evidence import Evidence
from console.diagnose.rank_evidence import RankEvidence, of_foreign, unwatched
from console.diagnose.verdict import BEING_READ, COLLECTING, LOOK_AT_STACKS, NO_EVIDENCE, diagnose
from console.plan import Watch, WatchRule
from tests.console.diagnose.stalled_ranks import four
from tests.console.diagnose.test_stack_classes import recorded
from tests.console.diagnose.watched import Watched
from trainers.contract.pulse import PHASES

NOW = 1_790_000_000.0
WATCH = Watch(stall_floor_s=10, startup_s=120, grace_s=15)
SINCE = time.strftime("%H:%M:%S", time.localtime(NOW - 12))
IN_FORWARD = f"has been stalled in forward of step 41 since {SINCE}"
DUMP = "; dump the stacks to see the cause"


def rank(number, phase="forward", unchanged=12.0, state="S", step=41, **more):
    return RankEvidence(number, 1000 + number, state, step, phase, unchanged, **more)


def judge(*ranks):
    return diagnose(ranks, WATCH, NOW)


def early(number, phase="forward", **more):
    """Returns a rank that made progress four seconds ago."""
    return rank(number, phase, 4.0, **more)


EXITED = rank(0, "exit", 500.0, "gone", step=5, code=0)
HUNG = rank(1, "exit", start_ticks=5)
SENTENCES = {
    "slowest rank": (
        (rank(0, "backward"), rank(1)), ("slowest-rank", 1, "medium"),
        f"rank 1 has been stalled in forward of step 41 since {SINCE}; rank 0 waits in backward"
        + DUMP,
    ),
    "many ranks": (
        (*(rank(n, "backward") for n in (0, 1, 2, 4, 5, 7)), rank(3), rank(6)),
        ("slowest-rank", 3, "medium"),
        f"ranks 3, 6 have been stalled in forward of step 41 since {SINCE}; ranks 0-2, 4-5, 7 wait "
        f"in backward{DUMP}",
    ),
    "stopped": (
        (rank(0, "backward"), rank(1, state="T")), ("stopped", 1, "high"),
        f"rank 1 {IN_FORWARD}: it is stopped (SIGSTOP); kill -CONT 1001 resumes it; "
        "rank 0 waits in backward",
    ),
    "all stopped": (
        (rank(0, state="T"), rank(1, state="T")), ("stopped", None, "medium"),
        f"ranks 0-1 have been stalled in forward of step 41 since {SINCE}: each is stopped "
        "(SIGSTOP); kill -CONT 1000 1001 resumes them",
    ),
    "traced": (
        (rank(0, "backward"), rank(1, state="t")), ("traced", 1, "high"),
        f"rank 1 {IN_FORWARD}: it is traced by a debugger; rank 0 waits in backward",
    ),
    "not reaped, and the peer that lost it has exited": (
        (replace(EXITED, step=41, code=14), rank(1, state="Z")), ("exited", 1, "high"),
        f"rank 1 {IN_FORWARD}: it has exited but its parent has not reaped it (the parent may be "
        "stopped); rank 0 exited (code 14)",
    ),
    "stopped, and another rank is slower": (
        (rank(0, "backward", state="T"), rank(1, "fetch"), rank(2, "backward")),
        ("stopped", 0, "medium"),
        f"rank 0 has been stalled in backward of step 41 since {SINCE}: it is stopped (SIGSTOP); "
        "kill -CONT 1000 resumes it; rank 1 is slower, in fetch; rank 2 waits in backward",
    ),
    "killed": (
        (rank(0, "backward"), rank(1, state="gone")), ("exited", 1, "high"),
        f"rank 1 {IN_FORWARD}: it has exited; rank 0 waits in backward",
    ),
    "disk": (
        (rank(0, "backward"), rank(1, "fetch", state="D")), ("disk", 1, "medium"),
        f"rank 1 has been stalled in fetch of step 41 since {SINCE}: it is in uninterruptible "
        "sleep; rank 0 waits in backward",
    ),
    "all at the same position": (
        (rank(0, "backward"), rank(1, "backward")), ("all-ranks", None, "low"),
        f"ranks 0-1 have been stalled in backward of step 41 since {SINCE}; no rank is "
        f"seen behind another{DUMP}",
    ),
    "exited before the others": (
        (EXITED, rank(1, "backward", step=6), rank(2, "backward", step=6)),
        ("exited-early", 0, "high"),
        f"rank 0 exited (code 0) at step 5 before the other ranks; no progress since {SINCE}; "
        "ranks 1-2 wait in backward of step 6",
    ),
    "exited after the others": (
        (replace(EXITED, step=42), rank(1)), ("all-ranks", 1, "low"),
        f"rank 1 has been stalled in forward of step 41 since {SINCE}; rank 0 exited (code 0)"
        + DUMP,
    ),
    "hangs after its exit record": (
        (replace(EXITED, step=41), HUNG), ("exit-hangs", 1, "medium"),
        f"rank 1 has been stalled in exit of step 41 since {SINCE}: it has not ended since its "
        "exit record; rank 0 exited (code 0)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SENTENCES)
def test_a_verdict_names_the_rank_the_evidence_and_what_to_do(name):
    ranks, expected, sentence = SENTENCES[name]
    verdict = judge(*ranks)
    assert (verdict.cause, verdict.rank, verdict.sure) == expected
    assert verdict.sentence == sentence
    assert len(sentence) < 200
    first = verdict.rank if verdict.rank is not None else 0
    lines = [line for line in verdict.evidence if ": process state " in line]
    assert lines[0].startswith(f"rank {first}: ")
    assert len(lines) == len(ranks)


@pytest.mark.parametrize(
    ("ranks", "doubts", "alerts"),
    [
        (((900, 890), (900, 0)), ("", ""), ()),  # rank 1 computes for a long time before it joins
        (((900, 400), (900, 0)), ("unjoined", "unjoined"), (0, 1)),  # rank 0 worked until now
        (((305, 299), (305, 299)), ("unjoined", "unjoined"), ()),  # 300 s of idle time are near
        (((900, 0), (900, 0)), ("unjoined", "unjoined"), (0, 1)),
        (((900, 890), None), ("unjoined", ""), (0,)),  # rank 1 has joined, and steps
    ],
)
def test_a_rank_that_did_not_join_counts_if_it_is_idle_since_its_start_up(ranks, doubts, alerts):
    watch = Watch(startup_s=300)
    seen = of_foreign([
        replace(rank(number, ""), unchanged_s=found[0], idle_s=found[1]) if found else rank(number)
        for number, found in enumerate(ranks)
    ], watch)  # fmt: skip
    assert tuple(each.doubt for each in seen) == doubts
    assert tuple(each.rank for each in unwatched(seen, watch)) == alerts


PROGRESS = {
    "no rank": (),
    "every rank moves": (rank(0, unchanged=0.2), rank(1, unchanged=0.1)),
    "a slow rank moves": (rank(0, "backward", 50.0), rank(1, unchanged=1.0)),
    "stopped for two seconds": (rank(0, unchanged=2.0), rank(1, unchanged=2.0, state="T")),
    "all gone": (early(0, state="gone"), early(1, state="gone")),
    "all exited": (rank(0, "exit", 500.0), rank(1, "exit", 500.0)),
    "all exited, and one is still ending": (EXITED, replace(HUNG, unchanged_s=9.0)),
    "one exits, and the pulse of the other is lost": (HUNG, rank(0, "", 500.0, doubt="lost")),
    "one exited, the other moves": (EXITED, rank(1, "backward", 1.0, step=6)),
    "starting": (rank(0, "boot", 100.0, step=0), rank(1, "boot", 100.0, step=0)),
    "no pulse yet": (rank(0, "", 119.0, step=0),),
    "no step time": (rank(0, "forward", 100.0, p99_s=None), rank(1, "log", 100.0, p99_s=None)),
    "saving": (rank(0, "save", 100.0), rank(1, "save", 100.0)),
    "slow steps": (rank(0, "backward", 20.0, p99_s=6.0), rank(1, "forward", 20.0, p99_s=6.0)),
}


@pytest.mark.parametrize("name", PROGRESS)
def test_a_run_within_its_limits_has_no_verdict(name):
    assert judge(*PROGRESS[name]) is None


def foreign(*ranks):
    return tuple(replace(each, is_foreign=True) for each in ranks)


@pytest.mark.parametrize(
    ("paused", "waiting"), [("eval", "backward"), ("eval", "fetch"), ("save", "log")]
)
def test_a_foreign_program_may_evaluate_and_save_at_any_place_of_its_step(paused, waiting):
    """The other ranks may wait for this rank, or this rank for the others."""
    for unchanged_s in (100.0, 130.0):
        ranks = rank(0, paused, unchanged_s), rank(1, waiting, unchanged_s)
        assert judge(*ranks).rank == 1  # our trainers evaluate and save last
        found = judge(*foreign(*ranks))
        assert (found is not None) == (unchanged_s > 120)
    assert (found.cause, found.rank, found.sure) == ("all-ranks", None, "low")
    later = foreign(rank(0, paused, 100.0), rank(1, waiting, 100.0, step=40))
    assert judge(*later).rank == 1


def test_the_evidence_names_the_rank_that_hangs_while_the_others_save():
    ranks = foreign(*(rank(n, "save", 130.0) for n in range(3)), rank(3, "log", 130.0))
    found = diagnose(ranks, WATCH, NOW, four())
    assert (found.cause, found.rank, found.sure) == ("sleep", 3, "high")
    assert "; ranks 0-2 wait in save" in found.sentence


@pytest.mark.decision("act-on-stall", "lie")
@pytest.mark.parametrize("waits_s", [0, 10])
def test_no_rule_ends_a_foreign_program_within_three_limits_of_its_evaluation(waits_s):
    """The other ranks wait in `backward` of the same step, at once or 10 s later."""
    dog, found = Watched(Watch(eval_s=1200.0), "stall", "restart"), {}
    for second in range(15, 4000, 5):
        ranks = foreign(
            rank(0, "eval", float(second)),
            *(rank(n, "backward", float(second - waits_s)) for n in (1, 2, 3)),
        )
        for change in dog.poll(after_s=5.0, ranks=ranks, stall_doubt=""):
            found[change.kind] = second
    assert found == {"raise": 1205, "act": 3605}


def test_a_rank_that_waits_for_the_store_at_its_exit_is_not_said_to_start():
    stacks = {1: recorded("startup", 0)}
    found = diagnose((replace(EXITED, step=41), HUNG), WATCH, NOW, Evidence(stacks=stacks))
    assert (found.cause, found.rank) == ("exit-hangs", 1)


def test_a_stopped_or_exited_rank_is_named_after_three_seconds_whatever_the_limit():
    assert judge(early(0, "backward"), early(1, state="T")).rank == 1
    assert judge(early(0, "boot", step=0), early(1, "", state="T", step=0)).rank == 1
    assert judge(early(0, "backward"), early(1, state="Z")).cause == "exited"
    waits = judge(early(0, "backward", state="T"), early(1, "fetch"))
    assert (waits.rank, waits.cause, waits.sure) == (0, "stopped", "medium")
    assert waits.sentence.endswith("; rank 1 is slower, in fetch")


def test_the_next_step_after_an_exit_is_true_for_a_program_without_checkpoints():
    action = judge(rank(0, "backward"), rank(1, state="gone")).action
    assert action == "stop the run, then resume it, or launch it again if it has no checkpoint"


def test_a_pid_that_is_not_known_is_no_number_in_a_command():
    """The pid of a rank may be unknown; `kill -CONT 0` would send the signal to the shell."""
    found = judge(rank(0, "backward"), replace(rank(1, state="T"), pid=0))
    assert found.action == "kill -CONT PID-OF-RANK-1 resumes it"
    assert found.action in found.sentence
    both = judge(rank(0, state="T"), replace(rank(1, state="T"), pid=0))
    assert both.action == "kill -CONT 1000 PID-OF-RANK-1 resumes them"


def test_starting_and_saving_have_limits_of_their_own():
    assert judge(rank(0, "", 121.0, step=0)).cause == "startup"
    assert judge(rank(0, "save", 130.0), rank(1, "halt", 130.0)).rank == 0
    saves = judge(replace(EXITED, step=42), rank(1, "save", 130.0, step=42))
    assert (saves.cause, saves.rank) == ("all-ranks", 1)


def test_a_rank_that_hangs_after_its_exit_record_leads_to_no_action():
    watch = replace(WATCH, rules={"stall": WatchRule(action="restart")}, stall_act_s=1)
    run, ranks = Watched(watch), (replace(EXITED, step=41), replace(HUNG, unchanged_s=5000.0))
    assert judge(*ranks)
    assert [run.poll(ranks=ranks, stall_doubt="") for _ in range(200)] == [[]] * 200


def test_position_is_step_then_phase_then_collectives():
    assert judge(rank(0, "fetch", step=42), rank(1, "optimizer")).rank == 1
    equal = rank(0, "backward", collectives=15)
    assert judge(equal, replace(equal, rank=1, collectives=14)).rank == 1


def test_a_rank_that_exits_at_the_same_step_is_unsure():
    verdict = judge(replace(EXITED, state="S"), rank(1, "backward", step=5))
    assert (verdict.cause, verdict.sure) == ("exited-early", "medium")
    assert verdict.sentence.startswith("rank 0 is exiting at step 5 before the other ranks; ")


RANKS = st.lists(
    st.builds(
        RankEvidence,
        rank=st.integers(0, 20),
        pid=st.integers(1, 1 << 22),
        state=st.sampled_from(("R", "S", "D", "T", "t", "Z", "gone", "I")),
        step=st.integers(0, 1 << 40),
        phase=st.sampled_from((*PHASES, "")),
        unchanged_s=st.floats(0, 1e6),
        collectives=st.integers(0, 1 << 40),
        p99_s=st.none() | st.floats(0, 1e4),
    ),
    max_size=6,
    unique_by=lambda s: s.rank,
)


@pytest.mark.parametrize("counts", [(0, 0), (0, 7)])
def test_collectives_are_evidence_only_if_the_program_counts_them(counts):
    verdict = judge(
        *(rank(n, unchanged=999.0, collectives=count) for n, count in enumerate(counts))
    )
    lines = [line for line in verdict.evidence if ": process state " in line]
    assert ["collectives" in line for line in lines] == [any(counts)] * 2


@given(RANKS)
def test_a_verdict_names_a_slowest_rank_or_one_that_is_stopped_or_has_exited(ranks):
    verdict = diagnose(ranks, WATCH, 1.0)
    if verdict is None or verdict.rank is None:
        return
    named = next(each for each in ranks if each.rank == verdict.rank)
    lowest = min(each.position for each in ranks if each.phase != "exit")
    away = named.phase == "exit" or named.state in ("T", "t", "D", "Z", "gone")
    assert named.position == lowest or away


@given(RANKS)
def test_ranks_that_moved_within_three_seconds_never_get_a_verdict(ranks):
    assert diagnose([replace(each, unchanged_s=2.9) for each in ranks], WATCH, 1.0) is None


def test_the_first_verdict_says_that_the_evidence_is_being_collected():
    ranks = rank(0, "backward", 90.0), rank(1, unchanged=90.0)
    for evidence, words in ((COLLECTING, BEING_READ), (NO_EVIDENCE, LOOK_AT_STACKS)):
        assert diagnose(ranks, Watch(), NOW, evidence).sentence.endswith(f"; {words}")


def test_the_evidence_on_a_stopped_rank_has_the_limit_that_it_exceeded():
    ranks = early(0, "backward"), early(1, state="T")
    lines = diagnose(ranks, Watch(), NOW).evidence
    assert any("unchanged for 4 s, limit 3 s" in line for line in lines)
    assert any("unchanged for 4 s, limit 60 s" in line for line in lines)
