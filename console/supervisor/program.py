"""Runs one external program with a time limit, on the thread of the caller.

`timeout` of coreutils ends a program that hangs, even if the supervisor has died.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from console.sources import process
from console.sources.sanitize import clean

GRACE_S, SPARE_S, POLL_S = 2.0, 5.0, 0.02
"""A program gets TERM after its time limit, and KILL `GRACE_S` later.

After a further `SPARE_S`, `run` returns even if the program has not ended (a hung disk).
"""
TAIL_BYTES, MAX_LINE, PARTS = 4096, 300, 16
IS_OVER = os.WEXITED | os.WNOWAIT | os.WNOHANG


class Ended(NamedTuple):
    """The end of a program: `code` is None without an exit, and `failure` is "" for code 0."""

    code: int | None
    failure: str = ""
    last_line: str = ""


def run(
    argv: Sequence[str], environment: Mapping[str, str], limit_s: float, folder: Path | None = None,
    stdin: bytes = b"", keeps_output: bool = False, stopped: Callable[[], bool] = lambda: False,
) -> Ended:  # fmt: skip
    """Runs a program and returns its end; the program gets TERM when `stopped` returns True.

    At the end, the process group of the program gets KILL. The leader is reaped only afterwards,
    because reaping frees the number of the group. Raises OSError if no descriptor is left.
    """
    begun, tail = time.monotonic(), b""
    left_at = begun + limit_s + GRACE_S + SPARE_S
    with contextlib.ExitStack() as files:
        given = files.enter_context(os.fdopen(os.memfd_create("stdin"), "r+b", buffering=0))
        os.pwrite(given.fileno(), stdin, 0)
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        files.enter_context(os.fdopen(read_fd))
        os.set_blocking(read_fd, False)
        output = write_fd if keeps_output else subprocess.DEVNULL
        try:
            started = subprocess.Popen(
                ["timeout", f"--kill-after={GRACE_S:g}", f"{limit_s:g}", *argv], cwd=folder,
                env=environment, stdin=given, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return Ended(None, f"cannot be started: {error.strerror}")
        finally:
            os.close(write_fd)
        while os.waitid(os.P_PID, started.pid, IS_OVER) is None:
            if stopped():
                os.kill(started.pid, signal.SIGTERM)  # `timeout` passes it on
                left_at = min(left_at, time.monotonic() + GRACE_S + SPARE_S)
            if time.monotonic() >= left_at:
                return Ended(None, "does not end (a hung disk?)")
            tail = _end_of(read_fd, tail)
            time.sleep(POLL_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(started.pid, signal.SIGKILL)
        code, tail = started.wait(), _end_of(read_fd, tail)
    lines = tail.decode("utf-8", "replace").strip().splitlines()
    failure = process.end_words(code) if code else ""
    if code and time.monotonic() - begun >= limit_s:
        failure = f"ran longer than {limit_s:g} s and was ended"
    return Ended(code, failure, clean(lines[-1], MAX_LINE) if lines else "")


def _end_of(fd: int, tail: bytes) -> bytes:
    """Reads a bounded part of the output without waiting; returns the end of the output so far."""
    with contextlib.suppress(BlockingIOError):
        for _ in range(PARTS):
            tail = (tail + os.read(fd, 1 << 16))[-TAIL_BYTES:]
    return tail
