"""Faults that a run must survive."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from console import actions
from console.commands import control
from console.sources import process, stacks
from console.sources.run import RunSource
from tests.faults.scene import Seen, order, sentence_of, spray, verdict_of, watching
from tests.launches import CONSOLE, HANG_GUARD_S, ROOT, STUB, console, phase
from tests.terminal import Terminal
from trainers.contract import rundir
from trainers.contract.errors import ContractError

DEFAULT_PORTS = (29400, 29500)
WATCH = {"stall_floor_s": 2, "startup_s": 60, "grace_s": 2}
STILL_S = 4.5
"""Longer than the stall limit and the time until the supervisor's next poll together."""


HOSTILE = (
    b"\0" * 3000 + b"\n", b"\xff\xfe\x80\n", b"[1, 2]\n", b'"text"\n', b"{}\n", b"null\n",
    b"[" * 100_000 + b"\n", b'{"v": 1, "rank": 0, "msg": "progress", "step": NaN}\n',
    b'{"v": 1, "rank": 0, "msg": "progress", "step": 1e400, "attempt": 1}\n', b'{"v": 1, "ra\n',
)  # fmt: skip


def skipped_since(before: int) -> Seen:
    """Returns a function that looks for as many new skipped records as `HOSTILE` has."""
    return lambda state: (
        f"{state.skipped_records} records were skipped"
        if state.skipped_records >= before + len(HOSTILE) else ""
    )  # fmt: skip


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[Callable[[], None]]:
    """Yields a function that stops a process; afterwards, the process is resumed."""
    try:
        yield lambda: os.kill(pid, signal.SIGSTOP)
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.fixture
def run(launch):
    return launch(restart={"when": "never"}, watch=WATCH)


@pytest.fixture
def pids(scene, run):
    """The ranks of the run; after the test, checks that the same ranks make progress."""
    found = run.pids()
    yield found
    scene.goes_on(run, found)


@pytest.mark.fault("23")
def test_a_run_starts_where_the_default_ports_are_taken(scene, begin, orders):
    with contextlib.ExitStack() as stack:
        for port in DEFAULT_PORTS:  # another process may use a port, which has the same effect
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_server(("", port)))
        started = begin(phase("one", "obedient.py", 100_000, orders), watch=WATCH)
        started.wait_steps(5)
        scene.note(started.state()["state"])
        scene.stop(started)


@pytest.mark.fault("10")
def test_sigusr1_kills_nothing_neither_at_the_start_nor_later(scene, begin, orders):
    started = begin(phase("one", "obedient.py", 100_000, orders), watch=WATCH)
    started.wait(lambda: (started.run() / rundir.RUN).exists())
    over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        sprayed = pool.submit(spray, started, over)
        try:
            started.wait_steps(20)
        finally:
            over.set()
    sprayed.result()
    scene.goes_on(started, started.pids())
    scene.stop(started)


@pytest.mark.fault("12")
def test_a_run_outlives_the_terminals_that_launched_and_showed_it(scene, begin, orders):
    options = begin.options(phase("one", "obedient.py", 100_000, orders), watch=WATCH)
    words = [*CONSOLE, "--root", str(options.root), "launch", options.plan, "--wait"]
    with Terminal(words, ROOT, STUB) as launcher:
        launcher.wait(lambda _: list(options.root.glob("*/*/plan_state.json")))
        started = begin.adopt(next(options.root.glob("*/*")))
        started.wait_steps(5)
        launcher.hang_up()
    with watching(started.path) as screen:
        screen.hang_up()
        screen.wait_exit()
    scene.goes_on(started, started.pids())
    scene.stop(started)


@pytest.mark.fault("11", "console, mid-run")
def test_a_killed_console_is_opened_again_on_the_same_run(scene, run, pids):
    with watching(run.path) as screen:
        os.kill(screen.pid, signal.SIGKILL)
        assert screen.wait_exit() == -signal.SIGKILL
    with watching(run.path) as screen:
        screen.wait(lambda text: text.startswith(f"tested {run.path.name[9:13]} one"))
    scene.note("the same run")


@pytest.mark.fault("4")
def test_a_rank_that_sleeps_in_forward_is_named_with_phase_and_step(scene, run, pids, orders):
    words = scene.inject(
        run, lambda: order(orders, 1, f"sleep {4 * STILL_S}"), verdict_of(), verdict_of("sleep")
    )
    assert "rank 1 has been stalled in forward of step" in words
    assert "rank 0 waits in backward" in words


