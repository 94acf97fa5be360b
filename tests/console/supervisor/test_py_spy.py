"""Stacks from py-spy: the output may be damaged or late."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.diagnose.rank_evidence import RankEvidence
from console.diagnose.stack_classes import where
from console.sources import process, stacks
from console.supervisor import evidence
from console.supervisor.evidence import Collector
from tests.console.test_diagnose import diagnosed
from tests.launches import HANG_GUARD_S, PROGRAMS, STUB, phase, sleeping, wait_for
from trainers.contract import rundir

RECORDED = Path(__file__).parents[1] / "sources" / "py_spy.json"
"""The output of `py-spy dump --nonblocking --json` 0.4.0 on a process with two threads."""
PID = 71
PLACES = (str(Path(sys.executable).parent), os.environ["PATH"])
INSTALLED = shutil.which("py-spy", path=":".join(PLACES)) or ""
SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
IS_ALLOWED = os.geteuid() == 0 or not SCOPE.exists() or SCOPE.read_text().strip() == "0"
ONE_THREAD = """echo '[{"thread_name": "MainThread", "frames": []}'"""
KEYS = ("thread_name", "thread_id", "os_thread_id", "frames", "name", "filename", "line")
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20),
    st.sampled_from(("MainThread", PID, "\n  File", "\x1b[2J", '", line 1 in x\nThread y:')),
)  # fmt: skip
GARBAGE = st.recursive(
    VALUES,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=7)
    ),
)


def test_what_py_spy_printed_has_the_main_thread_first_and_each_frame():
    main, feeder = stacks.parse(stacks.as_dump(RECORDED.read_bytes()))
    assert (main.name, [each.short for each in main.frames]) == (
        "main", ["train.py:8 step", "train.py:9 <module>"],
    )  # fmt: skip
    assert main.frames[0].file == "/job/train.py"
    assert (feeder.name, feeder.frames[0].short) == ("feeder", "train.py:4 feed")
    assert [each.function for each in feeder.frames[1:]] == [
        "run", "_bootstrap_inner", "_bootstrap",
    ]  # fmt: skip


def test_one_thread_from_py_spy_is_no_sign_that_native_code_holds_the_gil():
    threads = stacks.parse(stacks.as_dump(RECORDED.read_bytes()))[:1]
    found = stacks.Stack(0, 1.0, f"/run/stackdump_rank0_1000{stacks.BY_PY_SPY}", threads)
    assert where(found).kind == "own"
    assert where(replace(found, path="/run/stackdump_rank0_1000.txt")).kind == "native"


@given(GARBAGE)
def test_any_json_becomes_a_dump_or_none(value):
    stacks.parse(stacks.as_dump(json.dumps(value).encode()))
    output = [value, {"thread_name": "MainThread", "frames": [value, {"line": value}]}, value]
    threads = stacks.parse(stacks.as_dump(json.dumps(output).encode()))
    assert threads[0].name == "main"
    shown = [text for each in threads for x in each.frames for text in (x.file, x.function)]
    assert not any(ord(char) < 32 or 0x7F <= ord(char) < 0xA0 for char in "".join(shown))


@given(st.binary(max_size=200))
def test_any_bytes_become_no_dump(output):
    assert stacks.as_dump(output) == ""


@pytest.mark.parametrize("output", [b"[" * 100_000, b'[{"thread_id":' + b"9" * 9999 + b"}]", b""])
def test_other_tricks_become_no_dump(output):
    assert stacks.as_dump(output) == ""


def test_a_name_cannot_add_a_thread_or_a_frame():
    name = 'x\n  File "/etc/passwd", line 1 in y\nThread z (most recent call first):'
    for count, known in ((3, 3), (250, stacks.MAX_FRAMES)):
        frames = [{"name": name, "filename": name, "line": 3}] * count
        threads = [
            {"thread_name": each, "frames": frames} for each in [name] * 60 + ["MainThread"] * 60
        ]
        text = stacks.as_dump(json.dumps(threads).encode())
        found = stacks.parse(text)
        assert len(found) == stacks.MAX_THREADS or len(text.encode()) > stacks.ENOUGH_BYTES
        assert len(text.encode()) < stacks.MAX_DUMP_BYTES
        assert {len(each.frames) for each in found} == {known}


@pytest.fixture
def rank():
    """A rank whose process sleeps."""
    child = sleeping()
    yield RankEvidence(
        0, child.pid, "S", 5, "forward", 9.0, start_ticks=rundir.start_ticks(child.pid)
    )
    child.kill()
    child.wait()


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Puts a program py-spy first in the PATH; it appends its arguments to the file `calls`."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def install(lines: str) -> Path:
        file, calls = folder / "py-spy", tmp_path / "calls"
        file.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n{lines}\n')
        file.chmod(0o700)
        return calls

    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(evidence, "APART_S", 0.05)
    monkeypatch.setattr(evidence, "DUMPED_AFTER_S", 0.2)
    monkeypatch.setattr(evidence, "READ_EVERY_S", 0.05)
    monkeypatch.setattr(evidence, "UNREAD_AFTER_S", HANG_GUARD_S)
    monkeypatch.setattr(evidence, "PY_SPY_S", HANG_GUARD_S)
    return install


def collected(run, *ranks, save=lambda path, text: None):
    collector = Collector(run, tuple, lambda: None, save=save)
    return wait_for(lambda: collector.poll(ranks) or collector.complete, every_s=0.02)


def test_the_limit_of_the_collection_covers_py_spy():
    assert evidence.UNREAD_AFTER_S >= evidence.DUMPED_AFTER_S + evidence.PY_SPY_S + 2


@pytest.mark.parametrize(
    "lines",
    [
        "trap '' TERM; sleep 456.7", "setsid sleep 20", "echo '[{'; sleep 456.7",
        "trap '' PIPE; yes '[{'", f"{ONE_THREAD}; yes '' | head -c 9999999; echo ']'",
        "exit 1", "echo '[]'", "echo 'Permission Denied' >&2; exit 1", "kill -KILL $$",
    ],
)  # fmt: skip
def test_a_py_spy_that_fails_delays_nothing_for_long_and_leaves_a_gap(
    tmp_path, fake, rank, monkeypatch, lines
):
    monkeypatch.setattr(evidence, "PY_SPY_S", 2.0)
    calls, begun = fake(lines), time.monotonic()
    found = collected(tmp_path, rank, replace(rank, rank=1))
    assert time.monotonic() - begun < HANG_GUARD_S / 2
    assert found.stacks == {}
    assert "no stack of ranks 0-1" in found.gaps
    assert not any("does not answer" in gap for gap in found.gaps)
    first, *_ = calls.read_text().splitlines()
    assert first == f"dump --nonblocking --json --pid {rank.pid}"
    left = subprocess.run(["pgrep", "-f", f"{tmp_path}/bin/py-spy"], capture_output=True, text=True)
    assert left.stdout == ""


def test_only_a_rank_that_can_run_and_is_the_same_process_is_read(tmp_path, fake, rank):
    calls = fake(f"sed 's/{PID},$/'\"$5,/\" {RECORDED}")
    saved = []
    reused = replace(rank, rank=1, start_ticks=(rank.start_ticks or 0) - 1)
    unknown = replace(rank, rank=2, start_ticks=None)
    stopped = sleeping()
    try:
        os.kill(stopped.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, stopped.pid, os.WSTOPPED)
        ticks = rundir.start_ticks(stopped.pid)
        ill = replace(rank, rank=3, pid=stopped.pid, start_ticks=ticks)
        found = collected(
            tmp_path, rank, reused, unknown, ill, save=lambda path, text: saved.append((path, text))
        )
    finally:
        stopped.kill()
        stopped.wait()
    assert stacks.py_spy_dump(rank.pid, reused.start_ticks, 2.0) == ""
    assert len(calls.read_text().splitlines()) == 1
    assert (set(found.stacks), found.places[0].own.place) == ({0}, "train.py:8")
    assert found.stacks[0].path.endswith("_pyspy.txt")
    assert "no stack of ranks 1-3" in found.gaps
    [(path, text)] = saved
    path.write_text(text)
    assert stacks.latest(tmp_path, [0])[0].threads == found.stacks[0].threads


def test_a_process_that_takes_the_pid_meanwhile_gives_no_stack(tmp_path, fake, rank):
    fake(f"kill -KILL $5; while kill -0 $5 && ! grep -q ') Z' /proc/$5/stat; do :; done; "
         f"cat {RECORDED}")  # fmt: skip
    assert collected(tmp_path, rank).stacks == {}


@pytest.mark.skipif(not INSTALLED, reason="py-spy is not installed")
@pytest.mark.skipif(not IS_ALLOWED, reason="the kernel does not allow py-spy to read a process")
def test_the_stack_of_a_stalled_rank_that_ignores_the_signal_is_read_with_py_spy(begin):
    lines = (PROGRAMS / "member.py").read_text().splitlines()
    line = next(number for number, each in enumerate(lines, 1) if "time.sleep(3600)" in each)
    shell = {**STUB, "PATH": f"{Path(INSTALLED).parent}:{os.environ['PATH']}"}
    watch = {"stall_floor_s": 1, "startup_s": 60, "grace_s": 1}
    started = begin(phase("one", "member.py", 100_000, "mute"), watch=watch, shell=shell)
    place = f"member.py:{line}"
    verdict = started.wait(
        lambda: (v := started.state().get("verdict")) and v.get("place") == place and v
    )
    assert (verdict["rank"], verdict["cause"]) == (1, "sleep")
    assert any(each.startswith("stacks as of") and place in each for each in verdict["evidence"])
    found = started.wait(lambda: len(f := stacks.latest(started.run(), [0, 1])) == 2 and f)
    assert [each.path.endswith(stacks.BY_PY_SPY) for _, each in sorted(found.items())] == [
        False,
        True,
    ]
    assert found[0].ts == found[1].ts
    assert found[1].threads[0].frames[0].line == line
    assert {"nsa-watcher", "nsa-dumper"} <= {each.name for each in found[1].threads}
    assert process.state(started.pids()[1]) == "S"
    assert "does not catch the dump signals" in started.ask("dump", rank=1)["text"]
    code, said = diagnosed(started.path)
    assert (code, said["verdict"]["place"]) == (1, place)
