"""The step before which all ranks halt, also if their hosts run ahead of the collectives."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from random import Random

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


class Interleaved:
    """Ranks in threads that run one at a time, each up to its next access to the board."""

    def __init__(self, folder: Path, world: int, wishes: dict[int, int], ahead: int):
        self._wishes, self._ahead = wishes, ahead
        self._boards = [HaltBoard(folder, 1, rank, world) for rank in range(world)]
        for rank, board in enumerate(self._boards):
            board._numbers = Shared(board._numbers, partial(self.pause, rank))
        self._begun, self.halted = [0] * world, [0] * world
        self._may_run = [threading.Semaphore(0) for _ in range(world)]
        self._paused = threading.Semaphore(0)

    def pause(self, rank: int) -> None:
        self._paused.release()
        self._may_run[rank].acquire()

    def run(self, chance: Random) -> None:
        """Runs the ranks until all have halted, each for a random number of accesses."""
        world = len(self._boards)
        for rank in range(world):
            threading.Thread(target=self._rank, args=(rank,), daemon=True).start()
            self._paused.acquire()
        while not all(self.halted):
            rank = chance.randrange(world)
            for _ in range(chance.choice((1, 1, 2, 3, 10, 30))):
                if not self.halted[rank]:
                    self._may_run[rank].release()
                    self._paused.acquire()

    def _rank(self, rank: int) -> None:
        self.pause(rank)
        while not self.halted[rank]:
            step = self._begun[rank] + 1
            if step > min(self._begun) + 1 + self._ahead:
                self.pause(rank)
            elif self._boards[rank].decide(step >= self._wishes.get(rank, 1000)):
                self.halted[rank] = step
            else:
                self._begun[rank] = step
        self._paused.release()


class Shared:
    """The numbers of a board; other ranks may run before each access."""

    def __init__(self, numbers: memoryview, pause: Callable[[], None]):
        self._numbers, self._pause = numbers, pause

    def __getitem__(self, place):
        if isinstance(place, slice):
            return [self[each] for each in range(len(self._numbers))[place]]
        self._pause()
        return self._numbers[place]

    def __setitem__(self, place, number):
        self._pause()
        self._numbers[place] = number


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_all_ranks_halt_before_the_same_step_in_any_order_of_their_accesses(data):
    world, ahead = data.draw(st.integers(2, 4)), data.draw(st.integers(0, 5))
    ranks = st.integers(0, world - 1)
    wishes = data.draw(st.dictionaries(ranks, st.integers(1, 20), min_size=1))
    chance = Random(data.draw(st.integers(0, 1 << 32)))
    with tempfile.TemporaryDirectory() as folder:
        run = Interleaved(Path(folder), world, wishes, ahead)
        run.run(chance)
    assert len(set(run.halted)) == 1
    first = min(wishes.values())
    # The request of another rank is seen by rank 0 at its next step.
    assert first < run.halted[0] <= first + 2 * ahead + 2


def test_a_rank_that_is_alone_halts_before_its_next_step(tmp_path):
    assert halts(tmp_path, 1, [], {0: 3}, 0) == [3]


@pytest.mark.parametrize(("wishes", "step"), [({0: 6}, 10), ({1: 10}, 11)])
def test_a_rank_whose_device_has_steps_in_its_queue_halts_with_the_others(tmp_path, wishes, step):
    """Rank 0 saves alone in step 5, while rank 1 already begins step 9."""
    turns = [*(0, 1) * 5, *[1] * 4]
    assert halts(tmp_path, 2, turns, wishes, ahead=4) == [step, step]


def test_more_ranks_than_a_board_of_256_bytes_has_room_for_halt_together(tmp_path):
    rundir.halt_board(tmp_path, 1).write_bytes(bytes(SIZE_BYTES))
    halted = halts(tmp_path, 70, [69] * 3, {69: 2}, 3)
    assert set(halted) == {4}


def test_a_decision_of_an_earlier_program_halts_nobody(tmp_path):
    before = [HaltBoard(tmp_path, 1, rank, 2) for rank in (0, 1)]
    assert [before[0].decide(halt=True) for _ in range(2)] == [False, True]
    assert not before[1].decide(halt=False)
    after = [HaltBoard(tmp_path, 1, rank, 2) for rank in (0, 1)]
    assert not any(board.decide(halt=False) for _ in range(12) for board in after)
    assert [after[0].decide(halt=True) for _ in range(2)] == [False, True]


def test_a_rank_without_world_size_has_a_place(tmp_path):
    assert not HaltBoard(tmp_path, 1, 3, 1).decide(halt=False)
