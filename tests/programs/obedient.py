"""A contract process without torch that executes orders of a test: `obedient.py STEPS FOLDER`.

The ranks step together through a shared file, as in a collective. In its forward phase, rank R
reads and removes the file `FOLDER/rank{R}`, and executes the order in this file (see `ORDERS`).
"""

import ctypes
import json
import os
import resource
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

from tests.programs.lockstep import Board
from trainers.contract import rundir
from trainers.contract.member import join

true_time = time.time


def hold_the_gil(seconds: str) -> None:
    """Waits in C and holds the GIL, so SIGUSR1 causes no dump during this time."""
    native, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    until = struct.pack("ll", int(true_time() + float(seconds)), 0)
    native.pthread_mutex_lock(mutex)
    native.pthread_mutex_timedlock(mutex, until)


def fail(text: str) -> None:
    """Raises an error; the first word is the name of its class, the others are its text."""
    name, _, words = text.partition(" ")
    raise type(name, (RuntimeError,), {})(words)


def shift_the_clock(seconds: str) -> None:
    time.time = lambda: true_time() + float(seconds)


def append(path: Path, text: str) -> None:
    fd = rundir.open_append(path)
    os.write(fd, text.encode())
    os.close(fd)


def die_in_a_line(_: str) -> None:
    """Writes half a record and exits, as after a kill between two writes."""
    append(rundir.heartbeat(run.run, run.rank), '{"v": 1, "rank": ')
    os._exit(3)


def write_through(path: str) -> None:
    """Writes synchronously in the main thread."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_SYNC, 0o600)
    os.write(fd, b"x" * 4096)
    os.close(fd)


def stray(path: str) -> None:
    """Starts a process without the token and session of the run; writes its pid."""
    child = subprocess.Popen(["sleep", "600"], env={}, start_new_session=True)
    rundir.write_atomic(Path(path), str(child.pid))


def overwrite_environment(_: str) -> None:
    """Overwrites the environment of this process, as setproctitle does."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[47]), int(fields[48])
    ctypes.memset(begin, 0, end - begin)


def limit_files(size_bytes: str) -> None:
    """Limits the size of the files that this rank writes, as `ulimit -f` does; -1 is no limit."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(size_bytes), -1))


def mute(_: str) -> None:
    """Stops writing the pulse."""
    run.pulse._write = lambda now: None


def speak(words: str) -> None:
    """Appends a line to torchrun's log."""
    append(rundir.logs(run.run, run.attempt) / rundir.TORCHRUN_LOG, f"{words}\n")


def claim(fields: str) -> None:
    """Appends a record with these fields to the heartbeats of rank 0."""
    record = {"v": 1, "rank": 0, "attempt": run.attempt, "step": 1, "ts": true_time(),
              "msg": "progress"}  # fmt: skip
    append(rundir.heartbeat(run.run, 0), json.dumps(record | json.loads(fields)) + "\n")


ORDERS = {
    "mute": mute, "speak": speak, "claim": claim,
    "figures": lambda fields: figures.update(json.loads(fields)), "stray": stray,
    "bare": overwrite_environment, "sleep": lambda seconds: time.sleep(float(seconds)),
    "gil": hold_the_gil, "raise": fail, "exit": lambda code: sys.exit(int(code)),
    "abort": lambda _: os.abort(), "segv": lambda _: ctypes.string_at(0),
    "deaf": lambda _: signal.signal(signal.SIGTERM, signal.SIG_IGN), "clock": shift_the_clock,
    "half": die_in_a_line, "write": write_through, "limit": limit_files,
}  # fmt: skip


def execute_order(path: Path) -> None:
    try:
        order, _, words = path.read_text().partition(" ")
        path.unlink()
    except FileNotFoundError:
        return
    ORDERS[order](words)


figures: dict[str, object] = {}
"""False values for the records of this rank."""
steps, folder = int(sys.argv[1]), Path(sys.argv[2])
run = join()
board = Board(run)
for step in range(1, steps + 1):
    if run.step(step, **{"loss": 1.0 / step, "grad_norm": 1.0} | figures):
        break
    run.pulse.set(step, "forward")
    execute_order(folder / f"rank{run.rank}")
    time.sleep(0.02)
    run.pulse.set(step, "backward")
    board.meet(step)
