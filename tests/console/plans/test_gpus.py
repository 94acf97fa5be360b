"""The GPUs that a plan needs, by two sources: a fake of NVML, and a /proc made of files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from console.plans import preflight
from tests.fakes import nvml as fake

ROOT = Path(__file__).parents[3]
PROGRAM = """
import json, pathlib, sys
from console.plans import preflight
from trainers.contract import plan
root, limit_s, document, devices = sys.argv[1:]
given = plan.parse(json.loads(document), "test")
root = pathlib.Path(root)
case = preflight.Case(given, root / "launch", devices, root=root, driver_s=float(limit_s))
print(json.dumps(preflight.check_gpus(case)))
"""


class Machine:
    """Checks in a process of its own, which finds the fake by LD_LIBRARY_PATH."""

    def __init__(self, root: Path):
        self.root = root

    def check(self, devices="", limit_s=30.0, flags=None, **more) -> tuple[str, str]:
        phase = {"name": "one", "script": "x.py", "flags": flags or {}}
        plan = json.dumps({"name": "mine", "phases": [phase]} | more)
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(self.root), str(limit_s), plan, devices],
            env={**os.environ, "PYTHONPATH": str(ROOT), "LD_LIBRARY_PATH": str(self.root)},
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return tuple(json.loads(done.stdout))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return fake.build(tmp_path_factory.mktemp("built"))


@pytest.fixture
def machine(built, tmp_path):
    """NVML counts eight GPUs; the kernel lists none yet."""
    shutil.copy(built, tmp_path)
    fake.write(tmp_path)
    return Machine(tmp_path)


@pytest.mark.decision("go-plan", "true")
def test_gpus_that_nvml_and_the_kernel_count_pass(machine):
    fake.kernel(machine.root, 8)
    text = "8 needed, NVML counts 8, the kernel's driver lists 8"
    assert machine.check(gpus=8) == ("pass", text)


@pytest.mark.decision("go-plan", "lie")
def test_more_gpus_than_the_kernel_lists_fail(machine):
    fake.kernel(machine.root, 2)
    result, text = machine.check(gpus=8)
    assert result == "fail"
    assert text.startswith("NVML counts 8 GPUs and the kernel's driver lists 2; compare nvidia-smi")


@pytest.mark.decision("go-plan", "absent")
def test_gpus_that_only_nvml_counts_are_unknown(machine):
    result, text = machine.check(gpus=8)
    assert result == "unknown"
    assert text.startswith("8 needed, NVML counts 8; ")
    assert text.endswith("cannot be read, so no second source confirms it")


def test_gpus_that_a_batch_system_hides_are_no_disagreement(machine):
    fake.kernel(machine.root, 16)
    assert machine.check(gpus=8)[0] == "pass"
    result, text = machine.check(gpus=9)
    assert (result, "needs 9 GPUs, but this machine has 8" in text) == ("fail", True)


def test_a_driver_that_hangs_is_reported_in_time_and_the_process_ends(machine):
    fake.driver(machine.root, delay_ms=fake.HANGS_MS)
    result, text = machine.check(gpus=8, limit_s=0.5)
    assert result == "fail"
    assert text.startswith("the NVIDIA driver does not answer within 0.5 s")
    assert machine.check(limit_s=0.5)[0] == "unknown"


def test_nvml_that_cannot_be_initialised_is_reported_with_its_reason(machine):
    fake.driver(machine.root, init=999)
    result, text = machine.check(gpus=1)
    assert (result, "NVML cannot be initialised (Unknown Error)" in text) == ("fail", True)
    fake.driver(machine.root, init=9)
    assert machine.check() == ("pass", "none needed, NVML counts 0")


@pytest.mark.parametrize(
    ("devices", "leaves"),
    [("", 8), ("0,1", 2), ("0,9,1", 1), ("-1", 0), ("3,3", 1), ("GPU-fake-1, 2", 2)],
)
def test_cuda_stops_at_the_first_entry_that_names_no_gpu(devices, leaves):
    assert preflight.usable_of(devices, 8) == leaves


def test_only_the_gpus_that_the_ranks_will_see_count(machine):
    fake.kernel(machine.root, 8)
    for more in ({"devices": "0,9"}, {"flags": {"CUDA_VISIBLE_DEVICES": "0,9"}}):
        result, text = machine.check(gpus=2, **more)
        assert (result, "CUDA_VISIBLE_DEVICES=0,9 leaves 1 of 8 GPUs" in text) == ("fail", True)
