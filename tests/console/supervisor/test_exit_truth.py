"""The reason of an end: the rank that failed first, and its error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from console.sources import liveness, process, procfs
from console.supervisor.live_directory import LastPulses, Live
from tests import broken
from tests.launches import PROGRAMS, STUB, phase
from trainers.contract import rundir
from trainers.contract.pulse import PulseWriter

GRACE_S = 5.0


@pytest.fixture
def ending(begin):
    """Starts two ranks of `ends.py` in a mode."""
    return lambda mode, shell=STUB: begin(phase("one", "ends.py", mode), shell=shell)


def line_of(text: str) -> int:
    lines = (PROGRAMS / "ends.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def last_end(started):
    """Waits for the end; returns the state, the reason and the record of the attempt's end."""
    ended = started.wait_end()["phases"][0]
    return ended["state"], ended["why"], started.state()["ended"][-1]


def test_a_native_crash_names_the_signal_and_the_frame_that_python_was_in(ending):
    state, why, end = last_end(ending("native"))
    assert state == "crashed"
    place = f"forward (ends.py:{line_of('ctypes.string_at(0)')})"
    assert why.startswith("rank 1 crashed in native code (SIGSEGV) at step ")
    assert f", in {place}" in why
    assert (end["signature"], end["hopeless"]) == (f"signal:SIGSEGV::{place}", False)


@pytest.mark.slow
def test_a_rank_that_leaves_a_real_group_is_named_and_not_the_one_that_lost_it(ending):
    started = ending("early", {})
    state, why, end = last_end(started)
    assert state == "crashed"
    assert why.startswith(
        "rank 0 exited first (code 0) at step 5, while the others continued; "
        "rank 1 ended because of it"
    )
    assert end["signature"] == "exit:0:left early"


def test_an_exception_is_named_with_its_line_and_has_a_signature_without_its_step(ending):
    line = line_of("raise ValueError")
    state, why, end = last_end(ending("raise"))
    assert state == "crashed"
    said = f"rank 1: ValueError: the batch of step 3 is broken (ends.py:{line}) at step 3 in fetch"
    assert why.startswith(said)
    assert end["signature"] == f"exit:1:ValueError: the batch of step # is broken:ends.py:{line}"


def test_an_exit_code_of_a_foreign_program_is_not_one_of_our_trainers(begin, tmp_path):
    script = tmp_path / "left.py"
    script.write_text("import sys\nsys.exit(14)\n")
    state, why, end = last_end(begin({"name": "one", "script": str(script)}, nproc=1, shell=STUB))
    assert (state, end["hopeless"]) == ("crashed", False)
    assert why == "rank 0: no reason recorded, see the log of rank 0 (code 14)"


def test_a_rank_that_died_while_torchrun_is_stopped_is_dead_and_not_alive(ending):
    started = ending("wait")
    started.wait_steps(2)
    started.wait(lambda: "progress" in str(started.heartbeats(rank=1)))  # rank 1 may be slower
    torchrun, pid = started.state()["torchrun"]["pid"], started.pids()[1]
    os.kill(torchrun, signal.SIGSTOP)
    started.wait(lambda: process.state(torchrun) == "T")
    os.kill(pid, signal.SIGKILL)

    def rank() -> dict:
        return started.state()["workers"][1]

    unreaped = "killed (SIGKILL), unreaped"
    started.wait(lambda: rank()["exit"] and liveness.exit_words(rank(), {}) == unreaped)
    assert process.state(pid) == "Z"
    assert not rundir.is_alive(rundir.identity() | {key: rank()[key] for key in
                                                    ("pid", "start_ticks")})  # fmt: skip
    started.wait(lambda: "Z" in [row["state"] for row in started.samples()[-1]["ranks"]])
    os.kill(torchrun, signal.SIGCONT)
    assert last_end(started)[1].startswith("rank 1 was killed by SIGKILL at step ")
    assert liveness.exit_words(rank(), {}) == "killed (SIGKILL)"


