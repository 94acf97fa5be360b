"""`python -m console.supervisor LAUNCH [--lock-fd N] [--adopt]`: owns a launch until its end."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType

from console import settings
from console.sources.nvml import Nvml
from console.supervisor import lock, orders
from console.supervisor.attempt import Services
from console.supervisor.directory import Directory
from console.supervisor.hooks import Hooks
from console.supervisor.launch import Launch
from trainers.contract import rundir
from trainers.contract.errors import ContractError, RefusedError

PR_SET_CHILD_SUBREAPER = 36
FLUSH_S = 3600.0
KEPT_SIGNALS = frozenset((
    signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU,
    signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGWINCH, signal.SIGURG,
    signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGSYS,
    signal.SIGTRAP,
))  # fmt: skip
"""Signals that cannot be caught, that report a bug of this process, or that end nothing."""
OPEN_FILES = 64
"""Most open files of a supervisor, beside two for each rank: process and pulse."""


def become_subreaper() -> None:
    """Makes orphans of this process its children, so that their exits are known."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        print(f"no subreaper: {os.strerror(error)}", file=sys.stderr)  # noqa: T201


def open_more_files(ranks: int) -> None:
    """Raises the limit of open files to what is allowed; torchrun gets that which was given.

    Raises RefusedError where that many ranks cannot be watched.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    needed = OPEN_FILES + 2 * ranks
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise RefusedError(
            f"a process here may have {hard} open files, and the supervisor of {ranks} ranks needs "
            f"{needed}: raise it with ulimit -n {needed}"
        )


def take_signals(on_stop: Callable[[str], None]) -> None:
    """TERM and INT stop the launch; no other signal that can be caught ends it.

    USR1 is ignored, and stays so in torchrun through exec. The others have a handler that does
    nothing: torchrun inherits no ignored one.
    """
    for number in signal.valid_signals() - KEPT_SIGNALS:
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    def stop(number: int, _frame: FrameType | None) -> None:
        on_stop(signal.Signals(number).name)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)


def _wake(fd: int) -> None:
    """Ends the main loop's wait; a pipe that is full has woken it already."""
    with contextlib.suppress(BlockingIOError):
        os.write(fd, b"\0")


def take_lock(path: Path, fd: int | None) -> lock.Held:
    """Names this process in the lock that it inherited. Raises RefusedError where it cannot."""
    if fd is not None:
        os.set_inheritable(fd, False)
    try:
        return lock.Held(path, fd)
    except OSError as error:
        raise RefusedError(f"cannot write the owner into the lock: {error.strerror}") from error


def supervise(path: Path, adopt: str | None, lock_fd: int | None) -> None:
    """Runs the phases of a launch, or goes on with one whose supervisor is gone.

    `adopt` is then the hook of who asked for it, as JSON; `lock_fd` holds the launch's lock. Raises
    ContractError when plan.json cannot be used.
    """
    held_lock = take_lock(path, lock_fd)
    given, held = orders.load(path), None
    if adopt is not None:
        given = replace(given, hook=settings.parse(json.loads(adopt), "--adopt"))
        held = rundir.read_json(path / rundir.PLAN_STATE) or {}
    open_more_files(max(phase.nproc for phase in given.plan.phases))
    asked: list[str] = []
    take_signals(asked.append)
    become_subreaper()
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    poller = select.poll()
    poller.register(wake_read, select.POLLIN)
    directory, nvml = Directory(lambda: _wake(wake_write), held_lock.lost), Nvml()
    nvml.start()
    hooks = Hooks(given.hook, path, lambda *told: directory.event(path, 1, *told))
    services = Services(directory, nvml, poller, hooks, held_lock.token)
    launch: Launch | None = None
    ends = contextlib.ExitStack()
    for end in (partial(directory.close, FLUSH_S), hooks.close, nvml.stop):
        ends.callback(end)
    try:
        launch = Launch(path, given, services, held)
        while not launch.over:
            ready = poller.poll(math.ceil(launch.pause_s * 1000))
            if any(fd == wake_read for fd, _ in ready):
                os.read(wake_read, 4096)
            if asked:
                launch.terminate(f"{asked[0]} to the supervisor")
                asked.clear()
            launch.tick()
    except ContractError:
        raise
    except Exception as mistake:  # ranks that nobody watches are worse than a run that ends
        traceback.print_exc()
        if launch is None:
            raise
        launch.give_up(
            f"the supervisor failed ({type(mistake).__name__}: {mistake}) and stopped the ranks; "
            f"see {rundir.SUPERVISOR_LOG}"
        )
    finally:
        ends.close()


def main() -> int:
    """Returns 0 when the launch has ended, whatever became of it."""
    parser = argparse.ArgumentParser(prog="python -m console.supervisor", description=__doc__)
    parser.add_argument("launch", type=Path)
    parser.add_argument("--lock-fd", type=int, help="descriptor that holds the launch's lock")
    parser.add_argument("--adopt", metavar="HOOK", help="go on with a launch left behind")
    options = parser.parse_args()
    rundir.keep_own_rights()
    begun = time.strftime("%Y-%m-%d %H:%M:%S")
    print(f"{begun} supervisor pid {os.getpid()} of {options.launch}", flush=True)  # noqa: T201
    try:
        supervise(options.launch, options.adopt, options.lock_fd)
    except ContractError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
