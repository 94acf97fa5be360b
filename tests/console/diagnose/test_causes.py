"""The cause of a stall from its evidence: the rules, the named ranks and the confidence."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from console.diagnose.causes import CAUSES
from console.diagnose.evidence import Evidence
from console.diagnose.rank_evidence import RankEvidence
from console.diagnose.stack_classes import _DATA
from console.diagnose.verdict import diagnose
from console.plan import Watch
from console.sources.descriptors import BlockedOn, Connection
from console.sources.flight import Collective, FlightRecord
from console.sources.kernel_evidence import ChildEvidence, ProcessEvidence, ThreadEvidence
from console.sources.stacks import Frame, Stack, Thread

WATCH, NOW = Watch(stall_floor_s=5.0), 1_800_000_000.0
TORCH = "/venv/lib/python3.11/site-packages/torch"
PEERS = (
    Frame(f"{TORCH}/distributed/distributed_c10d.py", 3252, "all_reduce"),
    Frame("/job/train.py", 40, "step"),
)
OWN = Frame("/job/train.py", 41, "augment")
IDLE = ProcessEvidence(
    pid=1000, state="S", wchan="futex_wait_queue", cpu_ticks=100, mono=0.0, tracer=None,
    frozen=False, main=BlockedOn("futex", "a lock, an event or a future (futex)"), threads=(),
    children=(),
)  # fmt: skip


def working(waits, others=(20.0,), ticks=190):
    """Returns two samples, 2 s apart, of a process that runs.

    `waits` is the number of waits per second of its main thread. `others` has those of its other
    Python threads; the first of these is the contract's watcher.
    """

    def sample(mono):
        threads = [
            ThreadEvidence(1000, "python", "R", "", int(ticks * mono / 2), int(waits * mono) + 5)
        ]
        threads += [ThreadEvidence(1001 + at, "python", "S", "", 0, int(each * mono) + 5)
                    for at, each in enumerate(others)]  # fmt: skip
        threads += [ThreadEvidence(1009, "gloo_tcp_loop", "S", "", 0, int(98 * mono) + 5)]
        return replace(
            IDLE, state="R", wchan="", main=BlockedOn("none", ""), mono=mono,
            cpu_ticks=100 + int(ticks * mono / 2), threads=tuple(threads),
        )  # fmt: skip

    return sample(0.0), sample(2.0)


def rank(number, phase="backward", step=41, state="S", **more):
    return RankEvidence(number, 1000 + number, state, step, phase, 12.0, **more)


def stack(number, *frames):
    threads = Thread("main", tuple(frames)), Thread("watcher", (OWN,))
    return Stack(number, NOW, "x", threads)


def flight(number, last):
    calls = tuple(Collective("0", n, "all_reduce", "[8] float32", n < last) for n in (9, last))
    return FlightRecord(number, NOW, "x", {"0": last}, calls)


def evidence(first=PEERS, ticks=100, last=10, **process):
    """Returns the evidence of two ranks: rank 0 waits for its peers, rank 1 is as given."""
    ill = replace(IDLE, **process)
    return Evidence(
        before={0: IDLE, 1: replace(ill, cpu_ticks=100)},
        after={0: replace(IDLE, mono=2.0), 1: replace(ill, cpu_ticks=ticks, mono=2.0)},
        stacks={0: stack(0, *PEERS), **({1: stack(1, *first)} if first else {})},
        flights={0: flight(0, 11), 1: flight(1, last)},
    )


def explained(found, *ranks):
    return diagnose(ranks, WATCH, NOW, found)


def runs(*given, **more):
    before, after = working(*given, **more)
    found = evidence((OWN,))
    return replace(found, before={0: IDLE, 1: before}, after={0: found.after[0], 1: after})


LOADER = Frame(f"{TORCH}/utils/data/dataloader.py", 1131, "_try_get_data")
CASES = {
    "stopped": evidence(None, state="T"),
    "traced": evidence(None, state="t", tracer=(77, "gdb")),
    "frozen": evidence(None, frozen=True),
    "disk": evidence(None, state="D", main=BlockedOn("disk", "a disk, in io_schedule")),
    "loader": evidence((LOADER, OWN), children=(ChildEvidence(5121, "pt_data_worker", "T"),)),
    "child": evidence((OWN,), main=BlockedOn("child", "child 5121 (sh, sleeping)")),
    "lock": evidence((OWN,), main=BlockedOn("lock", "the lock of /data/x, held by pid 512 (py)")),
    "pipe": evidence((OWN,), main=BlockedOn("pipe", "the FIFO /run/q, which has no writer")),
    "network": evidence((OWN,), main=BlockedOn("network", "a socket to 10.0.0.7:443")),
    "sleep": evidence((OWN,), main=BlockedOn("timer", "a timer")),
    "busy": runs(25.0, (60.0,)),
    "native": runs(0.0),
}


@pytest.mark.decision("verdict-cause", "true")
@pytest.mark.parametrize("cause", CASES)
def test_a_cause_is_named_with_the_rank_that_blocks_in_the_phase_of_its_peers(cause):
    """All pulses are at the same position, so only the evidence names rank 1."""
    found = explained(CASES[cause], rank(0), rank(1))
    assert (found.cause, found.rank) == (cause, 1), found
    assert found.action
    assert found.sure == "high"
    assert "rank 1 has been stalled in backward of step 41" in found.sentence
    assert found.sentence.endswith("rank 0 waits in backward")


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
    found = explained(runs(waits, others), rank(0), rank(1))
    assert (found.cause, found.rank, found.sure) == (cause, 1, sure), found
    assert words in found.sentence


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
    asleep = {"state": "S", "wchan": IDLE.wchan, "main": IDLE.main}
    samples = [replace(each, **asleep) for each in working(waits, (), ticks)]
    samples = [each if threads else replace(each, threads=()) for each in samples]
    found = evidence((OWN,))
    found = replace(
        found, before={0: IDLE, 1: samples[0]}, after={0: found.after[0], 1: samples[1]}
    )
    verdict = explained(found, rank(0), rank(1))
    assert (verdict.cause, verdict.rank, verdict.sure) == (cause, 1, sure), verdict


def test_a_lock_with_a_time_limit_stays_a_lock_if_the_samples_are_a_minute_apart():
    """Each wake-up of the wait uses some CPU time: here 0.12 s in a minute."""
    before, after = working(0.1, ())
    for seconds, ticks in ((2.0, 0), (60.0, 12)):
        threads = (replace(after.threads[0], cpu_ticks=before.threads[0].cpu_ticks + ticks),)
        asleep = {"state": "S", "wchan": IDLE.wchan, "main": IDLE.main}
        last = replace(after, mono=before.mono + seconds, threads=threads, **asleep)
        found = replace(evidence((OWN,)), before={0: IDLE, 1: replace(before, **asleep)},
                        after={0: replace(IDLE, mono=seconds), 1: last})  # fmt: skip
        assert explained(found, rank(0), rank(1)).cause == "lock", seconds


def test_a_computation_in_other_threads_says_nothing_about_the_main_thread():
    before, after = working(25.0)
    threads = after.threads[0], replace(after.threads[1], cpu_ticks=150)
    found = replace(runs(25.0), before={1: before}, after={1: replace(after, threads=threads)})
    assert explained(found, rank(0), rank(1)).sure == "medium"


def test_all_ranks_that_are_stopped_are_named_together():
    all_stopped = {n: replace(IDLE, state="T") for n in range(2)}
    after = {n: replace(each, mono=2.0) for n, each in all_stopped.items()}
    found = explained(Evidence(all_stopped, after), *(rank(n, state="T") for n in range(2)))
    assert (found.cause, found.rank, found.sure) == ("stopped", None, "medium")
    assert "ranks 0-1 have been stalled" in found.sentence


ACQUIRES = (Frame("/usr/lib/python3.11/threading.py", 327, "acquire"), OWN)
PUTS = (Frame("/usr/lib/python3.11/multiprocessing/queues.py", 377, "put"), OWN)
SELECTS = (Frame("/usr/lib/python3.11/selectors.py", 468, "select"), OWN)
FULL = BlockedOn("pipe", "a pipe that is full")
TCP = BlockedOn("network", "a socket to 10.0.0.7:443")


@pytest.mark.parametrize(
    ("frames", "main", "phase", "cause", "sure"),
    [
        (ACQUIRES, IDLE.main, "fetch", "loader", "high"),
        (ACQUIRES, IDLE.main, "log", "lock", "high"),
        (ACQUIRES, IDLE.main, "step", "lock", "medium"),
        (PUTS, FULL, "optimizer", "pipe", "high"),
        (PUTS, FULL, "fetch", "loader", "high"),
        (SELECTS, TCP, "log", "network", "high"),
        (SELECTS, TCP, "fetch", "network", "high"),
        (SELECTS, BlockedOn("timer", "a timer of its event loop"), "log", "sleep", "high"),
        (SELECTS, BlockedOn("child", "child 5 (tail, sleeping)", True), "log", "child", "medium"),
        ((OWN,), BlockedOn("timer", "a timer", True), "log", "sleep", "medium"),
        ((OWN,), BlockedOn("lock", "a timer, while pid 5 holds a lock of /x", True), "log", "lock",
         "medium"),
    ],
)  # fmt: skip
def test_the_object_of_the_kernel_counts_more_than_the_class_of_the_stack(
    frames, main, phase, cause, sure
):
    process = replace(IDLE, main=main)
    found = four(stacks=(PEERS, PEERS, PEERS, frames), before={3: process}, after={3: process})
    verdict = explained(found, *(rank(number, phase) for number in range(4)))
    assert (verdict.cause, verdict.rank, verdict.sure) == (cause, 3, sure), verdict


@pytest.mark.parametrize("phase", ["", "boot"])
def test_during_the_start_the_rank_that_works_is_the_cause_and_not_those_that_wait(phase):
    """No rank has a stack; without a pulse (phase ""), a rank is not asked for one."""
    before, after = working(0.0)
    asleep = dict.fromkeys((0, 1, 3), ASLEEP)
    found = Evidence(
        asleep | {2: before}, {n: replace(p, mono=2.0) for n, p in asleep.items()} | {2: after}
    )
    ranks = tuple(replace(rank(n, phase), step=0, unchanged_s=500.0) for n in range(4))
    verdict = explained(found, *ranks)
    assert (verdict.cause, verdict.rank, verdict.sure) == ("startup", 2, "medium"), verdict
    assert "has not joined the other ranks and runs at 95% of a core" in verdict.sentence


RECV = (Frame(f"{TORCH}/distributed/distributed_c10d.py", 9, "recv"), *PEERS[1:])


@pytest.mark.parametrize(("late", "world", "odd"), [((0,), 2, 0), ((3,), 4, 3), ((0, 1, 2), 4, 3)])
def test_a_call_without_a_record_for_which_the_others_wait_is_a_mismatch(late, world, odd):
    found = Evidence(
        dict.fromkeys(range(world), IDLE), {n: replace(IDLE, mono=2.0) for n in range(world)},
        {n: stack(n, *(RECV if n in late else PEERS)) for n in range(world)},
        {n: called(n, waits=False) if n in late else called(n, "all_gather")
         for n in range(world)},
    )  # fmt: skip
    ranks = [rank(number) for number in range(world)]
    verdict = explained(found, *ranks)
    assert (verdict.cause, verdict.rank, verdict.sure) == ("mismatch", odd, "medium"), verdict
    assert "waits for its peers in recv" in verdict.sentence
    own = replace(found, stacks={**found.stacks, late[0]: stack(late[0], OWN)})
    assert explained(own, *ranks).cause != "mismatch"


def test_the_sentence_names_the_object_and_the_line():
    found = explained(CASES["lock"], rank(0), rank(1))
    assert ": it waits for the lock of /data/x, held by pid 512 (py) (train.py:41 augment)" in (
        found.sentence
    )
    assert "rank 1 has not called" in found.sentence
    loader = explained(CASES["loader"], rank(0), rank(1, "fetch"))
    assert "worker 5121 (pt_data_worker) is in state T" in loader.sentence


def test_a_traced_rank_is_not_advised_to_continue():
    found = explained(CASES["traced"], rank(0), rank(1))
    assert "traced by pid 77 (gdb)" in found.sentence
    assert "detach" in found.action


@pytest.mark.decision("verdict-cause", "lie")
def test_evidence_that_names_another_rank_is_shown_and_lowers_the_confidence():
    found = explained(replace(CASES["sleep"], flights={}), rank(0), rank(1, step=42))
    assert found.rank == 1
    assert found.sure == "medium"
    assert any(sign.startswith("positions: rank 0") for sign in found.against), found.against


@pytest.mark.decision("verdict-cause", "absent")
def test_without_any_evidence_the_verdict_of_the_pulses_stays():
    base = diagnose((rank(0), rank(1, "forward")), WATCH, NOW)
    found = explained(Evidence(gaps=("no stack of rank 1",)), rank(0), rank(1, "forward"))
    assert (found.cause, found.rank) == (base.cause, base.rank)
    assert base.sentence == found.sentence
    assert found.sure != "high"
    assert found.missing == ("no stack of rank 1",)
    assert ("?", "no stack of rank 1") in found.signs()


@pytest.mark.decision("verdict-cause", "absent")
def test_the_evidence_gives_no_cause_while_a_pulse_cannot_be_used():
    lost = replace(rank(2), doubt="lost")
    found = explained(CASES["sleep"], rank(0), rank(1), lost)
    assert found == diagnose((rank(0), rank(1), lost), WATCH, NOW)
    assert (found.cause == "sleep", found.sure) == (False, "low")


def test_ranks_that_all_wait_in_one_collective_have_a_transport_stall():
    found = explained(evidence(last=11), rank(0), rank(1))
    assert (found.cause, found.rank) == ("transport", None)


def test_two_ranks_with_the_same_cause_are_both_named():
    asleep = CASES["sleep"]
    three = replace(
        asleep, after=asleep.after | {2: asleep.after[1]},
        before=asleep.before | {2: asleep.before[1]},
        stacks=asleep.stacks | {2: stack(2, OWN)}, flights={},
    )  # fmt: skip
    found = explained(three, rank(0), rank(1), rank(2))
    assert found.sentence.startswith("ranks 1-2 have been stalled in backward of step 41")


# --- four ranks: rank 3 is the cause, and one source is misleading ----------------------------

RUNS = replace(IDLE, state="R", wchan="", main=BlockedOn("none", ""))
ASLEEP = replace(IDLE, main=BlockedOn("timer", "a timer"))
FOUR = tuple(rank(number) for number in range(4))


def four(last=(11, 11, 11, 10), stacks=(PEERS, PEERS, PEERS, (OWN,)), before=None, after=None):
    """Returns the evidence of four ranks; rank 3 sleeps in its own code, the others wait for it."""
    usual = {0: IDLE, 1: IDLE, 2: IDLE, 3: ASLEEP}
    return Evidence(
        before=usual | (before or after or {}),
        after={r: replace(p, mono=2.0) for r, p in (usual | (after or {})).items()},
        stacks={r: stack(r, *frames) for r, frames in enumerate(stacks) if frames},
        flights={r: flight(r, number) for r, number in enumerate(last) if number},
    )


SPIN = {r: replace(RUNS, cpu_ticks=100) for r in range(3)}
MISLEADING = {
    "none": (four(), FOUR),
    "a rank waits for the culprit point to point": (
        four((11, 11, 10, 10), after={2: ASLEEP, 3: ASLEEP}), FOUR,
    ),
    "NCCL waits with a whole core": (
        four((11, 11, 11, None), (PEERS, PEERS, PEERS, None), after=SPIN),
        (*FOUR[:3], rank(3, "forward")),
    ),
    "all ranks are traced without being stopped": (
        four(after={r: replace(IDLE, tracer=(9, "strace")) for r in range(3)}), FOUR,
    ),
    "a rank is in state D in one sample": (
        four(before={1: IDLE}, after={1: replace(IDLE, state="D")}), FOUR,
    ),
    "the operator stopped a rank that waits": (
        four(before={0: replace(IDLE, state="T")}, after={0: replace(IDLE, state="T")}),
        (rank(0, step=42, state="T"), *FOUR[1:3], rank(3, step=40)),
    ),
    "only the culprit reports its phase": (four(), (*(rank(n, "step") for n in range(3)),
                                                    rank(3, "fetch"))),
}  # fmt: skip


@pytest.mark.decision("verdict-cause", "lie")
@pytest.mark.parametrize("name", MISLEADING)
def test_a_misleading_source_never_makes_an_innocent_rank_the_cause_with_high(name):
    found, ranks = MISLEADING[name]
    verdict = explained(found, *ranks)
    assert verdict.rank == 3 or verdict.sure != "high", verdict
    assert verdict.rank in (3, None), verdict


@pytest.mark.parametrize(("phase", "sure"), [("optimizer", "high"), ("step", "medium")])
def test_a_wait_for_a_queue_is_sure_only_where_the_phase_is_reported(phase, sure):
    """If the phase is not reported, the queue may be that of the program's own data loader."""
    queue = (Frame("/usr/lib/python3.11/queue.py", 171, "get"), OWN)
    found = four(stacks=(PEERS, PEERS, PEERS, queue), before={3: IDLE}, after={3: IDLE})
    verdict = explained(found, *(rank(number, phase) for number in range(4)))
    assert (verdict.cause, verdict.rank, verdict.sure) == ("lock", 3, sure)


