"""Runs one external program with a time limit, on the thread of the caller.

`timeout` of coreutils ends a program that hangs, even if the supervisor has died.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from console.sources import process
from console.sources.sanitize import clean

GRACE_S = 2.0
"""A program gets TERM after its time limit, and KILL after the grace time that follows."""
TAIL_BYTES, MAX_LINE, NO_STOP = 4096, 300, -1


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a program in words ("" after exit code 0), and the last line of its output."""

    code: int | None
    failure: str = ""
    last_line: str = ""


def run(
    argv: Sequence[str], environment: Mapping[str, str], limit_s: float, folder: Path | None = None,
    stdin: bytes = b"", keeps_output: bool = False, stop: int = NO_STOP,
) -> Ended:  # fmt: skip
    """Runs a program and returns its end; a readable descriptor `stop` ends the program early.

    The process group of the program gets KILL before its leader is reaped, because the number of
    the group could be reused after that.
    """
    begun, tail = time.monotonic(), b""
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(read_fd, False)
    with os.fdopen(os.memfd_create("stdin"), "r+b", buffering=0) as given:
        os.pwrite(given.fileno(), stdin, 0)
        output = write_fd if keeps_output else subprocess.DEVNULL
        try:
            started = subprocess.Popen(
                ["timeout", f"--kill-after={GRACE_S:g}", f"{limit_s:g}", *argv], cwd=folder,
                env=environment, stdin=given, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            os.close(read_fd)
            return Ended(None, f"cannot be started: {error.strerror}")
        finally:
            os.close(write_fd)
    with os.fdopen(read_fd, "rb", buffering=0) as stream:
        tail = _follow(started, stream.fileno(), stop)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(started.pid, signal.SIGKILL)
        code = started.wait()
    lines = [line for line in tail.decode("utf-8", "replace").splitlines() if line.strip()]
    last_line = clean(lines[-1].strip(), MAX_LINE) if lines else ""
    failure = f"exited (code {code})" if code else ""
    if code < 0:
        failure = f"was killed ({process.signal_name(-code)})"
    if time.monotonic() - begun >= limit_s:
        failure = f"ran longer than {limit_s:g} s and was ended"
    return Ended(code, failure, last_line)


def _follow(started: subprocess.Popen[bytes], output: int, stop: int) -> bytes:
    """Waits until the program ends; returns the end of its output."""
    tail, poller = b"", select.poll()
    ended = os.pidfd_open(started.pid)
    for fd in {ended, output, stop} - {NO_STOP}:
        poller.register(fd, select.POLLIN)
    try:
        ready = set[int]()
        while ended not in ready:
            ready = {fd for fd, _ in poller.poll()}
            if stop in ready:
                signal.pidfd_send_signal(ended, signal.SIGTERM)  # `timeout` passes it on
                poller.unregister(stop)
            if output in ready and (data := _read(output)) is not None:
                tail = (tail + data)[-TAIL_BYTES:]
                if not data:
                    poller.unregister(output)
        while data := _read(output):
            tail = (tail + data)[-TAIL_BYTES:]
    finally:
        os.close(ended)
    return tail


def _read(fd: int) -> bytes | None:
    """Returns what can be read now: b"" at the end of the file, None if nothing is there yet."""
    try:
        return os.read(fd, 1 << 16)
    except BlockingIOError:
        return None
