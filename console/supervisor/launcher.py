"""Starts the supervisor of a new launch, or of a launch whose supervisor has died."""

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
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from console import access, status_text
from console.plans import gate_check
from console.settings_file import Settings
from console.sources import launches, liveness, process
from console.supervisor import former_documents, lock
from console.supervisor.launch_spec import LaunchSpec, inherited
from trainers.contract import jsonl, rundir
from trainers.contract.errors import ContractError, RefusedError

READY_S = 60.0
POLL_S = 0.02
DYING_S, ENDING_S = 3.0, 10.0
BEFORE_THE_START = frozenset(
    (rundir.PLAN, rundir.LOCK, rundir.SUPERVISOR_LOG, rundir.EVENTS, rundir.REQUESTS)
)
"""Files and directories that a launch creates before its supervisor is ready."""
HALF_WRITTEN = f".{rundir.PLAN}.tmp-"


class TakenError(RefusedError):
    """The directory of a launch belongs to another launch."""


class Claim:
    """A launch directory that belongs to this process while the lock's descriptor is open.

    A launch that was interrupted before its supervisor was ready never ran; `take` removes its
    files. With `adopt`, the directory contains a launch that no longer has a supervisor.
    """

    def __init__(self, directory: Path, adopt: bool = False):
        self.directory = directory
        self._adopt = adopt
        self._created = not directory.exists()
        self.fd = -1

    def take(self) -> None:
        """Creates or checks the directory, and locks it. Raises RefusedError.

        The owner and the content of a directory are checked before its mode is changed.
        """
        access.check_parents(self.directory)
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
        """Locks a file. Raises RefusedError if the file is unsafe or another process has the lock.

        Raises OSError if the file cannot be opened or locked for another reason.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self.fd = os.open(path, flags, 0o600)
        status = os.fstat(self.fd)
        ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        if not ours or status.st_nlink > 1:
            raise RefusedError(
                f"cannot lock {path}: it is a hard link, not a regular file, or another user's; "
                "remove it"
            )
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._in_use() from None

    def _clear(self) -> None:
        """Removes half-written documents and, without `adopt`, files of a launch that never ran.

        This process must have the lock. Raises OSError.
        """
        for folder in (self.directory, *self.directory.glob("[0-9]*-*")):
            with contextlib.suppress(OSError):
                for path in folder.glob(".*.json.tmp-*"):
                    path.unlink()
        for name in () if self._adopt else BEFORE_THE_START - {rundir.LOCK, rundir.REQUESTS}:
            (self.directory / name).unlink(missing_ok=True)

    def _check_content(self) -> None:
        """Raises RefusedError if the directory is in use or cannot be read.

        Without `adopt`, also raises it for files of a launch that ran, or of another program.
        """
        try:
            names = os.listdir(self.directory)
        except OSError as error:
            raise RefusedError(f"cannot read {self.directory}: {error.strerror}") from error
        others = {name for name in names if name != rundir.LOCK}
        if not others and not self._adopt:
            return
        if not self.is_free():
            raise self._in_use()
        launch = jsonl.text(rundir.read_json(self.directory / rundir.PLAN) or {}, "launch")[:200]
        written = {name for name in others if not name.startswith(HALF_WRITTEN)}
        readable = bool(launch) or rundir.PLAN not in others
        if self._adopt or (rundir.LOCK in names and readable and written <= BEFORE_THE_START):
            return
        if rundir.PLAN not in others:
            raise RefusedError(
                f"{self.directory} is not empty and contains no launch ({min(others)!r} is in it); "
                "pass another directory with --run-dir"
            )
        raise TakenError(
            f"{self.directory} contains the launch {launch or '?'}; pass another directory with "
            "--run-dir"
        )

    def _in_use(self) -> RefusedError:
        """Returns the error that the directory is in use, with the process that has the lock."""
        owner = rundir.read_json(self.directory / rundir.LOCK) or {}
        if self._adopt:
            return RefusedError(
                f"{self.directory} has a supervisor ({_owner_words(owner)}); only a launch "
                "without a supervisor can be adopted"
            )
        return TakenError(
            f"{self.directory} is in use by {_owner_words(owner)}; "
            "watch that launch, or start again with a new directory"
        )

    def is_free(self) -> bool:
        """Returns whether no other process holds the lock."""
        return self.fd >= 0 or not liveness.is_locked(self.directory)

    def release(self) -> None:
        """Closes the lock; a process that inherited its descriptor still has the lock."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def undo(self) -> None:
        """Removes the files of this launch, and the directory if this launch created it."""
        for name in (*BEFORE_THE_START - {rundir.REQUESTS}, rundir.PLAN_STATE):
            with contextlib.suppress(OSError):  # the caller reports why the launch failed
                (self.directory / name).unlink()
        self.release()
        for folder in (self.directory / rundir.REQUESTS, self.directory)[: 1 + self._created]:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _owner_words(owner: Mapping[str, Any]) -> str:
    """Returns a text on the owner in a lock file; the owner is {} while its launch starts."""
    if not owner:
        return "another launch that is starting"
    held_for = status_text.age(liveness.age(jsonl.number(owner, "since_ts")))
    user = jsonl.text(owner, "user", "?")[:80]
    launch, host = jsonl.text(owner, "launch", "?")[:200], jsonl.text(owner, "host", "?")[:200]
    return f"the launch {launch}: pid {owner.get('pid')} of {user} on {host}, for {held_for}"


