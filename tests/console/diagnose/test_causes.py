"""The cause, the named rank and the confidence that the evidence on a stall gives."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from console.diagnose.evidence import Evidence
from console.diagnose.stack_classes import _DATA
from console.diagnose.verdict import diagnose
from console.sources.descriptors import BlockedOn, Connection
from console.sources.kernel_evidence import ChildEvidence, ThreadEvidence
from console.sources.stacks import Frame, Stack, Thread
from tests.console.diagnose.stalled_ranks import (
    ASLEEP,
    FOUR,
    GATHER,
    GET,
    IDLE,
    LOADER,
    NOW,
    OWN,
    PAIR,
    PEERS,
    RECV,
    TCP,
    WATCH,
    alike,
    called,
    evidence,
    expect,
    explained,
    four,
    rank,
    runs,
    stack,
)

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
    found = expect(CASES[cause], PAIR, cause, 1, "high")
    assert found.action
    assert "rank 1 has been stalled in backward of step 41" in found.sentence
    assert found.sentence.endswith("rank 0 waits in backward")


def test_all_ranks_that_are_stopped_are_named_together():
    all_stopped = dict.fromkeys(range(4), replace(IDLE, state="T"))
    found = four((), (), after=all_stopped)
    verdict = expect(found, alike("backward", state="T"), "stopped", None, "medium")
    assert "ranks 0-3 have been stalled" in verdict.sentence


ACQUIRES = (Frame("/usr/lib/python3.11/threading.py", 327, "acquire"), OWN)
PUTS = (Frame("/usr/lib/python3.11/multiprocessing/queues.py", 377, "put"), OWN)
SELECTS = (Frame("/usr/lib/python3.11/selectors.py", 468, "select"), OWN)
FULL = BlockedOn("pipe", "a pipe that is full")


@pytest.mark.parametrize(
    ("frames", "main", "phase", "cause", "sure"),
    [
        (ACQUIRES, IDLE.main, "fetch", "loader", "high"),
        (ACQUIRES, IDLE.main, "log", "lock", "high"),
        (ACQUIRES, IDLE.main, "step", "lock", "medium"),
        (PUTS, FULL, "optimizer", "pipe", "high"),
        (PUTS, FULL, "fetch", "loader", "high"),
        (GET, IDLE.main, "optimizer", "lock", "high"),
        (GET, IDLE.main, "step", "lock", "medium"),  # perhaps the queue of a data loader
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
    found = four(stacks=(PEERS, PEERS, PEERS, frames), after={3: process})
    expect(found, alike(phase), cause, 3, sure)


@pytest.mark.parametrize(("late", "world", "odd"), [((0,), 2, 0), ((3,), 4, 3), ((0, 1, 2), 4, 3)])
def test_a_call_without_a_record_for_which_the_others_wait_is_a_mismatch(late, world, odd):
    found = Evidence(
        dict.fromkeys(range(world), IDLE), {n: replace(IDLE, mono=2.0) for n in range(world)},
        {n: stack(n, *(RECV if n in late else PEERS)) for n in range(world)},
        {n: called(n, waits=False) if n in late else called(n, "all_gather")
         for n in range(world)},
    )  # fmt: skip
    ranks = [rank(number) for number in range(world)]
    verdict = expect(found, ranks, "mismatch", odd, "medium")
    assert "waits for its peers in recv" in verdict.sentence
    own = replace(found, stacks={**found.stacks, late[0]: stack(late[0], OWN)})
    assert explained(own, *ranks).cause != "mismatch"


def test_the_sentence_names_the_object_and_the_line():
    found = explained(CASES["lock"], *PAIR)
    assert ": it waits for the lock of /data/x, held by pid 512 (py) (train.py:41 augment)" in (
        found.sentence
    )
    assert "rank 1 has not called" in found.sentence
    loader = explained(CASES["loader"], rank(0), rank(1, "fetch"))
    assert "worker 5121 (pt_data_worker) is in state T" in loader.sentence


def test_a_traced_rank_is_not_advised_to_continue():
    found = explained(CASES["traced"], *PAIR)
    assert "traced by pid 77 (gdb)" in found.sentence
    assert "detach" in found.action


@pytest.mark.decision("verdict-cause", "lie")
def test_evidence_that_names_another_rank_is_shown_and_lowers_the_confidence():
    ranks = rank(0), rank(1, step=42)
    found = expect(replace(CASES["sleep"], flights={}), ranks, "sleep", 1, "medium")
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
    expect(evidence(last=11), PAIR, "transport", None, "medium")


def test_two_ranks_with_the_same_cause_are_both_named():
    asleep = CASES["sleep"]
    three = replace(
        asleep, after=asleep.after | {2: asleep.after[1]},
        before=asleep.before | {2: asleep.before[1]},
        stacks=asleep.stacks | {2: stack(2, OWN)}, flights={},
    )  # fmt: skip
    found = explained(three, rank(0), rank(1), rank(2))
    assert found.sentence.startswith("ranks 1-2 have been stalled in backward of step 41")


PUT = (Frame("/usr/lib/python3.11/queue.py", 140, "put"), Frame("/job/train.py", 9, "read"))
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
    expect(replace(four(after={3: IDLE}), stacks=stacks), alike(phase), cause, 3, sure)


COLLECTS = (
    Frame("/usr/lib/python3.11/threading.py", 327, "wait"),
    Frame("/usr/lib/python3.11/concurrent/futures/_base.py", 305, "wait"),
    Frame("/job/trainers/saver.py", 93, "collect"),
)


@pytest.mark.parametrize(
    ("frames", "states", "phase", "cause"),
    [
        (COLLECTS, "DD", "save", "disk"),
        (PUTS, "DD", "log", "disk"),
        (COLLECTS, "SD", "save", "lock"),
        (GET, "DD", "fetch", "loader"),  # the thread reads the data of the rank
        ((OWN,), "DD", "log", "lock"),
    ],
)
def test_a_rank_that_waits_for_a_thread_in_uninterruptible_sleep_waits_for_the_disk(
    frames, states, phase, cause
):
    """For example, a save in the background hangs on a network file system."""
    main = ThreadEvidence(1000, "python", "S", IDLE.wchan, 50)
    processes = [
        replace(IDLE, mono=2.0 * at,
                threads=(main, ThreadEvidence(1100, "python", state, "nfs_wait_bit_killable", 5)))
        for at, state in enumerate(states)
    ]  # fmt: skip
    found = Evidence({0: processes[0]}, {0: processes[1]}, {0: stack(0, *frames)})
    late = replace(rank(0, phase), unchanged_s=400.0)
    verdict = expect(found, (late,), cause, 0, "high")
    words = ", and its thread 1100 is in uninterruptible sleep (in nfs_wait_bit_killable)"
    assert (words in verdict.sentence) == (cause == "disk"), verdict.sentence


@pytest.mark.parametrize("ran", [{"waits": 5009}, {"cpu_ticks": 105}])
def test_a_thread_that_runs_between_its_waits_for_the_disk_is_not_stuck(ran):
    """For example, it writes a file while the main thread waits for a queue."""
    main, writer = (ThreadEvidence(1000 + n, "python", state, "folio_wait", 5, 9)
                    for n, state in ((0, "S"), (100, "D")))  # fmt: skip
    before = replace(IDLE, threads=(main, writer))
    after = replace(IDLE, mono=2.0, threads=(main, replace(writer, **ran)))
    found = Evidence({0: before}, {0: after}, {0: stack(0, *GET)})
    expect(found, (replace(rank(0, "log"), unchanged_s=400.0),), "lock", 0, "high")


@pytest.mark.decision("verdict-cause", "true")
@pytest.mark.parametrize(
    "ill", [{"state": "T"}, {"state": "t"}, {"frozen": True}, {"state": "D"}, {"state": "Z"}]
)
def test_a_process_that_cannot_run_is_sure_where_all_others_wait_and_it_cannot_answer(ill):
    """In `found`, rank 3 has no dump; no rank reports the phases of a step."""
    ranks = alike("step")
    process = {3: replace(IDLE, **ill)}
    found = four((11, 11, 11, None), (PEERS, PEERS, PEERS, None), after=process)
    verdict = explained(found, *ranks)
    assert (verdict.rank, verdict.sure) == (3, "high"), verdict
    busy = four((11, 11, 11, None), (PEERS, PEERS, (OWN,), None), after=process)
    assert explained(busy, *ranks).sure != "high"
    answers = replace(found, stacks={**found.stacks, 3: stack(3, OWN)})
    assert explained(answers, *ranks).sure != "high"
    alone = four((), (), after=process)
    is_sure = ill.get("state", "D") != "D"
    assert explained(alone, *ranks).sure == ("high" if is_sure else "medium")


@pytest.mark.parametrize("odd", ["barrier", "reduce"])
def test_of_two_ranks_the_one_that_leaves_the_usual_calls_is_named_in_its_own_phase(odd):
    """At first, rank 1 is in a later phase than rank 0, as after a skipped call."""
    found = replace(
        evidence(), flights={0: called(0, "all_gather"), 1: called(1, odd)},
        stacks={0: stack(0, *GATHER), 1: stack(1, *PEERS)},
    )  # fmt: skip
    assert expect(found, (rank(0), rank(1, "log")), "mismatch", 1, "medium").phase == "log"
    equal = replace(found, stacks={n: stack(n, *PEERS) for n in (0, 1)})
    assert explained(equal, *PAIR).sure == "medium"


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
    verdict = expect(found, (rank(0, "log"), rank(1)), "transport", None, sure)
    words = (
        "packets between rank 0 and rank 1 (127.0.0.1:4001, 127.0.0.1:4002) are not acknowledged"
    )
    assert (words in verdict.sentence) == lost


def test_a_lock_with_another_holder_is_the_same_wait_and_evidence_has_its_time():
    def held(pid):
        return {3: replace(IDLE, main=BlockedOn("lock", f"the lock of /x, held by pid {pid} (py)"))}

    found = replace(four(before=held(5), after=held(6)), ts=NOW)
    verdict = expect(found, FOUR, "lock", 3, "high")
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


@pytest.mark.parametrize(("last", "sure"), [((11, 11, 11, 10), "high"), ((), "medium")])
def test_ranks_that_wait_for_their_peers_by_a_timer_are_no_suspects(last, sure):
    """NCCL does so with TORCH_NCCL_BLOCKING_WAIT=1."""
    server = replace(IDLE, main=BlockedOn("network", "a socket to 10.0.0.7:443"))
    found = four(last, after={0: ASLEEP, 1: ASLEEP, 2: ASLEEP, 3: server})
    assert not expect(found, FOUR, "network", 3, sure).against


def test_stopped_and_traced_ranks_are_told_apart():
    both = {0: replace(IDLE, state="T"), 1: replace(IDLE, state="t", tracer=(9, "gdb"))}
    found = four((11,) * 4, (PEERS,) * 4, after={**both, 3: IDLE})
    found = explained(found, rank(0, state="T"), rank(1, state="t"), *FOUR[2:])
    assert (found.cause, found.rank) == ("stopped", 0)
    assert found.action == "kill -CONT 1000 resumes it"
    assert "rank 1 is traced by a debugger" in found.sentence


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
        found = explained(evidence((LOADER, OWN), children=(child,)), *PAIR)
        assert found.cause == "loader"
        assert ("worker 9" in found.sentence) is words
