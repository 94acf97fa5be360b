"""Begins a launch: its directory, its lock and its supervisor, all of them or none."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from console import status_text
from console.plans import confirm
from console.settings import Settings
from console.sources import launches, liveness, process
from console.supervisor import lock, recovery
from console.supervisor.launch_spec import LaunchSpec, inherited
from console.supervisor.rundir_io import event_record
from trainers.contract import jsonl, rundir
from trainers.contract.errors import ContractError, RefusedError

READY_S = 20.0
POLL_S = 0.02
DYING_S, ENDING_S = 3.0, 10.0


def owner(directory: Path) -> str:
    """Says who holds the lock of a launch directory."""
    held = rundir.read_json(directory / rundir.LOCK)
    if not held:
        return "another launch that is just starting"
    held_for = status_text.age(liveness.age(jsonl.number(held, "since_ts")))
    user = jsonl.text(held, "user", "?")[:80]
    launch, host = jsonl.text(held, "launch", "?")[:200], jsonl.text(held, "host", "?")[:200]
    return f"the launch {launch}: pid {held.get('pid')} of {user} on {host}, for {held_for}"


BEFORE_THE_START = frozenset(
    (rundir.PLAN, rundir.LOCK, rundir.SUPERVISOR_LOG, rundir.EVENTS, rundir.REQUESTS)
)
"""Files that a launch writes before its supervisor has taken over."""
HALF_WRITTEN = f".{rundir.PLAN}.tmp-"


class Claim:
    """A launch directory that is ours alone as long as the lock's descriptor is open.

    A launch that was interrupted before its supervisor took over never happened: what it left is
    removed. `adopt` claims the directory of a launch whose supervisor is gone.
    """

    def __init__(self, directory: Path, adopt: bool = False):
        self.directory = directory
        self.cleared = ""
        self._adopt = adopt
        self._made = not directory.exists()
        self.fd = -1

    def take(self) -> None:
        """Creates or checks the directory and locks it. Raises RefusedError.

        What turns out not to be free for a launch keeps its mode.
        """
        rundir.check_parents(self.directory)
        if self.directory.is_dir():
            rundir.check_owner(self.directory)
            self._check_content()
        rundir.make_directory(self.directory)
        path = self.directory / rundir.LOCK
        try:
            self._lock(path)
            self._check_content()
            self._clear()
        except (OSError, RefusedError) as error:
            self.release()
            if isinstance(error, RefusedError):
                raise
            where = error.filename or path
            raise RefusedError(f"cannot lock or clear {where}: {error.strerror}") from error

    def _lock(self, path: Path) -> None:
        """Raises RefusedError where it is locked or another file too, OSError where it cannot be.

        Its content is replaced.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self.fd = os.open(path, flags, 0o600)
        status = os.fstat(self.fd)
        ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        if not ours or status.st_nlink > 1:
            raise RefusedError(
                f"{path} is no file of this launch alone (a hard link, or somebody else's); "
                "remove it"
            )
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._in_use() from None

    def _clear(self) -> None:
        """Removes half-written documents, and what a launch left that never began.

        Only under the lock. Raises OSError.
        """
        for folder in (self.directory, *self.directory.glob("[0-9]*-*")):
            with contextlib.suppress(OSError):
                for path in folder.glob(".*.json.tmp-*"):
                    path.unlink()
        for name in () if self._adopt else BEFORE_THE_START - {rundir.LOCK, rundir.REQUESTS}:
            (self.directory / name).unlink(missing_ok=True)

    def _check_content(self) -> None:
        """Raises RefusedError when the directory holds something that is not this launch."""
        try:
            names = os.listdir(self.directory)
        except OSError as error:
            raise RefusedError(f"cannot look into {self.directory}: {error.strerror}") from error
        there = {name for name in names if name != rundir.LOCK}
        if not there and not self._adopt:
            return
        if not self.is_free():
            raise self._in_use()
        launch = jsonl.text(rundir.read_json(self.directory / rundir.PLAN) or {}, "launch")[:200]
        left = {name for name in there if not name.startswith(HALF_WRITTEN)}
        readable = bool(launch) or rundir.PLAN not in there
        if self._adopt or (rundir.LOCK in names and readable and left <= BEFORE_THE_START):
            self.cleared = launch
            return
        if rundir.PLAN not in there:
            raise RefusedError(
                f"{self.directory} is not empty and holds no launch ({min(there)!r} is in it); "
                "give another directory with --run-dir"
            )
        raise RefusedError(
            f"{self.directory} holds the launch {launch or '?'}, which is over; give another "
            "directory with --run-dir"
        )

    def _in_use(self) -> RefusedError:
        held = rundir.read_json(self.directory / rundir.LOCK) or {}
        gone = held.get("host") == rundir.host_name() and not rundir.is_alive(held)
        if self._adopt and gone:
            path = self.directory / rundir.LOCK
            return RefusedError(
                f"the supervisor of {self.directory} (pid {held.get('pid')}) is gone, but another "
                f"process holds its lock {path}; fuser -v {path} names it, and nothing is taken "
                "over before it lets go"
            )
        if self._adopt:
            return RefusedError(
                f"{self.directory} has a supervisor ({owner(self.directory)}); there is nothing to "
                "take over"
            )
        return RefusedError(
            f"{self.directory} is in use by {owner(self.directory)}; "
            "watch that one, or give another directory with --run-dir"
        )

    def is_free(self) -> bool:
        """Says whether nobody else holds the lock."""
        return self.fd >= 0 or not lock.is_held(self.directory)

    def release(self) -> None:
        """Lets go of the lock; whoever inherited its descriptor keeps it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def undo(self) -> None:
        """Removes what this launch wrote, and the directory if it made it."""
        for name in (*BEFORE_THE_START - {rundir.REQUESTS}, rundir.PLAN_STATE):
            with contextlib.suppress(OSError):  # why the launch failed is the sentence to say
                (self.directory / name).unlink()
        self.release()
        for folder in (self.directory / rundir.REQUESTS, self.directory)[: 1 + self._made]:
            with contextlib.suppress(OSError):
                folder.rmdir()


def start(directory: Path, given: LaunchSpec) -> None:
    """Starts the supervisor of a launch and waits until it has taken over.

    Raises RefusedError when the directory is not ours to use, ContractError when the supervisor
    does not come up; then nothing is left behind.
    """
    record, claim = given.as_dict(time.time()), Claim(directory)
    claim.take()
    try:
        rundir.write_json(directory / rundir.PLAN, record)
        lock.claim(claim.fd, given.launch, process.user_name())
        if claim.cleared:
            text = f"the remains of the launch {claim.cleared}, which never began, were cleared"
            with os.fdopen(rundir.open_append(directory / rundir.EVENTS), "wb") as events:
                events.write(jsonl.encode(event_record(1, "note", text, "warn", by="launcher")))
        _supervise(directory, claim.fd)
    except (OSError, ContractError) as error:
        claim.undo()
        if isinstance(error, ContractError):
            raise
        raise RefusedError(f"cannot write into {directory}: {error.strerror}") from error
    claim.release()


def adopt(directory: Path, operator: Settings, sure: bool = False) -> str:
    """Gives a launch whose supervisor is gone a new one, with these settings; returns its id.

    Its command may be started again, so what was supervised before this host started has to be
    meant: `sure`. Raises RefusedError when there is nothing to take over, ContractError when the
    supervisor does not come up.
    """
    rundir.check_ours(directory)
    held = recovery.document(directory, rundir.PLAN)
    if not held:
        raise RefusedError(f"{directory} holds no launch to take over")
    launch = jsonl.text(held, "launch", "?")[:200]
    state = _adoptable(directory, launch, sure)
    former = jsonl.mapping(state, "supervisor")
    confirm.check_former(directory, held, state)
    claim, deadline = Claim(directory, adopt=True), time.monotonic() + DYING_S
    while not (claim.is_free() or rundir.is_alive(former)) and time.monotonic() < deadline:
        time.sleep(POLL_S)  # the lock goes a moment after the process that was killed
    if claim.is_free() and rundir.is_alive(former):
        raise RefusedError(
            f"the supervisor of {launch} (pid {former.get('pid')}) lives, but the lock in "
            f"{directory} is not its own; move its directory back, or stop it with kill -TERM"
        )
    claim.take()
    try:
        _adoptable(directory, launch, sure)  # again: now nobody else writes
        lock.claim(claim.fd, launch, process.user_name())
        _supervise(directory, claim.fd, "--adopt", json.dumps(asdict(operator)))
    except OSError as error:
        raise RefusedError(f"cannot write into {directory}: {error.strerror}") from error
    finally:
        claim.release()
    return launch


def _adoptable(directory: Path, launch: str, sure: bool) -> dict[str, Any]:
    """Returns plan_state.json.

    Raises RefusedError for a launch that has ended, or that this host must not go on with.
    """
    state = recovery.document(directory, rundir.PLAN_STATE)
    former = jsonl.mapping(state, "supervisor")
    if jsonl.text(state, "state") == "ended" and not any(
        map(liveness.living_in, launches.run_directories(directory))
    ):
        raise RefusedError(f"{launch} has ended; there is nothing to take over")
    host = jsonl.text(former, "host", rundir.host_name())[:200]
    if host != rundir.host_name():
        raise RefusedError(f"{launch} ran on {host}; its ranks may live there, so adopt it there")
    if former.get("boot_id") != rundir.boot_id() and not sure:
        raise RefusedError(
            f"{launch} was not supervised since this host started, and its command may be started "
            f"again: see it with nsa-console status {directory}, and add --yes to mean it"
        )
    return state


def _supervise(directory: Path, lock_fd: int, *more: str) -> None:
    """Starts the supervisor and waits until it has taken over. Raises OSError, ContractError."""
    log = rundir.open_append(directory / rundir.SUPERVISOR_LOG)
    argv = [
        sys.executable, "-P", "-m", "console.supervisor", str(directory.absolute()),
        "--lock-fd", str(lock_fd), *more,
    ]  # fmt: skip
    try:
        started = subprocess.Popen(
            argv, env=inherited(), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True, pass_fds=(lock_fd,),
        )  # fmt: skip
    except OSError as error:
        raise ContractError(f"the supervisor cannot be started: {error.strerror}") from error
    finally:
        os.close(log)
    _wait_until_ready(started, directory, ranks_live=bool(more))
    with contextlib.suppress(RuntimeError):  # without a thread to spare nobody reaps it
        threading.Thread(target=started.wait, name="reap-supervisor", daemon=True).start()


def _wait_until_ready(
    started: subprocess.Popen[bytes], directory: Path, ranks_live: bool
) -> None:  # fmt: skip
    """Ends a supervisor that does not come up, unless that would end ranks that live with it."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        state = rundir.read_json(directory / rundir.PLAN_STATE) or {}
        if jsonl.mapping(state, "supervisor").get("pid") == started.pid:
            return
        if started.poll() == RefusedError.exit_code:
            raise RefusedError(_last_line(directory))
        if started.poll() is not None:
            raise ContractError(f"the supervisor ended at once: {_last_line(directory)}")
        time.sleep(POLL_S)
    if ranks_live:
        raise ContractError(
            f"the supervisor (pid {started.pid}) has not written within {READY_S:g} s that it took "
            "over (a full disk?); it and the ranks go on, and nsa-console status tells more"
        )
    started.terminate()
    try:
        started.wait(ENDING_S)
    except subprocess.TimeoutExpired:
        started.kill()
        started.wait()
    raise ContractError(f"the supervisor did not start within {READY_S:g} s")


def _last_line(directory: Path) -> str:
    data = jsonl.read_bytes(directory / rundir.SUPERVISOR_LOG, 1 << 16)
    text = data.decode("utf-8", "replace")
    return next((line for line in reversed(text.splitlines()) if line.strip()), "it said nothing")


def host_facts() -> dict[str, Any]:
    """Returns what this machine is, for run.json."""
    uname = os.uname()
    return {
        "name": rundir.host_name(), "kernel": f"{uname.sysname} {uname.release}",
        "machine": uname.machine, "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "python": ".".join(map(str, sys.version_info[:3])), "executable": sys.executable,
    }  # fmt: skip
