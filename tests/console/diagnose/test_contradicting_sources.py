"""Sources that contradict each other: no verdict names an innocent rank with high confidence."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from console.diagnose.causes import CAUSES
from console.diagnose.evidence import Evidence
from console.sources.descriptors import BlockedOn
from console.sources.kernel_evidence import ProcessEvidence
from tests.console.diagnose.stalled_ranks import (
    ASLEEP,
    FILE_LOCK,
    FOUR,
    GATHER,
    GET,
    IDLE,
    LOADER,
    OWN,
    PEERS,
    RUNS,
    TCP,
    called,
    explained,
    flight,
    four,
    of_main_only,
    rank,
    stack,
    with_gpu_of_rank_3,
    working,
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
    "the others wait on the CPU for the file lock of a rank whose GPU computes": (
        with_gpu_of_rank_3(FILE_LOCK, ASLEEP), FOUR,
    ),
    "the others sleep until a rank whose GPU computes has written a file": (
        with_gpu_of_rank_3((OWN,), ASLEEP), FOUR,
    ),
    "the others wait in the store for a rank whose GPU computes": (
        with_gpu_of_rank_3((OWN,), replace(IDLE, main=TCP)), FOUR,
    ),
}  # fmt: skip


@pytest.mark.decision("verdict-cause", "lie")
@pytest.mark.parametrize("name", MISLEADING)
def test_a_misleading_source_never_makes_an_innocent_rank_the_cause_with_high(name):
    found, ranks = MISLEADING[name]
    verdict = explained(found, *ranks)
    assert verdict.rank == 3 or verdict.sure != "high", verdict
    assert verdict.rank in (3, None), verdict


@pytest.mark.decision("verdict-cause", "lie")
def test_incomplete_flight_records_against_a_verdict_make_it_less_sure():
    """Rank 3 has no flight record, and those of the others show that rank 2 is behind."""
    found = four(last=())
    flights = {0: called(0, "all_gather"), 1: called(1, "all_gather"), 2: called(2, waits=False)}
    for more, sure in (({}, "high"), (flights, "medium")):
        verdict = explained(replace(found, flights=more), *FOUR)
        assert (verdict.rank, verdict.sure) == (3, sure), verdict


LEFT = rank(0, "exit", step=40, state="gone", code=0)
ALONE = {
    "waits in a collective": (PEERS, IDLE, IDLE, "exited-early", "high"),
    "NCCL waits with a whole core": (PEERS, RUNS, SPIN[0], "exited-early", "high"),
    "the processes name the other rank": ((), ASLEEP, ASLEEP, "exited-early", "medium"),
    "the stacks name the other rank": ((OWN,), IDLE, RUNS, "exited-early", "medium"),
    "both name it: it sleeps": ((OWN,), ASLEEP, ASLEEP, "sleep", "medium"),
    "both name it: it runs": ((OWN,), *working(25.0), "busy", "medium"),
}


@pytest.mark.decision("verdict-exited-early", "lie")
@pytest.mark.parametrize("name", ALONE)
def test_a_rank_that_exited_early_is_not_sure_to_be_waited_for_by_one_that_runs(name):
    frames, before, after, cause, sure = ALONE[name]
    stacks = {1: stack(1, *frames)} if frames else {}
    found = Evidence({1: before}, {1: replace(after, mono=2.0)}, stacks)
    verdict = explained(found, LEFT, rank(1, "step"))
    assert (verdict.cause, verdict.sure) == (cause, sure), verdict
    assert verdict.rank == (0 if cause == "exited-early" else 1)
    assert "rank 0 exited (code 0)" in verdict.sentence


@pytest.mark.parametrize(("frames", "sure"), [(PEERS, "high"), ((OWN,), "medium")])
def test_other_sources_count_for_a_stopped_rank_while_a_pulse_is_lost(frames, sure):
    stopped, own = replace(IDLE, state="T"), {1: stack(1, *frames)}
    found = Evidence({0: stopped, 1: IDLE}, {0: stopped, 1: IDLE}, own)
    ranks = rank(0, state="T"), rank(1)
    for lost in ((), (replace(rank(2), doubt="lost"),)):
        verdict = explained(found, *ranks, *lost)
        assert (verdict.cause, verdict.rank, verdict.sure) == ("stopped", 0, sure), verdict


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
    assert verdict.cause in {each.name for each in CAUSES} | {"all-ranks", "slowest-rank"}
    less = explained(replace(found, stacks={}, flights={}, before={}, after={}), *ranks)
    assert less.sure != "high"


STATES = [*"RSDTt"]
"""States of live processes; no source falsely reports that a process has ended."""
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
        return of_main_only(number)
    return stack(number, *frames) if frames else None


def drawn_flight(draw, number):
    usual = st.sampled_from(["none", "all_gather", "barrier", "reduce", "behind"])
    op = draw(usual)
    if op == "behind":
        return called(number, waits=False)
    return None if op == "none" else called(number, op)


@st.composite
def one_source_lies(draw):
    """Returns a name, the faulty rank (None: all ranks), the evidence and the ranks."""
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