PUT = (Frame("/usr/lib/python3.11/queue.py", 140, "put"), Frame("/job/train.py", 9, "read"))
GET = (Frame("/usr/lib/python3.11/queue.py", 171, "get"), OWN)
READS = (Frame("/job/train.py", 22, "__getitem__"), Frame("/job/train.py", 9, "read"))
WORKS = (Frame("/job/train.py", 30, "compress"),)


def with_thread(number, frames, *thread, name="prefetch"):
    threads = [Thread("main", frames), Thread("nsa-watcher", (OWN,))]
    return Stack(number, NOW, "x", (*threads, *([Thread(name, thread)] if thread else [])))


@pytest.mark.parametrize(
    ("name", "peers", "own", "phase", "cause", "sure"),
    [
        ("prefetch", PUT, READS, "step", "loader", "high"),
        ("prefetch", PUT, (), "step", "loader", "high"),  # the thread has ended
        ("Thread-1", PUT, WORKS, "step", "loader", "medium"),
        ("prefetch", (), READS, "step", "loader", "medium"),
        ("prefetch", PUT, PUT, "step", "lock", "medium"),  # the queue of rank 3 is full
        ("Thread-1", (), WORKS, "step", "lock", "medium"),
        ("prefetch", PUT, READS, "log", "lock", "high"),
    ],
)
def test_a_queue_that_the_thread_of_the_data_does_not_fill_is_a_data_loader(
    name, peers, own, phase, cause, sure
):
    stacks = {n: with_thread(n, PEERS, *peers, name=name) for n in range(3)}
    stacks[3] = with_thread(3, GET, *own, name=name)
    found = replace(four(before={3: IDLE}, after={3: IDLE}), stacks=stacks)
    verdict = explained(found, *(rank(number, phase) for number in range(4)))
    assert (verdict.cause, verdict.rank, verdict.sure) == (cause, 3, sure), verdict