@pytest.mark.fault("5")
def test_a_rank_that_holds_the_gil_in_c_is_named_and_the_console_answers(scene, run, pids, orders):
    words = scene.inject(
        run, lambda: order(orders, 1, f"gil {5 * STILL_S}"), verdict_of(), verdict_of("native")
    )
    assert "rank 1 has been stalled in forward of step" in words
    answer = run.ask("dump")
    assert answer["ok"], answer
    assert console("status", run.path)[0] == 1
    assert re.search(r"rank 1 dumped: \S+ \(native code holds the GIL", answer["detail"][1])
    held = run.wait(lambda: stacks.latest(run.run(), [1]).get(1)).threads
    assert [thread.name for thread in held] == ["main"]
    assert "hold_the_gil" in [frame.function for frame in held[0].frames]


@pytest.mark.fault("8")
def test_a_stopped_rank_is_offered_cont_and_never_killed(scene, run, pids):
    with stopped(pids[1]) as stop:
        words = scene.inject(run, stop, verdict_of("stopped"))
    assert f"kill -CONT {pids[1]} resumes it" in words


@pytest.mark.fault("8", "torchrun")
def test_a_stopped_torchrun_is_said(scene, run, pids):
    agent = run.state()["torchrun"]["pid"]
    with stopped(agent) as stop:
        words = scene.inject(run, stop, sentence_of("torchrun-stopped"))
    assert words.startswith(f"torchrun (pid {agent}) is stopped (SIGSTOP")


@pytest.mark.fault("b")
def test_a_stopped_supervisor_is_said_and_its_working_process_answers(scene, run, pids):
    supervisor = run.plan_state["supervisor"]["pid"]
    with stopped(supervisor) as stop:
        words = scene.inject(run, stop, sentence_of("supervisor-stopped"))
        scene.goes_on(run, pids)
        assert run.ask("note", text="while it was stopped")["ok"]
        assert RunSource(run.path).poll().armed.endswith("no restart (the supervisor is stopped)")
    assert words.startswith(f"supervisor (pid {supervisor}) is stopped (SIGSTOP")
    assert f"kill -CONT {supervisor}" in words


@pytest.mark.fault("w")
def test_a_stopped_supervisor_and_working_process_are_said_and_answer_when_they_go_on(
    scene, run, pids
):
    child = run.child()
    supervisor = run.plan_state["supervisor"]["pid"]
    with contextlib.ExitStack() as stack:
        words = scene.inject(
            run, lambda: stack.enter_context(run.stopped()), sentence_of("working-process-stopped")
        )
        scene.goes_on(run, pids)
        asked = actions.send(run.path, "note", {"text": "while it was stopped"}, "tester")
        assert actions.answer(run.path, asked, 0.5) is None
        assert RunSource(run.path).poll().armed == "none (the supervisor is stopped)"
        alerts = {alert.id: alert.text for alert in RunSource(run.path).poll().alerts}
        assert f"kill -CONT {supervisor}" in alerts["supervisor-stopped"]
        with pytest.raises(ContractError, match=r"no answer to dump within .*; see .* status"):
            control.do(argparse.Namespace(
                run=str(run.path), root=run.path.parent, action="dump", args=[], timeout=0.5,
                json=False,
            ))  # fmt: skip
    assert actions.answer(run.path, asked, HANG_GUARD_S)["ok"]
    assert words.startswith(f"working process (pid {child}) is stopped (SIGSTOP")


@pytest.mark.fault("w")
def test_a_working_process_that_is_killed_is_replaced_and_the_ranks_go_on(scene, run, pids):
    child = run.child()
    words = scene.inject(
        run, lambda: os.kill(child, signal.SIGKILL), sentence_of("supervisor-replaced")
    )  # fmt: skip
    assert "the supervisor's working process was killed (SIGKILL)" in words
    assert run.ask("note", text="is served")["ok"]


@pytest.mark.slow
@pytest.mark.fault("25")
@pytest.mark.parametrize("seconds", [-3600, 86_400])
def test_a_wall_clock_that_jumps_is_no_stall_and_no_negative_time(run, pids, orders, seconds):
    def told() -> int:
        """Counts the events except `clear` and those about the clock."""
        events = [event for event in run.events(0) if event["kind"] != "clear"]
        return sum(event.get("alert") != "clock" for event in events)

    events = told()
    order(orders, 0, f"clock {seconds}")
    try:
        source, end = RunSource(run.path), time.monotonic() + STILL_S
        while time.monotonic() < end:
            state = source.poll()
            assert (state.state, state.verdict) == ("running", None)
            assert (state.eta_s or 0) >= 0
            assert all((rank.age_s or 0) >= 0 for rank in state.ranks)
            time.sleep(0.1)
    finally:
        order(orders, 0, "clock 0")
    assert told() == events