@pytest.mark.parametrize("handler", ["child", "owner"])
def test_a_stop_reaches_the_ranks_while_torchrun_is_stopped(begin, tmp_path, handler):
    """torchrun passes TERM on only after SIGCONT, and the ranks must have time to save."""
    shell = broken.shell(tmp_path, "launch.Launch.tick", "pass", "owners.SILENT_S = 600.0")
    started = begin(phase("one", "member.py", 100_000), shell=shell, watch={"grace_s": GRACE_S})
    started.wait_steps(3)
    torchrun, child = started.state()["torchrun"]["pid"], started.child()
    for pid in (torchrun, child)[: 1 + (handler == "owner")]:
        os.kill(pid, signal.SIGSTOP)
        started.wait(lambda pid=pid: process.state(pid) == "T")
    os.kill(started.owner["pid"], signal.SIGTERM)
    started.wait_gone()
    os.kill(child, signal.SIGCONT)
    assert last_end(started)[0] == "stopped"
    for rank in (0, 1):
        assert "SIGTERM" in str(started.heartbeats(rank=rank)[-1])


def test_the_nearest_cgroup_that_counts_tells_a_kill_for_memory(tmp_path, monkeypatch):
    own = Path("/proc/self/cgroup").read_text().split("0::", 1)[1].split()[0]
    inner, mounts, host = tmp_path / own.strip("/"), tmp_path / "mounts", tmp_path / "vmstat"
    mounts.write_text(f"proc /proc proc rw 0 0\ncgroup2 {tmp_path} cgroup2 rw 0 0\n")
    host.write_text("oom_kill 5\n")
    monkeypatch.setattr(procfs, "MOUNTS", str(mounts))
    monkeypatch.setattr(procfs, "VMSTAT", str(host))
    inner.mkdir(parents=True, exist_ok=True)
    alone = procfs.oom_counts()
    assert (alone.cgroup, alone.host, alone.path) == (None, 5, "")
    counts = tmp_path / "memory.events"
    counts.write_text("low 0\noom 0\noom_kill 0\n")
    before = procfs.oom_counts()
    assert before.path == str(counts)
    host.write_text("oom_kill 6\n")
    assert (procfs.oom_since(before).here, procfs.oom_since(alone).perhaps) == (False, True)
    counts.write_text("low 0\noom 1\noom_kill 1\n")
    found = procfs.oom_since(before)
    assert (found.here, found.words()) == (True, "cgroup oom_kill 0 → 1")


def test_a_torchrun_that_rejects_its_command_line_is_quoted(begin, tmp_path):
    module = tmp_path / "torch" / "distributed" / "run.py"
    module.parent.mkdir(parents=True)
    for folder in module.parents[:2]:
        (folder / "__init__.py").touch()
    module.write_text("import argparse\nargparse.ArgumentParser('torchrun').parse_args()\n")
    started = begin(phase("one", "member.py", 5), shell={"PYTHONPATH": str(tmp_path)})
    started.wait_end()
    assert started.state()["state"] == "crashed"
    why = started.state()["why"]
    assert why.startswith("torchrun started no rank: torchrun: error: unrecognized arguments")


def test_torchrun_before_torch_2_12_gets_no_shutdown_timeout(tmp_path):
    """With torch 2.11, torchrun rejects the option, so no launch could start."""
    program = (
        "from pathlib import Path\nfrom console.supervisor.launch_spec import argv\n"
        "from console.plan import Phase\n"
        "print(argv(Phase(name='one', module='trainers.ddp'), 5.0, Path('logs')))"
    )
    for version, expected in (("2.11.0", False), ("2.12.0a0+git1", True), ("3.0", True)):
        folder = tmp_path / version / f"torch-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True,
            cwd=PROGRAMS.parents[1], env=os.environ | {"PYTHONPATH": str(folder.parent)},
        )  # fmt: skip
        assert ("--shutdown-timeout" in done.stdout) is expected, version


def test_the_last_pulse_of_a_rank_shows_the_phase_in_which_it_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(rundir, "SHARED_MEMORY", tmp_path)
    live = Live("0123456789abcdef", 3, 1, tmp_path)
    pulses = LastPulses(live, lambda rank, pulse: None)
    for rank, phase_ in enumerate(("backward", "step", "exit")):
        PulseWriter(rundir.pulse(live.path, rank), rank).set(6, phase_)
        assert pulses.step(rank, os.getpid()) == 6
    assert [pulses.phase(rank, 6) for rank in range(3)] == ["backward", "", ""]
    assert pulses.phase(0, 7) == ""  # the records of the rank are of a later step
    assert LastPulses(live, lambda rank, pulse: None).phase(0, 6) == ""
    live.remove()