@pytest.mark.decision("verdict-cause", "true")
@pytest.mark.parametrize(
    "ill", [{"state": "T"}, {"state": "t"}, {"frozen": True}, {"state": "D"}, {"state": "Z"}]
)
def test_a_process_that_cannot_run_is_sure_where_all_others_wait_and_it_cannot_answer(ill):
    """The process writes no dump, and its program does not report the phases."""
    ranks = tuple(rank(number, "step") for number in range(4))
    process = {3: replace(IDLE, **ill)}
    found = four((11, 11, 11, None), (PEERS, PEERS, PEERS, None), before=process, after=process)
    verdict = explained(found, *ranks)
    assert (verdict.rank, verdict.sure) == (3, "high"), verdict
    busy = four((11, 11, 11, None), (PEERS, PEERS, (OWN,), None), before=process, after=process)
    assert explained(busy, *ranks).sure != "high"
    answers = replace(found, stacks={**found.stacks, 3: stack(3, OWN)})
    assert explained(answers, *ranks).sure != "high"
    alone = four((), (), before=process, after=process)
    is_sure = ill.get("state", "D") != "D"
    assert explained(alone, *ranks).sure == ("high" if is_sure else "medium")


def test_a_rank_whose_native_code_holds_the_gil_is_sure_where_all_others_wait():
    ranks = tuple(rank(number, "step") for number in range(4))
    found = four((11, 11, 11, None), after={3: IDLE}, before={3: IDLE})
    for frame, sure in ((OWN, "high"), (PEERS[0], "medium")):  # it may only be late
        dump = {3: Stack(3, NOW, "x", (Thread("main", (frame, OWN)),))}
        verdict = explained(replace(found, stacks={**found.stacks, **dump}), *ranks)
        assert (verdict.cause, verdict.rank, verdict.sure) == ("native", 3, sure)


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
    dumps = {3: Stack(3, NOW, "x", (Thread("main", (OWN,)),))}
    found = replace(four(), after=processes, before=processes)
    verdict = explained(replace(found, stacks={**found.stacks, **dumps}), *FOUR)
    assert (verdict.cause, verdict.rank) == ("native", 3)
    assert f": it {words}" in verdict.sentence, verdict.sentence


