"""Builds the evidence of stalled ranks, and compares the verdict with the expected one."""

from __future__ import annotations

from dataclasses import replace

from console.diagnose.evidence import Evidence
from console.diagnose.rank_evidence import RankEvidence
from console.diagnose.verdict import diagnose
from console.model import Gpu
from console.plan import Watch
from console.sources.descriptors import BlockedOn
from console.sources.flight import Collective, FlightRecord
from console.sources.kernel_evidence import ProcessEvidence, ThreadEvidence
from console.sources.stacks import Frame, Stack, Thread

WATCH, NOW = Watch(stall_floor_s=5.0), 1_800_000_000.0
TORCH = "/venv/lib/python3.11/site-packages/torch"


def collective(function):
    """Returns the frame of a call of torch.distributed, and the frame of its caller."""
    own = Frame("/job/train.py", 40, "step")
    return Frame(f"{TORCH}/distributed/distributed_c10d.py", 3252, function), own


PEERS, GATHER, RECV = map(collective, ("all_reduce", "all_gather", "recv"))
OWN = Frame("/job/train.py", 41, "augment")
IDLE = ProcessEvidence(
    pid=1000, state="S", wchan="futex_wait_queue", cpu_ticks=100, mono=0.0, tracer=None,
    frozen=False, main=BlockedOn("futex", "a lock, an event or a future (futex)"), threads=(),
    children=(),
)  # fmt: skip


def working(waits, others=(20.0,), ticks=190):
    """Returns two samples, 2 s apart, of a process that runs.

    `waits` is the number of waits per second of the main thread. `others` has this number
    for the other Python threads, the contract's watcher first. `ticks` is the CPU time between
    the samples, in ticks.
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


WAITING = {"state": "S", "wchan": IDLE.wchan, "main": IDLE.main}


def rank(number, phase="backward", step=41, state="S", **more):
    return RankEvidence(number, 1000 + number, state, step, phase, 12.0, **more)


PAIR = rank(0), rank(1)


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


def expect(found, ranks, *expected):
    """Returns the verdict; asserts its cause, rank and confidence."""
    verdict = diagnose(ranks, WATCH, NOW, found)
    assert (verdict.cause, verdict.rank, verdict.sure) == expected, verdict
    return verdict


def alike(phase, **more):
    """Returns four ranks in the same phase."""
    return tuple(rank(number, phase, **more) for number in range(4))


def starting(world, phase="boot"):
    """Returns ranks that have not begun a step, for longer than their limit."""
    return [replace(rank(n, phase, 0), unchanged_s=500.0) for n in range(world)]


def of_main_only(number, *frames):
    """Returns the dump of a signal handler, which has only the main thread."""
    return Stack(number, NOW, "x", (Thread("main", frames or (OWN,)),))


def sampled(before, after):
    """Returns the evidence of two ranks: rank 1 is in its own code, with these samples."""
    peer = replace(IDLE, mono=after.mono)
    return replace(evidence((OWN,)), before={0: IDLE, 1: before}, after={0: peer, 1: after})


def runs(*given, **more):
    return sampled(*working(*given, **more))


LOADER = Frame(f"{TORCH}/utils/data/dataloader.py", 1131, "_try_get_data")
FILE_LOCK = Frame("/venv/lib/python3.11/site-packages/filelock/_api.py", 330, "acquire"), OWN
DOWNLOADS = Frame("/usr/lib/python3.11/ssl.py", 1103, "read"), OWN
SYNCHRONIZE = Frame(f"{TORCH}/cuda/__init__.py", 900, "synchronize"), OWN
GET = (Frame("/usr/lib/python3.11/queue.py", 171, "get"), OWN)
ASLEEP = replace(IDLE, main=BlockedOn("timer", "a timer"))
RUNS = replace(IDLE, state="R", wchan="", main=BlockedOn("none", ""))
TCP = BlockedOn("network", "a socket to 10.0.0.7:443")
FOUR = alike("backward")
SPINS = Gpu(0, "NVIDIA H100", "ok", 100.0, 120.3, 700.0, minor=0)
"""The figures are from an H100."""
COMPUTES, AT_REST = replace(SPINS, power_w=610.0), replace(SPINS, util_pct=0.0, power_w=74.0)


def four(last=(11, 11, 11, 10), stacks=(PEERS, PEERS, PEERS, (OWN,)), before=None, after=None):
    """Returns the evidence of four ranks; by default, rank 3 sleeps and the others wait for it."""
    usual = {0: IDLE, 1: IDLE, 2: IDLE, 3: ASLEEP}
    return Evidence(
        before=usual | (before or after or {}),
        after={r: replace(p, mono=2.0) for r, p in (usual | (after or {})).items()},
        stacks={r: stack(r, *frames) for r, frames in enumerate(stacks) if frames},
        flights={r: flight(r, number) for r, number in enumerate(last) if number},
    )


def with_gpu_of_rank_3(frames, process, last=()):
    """Returns the evidence of four ranks: the GPU of rank 3 computes, and the others are idle."""
    processes = {**dict.fromkeys(range(3), process), 3: RUNS}
    found = four(last, (frames,) * 3 + ((OWN,),), processes, processes)
    busy = replace(RUNS, cpu_ticks=300, mono=2.0)
    gpus = {n: replace(AT_REST, index=n, minor=n) for n in range(3)}
    return replace(
        found, after={**found.after, 3: busy}, gpus=gpus | {3: replace(COMPUTES, index=3, minor=3)}
    )


def called(number, *ops, waits=True):
    """Returns a flight record: four steps of three calls, one call more, then `ops`."""
    usual = ["all_reduce", "all_gather", "barrier"] * 4 + ["all_reduce"]
    calls = tuple(
        Collective("0 default_pg", n, op, "[8] float32", n < len(usual) + len(ops) or not waits)
        for n, op in enumerate((*usual, *ops), 1)
    )
    return FlightRecord(number, NOW, "x", {"0 default_pg": len(calls)}, calls)
