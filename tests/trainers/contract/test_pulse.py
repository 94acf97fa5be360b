"""The pulse is read whole or not at all, while it is being written."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from hypothesis import given
from hypothesis import strategies as st

from trainers.contract import pulse


def test_a_pulse_says_step_phase_and_since(tmp_path):
    writer = pulse.PulseWriter(tmp_path / "p", rank=3)
    before = time.monotonic()
    writer.set(41, "backward")
    found = pulse.read(tmp_path / "p")
    assert found is not None
    assert (found.rank, found.step, found.phase, found.device_phase) == (
        3,
        41,
        "backward",
        "backward",
    )
    assert before <= found.since <= time.monotonic()


def test_a_collective_counts_in_the_phase_that_goes_on(tmp_path):
    writer = pulse.PulseWriter(tmp_path / "p", rank=0)
    writer.set(10, "backward", device_step=9, device_phase="forward")
    before = pulse.read(tmp_path / "p")
    writer.count()
    after = pulse.read(tmp_path / "p")
    assert before is not None
    assert after is not None
    assert (after.collectives, after.since) == (before.collectives + 1, before.since)
    assert (after.step, after.phase, after.device_step, after.device_phase) == (
        10, "backward", 9, "forward",
    )  # fmt: skip
    assert after.beat >= before.beat


def test_device_progress_stands_apart_from_the_host(tmp_path):
    writer = pulse.PulseWriter(tmp_path / "p", rank=0)
    writer.set(10, "optimizer", device_step=9, device_phase="forward")
    found = pulse.read(tmp_path / "p")
    assert found is not None
    assert (found.step, found.device_step, found.device_phase) == (10, 9, "forward")


@given(st.binary(min_size=0, max_size=600))
def test_any_bytes_are_no_pulse_or_a_valid_one(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("p") / "p"
    path.write_bytes(data)
    found = pulse.read(path)
    assert found is None or found.phase in pulse.PHASES


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
    """Step and collective count are written together; they must be read together."""
    path = tmp_path / "p"
    writer = subprocess.Popen([sys.executable, "-c", HAMMER, str(path)])
    try:
        seen = set()
        deadline = time.monotonic() + 20
        while len(seen) < 2000 and time.monotonic() < deadline:
            found = pulse.read(path)
            if found is not None and found.step:
                assert found.collectives == found.step
                seen.add(found.step)
        assert len(seen) >= 2000
    finally:
        writer.kill()
        writer.wait()


def test_a_pulse_says_how_many_records_there_are_and_how_many_steps_were_not_finite(tmp_path):
    writer = pulse.PulseWriter(tmp_path / "p", rank=0)
    assert pulse.SIZE_BYTES == (tmp_path / "p").stat().st_size == 256
    found = pulse.read(tmp_path / "p")
    assert found is not None
    assert (found.records, found.nonfinite_steps) == (0, -1), "nobody counts yet"
    writer.nonfinite_steps = 2
    assert [writer.number(), writer.number()] == [1, 2]
    after = pulse.read(tmp_path / "p")
    assert after is not None
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
