"""Runs on a real GPU under the console: preflight, figures, and a kernel that runs too long."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launches import Begin, phase
from trainers.contract import rundir

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]


def console(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "console", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=330)


def test_the_preflight_measures_the_device_and_the_attention(tmp_path):
    """The plan has the shapes and the routes of production."""
    plan = {
        "name": "measured", "config": "configs/m7c_125m.yaml", "nproc": 1, "gpus": 1,
        "preflight": {"measure": True}, "set": {"data.source": "synthetic"},
        "phases": [{"name": "smoke", "set": {"train.steps": 1}}],
    }  # fmt: skip
    file = tmp_path / "measured.yaml"
    file.write_text(json.dumps(plan))
    done = console("--root", tmp_path, "check", file)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    rows = {line.split()[1].rstrip(":"): line for line in lines if line.startswith("pass ")}
    speed = re.search(r"([0-9.]+) TFLOP/s", rows["matmul"])
    assert speed is not None, rows["matmul"]
    assert float(speed[1]) > 20
    assert "2,047 of 2,047 cuts" in rows["causality"]
    assert "differs from float64" in rows["parity"]


def test_a_run_has_the_figures_of_its_gpu_and_completes(tmp_path):
    """The samples have utilisation, power and memory of the GPU on which rank 0 trains."""
    root = tmp_path / "artifacts"
    command = [
        sys.executable, "-m", "console", "--root", str(root), "launch", "--config",
        "configs/m7c_125m.yaml", "--set", "data.source=synthetic", "--set", "train.steps=30",
        "--set", "report.log_every=5", "--set", "checkpoint.at_end=false", "--wait", "--json",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    run = next(root.glob("*/*/0-*"))
    path = rundir.samples(run, rundir.host_name())
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [gpu for sample in samples for gpu in sample["gpus"]]
    assert rows
    assert {gpu["state"] for gpu in rows} == {"ok"}
    assert {gpu["minor"] for gpu in rows[:1]} == {0}
    assert max(gpu["util_pct"] for gpu in rows) > 10
    assert max(gpu["mem_used_mib"] for gpu in rows) > 1000
    assert max(gpu["power_w"] for gpu in rows) > 100


@pytest.mark.parametrize("words", [(), ("--phases",)], ids=["three lines", "phases"])
def test_a_kernel_that_does_not_end_is_a_wait_for_the_gpu(tmp_path_factory, words):
    begin = Begin(tmp_path_factory)
    started = begin(
        phase("hangs", "device_wait.py", *words), nproc=1,
        watch={"stall_floor_s": 5, "startup_s": 60, "grace_s": 3},
    )  # fmt: skip
    try:
        started.wait_state("stalled", timeout_s=90)
        said = started.wait(
            lambda: (v := started.state().get("verdict")) and v["cause"] == "device" and v, 20
        )
        assert (said["rank"], said["sure"]) == (0, "medium")
        assert "waits for its GPU, which runs a kernel that computes little" in said["sentence"]
        assert any("GPUs: rank 0: GPU 0 at 100 %" in line for line in said["evidence"])
        assert "device_wait.py" in said["sentence"]
        started.wait_state("running", "completed", timeout_s=90)
    finally:
        begin.clean()


NCCL = """
import os, time
import torch, torch.distributed as dist
from trainers.contract.member import join
torch.cuda.set_device(0)
dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
run, x = join(), torch.ones(1 << 20, device="cuda")
for step in range(1, 100):
    dist.all_reduce(x)
    if step == 6:
        torch.cuda._sleep(int(45e9))
    if run.step(step, loss=float(x[0])) or step == 20:
        break
"""


def test_the_flight_record_of_nccl_is_read_while_a_kernel_does_not_end(tmp_path, tmp_path_factory):
    program = tmp_path / "nccl.py"
    program.write_text(NCCL)
    begin = Begin(tmp_path_factory)
    started = begin(
        {"name": "nccl", "script": str(program)}, nproc=1,
        watch={"stall_floor_s": 5, "startup_s": 60, "grace_s": 3},
    )  # fmt: skip
    try:
        started.wait_state("stalled", timeout_s=90)
        record = started.wait(lambda: next(started.run().glob("flight_rank0_*.json"), None), 20)
        entries = json.loads(record.read_text())["entries"]
        assert {entry["profiling_name"] for entry in entries} == {"nccl:all_reduce"}
        started.wait_state("running", "completed", timeout_s=90)
    finally:
        begin.clean()
