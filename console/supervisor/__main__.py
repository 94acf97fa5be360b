"""`python -m console.supervisor LAUNCH --lock-fd N [--adopt]`: supervises a launch.

The owner loads the modules of this project before the first fork. So each child runs the code of
the owner, even if the files were replaced by other versions since then.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from console import access
from console.supervisor import child, lock
from console.supervisor.link import Channel, ChildState
from console.supervisor.owner import Owner
from trainers.contract import rundir
from trainers.contract.errors import ContractError, RefusedError

PR_SET_CHILD_SUBREAPER = 36
UNHANDLED_SIGNALS = frozenset((
    signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU,
    signal.SIGPIPE, signal.SIGXFSZ, signal.SIGWINCH, signal.SIGURG,
    signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGSYS,
    signal.SIGTRAP,
))  # fmt: skip
"""Signals without a handler, because they cannot be caught, show a bug, or do not end a process."""


def log(text: object) -> None:
    """Writes a line into the supervisor's log; a failed write (a full disk) is ignored."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)  # noqa: T201


def become_subreaper() -> None:
    """Makes this process the parent of its orphaned descendants, so that it can reap them."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        log(f"cannot become a subreaper: {os.strerror(error)}; exit codes of orphans are lost")


def handle_signals(on_stop: Callable[[int], None]) -> None:
    """Makes TERM and INT call `on_stop`; most other signals then have no effect.

    SIGUSR1 is ignored, and stays ignored in torchrun, because exec does not change that. All other
    signals, except `UNHANDLED_SIGNALS`, get a handler that does nothing. The exec of torchrun then
    resets these signals to their default actions.
    """
    for number in signal.valid_signals() - UNHANDLED_SIGNALS:
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda got, _frame: on_stop(got))


def take_lock(launch: Path, fd: int) -> lock.LaunchLock:
    """Writes this process into the inherited lock. Raises RefusedError if that fails."""
    os.set_inheritable(fd, False)
    try:
        return lock.LaunchLock(launch, fd)
    except OSError as error:
        raise RefusedError(
            f"cannot write {launch / rundir.LOCK}: {error.strerror}; no supervisor is started"
        ) from error


def main() -> int:
    """Runs the supervisor; returns 0 when the launch has ended, in any state, or an error code."""
    parser = argparse.ArgumentParser(prog="python -m console.supervisor", description=__doc__)
    parser.add_argument("launch", type=Path, help="launch directory")
    parser.add_argument(
        "--lock-fd", type=int, required=True, help="inherited descriptor of the locked lock file"
    )
    parser.add_argument(
        "--adopt", action="store_true",
        help="adopt the launch, with the operator's settings from standard input (JSON)",
    )  # fmt: skip
    options = parser.parse_args()
    # A command line is public, and the arguments of an operator's hook may contain a key.
    adopt = sys.stdin.read() if options.adopt else None
    access.set_safe_umask()
    started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    log(f"{started} supervisor pid {os.getpid()} of {options.launch}")
    try:
        launch_lock = take_lock(options.launch, options.lock_fd)
    except ContractError as error:
        log(error)
        return error.exit_code
    become_subreaper()

    def run_child(channel: Channel, state: ChildState) -> int:
        os.close(options.lock_fd)
        return child.main(options.launch, adopt, launch_lock, channel, state)

    owner = Owner(run_child)
    handle_signals(owner.add_signal)
    return owner.run()


if __name__ == "__main__":
    sys.exit(main())