LONGEST_LINE = 100 << 20
PEAK = """
import sys
from console import cli
cli.main(["status", sys.argv[1]])
print(next(line for line in open("/proc/self/status") if "VmHWM" in line), file=sys.stderr)
"""


@pytest.mark.fault("21")
def test_garbage_among_the_records_is_counted_and_costs_bounded_memory(scene, run, pids):
    supervisor = run.plan_state["supervisor"]["pid"]
    mine = rundir.heartbeat(run.run(), 0)
    fifo, folder, long = (rundir.heartbeat(run.run(), rank) for rank in (7, 8, 9))
    before = RunSource(run.path).poll().skipped_records

    def spoil() -> None:
        os.mkfifo(fifo)
        folder.mkdir()
        with long.open("wb") as stream:
            for _ in range(LONGEST_LINE >> 20):
                stream.write(b"x" * (1 << 20))
        with mine.open("ab") as stream:
            for line in HOSTILE:
                stream.write(line)
        os.truncate(rundir.heartbeat(run.run(), 1), 0)

    try:
        scene.inject(run, spoil, skipped_since(before))
        done = subprocess.run(
            [sys.executable, "-c", PEAK, str(run.path)], cwd=ROOT, capture_output=True, text=True
        )
        assert int(done.stderr.split()[-2]) < 100 << 10, done.stderr
        assert process.Meter().sample(supervisor).rss_mib < 48
    finally:
        fifo.unlink()
        folder.rmdir()
        long.unlink()


@pytest.mark.fault("21", "deleted, replaced")
def test_records_that_are_deleted_or_replaced_disturb_nobody(scene, run, pids, tmp_path):
    mine, aside = rundir.heartbeat(run.run(), 1), tmp_path / "aside"
    source = RunSource(run.path)
    before = source.poll().skipped_records
    mine.rename(aside)
    run.wait(lambda: source.poll().state == "running")
    link = tmp_path / "link"
    link.symlink_to("/etc/passwd")
    link.replace(mine)  # the rank may have created its file again
    assert source.poll().skipped_records == before
    mine.unlink()
    scene.inject(run, lambda: mine.write_bytes(b"".join(HOSTILE)), skipped_since(before))
    shutil.move(aside, mine)


ESCAPES = "\x1b]52;c;cHduZWQ=\x07\x1b]0;pwned\x07\x1b[2J\x1b[31m[red]boo[/red]\u202e marker\x9b6n"


@pytest.mark.fault("22")
def test_what_a_terminal_would_obey_is_shown_and_not_obeyed(scene, run, pids):
    log = rundir.rank_log(run.run(), 1, 0)
    with log.open("a") as stream:
        stream.write(f"{ESCAPES}\n")
    sent = actions.send(run.path, "note", {"text": ESCAPES}, ESCAPES)
    assert actions.answer(run.path, sent, HANG_GUARD_S)["ok"]
    with watching(run.path) as screen:
        screen.press("4")
        shown = screen.wait("[red]boo[/red] marker")
    assert "pwned" not in screen.screen.title + screen.screen.icon_name
    assert b"cHduZWQ" not in screen.raw
    assert "cHdu" not in shown
    code, out, _ = console("logs", run.path)
    assert code == 0
    assert not set(out) & set("\x1b\x07\x9b\u202e")
    scene.note("shown as plain text")


@pytest.mark.fault("9")
def test_ranks_that_torchrun_left_are_found_and_go_on(scene, run, pids):
    agent = run.state()["torchrun"]["pid"]
    words = scene.inject(run, lambda: os.kill(agent, signal.SIGKILL), sentence_of("torchrun-gone"))
    assert "ranks 0-1 still run" in words


def halts_answered(run) -> list[dict]:
    events = run.events(0) + run.events()
    return [each for each in events if (each["kind"], each.get("action")) == ("answer", "halt")]


@pytest.mark.fault("13")
def test_of_two_consoles_that_both_halt_both_are_answered_and_it_is_done_once(scene, run):
    with watching(run.path) as one, watching(run.path) as two:
        for screen in (one, two):
            screen.press("H")
            screen.wait("Halt this run")
        pids = run.pids().values()
        for pid in pids:  # or else the run may end before the second request
            os.kill(pid, signal.SIGSTOP)
        for screen in (one, two):
            os.write(screen.fd, b"y")
        found = run.wait(lambda: answers if len(answers := halts_answered(run)) == 2 else None)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        for screen in (one, two):
            screen.wait("HALTED")
    assert all(event["ok"] for event in found)
    assert sum(".HALT is written" in event["text"] for event in found) == 1
    run.wait_end()
    scene.note(scene.ended(run, "halted", 4))
    assert [worker["exit"]["code"] for worker in run.state()["workers"]] == [0, 0]
