"""What is said of an end, from real processes: who died first, of what, and who only followed."""

from __future__ import annotations

import os
import secrets
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from console.run_state import Facts, decide
from console.sources import liveness, oom_counts, process
from console.sources.record_files import RecordFiles
from console.sources.reducer import NO_RECORDS, Head, Reducer
from console.sources.series import Series
from console.supervisor import launch_spec
from console.supervisor.ends import end_of
from console.supervisor.restart import deterministic, signature
from console.supervisor.run_files import Files
from console.supervisor.sampling import Sampler
from console.supervisor.tree import Tree
from tests import owners
from trainers.contract import environ, rundir

from .conftest import PROGRAMS

AGENT = (sys.executable, str(PROGRAMS / "agent.py"), "2")
TORCHRUN = (
    sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
    "--max-restarts", "0", "--shutdown-timeout", "2",
)  # fmt: skip


class NoGpus:
    def rows(self):
        return ()


class Trial:
    """Two ranks of `ends.py` below an agent, as an attempt follows them.

    Their owner is a process of its own, as that of a supervisor is.
    """

    def __init__(self, folder: Path, agent: tuple[str, ...], mode: str):
        self.run = folder / mode
        logs = rundir.logs(self.run, 1)
        logs.mkdir(parents=True)
        token = secrets.token_hex(8)
        environment = launch_spec.inherited() | {
            "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", environ.RUN_DIR: str(self.run),
            environ.RUN_ID: mode, environ.ATTEMPT: "1", environ.TOKEN: token,
        }  # fmt: skip
        self.poller = select.poll()
        self.link, self.reducer = owners.begin(), Reducer(Series(keeps=False), timed=True)
        self.tree = Tree(token, 2, self.poller, self.link)
        self.poller.register(self.link.fd, select.POLLIN)
        self.files = Files(self.run, 1, 2, RecordFiles(self.run))
        self.before = oom_counts.snapshot()
        log = rundir.open_append(logs / rundir.TORCHRUN_LOG)
        self.tree.spawn((*agent, str(PROGRAMS / "ends.py"), mode), environment, log, 10.0)
        os.close(log)

    def look(self) -> bool:
        """Takes what is new; says whether there is more."""
        self.link.hear()
        self.tree.look()
        news = self.files.look(heartbeats=True)
        for batch in news.batches:
            self.reducer.take(batch)
        return news.behind

    @property
    def heads(self) -> dict[int, Head]:
        return self.reducer.heads(1)

    def wait(self, reached: Callable[[], bool], timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not reached():
            assert time.monotonic() < deadline, self.tree.workers
            self.look()
            self.poller.poll(20)

    def wait_steps(self) -> None:
        self.wait(lambda: len(self.tree.workers) == 2 and set(self.heads) == {0, 1}
                  and min(head.step for head in self.heads.values()) > 1)  # fmt: skip

    def kill(self, rank: int) -> None:
        self.tree.workers[rank].handle.send(signal.SIGKILL)

    def ended(self) -> Facts:
        """Waits for the end and returns what is known of it."""
        self.wait(self.tree.is_over)
        while self.look():
            pass
        rest = self.files.rest()
        self.tree.take_log(rest.log)
        ends = [
            end_of(w, self.heads.get(r, NO_RECORDS), rest.last[r])
            for r, w in self.tree.workers.items()
        ]
        return Facts(
            spawned=True, over=True, world=2, agent_code=self.tree.agent_status, ends=ends,
            order=tuple(self.tree.order), step=max(head.step for head in self.heads.values()),
            halt_steps={rank: h.halt for rank, h in self.heads.items() if h.halt is not None},
            reason=next((head.reason for head in self.heads.values() if head.reason), ""),
            oom=oom_counts.since(self.before),
        )  # fmt: skip

    def clean(self) -> None:
        if self.tree.agent_status is None:
            self.tree.kill()
            self.wait(self.tree.is_over)
        self.tree.close()
        owners.end(self.link)


@pytest.fixture
def begin(tmp_path_factory):
    trials: list[Trial] = []

    def started(agent: tuple[str, ...], mode: str) -> Trial:
        trials.append(Trial(tmp_path_factory.mktemp("trial"), agent, mode))
        return trials[-1]

    yield started
    for trial in trials:
        trial.clean()


def line_of(text: str) -> int:
    lines = (PROGRAMS / "ends.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def test_a_native_crash_names_the_signal_and_the_frame_that_python_was_in(begin):
    facts = begin(AGENT, "native").ended()
    state, why = decide(facts)
    assert state == "crashed"
    line = line_of("ctypes.string_at(0)")
    assert why.startswith("rank 1 crashed in native code (SIGSEGV) at step ")
    assert why.endswith(f", in forward (ends.py:{line})")
    assert signature(facts) == f"signal:SIGSEGV::forward (ends.py:{line})"
    assert not deterministic(facts)


@pytest.mark.slow
def test_a_rank_that_leaves_a_real_group_is_named_and_not_the_one_that_lost_it(begin):
    facts = begin(TORCHRUN, "early").ended()
    state, why = decide(facts)
    assert state == "crashed"
    assert why == (
        "rank 0 exited first (code 0) at step 5, while the others continued; "
        "rank 1 ended because of it"
    )
    words = {end.rank: end.log for end in facts.ends}
    assert "onnection" in words[1]
    assert signature(facts) == "exit:0:left early"


def test_an_exception_is_named_with_its_line_and_comes_back_as_the_same_signature(begin):
    facts, again = begin(AGENT, "raise").ended(), begin(AGENT, "raise").ended()
    line = line_of("raise ValueError")
    state, why = decide(facts)
    assert state == "crashed"
    assert why.startswith(f"rank 1: ValueError: the batch of step 3 is broken (ends.py:{line})")
    same = f"exit:1:ValueError: the batch of step # is broken:ends.py:{line}"
    assert signature(facts) == signature(again) == same


def test_a_bare_exit_code_is_told_with_the_last_record(begin):
    facts = begin(AGENT, "code").ended()
    why = decide(facts)[1]
    assert why.startswith("rank 1: no reason given, its last record says exit: no data left, see")
    assert "(exit 7)" in why


def test_ranks_that_are_all_killed_at_once_have_no_culprit(begin):
    trial = begin(AGENT, "wait")
    trial.wait_steps()
    for rank in (0, 1):
        trial.kill(rank)
    facts = trial.ended()
    state, why = decide(facts)
    assert (state, "all 2 ranks were killed by SIGKILL at once" in why) == ("crashed", True)
    assert signature(facts) == ""


def test_a_rank_that_died_while_torchrun_is_stopped_is_dead_and_not_alive(begin):
    trial = begin(AGENT, "wait")
    trial.wait_steps()
    trial.tree.agent.send(signal.SIGSTOP)
    trial.kill(1)
    worker = trial.tree.workers[1]
    trial.wait(lambda: worker.over_ts is not None)
    trial.look()
    assert process.state(worker.handle.pid) == "Z"
    assert (worker.unreaped, worker.signal) == (True, "SIGKILL")
    assert not rundir.is_alive(rundir.identity() | {
        "pid": worker.handle.pid, "start_ticks": worker.handle.start_ticks,
    })  # fmt: skip
    assert liveness.exit_words(worker.as_dict(), {}) == "killed (SIGKILL), unreaped"
    sampler = Sampler(NoGpus(), lambda rank: None)
    rows = sampler.sample(list(trial.tree.workers.values()), trial.heads, 1, 0.0)["ranks"]
    assert [row["state"] for row in rows] == [rows[0]["state"], "Z"]
    assert rows[0]["state"] in ("R", "S")
    trial.tree.agent.send(signal.SIGCONT)
    facts = trial.ended()
    assert liveness.exit_words(worker.as_dict(), {}) == "killed (SIGKILL)"
    assert decide(facts)[1].startswith("rank 1 was killed by SIGKILL at step ")


def test_a_rank_whose_parent_is_gone_still_tells_how_it_ended(begin):
    trial = begin(AGENT, "wait")
    trial.wait_steps()
    trial.tree.agent.send(signal.SIGKILL)
    trial.wait(lambda: trial.tree.agent_status is not None)
    trial.kill(1)
    trial.wait(lambda: trial.tree.workers[1].over_ts is not None)
    time.sleep(1)
    trial.tree.workers[0].handle.send(signal.SIGTERM)
    facts = trial.ended()
    why = decide(facts)[1]
    if trial.tree.workers[1].signal is None:
        assert "rank 1 ended at step " in why
        assert "exit code not available; its last record says progress" in why
        pytest.skip("this kernel does not keep how a reaped process ended (Linux 6.15 does)")
    assert why.startswith("rank 1 was killed by SIGKILL at step ")


def test_the_nearest_cgroup_that_counts_tells_a_kill_for_memory(tmp_path, monkeypatch):
    own = Path("/proc/self/cgroup").read_text().split("0::", 1)[1].split()[0]
    inner, mounts, host = tmp_path / own.strip("/"), tmp_path / "mounts", tmp_path / "vmstat"
    mounts.write_text(f"proc /proc proc rw 0 0\ncgroup2 {tmp_path} cgroup2 rw 0 0\n")
    host.write_text("oom_kill 5\n")
    monkeypatch.setattr(oom_counts, "MOUNTS", str(mounts))
    monkeypatch.setattr(oom_counts, "VMSTAT", host)
    inner.mkdir(parents=True, exist_ok=True)
    alone = oom_counts.snapshot()
    assert (alone.cgroup, alone.host, alone.path) == (None, 5, "")
    counts = tmp_path / "memory.events"
    counts.write_text("low 0\noom 0\noom_kill 0\n")
    before = oom_counts.snapshot()
    assert before.path == str(counts)
    host.write_text("oom_kill 6\n")
    assert (oom_counts.since(before).elsewhere, oom_counts.since(alone).perhaps) == (True, True)
    counts.write_text("low 0\noom 1\noom_kill 1\n")
    found = oom_counts.since(before)
    assert (found.here, found.words()) == (True, "cgroup oom_kill 0 → 1")
