"""Launches that lack threads, processes, descriptors, shared memory or a working directory."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from console import actions
from console.plans import gates
from console.sources.summary import Summary
from console.supervisor import launcher
from console.supervisor.live_directory import LastPulses, Live, sweep
from tests.faults.scene import ROOT
from tests.launches import HANG_GUARD_S, STUB, Started, phase
from tests.mounts import tmpfs
from trainers.contract import environ, jsonl, pulse, rundir
from trainers.contract.errors import ContractError
from trainers.contract.member import Member


def limited(limits: str, *words: object) -> subprocess.CompletedProcess[str]:
    """Runs `nsa-console` in a shell with other limits, under the small torchrun."""
    return subprocess.run(
        ["sh", "-ec", f'{limits}; exec "$@"', "sh", sys.executable, "-m", "console",
         *map(str, words)],
        env={**os.environ, **STUB, "PYTHONPATH": f"{STUB['PYTHONPATH']}:{ROOT}"}, cwd=ROOT,
        capture_output=True, text=True, timeout=HANG_GUARD_S,
    )  # fmt: skip


@pytest.fixture
def plan(begin):
    return begin.options(phase("one", "member.py", 100_000)).plan


def files_of(pid: int) -> tuple[int, int]:
    """Returns the soft and the hard limit of open files of a process."""
    found = re.search(r"Max open files +(\d+) +(\d+)", Path(f"/proc/{pid}/limits").read_text())
    return int(found[1]), int(found[2])


def test_the_supervisor_may_open_all_that_is_allowed_and_the_ranks_what_was_given(
    begin, plan, tmp_path
):
    done = limited("ulimit -Sn 200; ulimit -Hn 3000", "launch", plan, "--run-dir", tmp_path / "x")
    assert done.returncode == 0, done.stderr
    started = begin.adopt(tmp_path / "x")
    started.wait_steps(1)
    assert files_of(started.child()) == (3000, 3000)
    owner = started.plan_state["supervisor"]["pid"]
    for pid in (owner, started.state()["torchrun"]["pid"], *started.pids().values()):
        assert files_of(pid) == (200, 3000)


def test_a_working_directory_that_is_gone_is_named(plan, tmp_path):
    removed = f"mkdir {tmp_path}/gone; cd {tmp_path}/gone; rmdir {tmp_path}/gone"
    for where in ((), ("--run-dir", tmp_path / "x")):
        done = limited(removed, "launch", plan, *where)
        assert done.returncode == 4, done.stdout + done.stderr
        assert "the working directory does not exist" in done.stderr
    assert not (tmp_path / "x").exists()


def test_a_launcher_without_a_thread_to_spare_has_launched(begin, monkeypatch):
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    options = begin.options(phase("one", "member.py", 3))
    monkeypatch.setenv("PYTHONPATH", STUB["PYTHONPATH"])
    with monkeypatch.context() as patch:
        patch.setattr(launcher.threading.Thread, "start", refuse)
        started = begin.adopt(actions.launch(options, "tester"))
    started.wait_end()


def test_a_supervisor_that_cannot_be_started_is_not_a_directory_that_cannot_be_written(
    begin, monkeypatch, tmp_path
):
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    options = begin.options(phase("one", "member.py", 3))
    prepared = actions.prepare(options)
    monkeypatch.setattr(launcher.subprocess, "Popen", refuse)
    with pytest.raises(
        ContractError, match=r"cannot start the supervisor: Resource temporarily unavailable"
    ):
        launcher.start(tmp_path / "x", prepared.spec)
    assert not (tmp_path / "x").exists()


FILL = """
mount -t tmpfs -o size=8k,nr_inodes=20 tmpfs /dev/shm && head -c 8192 /dev/zero >/dev/shm/full \
&& exec "$@"
"""


def test_a_run_on_full_shared_memory_says_so_and_completes(begin, tmp_path):
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare, to fill a /dev/shm of its own")
    bounds = {"steps_done": 20, "no_stall": True}
    plan = begin.options(phase("one", "member.py", 20, gates=bounds)).plan
    words = ["launch", plan, "--run-dir", str(tmp_path / "run"), "--wait"]
    done = subprocess.run(
        ["unshare", "-m", "sh", "-ec", FILL, "sh", sys.executable, "-m", "console", *words],
        cwd=ROOT, env={**os.environ, **STUB}, capture_output=True, text=True,
        timeout=HANG_GUARD_S,
    )  # fmt: skip
    started = Started(tmp_path / "run")
    assert done.returncode == 0, done.stdout + done.stderr
    notes = [event["text"] for event in started.events(0) if event["kind"] == "note"]
    assert len(notes) == 1
    assert notes[0].startswith("cannot write to /dev/shm (No space left on device)")
    assert rundir.heartbeat(started.run(), 0).read_bytes().count(b"progress") == 20
    assert rundir.read_json(started.run() / rundir.GATES)["result"] == "pass"


@pytest.fixture(params=["missing", "removed"])
def without_memory(request, tmp_path, monkeypatch):
    """A run, its `Live` and a rank: memory is missing, or is removed before the rank starts."""
    run, memory = tmp_path / "0-one", tmp_path / "memory"
    run.mkdir()
    monkeypatch.setattr(rundir, "SHARED_MEMORY", memory)
    if request.param == "removed":
        memory.mkdir()
    live = Live("0123456789abcdef", 1, 1, run)
    folder = live.path or memory
    shutil.rmtree(folder, ignore_errors=True)
    rank = Member(run, {environ.LIVE_DIR: str(folder)})
    rank.pulse.nonfinite_steps = 0
    rank.record("boot", 0)
    yield run, live, rank
    live.remove()


def gates_of(run: Path, live: Live, **bounds: object) -> dict[str, str]:
    """Returns the result of each gate of a run with one rank, which has ended."""
    summary = Summary(1, 1, 0)
    for line in rundir.heartbeat(run, 0).read_bytes().splitlines():
        summary.add(jsonl.decode(line))
    pulses = LastPulses(live, partial(summary.take_end, 1))
    pulses.read_all({0: os.getpid()}, 1)
    return {gate.name: gate.result for gate in gates.evaluate(summary, bounds)}


def test_gates_of_a_run_without_shared_memory_pass(without_memory):
    run, live, rank = without_memory
    rank.record("progress", 2, loss=1.0)
    rank.close(3, reason="done", exit_code=0)  # step 3 has no progress record
    assert pulse.read(rundir.pulse(run, 0)).records == 3
    found = gates_of(run, live, steps_done=3, no_stall=True, loss_finite=True)
    assert set(found.values()) == {"pass"}


def test_a_copy_of_a_pulse_does_not_show_that_a_killed_rank_has_no_later_record(without_memory):
    run, live, rank = without_memory
    rank.record("progress", 3, loss=1.0)
    rank.pulse.set(3, "forward")
    rank.recorder.call(rank._mirror_pulse)
    rank.recorder.close()
    assert (live.pulse(0).step, live.is_blank(0), live.is_copy(0)) == (3, False, True)
    found = gates_of(run, live, steps_done=3, no_stall=True, loss_finite=True)
    assert set(found.values()) == {"unknown"}


@pytest.mark.parametrize("is_late", [True, False])
def test_the_alert_on_removed_memory_says_when_no_rule_acts(tmp_path, monkeypatch, is_late):
    """A rank that opened its file before goes on to use it, so the rules still see a stall."""
    monkeypatch.setattr(rundir, "SHARED_MEMORY", tmp_path)
    live, said = Live("0123456789abcdef", 1, 1, tmp_path), []
    if not is_late:
        pulse.PulseWriter(rundir.pulse(live.path, 0), 0).set(1, "step")
    shutil.rmtree(live.path)
    live.watch(SimpleNamespace(raise_=lambda _name, text, _level: said.append(text)))
    assert ("no watch rule halts" in said[0]) is is_late
    next_process, cleared = Live("0123456789abcdef", 1, 1, tmp_path, adopt=True), []
    next_process.watch(SimpleNamespace(clear=lambda *words: cleared.append(words)))
    assert (next_process.path, cleared) == (None, []), "the memory is still missing"
    live.remove()


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """A small file system in place of /dev/shm."""
    with tmpfs(tmp_path, 1) as mount:
        monkeypatch.setattr(rundir, "SHARED_MEMORY", mount)
        yield mount


def fill(memory) -> None:
    room = os.statvfs(memory)
    (memory / "full").write_bytes(bytes(room.f_bavail * room.f_bsize))


def limit_files(memory, count: int) -> None:
    subprocess.run(["mount", "-o", f"remount,nr_inodes={count}", str(memory)], check=True)


def test_ranks_have_a_live_directory_only_with_room_for_all_of_them(memory):
    limit_files(memory, 7)
    # Too few inodes for three pulses, three stacks, the halt board and the directory.
    live = Live("0123456789abcdef", 3, 1, memory)
    assert (live.path, live.why) == (None, "No space left on device")
    assert os.listdir(memory) == []
    limit_files(memory, 20)
    live.renew(2)
    assert live.path is not None
    assert live.why == ""
    live.remove()
    live = Live("0123456789abcdef", 2, 1, memory)
    assert live.path is not None
    assert live.path.is_dir()
    fill(memory)
    pulse.PulseWriter(rundir.pulse(live.path, 1), 1).set(3, "forward")
    assert pulse.read(rundir.pulse(live.path, 1)).step == 3
    (memory / "full").unlink()
    live.renew(2)
    assert live.path is not None
    assert pulse.read(rundir.pulse(live.path, 1)) is None
    assert rundir.halt_board(live.path, 2).exists()
    live.remove()
    fill(memory)
    live.renew(3)
    assert live.path is None
    assert os.listdir(memory) == ["full"]


def test_a_live_directory_that_was_killed_half_made_is_replaced_or_removed(memory):
    for token in ("0123456789abcdef", "fedcba9876543210"):
        half = memory / f".{rundir.LIVE_PREFIX}{os.geteuid()}-{token}"
        half.mkdir()
        (half / "pulse_rank0").touch()
    live = Live("0123456789abcdef", 1, 1, memory)
    assert (live.path is not None, live.why) == (True, "")
    sweep(after_s=0)
    assert os.listdir(memory) == [live.path.name]


def test_a_store_into_what_has_no_room_is_an_error_and_no_bus_error(memory):
    fill(memory)
    with pytest.raises(OSError, match="No space left"):
        pulse.PulseWriter(memory / "pulse", 0)
