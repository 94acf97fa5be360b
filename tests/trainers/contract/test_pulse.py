"""The values in a pulse; a reader gets a whole pulse or none while a pulse is written."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from trainers.contract import pulse


def written(path):
    found = pulse.read(path)
    assert found is not None
    return found


def test_a_pulse_has_step_phase_and_times_and_the_device_apart_from_the_host(tmp_path):
    path, before = tmp_path / "p", time.monotonic()
    writer = pulse.PulseWriter(path, rank=3)
    writer.set(41, "backward")
    first = written(path)
    assert (first.rank, first.step, first.phase, first.device_phase) == (
        3, 41, "backward", "backward",
    )  # fmt: skip
    assert before <= first.since <= time.monotonic()
    writer.set(42, "optimizer", device_step=41, device_phase="forward")
    second = written(path)
    writer.count_collective()
    third = written(path)
    assert (third.collectives, third.since) == (second.collectives + 1, second.since)
    assert (third.step, third.phase) == (42, "optimizer")
    assert (third.device_step, third.device_phase) == (41, "forward")
    assert third.beat >= second.beat


def test_a_half_written_pulse_is_not_believed(tmp_path):
    writer = pulse.PulseWriter(tmp_path / "p", rank=0)
    writer.set(1, "forward")
    torn = bytearray((tmp_path / "p").read_bytes())
    torn[0] += 1
    assert pulse.unpack(bytes(torn)) is None


HAMMER = """
import sys, time
from pathlib import Path
from trainers.contract.pulse import PulseWriter
writer = PulseWriter(Path(sys.argv[1]), 0)
step = 0
while True:
    step += 1
    writer.collectives = step
    writer.set(step, "forward")
    if step % 4 == 0:
        time.sleep(1e-5)
"""


def test_a_reader_never_sees_a_mixture_while_another_process_writes(tmp_path):
    """No pulse that is read has the step of one write and the collectives of another."""
    path = tmp_path / "p"
    writer = subprocess.Popen([sys.executable, "-c", HAMMER, str(path)])
    try:
        seen = set()
        deadline = time.monotonic() + 300
        while len(seen) < 2000 and time.monotonic() < deadline:
            found = pulse.read(path)
            if found is not None and found.step:
                assert found.collectives == found.step
                seen.add(found.step)
        assert len(seen) >= 2000
    finally:
        writer.kill()
        writer.wait()


def test_a_pulse_has_the_numbers_of_records_and_of_steps_that_were_not_finite(tmp_path):
    writer = pulse.PulseWriter(tmp_path / "p", rank=0)
    assert pulse.SIZE_BYTES == (tmp_path / "p").stat().st_size == 256
    found = written(tmp_path / "p")
    assert (found.records, found.nonfinite_steps) == (0, -1), "these steps are not counted yet"
    writer.nonfinite_steps = 2
    assert [writer.next_record_number(), writer.next_record_number()] == [1, 2]
    after = written(tmp_path / "p")
    assert (after.records, after.nonfinite_steps) == (2, 2)
    assert (after.beat, after.since) == (found.beat, found.since), "a record is no progress"


def test_a_place_for_a_pulse_is_told_from_a_pulse(tmp_path):
    pulse.mapped(tmp_path / "p", pulse.SIZE_BYTES).close()
    fd = os.open(tmp_path / "p", os.O_RDONLY)
    assert pulse.is_blank(fd)
    pulse.PulseWriter(tmp_path / "p", rank=0)
    assert not pulse.is_blank(fd)
    os.close(fd)
    assert not pulse.is_blank(fd)
