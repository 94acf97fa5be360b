"""Runs a function in a child process with a time limit, because the function may hang on a disk.

A process that waits for a hung file system cannot be ended, not even by KILL. So a child process
does the work, and the command can exit without waiting for the child.
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
    """Runs `work` in a child process; returns its result or raises its error.

    After `limit_s` seconds it sends KILL and raises TimeoutError; a child in state D ends later.
    """
    reading, writing = Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        _work_in_child(work, writing.send)
    writing.close()
    try:
        if not reading.poll(limit_s):
            raise TimeoutError
        result, error = reading.recv()
    except EOFError:
        raise ContractError(
            "the process that sends the request died: delivery unknown; send the request again"
        ) from None
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    os.waitpid(child, 0)
    if error is not None:
        raise error
    return result


def _work_in_child(work: Callable[[], T], answer: Callable[[object], None]) -> NoReturn:
    """Sends the result of `work`. Redirects descriptors 0-2, so no reader waits for the child."""
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        try:
            outcome = (work(), None)
        except Exception as error:
            outcome = (None, error)
        answer(outcome)
    finally:
        os._exit(0)
