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
import time
from collections.abc import Sequence
from pathlib import Path

from trainers.contract import rundir

WELL = "ok"
GRACE_S = 2.0
LOG, MAX_LOG_BYTES, MAX_OUTPUT_BYTES = "hooks.log", 1 << 20, 32 << 10
CHUNK_BYTES = 1 << 16


class Program:
    """One program and what it printed; `how` says how it ended."""

    def __init__(self, argv: Sequence[str], folder: Path):
        self.process = subprocess.Popen(
            argv, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self._out = self.process.stdout.fileno()
        os.set_blocking(self._out, False)
        self.output = bytearray()

    def wait(self, limit_s: float) -> str:
        """Waits for the end, TERM after the limit, KILL after `GRACE_S` more; returns how it was.

        The group gets KILL before its first process is reaped: its number is still ours then.
        """
        poller = select.poll()
        pidfd = os.pidfd_open(self.process.pid)
        poller.register(pidfd, select.POLLIN)
        poller.register(self._out, select.POLLIN)
        begun = time.monotonic()
        steps = [(begun + limit_s, signal.SIGTERM), (begun + limit_s + GRACE_S, signal.SIGKILL)]
        late = False
        while True:
            left_s = max(0.0, steps[0][0] - time.monotonic()) if steps else 3600.0
            ready = dict(poller.poll(left_s * 1000))
            if self._out in ready and not self._read():
                poller.unregister(self._out)
            if pidfd in ready:
                break
            if steps and time.monotonic() >= steps[0][0]:
                late = True
                self._signal(steps.pop(0)[1])
        self._signal(signal.SIGKILL)
        self._read()
        code = self.process.wait()
        if late:
            return f"took longer than {limit_s:g} s and was ended"
        if code < 0:
            return f"was killed by signal {-code}"
        return f"returned {code}" if code else WELL

    def _signal(self, number: signal.Signals) -> None:
        """Signals the group; a program of another user's rights is out of reach."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def _read(self) -> bool:
        """Takes what was printed, of which the beginning is kept; False at its end."""
        try:
            data = os.read(self._out, CHUNK_BYTES)
        except BlockingIOError:
            return True
        self.output += data[: MAX_OUTPUT_BYTES - len(self.output)]
        return bool(data)


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
    output = b""
    try:
        run = Program(argv, Path(folder))
    except (OSError, ValueError) as error:
        how = f"cannot be started: {getattr(error, 'strerror', None) or error}"
    else:
        how, output = run.wait(float(limit_s)), bytes(run.output)
    os.write(int(told), how.encode("utf-8", "replace"))
    write_log(Path(folder), f"{argv[0]}: {how}", output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