@pytest.mark.parametrize("lacks", [False, True])
def test_the_next_step_says_that_py_spy_is_not_installed(lacks):
    found = replace(runs(0.0), lacks_py_spy=lacks)
    action = explained(found, rank(0), rank(1)).action
    assert "py-spy dump --native --pid 1001" in action
    assert action.endswith("; py-spy is not installed: pip install py-spy") == lacks
    stopped = replace(CASES["stopped"], lacks_py_spy=lacks)
    assert "py-spy" not in explained(stopped, rank(0), rank(1)).action


def called(number, *ops, waits=True):
    """Returns the record of a rank: four steps of three calls, one call more, then `ops`."""
    usual = ["all_reduce", "all_gather", "barrier"] * 4 + ["all_reduce"]
    calls = tuple(
        Collective("0 default_pg", n, op, "[8] float32", n < len(usual) + len(ops) or not waits)
        for n, op in enumerate((*usual, *ops), 1)
    )
    return FlightRecord(number, NOW, "x", {"0 default_pg": len(calls)}, calls)


GATHER = (Frame(f"{TORCH}/distributed/distributed_c10d.py", 99, "all_gather"), *PEERS[1:])


@pytest.mark.parametrize(("odd", "sure"), [("barrier", "medium"), ("reduce", "medium")])
def test_of_two_ranks_the_one_that_leaves_the_usual_calls_is_named_in_its_own_phase(odd, sure):
    """A rank that skips a call is ahead of the other rank, and may be in a later phase."""
    found = replace(
        evidence(), flights={0: called(0, "all_gather"), 1: called(1, odd)},
        stacks={0: stack(0, *GATHER), 1: stack(1, *PEERS)},
    )  # fmt: skip
    verdict = explained(found, rank(0, "backward"), rank(1, "log"))
    assert (verdict.cause, verdict.rank, verdict.phase, verdict.sure) == (
        "mismatch",
        1,
        "log",
        sure,
    )
    alike = replace(found, stacks={n: stack(n, *PEERS) for n in (0, 1)})
    assert explained(alike, rank(0), rank(1)).sure == "medium"


