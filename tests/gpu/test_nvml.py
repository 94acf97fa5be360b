"""The GPU's figures through the real driver."""

from __future__ import annotations

import subprocess
import time

import pytest

from console.sources import gpu_survey, nvml
from console.sources.nvml import Device, XidLog

pytestmark = pytest.mark.gpu


@pytest.fixture
def device():
    import pynvml

    pynvml.nvmlInit()
    yield Device(pynvml, 0, XidLog(pynvml))
    pynvml.nvmlShutdown()


def smi(*fields: str) -> list[str]:
    words = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(fields)}"]
    done = subprocess.run(
        [*words, "--format=csv,noheader,nounits"], capture_output=True, text=True, check=True
    )
    return [word.strip() for word in done.stdout.strip().split(",")]


def test_a_row_equals_what_nvidia_smi_prints(device):
    row = device.read()
    assert row.state == "ok", row
    assert row.why == ""
    name, uuid, total, used, limit, temp, clock = smi(
        "name", "uuid", "memory.total", "memory.used", "enforced.power.limit", "temperature.gpu",
        "clocks.sm",
    )  # fmt: skip
    assert (row.name, row.uuid) == (name, uuid)
    assert row.mem_total_mib == pytest.approx(float(total), abs=1)
    assert row.mem_used_mib == pytest.approx(float(used), rel=0.2, abs=1024)
    assert row.power_limit_w == pytest.approx(float(limit), abs=1)
    assert row.temp_c == pytest.approx(float(temp), abs=8)
    assert row.sm_mhz is not None
    assert 0 < row.sm_mhz <= 4 * max(float(clock), 1000)
    assert row.ecc_uncorrected == 0


def test_products_raise_utilisation_power_and_memory(device):
    import torch

    idle = device.read()
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    end, rows = time.monotonic() + 4, []
    while time.monotonic() < end:
        for _ in range(20):
            x @ x
        torch.cuda.synchronize()
        rows.append(device.read())
    busy = rows[-1]
    assert busy.util_pct >= 50, busy
    assert busy.power_w > idle.power_w + 50
    assert busy.mem_used_mib > idle.mem_used_mib + 100


def test_the_devices_are_counted_and_sampled_each_second(device):
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    assert len(gpu_survey.survey().cards) == done.stdout.count("GPU ")
    samples = nvml.Nvml()
    samples.start()
    try:
        end = time.monotonic() + 20
        while time.monotonic() < end and {gpu.state for gpu in samples.rows()} != {"ok"}:
            time.sleep(0.1)
        assert {gpu.state for gpu in samples.rows()} == {"ok"}
    finally:
        samples.stop()
