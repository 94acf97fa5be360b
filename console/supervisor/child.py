"""The working process of a supervisor: all that reads, writes, judges and decides for a launch.

It is forked from the owner of the processes, which replaces it when it ends too soon.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import select
import signal
import sys
from dataclasses import replace
from pathlib import Path

from console import settings
from console.sources.nvml import Nvml
from console.supervisor import launch_spec, lock
from console.supervisor.child_state import Charge
from console.supervisor.frames import Frames
from console.supervisor.hooks import Hooks
from console.supervisor.launch import Launch
from console.supervisor.link import Link
from console.supervisor.rundir_io import Directory
from console.supervisor.services import Services
from trainers.contract import rundir
from trainers.contract.errors import ContractError, RefusedError

FLUSH_S, CRASH_FLUSH_S = 3600.0, 3.0
OPEN_FILES = 64
"""Most open files of a supervisor, beside two for each rank: process and pulse."""


def open_more_files(ranks: int) -> None:
    """Raises the limit of open files to what is allowed; the owner and torchrun keep theirs.

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


def _wake(fd: int) -> None:
    """Ends the main loop's wait; a pipe that is full has woken it already."""
    with contextlib.suppress(BlockingIOError):
        os.write(fd, b"\0")


def supervise(path: Path, adopt: str | None, held_lock: lock.Held, link: Link) -> None:
    """Runs the phases of a launch, or goes on with one that a former process supervised.

    `adopt` holds the settings of who asked for it, as JSON. Raises ContractError when plan.json
    cannot be used.
    """
    record = link.kept(path / rundir.PLAN) or rundir.read_json(path / rundir.PLAN)
    given, held = launch_spec.load(path, record), link.kept(path / rundir.PLAN_STATE)
    if adopt is not None:
        given = replace(given, operator=settings.parse(json.loads(adopt), "--adopt"))
        held = held or rundir.read_json(path / rundir.PLAN_STATE) or {}
    open_more_files(max(phase.nproc for phase in given.plan.phases))
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    poller = select.poll()
    for fd in (wake_read, link.fd):
        poller.register(fd, select.POLLIN)
    directory, nvml = Directory(lambda: _wake(wake_write), held_lock.lost), Nvml()
    nvml.start()
    hooks = Hooks(
        given.operator, path, lambda *told: directory.event(path, 1, *told),
        lambda work: directory.job(work, lambda *_: None),
    )  # fmt: skip
    services = Services(directory, nvml, poller, hooks, held_lock.token, link)
    try:
        link.hear()
        launch = Launch(path, given, services, held)
        link.keep(path / rundir.PLAN, record or {})
        while not launch.over:
            link.beat()
            ready = [fd for fd, _ in poller.poll(math.ceil(launch.pause_s * 1000))]
            if wake_read in ready:
                os.read(wake_read, 4096)
            if link.fd in ready:
                link.hear()
            for number in link.charge.asked:
                launch.end("stop", f"{signal.Signals(number).name} to the supervisor")
            if link.charge.asked:
                link.obeyed()
            launch.tick()
    except EOFError:
        raise
    except BaseException:
        directory.close(CRASH_FLUSH_S)
        raise
    link.close()
    nvml.stop()
    hooks.close()
    directory.close(FLUSH_S)


def main(path: Path, adopt: str | None, held: lock.Held, end: Frames, charge: Charge) -> int:
    """Returns the exit code of this process: 0 when the launch has ended, whatever became of it."""
    link = Link(end, charge)
    signal.signal(signal.SIGUSR1, lambda *_: None)  # a program inherits no handler
    try:
        supervise(path, adopt, held, link)
    except EOFError:  # the owner is gone, and so is this process in a moment
        return 1
    except ContractError as error:
        with contextlib.suppress(OSError):  # the log may lie on a disk that takes nothing
            print(error, file=sys.stderr)  # noqa: T201
        return error.exit_code
    return 0