@pytest.mark.parametrize(("lost", "sure"), [(True, "high"), (False, "medium")])
def test_packets_that_nobody_acknowledges_name_both_ends_of_the_connection(lost, sure):
    """Rank 1 is behind: it still waits in a collective that rank 0 has completed."""
    ends = ("127.0.0.1:4001", "127.0.0.1:4002")
    process = {
        0: replace(IDLE, connections=(Connection(*ends, lost),)),
        1: replace(IDLE, connections=(Connection(*ends[::-1], False),)),
    }
    found = Evidence(
        process, {r: replace(p, mono=2.0) for r, p in process.items()},
        {0: stack(0, *PEERS), 1: stack(1, *GATHER)},
        {0: called(0, "all_gather", "barrier"), 1: called(1, "all_gather")},
    )  # fmt: skip
    first = found.flights[0].collectives
    done = replace(found.flights[0], collectives=(*first[:-2], replace(first[-2], done=True),
                                                  first[-1]))  # fmt: skip
    found = replace(found, flights={**found.flights, 0: done})
    verdict = explained(found, rank(0, "log"), rank(1))
    assert (verdict.cause, verdict.rank, verdict.sure) == ("transport", None, sure)
    words = (
        "packets between rank 0 and rank 1 (127.0.0.1:4001, 127.0.0.1:4002) are not acknowledged"
    )
    assert (words in verdict.sentence) == lost


