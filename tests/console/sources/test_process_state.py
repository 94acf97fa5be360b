"""The kernel's evidence about the state of a process: stopped, traced, frozen, ended, busy."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from console.sources import kernel_evidence as kernel
from console.sources.kernel_evidence import collect, cpu_share
from tests.console.sources import directory
from tests.console.sources.waiting_processes import asleep, until, waiting
from tests.launches import HANG_GUARD_S, wait_for
from trainers.contract import rundir

NOBODY = directory.DEAD["pid"]


def test_a_stopped_process_waits_on_nothing(start):
    child = asleep(start)
    child.send_signal(signal.SIGSTOP)
    until(child.pid, lambda found: (found.main, found.state) == (kernel.NOTHING, "T"))
    child.send_signal(signal.SIGCONT)
    assert waiting(child, "timer") == "a timer"  # in the system call restart_syscall


def test_a_tracer_is_named(start):
    child = asleep(start)
    program = (
        "import ctypes, sys, time; print(ctypes.CDLL(None).ptrace(16, int(sys.argv[1]), 0, 0))"
    )
    tracer = start(f"{program}; sys.stdout.flush(); time.sleep(600)", child.pid)
    if tracer.stdout.readline() != b"0\n":
        pytest.skip("ptrace is not permitted here")
    found = until(child.pid, lambda found: found.state == "t")
    assert found.tracer == (tracer.pid, collect(tracer.pid).threads[0].name)


def freezer() -> tuple[Path, str, str, str] | None:
    """Yields new cgroups, each with the file that freezes it, and the two values of this file."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, top, kind, options, *_ = line.split()
        folder = Path(top) / f"nsa-test-{os.getpid()}"
        files = {"cgroup2": ("cgroup.freeze", "1", "0")}
        if kind == "cgroup" and "freezer" in options.split(","):
            files["cgroup"] = ("freezer.state", "FROZEN", "THAWED")
        if kind in files:
            try:
                folder.mkdir()
            except OSError:
                continue
            yield folder, *files[kind]


def test_a_frozen_cgroup_is_seen_also_from_a_cgroup_inside(start):
    found = list(freezer())
    if not found:
        pytest.skip("no cgroup can be made here")
    for folder, name, frozen, thawed in found:
        inner = folder / "inner"
        inner.mkdir()
        child = start("import time; time.sleep(600)")
        try:
            (inner / "cgroup.procs").write_text(str(child.pid))
            assert not until(child.pid, lambda found: found.main.kind == "timer").frozen
            (folder / name).write_text(frozen)
            until(child.pid, lambda found: found.frozen and found.main == kernel.NOTHING)
            (folder / name).write_text(thawed)
            until(child.pid, lambda found: not found.frozen)
        finally:
            (folder / name).write_text(thawed)
            child.kill()
            child.wait()
            inner.rmdir()
            folder.rmdir()


def test_a_zombie_a_gone_process_and_a_reused_pid(start):
    child = asleep(start)
    ticks = rundir.start_ticks(child.pid)
    assert collect(child.pid, ticks).state == "S"
    assert collect(child.pid, ticks + 1) is None
    os.kill(child.pid, signal.SIGKILL)
    zombie = until(child.pid, lambda found: (found.main, found.state) == (kernel.NOTHING, "Z"))
    parent = collect(os.getpid())
    assert "Z" in {each.state for each in parent.children if each.pid == child.pid}
    child.wait()
    gone = collect(child.pid, ticks)
    assert (gone.state, gone.threads, gone.main) == ("gone", (), kernel.NOTHING)
    assert cpu_share(zombie, gone) is None
    assert collect(NOBODY).state == "gone"
    assert [collect(pid) for pid in (0, -1, -NOBODY)] == [None] * 3


def test_a_busy_loop_uses_about_one_core(start):
    child = start("while True: pass")
    before = until(child.pid, lambda found: found.cpu_ticks > 0)
    # Two seconds, because this process may wait for a core between the reads of clock and ticks.
    after = until(child.pid, lambda found: found.cpu_ticks >= before.cpu_ticks + 200)
    assert 0 < cpu_share(before, after) < 1.5
    assert cpu_share(after, before) is None
    assert cpu_share(before, replace(after, pid=1)) is None
    assert cpu_share(before, replace(before, mono=before.mono + 1)) == 0


def test_threads_have_names_and_the_main_thread_is_first(start):
    program = (
        "import threading, time\n"
        "def work(name):\n    open('/proc/thread-self/comm', 'wb').write(name); time.sleep(600)\n"
        "names = [b'loader', b'a) R 1 (\\n2', b'\\x1b[31mred\\xff', *[b'n'] * 80]\n"
        "[threading.Thread(target=work, args=(name,)).start() for name in names]\n"
        "print(flush=True); threading.Event().wait()"
    )
    child = start(program)
    assert child.stdout.readline()
    wanted = {"loader", "red�", "a) R 1 ("}
    found = until(child.pid, lambda found: wanted <= {each.name[:8] for each in found.threads})
    assert not any("\n" in each.name or "\x1b" in each.name for each in found.threads)
    assert found.threads[0].tid == child.pid
    assert len(found.threads) == kernel.MAX_THREADS
    assert {each.state for each in found.threads} <= {"S", "R", "D"}
    until(child.pid, lambda found: {t.wchan for t in found.threads[1:4]} == {"hrtimer_nanosleep"})


def test_a_process_of_another_user_is_read_as_far_as_the_kernel_permits(start):
    if os.geteuid():
        pytest.skip("only root can become another user")
    child = asleep(start)
    root = Path(kernel.__file__).parents[2]
    program = (
        f"import os, sys; sys.path.insert(0, {str(root)!r})\n"
        "from console.sources import kernel_evidence as k\n"
        "os.setgid(65534); os.setuid(65534); print(k.collect(int(sys.argv[1])))"
    )
    reader = start(program, child.pid)
    shown = reader.communicate(timeout=HANG_GUARD_S)[0].decode()
    assert "state='S'" in shown
    assert "wchan=''" in shown
    assert "kind='none'" in shown


SO_ATTACH_FILTER = 26


def test_data_that_nobody_acknowledges_is_told_from_a_peer_that_does_not_read():
    """At one peer, the kernel drops every packet that arrives; the other peer reads nothing."""
    server = socket.create_server(("127.0.0.1", 0))
    lost, full = socket.socket(), socket.socket()
    for end in (lost, full):
        end.connect(server.getsockname())
    peers = [server.accept()[0], server.accept()[0]]
    instruction = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
    drop_all = struct.pack("HL", 1, ctypes.addressof(instruction))
    peers[0].setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, drop_all)
    lost.send(b"x")
    full.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while full.send(bytes(1 << 16)):
            pass
    try:
        ends = tuple(f"127.0.0.1:{end.getsockname()[1]}" for end in (lost, peers[0]))

        def unacked() -> list[tuple[str, str]]:
            found = collect(os.getpid()).connections
            return [(each.here, each.peer) for each in found if each.is_unacked]

        wait_for(lambda: unacked() == [ends], told=unacked)
        tables: dict[str, str] = {}  # read once for all processes of a network namespace
        assert collect(os.getpid(), None, tables).connections
        assert not collect(os.getpid(), None, dict.fromkeys(tables, "")).connections
    finally:
        for each in (server, lost, full, *peers):
            each.close()
