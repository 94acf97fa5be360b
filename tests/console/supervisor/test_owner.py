"""The owner of a launch outlives what works for it: real supervisors, killed and frozen on purpose.

The working process is broken from inside where an observer is at work, or gets a signal.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time

import pytest

from console import actions
from console.model import STALL
from console.sources import liveness, process
from console.sources.run import RunSource
from console.supervisor import frames
from console.supervisor import owner as owner_module
from console.supervisor.child_state import Charge
from console.supervisor.frames import Frames
from console.supervisor.link import Link
from console.supervisor.run import REPLACED
from tests import broken
from tests.launches import STUB, Started, phase
from trainers.contract import rundir

WAITS = "owners.WAITS_S"
SEGFAULT, HANG = "ctypes.string_at(0)", "time.sleep(60)"
OBSERVERS = {
    "processes and pulses": "sampling.Sampler.sample",
    "watch rules": "watching.Watching.look",
    "records": "attempt.Attempt._take_records",
    "files": "follow.Files.look",
    "the run directory": "alerts.Alerts.watch_writes",
    "the sign of life": "live.Live.write_status",
    "the snapshot": "snapshots.Snapshots.look",
    "supervisor.json": "attempt.Attempt.workers",
}
MIDDLE, ALWAYS = "len(begun) == 3", "len(begun) >= 3"
STEPS, GRACE_S = 900, 2.0
CASES = [
    *((name, SEGFAULT, ALWAYS) for name in OBSERVERS),
    ("watch rules", SEGFAULT, "len(begun) == 1"), ("watch rules", HANG, ALWAYS),
    ("records", HANG, MIDDLE),
]  # fmt: skip


@pytest.fixture(scope="module")
def launched(begin, tmp_path_factory):
    """A launch for each way to break, all at the same time."""
    begun = {}
    for name, harm, when in CASES:
        silent_s = 3 if harm == HANG else owner_module.SILENT_S
        setup = f"owners.SILENT_S, {WAITS} = {silent_s}, (0.0, 0.3, 0.5, 5.0)"
        folder = tmp_path_factory.mktemp("broken")
        shell = broken.shell(folder, OBSERVERS[name], f"if {when}: {harm}", setup)
        one = phase("one", "member.py", STEPS, nproc=1, gates={"loss_finite": True})
        begun[name, harm, when] = begin(one, shell=shell, watch={"grace_s": GRACE_S})
    return begun


def owner_of(started: Started) -> int:
    return started.wait(lambda: started.plan_state.get("supervisor", {}).get("pid"))


def alerts_of(started: Started, name: str) -> list[str]:
    return [e["text"] for e in started.events(0) if (e["kind"], e.get("alert")) == ("alert", name)]


def wait_replaced(started: Started, former: int) -> int:
    """Returns the pid of the next working process when it has taken over."""
    return started.wait(
        lambda: (pid := started.child()) != former and started.state()["child"]["pid"] == pid
        and alerts_of(started, REPLACED) and pid
    )  # fmt: skip


@pytest.mark.parametrize(("name", "harm", "when"), CASES)
def test_a_working_process_that_ends_or_hangs_costs_no_rank(launched, name, harm, when):
    started = launched[name, harm, when]
    ended = started.wait_end(120)
    assert started.state()["state"] == "completed", ended
    told = alerts_of(started, REPLACED)
    how = "ended with SIGSEGV" if harm == SEGFAULT else "said nothing for"
    assert f"the supervisor's working process {how}" in told[0]
    assert f"in {name}" in told[0]
    assert "supervisor.log" not in told[0]  # it holds nothing of a signal or a silence
    if when == ALWAYS:
        assert "switched off" in alerts_of(started, f"observer-{name.replace(' ', '-')}")[0]
    assert not process.with_token(started.token())


@pytest.fixture
def running(begin):
    started = begin(
        phase("one", "member.py", 100_000), shell=STUB, nproc=2, watch={"grace_s": GRACE_S}
    )
    started.wait_state("running")
    started.wait_steps(3)
    return started


def test_requests_are_served_after_the_working_process_was_killed_twice(running):
    for _ in range(2):
        child = running.child()
        os.kill(child, signal.SIGKILL)
        wait_replaced(running, child)
    pids = running.pids()
    assert running.ask("note", text="is served")["ok"]
    assert running.state()["state"] == "running"
    began = time.monotonic()
    assert running.ask("stop")["ok"]
    running.wait(lambda: not process.with_token(running.token()))
    assert time.monotonic() - began < GRACE_S + 30
    ended = running.wait_end()
    assert ended["phases"][0]["state"] == "stopped"
    assert running.pids() == pids


def test_term_ends_the_ranks_while_the_working_process_is_stopped(running):
    child, owner = running.child(), owner_of(running)
    os.kill(child, signal.SIGSTOP)
    os.kill(owner, signal.SIGTERM)
    running.wait(lambda: not process.with_token(running.token()), GRACE_S + 10)
    assert process.state(child) == "T"
    os.kill(child, signal.SIGKILL)
    assert "SIGTERM to the supervisor" in running.wait_end()["why"]


def test_a_rank_that_ends_while_nobody_works_has_its_exit_and_the_run_goes_on(running):
    child = running.child()
    rank = running.pids()[1]
    os.kill(child, signal.SIGSTOP)
    os.kill(rank, signal.SIGKILL)
    os.kill(child, signal.SIGKILL)
    ended = running.wait_end()
    assert ended["phases"][0]["state"] == "crashed"
    assert "rank 1 was killed by SIGKILL" in ended["why"]


def test_the_working_process_ends_with_its_owner(running):
    child, owner = running.child(), owner_of(running)
    os.kill(owner, signal.SIGKILL)
    running.wait(lambda: process.state(child) in (process.GONE, "Z"))
    assert process.with_token(running.token())


def test_documents_that_ranks_overwrote_do_not_reach_the_next_process(running):
    """What a restarted process goes on with is what its owner keeps."""
    child = running.child()
    os.kill(child, signal.SIGSTOP)
    for path in (running.run() / rundir.RUN, running.run() / rundir.SUPERVISOR,
                 running.path / rundir.PLAN_STATE, running.path / rundir.PLAN):  # fmt: skip
        path.write_text("[garbage")
    os.kill(child, signal.SIGKILL)
    for told in (lambda: running.state(), lambda: running.plan_state):
        running.wait(lambda told=told: told().get("state") == "running")
    running.ask("stop")
    assert running.wait_end()["phases"][0]["state"] == "stopped"


def test_a_run_that_ends_well_while_nobody_works_is_completed(begin):
    """The owner saw torchrun's exit code, and each rank recorded its own end."""
    started = begin(
        phase("one", "member.py", 150, gates={"loss_finite": True}), shell=STUB, nproc=2
    )
    started.wait_steps(3)
    child = started.child()
    os.kill(child, signal.SIGSTOP)
    started.wait(lambda: not process.with_token(started.token()))
    os.kill(child, signal.SIGKILL)
    ended = started.wait_end()["phases"][0]
    assert (ended["state"], ended["result"]) == ("completed", "pass"), ended


