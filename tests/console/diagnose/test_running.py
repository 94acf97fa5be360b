"""Ranks that use a core: they compute, hold the GIL or wait for it, or wait for their GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from console.diagnose.evidence import Evidence
from console.diagnose.gpu_signs import own_gpus
from console.diagnose.verdict import diagnose
from console.model import Gpu
from console.sources.descriptors import BlockedOn
from tests.console.diagnose.stalled_ranks import (
    ASLEEP,
    AT_REST,
    COMPUTES,
    FOUR,
    IDLE,
    NOW,
    OWN,
    PAIR,
    PEERS,
    RUNS,
    SPINS,
    SYNCHRONIZE,
    TCP,
    WAITING,
    WATCH,
    alike,
    expect,
    explained,
    flight,
    four,
    of_main_only,
    rank,
    runs,
    sampled,
    stack,
    with_gpu_of_rank_3,
    working,
)

# --- the GIL -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("waits", "others", "cause", "words", "sure"),
    [
        (25.0, (60.0,), "busy", "runs Python code at 95% of a core", "high"),
        (0.0, (20.0,), "native", "runs native code at 95% of a core", "high"),
        (0.0, (190.0,), "native", "runs native code at 95% of a core", "high"),  # holds the GIL
        (
            3.0,
            (190.0,),
            "native",
            "runs native code at 95% of a core",
            "high",
        ),  # and waits for memory
        (0.0, (40.0,), "busy", "runs at 95% of a core", "medium"),  # the watcher waits for the GIL
        (0.0, (), "busy", "runs at", "medium"),  # there is no watcher
        (0.0, (0.0,), "busy", "runs at", "medium"),  # the watcher is blocked
        (1.0, (20.0,), "native", "runs native code at 95% of a core", "high"),  # for its dump
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


# --- GPUs ----------------------------------------------------------------------------------------

SILENT = Gpu(0, "NVIDIA H100", "error", why="no answer for 9 s", minor=0)
ALL_OWN = {0: stack(0, OWN), 1: stack(1, OWN)}


def alone(gpus, process=RUNS):
    """Returns the evidence of one rank, which uses a core and has its own code in its stack."""
    return Evidence(
        {0: process}, {0: replace(process, cpu_ticks=300, mono=2.0)}, {0: stack(0, OWN)},
        gpus=gpus,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("gpus", "cause", "words"),
    [
        ({0: SPINS}, "device", "waits for its GPU, which runs a kernel that computes little"),
        ({0: COMPUTES}, "device", "waits for its GPU, which computes"),
        ({0: SILENT}, "device", "runs, or waits for its GPU"),
        ({0: None}, "device", "runs, or waits for its GPU"),
        ({0: AT_REST}, "busy", "runs at 100% of a core and makes no progress"),
        ({}, "busy", "runs at 100% of a core and makes no progress"),
    ],
)
def test_a_core_in_use_is_an_endless_loop_only_where_no_gpu_is_waited_for(gpus, cause, words):
    found = explained(alone(gpus), rank(0))
    assert (found.cause, words in found.sentence) == (cause, True), found.sentence
    if cause == "device":
        assert found.sure != "high"
        assert not any("makes no progress" in line for line in found.evidence)
    if gpus.get(0):
        assert any(line.startswith("GPUs: rank 0: GPU 0") for line in found.evidence)


def pair(first_gpu, second_gpu, second=OWN):
    """Returns the evidence of two ranks with one GPU each; rank 0 waits for its peers."""
    return Evidence(
        {0: RUNS, 1: RUNS},
        {n: replace(RUNS, cpu_ticks=300, mono=2.0) for n in (0, 1)},
        {0: stack(0, *PEERS), 1: stack(1, second)},
        {0: flight(0, 11), 1: flight(1, 10)},
        gpus={0: first_gpu, 1: replace(second_gpu, index=1, minor=1)},
    )


def test_the_rank_whose_gpu_is_idle_while_the_others_wait_on_theirs_is_named():
    # The true cause may also be "native".
    found = expect(pair(SPINS, AT_REST), PAIR, "busy", 1, "medium")
    assert any("GPU 1 at 0 %" in line for line in found.evidence)


def test_a_lost_gpu_names_its_rank():
    lost = Gpu(1, "NVIDIA H100", "lost", why="lost: Xid 79", minor=1)
    found = explained(pair(SPINS, lost), *PAIR)
    assert found.rank == 1
    assert any("GPU 1 lost: Xid 79" in line for line in found.evidence)


def test_the_rank_whose_gpu_computes_while_the_others_spin_is_named():
    found = replace(pair(SPINS, COMPUTES), stacks=ALL_OWN, flights={})
    found = expect(found, PAIR, "device", 1, "medium")
    assert "which computes" in found.sentence


@pytest.mark.parametrize(
    ("frames", "process", "last"),
    [
        (PEERS, IDLE, (11, 11, 11, 10)),  # a barrier of gloo
        (PEERS, IDLE, ()),
        ((OWN,), IDLE, ()),  # `work.wait()`
        ((OWN,), replace(IDLE, main=TCP), ()),  # `store.wait()`
    ],
)
def test_the_rank_whose_gpu_computes_while_the_others_wait_for_it_on_the_cpu_is_named(
    frames, process, last
):
    found = with_gpu_of_rank_3(frames, process, last)
    assert "which computes" in expect(found, FOUR, "device", 3, "medium").sentence


def test_no_rank_is_named_if_the_others_sleep_while_one_gpu_computes():
    """For example, they sleep until the file exists that rank 3 writes."""
    expect(with_gpu_of_rank_3((OWN,), ASLEEP), FOUR, "all-ranks", None, "low")


@pytest.mark.parametrize(("phase", "sure"), [("forward", "high"), ("optimizer", "medium")])
def test_a_stopped_rank_is_named_while_the_gpus_of_the_others_compute(phase, sure):
    """Rank 3 is behind the others, or ahead of them."""
    stopped = replace(RUNS, state="T")
    before = {**dict.fromkeys(range(3), RUNS), 3: stopped}
    after = {n: replace(RUNS, cpu_ticks=300, mono=2.0) for n in range(3)}
    found = Evidence(
        before, {**after, 3: replace(stopped, mono=2.0)},
        {n: stack(n, *SYNCHRONIZE) for n in range(3)},
        gpus={n: replace(COMPUTES if n < 3 else AT_REST, index=n, minor=n) for n in range(4)},
    )  # fmt: skip
    expect(found, (*FOUR[:3], rank(3, phase, state="T")), "stopped", 3, sure)


def test_a_gpu_without_figures_is_at_most_low_and_no_endless_loop():
    """The GPU of rank 1 has no utilisation, as with MIG, or is not known, as with WSL."""
    unknown = replace(SPINS, util_pct=None)
    for gpu in (unknown, None):
        evidence = replace(pair(SPINS, SPINS), gpus={0: SPINS, 1: gpu})
        expect(evidence, PAIR, "device", 1, "low")


def test_another_thread_that_uses_a_core_makes_no_wait_of_the_main_thread():
    asleep = replace(IDLE, main=BlockedOn("timer", "a timer"))
    found = explained(alone({0: SPINS}, asleep), rank(0))
    assert found.cause == "sleep", found.sentence


def test_a_rank_that_shares_its_core_waits_in_the_same_frame_as_the_others():
    """Rank 1 is in state S in both samples, and uses less than a whole core."""
    slow, whole = replace(RUNS, state="S"), pair(SPINS, SPINS)
    after = {**whole.after, 1: replace(slow, cpu_ticks=180, mono=2.0)}
    found = replace(whole, before={0: RUNS, 1: slow}, after=after, stacks=ALL_OWN, flights={})
    expect(found, PAIR, "device", None, "medium")


def test_ranks_that_all_wait_for_their_gpus_blame_nobody():
    evidence = replace(pair(SPINS, SPINS), stacks=ALL_OWN, flights={})
    found = expect(evidence, PAIR, "device", None, "medium")
    assert "each waits for its GPU" in found.sentence


ROWS = tuple(replace(SPINS, index=n, minor=n) for n in range(4))
ALL = frozenset(range(4))


@pytest.mark.parametrize(
    ("opened", "visible", "indices"),
    [
        ({0: ALL, 1: ALL}, "", [0, 1]),  # CUDA opens the files of all GPUs
        ({0: ALL, 1: ALL}, "2,3", [2, 3]),
        ({0: frozenset({2}), 1: frozenset({3})}, "GPU-1,GPU-2", [2, 3]),
        ({0: ALL, 1: ALL}, "GPU-1,GPU-2", [None, None]),
        ({0: frozenset({0}), 1: frozenset({0})}, "", [None, None]),  # both ranks share a GPU
        ({0: None, 1: ALL}, "", [0, 1]),
        ({0: frozenset({-1}), 1: ALL}, "", [None, 1]),  # WSL
    ],
)
def test_a_rank_has_one_gpu_of_its_own_or_none_that_is_known(opened, visible, indices):
    found = own_gpus(opened, {each: {"CUDA_VISIBLE_DEVICES": visible} for each in opened}, ROWS)
    assert [gpu.index if gpu else None for _, gpu in sorted(found.items())] == indices


def test_a_rank_whose_environment_cannot_be_read_has_no_gpu_that_is_known():
    environments = {0: {}, 1: {"CUDA_VISIBLE_DEVICES": "2,3"}, 2: {}}
    found = own_gpus({0: ALL, 1: ALL, 2: frozenset({0})}, environments, ROWS)
    assert found == {0: None, 1: ROWS[3], 2: ROWS[0]}


def test_a_rank_without_a_device_file_uses_no_gpu():
    assert own_gpus({0: frozenset(), 1: None}, {0: {}, 1: {}}, ()) == {}
    assert own_gpus({0: frozenset()}, {0: {}}, ROWS) == {}


def test_different_gpus_are_known_only_in_the_order_of_their_bus():
    """CUDA's default order puts the fastest GPU first."""
    rows = (*ROWS[:3], replace(ROWS[3], name="a small GPU"))
    for variables, gpu in (({"PATH": "/"}, None), ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, rows[0])):
        assert own_gpus({0: ALL}, {0: variables}, rows) == {0: gpu}


@pytest.mark.parametrize(("waits", "cause"), [(25.0, "busy"), (0.0, "device")])
def test_python_code_is_no_wait_for_a_gpu_whose_file_is_only_open(waits, cause):
    """A CPU program that counts the GPUs has their files open, as was seen on an H100."""
    found = replace(runs(waits), gpus={0: None, 1: None})
    assert explained(found, *PAIR).cause == cause


def test_the_next_step_of_ranks_that_all_wait_for_their_gpus_names_a_process():
    found = Evidence({}, {}, {n: stack(n, *SYNCHRONIZE) for n in (0, 1)})
    verdict = diagnose([rank(n, "forward") for n in (0, 1)], WATCH, NOW, found)
    assert (verdict.cause, verdict.rank) == ("device", None), verdict
    assert "py-spy dump --native --pid 1000" in verdict.action, verdict.action