def test_a_lock_with_another_holder_is_the_same_wait_and_evidence_has_its_time():
    def held(pid):
        return {3: replace(IDLE, main=BlockedOn("lock", f"the lock of /x, held by pid {pid} (py)"))}

    verdict = explained(replace(four(before=held(5), after=held(6)), ts=NOW), *FOUR)
    assert (verdict.cause, verdict.rank, verdict.sure) == ("lock", 3, "high")
    assert "held by pid 6" in verdict.sentence
    at = time.strftime("%H:%M:%S", time.localtime(NOW))
    for source in ("stacks", "flight records", "processes"):
        assert any(line.startswith(f"{source} as of {at}: ") for line in verdict.evidence), source
    assert any(line.startswith("positions: ") for line in verdict.evidence)


def test_a_process_that_ended_is_not_described_by_a_stranger_with_its_pid():
    ended = (*FOUR[:3], rank(3, state="gone"))
    found = explained(four(after={3: replace(IDLE, state="T")}), *ended)
    assert (found.cause, found.rank) == ("exited", 3)
    assert "CONT" not in found.action


def test_a_lock_while_loading_is_a_lock():
    blocked = replace(IDLE, main=BlockedOn("lock", "the lock of /data/x, held by pid 5 (py)"))
    late = replace(rank(3, "load"), unchanged_s=400.0)
    found = explained(four(after={3: blocked}), *FOUR[:3], late)
    assert (found.cause, found.rank) == ("lock", 3)


