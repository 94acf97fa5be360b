"""Work that may hang, with a time limit that holds.

Whoever touches a directory that hangs cannot be ended before the directory answers, not even by
KILL: so a child does it, and the command leaves without it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from multiprocessing import Pipe
from typing import NoReturn, TypeVar

from trainers.contract.errors import ContractError

T = TypeVar("T")


def within(limit_s: float, work: Callable[[], T]) -> T:
    """Returns what `work` returns in a child process, or raises the error that it raised.

    Raises TimeoutError after `limit_s`; the child is killed, at once or when the kernel lets it.
    """
    reading, writing = Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        _be_the_child(work, writing.send)
    writing.close()
    try:
        if not reading.poll(limit_s):
            raise TimeoutError
        result, error = reading.recv()
    except EOFError:
        raise ContractError(
            "the request's process died; whether it arrived is open, ask again"
        ) from None
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    os.waitpid(child, 0)
    if error is not None:
        raise error
    return result


def _be_the_child(work: Callable[[], T], answer: Callable[[object], None]) -> NoReturn:
    """Works and answers; holds none of the caller's files, so that nobody waits for this child."""
    try:
        silence = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(silence, fd)
        try:
            outcome = (work(), None)
        except Exception as error:
            outcome = (None, error)
        answer(outcome)
    finally:
        os._exit(0)
