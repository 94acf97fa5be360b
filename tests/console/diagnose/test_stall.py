"""Who is to blame, from pulses and process states alone."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.diagnose.stall import Seen, diagnose, limit_s
from trainers.contract.plan import Watch
from trainers.contract.pulse import PHASES

NOW = 1_790_000_000.0
WATCH = Watch(stall_floor_s=10, startup_s=120, grace_s=15)


def seen(rank, phase="forward", still=12.0, state="S", step=41, **more):
    return Seen(rank, 1000 + rank, state, step, phase, still, **more)


def judge(*ranks):
    return diagnose(ranks, WATCH, NOW)


def test_a_run_that_moves_has_no_verdict():
    assert judge(seen(0, still=0.2), seen(1, still=0.1)) is None
    assert judge() is None


def test_the_rank_behind_is_named_with_phase_step_and_who_waits():
    verdict = judge(seen(0, "backward"), seen(1, "forward"))
    assert (verdict.rank, verdict.cause) == (1, "behind")
    assert (verdict.phase, verdict.step) == ("forward", 41)
    since = time.strftime("%H:%M:%S", time.localtime(NOW - 12))
    assert verdict.sentence == (
        f"rank 1 is behind: in forward of step 41 since {since}; rank 0 waits in backward"
    )
    assert verdict.sure == "medium"
    assert [line.partition(":")[0] for line in verdict.evidence] == ["rank 1", "rank 0"]


def test_a_rank_that_is_one_step_behind_is_lower_than_one_that_fetches_the_next():
    verdict = judge(seen(0, "fetch", step=42), seen(1, "optimizer", step=41))
    assert verdict.rank == 1
    assert "rank 0 waits in fetch of step 42" in verdict.sentence


def test_the_collective_count_tells_when_the_phases_are_equal():
    verdict = judge(seen(0, "backward", collectives=15), seen(1, "backward", collectives=14))
    assert (verdict.rank, verdict.sure) == (1, "medium")


def test_a_stopped_rank_is_named_after_three_seconds_whatever_the_limit():
    assert judge(seen(0, still=2.0), seen(1, still=2.0, state="T")) is None
    verdict = judge(seen(0, "backward", still=4.0), seen(1, still=4.0, state="T"))
    assert (verdict.rank, verdict.cause, verdict.sure) == (1, "stopped", "high")
    assert "kill -CONT 1001" in verdict.sentence
    assert judge(seen(0, "boot", 4.0, step=0), seen(1, "", 4.0, "T", step=0)).rank == 1


def test_a_stopped_rank_that_waits_is_not_blamed_for_the_one_behind_it():
    stopped, fetching = seen(0, "backward", state="T"), seen(1, "fetch")
    early = judge(replace(stopped, still_s=4.0), replace(fetching, still_s=4.0))
    assert (early.rank, early.cause, early.sure) == (0, "stopped", "medium")
    assert early.sentence.endswith("; rank 1 is further behind in fetch")
    verdict = judge(stopped, fetching, seen(2, "backward"))
    assert (verdict.rank, verdict.cause, verdict.phase) == (1, "behind", "fetch")
    assert verdict.sentence.endswith("; rank 2 waits in backward")
    assert "; rank 0 is stopped in backward (kill -CONT 1000 lets it go on); " in verdict.sentence
    behind = judge(replace(stopped, phase="fetch"), seen(1, "backward"))
    assert (behind.rank, behind.cause, behind.sure) == (0, "stopped", "high")


def test_a_rank_that_is_gone_is_named_but_not_an_end_of_all():
    assert judge(seen(0, "backward", 4.0), seen(1, still=4.0, state="Z")).cause == "gone"
    assert judge(seen(0, still=4.0, state="gone"), seen(1, still=4.0, state="gone")) is None


def test_uninterruptible_sleep_is_said():
    verdict = judge(seen(0, "backward"), seen(1, "fetch", state="D"))
    assert (verdict.rank, verdict.cause) == (1, "uninterruptible")


def test_all_at_the_same_place_names_no_rank():
    verdict = judge(seen(0, "backward"), seen(1, "backward"))
    assert (verdict.rank, verdict.cause, verdict.sure) == (None, "level", "low")
    assert "ranks 0-1 stand still in backward of step 41" in verdict.sentence
    assert judge(seen(0)).rank == 0


def test_a_slow_rank_that_still_moves_is_no_stall():
    assert judge(seen(0, "backward", 50.0), seen(1, "forward", 1.0)) is None


def test_a_rank_that_left_properly_is_not_waited_for():
    assert judge(seen(0, "exit", 500.0), seen(1, "exit", 500.0)) is None


def test_a_rank_that_left_while_the_others_wait_is_named_with_its_exit_code():
    left = seen(0, "exit", 500.0, "gone", step=5, code=0)
    verdict = judge(left, seen(1, "backward", step=6), seen(2, "backward", step=6))
    assert (verdict.cause, verdict.rank, verdict.step, verdict.sure) == ("left", 0, 5, "high")
    assert verdict.sentence.startswith(
        "rank 0 has left (exit 0) at step 5 while the others wait, since "
    )
    assert verdict.sentence.endswith("; ranks 1-2 wait in backward of step 6")
    assert verdict.evidence[0].startswith("rank 0: process state gone, exit of step 5")
    same = judge(left, seen(1, "backward", step=5))
    assert (same.cause, same.rank, same.sure) == ("left", 0, "medium")
    assert same.sentence.endswith("; rank 1 waits in backward")
    assert "rank 0 is leaving at step" in judge(replace(left, state="S"), seen(1)).sentence
    assert judge(left, seen(1, "backward", still=1.0, step=6)) is None


def test_a_rank_that_left_after_the_others_is_said_and_not_blamed():
    left = seen(0, "exit", 500.0, "gone", step=42, code=0)
    for other in (seen(1, "forward"), seen(1, "save", 130.0, step=42)):
        verdict = judge(left, other)
        assert (verdict.cause, verdict.rank) == ("level", 1)
        assert verdict.sentence.startswith("rank 1 stands still in ")
        assert verdict.sentence.endswith("; rank 0 has left (exit 0)")
    assert "rank 0 has left" in judge(left, seen(1), seen(2, "backward")).sentence


def test_starting_and_saving_have_budgets_of_their_own():
    assert judge(seen(0, "boot", 100.0, step=0), seen(1, "boot", 100.0, step=0)) is None
    assert judge(seen(0, "", 119.0, step=0)) is None
    assert judge(seen(0, "", 121.0, step=0)).cause == "level"
    assert judge(seen(0, "forward", 100.0, step=1), seen(1, "forward", 100.0, step=1)) is None
    assert judge(seen(0, "save", 100.0), seen(1, "save", 100.0)) is None
    assert judge(seen(0, "save", 130.0), seen(1, "halt", 130.0)).rank == 0


def test_the_limit_follows_slow_steps():
    assert limit_s(seen(0), WATCH) == 10
    assert limit_s(seen(0, p99_s=0.5), WATCH) == 10
    assert limit_s(seen(0, p99_s=6.0), WATCH) == 30
    slow = seen(0, "backward", 20.0, p99_s=6.0), seen(1, "forward", 20.0, p99_s=6.0)
    assert diagnose(slow, WATCH, 1.0) is None


def test_many_ranks_are_named_in_spans():
    waiting = [seen(rank, "backward") for rank in (0, 1, 2, 4, 5, 7)]
    verdict = judge(*waiting, seen(3), seen(6))
    assert verdict.sentence.startswith("ranks 3, 6 are behind: in forward of step 41")
    assert "ranks 0-2, 4-5, 7 wait in backward" in verdict.sentence


RANKS = st.lists(
    st.builds(
        Seen,
        rank=st.integers(0, 20),
        pid=st.integers(1, 1 << 22),
        state=st.sampled_from(("R", "S", "D", "T", "t", "Z", "gone", "I")),
        step=st.integers(0, 1 << 40),
        phase=st.sampled_from((*PHASES, "")),
        still_s=st.floats(0, 1e6),
        collectives=st.integers(0, 1 << 40),
        p99_s=st.none() | st.floats(0, 1e4),
    ),
    max_size=6,
    unique_by=lambda s: s.rank,
)


@given(RANKS)
def test_a_verdict_always_names_one_of_the_lowest_or_one_that_stopped_left_or_is_lost(ranks):
    verdict = diagnose(ranks, WATCH, 1.0)
    if verdict is None or verdict.rank is None:
        return
    blamed = next(s for s in ranks if s.rank == verdict.rank)
    lowest = min(s.position for s in ranks if s.phase != "exit")
    away = blamed.phase == "exit" or blamed.state in ("T", "t", "Z", "gone")
    assert blamed.position == lowest or away


@given(RANKS)
def test_ranks_that_moved_within_three_seconds_never_get_a_verdict(ranks):
    moving = [Seen(s.rank, s.pid, s.state, s.step, s.phase, 2.9, p99_s=s.p99_s) for s in ranks]
    assert diagnose(moving, WATCH, 1.0) is None


@pytest.mark.parametrize("still", [10.5, 1000.0])
def test_what_is_said_fits_a_line(still):
    assert len(judge(seen(0, "backward", still), seen(1, still=still)).sentence) < 160


def test_a_rank_that_is_dead_and_not_reaped_is_not_called_gone():
    verdict = judge(seen(0, "backward", 4.0), seen(1, "forward", 4.0, state="Z"))
    assert verdict.cause == "gone"
    assert verdict.sentence.startswith("rank 1 is dead (unreaped: its parent does not run), last")
