"""The exit code in the exit record, and children that a rank forks after `join`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainers.contract.programs import beats, environment
from trainers.contract import environ, heartbeat, pulse, rundir

START = """
import multiprocessing, os, signal, sys, threading, time
from trainers.contract.member import join
run = join()
run.step(1)
"""
LATE = """
def late():
    time.sleep(0.5)
    sys.exit(0)
threading.Thread(target=late).start()
sys.exit(3)
"""
"""The thread exits after the main thread has raised its own exit; this ends only the thread."""
ENDS = [
    ("pass", 0, 0, "done"),
    ("sys.exit()", 0, 0, "done"),
    ("sys.exit(3)", 3, 3, "SystemExit: 3"),
    ("sys.exit('no data')", 1, 1, "SystemExit: no data"),
    ("def main():\n    sys.exit(-1)\nmain()", 255, 255, "SystemExit: -1"),
    (LATE, 3, 3, "SystemExit: 3"),
    ("raise ValueError('no data')", 1, 1, "ValueError: no data"),
    ("raise SystemExit(2)", 2, None, ""),
    ("a = threading.Thread(target=sys.exit, args=(3,))\na.start()\na.join()", 0, 0, "done"),
    ("try:\n    sys.exit(3)\nexcept SystemExit:\n    pass", 0, 0, "done"),
]


@pytest.mark.parametrize("how", ["-c", "-m"])
@pytest.mark.parametrize(("words", "code", "recorded", "reason"), ENDS)
def test_the_exit_record_has_the_exit_code_of_the_process_or_none(
    tmp_path, how, words, code, recorded, reason
):
    (tmp_path / "program.py").write_text(START + words)
    command = {"-c": START + words, "-m": "program"}[how]
    done = subprocess.run(
        [sys.executable, how, command], env=environment(tmp_path), cwd=tmp_path, timeout=150
    )
    last = beats(tmp_path)[-1]
    assert done.returncode == code
    assert (last["msg"], last["exit_code"], last["reason"]) == ("exit", recorded, reason)
    assert ("progress" in {record["msg"] for record in beats(tmp_path)}) == (not recorded)


def test_the_exit_code_stays_in_a_record_that_is_cut():
    record = {"v": 1, "msg": "exit", "exit_code": 13, "reason": "x" * 5000}
    assert json.loads(heartbeat.encode(record))["exit_code"] == 13


def check_end(run: Path, *words: object) -> None:
    """Checks that a Python process and its children end by themselves, with exit code 0."""
    command = [sys.executable, *map(str, words)]
    process = subprocess.Popen(command, env=environment(run), start_new_session=True)
    try:
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.parametrize("how", ["", "child.terminate(); child.join()"])
def test_sigterm_ends_a_child_that_was_forked_after_join(tmp_path, how):
    """At the exit of Python, multiprocessing terminates a daemon child and waits for its end."""
    words = (
        "child = multiprocessing.get_context('fork').Process(\n"
        "    target=time.sleep, args=(600,), daemon=True)\n"
        f"child.start()\n{how}"
    )
    check_end(tmp_path, "-c", START + words)


@pytest.mark.parametrize("how", ["in a phase", "after it"])
def test_a_forked_child_and_its_exit_change_neither_pulse_nor_dumps_of_its_rank(tmp_path, how):
    """For example, a process that loads data reports the phase `fetch`."""
    live = tmp_path / "live"
    live.mkdir()
    words = """
from pathlib import Path
from trainers.contract import pulse, rundir
if (child := os.fork()) == 0:
    with run.phase("fetch"):
        os._exit(0) if sys.argv[1] == "in a phase" else sys.exit(0)
os.waitpid(child, 0)
live = Path(os.environ["NSA_CONSOLE_LIVE_DIR"])
Path("phase").write_text(pulse.read(rundir.pulse(live, 0)).phase)
os.kill(os.getpid(), signal.SIGUSR1)
deadline = time.monotonic() + 20
while not rundir.live_stack(live, 0).stat().st_size and time.monotonic() < deadline:
    time.sleep(0.05)
"""
    done = subprocess.run(
        [sys.executable, "-c", START + words, how], env=environment(tmp_path, live), cwd=tmp_path,
        timeout=150,
    )  # fmt: skip
    assert done.returncode == 0
    assert Path(tmp_path / "phase").read_text() == "step"
    assert (live / "stack_rank0.txt").stat().st_size
    assert [record["msg"] for record in beats(tmp_path)].count("exit") == 1


SPAWNS = """
import multiprocessing, time
from trainers.contract.member import join
run = join()
if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    child = spawn.Process(target=time.sleep, args=(600,), daemon=True)
    child.start()
    child.join()
