"""The kernel's evidence about processes that wait: the object of the wait, in words."""

from __future__ import annotations

import fcntl
import os
import socket
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.sources import descriptors, procfs
from console.sources import kernel_evidence as kernel
from console.sources.descriptors import NOTHING, BlockedOn
from console.sources.kernel_evidence import collect
from tests.console.sources import directory
from tests.console.sources.waiting_processes import until, waiting
from trainers.contract import rundir

ME = f"held by pid {os.getpid()} ("


@pytest.mark.parametrize(
    ("program", "kind", "text"),
    [
        ("await asyncio.sleep(600)", "timer", "a timer of its event loop"),
        ("files = [open('/dev/null') for _ in range(100)]; await asyncio.sleep(600)", "timer",
         "a timer of its event loop"),
        ("await asyncio.Event().wait()", "lock",
         "an event of its event loop, which has no timer"),
        ("await (await asyncio.create_subprocess_exec('sleep', '600')).wait()", "child",
         "(sleep, sleeping)"),
        ("r, w = await asyncio.open_connection('127.0.0.1', int(sys.argv[1])); await r.read()",
         "network", "a socket to 127.0.0.1:"),
    ],
)  # fmt: skip
def test_the_wake_up_of_an_event_loop_is_not_what_it_waits_for(start, program, kind, text):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        child = start(
            f"import asyncio, sys\nasync def main(): {program}\nasyncio.run(main())", port
        )
        waiting(child, kind, text)


def test_one_socket_of_an_epoll_with_many_is_not_named(start):
    """The kernel lists the 200 descriptors sorted by socket, in more than 4 KiB."""
    child = start(
        "import os, select, socket\nepoll = select.epoll()\n"
        "for one in (socket.socket(type=socket.SOCK_DGRAM) for _ in range(2)):\n"
        "    for _ in range(100): epoll.register(os.dup(one.fileno()), select.EPOLLIN)\n"
        "print(flush=True)\nepoll.poll()"
    )
    assert child.stdout.readline()
    assert until(child.pid, lambda found: found.state == "S").main == NOTHING


@pytest.mark.parametrize(("sets", "is_full"), [("[r], [], []", False), ("[], [w], []", True)])
def test_the_highest_descriptor_of_a_select_is_named_but_not_surely(start, sets, is_full):
    fill = "os.set_blocking(w, False); os.write(w, bytes(2**20))"
    child = start(
        f"import os, select; r, w = os.pipe(); {fill if is_full else ''}\nselect.select({sets})"
    )
    found = until(child.pid, lambda found: found.main.kind == "pipe").main
    assert found.text == f"a pipe that is {'full' if is_full else 'empty'}"
    assert found.unsure


def test_a_library_that_asks_again_for_a_lock_is_not_merely_asleep(start, tmp_path):
    held = tmp_path / "runs.db"
    with sqlite3.connect(held, isolation_level=None) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        child = start(
            "import sqlite3, sys; c = sqlite3.connect(sys.argv[1], 600, isolation_level=None)\n"
            "c.execute('BEGIN EXCLUSIVE')", held,
        )  # fmt: skip
        found = until(child.pid, lambda found: found.main.kind == "lock").main
        assert found.text.startswith(f"a timer, while pid {os.getpid()} (")
        assert found.text.endswith(f") holds a lock of {held}")
        assert found.unsure
    sleeps = start("import ctypes; ctypes.CDLL(None).sleep(600)")
    assert until(sleeps.pid, lambda found: found.main.kind == "timer").main.unsure


def test_the_locks_of_the_ranks_in_the_run_directory_are_not_waited_for(start, tmp_path):
    rundir.lock_rank(tmp_path, 0)
    child = start(
        "import ctypes, fcntl, sys; f = open(sys.argv[1], 'a')\n"
        "fcntl.lockf(f, fcntl.LOCK_EX, 1, 1)\n"
        "print(flush=True); ctypes.CDLL(None).sleep(600)", tmp_path / rundir.TRAINING_LOCK,
    )  # fmt: skip
    assert child.stdout.readline()
    assert until(child.pid, lambda found: found.state == "S").main.kind == "timer"


FLOCK = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX)"
LOCKF = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX)"


@pytest.mark.parametrize(("program", "lock"), [(FLOCK, fcntl.flock), (LOCKF, fcntl.lockf)])
def test_the_holder_of_a_file_lock_is_named(start, tmp_path, program, lock):
    path = tmp_path / "shared.lock"
    with path.open("w") as file:
        lock(file, fcntl.LOCK_EX)
        first, second = start(program, path), start(program, path)
        for each in (first, second):
            assert waiting(each, "lock", ME).startswith(f"the lock of {path}, {ME}")
            assert collect(each.pid).main.holder == os.getpid()
        assert collect(os.getpid()).has_flock == (lock is fcntl.flock)
        assert not collect(first.pid).has_flock


