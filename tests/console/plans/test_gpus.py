"""The GPUs that a plan needs, by two sources: a fake of NVML, and a /proc made of files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from console import plan
from console.plans import gpu_checks, preflight
from console.plans.case import Case
from console.sources import nvml
from tests.fakes import nvml as fake
from tests.launches import HANG_GUARD_S


class Machine:
    """A machine with a fake of NVML, which the child process finds by LD_LIBRARY_PATH."""

    def __init__(self, root: Path):
        self.root = root

    def gpus(self, **changed):
        """Writes eight idle GPUs; `gpu3={"state": "lost"}` changes one."""
        idle = {f"gpu{index}": fake.IDLE for index in range(8)}
        fake.write(self.root, **{name: idle[name] | changed.get(name, {}) for name in idle})

    def check(
        self, devices="", limit_s=HANG_GUARD_S, flags=None, row="gpus", **more
    ) -> tuple[str, str]:
        phase = {"name": "one", "script": "x.py", "flags": flags or {}}
        given = plan.parse({"name": "mine", "phases": [phase]} | more, "test")
        case = Case(
            given, self.root / "launch", devices, settings=({},), root=self.root, driver_s=limit_s
        )
        return preflight.ROWS[row].check(case)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return fake.build(tmp_path_factory.mktemp("built"))


@pytest.fixture
def machine(built, tmp_path, monkeypatch):
    """NVML counts eight GPUs; the kernel lists none yet."""
    shutil.copy(built, tmp_path)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setattr(nvml, "has_library", lambda: True)
    monkeypatch.setattr(gpu_checks, "torch_cuda", lambda: (13, 0))
    made = Machine(tmp_path)
    made.gpus()
    return made


@pytest.mark.decision("go-plan", "true")
def test_gpus_that_nvml_and_the_kernel_count_pass(machine):
    fake.kernel(machine.root, 8)
    text = "8 needed, NVML counts 8, the kernel's driver lists 8; needed GPUs are healthy and idle"
    assert machine.check(gpus=8) == ("pass", text)


SICK = [
    ({"state": "lost"}, "GPU 0 is not usable (lost: GPU is lost)"),
    ({"state": "error"}, "temperature, clock, ECC errors (Unknown Error)); pass"),
    ({"util": 97, "used": 61 << 10}, "GPU 0 is busy (97 %, 61.0 GiB, pid 4242)"),
    ({"used": 3000}, "GPU 0 is busy (0 %, 2.9 GiB, pid 4242)"),
    ({"ecc": 7}, "GPU 0 has 7 uncorrected ECC errors"),
    ({"throttle": 0x40}, "GPU 0 is throttled (hardware thermal)"),
    ({"mig": 1}, "GPU 0 is divided by MIG"),
]


@pytest.mark.parametrize(("changed", "text"), SICK)
def test_a_gpu_that_cannot_train_now_does_not_count(machine, changed, text):
    fake.kernel(machine.root, 8)
    machine.gpus(gpu0=changed)
    if "pid" in text:
        fake.processes(machine.root, (0, 4242))
    result, said = machine.check(gpus=2)
    assert (result, text in said) == ("fail", True), said
    assert said.endswith("; pass --devices 1,2")
    assert "needs 2 GPUs, and 1 of the chosen GPUs cannot be used" in said


def test_healthy_gpus_can_be_chosen_and_a_sick_one_that_is_needed_must_be_repaired(machine):
    fake.kernel(machine.root, 8)
    machine.gpus(gpu0={"ecc": 7})
    assert machine.check(gpus=2, devices="1,2")[0] == "pass"
    assert "; free or repair GPUs" in machine.check(gpus=8)[1]


def test_one_gpu_that_hangs_is_named_and_a_sensor_that_fails_is_no_pass(machine):
    fake.kernel(machine.root, 8)
    machine.gpus(gpu1={"delay_ms": fake.HANGS_MS})
    result, said = machine.check(gpus=2, limit_s=10.0)
    assert (result, "GPU 1 is not usable (NVML has not answered within 10 s)" in said) == (
        "fail", True,
    ), said  # fmt: skip
    machine.gpus(gpu0={"refused": "ecc=999"})
    result, said = machine.check(gpus=2)
    assert (result, "GPU 0: no ECC errors (Unknown Error)" in said) == ("unknown", True)
    for refused, words in (
        ("processes=999", "its processes are not available (Unknown Error)"),
        ("mig=999", "its MIG mode is not available (Unknown Error)"),
    ):
        machine.gpus(gpu0={"refused": refused})
        result, said = machine.check(gpus=2)
        assert (result, words in said) == ("unknown", True), said
    machine.gpus(gpu0={"refused": "mig=3"})
    assert machine.check(gpus=2)[0] == "pass", "most GPUs have no MIG"


def test_a_driver_that_is_too_old_for_torch_fails(machine):
    fake.driver(machine.root, cuda=12_040)
    result, said = machine.check(gpus=1, row="driver")
    assert (result, said.startswith("the driver 580.00 supports CUDA 12.4, and torch")) == (
        "fail", True,
    )  # fmt: skip
    fake.driver(machine.root, cuda=13_010)
    assert machine.check(gpus=1, row="driver")[0] == "pass"


@pytest.mark.decision("go-plan", "lie")
def test_more_gpus_than_the_kernel_lists_fail(machine):
    fake.kernel(machine.root, 2)
    result, text = machine.check(gpus=8)
    assert result == "fail"
    assert text.startswith("NVML counts 8 and the kernel's driver lists 2; compare nvidia-smi")


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
    assert machine.check() == ("pass", "no GPU is needed, NVML counts 0")


@pytest.mark.parametrize(
    ("devices", "leaves"),
    [("", 8), ("0,1", 2), ("0,9,1", 1), ("-1", 0), ("3,3", 0), ("GPU-fake-1, 2", 2)],
)
def test_cuda_stops_at_the_first_entry_that_names_no_gpu(devices, leaves):
    assert len(gpu_checks.visible(devices, [f"GPU-fake-{i}" for i in range(8)])) == leaves


def test_only_the_gpus_that_the_ranks_will_see_count(machine):
    fake.kernel(machine.root, 8)
    for more in ({"devices": "0,9"}, {"flags": {"CUDA_VISIBLE_DEVICES": "0,9"}}):
        result, text = machine.check(gpus=2, **more)
        assert (result, "CUDA_VISIBLE_DEVICES=0,9 leaves 1 of 8 GPUs" in text) == ("fail", True)
