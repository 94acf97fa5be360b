"""The evidence about a stall: samples of processes, and dumps since the stall began."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from dataclasses import replace

import pytest

from console.diagnose.rank_evidence import RankEvidence
from console.supervisor import evidence
from console.supervisor.evidence import Collector
from tests.launches import HANG_GUARD_S, wait_for

RANK = RankEvidence(0, os.getpid(), "S", 5, "forward", 9.0)
DUMP = 'Stack (most recent call first):\n  File "/job/train.py", line {} in step\n'


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(evidence, "APART_S", 0.05)
    monkeypatch.setattr(evidence, "READ_EVERY_S", 0.0)
    monkeypatch.setattr(evidence, "DUMPED_AFTER_S", 0.2)
    monkeypatch.setattr(evidence, "UNREAD_AFTER_S", 0.4)


def made(run, check=lambda: None):
    return Collector(run, tuple, check)


def collected(collector, *ranks):
    """Polls until the evidence is complete, and returns it."""
    return wait_for(lambda: collector.poll(ranks) or collector.complete, every_s=0.02)


def test_a_directory_that_does_not_answer_still_gives_the_processes(tmp_path, quick):
    hung = threading.Event()
    found = collected(made(tmp_path, hung.wait), RANK)
    assert found.after[0].pid == os.getpid()
    assert "cannot read the dumps: the run directory does not answer" in found.gaps
    hung.set()


def test_every_rank_without_a_dump_is_named(tmp_path, quick):
    found = collected(made(tmp_path), *(replace(RANK, rank=rank) for rank in range(20)))
    assert "no stack of ranks 0-19" in found.gaps


def test_a_dump_from_before_the_stall_or_from_a_later_clock_is_not_used(
    tmp_path, quick, monkeypatch
):
    now_ms = time.time_ns() // 1_000_000
    for line, ms in ((1, now_ms - 60_000), (2, now_ms + 3_600_000)):
        (tmp_path / f"stackdump_rank0_{ms}.txt").write_text(DUMP.format(line))
    collector = made(tmp_path)
    assert collected(collector, RANK).stacks == {}
    collector.clear()
    collector._began_at = -1e9
    monkeypatch.setattr(evidence, "DUMPED_AFTER_S", HANG_GUARD_S)
    monkeypatch.setattr(evidence, "UNREAD_AFTER_S", HANG_GUARD_S)
    collector.poll((RANK,))
    time.sleep(0.01)
    own = tmp_path / f"stackdump_rank0_{time.time_ns() // 1_000_000}.txt"
    own.write_text(DUMP.format(3))
    monkeypatch.setattr(evidence, "DUMPED_AFTER_S", 0.2)
    found = collected(collector, RANK)
    assert [frame.line for frame in found.stacks[0].threads[0].frames] == [3]


def test_only_ranks_with_a_pulse_are_dumped_and_a_place_only_once(tmp_path, quick):
    """A rank without a pulse may not have the handler yet; SIGUSR1 would then end the rank."""
    silent = RankEvidence(1, os.getpid(), "S", 0, "", 9.0)
    collector = made(tmp_path)
    collector.poll((RANK, silent))
    assert collector.wants_dump == {0}
    collector.wants_dump = frozenset()
    collected(collector, RANK, silent)
    for state in "DSRD":
        collector.poll((RankEvidence(0, os.getpid(), state, 5, "forward", 9.0), silent))
    assert not collector.wants_dump
    assert collector.complete is not None


def test_processes_are_sampled_again_while_a_stall_lasts_and_nobody_is_dumped_again(
    tmp_path, quick, monkeypatch
):
    """The rank is stopped at first, and is then resumed; its pulse does not change."""
    monkeypatch.setattr(evidence, "AGAIN_S", 0.0)
    child = subprocess.Popen(["sleep", "60"])
    try:
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        ill, collector = replace(RANK, pid=child.pid), made(tmp_path)
        assert collected(collector, ill).after[0].state == "T"
        collector.wants_dump = frozenset()
        child.send_signal(signal.SIGCONT)
        wait_for(lambda: collector.poll((ill,)) or collector.complete.after[0].state in "RS")
        assert not collector.wants_dump
    finally:
        child.kill()
        child.wait()
