"""The owner of a launch replaces its child, which is the working process.

In most tests, the child fails in an observer or another method, or gets a signal.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import threading
from pathlib import Path

import pytest

from console import actions
from console.cli import main
from console.model import STALL
from console.sources import liveness, process
from console.sources.run import RunSource
from console.supervisor import link as links
from console.supervisor import owner as owner_module
from console.supervisor.alerts import DROPPED
from console.supervisor.link import Channel
from console.supervisor.run import REPLACED
from tests import broken
from tests.launches import HANG_GUARD_S, STUB, Started, phase
from trainers.contract import rundir

SEGFAULT, HANG = "ctypes.string_at(0)", "time.sleep(600)"
ONCE, ALWAYS = "len(begun) == 3", "len(begun) >= 3"
GRACE_S = 2.0
CASES = [
    ("files", "run_files.Files.poll", SEGFAULT, ALWAYS),
    ("supervisor.json", "ends.Ends.documents", SEGFAULT, ALWAYS),
    ("processes and pulses", "sampling.Sampler.sample", SEGFAULT, ONCE),
    ("watch rules", "monitor.Monitor.poll", HANG, ALWAYS),
    ("records", "attempt.Attempt._take_records", HANG, ONCE),
]


@pytest.fixture(scope="module")
def launched(begin, tmp_path_factory):
    """A launch for each case, with the file that lets its rank end; the launches run together."""
    begun = {}
    for name, method, harm, when in CASES:
        silent_s = 6 if harm == HANG else owner_module.SILENT_S
        setup = f"owners.SILENT_S, owners.WAITS_S = {silent_s}, (0.0, 0.3, 0.5, 5.0)"
        folder = tmp_path_factory.mktemp("broken")
        shell = broken.shell(folder, method, f"if {when}: {harm}", setup)
        go, gates = folder / "go", {"loss_finite": True}
        one = phase("one", "member.py", 5, "until", go, nproc=1, gates=gates)
        begun[name] = begin(one, shell=shell, watch={"grace_s": GRACE_S}), go
    return begun


@pytest.mark.parametrize(("name", "method", "harm", "when"), CASES)
def test_a_working_process_that_ends_or_hangs_costs_no_rank(launched, name, method, harm, when):
    started, go = launched[name]
    text = started.wait(lambda: [e for e in started.alerts(REPLACED) if e["kind"] == "alert"])
    text = text[0]["text"]
    if when == ALWAYS:
        off = started.wait(lambda: started.alerts(f"observer-{name.replace(' ', '-')}"))
        assert "switched off" in off[0]["text"]
    go.touch()
    ended = started.wait_end()
    assert started.state()["state"] == "completed", ended
    how = "was killed (SIGSEGV)" if harm == SEGFAULT else "was killed after"
    assert f"the supervisor's working process {how}" in text
    assert name in text.partition(";")[0]
    assert "supervisor.log" not in text  # the log has nothing on a signal or a silence
    assert not process.with_token(started.token())


def test_an_observer_that_is_switched_off_is_reported_in_each_attempt_and_phase(begin, tmp_path):
    setup = "owners.WAITS_S = (0.0, 0.3, 0.5, 5.0)"
    shell = broken.shell(tmp_path, "ends.Ends.documents", f"if {ALWAYS}: {SEGFAULT}", setup)
    go = tmp_path / "go"
    phases = [phase(name, "member.py", 5, "until", go, nproc=1) for name in ("one", "two")]
    started = begin(*phases, shell=shell, restart={"when": "crash", "backoff_s": 0})
    off = "observer-supervisor.json"
    started.wait(lambda: started.alerts(off) and "switched off" in started.alerts(off)[0]["text"])
    first, *_ = rundir.heartbeat(started.run(), 0).read_text().splitlines()
    os.kill(json.loads(first)["pid"], signal.SIGKILL)
    started.wait(lambda: started.alerts(off)[-1]["attempt"] == 2)
    go.touch()
    assert started.wait_end()["why"] == "all phases are done"
    (raised,) = [event for event in started.alerts(off, 1) if event["kind"] == "alert"]
    assert "switched off" in raised["text"]
    assert not started.alerts(DROPPED, 1)


def patient(folder) -> dict[str, str]:
    """Returns variables with which a supervisor replaces a stopped child after ten minutes."""
    return broken.shell(folder, "launch.Launch.tick", "pass", "owners.SILENT_S = 600.0")


@pytest.fixture
def running(begin, tmp_path):
    started = begin(
        phase("one", "member.py", 100_000), shell=patient(tmp_path), nproc=2,
        watch={"grace_s": GRACE_S},
    )  # fmt: skip
    started.wait_steps(3)
    return started


def wait_replaced(started: Started, former: int) -> None:
    """Waits until the child after `former` has written its documents."""
    started.wait(
        lambda: (pid := started.child()) != former and started.state()["child"]["pid"] == pid
        and started.alerts(REPLACED)
    )  # fmt: skip


def kill_child(started: Started) -> None:
    child = started.child()
    os.kill(child, signal.SIGKILL)
    wait_replaced(started, child)


def test_requests_are_executed_after_the_working_process_was_killed_twice(running):
    pids = running.pids()
    for _ in range(2):
        kill_child(running)
    assert running.ask("note", text="still works")["ok"]
    assert running.state()["state"] == "running"
    assert running.ask("stop")["ok"]
    running.wait_gone()
    assert running.wait_end()["phases"][0]["state"] == "stopped"
    assert running.pids() == pids


@pytest.mark.parametrize("state", ["crashed", "completed"])
def test_the_exits_of_processes_that_end_while_nobody_works_are_known(begin, tmp_path, state):
    """The owner reaps torchrun and orphaned ranks, and ranks that complete record their end."""
    one = phase("one", "member.py", 5, "until", tmp_path / "go", gates={"loss_finite": True})
    started = begin(one, shell=patient(tmp_path), nproc=2)
    started.wait_steps(3)
    child = started.child()
    os.kill(child, signal.SIGSTOP)
    if state == "crashed":
        os.kill(started.pids()[1], signal.SIGKILL)
    else:
        (tmp_path / "go").touch()
    started.wait_gone()
    os.kill(child, signal.SIGKILL)
    ended = started.wait_end()
    assert ended["phases"][0]["state"] == state
    reason = "rank 1 was killed by SIGKILL" if state == "crashed" else "all phases are done"
    assert reason in ended["why"]


def test_documents_that_ranks_overwrote_do_not_reach_the_next_process(running):
    """The next child starts with the documents that its owner stores."""
    child = running.child()
    os.kill(child, signal.SIGSTOP)
    for path in (running.run() / rundir.RUN, running.run() / rundir.SUPERVISOR,
                 running.path / rundir.PLAN_STATE, running.path / rundir.PLAN):  # fmt: skip
        path.write_text("[garbage")
    os.kill(child, signal.SIGKILL)
    for document in (lambda: running.state(), lambda: running.plan_state):
        running.wait(lambda read=document: read().get("state") == "running")
    running.ask("stop")
    assert running.wait_end()["phases"][0]["state"] == "stopped"


def test_one_torchrun_runs_after_an_adoption_and_term_ends_it_while_the_child_is_stopped(running):
    child, torchrun, pids = running.child(), running.state()["torchrun"], running.pids()
    running.kill_supervisor()
    running.wait(lambda: process.state(child) in (process.GONE, "Z"))
    assert set(pids.values()) <= set(process.with_token(running.token()))
    actions.adopt(running.path)
    kill_child(running)
    assert running.ask("note", text="still works")["ok"]
    assert (running.state()["torchrun"], running.pids()) == (torchrun, pids)
    assert running.state()["attempt"] == 1
    child = running.child()
    os.kill(child, signal.SIGSTOP)
    os.kill(running.owner["pid"], signal.SIGTERM)
    running.wait_gone()
    assert process.state(child) == "T"
    os.kill(child, signal.SIGKILL)
    assert "SIGTERM to the supervisor" in running.wait_end()["why"]


FIRST_TIME = "mark.exists() or (mark.touch(), ctypes.string_at(0))"


@pytest.fixture
def broken_at(begin, tmp_path):
    """Starts a launch whose working process dies in one method."""

    def start(method, harm=FIRST_TIME, count=1, **plan):
        mark = f"pathlib.Path({str(tmp_path / 'mark')!r})"
        setup = f"owners.WAITS_S, mark = (0.0, 0.3, 0.5, 2.0), {mark}"
        shell = broken.shell(tmp_path, method, harm, setup)
        steps = 100_000 if count == 1 else 3
        phases = [phase(f"phase{n}", "member.py", steps, nproc=1) for n in range(count)]
        return begin(*phases, shell=shell, watch={"grace_s": GRACE_S}, **plan)

    return start


def test_a_term_is_handled_by_the_next_child_where_the_first_dies_of_it(broken_at):
    started = broken_at("launch.Launch.end")
    started.wait_steps(3)
    os.kill(started.owner["pid"], signal.SIGTERM)
    ended = started.wait_end()
    assert ended["phases"][0]["state"] == "stopped"
    assert "SIGTERM to the supervisor" in ended["why"]


def test_an_end_stays_an_end_where_the_child_dies_in_its_last_writes(broken_at):
    started = broken_at("rundir_io.Directory.close", count=2, between="ask")
    started.wait(lambda: started.plan_state.get("state") == "waiting")
    owner = started.owner
    os.kill(owner["pid"], signal.SIGTERM)
    started.wait(lambda: not rundir.is_alive(owner))
    state = started.plan_state
    assert (state["state"], state["phases"][1]["state"]) == ("ended", "later")
    assert len([e for e in started.events() if e["text"].startswith("phase0 completed")]) == 1


@pytest.mark.parametrize("index", [0, 1])
def test_the_last_documents_of_a_run_are_written_where_the_child_dies_before(broken_at, index):
    """The child dies in the thread of the run directory; the owner has the documents."""
    last = f"given[0].parent.name.startswith('{index}-') and given[0].name == 'supervisor.json'"
    ended = "self._documents[given[0]][1]['state'] == 'completed'"
    started = broken_at(
        "rundir_io.Directory._write_document",
        f"{last} and {ended} and not mark.exists() and (time.sleep(1), {FIRST_TIME})", count=2,
    )  # fmt: skip
    assert started.wait_end()["why"] == "all phases are done"
    started.wait(lambda: not rundir.is_alive(started.owner))
    assert [started.state(run)["state"] for run in (0, 1)] == ["completed"] * 2
    assert all((started.run(run) / rundir.GATES).exists() for run in (0, 1))
    assert (started.path / "report.md").exists()
    assert main(["check", str(started.path)]) == 0


def test_a_request_that_kills_the_child_is_rejected_and_the_others_are_executed(broken_at):
    harm = "given[0].args['text'] == 'poison' and ctypes.string_at(0)"
    started = broken_at("launch.Launch._do_note", harm)
    started.wait_steps(3)
    poisoned = started.ask("note", text="poison")
    assert not poisoned["ok"]
    assert "the request failed with an error" in poisoned["text"]
    assert started.ask("note", text="food")["ok"]
    assert started.ask("stop")["ok"]
    assert started.wait_end()["phases"][0]["state"] == "stopped"


def test_open_alerts_go_on_in_the_next_process_and_are_cleared_there(begin):
    started = begin(
        phase("one", "member.py", 100_000), shell=STUB, nproc=2,
        watch={"stall_floor_s": 30, "startup_s": 60, "grace_s": GRACE_S},
    )  # fmt: skip
    started.wait_steps(3)
    rank, child = started.pids()[1], started.child()
    os.kill(rank, signal.SIGSTOP)

    def stall() -> list[str]:
        return [event["kind"] for event in started.alerts(STALL)]

    started.wait_state("stalled")
    started.wait(lambda: started.state().get("stalls") == 1 and stall())
    os.kill(child, signal.SIGKILL)
    wait_replaced(started, child)
    started.wait_state("stalled")
    live = liveness.live_directory(started.state())

    def open_alerts() -> list[str]:
        return [alert["alert"] for alert in rundir.read_json(live / rundir.LIVE_STATUS)["alerts"]]

    started.wait(lambda: {REPLACED, STALL} <= {*open_alerts()})
    assert (stall(), started.state()["stalls"]) == (["alert"], 1)
    os.kill(rank, signal.SIGCONT)
    started.wait(lambda: stall() == ["alert", "clear"])


def test_a_term_ends_the_ranks_while_no_child_can_be_started(running):
    owner, child = running.owner["pid"], running.child()
    soft, hard = resource.prlimit(owner, resource.RLIMIT_NOFILE)
    resource.prlimit(owner, resource.RLIMIT_NOFILE, (4, hard))
    os.kill(child, signal.SIGKILL)
    running.wait(lambda: process.state(child) in (process.GONE, "Z"))
    os.kill(owner, signal.SIGTERM)
    running.wait_gone()
    resource.prlimit(owner, resource.RLIMIT_NOFILE, (soft, hard))
    ended = running.wait_end()
    assert ended["phases"][0]["state"] == "stopped"
    assert "SIGTERM to the supervisor" in ended["why"]


def test_a_reader_says_that_a_supervisor_without_a_working_process_is_silent(
    begin, tmp_path, monkeypatch
):
    monkeypatch.setattr(liveness, "SUPERVISOR_SILENT_S", 3.0)
    shell = broken.shell(tmp_path, "launch.Launch.tick", "pass", "owners.WAITS_S = (60.0,)")
    started = begin(phase("one", "member.py", 100_000), shell=shell)
    started.wait_steps(3)
    source = RunSource(started.path)

    def silent() -> list[str]:
        return [alert.text for alert in source.poll().alerts if alert.id == "supervisor-silent"]

    started.wait(lambda: not silent())
    child, owner = started.child(), started.owner["pid"]
    os.kill(child, signal.SIGKILL)
    (text,) = started.wait(silent)
    assert f"the supervisor (pid {owner})" in text
    assert f"its working process (pid {child}) has ended, see supervisor.log" in text
    assert text.endswith(f"kill -TERM {owner} stops them")
    os.kill(owner, signal.SIGTERM)
    assert started.wait_end()["phases"][0]["state"] == "stopped"
    started.wait(lambda: not silent())


def test_the_last_messages_of_a_child_are_handled_whatever_their_size():
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    owner = owner_module.Owner(lambda channel, state: 0)
    owner._attach(-1, Channel(ours))
    for name, size in (("small", 1), ("large", 120_000), ("small", 2)):
        content = json.dumps({"size": size, "pad": "x" * size})
        Channel(theirs).send(links.STORE, f"{name}\0{content}".encode())
    theirs.close()
    while owner._receive():
        pass
    sizes = {name: json.loads(data)["size"] for name, data in owner._state.documents.items()}
    assert sizes == {"small": 2, "large": 120_000}


def test_a_large_document_does_not_wait_for_an_owner_that_is_stopped():
    """While the owner is stopped, the child still executes requests and watches the ranks."""
    ours, theirs = socket.socketpair()
    link, contents = links.Link(Channel(ours), links.ChildState(identity={})), []

    def store() -> None:
        for number in range(3):
            contents.append({"number": number, "pad": "x" * 400_000})
            link.store(Path(f"document{number}"), contents[-1])

    storing = threading.Thread(target=store, daemon=True)
    storing.start()
    storing.join(HANG_GUARD_S)
    assert not storing.is_alive()
    theirs.setblocking(False)
    owner, messages = Channel(theirs), []
    while len(messages) < 3:
        link.send_alive()
        messages += [each for each in owner.receive() if each.kind == links.STORE]
    assert [json.loads(each.data.partition(b"\0")[2]) for each in messages] == contents


def test_the_end_of_a_child_reaches_the_owner_behind_a_large_document():
    """The owner replaces a child that ends without the message CLOSING."""
    ours, theirs = socket.socketpair()
    link = links.Link(Channel(ours), links.ChildState(identity={}))
    link.store(Path("snapshot.json"), {"pad": "x" * 1_000_000})

    def end() -> None:
        link.closing()
        ours.close()

    child = threading.Thread(target=end, daemon=True)
    child.start()
    child.join(0.1)  # the owner reads later
    owner, kinds = Channel(theirs), []
    while links.CLOSING not in kinds:
        kinds += [each.kind for each in owner.receive()]
    assert kinds == [links.STORE, links.CLOSING]


def test_the_owner_reports_a_term_only_if_it_has_sent_one():
    """The owner has no processes yet. After a false report, adopted ranks would get no TERM."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    owner = owner_module.Owner(lambda channel, state: 0)
    owner._attach(-1, Channel(ours))
    owner.add_signal(signal.SIGTERM)
    owner._forward_signals()
    owner._handle_at = 0.0
    owner._enforce_deadlines()
    assert [message.kind for message in Channel(theirs).receive()] == [links.SIGNAL]
    assert not owner._state.term_sent


def test_a_phase_whose_start_kills_the_child_is_not_skipped(broken_at):
    """The next child executes the request `proceed` again, but only for this phase."""
    once = "len(begun) == 2 and not mark.exists() and (mark.touch(), ctypes.string_at(0))"
    started = broken_at("run.Run._new_record", once, count=3, between="ask")
    started.wait(lambda: started.plan_state.get("state") == "waiting")
    started.ask("proceed")
    ended = started.wait(lambda: (s := started.plan_state)["state"] in ("waiting", "ended") and s)
    assert [each["state"] for each in ended["phases"]] == ["completed", "completed", "next"]
    started.ask("halt")
