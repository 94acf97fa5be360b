"""The step before which all ranks halt, also if their hosts run ahead of the collectives."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainers.contract import rundir
from trainers.contract.halt_board import HaltBoard
from trainers.contract.pulse import SIZE_BYTES


def halts(
    folder: Path, world: int, turns: Iterable[int], wishes: dict[int, int], ahead: int
) -> list[int]:
    """Returns the step before which each rank halts.

    `turns` are the ranks in the order in which they try to begin their next step; afterwards, all
    ranks try in turn. A rank is at most `ahead` steps ahead of the slowest one. Each rank in
    `wishes` requests the halt from its step on.
    """
    boards = [HaltBoard(folder, 1, rank, world) for rank in range(world)]
    begun, halted = [0] * world, [0] * world
    in_turn = (rank for _ in range(100) for rank in range(world))
    for rank in (*turns, *in_turn):
        step = begun[rank] + 1
        if not halted[rank] and step <= min(begun) + 1 + ahead:
            if boards[rank].decide(step >= wishes.get(rank, 1000)):
                halted[rank] = step
            else:
                begun[rank] = step
    return halted


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_all_ranks_halt_before_the_same_step_in_any_order(data):
    world, ahead = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 5))
    ranks = st.integers(0, world - 1)
    turns = data.draw(st.lists(ranks, max_size=60))
    wishes = data.draw(st.dictionaries(ranks, st.integers(1, 20), min_size=1))
    with tempfile.TemporaryDirectory() as folder:
        halted = halts(Path(folder), world, turns, wishes, ahead)
    assert len(set(halted)) == 1
    first = min(wishes.values())
    # The request of another rank is seen by rank 0 at its next step.
    assert first < halted[0] <= first + 2 * ahead + 3


@pytest.mark.parametrize(("wishes", "step"), [({0: 6}, 11), ({1: 10}, 12)])
def test_a_rank_whose_device_has_steps_in_its_queue_halts_with_the_others(tmp_path, wishes, step):
    """Rank 0 saves alone in step 5, while rank 1 already begins step 9."""
    turns = [*(0, 1) * 5, *[1] * 4]
    assert halts(tmp_path, 2, turns, wishes, ahead=4) == [step, step]


def test_more_ranks_than_a_board_of_256_bytes_has_room_for_halt_together(tmp_path):
    rundir.halt_board(tmp_path, 1).write_bytes(bytes(SIZE_BYTES))
    halted = halts(tmp_path, 70, [69] * 3, {69: 2}, 3)
    assert set(halted) == {5}


def test_a_decision_of_an_earlier_program_halts_nobody(tmp_path):
    before = [HaltBoard(tmp_path, 1, rank, 2) for rank in (0, 1)]
    assert [before[0].decide(halt=True) for _ in range(3)] == [False, False, True]
    assert not any(before[1].decide(halt=False) for _ in range(2))
    after = [HaltBoard(tmp_path, 1, rank, 2) for rank in (0, 1)]
    assert not any(board.decide(halt=False) for _ in range(12) for board in after)
    assert [after[0].decide(halt=True) for _ in range(3)] == [False, False, True]


def test_a_rank_without_world_size_has_a_place(tmp_path):
    assert not HaltBoard(tmp_path, 1, 3, 1).decide(halt=False)