def start(directory: Path, spec: LaunchSpec) -> None:
    """Starts the supervisor of a launch and waits until the supervisor is ready.

    Raises TakenError if the directory belongs to another launch, or RefusedError if it cannot be
    used. Raises ContractError if the supervisor does not start; the files that this launch wrote
    are then removed.
    """
    record, claim = spec.as_dict(time.time()), Claim(directory)
    claim.take()
    try:
        rundir.write_json(directory / rundir.PLAN, record)
        lock.claim(claim.fd, spec.launch, process.user_name())
        _start_supervisor(directory, claim.fd)
    except (OSError, ContractError) as error:
        claim.undo()
        if isinstance(error, ContractError):
            raise
        raise RefusedError(f"cannot write into {directory}: {error.strerror}") from error
    claim.release()


def adopt(directory: Path, operator: Settings, sure: bool = False) -> str:
    """Starts a new supervisor for a launch whose supervisor has died; returns the launch's id.

    The supervisor gets the working directory of the launch and the inherited variables of the
    newest run. It may start the command of the phase again. A launch that was not supervised since
    this host booted, or in another PID namespace, therefore needs `sure`. Raises RefusedError if
    the launch cannot be adopted, or ContractError if the supervisor does not start.
    """
    access.check_ours(directory)
    plan = former_documents.document(directory, rundir.PLAN)
    if not plan:
        raise RefusedError(f"{directory} contains no launch to adopt")
    launch = jsonl.text(plan, "launch", "?")[:200]
    state = _adoptable_state(directory, launch, sure)
    advice = f", and adopt again; or, if no rank is alive, cd to it: {_resume_command(directory)}"
    cwd, runs = working_directory(plan, advice), launches.run_directories(directory)
    newest = former_documents.document(runs[-1], rundir.RUN) if runs else {}
    gate_check.check_former(directory, plan, state)
    claim = Claim(directory, adopt=True)
    _wait_until_free(claim, launch, jsonl.mapping(state, "supervisor"))
    claim.take()
    try:
        _adoptable_state(directory, launch, sure)  # again, now that no other process writes
        lock.claim(claim.fd, launch, process.user_name())
        _start_supervisor(
            directory, claim.fd, json.dumps(asdict(operator)),
            cwd=cwd, recorded=jsonl.mapping(newest, "environment"),
        )  # fmt: skip
    except OSError as error:
        raise RefusedError(f"cannot write into {directory}: {error.strerror}") from error
    finally:
        claim.release()
    return launch


