"""GPU rows from the real pynvml and a fake NVML library, read in a separate process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fakes import nvml as fake
from tests.launches import wait_for

ROOT = Path(__file__).parents[3]
PROGRAM = """
import dataclasses, json, pathlib, sys, time
from console.sources.nvml import Nvml
nvml = Nvml(period_s=0.1, root=pathlib.Path(sys.argv[1]), retry_s=0.2)
nvml.start()
for _ in sys.stdin:
    print(json.dumps([dataclasses.asdict(gpu) for gpu in nvml.rows()]), flush=True)
"""


class Reader:
    """The process that reads the GPUs; `answer` requests their rows once."""

    def __init__(self, folder: Path | None, root: Path = Path("/nowhere")):
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        environment.pop("LD_LIBRARY_PATH", None)
        if folder is not None:
            environment["LD_LIBRARY_PATH"] = str(folder)
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(root)], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def answer(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def wait(self, reached):
        def rows():
            found = self.answer()
            return found if found and reached(found) else None

        return wait_for(rows, fake.HANGS_MS / 1200, told=self.answer)

    def close(self):
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Returns the path of the fake library; its folder has the files of eight GPUs."""
    return fake.build(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def shared(built):
    reader = Reader(built.parent)
    yield built.parent, reader
    reader.close()


@pytest.fixture
def gpus(shared):
    """Returns the shared folder and the shared reader; the eight GPUs are reset before a test."""
    folder, reader = shared
    fake.write(folder)
    reader.wait(lambda rows: ok(rows) and not rows[4]["ecc_uncorrected"])
    return shared


class Machine:
    """A separate fake machine with two GPUs; `root` contains its /proc."""

    def __init__(self, built: Path, root: Path):
        self.built, self.root, self.folder = built, root, root / "lib"
        self.folder.mkdir()
        self.readers: list[Reader] = []
        fake.write(self.folder, 2)

    def install(self) -> None:
        shutil.copy(self.built, self.folder / "new")
        (self.folder / "new").rename(self.folder / self.built.name)

    def start(self) -> Reader:
        self.readers.append(Reader(self.folder, self.root))
        return self.readers[-1]


@pytest.fixture
def machine(built, tmp_path):
    made = Machine(built, tmp_path)
    yield made
    for reader in made.readers:
        reader.close()


def ok(rows):
    return all(row["state"] == "ok" for row in rows)


def test_eight_gpus_have_rows_with_figures(gpus):
    folder, reader = gpus
    rows = reader.wait(ok)
    assert [row["index"] for row in rows] == list(range(8))
    assert {row["uuid"] for row in rows} == {f"GPU-fake-{index}" for index in range(8)}
    row = rows[5]
    assert (row["util_pct"], row["power_w"], row["power_limit_w"]) == (97.0, 321.5, 400.0)
    assert (row["mem_used_mib"], row["mem_total_mib"], row["temp_c"]) == (61_000, 81_920, 64)
    assert row["name"] == "Fake A100-SXM4-80GB"
    assert row["sm_mhz"] is None
    assert (row["throttle"], row["ecc_uncorrected"]) == ("", 0)
    changed = {"gpu5": {"util": 3}, "gpu2": {"throttle": 0x44}, "gpu4": {"ecc": 3}}
    fake.write(folder, **changed)
    reader.wait(lambda rows: (
        rows[5]["util_pct"], rows[4]["ecc_uncorrected"], rows[2]["throttle"],
    ) == (3, 3, "hardware thermal"))  # fmt: skip


def test_a_lost_gpu_keeps_its_xid_and_the_others_stay_ok(gpus):
    folder, reader = gpus
    fake.xid(folder, 3, 79)
    reader.wait(lambda rows: rows[3]["xid"] == 79)
    fake.write(folder, gpu3={"state": "lost"})
    rows = reader.wait(lambda rows: rows[3]["state"] == "lost" and ok(rows[:3] + rows[4:]))
    assert rows[3]["why"] == "lost: GPU is lost, Xid 79"
    assert rows[3]["util_pct"] is None
    assert rows[3]["mem_total_mib"] == 81_920


def test_a_hanging_gpu_delays_no_other(machine):
    machine.install()
    reader = machine.start()
    reader.wait(ok)
    hangs = {"gpu0": {"delay_ms": fake.HANGS_MS}}
    fake.write(machine.folder, 2, **hangs)
    rows = reader.wait(lambda rows: rows[0]["state"] == "error")
    assert "has not answered for" in rows[0]["why"]
    assert (rows[0]["util_pct"], rows[0]["mem_used_mib"]) == (None, None)
    fake.write(machine.folder, 2, gpu1={"util": 11}, **hangs)
    reader.wait(lambda rows: (rows[0]["state"], rows[1]["util_pct"]) == ("error", 11))


# --- Xids ------------------------------------------------------------------------------------


def test_each_xid_is_counted_on_the_gpu_that_it_is_about(gpus):
    """An event set may deliver the events of another device, and several events may be pending."""
    folder, reader = gpus
    before = reader.answer()
    fake.xid(folder, 5, 31, via=0)
    fake.xid(folder, 5, 31, via=0)
    fake.xid(folder, 6, 94)
    rows = reader.wait(lambda rows: rows[6]["xid"] == 94 and rows[5]["xid_count"] == 2)
    assert (rows[5]["xid"], rows[5]["xid_count"], rows[5]["xids"]) == (31, 2, [31, 31])
    assert rows[5]["why"] == "Xid 31, 2 times"
    assert abs(rows[5]["xid_ts"] - time.time()) < 60
    assert rows[0] == before[0]
    fake.xid(folder, 5, 79)
    rows = reader.wait(lambda rows: rows[5]["xid_count"] == 3)
    assert (rows[5]["xid"], rows[5]["why"]) == (79, "Xid 31, 79, 3 times")


def test_a_gpu_that_came_back_reports_xids_again(gpus):
    folder, reader = gpus
    fake.write(folder, gpu1={"state": "lost"})
    reader.wait(lambda rows: rows[1]["state"] == "lost")
    fake.xid(folder, 7, 48)
    reader.wait(lambda rows: rows[7]["xid"] == 48)
    fake.write(folder)
    reader.wait(lambda rows: ok(rows) and rows[1]["why"] == "")
    fake.xid(folder, 1, 63)
    reader.wait(lambda rows: rows[1]["xid"] == 63)


def test_a_gpu_whose_events_cannot_be_read_for_a_while_reports_xids_again(machine):
    """Each failed wait needs a new event set, and NVML has few of them, so the old one is freed."""
    machine.install()
    fake.write(machine.folder, 2, gpu1={"refused": "wait=999"})
    reader = machine.start()
    reader.wait(ok)
    time.sleep(4.0)  # about 40 reads
    fake.write(machine.folder, 2, gpu1={"util": 12})
    reader.wait(lambda rows: rows[1]["util_pct"] == 12)
    fake.xid(machine.folder, 1, 63)
    rows = reader.wait(lambda rows: rows[1]["xid"] == 63)
    assert rows[1]["state"] == "ok"


# --- sensors that NVML refuses ---------------------------------------------------------------


def test_a_sensor_that_is_refused_leaves_the_others(gpus):
    folder, reader = gpus
    fake.write(folder, gpu1={"refused": "ecc=4,memory=999"}, gpu2={"refused": "power=4,util=4"})
    rows = reader.wait(lambda rows: [rows[1]["mem_used_mib"], rows[1]["ecc_uncorrected"],
                                     rows[2]["power_w"]] == [None] * 3)  # fmt: skip
    assert (rows[1]["state"], rows[1]["util_pct"], rows[1]["temp_c"]) == ("ok", 97.0, 64)
    assert "no memory (Unknown Error); no ECC errors (Insufficient Permissions)" in rows[1]["why"]
    assert "no utilization, power (Insufficient Permissions)" in rows[2]["why"]


def test_a_gpu_whose_sensors_are_all_refused_is_an_error_with_each_reason(gpus):
    folder, reader = gpus
    fake.write(folder, gpu2={"refused": "memory=999,util=4,power=4,throttle=4,temp=4,ecc=4"})
    rows = reader.wait(lambda rows: rows[2]["state"] == "error")
    assert rows[2]["why"] == (
        "no memory (Unknown Error); no utilization, power, throttle reasons, temperature, "
        "ECC errors (Insufficient Permissions)"
    )


# --- a driver that is late, fails or hangs ------------------------------------------------


def test_a_library_and_then_a_driver_that_come_late_are_found(machine):
    reader = machine.start()
    assert reader.answer() == []
    fake.driver(machine.folder, init=9)
    machine.install()
    for _ in range(20):
        assert reader.answer() == []
        time.sleep(0.05)
    fake.driver(machine.folder)
    assert len(reader.wait(ok)) == 2


@pytest.mark.parametrize(("listed", "count"), [(0, 1), (4, 4)])
def test_nvml_that_cannot_be_initialised_is_an_error_of_each_gpu(machine, listed, count):
    """The list of the kernel's driver has the number of GPUs; an empty list counts as one GPU."""
    machine.install()
    fake.kernel(machine.root, listed)
    fake.driver(machine.folder, init=999)
    reader = machine.start()
    rows = reader.wait(lambda rows: len(rows) == count and "initialised" in rows[-1]["why"])
    assert [row["state"] for row in rows] == ["error"] * count
    assert rows[-1]["why"] == "NVML cannot be initialised (Unknown Error); retrying"
    fake.driver(machine.folder)
    assert len(reader.wait(ok)) == 2


def test_an_initialisation_that_hangs_is_an_error_without_any_answer_of_nvml(machine):
    machine.install()
    fake.driver(machine.folder, delay_ms=fake.HANGS_MS)
    rows = machine.start().wait(lambda rows: True)
    assert (len(rows), rows[0]["state"]) == (1, "error")
    assert "has not answered for" in rows[0]["why"]
