"""The working process of a supervisor, which reads, writes and decides for a launch.

The owner forks this process.
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

from console import settings_file
from console.sources.nvml import Nvml
from console.supervisor import launch_spec, lock
from console.supervisor.context import Services
from console.supervisor.hooks import Alive, Hooks
from console.supervisor.launch import Launch
from console.supervisor.link import Channel, ChildState, Link
from console.supervisor.rundir_io import Directory
from trainers.contract import rundir
from trainers.contract.errors import ContractError

FLUSH_S, CRASH_FLUSH_S = 3600.0, 3.0


def raise_file_limit() -> None:
    """Raises the soft limit of open files to the hard limit; the limit of the owner stays."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _wake(fd: int) -> None:
    """Wakes the main loop; if the pipe is full, the loop has already been woken."""
    with contextlib.suppress(BlockingIOError):
        os.write(fd, b"\0")


def supervise(path: Path, adopt: str | None, launch_lock: lock.LaunchLock, link: Link) -> None:
    """Runs the phases of a launch, from its start or from where a former process stopped.

    `adopt` contains the settings of the adopting operator as JSON, or is None without an adoption.
    Raises ContractError, for example if plan.json cannot be used, or EOFError if the owner ends.
    """
    record = link.stored(path / rundir.PLAN) or rundir.read_json(path / rundir.PLAN)
    spec, former = launch_spec.load(path, record), link.stored(path / rundir.PLAN_STATE)
    if adopt is not None:
        spec = replace(spec, operator=settings_file.parse(json.loads(adopt or "{}"), "--adopt"))
        former = former or rundir.read_json(path / rundir.PLAN_STATE) or {}
    raise_file_limit()
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    poller = select.poll()
    for fd in (wake_read, link.fd):
        poller.register(fd, select.POLLIN)
    directory, nvml = Directory(lambda: _wake(wake_write), launch_lock.lost), Nvml()
    nvml.start()

    def event(*words: str) -> None:
        directory.event(path, 1, *words)

    hooks, alive = Hooks(spec.operator, event), Alive(spec.operator, event)
    services = Services(directory, nvml, poller, hooks, alive, launch_lock, link)
    try:
        link.receive()
        launch = Launch(path, spec, services, former)
        link.store(path / rundir.PLAN, record or {})
        while not launch.over:
            link.send_alive()
            ready = [fd for fd, _ in poller.poll(math.ceil(launch.pause_s * 1000))]
            if wake_read in ready:
                os.read(wake_read, 4096)
            if link.fd in ready:
                link.receive()
            _handle_signals(launch, link)
            launch.tick()
    except EOFError:
        raise
    except BaseException:
        directory.close(CRASH_FLUSH_S)
        raise
    link.closing()
    nvml.stop()
    hooks.close()
    alive.end(spec.launch)
    directory.close(FLUSH_S)


def _handle_signals(launch: Launch, link: Link) -> None:
    """Stops the launch if the owner received TERM or INT; a repeated stop changes nothing."""
    while link.state.signals:
        launch.end("stop", f"{signal.Signals(link.state.signals.pop()).name} to the supervisor")


def main(
    path: Path, adopt: str | None, launch_lock: lock.LaunchLock, channel: Channel, state: ChildState
) -> int:
    """Runs the working process; returns its exit code: 0 if the launch has ended."""
    link = Link(channel, state)
    signal.signal(signal.SIGUSR1, lambda *_: None)  # so that hooks do not inherit SIG_IGN
    try:
        supervise(path, adopt, launch_lock, link)
    except EOFError:  # the owner has ended; the kernel ends this process
        return 1
    except ContractError as error:
        with contextlib.suppress(OSError):  # the log's disk may be full
            print(error, file=sys.stderr)  # noqa: T201
        return error.exit_code
    return 0
