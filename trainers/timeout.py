"""Runs a call with a time limit, in a daemon thread.

A call can hang, for example on a dead mount or name server.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from trainers.failures import DataError

Result = TypeVar("Result")


def within(seconds: float, call: Callable[[], Result], late: str) -> Result:
    """Returns the result of `call` or raises its error; after `seconds` raises DataError(`late`).

    A call that hangs continues in its daemon thread.
    """
    result: Future[Result] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="nsa-limited", daemon=True).start()
    if not wait([result], seconds).done:
        raise DataError(late)
    return result.result()
