"""Ranks that wait for a file lock: the holder is another rank of the run, or another program."""

from __future__ import annotations

from dataclasses import replace

import pytest

from console.diagnose.evidence import Evidence
from console.sources.descriptors import BlockedOn
from tests.console.diagnose.stalled_ranks import (
    ASLEEP,
    DOWNLOADS,
    FILE_LOCK,
    FOUR,
    IDLE,
    OWN,
    PEERS,
    RUNS,
    SYNCHRONIZE,
    TCP,
    alike,
    expect,
    explained,
    four,
    stack,
    starting,
)

FLOCK = BlockedOn("lock", "the lock of /x, held by pid 1000 (python)", holder=1000)
USLEEP = BlockedOn("lock", "a timer, while pid 1000 (py) holds a lock of /x", True, holder=1000)


def locked(world, frames, main, first=DOWNLOADS):
    """Returns the evidence of ranks that wait for a lock of rank 0, which downloads by default."""
    before = {n: replace(IDLE, pid=1000 + n, main=main) for n in range(world)}
    before[0] = replace(before[0], main=TCP, has_flock=main is not USLEEP)
    stacks = {n: stack(n, *(frames if n else first)) for n in range(world)}
    return Evidence(before, {n: replace(p, mono=2.0) for n, p in before.items()}, stacks)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("phase", ["fetch", "step", "load", "boot"])
@pytest.mark.parametrize(
    ("frames", "main", "sure"),
    [((OWN,), FLOCK, "high"), ((OWN,), USLEEP, "medium"), (FILE_LOCK, ASLEEP.main, "medium")],
)
def test_the_rank_that_holds_the_lock_is_named_and_not_those_that_wait_for_it(
    frames, main, sure, phase, world
):
    """A library that asks for its lock at intervals does not show the file of the lock."""
    found = locked(world, frames, main)
    ranks = starting(world, phase) if phase in ("boot", "load") else alike(phase)[:world]
    verdict = expect(found, ranks, "startup" if phase == "boot" else "network", 0, sure)
    assert "waits for a socket to 10.0.0.7:443" in verdict.sentence
    words = {FLOCK: "the lock of /x, held by rank 0 (pid 1000)",
             USLEEP: "a timer, while rank 0 (pid 1000) holds a lock of /x"}  # fmt: skip
    assert any(words.get(main, "") in line for line in verdict.evidence), verdict.evidence


def test_the_holder_of_the_lock_is_named_without_its_stack():
    found = locked(4, (OWN,), FLOCK)
    expect(replace(found, stacks={}), FOUR, "network", 0, "medium")


def test_the_ranks_for_which_the_holder_of_their_lock_waits_are_named():
    verdict = expect(locked(4, (OWN,), FLOCK, PEERS), FOUR, "lock", 1, "high")
    assert "each waits for the lock of /x, held by rank 0 (pid 1000)" in verdict.sentence


def test_a_rank_that_waits_for_a_lock_of_its_own_is_named():
    """For example, it opened the file of the lock twice."""
    process = replace(IDLE, main=FLOCK, has_flock=True)
    found = four((), ((OWN,), PEERS, PEERS, PEERS), after={0: process, 3: IDLE})
    expect(found, FOUR, "lock", 0, "high")


@pytest.mark.parametrize("has_flock", [True, False])
def test_a_rank_that_waits_for_the_file_lock_of_another_program_is_named(has_flock):
    found = four((), (PEERS,) * 3 + (FILE_LOCK,), after={0: replace(IDLE, has_flock=has_flock)})
    expect(found, FOUR, "lock", 3, "high")
    words = "it has not joined the other ranks and waits for a file lock"
    assert words in explained(found, *starting(4)).sentence


@pytest.mark.parametrize(
    ("frames", "process", "sure"),
    [((OWN,), IDLE, "medium"), (SYNCHRONIZE, RUNS, "high")],  # first, `work.wait()`
)
def test_a_rank_whose_peers_have_locks_of_other_files_is_named(frames, process, sure):
    """Rank 3 waits for the lock of another program, and each rank has a lock of a file."""
    processes = {**dict.fromkeys(range(3), process), 3: ASLEEP}
    locks = {n: replace(each, pid=1000 + n, has_flock=True) for n, each in processes.items()}
    found = four((), (frames,) * 3 + (FILE_LOCK,), locks, locks)
    expect(found, FOUR, "lock", 3, sure)


def test_the_rank_with_a_lock_is_the_holder_if_all_others_wait_for_a_file_lock():
    """For example, rank 0 downloads in the threads of a library."""
    found = locked(4, FILE_LOCK, ASLEEP.main, (OWN,))
    found = replace(found, **{
        name: {**getattr(found, name), 0: replace(getattr(found, name)[0], main=IDLE.main)}
        for name in ("before", "after")
    })  # fmt: skip
    expect(found, FOUR, "lock", 0, "medium")