def _wait_until_free(claim: Claim, launch: str, former: Mapping[str, Any]) -> None:
    """Waits briefly for the lock, because a killed process has the lock until it has ended.

    Raises RefusedError if the former supervisor is alive and does not hold this directory's lock.
    """
    deadline = time.monotonic() + DYING_S
    while not (claim.is_free() or rundir.is_alive(former)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    if claim.is_free() and rundir.is_alive(former):
        raise RefusedError(
            f"the supervisor of {launch} (pid {former.get('pid')}) is alive, but does not hold the "
            f"lock in {claim.directory}; move its directory back, or stop it with kill -TERM"
        )


def _adoptable_state(directory: Path, launch: str, sure: bool) -> dict[str, Any]:
    """Returns plan_state.json. Raises RefusedError if the launch cannot be adopted."""
    state = former_documents.document(directory, rundir.PLAN_STATE)
    former = jsonl.mapping(state, "supervisor")
    if jsonl.text(state, "state") == "ended" and not any(
        map(liveness.living_in, launches.run_directories(directory))
    ):
        raise RefusedError(f"{launch} has ended; there is nothing to adopt")
    if host := rundir.other_host(former):
        raise RefusedError(
            f"{launch} ran on {host[:200]}; its ranks may be alive there, adopt it there; if no "
            f"rank is alive there: {_resume_command(directory)}"
        )
    if not (rundir.is_here(former) or sure):
        why = "was not supervised since this host booted"
        look = f"look at {process.command('status', directory)}"
        if rundir.is_hidden(former):
            why = "was supervised in another container of this host"
            look = "look there for its ranks"
        raise RefusedError(
            f"{launch} {why}, so adopt may start its command again: {look}, and add --yes to "
            "confirm"
        )
    return state


def _resume_command(directory: Path) -> str:
    """Returns the command that resumes a launch without an adoption."""
    return process.command("resume", directory.absolute(), "--yes")


def working_directory(plan: Mapping[str, Any], advice: str) -> Path:
    """Returns the directory in which a launch was started; its plan may have relative paths.

    `plan` is the content of plan.json. Raises RefusedError, with an `advice`, if the path is no
    directory of this user or of root.
    """
    cwd = Path(jsonl.text(plan, "cwd"))
    with contextlib.suppress(OSError, ValueError):
        there = cwd.stat()
        is_ours = stat.S_ISDIR(there.st_mode) and there.st_uid in (0, os.geteuid())
        if is_ours and cwd.is_absolute():
            return cwd
    raise RefusedError(
        f"{jsonl.text(plan, 'launch', '?')[:200]} was started in {str(cwd)!r}, which is not a "
        f"directory of yours or of root; restore it{advice}"
    )


def _start_supervisor(
    directory: Path, lock_fd: int, adopt: str = "", cwd: Path | None = None,
    recorded: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Starts the supervisor and waits until it is ready. Raises OSError or ContractError.

    Three arguments are for an adoption: `adopt` has the operator's settings as JSON, `cwd` is the
    working directory of the launch, and `recorded` its environment.
    """
    log = rundir.open_append(directory / rundir.SUPERVISOR_LOG)
    argv = [
        sys.executable, "-P", "-m", "console.supervisor", str(directory.absolute()),
        "--lock-fd", str(lock_fd), *["--adopt"][: bool(adopt)],
    ]  # fmt: skip
    try:
        started = subprocess.Popen(
            argv, cwd=cwd, env=inherited(recorded), stdout=log, stderr=log,
            stdin=subprocess.PIPE if adopt else subprocess.DEVNULL,
            start_new_session=True, pass_fds=(lock_fd,),
        )  # fmt: skip
    except OSError as error:
        raise ContractError(f"cannot start the supervisor: {error.strerror}") from error
    finally:
        os.close(log)
    if started.stdin is not None:
        with contextlib.suppress(OSError), started.stdin as stream:
            stream.write(adopt.encode())
    _wait_until_ready(started, directory, ranks_live=bool(adopt))
    with contextlib.suppress(RuntimeError):  # if no thread can start, the supervisor is not reaped
        threading.Thread(target=started.wait, name="reap-supervisor", daemon=True).start()


def _wait_until_ready(
    started: subprocess.Popen[bytes], directory: Path, ranks_live: bool
) -> None:  # fmt: skip
    """Waits until plan_state.json has the token of the lock. Raises ContractError.

    The pid in plan_state.json is not used, because the former supervisor may have had the same pid.
    A supervisor that is not ready in time is ended. With `ranks_live` (an adoption) it is not
    ended, because the ranks would end with it.
    """
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        state = rundir.read_json(directory / rundir.PLAN_STATE) or {}
        if jsonl.mapping(state, "supervisor").get("token") == lock.token_of(directory):
            return
        if started.poll() == RefusedError.exit_code:
            raise RefusedError(_last_line(directory))
        if started.poll() is not None:
            raise ContractError(f"the supervisor did not start: {_last_line(directory)}")
        time.sleep(POLL_S)
    if ranks_live:
        raise ContractError(
            f"the supervisor (pid {started.pid}) has not written {rundir.PLAN_STATE} within "
            f"{READY_S:g} s (a full disk?); it keeps trying and the ranks keep running: see "
            f"{process.command('status', directory)}"
        )
    started.terminate()
    try:
        started.wait(ENDING_S)
    except subprocess.TimeoutExpired:
        started.kill()
        started.wait()
    raise ContractError(
        f"the supervisor was not ready within {READY_S:g} s and was ended: {_last_line(directory)}"
    )


def _last_line(directory: Path) -> str:
    data = jsonl.read_bytes(directory / rundir.SUPERVISOR_LOG, 1 << 16)
    lines = data.decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else f"{rundir.SUPERVISOR_LOG} is empty"
