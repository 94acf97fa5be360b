"""Work that may hang, with a time limit that holds.

Whoever touches a directory that hangs cannot be ended before the directory answers, not even by
KILL: so a child does it, and the command leaves without it.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import time
from collections.abc import Callable
from typing import NoReturn, TypeVar

from trainers.contract.errors import ContractError

T = TypeVar("T")
CHUNK_BYTES = 1 << 16


def within(limit_s: float, work: Callable[[], T]) -> T:
    """Returns what `work` returns in a child process, or raises the error that it raised.

    Raises TimeoutError after `limit_s`; the child is killed, at once or when the kernel lets it.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _be_the_child(work, writing)
    os.close(writing)
    try:
        data = _read_all(reading, time.monotonic() + limit_s)
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        os.close(reading)
    os.waitpid(child, 0)
    if not data:
        raise ContractError("the request's process died; whether it arrived is open, ask again")
    result, error = pickle.loads(data)
    if error is not None:
        raise error
    return result


def _be_the_child(work: Callable[[], T], writing: int) -> NoReturn:
    """Works and answers; holds none of the caller's files, so that nobody waits for this child."""
    try:
        silence = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(silence, fd)
        try:
            outcome = (work(), None)
        except Exception as error:
            outcome = (None, error)
        with os.fdopen(writing, "wb") as stream:
            stream.write(pickle.dumps(outcome))
    finally:
        os._exit(0)


def _read_all(fd: int, deadline: float) -> bytes:
    """Returns everything up to the end of a pipe. Raises TimeoutError at `deadline`."""
    data = b""
    while True:
        ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError
        chunk = os.read(fd, CHUNK_BYTES)
        if not chunk:
            return data
        data += chunk