def test_a_rank_without_any_evidence_prevents_a_transport_verdict():
    found = explained(four((11, 11, 11, None), (PEERS, PEERS, PEERS, None)), *FOUR)
    assert found.cause != "transport"


def test_stopped_and_traced_ranks_are_told_apart():
    both = {0: replace(IDLE, state="T"), 1: replace(IDLE, state="t", tracer=(9, "gdb"))}
    alike = four((11,) * 4, (PEERS,) * 4, after={**both, 3: IDLE})
    found = explained(alike, rank(0, state="T"), rank(1, state="t"), *FOUR[2:])
    assert (found.cause, found.rank) == ("stopped", 0)
    assert found.action == "kill -CONT 1000 resumes it"
    assert "rank 1 is traced by a debugger" in found.sentence


def test_the_threads_of_another_rank_do_not_hold_the_gil_in_the_line_of_the_main_thread():
    """The dump of the second signal shows only the main thread, which waits for the GIL."""
    dump = {3: Stack(3, NOW, "x", (Thread("main", (OWN,)),))}
    found = four(after={3: IDLE})
    verdict = explained(replace(found, stacks={**found.stacks, **dump}), *FOUR)
    assert (verdict.cause, verdict.rank) == ("native", 3)
    assert "train.py" not in verdict.sentence


WAITS = [BlockedOn(kind, "x") for kind in ("lock", "pipe", "network", "child", "timer", "disk",
                                           "futex", "none")]  # fmt: skip
PROCESSES = st.builds(
    ProcessEvidence, st.just(1), st.sampled_from([*"RSDTtZX", "gone"]), st.text(max_size=3),
    st.integers(0, 999), st.floats(0, 9), st.none() | st.just((1, "x")), st.booleans(),
    st.sampled_from(WAITS), st.just(()), st.just(()),
)  # fmt: skip
STACKS = st.lists(st.sampled_from([*PEERS, OWN, LOADER]), max_size=3)


@given(
    st.dictionaries(st.integers(0, 3), PROCESSES), st.dictionaries(st.integers(0, 3), STACKS),
    st.dictionaries(st.integers(0, 3), st.integers(1, 12)),
    st.lists(st.sampled_from(["fetch", "backward"]), min_size=4, max_size=4),
)  # fmt: skip
def test_any_evidence_gives_a_verdict_and_less_of_it_never_more_confidence(
    processes, stacks, flights, phases
):
    ranks = [rank(number, phase) for number, phase in enumerate(phases)]
    found = Evidence(
        processes, processes, {r: stack(r, *frames) for r, frames in stacks.items()},
        {r: flight(r, last) for r, last in flights.items()},
    )  # fmt: skip
    verdict = explained(found, *ranks)
    assert verdict.cause in {each.name for each in CAUSES} | {"transport", "all-ranks",
                                                              "slowest-rank"}  # fmt: skip
    less = explained(replace(found, stacks={}, flights={}, before={}, after={}), *ranks)
    assert less.sure != "high"


# --- one of four sources is wrong -----------------------------------------------------------------

