"""A time limit for a call that may hang: on a dead mount, on a name server."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from trainers.failures import DataError

Result = TypeVar("Result")


def within(seconds: float, call: Callable[[], Result], late: str) -> Result:
    """Returns or raises what `call` does; DataError(`late`) when that takes too long.

    A call that hangs stays behind in a daemon thread.
    """
    done: queue.SimpleQueue[tuple[list[Result], BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put(([call()], None))
        except BaseException as error:
            done.put(([], error))

    threading.Thread(target=run, name="nsa-limited", daemon=True).start()
    try:
        result, error = done.get(timeout=seconds)
    except queue.Empty:
        raise DataError(late) from None
    if error is not None:
        raise error
    return result[0]
