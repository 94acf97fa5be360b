"""Threads that compute, hold the GIL, or wait for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from console.sources.descriptors import BlockedOn
from tests.console.diagnose.stalled_ranks import (
    FOUR,
    IDLE,
    OWN,
    PAIR,
    PEERS,
    WAITING,
    alike,
    expect,
    explained,
    four,
    of_main_only,
    runs,
    sampled,
    working,
)


@pytest.mark.parametrize(
    ("waits", "others", "cause", "words", "sure"),
    [
        (25.0, (60.0,), "busy", "runs Python code at 95% of a core", "high"),
        (0.0, (20.0,), "native", "runs native code at 95% of a core", "high"),
        (0.0, (190.0,), "native", "runs native code at 95% of a core", "high"),  # holds the GIL
        (0.0, (40.0,), "busy", "runs at 95% of a core", "medium"),  # the watcher waits for the GIL
        (0.0, (), "busy", "runs at", "medium"),  # there is no watcher
        (0.0, (0.0,), "busy", "runs at", "medium"),  # the watcher is blocked
        (1.5, (20.0,), "busy", "runs at", "medium"),
    ],
)
def test_a_main_thread_that_never_waits_for_the_gil_runs_native_code(
    waits, others, cause, words, sure
):
    assert words in expect(runs(waits, others), PAIR, cause, 1, sure).sentence


@pytest.mark.parametrize(
    ("waits", "ticks", "threads", "cause", "sure"),
    [
        (0.0, 0, True, "lock", "high"),
        (0.0, 0, False, "lock", "medium"),  # the CPU time of the thread is not available
        (25.0, 22, True, "busy", "high"),  # the thread gets 11 % of a core
        (10.0, 22, True, "busy", "high"),
        (0.0, 22, True, "busy", "medium"),
    ],
)
def test_a_thread_that_ran_waits_for_the_gil_and_not_for_a_lock(waits, ticks, threads, cause, sure):
    """On a busy host, a thread that computes may wait for the GIL in both samples."""
    asleep = WAITING | ({} if threads else {"threads": ()})
    before, after = (replace(each, **asleep) for each in working(waits, (), ticks))
    expect(sampled(before, after), PAIR, cause, 1, sure)


def test_a_lock_with_a_time_limit_stays_a_lock_if_the_samples_are_a_minute_apart():
    """Each wake-up of the wait uses some CPU time: here 0.12 s in a minute."""
    before, after = working(0.1, ())
    for seconds, ticks in ((2.0, 0), (60.0, 12)):
        threads = (replace(after.threads[0], cpu_ticks=before.threads[0].cpu_ticks + ticks),)
        last = replace(after, mono=before.mono + seconds, threads=threads, **WAITING)
        found = sampled(replace(before, **WAITING), last)
        assert explained(found, *PAIR).cause == "lock", seconds


def test_a_computation_in_other_threads_says_nothing_about_the_main_thread():
    before, after = working(25.0)
    threads = after.threads[0], replace(after.threads[1], cpu_ticks=150)
    found = replace(runs(25.0), before={1: before}, after={1: replace(after, threads=threads)})
    assert explained(found, *PAIR).sure == "medium"


def test_a_rank_whose_native_code_holds_the_gil_is_sure_where_all_others_wait():
    found = four((11, 11, 11, None), after={3: IDLE})
    for frame, sure in ((OWN, "high"), (PEERS[0], "medium")):  # the rank may only be late
        stacks = {**found.stacks, 3: of_main_only(3, frame, OWN)}
        expect(replace(found, stacks=stacks), alike("step"), "native", 3, sure)


@pytest.mark.parametrize(
    ("process", "words"),
    [
        (None, "waits for the GIL, or holds it in native code"),
        ({}, "waits for the GIL, which native code holds, perhaps in another thread"),
        ({"state": "R", "main": BlockedOn("none", "")}, "runs native code that holds the GIL"),
        ({"main": BlockedOn("none", "")}, "waits for the GIL, or holds it in native code"),
        (
            {"main": BlockedOn("timer", "a timer")},
            "waits for a timer while native code holds the GIL, perhaps in another thread",
        ),
    ],
)
def test_the_main_thread_holds_the_gil_for_sure_only_while_its_process_runs(process, words):
    """A dump of the main thread alone says that a thread holds the GIL, and not which thread."""
    processes = {3: replace(IDLE, **process)} if process is not None else {}
    stacks = {**four().stacks, 3: of_main_only(3)}
    found = replace(four(), after=processes, before=processes, stacks=stacks)
    verdict = explained(found, *FOUR)
    assert (verdict.cause, verdict.rank) == ("native", 3)
    assert f": it {words}" in verdict.sentence, verdict.sentence
    assert process != {} or "train.py" not in verdict.sentence