def test_one_torchrun_runs_after_an_adoption_whatever_becomes_of_the_working_process(running):
    owner, pids = owner_of(running), running.pids()
    torchrun = running.state()["torchrun"]
    os.kill(owner, signal.SIGKILL)
    running.wait(lambda: not rundir.is_alive(running.plan_state["supervisor"]))
    actions.adopt(running.path)
    running.wait(lambda: owner_of(running) != owner)
    child = running.child()
    os.kill(child, signal.SIGKILL)
    wait_replaced(running, child)
    assert running.ask("note", text="is served")["ok"]
    assert (running.state()["torchrun"], running.pids()) == (torchrun, pids)
    assert running.state()["attempt"] == 1
    os.kill(running.child(), signal.SIGSTOP)
    os.kill(owner_of(running), signal.SIGTERM)
    running.wait(lambda: not process.with_token(running.token()), GRACE_S + 10)
    os.kill(running.child(), signal.SIGKILL)
    assert "SIGTERM to the supervisor" in running.wait_end()["why"]


FIRST_TIME = "mark.exists() or (mark.touch(), ctypes.string_at(0))"


@pytest.fixture
def broken_at(begin, tmp_path):
    """Starts a launch whose working process dies in one function."""

    def start(method, harm=FIRST_TIME, count=1, **plan):
        setup = f"{WAITS}, mark = (0.0, 0.3, 0.5, 2.0), pathlib.Path({str(tmp_path / 'mark')!r})"
        shell = broken.shell(tmp_path, method, harm, setup)
        steps = 100_000 if count == 1 else 3
        phases = [phase(f"phase{n}", "member.py", steps, nproc=1) for n in range(count)]
        return begin(*phases, shell=shell, watch={"grace_s": GRACE_S}, **plan)

    return start


def test_a_term_is_obeyed_by_the_next_where_the_first_dies_of_it(broken_at):
    started = broken_at("launch.Launch.end")
    started.wait_steps(3)
    os.kill(owner_of(started), signal.SIGTERM)
    ended = started.wait_end()
    assert ended["phases"][0]["state"] == "stopped"
    assert "SIGTERM to the supervisor" in ended["why"]


def test_an_end_stays_an_end_where_the_last_words_were_cut_short(broken_at):
    started = broken_at("directory.Directory.close", count=2, between="ask")
    started.wait(lambda: started.plan_state.get("state") == "waiting")
    owner = started.plan_state["supervisor"]
    os.kill(owner["pid"], signal.SIGTERM)
    started.wait(lambda: not rundir.is_alive(owner), 20)
    state = started.plan_state
    assert (state["state"], state["phases"][1]["state"]) == ("ended", "later")
    assert len([e for e in started.events() if e["text"].startswith("phase0 completed")]) == 1


