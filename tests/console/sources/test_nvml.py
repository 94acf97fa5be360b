"""GPU rows through the real pynvml over a fake of NVML's C interface, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fakes import nvml as fake

ROOT = Path(__file__).parents[3]
PROGRAM = """
import dataclasses, json, sys, time
from console.sources.nvml import Nvml
nvml = Nvml(period_s=0.1)
nvml.start()
for _ in sys.stdin:
    print(json.dumps([dataclasses.asdict(gpu) for gpu in nvml.rows()]), flush=True)
"""


class Reader:
    """The process that reads; each `rows` asks it once."""

    def __init__(self, folder: Path | None):
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        environment.pop("LD_LIBRARY_PATH", None)
        if folder is not None:
            environment["LD_LIBRARY_PATH"] = str(folder)
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def answer(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def wait(self, reached, timeout_s=10.0):
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            rows = self.answer()
            if rows and reached(rows):
                return rows
            time.sleep(0.05)
        raise AssertionError(self.answer())


@pytest.fixture(scope="module")
def gpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nvml")
    fake.build(folder)
    reader = Reader(folder)
    yield folder, reader
    reader.process.kill()
    reader.process.wait()


def ok(rows):
    return all(row["state"] == "ok" for row in rows)


def test_eight_gpus_say_what_they_do(gpus):
    folder, reader = gpus
    rows = reader.wait(ok)
    assert [row["index"] for row in rows] == list(range(8))
    assert {row["uuid"] for row in rows} == {f"GPU-fake-{index}" for index in range(8)}
    row = rows[5]
    assert (row["util_pct"], row["power_w"], row["power_limit_w"]) == (97.0, 321.5, 400.0)
    assert (row["mem_used_mib"], row["mem_total_mib"], row["temp_c"]) == (61_000, 81_920, 64)
    assert row["name"] == "Fake A100-SXM4-80GB"
    assert row["sm_mhz"] is None
    fake.write(folder, gpu5={"util": 3})
    reader.wait(lambda rows: rows[5]["util_pct"] == 3)


def test_a_lost_gpu_is_lost_with_its_xid_and_the_others_are_not(gpus):
    folder, reader = gpus
    fake.write(folder, gpu3={"state": "lost", "xid": 79})
    rows = reader.wait(lambda rows: rows[3]["state"] == "lost" and "Xid" in rows[3]["why"])
    assert rows[3]["why"] == "lost: GPU is lost, Xid 79"
    assert rows[3]["util_pct"] is None
    assert rows[3]["mem_total_mib"] == 81_920
    assert ok(rows[:3] + rows[4:])


def test_what_slows_a_gpu_down_and_what_it_cannot_correct_is_told(gpus):
    folder, reader = gpus
    fake.write(folder, gpu2={"throttle": 0x44}, gpu4={"ecc": 3})
    rows = reader.wait(lambda rows: rows[2]["throttle"] and rows[4]["ecc_uncorrected"])
    assert [row["throttle"] for row in rows] == ["", "", "hardware, heat", *[""] * 5]
    assert [row["ecc_uncorrected"] for row in rows] == [0, 0, 0, 0, 3, 0, 0, 0]
    fake.write(folder)


def test_another_error_is_shown_as_it_is(gpus):
    folder, reader = gpus
    fake.write(folder, gpu1={"state": "error"})
    rows = reader.wait(lambda rows: rows[1]["state"] == "error")
    assert "Unknown" in rows[1]["why"]
    fake.write(folder)
    reader.wait(lambda rows: rows[1]["state"] == "ok")


def test_a_gpu_that_hangs_ages_alone_and_nobody_waits_for_it(gpus):
    folder, reader = gpus
    fake.write(folder, gpu2={"delay_ms": 60_000})
    rows = reader.wait(lambda rows: rows[2]["state"] == "error", timeout_s=12)
    assert "has not answered for" in rows[2]["why"]
    assert rows[2]["util_pct"] is None
    fake.write(folder, gpu2={"delay_ms": 60_000}, gpu6={"util": 11})
    begun = time.monotonic()
    rows = reader.wait(lambda rows: rows[6]["util_pct"] == 11, timeout_s=2)
    assert time.monotonic() - begun < 2
    assert rows[2]["state"] == "error"


def test_without_a_driver_there_is_nothing():
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("this machine has an NVIDIA driver")
    reader = Reader(None)
    try:
        assert reader.answer() == []
    finally:
        reader.process.kill()
        reader.process.wait()
