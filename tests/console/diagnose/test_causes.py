"""Cause of a stall by its evidence: each rule, the ranks that are named, and the confidence."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.diagnose.causes import CAUSES, explain
from console.diagnose.evidence import Evidence
from console.diagnose.stall import RankEvidence
from console.diagnose.verdict import case_of, diagnose
from console.sources.flight import Collective, FlightRecord
from console.sources.kernel_evidence import BlockedOn, ChildEvidence, ProcessEvidence
from console.sources.stacks import Frame, Stack, Thread
from trainers.contract.plan import Watch

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
    case = case_of(ranks, WATCH, NOW)
    return explain(diagnose(ranks, WATCH, NOW), case, found)


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
    "busy": evidence((OWN,), ticks=290, state="R", main=BlockedOn("none", "")),
}


@pytest.mark.decision("verdict-cause", "true")
@pytest.mark.parametrize("cause", CASES)
def test_a_cause_is_named_with_the_rank_that_blocks_in_the_phase_of_its_peers(cause):
    """All pulses are at the same place: only the evidence names rank 1."""
    found = explained(CASES[cause], rank(0), rank(1))
    assert (found.cause, found.rank) == (cause, 1), found
    assert found.action
    assert found.sure == "high"
    assert "rank 1 has been stalled in backward of step 41" in found.sentence
    assert found.sentence.endswith("rank 0 waits in backward")


def test_the_sentence_names_the_object_and_the_line():
    found = explained(CASES["lock"], rank(0), rank(1))
    assert ": it waits for the lock of /data/x, held by pid 512 (py) (train.py:41 augment)" in (
        found.sentence
    )
    assert "rank 1 has not called" in found.sentence
    loader = explained(CASES["loader"], rank(0), rank(1, "fetch"))
    assert "worker 5121 (pt_data_worker) is in state T" in loader.sentence


def test_a_zombie_is_the_cause_and_not_the_rank_that_waits_for_it():
    found = explained(evidence(None, state="Z"), rank(0), rank(1, state="Z"))
    assert (found.cause, found.rank) == ("exited", 1)


def test_a_traced_rank_is_not_advised_to_continue():
    found = explained(CASES["traced"], rank(0), rank(1))
    assert "traced by pid 77 (gdb)" in found.sentence
    assert "detach" in found.action


@pytest.mark.decision("verdict-cause", "lie")
def test_evidence_that_names_another_rank_is_shown_and_lowers_the_confidence():
    found = explained(replace(CASES["sleep"], flights={}), rank(0), rank(1, step=42))
    assert found.rank == 1
    assert found.sure == "medium"
    assert any(sign.startswith("pulses: rank 0") for sign in found.against), found.against


@pytest.mark.decision("verdict-cause", "absent")
def test_without_any_evidence_the_verdict_of_the_pulses_stays():
    base = diagnose((rank(0), rank(1, "forward")), WATCH, NOW)
    found = explained(Evidence(gaps=("no stack of rank 1",)), rank(0), rank(1, "forward"))
    assert (found.cause, found.rank) == (base.cause, base.rank)
    assert base.sentence.startswith(found.sentence)
    assert found.sure != "high"
    assert "no stack of rank 1" in found.against


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


# --- four ranks, of which rank 3 is the cause, and one source misleads ----------------------------

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
    """In a phase that is not reported it may be the program's own data loader."""
    queue = (Frame("/usr/lib/python3.11/queue.py", 171, "get"), OWN)
    found = four(stacks=(PEERS, PEERS, PEERS, queue), before={3: IDLE}, after={3: IDLE})
    verdict = explained(found, *(rank(number, phase) for number in range(4)))
    assert (verdict.cause, verdict.rank, verdict.sure) == ("lock", 3, sure)


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
    """The last resort shows the main thread only, and that one waits for the GIL."""
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
