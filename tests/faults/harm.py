"""Faults for a live run: repeated signals, a stopped process and invalid records."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

from console.sources import process
from tests.faults.scene import Seen


def spray(started, until: threading.Event) -> None:
    """Sends SIGUSR1 to the processes of the run and their groups until `until` is set."""
    while not until.wait(0.02):
        agent = (started.state().get("torchrun") or {}).get("pid")
        if not agent:
            continue
        for pid in {agent, *process.with_token(started.token())}:
            for send in (os.kill, os.killpg):
                try:
                    send(pid, signal.SIGUSR1)
                except ProcessLookupError:
                    continue


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[Callable[[], None]]:
    """Yields a function that stops a process; afterwards, the process is resumed."""
    try:
        yield lambda: os.kill(pid, signal.SIGSTOP)
    finally:
        os.kill(pid, signal.SIGCONT)


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
