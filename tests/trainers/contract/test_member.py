"""Joining a run: dumps, the common step of a halt, and records."""

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

from tests.mounts import tmpfs
from tests.trainers.runs import heartbeats
from trainers.contract import dumps, environ, pulse, rundir
from trainers.contract.member import HaltBoard, Member
from trainers.contract.recorder import Recorder

ROOT = Path(__file__).parents[3]
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
    native.pthread_mutex_lock(mutex)  # forever: no signal ends this wait
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


def environment(run: Path, live: Path | None = None) -> dict[str, str]:
    named = {
        environ.RUN_DIR: str(run), environ.RUN_ID: "test/0-x", environ.ATTEMPT: "1", "RANK": "0",
        "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    return named | ({environ.LIVE_DIR: str(live)} if live else {})


@pytest.fixture
def start(tmp_path):
    """Starts `PROGRAM` in a mode; kills it at the end of the test."""
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


def wait_for(condition, seconds: float = 150.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError("did not happen in time")


def beats(run: Path) -> list[dict]:
    return heartbeats(run, 0)


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
    """The ranks inherit from the supervisor that the signal is ignored."""
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


def test_ranks_that_meet_every_step_agree_on_the_step_to_halt_at(tmp_path):
    """Either rank leads in each step, and either rank requests the halt."""
    for wisher in (0, 1):
        for lead in (0, 1):
            directory = tmp_path / f"{wisher}{lead}"
            directory.mkdir()
            boards = [HaltBoard(directory, 1, 0), HaltBoard(directory, 1, 1)]
            stopped: dict[int, int] = {}
            for step in range(1, 8):
                for rank in (lead, 1 - lead):
                    if rank not in stopped and boards[rank].decide(
                        rank, step, rank == wisher and step >= 3
                    ):
                        stopped[rank] = step
            assert stopped[0] == stopped[1] <= 6


@pytest.mark.parametrize("noise", [b"\xff" * 24, b"\1" + bytes(23), bytes(8) + b"\3" + bytes(15)])
def test_noise_on_the_board_halts_nobody(tmp_path, noise):
    board = HaltBoard(tmp_path, 1, 0)
    with rundir.halt_board(tmp_path, 1).open("r+b") as stream:
        stream.write(noise)
    assert not any(board.decide(0, step, halt=False) for step in range(1, 9))
    assert not board.decide(0, 9, halt=True)
    assert board.decide(0, 10, halt=False)
    after = HaltBoard(tmp_path, 1, 0)
    assert not any(after.decide(0, step, halt=False) for step in range(1, 12)), "an old decision"


LOOP = """
import sys
from trainers.contract.member import join
class Tensor:
    def __float__(self): return 0.5
class Odd:
    pass
run = join()
for step in range(1, 4):
    run.step(step, loss=Tensor(), odd=Odd())
if "raise" in sys.argv:
    raise SystemError("in the last step")
if "end" in sys.argv:
    run.end_step(loss=0.25)
    run.end_step(loss=9.0)
"""


@pytest.mark.parametrize(
    ("words", "steps", "newest"),
    [((), [1, 2, 3], None), (("raise",), [1, 2], 0.5), (("end",), [1, 2, 3], 0.25)],
)
def test_the_last_step_counts_unless_it_failed_and_values_that_json_lacks_are_converted(
    tmp_path, words, steps, newest
):
    subprocess.run([sys.executable, "-c", LOOP, *words], env=environment(tmp_path), timeout=150)
    records = [b for b in beats(tmp_path) if b["msg"] == "progress"]
    assert [b["step"] for b in records] == steps
    assert (records[0]["loss"], records[-1].get("loss")) == (0.5, newest)
    assert "Odd object" in records[0]["odd"]
    assert beats(tmp_path)[-1]["msg"] == "exit"


def test_records_are_dropped_and_counted_when_nobody_writes(tmp_path, monkeypatch):
    """The queue of a recorder is bounded while its disk does not answer."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    recorder = Recorder()
    recorder.call(lambda: os.close(os.open(fifo, os.O_WRONLY)))  # blocks until it is read
    wait_for(lambda: recorder.waiting == 0)  # the call has left the queue
    kept = sum(recorder.put(tmp_path / "f", b"x\n") for _ in range(12_000))
    assert kept == 10_000
    assert recorder.dropped == 2_000
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    assert recorder.close(150)
    os.close(reader)
    assert (tmp_path / "f").read_bytes().count(b"\n") == 10_000


def test_a_call_that_raises_is_counted_and_the_records_after_it_are_written(tmp_path, capfd):
    recorder = Recorder()
    for _ in range(3):
        recorder.call(lambda: {}["missing"])
    recorder.put(tmp_path / "f", b"after\n")
    assert recorder.close(150)
    assert (tmp_path / "f").read_bytes() == b"after\n"
    assert (recorder.dropped, recorder.trouble) == (3, "KeyError: 'missing'")
    assert capfd.readouterr().err.count("KeyError: 'missing'") == 1


def test_records_go_on_in_the_file_that_is_there_when_somebody_replaced_it(tmp_path, capfd):
    recorder, path, aside = Recorder(), tmp_path / "f.jsonl", tmp_path / "aside"
    recorder.check_every_s = 0.0

    def write(word: bytes) -> None:
        done = threading.Event()
        recorder.put(path, b'"%s"\n' % word)
        recorder.call(done.set)
        assert done.wait(150)

    write(b"before")
    path.unlink()
    write(b"after a removal")
    assert path.read_text() == '"after a removal"\n'
    rundir.write_atomic(path, '"edited, no newline at the end"')
    write(b"after a replacement")
    assert path.read_text().split("\n")[1:] == ['"after a replacement"', ""]
    path.rename(aside)
    path.symlink_to("/etc/passwd")
    write(b"what was moved is still written to")
    assert "still written" in aside.read_text()
    aside.unlink()
    write(b"lost")
    assert recorder.dropped == 1
    path.unlink()
    write(b"last")
    assert recorder.close(150)
    assert path.read_text() == '"last"\n'
    assert capfd.readouterr().err.count("f.jsonl was removed or replaced") == 3


COUNTED = """
import sys
from trainers.contract.member import join
run = join()
losses = [1.0, float("nan"), 2.0, float("inf"), eval(sys.argv[1]), 1.0]
for step, loss in enumerate([0.0, *losses], start=1):
    run.step(step, **({} if loss is None else {"loss": loss}))
"""


@pytest.mark.parametrize(
    ("loss", "counts"),
    [("3.0", [0, 1, 1, 2, 2, 2, 2]), ("None", [0, 1, 1, 2, None, None, None])],
    ids=["each step", "a step without"],
)
def test_records_are_numbered_and_steps_that_are_not_finite_counted(tmp_path, live, loss, counts):
    """`run.step(step, loss=…)` gets the loss of the previous step; the last step has no loss."""
    words = [sys.executable, "-c", COUNTED, loss]
    subprocess.run(words, env=environment(tmp_path, live), timeout=150, check=True)
    records = beats(tmp_path)
    assert [record["n"] for record in records] == list(range(1, len(records) + 1))
    progress = [r.get("nonfinite_loss_steps") for r in records if r["msg"] == "progress"]
    assert progress == counts
    assert records[-1]["msg"] == "exit"
    assert records[-1].get("nonfinite_loss_steps") == counts[-1]
    left = pulse.read(rundir.pulse(live, 0))
    assert left is not None
    assert (left.records, left.nonfinite_steps) == (len(records), counts[-1] or -1)


def test_a_figure_with_the_name_of_a_field_or_an_odd_value_ends_no_rank(tmp_path):
    program = """
from trainers.contract.member import join
fields = (
    "v", "n", "run", "attempt", "ts", "mono", "host", "pid", "rank", "local_rank", "world", "step",
    "msg", "steps_dt_s", "nonfinite_loss_steps", "cut",
)
run = join()
for step in (1, 2, 3):
    run.step(step, **dict.fromkeys(fields, "mine"), loss=10**400, mine=7)
"""
    subprocess.run(
        [sys.executable, "-c", program], env=environment(tmp_path), timeout=150, check=True
    )
    first = next(record for record in beats(tmp_path) if record["msg"] == "progress")
    assert (first["step"], first["mine"], first["nonfinite_loss_steps"]) == (1, 7, 1)
    assert isinstance(first["steps_dt_s"][0], float)
    assert "mine" not in first.values()


def test_a_dropped_record_leaves_its_number_free(tmp_path):
    member = Member(tmp_path, {"RANK": "0"})
    member.record("boot", 0)
    member.recorder.put, put = lambda *_: False, member.recorder.put
    member.record("progress", 1)
    member.recorder.put = put
    member.record("progress", 2)
    assert member.recorder.close(150)
    assert [record["n"] for record in beats(tmp_path)] == [1, 3]
    assert member.pulse.records == 3


PHASES = """
from trainers.contract.member import join
run = join()
run.step(7)
seen = [run.pulse.phase]
with run.phase("eval"):
    seen.append(run.pulse.phase)
seen.append(run.pulse.phase)
with open("seen", "w") as file:
    print(*seen, file=file)
with run.phase("evall"):
    pass
"""


def test_a_phase_lasts_as_long_as_its_with_and_has_a_name_of_the_contract(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PHASES], env=environment(tmp_path), timeout=150, cwd=tmp_path
    )
    assert done.returncode == 1
    assert (tmp_path / "seen").read_text().split() == ["step", "eval", "step"]
    reason = beats(tmp_path)[-1]["reason"]
    assert reason == "UsageError: there is no phase 'evall'; did you mean 'eval'?"


ENDS = """
import sys
from trainers.contract.member import join
run = join()
run.step(7)
try:
    with run.phase("eval"):
        raise KeyError("caught")
except KeyError:
    pass
with run.phase("log"):
    with run.phase("fetch"):
        if sys.argv[1] == "raise":
            raise ValueError("no column")
        if sys.argv[1] == "leave":
            sys.exit(0)
if sys.argv[1] == "close":
    run.pulse.set(7, "save")
    run.close(7)
"""


@pytest.mark.parametrize(
    ("how", "phase"), [("raise", "fetch"), ("leave", "fetch"), ("close", "save"), ("end", None)]
)
def test_the_exit_record_has_the_phase_in_which_the_rank_ended(tmp_path, how, phase):
    words = [sys.executable, "-c", ENDS, how]
    subprocess.run(words, env=environment(tmp_path), timeout=150, cwd=tmp_path, check=False)
    last = next(each for each in reversed(beats(tmp_path)) if each["msg"] == "exit")
    assert last.get("phase") == phase


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
