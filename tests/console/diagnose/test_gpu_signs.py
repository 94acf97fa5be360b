"""The evidence from the GPU of a stalled rank; the figures of `SPINS` are from an H100."""

from __future__ import annotations

from dataclasses import replace

import pytest

from console.diagnose.evidence import Evidence
from console.diagnose.gpu_signs import own_gpus
from console.diagnose.verdict import diagnose
from console.model import Gpu
from console.sources.descriptors import BlockedOn
from console.sources.stacks import Frame
from tests.console.diagnose.stalled_ranks import (
    IDLE,
    NOW,
    OWN,
    PAIR,
    PEERS,
    TORCH,
    WATCH,
    expect,
    explained,
    flight,
    rank,
    runs,
    stack,
)

SPINS = Gpu(0, "NVIDIA H100", "ok", 100.0, 120.3, 700.0, minor=0)
COMPUTES, AT_REST = replace(SPINS, power_w=610.0), replace(SPINS, util_pct=0.0, power_w=74.0)
SILENT = Gpu(0, "NVIDIA H100", "error", why="no answer for 9 s", minor=0)
BUSY = replace(IDLE, state="R", main=BlockedOn("none", ""))
ALL_OWN = {0: stack(0, OWN), 1: stack(1, OWN)}


def alone(gpus, process=BUSY):
    """Returns the evidence of one rank, which uses a core and has its own code in its stack."""
    return Evidence(
        {0: process}, {0: replace(process, cpu_ticks=300, mono=2.0)}, {0: stack(0, OWN)},
        gpus={} if gpus is None else {0: gpus},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("gpus", "cause", "words"),
    [
        ((SPINS,), "device", "waits for its GPU, which runs a kernel that computes little"),
        ((COMPUTES,), "device", "waits for its GPU, which computes"),
        ((SILENT,), "device", "runs, or waits for its GPU"),
        ((), "device", "runs, or waits for its GPU"),
        ((AT_REST,), "busy", "runs at 100% of a core and makes no progress"),
        (None, "busy", "runs at 100% of a core and makes no progress"),
    ],
)
def test_a_core_in_use_is_an_endless_loop_only_where_no_gpu_is_waited_for(gpus, cause, words):
    found = explained(alone(gpus), rank(0))
    assert (found.cause, words in found.sentence) == (cause, True), found.sentence
    if cause == "device":
        assert found.sure != "high"
        assert not any("makes no progress" in line for line in found.evidence)
    if gpus:
        assert any(line.startswith("GPUs: rank 0: GPU 0") for line in found.evidence)


def pair(first_gpu, second_gpu, second=OWN):
    """Returns the evidence of two ranks with one GPU each; rank 0 waits for its peers."""
    return Evidence(
        {0: BUSY, 1: BUSY},
        {n: replace(BUSY, cpu_ticks=300, mono=2.0) for n in (0, 1)},
        {0: stack(0, *PEERS), 1: stack(1, second)},
        {0: flight(0, 11), 1: flight(1, 10)},
        gpus={0: (first_gpu,), 1: (replace(second_gpu, index=1, minor=1),)},
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


def test_a_gpu_without_figures_is_at_most_low_and_no_endless_loop():
    """The GPU of rank 1 has no utilisation, as with MIG, or is not known, as with WSL."""
    unknown = replace(SPINS, util_pct=None)
    for rows in ((unknown,), ()):
        evidence = replace(pair(SPINS, SPINS), gpus={0: (SPINS,), 1: rows})
        expect(evidence, PAIR, "device", 1, "low")


def test_another_thread_that_uses_a_core_makes_no_wait_of_the_main_thread():
    asleep = replace(IDLE, main=BlockedOn("timer", "a timer"))
    found = explained(alone((SPINS,), asleep), rank(0))
    assert found.cause == "sleep", found.sentence


def test_a_rank_that_shares_its_core_waits_in_the_same_frame_as_the_others():
    """Rank 1 is in state S in both samples, and uses less than a whole core."""
    slow, whole = replace(BUSY, state="S"), pair(SPINS, SPINS)
    after = {**whole.after, 1: replace(slow, cpu_ticks=180, mono=2.0)}
    found = replace(whole, before={0: BUSY, 1: slow}, after=after, stacks=ALL_OWN, flights={})
    expect(found, PAIR, "device", None, "medium")


def test_ranks_that_all_wait_for_their_gpus_blame_nobody():
    evidence = replace(pair(SPINS, SPINS), stacks=ALL_OWN, flights={})
    found = expect(evidence, PAIR, "device", None, "medium")
    assert "each waits for its GPU" in found.sentence


FOUR = tuple(replace(SPINS, index=n, minor=n) for n in range(4))
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
    found = own_gpus(opened, {each: {"CUDA_VISIBLE_DEVICES": visible} for each in opened}, FOUR)
    assert [rows[0].index if rows else None for _, rows in sorted(found.items())] == indices


def test_a_rank_whose_environment_cannot_be_read_has_no_gpu_that_is_known():
    environments = {0: {}, 1: {"CUDA_VISIBLE_DEVICES": "2,3"}, 2: {}}
    found = own_gpus({0: ALL, 1: ALL, 2: frozenset({0})}, environments, FOUR)
    assert {rank: [row.index for row in rows] for rank, rows in found.items()} == {
        0: [], 1: [3], 2: [0],
    }  # fmt: skip


def test_a_rank_without_a_device_file_uses_no_gpu():
    assert own_gpus({0: frozenset(), 1: None}, {0: {}, 1: {}}, ()) == {}
    assert own_gpus({0: frozenset()}, {0: {}}, FOUR) == {}


def test_different_gpus_are_known_only_in_the_order_of_their_bus():
    """CUDA's default order puts the fastest GPU first."""
    rows = (*FOUR[:3], replace(FOUR[3], name="a small GPU"))
    for variables, index in (({"PATH": "/"}, []), ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, [0])):
        assert [row.index for row in own_gpus({0: ALL}, {0: variables}, rows)[0]] == index


@pytest.mark.parametrize(("waits", "cause"), [(25.0, "busy"), (0.0, "device")])
def test_python_code_is_no_wait_for_a_gpu_whose_file_is_only_open(waits, cause):
    """A CPU program that counts the GPUs has their files open, as was seen on an H100."""
    found = replace(runs(waits), gpus={0: (), 1: ()})
    assert explained(found, *PAIR).cause == cause


def test_the_next_step_of_ranks_that_all_wait_for_their_gpus_names_a_process():
    frame = Frame(f"{TORCH}/cuda/__init__.py", 900, "synchronize")
    found = Evidence({}, {}, {n: stack(n, frame, OWN) for n in (0, 1)})
    verdict = diagnose([rank(n, "forward") for n in (0, 1)], WATCH, NOW, found)
    assert (verdict.cause, verdict.rank) == ("device", None), verdict
    assert "py-spy dump --native --pid 1000" in verdict.action, verdict.action