STATES = [*"RSDTt"]
"""States without those of an ended process: an end that a pidfd shows is a fact."""
BUSY = working(25.0)[0]
TRUTHS = {
    "sleep": ((OWN,), ASLEEP), "busy": ((OWN,), BUSY), "stopped": (None, replace(IDLE, state="T")),
    "disk": (None, replace(IDLE, state="D", main=BlockedOn("disk", "a disk"))),
    "loader": ((LOADER, OWN), IDLE), "queue": (GET, IDLE), "native": ("main only", IDLE),
    "transport": (PEERS, IDLE),
}  # fmt: skip


def drawn_stack(draw, number):
    frames = draw(st.sampled_from([None, PEERS, GATHER, (OWN,), (LOADER, OWN), GET, "main only"]))
    return told_stack(number, frames)


def told_stack(number, frames):
    if frames == "main only":
        return Stack(number, NOW, "x", (Thread("main", (OWN,)),))
    return stack(number, *frames) if frames else None


def drawn_flight(draw, number):
    usual = st.sampled_from(["none", "all_gather", "barrier", "reduce", "behind"])
    op = draw(usual)
    if op == "behind":
        return called(number, waits=False)
    return None if op == "none" else called(number, op)


@st.composite
def one_source_lies(draw):
    """Returns a name, the rank with the fault or None for all, the evidence, and the ranks."""
    name, world = draw(st.sampled_from(sorted(TRUTHS))), draw(st.integers(2, 4))
    guilty = draw(st.integers(0, world - 1))
    lies = draw(st.sampled_from(["flights", "stacks", "processes", "pulses", "nothing"]))
    phased = draw(st.booleans())
    processes, stacks, flights, ranks = {}, {}, {}, []
    for number in range(world):
        ill = number == guilty or name == "transport"
        frames, process = TRUTHS[name] if ill else (PEERS, IDLE)
        record = called(number, waits=False) if ill else called(number, "all_gather")
        phase, step = ("forward" if ill else "backward") if phased else "step", 41
        if name == "transport":
            record, phase = called(number, "all_gather"), "backward" if phased else "step"
        elif frames is None or frames == "main only":
            record = None if ill else record
        state = process.state
        found = told_stack(number, frames)
        if lies == "processes":
            state = draw(st.sampled_from(STATES))
            process = draw(st.sampled_from([IDLE, ASLEEP, BUSY, replace(IDLE, frozen=True)]))
            process = replace(process, state=state)
        elif lies == "stacks":
            found = drawn_stack(draw, number)
        elif lies == "flights":
            record = drawn_flight(draw, number)
        elif lies == "pulses":
            phase = draw(st.sampled_from(["fetch", "forward", "backward", "log", "step"]))
            step = draw(st.integers(40, 42))
        processes[number] = process
        stacks |= {number: found} if found else {}
        flights |= {number: record} if record else {}
        ranks.append(rank(number, phase, step, state))
    after = {
        n: replace(working(25.0)[1] if p.threads else p, state=p.state, mono=2.0)
        for n, p in processes.items()
    }
    found = Evidence(processes, after, stacks, flights)
    return f"{name}, {lies} lie", None if name == "transport" else guilty, found, ranks


@pytest.mark.decision("verdict-cause", "lie")
@settings(max_examples=120)
@given(one_source_lies())
def test_one_lying_source_among_consistent_ones_never_blames_an_innocent_rank_with_high(drawn):
    what, guilty, found, ranks = drawn
    verdict = explained(found, *ranks)
    assert verdict.rank in (guilty, None) or verdict.sure != "high", (what, guilty, verdict)


@pytest.mark.parametrize(
    ("name", "is_data"),
    [("nsa-loader", True), ("DataReader", True), ("prefetcher", True), ("data_0", True),
     ("uploader", False), ("Thread-1", False), ("already", False), ("metrics", False)],
)  # fmt: skip
def test_a_thread_reads_data_by_a_whole_word_of_its_name(name, is_data):
    assert bool(_DATA.search(name)) is is_data


def test_an_ended_child_of_another_program_is_no_worker_of_the_loader():
    """A program may leave ended children without waiting for them."""
    for child, words in ((ChildEvidence(9, "nvidia-smi", "Z"), False),
                         (ChildEvidence(9, "pt_data_worker", "Z"), True)):  # fmt: skip
        found = explained(evidence((LOADER, OWN), children=(child,)), rank(0), rank(1))
        assert found.cause == "loader"
        assert ("worker 9" in found.sentence) is words
