"""The GPUs that the ranks of a run use, among all GPUs of the host."""

from __future__ import annotations

import time
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from console import status_text
from console.model import Gpu
from console.sources import ranks
from console.sources.run import RunSource
from console.supervisor.sampling import Sampler
from console.tui.widgets.ranks import rank_rows
from tests.console.sources import directory
from trainers.contract import rundir

FOUR = [
    Gpu(i, "H200", "ok", 98.0, 512.0, 700.0, 70_000.0, 143_000.0, uuid=f"GPU-{i}a")
    for i in range(4)
]
BROKEN = [Gpu(0, "GPU", "error", why="NVML cannot be initialised")]


def run_json(device: str, devices: str = "", nproc: int = 2) -> dict[str, Any]:
    """Returns a part of run.json; a foreign program has no `device`."""
    settings = {"train.device": {"value": device, "origin": "config"}} if device else {}
    flags = {"CUDA_VISIBLE_DEVICES": {"value": devices, "origin": "--devices"}} if devices else {}
    return {"settings": settings, "flags": flags, "nproc": nproc}


@pytest.mark.parametrize(
    ("run", "gpus", "own"),
    [
        (run_json("cpu"), FOUR, []),
        (run_json("cpu"), BROKEN, []),
        (run_json("cuda"), FOUR, [0, 1]),
        (run_json("auto", nproc=1), FOUR, [0]),
        (run_json("cuda", "3,1"), FOUR, [1, 3]),
        (run_json("cuda", "3,1"), [FOUR[1], FOUR[3]], [1, 3]),
        (run_json("cuda", "GPU-2a, GPU-0"), FOUR, [0, 2]),
        (run_json("", "2"), FOUR, [2]),
        (run_json("", "-1"), FOUR, []),
        (run_json(""), FOUR, [0, 1, 2, 3]),
        # It is not known which GPUs the ranks use.
        (run_json("cuda", "MIG-1,MIG-2"), FOUR, [0, 1, 2, 3]),
        (run_json("cuda", "2,3"), BROKEN, [0]),
        (run_json("cuda"), BROKEN, [0]),
        ({}, FOUR, [0, 1, 2, 3]),
    ],
)
def test_the_gpus_of_the_ranks_are_known_from_run_json(run, gpus, own):
    assert [gpu.index for gpu in ranks.own_gpus(run, gpus)] == own


def test_a_sample_has_only_the_gpus_of_the_ranks():
    """The watch rules read the GPUs of the sampler; gates and charts read those of samples."""
    nvml: Any = SimpleNamespace(rows=lambda: FOUR)
    for device, own in (("cpu", []), ("cuda", [0, 1])):
        sampler = Sampler(nvml, lambda _: None, partial(ranks.own_gpus, run_json(device)))
        sample = sampler.sample([], {}, 1, time.monotonic())
        assert [gpu["index"] for gpu in sample["gpus"]] == own
        assert [gpu.index for gpu in sampler.gpus] == own


@pytest.mark.parametrize(
    ("device", "devices", "shown"),
    [("cpu", "", [None, None]), ("cuda", "", [0, 1]), ("cuda", "3,1", [3, 1]),
     ("cuda", "GPU-2a,GPU-3", [2, 3]), ("cuda", "3", [3, None])],
)  # fmt: skip
def test_each_rank_shows_its_own_gpu(launch, run, device, devices, shown):
    directory.change(run / rundir.RUN, **run_json(device, devices))
    use = {"state": "R", "cpu_pct": 99.0, "rss_mib": 512.0}
    directory.sample(
        run, gpus=[asdict(gpu) for gpu in FOUR], ranks=[use | {"rank": rank} for rank in (0, 1)]
    )
    state = RunSource(launch).poll()
    assert [rank.gpu and rank.gpu.index for rank in state.ranks] == shown
    lines = [line for line in status_text.status_lines(state) if line.startswith("  rank 0")]
    assert ("GPU" in lines[0]) == (device == "cuda")
    head = "".join(text for text, _ in rank_rows(state, 80, 9)[0])
    assert ("cpu" in head.split()) == (device == "cpu")


@pytest.mark.parametrize(("old_s", "state"), [(1, "running"), (30, "running"), (30, "lost")])
def test_an_old_sample_shows_no_present_value_of_a_gpu(launch, run, old_s, state):
    """After the death of the supervisor the ranks train on, but nothing measures their GPUs."""
    gpus = [asdict(gpu) | {"temp_c": 84.0, "sm_mhz": 1980.0, "xid_count": 1} for gpu in FOUR]
    directory.change(run / rundir.RUN, **run_json("cuda"))
    directory.change(run / rundir.SUPERVISOR, state=state)
    directory.sample(run, ts=time.time() - old_s, gpus=gpus, ranks=[{"rank": 0}])
    state = RunSource(launch).poll()
    for gpu in (state.gpus[0], state.ranks[0].gpu):
        assert gpu is not None
        present = gpu.mem_used_mib, gpu.temp_c, gpu.sm_mhz, gpu.util_pct, gpu.power_w
        assert present == ((70_000.0, 84.0, 1980.0, 98.0, 512.0) if old_s == 1 else (None,) * 5)
        assert (gpu.state, gpu.mem_total_mib, gpu.xid_count) == ("ok", 143_000.0, 1)