def test_a_request_that_kills_who_executes_it_is_refused_and_the_others_are_served(broken_at):
    harm = "given[0].args['text'] == 'poison' and ctypes.string_at(0)"
    started = broken_at("launch.Launch._do_note", harm)
    started.wait_steps(3)
    poisoned = started.ask("note", text="poison")
    assert (poisoned["ok"], "the supervisor failed at it" in poisoned["text"]) == (False, True)
    assert started.ask("note", text="food")["ok"]
    assert started.ask("stop")["ok"]
    assert started.wait_end()["phases"][0]["state"] == "stopped"


def test_open_alerts_go_on_in_the_next_process_and_are_cleared_there(begin):
    started = begin(
        phase("one", "member.py", 100_000), shell=STUB, nproc=2,
        watch={"stall_floor_s": 2, "startup_s": 60, "grace_s": GRACE_S},
    )  # fmt: skip
    started.wait_steps(3)
    rank, child = started.pids()[1], started.child()
    os.kill(rank, signal.SIGSTOP)

    def stall() -> list[str]:
        return [e["kind"] for e in started.events(0) if e.get("alert") == STALL]

    started.wait(stall)
    time.sleep(1.5)  # the next tick gives it to the owner
    os.kill(child, signal.SIGKILL)
    wait_replaced(started, child)
    started.wait_state("stalled")
    live = liveness.live_directory(started.state())
    told = rundir.read_json(live / rundir.LIVE_STATUS)["alerts"]
    assert STALL in [alert["alert"] for alert in told]
    assert (stall(), started.state()["stalls"]) == (["alert"], 1)
    os.kill(rank, signal.SIGCONT)
    started.wait(lambda: stall() == ["alert", "clear"])


def test_memory_that_the_kernel_freed_before_a_replacement_explains_the_end(begin, tmp_path):
    counters = tmp_path / "vmstat"
    counters.write_text("oom_kill 5\n")
    setup = "from console.sources import oom_counts; oom_counts.MOUNTS = os.devnull; "
    setup += f"oom_counts.VMSTAT = pathlib.Path({str(counters)!r})"
    shell = broken.shell(tmp_path, "launch.Launch.tick", "pass", setup)
    started = begin(phase("one", "member.py", 100_000), shell=shell, nproc=2)
    started.wait_steps(3)
    child = started.child()
    counters.write_text("oom_kill 6\n")
    os.kill(child, signal.SIGKILL)
    wait_replaced(started, child)
    os.kill(started.pids()[1], signal.SIGKILL)
    assert "the host ran out of memory (host-wide oom_kill 5 → 6)" in started.wait_end()["why"]


def test_a_reader_says_that_a_supervisor_without_a_working_process_is_silent(
    begin, tmp_path, monkeypatch
):
    monkeypatch.setattr(liveness, "SUPERVISOR_SILENT_S", 3.0)
    shell = broken.shell(tmp_path, "launch.Launch.tick", "pass", f"{WAITS} = (60.0,)")
    started = begin(phase("one", "member.py", 100_000), shell=shell)
    started.wait_steps(3)
    source = RunSource(started.path)

    def silent() -> list[str]:
        return [alert.text for alert in source.poll().alerts if alert.id == "supervisor-silent"]

    assert not silent()
    os.kill(started.child(), signal.SIGKILL)
    (text,) = started.wait(silent)
    owner = owner_of(started)
    assert text.startswith(f"the supervisor (pid {owner}) is alive but has written nothing ")
    os.kill(owner, signal.SIGTERM)
    assert started.wait_end()["phases"][0]["state"] == "stopped"
    assert not silent()


def test_what_a_child_said_last_is_taken_whatever_its_size():
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    owner = owner_module.Owner(lambda end, charge: 0)
    owner._attach(-1, Frames(ours))
    for name, size in (("small", 1), ("large", 120_000), ("small", 2)):
        content = json.dumps({"size": size, "pad": "x" * size})
        Frames(theirs).send(frames.KEEP, f"{name}\0{content}".encode())
    theirs.close()
    while owner._hear():
        pass
    kept = {name: json.loads(data)["size"] for name, data in owner._charge.kept.items()}
    assert kept == {"small": 2, "large": 120_000}


def test_a_signal_that_came_just_before_the_fork_is_obeyed_once():
    """The owner tells of each that it had not counted as told when it forked."""
    ours, _ = socket.socketpair()
    term, interrupt = int(signal.SIGTERM), int(signal.SIGINT)
    link = Link(Frames(ours), Charge(identity={}, asked=[term, interrupt], forwarded=1))
    assert link.charge.asked == [term]
