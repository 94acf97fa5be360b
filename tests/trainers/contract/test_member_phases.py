"""The phases that a joined program reports: in the pulse, in the time of a step, at the end."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.trainers.contract.programs import beats, environment

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


TIMES = """
import time
from trainers.contract.member import join
run = join()
with run.phase("eval"):
    time.sleep(0.4)
for step in (1, 2):
    run.step(step)
    if step == 1:
        with run.phase("eval"):
            time.sleep(0.4)
            with run.phase("log"), run.phase("save"):
                time.sleep(0.4)
        with run.phase("save"):
            time.sleep(0.4)
    with run.phase("forward"):
        time.sleep(0.1)
"""


def test_the_time_of_a_step_contains_neither_evaluations_nor_saves(tmp_path):
    subprocess.run([sys.executable, "-c", TIMES], env=environment(tmp_path), timeout=150)
    (first,), (second,) = (b["steps_dt_s"] for b in beats(tmp_path) if b["msg"] == "progress")
    assert 0.1 <= first < 0.5
    assert 0.1 <= second < 0.5


OVERLAPS = """
import threading, time
from trainers.contract.member import join
run = join()
def save():
    with run.phase("save"):
        time.sleep(0.4)
run.step(1)
thread = threading.Thread(target=save)
thread.start()
time.sleep(0.1)
run.step(2)
thread.join()
with run.phase("eval"):
    time.sleep(0.1)
    run.step(3)
run.end_step()
"""


def test_a_phase_that_begins_in_an_earlier_step_takes_no_time_from_the_present_step(tmp_path):
    subprocess.run([sys.executable, "-c", OVERLAPS], env=environment(tmp_path), timeout=150)
    durations = [b["steps_dt_s"][0] for b in beats(tmp_path) if b["msg"] == "progress"]
    assert len(durations) == 3
    assert durations[1] >= 0.3
    assert all(duration > 0 for duration in durations)


ENDS = """
import sys
from trainers.contract.member import join
run = join()
run.step(7)
try:
    with run.phase("eval"):
        raise KeyError("caught")
except KeyError:
    if sys.argv[1] == "raise while handling":
        raise ValueError("no column")
if sys.argv[1] == "raise later":
    raise ValueError("no column")
if sys.argv[1] in ("0", "1"):
    sys.exit(int(sys.argv[1]))
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
    ("how", "phase"),
    [
        ("raise", "fetch"),
        ("leave", "fetch"),
        ("close", "save"),
        ("end", None),
        ("raise later", None),
        ("raise while handling", None),
        ("0", None),
        ("1", "eval"),
    ],
)
def test_the_exit_record_has_the_phase_in_which_the_rank_ended(tmp_path, how, phase):
    words = [sys.executable, "-c", ENDS, how]
    subprocess.run(words, env=environment(tmp_path), timeout=150, cwd=tmp_path, check=False)
    last = next(each for each in reversed(beats(tmp_path)) if each["msg"] == "exit")
    assert last.get("phase") == phase