"""


def test_a_spawned_process_cannot_join_as_its_parent(tmp_path):
    """It imports the main file. A second member would disturb the records and ignore SIGTERM."""
    program = tmp_path / "program.py"
    program.write_text(SPAWNS)
    check_end(tmp_path, program)
    log = rundir.rank_log(tmp_path, 1, 0).read_text()
    assert f"another process has joined {tmp_path} as rank 0, for example the parent of" in log
    assert [record["msg"] for record in beats(tmp_path)] == ["boot", "exit"]


TWICE = """
from trainers.contract.errors import RefusedError
try:
    join()
except RefusedError as error:
    print(error, file=open("refused", "w"))
"""


def test_a_process_joins_only_once(tmp_path):
    """With two members, record numbers would exist twice, and the gates would be unknown."""
    words = [sys.executable, "-c", START + TWICE]
    subprocess.run(words, env=environment(tmp_path), cwd=tmp_path, timeout=150, check=True)
    assert (tmp_path / "refused").read_text().startswith("this process has already called join")
    assert [each["msg"] for each in beats(tmp_path)] == ["boot", "progress", "exit"]


def test_a_program_that_closes_its_run_itself_has_one_exit_record(tmp_path):
    live = tmp_path / "live"
    live.mkdir()
    words = [sys.executable, "-c", START + "run.close(1, reason='enough')"]
    subprocess.run(words, env=environment(tmp_path, live), timeout=150, check=True)
    *_, last = beats(tmp_path)
    shown = pulse.read(rundir.pulse(live, 0))
    assert (last["msg"], last["reason"]) == ("exit", "enough")
    assert shown is not None
    assert shown.records == last["n"]


HANDLES = """
import os, signal, sys
from pathlib import Path
from trainers.contract import environ
from trainers.contract.member import Member, join
def handle(number, _frame):
    with open("handled", "a") as file:
        print(signal.Signals(number).name, "in the rank" if os.getpid() == rank else "", file=file)
rank = os.getpid()
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, handle)
if sys.argv[1] == "join":
    run = join()
else:
    run = Member(Path.cwd(), environ.snapshot())
    run.start()
if (child := os.fork()) == 0:
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(0)
os.waitpid(child, 0)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGINT):
    os.kill(os.getpid(), number)
print(run.halt_reason, file=open("reason", "w"))
"""


@pytest.mark.parametrize("by", ["join", "trainer"])
def test_join_calls_a_former_handler_too_but_in_a_forked_child_only_that_of_sigterm(tmp_path, by):
    """A trainer has no former handlers; `Member` would call none."""
    words = [sys.executable, "-c", HANDLES, by]
    subprocess.run(words, env=environment(tmp_path), cwd=tmp_path, timeout=150, check=True)
    handled = [line.strip() for line in (tmp_path / "handled").read_text().splitlines()]
    in_rank = ["SIGTERM in the rank", *["SIGINT in the rank"] * 2]
    assert handled == ["SIGTERM", *(in_rank if by == "join" else [])]
    assert (tmp_path / "reason").read_text() == "SIGTERM\n"


WAITS = """
import os, signal, sys, time
from pathlib import Path
from trainers.contract import environ
from trainers.contract.member import Member, join
if sys.argv[1] == "join":
    run = join()
else:
    run = Member(Path.cwd(), environ.snapshot())
    run.start()
os.kill(os.getpid(), signal.SIGINT)
if (child := os.fork()) == 0:
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(5)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=open("child", "w"))
Path("waits").touch()
os.kill(os.getpid(), signal.SIGINT)
run.close(0, reason="done")
"""


@pytest.mark.parametrize(
    ("by", "torchrun", "reason"),
    [("join", False, "KeyboardInterrupt: "), ("join", True, "done"), ("trainer", False, "done")],
)
def test_a_second_ctrl_c_ends_a_joined_program_without_torchrun(tmp_path, by, torchrun, reason):
    """The ranks of torchrun get the first SIGINT twice: from the terminal, and from torchrun."""
    variables = environment(tmp_path) | ({environ.TORCHRUN_ID: "none"} if torchrun else {})
    subprocess.run(
        [sys.executable, "-c", WAITS, by], env=variables, cwd=tmp_path, timeout=150, check=False
    )
    assert (tmp_path / "waits").exists()
    assert (tmp_path / "child").read_text() == "5\n"
    assert next(each["reason"] for each in beats(tmp_path) if each["msg"] == "exit") == reason
