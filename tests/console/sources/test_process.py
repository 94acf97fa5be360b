"""The use, the identity and the exit codes of processes."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from console.sources import process
from tests.launches import HANG_GUARD_S, wait_for
from trainers.contract import environ, rundir

TOKEN = secrets.token_hex(8)
"""Each process of pytest has its own token, because tests search the whole machine for it."""


@pytest.fixture
def busy():
    program = "import signal\nsignal.signal(signal.SIGUSR1, print)\nwhile True: pass"
    child = subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, environ.TOKEN: TOKEN}
    )
    yield child
    child.kill()
    child.wait()


def test_cpu_is_measured_between_two_samples(busy):
    meter = process.Meter()
    assert meter.sample(busy.pid).cpu_pct is None
    wait_for(lambda: (meter.sample(busy.pid).cpu_pct or 0.0) > 0)
    assert 1 < meter.sample(busy.pid).rss_mib < 200
    busy.send_signal(signal.SIGSTOP)
    wait_for(lambda: meter.sample(busy.pid).state == "T")
    busy.kill()
    wait_for(lambda: meter.sample(busy.pid) == process.ProcessUse("Z"))
    busy.wait()
    assert meter.sample(busy.pid) == process.ProcessUse()


def test_cpu_is_not_measured_over_a_time_of_few_ticks(busy, monkeypatch):
    """Two samples may follow each other closely, so that one tick would be a high CPU use."""
    meter = process.Meter()
    first = meter.sample(busy.pid)
    measured = wait_for(lambda: meter.sample(busy.pid).cpu_pct)
    monkeypatch.setattr(process, "SHORTEST_S", 3600)
    after = {meter.sample(busy.pid).cpu_pct for _ in range(20)}
    assert (first.cpu_pct, after) == (None, {measured})


@pytest.mark.decision("target-process", "true")
@pytest.mark.decision("target-process", "absent")
def test_a_process_is_found_by_its_token_and_opened_only_with_it(busy):
    wait_for(lambda: busy.pid in process.with_token(TOKEN))  # the child now runs its program
    assert busy.pid in process.children(os.getpid())
    assert process.with_token(TOKEN) == [busy.pid]
    assert process.open_process(busy.pid, "another") is None
    handle = process.open_process(busy.pid, TOKEN)
    assert handle is not None
    assert not handle.is_over()
    assert handle.send(signal.SIGKILL)
    busy.wait()
    assert handle.is_over()
    assert not handle.send(signal.SIGKILL)
    handle.close()
    assert process.open_process(busy.pid, TOKEN) is None


def test_nobody_waits_for_an_environment_behind_the_lock_of_a_process_in_state_d(
    tmp_path, monkeypatch
):
    """In this test, a FIFO without a writer replaces the locked environment."""
    monkeypatch.setattr(process, "UNREAD_AFTER_S", 0.1)
    pid = 2**22 - 5
    folder = tmp_path / str(pid)
    folder.mkdir()
    (folder / "stat").write_text(f"{pid} (rank) D {' 0' * 52}")
    os.mkfifo(folder / "environ")
    assert process.environment(pid, str(tmp_path)) == {}
    (reading,) = (each for each in threading.enumerate() if each.name == "environment")
    assert process.environment(pid, str(tmp_path)) == {}
    assert sum(each.name == "environment" for each in threading.enumerate()) == 1
    os.close(os.open(folder / "environ", os.O_WRONLY))
    reading.join(HANG_GUARD_S)
    (folder / "environ").unlink()
    (folder / "environ").write_bytes(b"RANK=1\0LOCAL_RANK=0\0")
    monkeypatch.setattr(process, "UNREAD_AFTER_S", HANG_GUARD_S)  # a thread may start late
    assert process.environment(pid, str(tmp_path)) == {"RANK": "1", "LOCAL_RANK": "0"}


def test_several_threads_read_the_environment_of_one_process_in_state_d(tmp_path):
    pid = 2**22 - 7
    folder = tmp_path / str(pid)
    folder.mkdir()
    (folder / "stat").write_text(f"{pid} (rank) D {' 0' * 52}")
    (folder / "environ").write_bytes(b"RANK=1\0")
    with ThreadPoolExecutor(8) as pool:
        found = [pool.submit(process.environment, pid, str(tmp_path)) for _ in range(2000)]
    assert all(each.result() in ({}, {"RANK": "1"}) for each in found)


def test_a_handler_of_a_signal_is_seen(busy):
    wait_for(lambda: process.catches(busy.pid, signal.SIGUSR1))
    assert not process.catches(busy.pid, signal.SIGUSR2)
    assert not process.catches(2**22 - 3, signal.SIGUSR1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may set its groups")
def test_a_handler_is_seen_in_a_process_of_a_user_with_many_groups():
    """In the status file, the list of groups precedes the signals."""
    program = "import signal, time\nsignal.signal(signal.SIGUSR1, print)\ntime.sleep(60)"
    child = subprocess.Popen(
        [sys.executable, "-c", program], extra_groups=range(10**5, 10**5 + 999)
    )
    try:
        wait_for(lambda: process.catches(child.pid, signal.SIGUSR1))
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize(("end", "code"), [("exit 7", 7), ("kill -SEGV $$", -11), ("exit 0", 0)])
def test_an_exit_code_is_available_before_and_after_the_reap(end, code):
    child = subprocess.Popen(
        ["sh", "-c", f"read line; {end}"], stdin=subprocess.PIPE,
        env={**os.environ, environ.TOKEN: TOKEN},
    )  # fmt: skip
    wait_for(lambda: process.with_token(TOKEN) == [child.pid])
    handle = process.open_process(child.pid, TOKEN)
    assert handle.exit_code() is None
    assert not handle.is_unreaped()
    child.stdin.close()
    wait_for(handle.is_over)
    assert (handle.is_unreaped(), handle.exit_code()) == (True, code)
    assert child.wait() == code
    assert not handle.is_unreaped()
    told = handle.exit_code()
    handle.close()
    assert handle.exit_code() is None
    if told is None:
        pytest.skip("this kernel does not keep how a reaped process ended (Linux 6.15 does)")
    assert told == code


@pytest.mark.decision("target-process", "lie")
def test_a_process_that_only_a_document_names_is_not_opened(busy, tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    named = rundir.identity(busy.pid)
    assert process.open_named(named, tmp_path, logs) is None
    assert process.open_named(named | {"start_ticks": 1}, tmp_path, logs) is None
    assert busy.poll() is None


@pytest.mark.parametrize(
    "word", ["a b'\"$(x)/c", "latest", "-\udcffa1", "a\n'\\\u200b", "über", ""]
)
def test_a_shell_passes_the_words_of_a_printed_command_unchanged(word):
    line = process.command("watch", word)
    assert line.isprintable()
    script = f"{process.NAME}() {{ printf '%s\\0' \"$@\"; }}; {line}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=True)
    assert done.stdout == b"watch\0" + os.fsencode(word) + b"\0"


def test_each_command_with_a_variable_word_is_quoted():
    for path in sorted(Path(process.__file__).parents[1].rglob("*.py")):
        by_hand = re.findall(r"(?:program\(\)\}|nsa-console) [a-z-]+ \{.*", path.read_text())
        assert not by_hand, f"{path}: use process.command"
