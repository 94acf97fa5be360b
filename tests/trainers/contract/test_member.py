"""A rank in a run: dumps, the common step of a halt, phases, exit record, copies of the pulse."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.launches import wait_for
from tests.mounts import tmpfs
from tests.trainers.contract.programs import beats, environment
from trainers.contract import dumps, environ, heartbeat, pulse, rundir
from trainers.contract.member import Member
from trainers.contract.recorder import Recorder

PROGRAM = """
import ctypes, os, sys, threading, time
from pathlib import Path
from trainers.contract.member import join
run, here, mode = join(), Path(os.environ["NSA_CONSOLE_RUN_DIR"]), sys.argv[1]
def busy():
    while True:
        sum(range(2000))
threading.Thread(target=busy, name="prefetch", daemon=True).start()
def held():
    (here / "there").touch()
    native, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    native.pthread_mutex_lock(mutex)
    native.pthread_mutex_lock(mutex)  # waits forever and holds the GIL
for step in range(1, 100000):
    if run.step(step, loss=1.0 / step):
        break
    if mode == "block":
        (here / "there").touch()
        lock = threading.Lock(); lock.acquire(); lock.acquire(timeout=600)
    if step == 3 and mode == "gil":
        records = here / "heartbeat_rank0.jsonl"
        while not records.exists() or "progress" not in records.read_text():
            time.sleep(0.01)
        held()
    if step == 3 and mode == "leave":
        run.close(step)
        (here / "there").touch()
        time.sleep(600)
    time.sleep(0.01)
"""


@pytest.fixture
def start(tmp_path):
    """Yields a function that starts `PROGRAM` in a mode; kills the programs after the test."""
    started = []

    def start(mode: str, live: Path | None = None, variables: dict[str, str] | None = None, **more):
        words, variables = [sys.executable, "-c", PROGRAM, mode], variables or {}
        started.append(
            subprocess.Popen(words, env=variables or environment(tmp_path, live), **more)
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def runs_python(pid: int) -> bool:
    """Returns whether a thread runs; with the GIL held forever, no thread runs."""
    stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return any(text.rpartition(")")[2].split()[0] != "S" for text in stats)


def wait_for_progress(run: Path) -> None:
    wait_for(lambda: any(b["msg"] == "progress" for b in beats(run)))


@pytest.fixture
def live(tmp_path_factory):
    path = tmp_path_factory.mktemp("live")
    yield path
    shutil.rmtree(path, ignore_errors=True)


def test_a_blocked_main_thread_is_dumped_with_the_other_threads(tmp_path, live, start):
    process = start("block", live)
    wait_for((tmp_path / "there").exists)
    process.send_signal(signal.SIGUSR1)
    stack, kept = rundir.live_stack(live, 0), rundir.stackdump(tmp_path, 0)
    wait_for(lambda: stack.exists() and dumps.END_MARK in stack.read_text())
    main, _, others = stack.read_text().partition("Thread ")
    assert "Stack (most recent call first)" in main
    assert "in <module>" in main
    assert "prefetch (most recent call first)" in others
    assert wait_for(lambda: kept.exists() and dumps.END_MARK in kept.read_text())
    assert process.poll() is None


def test_a_dump_that_cannot_be_written_names_its_reason_in_the_log_and_the_next_succeeds(
    tmp_path, start
):
    with tmpfs(tmp_path, 1) as live:
        process, stack = start("block", live), rundir.live_stack(live, 0)
        log = rundir.rank_log(tmp_path, 1, 0)
        wait_for((tmp_path / "there").exists)
        rest = shutil.disk_usage(live).free
        (live / "filler").write_bytes(bytes(rest))
        process.send_signal(signal.SIGUSR1)
        assert wait_for(lambda: f"No space left on device: {stack}\n" in log.read_text())
        (live / "filler").unlink()
        process.send_signal(signal.SIGUSR1)
        assert wait_for(lambda: f"{dumps.END_MARK} 2 of rank 0" in stack.read_text())
        assert process.poll() is None
        process.kill()
        process.wait()


@pytest.mark.parametrize("mode", ["gil", "leave"])
def test_the_last_resort_needs_no_gil_and_never_ends_a_rank(tmp_path, live, start, mode):
    process, stack = start(mode, live), rundir.live_stack(live, 0)
    wait_for_progress(tmp_path)
    wait_for((tmp_path / "there").exists)
    if mode == "gil":
        wait_for(lambda: not any(runs_python(process.pid) for _ in range(3)))
    process.send_signal(signal.SIGUSR1)
    time.sleep(0.3)  # a dump must not appear in this time
    assert not stack.read_text()
    process.send_signal(dumps.LAST_RESORT)
    if mode == "gil":
        wait_for(lambda: "in held" in stack.read_text())
    time.sleep(0.2)
    assert process.poll() is None
    assert dumps.END_MARK not in stack.read_text()


def test_sigusr1_before_the_handler_is_there_is_harmless_when_it_was_ignored(tmp_path, start):
    """The supervisor ignores SIGUSR1, and the ranks inherit this."""
    process = start("run", preexec_fn=lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN))
    for _ in range(100):
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.005)
    wait_for_progress(tmp_path)
    assert process.poll() is None


@pytest.mark.parametrize("how", [rundir.HALT, "SIGTERM"])
def test_a_halt_ends_the_program_with_its_reason(tmp_path, live, start, how):
    process = start("run", live)
    wait_for_progress(tmp_path)
    if how == rundir.HALT:
        (tmp_path / rundir.HALT).touch()
    else:
        process.send_signal(signal.SIGTERM)
    assert process.wait(150) == 0
    records = beats(tmp_path)
    halt = next(b for b in records if b["msg"] == "halt")
    assert halt["reason"] == how
    assert (records[-1]["msg"], records[-1]["step"]) == ("exit", halt["step"])


def test_without_shared_memory_the_pulse_is_in_the_run_directory_and_logs_are_closed_to_others(
    tmp_path, start
):
    umask = os.umask(0o022)
    try:
        process = start("run")
        found = wait_for(lambda: pulse.read(rundir.pulse(tmp_path, 0)))
    finally:
        os.umask(umask)
    assert found.pid == process.pid
    wait_for(lambda: (pulse.read(rundir.pulse(tmp_path, 0)) or found).step > found.step)
    log = rundir.rank_log(tmp_path, 1, 0)
    modes = [path.stat().st_mode & 0o777 for path in (log, log.parent, log.parent.parent)]
    assert modes == [0o600, 0o700, 0o700]


def test_an_old_halt_file_stops_nothing_when_no_supervisor_has_cleared_it(tmp_path, start):
    (tmp_path / rundir.HALT).touch()
    variables = environment(tmp_path)
    del variables[environ.RUN_ID]
    process = start("run", variables=variables)
    wait_for(lambda: any(b["step"] >= 10 for b in beats(tmp_path)))
    assert process.poll() is None
    (tmp_path / rundir.HALT).unlink()
    (tmp_path / rundir.HALT).write_text("now")
    assert process.wait(150) == 0


COUNTS = """
from trainers.contract.member import join
class Counter:
    value = 1
    def __index__(self):
        return self.value
    def __float__(self):
        return float(self.value)