def test_a_lock_of_an_ended_process_is_held_by_its_child(start, tmp_path):
    path = tmp_path / "shared.lock"
    holder = start(
        f"{FLOCK}; import os\nif os.fork(): os._exit(0)\nimport time; time.sleep(600)", path
    )
    assert holder.wait() == 0
    blocked = start(FLOCK, path)
    assert waiting(blocked, "lock").endswith(
        f"held by pid {holder.pid} (ended, another process has its descriptor)"
    )
    holder.returncode = None  # so that the fixture kills its process group


@pytest.mark.parametrize(
    ("program", "main"),
    [
        ("r, w = os.pipe(); os.read(r, 1)", BlockedOn("pipe", "a pipe that is empty")),
        ("r, w = os.pipe(); os.write(w, b'x' * 2**20)", BlockedOn("pipe", "a pipe that is full")),
        ("time.sleep(600)", BlockedOn("timer", "a timer")),
        ("select.select([], [], [], 600)", BlockedOn("timer", "a signal or a timeout")),
        ("select.poll().poll(600_000)", BlockedOn("timer", "a signal or a timeout")),
        ("signal.sigtimedwait([], 600)", BlockedOn("timer", "a signal or a timeout")),
        ("a = threading.Lock(); a.acquire(); a.acquire()",
         BlockedOn("futex", "a lock, an event or a future (futex)")),
        ("a, b = socket.socketpair(); a.recv(1)", BlockedOn("network", "a local socket")),
        ("s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); "
         "s.bind(f'\\0nsa-test-{os.getppid()}'); s.recv(1)",
         BlockedOn("network", "the local socket @nsa-test-{parent}")),
        ("os.open(sys.argv[1], os.O_RDONLY)", BlockedOn("pipe", "a FIFO, which has no writer")),
        ("os.open(sys.argv[1], os.O_WRONLY)", BlockedOn("pipe", "a FIFO, which has no reader")),
        ("os.read(os.open(sys.argv[1], os.O_RDWR), 1)",
         BlockedOn("pipe", "the FIFO {fifo}, which is empty")),
    ],
)  # fmt: skip
def test_a_wait_is_put_into_words(start, tmp_path, program, main):
    fifo = tmp_path / "q"
    os.mkfifo(fifo)
    child = start(f"import os, select, signal, socket, sys, threading, time; {program}", fifo)
    main = replace(main, text=main.text.format(fifo=fifo, parent=os.getpid()))
    found = until(child.pid, lambda found: (found.main, found.state) == (main, "S"))
    assert (found.tracer, found.frozen, found.children) == (None, False, ())


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize(
    "call",
    [
        "s.recv(1)",
        "s.sendall(b'x' * 2**26)",
        "s.settimeout(600); s.recv(1)",
        "import select; p = select.epoll(); p.register(s, 1); os.pipe(); p.poll()",
    ],
)
def test_a_server_that_does_not_answer_is_named(start, host, call):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        server = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"this host has no {host}")
    with server:
        port = server.getsockname()[1]
        program = "import os, socket, sys; s = socket.create_connection((sys.argv[1], sys.argv[2]))"
        child = start(f"{program}; {call}", host, port)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        words = f"a socket to {address}"
        until(child.pid, lambda found: found.main == BlockedOn("network", words))


def test_a_connection_that_is_not_accepted_and_a_listener_are_named(start):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        port = server.getsockname()[1]
        fill = [socket.socket() for _ in range(3)]
        for each in fill:
            each.setblocking(False)
            each.connect_ex(("127.0.0.1", port))
        program = (
            "import os, socket; os.pipe(); s = socket.socket(); s.settimeout({}); s.connect({})"
        )
        for timeout in (None, 600):  # the program waits in connect, or in poll
            child = start(program.format(timeout, ("127.0.0.1", port)))
            words = f"a socket to 127.0.0.1:{port} that is not connected yet"
            assert waiting(child, "network", words) == words
        for each in fill:
            each.close()
    listener = start("import socket; s = socket.create_server(('127.0.0.1', 0)); s.accept()")
    assert waiting(listener, "network").startswith("a connection to 127.0.0.1:")


def test_a_poll_of_one_of_many_is_not_guessed(start):
    program = "import select, socket, os; a = socket.socketpair(); os.pipe(); p = select.poll()"
    child = start(f"{program}; p.register(a[0], 1); print(flush=True); p.poll()")
    assert child.stdout.readline()
    found = until(child.pid, lambda found: found.wchan == "poll_schedule_timeout")
    assert found.main == kernel.NOTHING


