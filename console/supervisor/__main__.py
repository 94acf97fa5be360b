"""`python -m console.supervisor LAUNCH --lock-fd N [--adopt JSON]`: owns a launch to its end."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from console.supervisor import lock
from console.supervisor.child_state import Charge
from console.supervisor.frames import Frames
from console.supervisor.owner import Owner
from trainers.contract import rundir
from trainers.contract.errors import ContractError, RefusedError

PR_SET_CHILD_SUBREAPER = 36
KEPT_SIGNALS = frozenset((
    signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU,
    signal.SIGPIPE, signal.SIGXFSZ, signal.SIGWINCH, signal.SIGURG,
    signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGSYS,
    signal.SIGTRAP,
))  # fmt: skip
"""Signals that cannot be caught, that report a bug of this process, or that end nothing."""


def log(text: object) -> None:
    """Writes a line into the supervisor's log, which may lie on a disk that takes nothing."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)  # noqa: T201


def become_subreaper() -> None:
    """Makes orphans of this process its children, so that their exits are known."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        log(f"no subreaper: {os.strerror(error)}")


def take_signals(on_stop: Callable[[int], None]) -> None:
    """TERM and INT stop the launch; no other signal that can be caught ends it.

    USR1 is ignored, and stays so in torchrun through exec. The others have a handler that does
    nothing: torchrun inherits no ignored one.
    """
    for number in signal.valid_signals() - KEPT_SIGNALS:
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda got, _frame: on_stop(got))


def take_lock(path: Path, fd: int) -> lock.Held:
    """Names this process in the lock that it inherited. Raises RefusedError where it cannot."""
    os.set_inheritable(fd, False)
    try:
        return lock.Held(path, fd)
    except OSError as error:
        raise RefusedError(f"cannot write the owner into the lock: {error.strerror}") from error


def begin(
    path: Path, adopt: str | None, held: lock.Held, lock_fd: int, end: Frames, charge: Charge
) -> int:
    """Supervises, in the child: nothing of this is loaded in the owner."""
    os.close(lock_fd)
    from console.supervisor import child

    return child.main(path, adopt, held, end, charge)


def main() -> int:
    """Returns 0 when the launch has ended, whatever became of it."""
    parser = argparse.ArgumentParser(prog="python -m console.supervisor", description=__doc__)
    parser.add_argument("launch", type=Path)
    parser.add_argument(
        "--lock-fd", type=int, required=True, help="descriptor that holds the launch's lock"
    )
    parser.add_argument(
        "--adopt", metavar="JSON", help="the settings of who takes over a launch left behind"
    )
    options = parser.parse_args()
    rundir.set_safe_umask()
    begun = time.strftime("%Y-%m-%d %H:%M:%S")
    log(f"{begun} supervisor pid {os.getpid()} of {options.launch}")
    try:
        held = take_lock(options.launch, options.lock_fd)
    except ContractError as error:
        log(error)
        return error.exit_code
    become_subreaper()
    owner = Owner(partial(begin, options.launch, options.adopt, held, options.lock_fd))
    take_signals(owner.ask)
    return owner.run()


if __name__ == "__main__":
    sys.exit(main())
