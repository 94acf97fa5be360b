"""`python -m console.supervisor.hook_runner FD LIMIT_S FOLDER PROGRAM …`: one run of a hook.

A process of its own waits here for a program that may hang, on a disk that may hang, and ends it
in time even when the supervisor is gone. It says on the pipe FD how the program ended.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from trainers.contract import rundir

WELL = "ok"
GRACE_S = 2.0
LOG, MAX_LOG_BYTES, MAX_OUTPUT_BYTES = "hooks.log", 1 << 20, 32 << 10
CHUNK_BYTES = 1 << 16
LAST_OUTPUT_S = 0.5
"""A process that left the group may keep the output open for this long."""


def run(argv: Sequence[str], folder: Path, limit_s: float) -> tuple[str, bytes]:
    """Runs a program, with TERM after the limit and KILL after `GRACE_S` more; returns how it was,
    and the beginning of what it printed. Raises OSError or ValueError where it cannot be started.

    The group gets KILL before its first process is reaped: its number is still ours then.
    """
    process = subprocess.Popen(
        argv, cwd=folder, bufsize=0, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    output = bytearray()
    reader = threading.Thread(target=_drain, args=(process.stdout, output), daemon=True)
    reader.start()
    pidfd = os.pidfd_open(process.pid)
    late = not select.select([pidfd], [], [], limit_s)[0]
    if late:
        _signal(process.pid, signal.SIGTERM)
        select.select([pidfd], [], [], GRACE_S)
    _signal(process.pid, signal.SIGKILL)
    code = process.wait()
    reader.join(LAST_OUTPUT_S)
    if late:
        how = f"took longer than {limit_s:g} s and was ended"
    elif code < 0:
        how = f"was killed by signal {-code}"
    else:
        how = f"returned {code}" if code else WELL
    return how, bytes(output)


def _drain(out: IO[bytes], output: bytearray) -> None:
    """Takes what is printed, of which the beginning is kept."""
    while data := out.read(CHUNK_BYTES):
        output += data[: MAX_OUTPUT_BYTES - len(output)]


def _signal(group: int, number: signal.Signals) -> None:
    """Signals the group; a program of another user's rights is out of reach."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def write_log(folder: Path, text: str, output: bytes) -> None:
    """Appends one run to the log, which begins anew when it is too long. Raises OSError."""
    fd = rundir.open_append(folder / LOG)
    try:
        if os.fstat(fd).st_size > MAX_LOG_BYTES:
            os.ftruncate(fd, 0)
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        os.write(fd, f"{stamp} UTC {text}\n".encode("utf-8", "replace") + output)
    finally:
        os.close(fd)


def main() -> int:
    """Runs the program once; what it is told is in the environment and on stdin."""
    told, limit_s, folder, *argv = sys.argv[1:]
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    os.set_inheritable(int(told), False)
    try:
        how, output = run(argv, Path(folder), float(limit_s))
    except (OSError, ValueError) as error:
        how, output = f"cannot be started: {getattr(error, 'strerror', None) or error}", b""
    os.write(int(told), how.encode("utf-8", "replace"))
    write_log(Path(folder), f"{argv[0]}: {how}", output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
