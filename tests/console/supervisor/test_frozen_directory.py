"""Runs whose directory is on a file system that stops answering."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from console.sources import process
from console.sources.tail import Tail
from tests.fakes import errors
from tests.faults.sweep import LONG, Case, Course, orders
from tests.faults.test_places import WITHOUT_MEMORY
from tests.launches import HANG_GUARD_S, STUB, Started, phase
from tests.mounts import ext4
from trainers.contract import heartbeat, pulse, rundir

FROZEN_S = 8.0


@pytest.fixture(scope="module")
def mounted(tmp_path_factory):
    """A small ext4 on a loop device."""
    with ext4(tmp_path_factory.mktemp("frozen"), 3 << 10) as mount:
        yield mount


def test_a_frozen_directory_blocks_only_its_writer_and_loses_nothing(begin, mounted):
    watch = {"stall_floor_s": HANG_GUARD_S, "grace_s": 3}
    started = begin(
        phase("one", "member.py", 100_000), root=mounted / "artifacts", watch=watch, shell=STUB
    )
    started.wait_steps(5)
    live = Path(started.state()["live_dir"])
    step = pulse.read(rundir.pulse(live, 0)).step
    subprocess.run(["fsfreeze", "-f", str(mounted)], check=True)
    frozen, ticks = time.monotonic(), set()

    def status() -> dict[str, Any]:
        return rundir.read_json(live / rundir.LIVE_STATUS)

    def works_on() -> bool:
        now = status()
        ticks.add(now["mono"])
        moved = pulse.read(rundir.pulse(live, 0)).step - step
        return (
            now["mono"] > frozen + FROZEN_S and now["blocked_s"] > FROZEN_S - 3
            and now["waiting"] > 0 and moved > 100 and len(ticks) > FROZEN_S
        )  # fmt: skip

    try:
        started.wait(works_on)
    finally:
        thawed = time.monotonic()
        subprocess.run(["fsfreeze", "-u", str(mounted)], check=True)
    started.wait(lambda: status()["blocked_s"] < 1)
    assert started.ask("halt")["ok"]
    started.wait_end()
    assert started.state()["state"] == "halted"
    reader = Tail(rundir.heartbeat(started.run(), 0), heartbeat.accept)
    steps = [r["step"] for r in reader.poll() if r["msg"] == "progress"]
    assert steps == list(range(1, len(steps) + 1))
    sampled = [sample for sample in started.samples() if frozen < sample["mono"] < thawed]
    assert len(sampled) > FROZEN_S / 2, "samples of the frozen time were kept and written later"
    assert not any(event["kind"] == "alert" for event in started.events(0))


@pytest.mark.slow
@pytest.mark.parametrize("memory", [True, False])
def test_term_in_a_frozen_directory_ends_what_can_end_and_the_rest_after_the_thaw(
    begin, mounted, tmp_path, memory
):
    """A process with a thread that waits for the disk stays; all others end in time."""
    (tmp_path / "sitecustomize.py").write_text("" if memory else WITHOUT_MEMORY)
    started = begin(
        phase("one", "member.py", 100_000), root=mounted / f"artifacts-{memory}",
        watch={"grace_s": 2}, shell={"PYTHONPATH": f"{tmp_path}:{STUB['PYTHONPATH']}"},
    )  # fmt: skip
    started.wait_steps(5)
    owner, token = started.plan_state["supervisor"], started.token()
    subprocess.run(["fsfreeze", "-f", str(mounted)], check=True)
    try:
        time.sleep(2)
        os.kill(owner["pid"], signal.SIGTERM)
        time.sleep(4.2)
        left = process.with_token(token)
        states = {pid: {process.state(int(t)) for t in os.listdir(f"/proc/{pid}/task")}
                  for pid in left}  # fmt: skip
        told = rundir.read_json(Path(live_of(token)) / rundir.LIVE_STATUS) if memory else None
    finally:
        subprocess.run(["fsfreeze", "-u", str(mounted)], check=True)
    assert all("D" in threads for threads in states.values()), states
    for pid in left if told else ():
        assert f"{pid} (" in told["alerts"][0]["text"], told
    started.wait(lambda: not process.with_token(token))
    assert started.wait_end()["phases"][0]["state"] == "stopped"
    started.wait(lambda: not rundir.is_alive(owner))


def test_a_process_that_replaces_another_works_while_the_directory_does_not_answer(tmp_path):
    """In this test reads wait too, as on a file server that has failed."""
    course = Course("halted", "family", LONG, frozenset({"stopped"}))
    library, control = errors.build(tmp_path), tmp_path / "case" / "control"
    case = Case(course, orders(course, tmp_path), None, tmp_path / "case", library)
    started = Started(tmp_path / "case" / "launch")
    supervisor = case.start()
    started.wait_steps(5)
    live, child = Path(live_of(started.token())), started.child()
    try:
        errors.write(control, errors.Failure("", "", errors.HANGS), armed=True)
        os.kill(child, signal.SIGKILL)
        killed = time.monotonic()

        def is_blocked() -> bool:
            status = rundir.read_json(live / rundir.LIVE_STATUS) or {}
            return status.get("mono", 0) > killed + 4 and status["blocked_s"] > 2

        started.wait(is_blocked)
        os.kill(supervisor.pid, signal.SIGTERM)
        started.wait(lambda: not process.with_token(started.token()))
    finally:
        errors.write(control, None)
        with contextlib.suppress(subprocess.TimeoutExpired):
            supervisor.wait(HANG_GUARD_S)
        left = list(case.left_behind(supervisor))
        shutil.rmtree(live, ignore_errors=True)
    assert (left, started.plan_state["phases"][0]["state"]) == ([], "stopped")


def live_of(token: str) -> str:
    return f"/dev/shm/nsa-console-{os.geteuid()}-{token}"