CHILD = "c = subprocess.Popen([sys.executable, '-I', '-S', '-c', 'import time; time.sleep(600)'])"


@pytest.mark.parametrize(
    "wait", ["c.wait()", "os.waitid(os.P_PID, c.pid, os.WEXITED)", "os.wait()"]
)
def test_a_wait_for_a_stopped_child_names_it(start, wait):
    child = start(f"import os, subprocess, sys; {CHILD}; c.send_signal(19); {wait}")
    found = until(
        child.pid,
        lambda found: "stopped" in found.main.text and [c.state for c in found.children] == ["T"],
    )
    (stopped,) = found.children
    assert found.main == BlockedOn("child", f"child {stopped.pid} ({stopped.name}, stopped)")


def test_a_wait_by_pidfd_and_for_any_of_two(start):
    begin = f"import os, subprocess, sys; {CHILD}; {CHILD.replace('c =', 'd =')}"
    by_fd = start(f"{begin}; os.waitid(os.P_PIDFD, os.pidfd_open(d.pid), os.WEXITED)")
    text = waiting(by_fd, "child")
    assert text.startswith(f"child {collect(by_fd.pid).children[1].pid} (")
    words = "any of 2 children"
    assert waiting(start(f"{begin}; os.wait()"), "child", words) == words


def test_without_the_right_to_see_a_system_call_the_kernel_function_names_the_wait(start):
    """The system call of another user's process cannot be read; its kernel function may be."""
    for state, function, kind, words in (
        ("S", "do_wait", "child", "a child process"),
        ("S", "anon_pipe_read", "pipe", "a pipe that is empty"),
        ("S", "fcntl_setlk", "lock", "a file lock (its holder is not available)"),
        ("S", "wait_for_partner", "pipe", "a FIFO, which has no peer"),
        ("S", "wait_woken", "network", ""), ("S", "futex_do_wait", "futex", ""),
        ("S", "hrtimer_nanosleep", "timer", ""), ("S", "", "none", ""),
        ("D", "percpu_rwsem_wait", "disk", "a disk or a driver (in percpu_rwsem_wait)"),
    ):  # fmt: skip
        found = kernel._blocked_on(directory.DEAD["pid"], state, function, ())
        assert (found.kind, words in found.text) == (kind, True), found


LOCKS = (
    b"1: POSIX  ADVISORY  WRITE %d fe:00:1 0 EOF\n1: -> POSIX  ADVISORY  WRITE 7 fe:00:1 0 EOF\n"
)


def test_the_holder_is_that_of_the_lock_the_process_waits_for():
    def text(holder: int) -> str:
        return (LOCKS % holder).decode()

    assert kernel._holder(text(5), 7) == 5
    assert kernel._holder(text(5), 8) is None
    assert kernel._holder(text(-1), 7) is None
    assert kernel._holder("1: FLOCK  ADVISORY  READ 4 fe:00:9 0 EOF\n" + text(6), 7) == 6


@given(st.binary(max_size=300), st.integers(min_value=0, max_value=300))
def test_no_bytes_break_a_parser(garbage, at):
    stat = Path("/proc/self/stat").read_bytes()
    syscall = b"73 0x3 0x2 0x0 0x7f87cc6d5fd8 0x0 0x0 0x7ffe60d0e6a8 0x7f87cc916897\n"
    socket_line = b"   0: 0100007F:9B1D 00000000:0000 0A 0:0 0:0 0 0 0 3612944 1 0 1\n"
    for good in (stat, syscall, socket_line, LOCKS % 5):
        for data in (garbage, good[:at] + garbage, good[:at] + garbage + good[at:]):
            text = data.decode("utf-8", "replace")
            found = procfs.parse_stat(text)
            assert found is None or (len(found.state) == 1 and "\n" not in found.name)
            parsed = kernel._parse_syscall(text)
            assert parsed is None or len(parsed[1]) == 6
            assert (kernel._holder(text, 7) or 1) > 0
            assert len(descriptors.tcp_entry(text, "3612944")) == 3
            assert "\x1b" not in descriptors.address(text)
            assert not any(each.is_unacked for each in descriptors.connections(text, {"3612944"}))
            assert (procfs.number_after(text, "TracerPid") or 0) >= 0


@given(st.text(max_size=40))
def test_a_name_stays_on_one_line_and_changes_no_field(name):
    stat = procfs.parse_stat(f"5 ({name}) S 1 {' '.join('9' * 60)}")
    assert stat is not None
    assert (stat.state, stat.cpu_ticks, stat.start_ticks) == ("S", 18, 9)
    assert not set(stat.name) & set("\n\r\x1b\x00")