run, counter = join(), Counter()
run.step(counter)
counter.value = 2
run.step(counter)
run.end_step()
run.step(3.0)
"""


def test_a_step_may_be_any_whole_number_also_one_that_changes_in_place_but_no_float(tmp_path):
    """The integers of numpy and torch are such objects."""
    subprocess.run(
        [sys.executable, "-c", COUNTS], env=environment(tmp_path), timeout=150, check=False
    )
    records = beats(tmp_path)
    assert [each["step"] for each in records if each["msg"] == "progress"] == [1, 2]
    assert all(heartbeat.accept(each) for each in records)
    last = records[-1]
    assert (last["msg"], last["step"]) == ("exit", 2)
    assert last["reason"] == "TypeError: 'float' object cannot be interpreted as an integer"


MOVES = """
import os, time
from trainers.contract.member import join
run = join()
os.chdir("elsewhere")
for step in range(1, 1000):
    if run.step(step):
        break
    if step == 2:
        open("../here/.HALT", "w")
    time.sleep(0.02)
"""


def test_a_program_that_changes_its_directory_stays_in_a_run_with_a_relative_path(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    variables = environment(tmp_path) | {environ.RUN_DIR: "here"}
    words = [sys.executable, "-c", MOVES]
    subprocess.run(words, env=variables, cwd=tmp_path, timeout=150, check=True)
    assert beats(tmp_path / "here")[-1]["reason"] == rundir.HALT


FORKS = """
import os
from trainers.contract.member import join
run = join()
for step in (1, 2, 3):
    run.step(step)
child = os.fork()
if child == 0:
    os._exit(any(run.step(step) for step in range(4, 10)))
assert os.waitpid(child, 0)[1] == 0
with open("seen", "w") as file:
    print(*run._board._numbers, file=file)
"""


def test_a_forked_child_changes_no_number_of_the_halt_board(tmp_path):
    words = [sys.executable, "-c", FORKS]
    subprocess.run(words, env=environment(tmp_path), cwd=tmp_path, timeout=150, check=True)
    assert (tmp_path / "seen").read_text().split() == ["0", "0", "3"]


IN_THREAD = """
import threading
from trainers.contract.member import join
thread = threading.Thread(target=join)
thread.start()
thread.join()
run = join()
run.step(1)
run.end_step()
"""


def test_after_a_join_that_failed_in_a_thread_the_main_thread_can_join(tmp_path):
    words = [sys.executable, "-c", IN_THREAD]
    subprocess.run(words, env=environment(tmp_path), timeout=150, check=True)
    assert [each["step"] for each in beats(tmp_path) if each["msg"] == "progress"] == [1]


def test_a_directory_that_hangs_gets_one_copy_of_the_pulse_at_a_time(tmp_path, monkeypatch):
    """Without a directory in memory, the pulse is copied several times a second."""
    polls, hang = threading.Semaphore(0), threading.Event()
    monkeypatch.setattr("trainers.contract.member.PULSE_MIRROR_S", 0.0)
    monkeypatch.setattr(rundir, "stamp", lambda _path: polls.release())
    one = Member(tmp_path, {})
    one.recorder.call(lambda: hang.wait(60) and None)
    one._watcher.start()
    assert all(polls.acquire(timeout=60) for _ in range(30))
    assert one.recorder.waiting <= 1
    hang.set()
    assert one.close(0)
    assert pulse.read(rundir.pulse(tmp_path, 0)) is not None


def test_a_pulse_is_copied_although_records_always_wait(tmp_path, monkeypatch):
    """Without the copy, a rank with a slow disk would look stalled."""
    polls = threading.Semaphore(0)
    monkeypatch.setattr("trainers.contract.member.PULSE_MIRROR_S", 0.0)
    monkeypatch.setattr(Recorder, "waiting", 1)
    monkeypatch.setattr(rundir, "stamp", lambda _path: polls.release())
    one = Member(tmp_path, {})
    one._watcher.start()
    assert all(polls.acquire(timeout=60) for _ in range(30))
    one._stop.set()
    one._watcher.join()
    assert one.recorder.close()
    assert pulse.read(rundir.pulse(tmp_path, 0)) is not None
