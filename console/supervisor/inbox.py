"""Polls the mailboxes and other files of a launch; rejects a request that was answered before.

A request file may contain anything. It must be a regular file of this user, of at most
`MAX_REQUEST_BYTES`. `console.action_table` checks the arguments before a request is executed.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from console.action_table import Mailbox, check
from console.supervisor.attempt import Attempt
from console.supervisor.link import FILES, Link
from console.supervisor.run_files import Files, Poll
from console.supervisor.rundir_io import Directory
from trainers.contract import VERSION, jsonl, rundir
from trainers.contract.errors import UsageError

MAX_REQUEST_BYTES = 64 << 10
MAX_REQUESTS_A_POLL = 64
CHANGE_NS = 1_000_000_000
"""A request is from the future if its file changed more than this after the poll that found it."""
FILES_NAME = "files"
"""The name of the observer that reads the files of a run."""
UNREADABLE = "the request is not a JSON object of at most 64 KiB, or cannot be read; send it again"
OLDER = "the request is older than this supervisor; send it again"
RECEIVED = "a request with this id was received already"
IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


@dataclass(frozen=True, slots=True)
class Request:
    """One request file. `error` says why the request cannot be executed, or is ""."""

    path: Path
    id: str
    """The id in the file, or else an id from the file's name. An `Inbox` executes no id twice."""
    action: str
    args: Mapping[str, Any]
    by: str
    error: str = ""
    written_ns: int = 0
    """Time of the file's last change: its ctime, because a program can set the mtime."""
    found_ns: int = 0
    """Time at which the file was found, as `disk_ns` returns it."""

    @property
    def folder(self) -> Path:
        """The run or launch directory to which the request was sent."""
        return self.path.parent.parent


Outcome = tuple[bool, str, list[str]]
"""Three values: whether the request was done, a sentence, and further lines."""
Execute = Callable[[Request], Outcome | None]
"""Executes a request and returns its outcome, or None if the outcome follows later."""


def disk_ns(place: int) -> int:
    """Touches an open folder; returns the time according to the clock of its file system.

    If the folder cannot be touched, returns the time of this host.
    """
    try:
        os.utime(place)
        return os.stat(place).st_ctime_ns
    except OSError:
        return time.time_ns()


def scan(folder: Path, mailbox: Mailbox) -> list[Request]:
    """Returns the requests in the mailbox of a run or launch, at most `MAX_REQUESTS_A_POLL`.

    Regular files come first, so that other entries do not delay a request. A mailbox that is a link
    is not read.
    """
    box = folder / rundir.REQUESTS
    fd = jsonl.open_inside(box, folder)
    if fd is None:
        return []
    try:
        with os.scandir(fd) as entries:
            found = [(not e.is_file(follow_symlinks=False), e.name) for e in entries]
        names = [name for _, name in sorted(found) if not name.startswith(".")]
        found_ns = disk_ns(fd) if names else 0
    except OSError:
        return []
    finally:
        os.close(fd)
    return [_read(box / name, mailbox, found_ns) for name in names[:MAX_REQUESTS_A_POLL]]


def _read(path: Path, mailbox: Mailbox, found_ns: int) -> Request:
    name = path.name.removesuffix(".json")
    if not IDENTIFIER.fullmatch(name):
        name = f"unnamed-{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}"
    try:
        status = os.lstat(path)
    except OSError:
        return Request(path, name, "", {}, "?", UNREADABLE)
    if status.st_uid != os.geteuid():
        return Request(path, name, "", {}, "?", "the request file belongs to another user")
    record = rundir.read_json(path, MAX_REQUEST_BYTES, path.parents[1])
    if record is None:
        return Request(path, name, "", {}, "?", UNREADABLE)
    action, args = jsonl.text(record, "action"), record.get("args", {})
    by, error = jsonl.text(record, "by", "?")[:200], ""
    if record.get("v") != VERSION:
        error = f"the request is not of version {VERSION}"
    elif not isinstance(args, dict):
        error = "args of the request is not an object"
    else:
        try:
            args = check(action, args, mailbox)
        except UsageError as wrong:
            error = str(wrong)
    given = IDENTIFIER.fullmatch(jsonl.text(record, "id"))
    return Request(
        path, given[0] if given else name, action[:80], args, by, error, status.st_ctime_ns,
        found_ns,
    )  # fmt: skip


def remove(path: Path) -> None:
    """Removes a request file of any type, or renames it if it cannot be removed."""
    try:
        path.unlink()
    except FileNotFoundError:
        return
    except OSError:
        path.rename(path.with_name(f".refused-{os.urandom(4).hex()}"))


class Inbox:
    """Owns the ids of the requests that were received; executes no id twice.

    `since_ns` is the start of this supervisor. An older request is rejected, because an earlier
    supervisor may have executed it. While the clock is before `since_ns`, this rule does not apply.
    A request from the future is also rejected: the clock was set back after it was sent. Times are
    those of the request files, by the clock of the file system.
    """

    def __init__(
        self, directory: Directory, attempt_in: Callable[[Path], int], since_ns: int = 0
    ):  # fmt: skip
        self._directory, self._attempt_in = directory, attempt_in
        self._received: set[str] = set()
        self._files: set[Path] = set()
        """The files of requests that have no answer yet, or whose removal has not ended."""
        self._since_ns = since_ns

    def restore(self, answered: Iterable[str]) -> None:
        """Marks the requests as received that a former process answered."""
        self._received.update(answered)

    def execute(self, found: Sequence[Request], execute: Execute) -> bool:
        """Executes or rejects each request that is new; returns whether any request was new."""
        new = [request for request in found if request.path not in self._files]
        for request in new:
            self._files.add(request.path)
            outcome = self._execute_new(request, execute)
            if outcome is not None:
                self.answer(request, outcome)
        return bool(new)

    def _is_older(self, request: Request) -> bool:
        """Returns whether the request may have been sent to an earlier supervisor."""
        is_from_future = request.written_ns > request.found_ns + CHANGE_NS
        return is_from_future or request.written_ns <= self._since_ns <= request.found_ns

    def _execute_new(self, request: Request, execute: Execute) -> Outcome | None:
        error = request.error or OLDER * self._is_older(request)
        error = error or RECEIVED * (request.id in self._received)
        self._received.add(request.id)
        folder = request.folder
        self._directory.event(
            folder, self._attempt_in(folder), "request", f"{request.action or 'unknown action'} "
            "requested", by=request.by, request=request.id, action=request.action,
        )  # fmt: skip
        return (False, error, []) if error else execute(request)

    def answer(self, request: Request, outcome: Outcome) -> None:
        """Writes the answer into the events of the run or launch, and removes the request."""
        ok, text, detail = outcome
        folder = request.folder
        self._directory.event(
            folder, self._attempt_in(folder), "answer", text, "info" if ok else "warn",
            request=request.id, action=request.action, ok=ok, detail=detail, asked_by=request.by,
        )  # fmt: skip
        self._directory.job(
            lambda: remove(request.path),
            lambda _, error: error or self._files.discard(request.path), request.path,
        )  # fmt: skip


@dataclass(slots=True)
class _Found:
    """The result of one poll."""

    requests: list[Request]
    is_halted: bool
    news: Poll | None = None


class Poller:
    """Polls the mailboxes of a launch and of its runs, `.HALT` and the files of the attempt.

    One poll runs at a time, on the thread of the run directory. A poll is due at least once a
    second, and when a watched file or a mailbox has changed. Heartbeats are read once a second,
    or by every poll while there is a backlog. At its end, a poll calls `halt` if the launch
    directory contains a `.HALT`, and then `execute` with the requests.
    """

    def __init__(
        self, directory: Directory, launch: Path, execute: Callable[[list[Request]], object],
        halt: Callable[[], object], link: Link,
    ):  # fmt: skip
        self._directory, self._link = directory, link
        self._launch, self._execute, self._halt = launch, execute, halt
        self._watched: list[Path] = []
        self._stamps: list[object] = []
        self.is_polling = False
        self._polled_at = self._heartbeats_at = 0.0
        directory.check_for_changes = self._has_changed

    def start(self, runs: Sequence[Path], attempt: Attempt | None, every_s: float) -> bool:
        """Starts a poll if it is due and none is running; returns whether a poll was started.

        A poll is due in each new second, after a change, and `every_s` after the last poll. `runs`
        are the runs that have started; `attempt` is the current attempt.
        """
        now, changed = time.monotonic(), self._directory.changed
        is_new_second = int(now) != int(self._heartbeats_at)
        is_due = is_new_second or changed or now - self._polled_at >= every_s
        if self.is_polling or not is_due:
            return False
        self._polled_at, self._directory.changed = now, False
        heartbeats = is_new_second or (attempt is not None and attempt.behind)
        self._heartbeats_at = now if heartbeats else self._heartbeats_at
        folders = (self._launch, *runs)
        files = attempt.files.watched if attempt is not None else ()
        boxes = (folder / rundir.REQUESTS for folder in folders)
        self._watched = [*boxes, self._launch / rundir.HALT, *files]
        if attempt is not None and attempt.stage not in ("run", "over"):
            attempt = None
        self.is_polling = True
        self._directory.job(
            lambda: self._poll(folders, attempt, heartbeats), partial(self._finish, attempt)
        )
        return True

    def _finish(self, attempt: Attempt | None, found: _Found | None, _: object) -> None:
        self.is_polling = False
        found = found or _Found([], is_halted=False)
        if attempt is not None and found.news is not None:
            attempt.take(found.news)
        if found.is_halted:
            self._halt()
        self._execute(found.requests)

    # --- on the directory's thread -------------------------------------------------------------

    def _poll(self, folders: Sequence[Path], attempt: Attempt | None, heartbeats: bool) -> _Found:
        self._has_changed()
        requests = self._scan(folders)
        found = _Found(requests, os.path.lexists(self._launch / rundir.HALT))
        # Requests are executed even if the files of the run are missing or cannot be parsed.
        try:
            if attempt is not None:
                self._directory.check_run(attempt.path)
                found.news = self._read_files(attempt.files, heartbeats)
        except OSError:
            pass
        except Exception as mistake:
            self._directory.unexpected_errors.append(mistake)
        return found

    def _scan(self, folders: Sequence[Path]) -> list[Request]:
        found: list[Request] = []
        for folder in folders:
            with suppress(OSError):
                self._directory.check_run(folder)
                found += scan(folder, "launch" if folder == self._launch else "run")
        return found

    def _read_files(self, files: Files, heartbeats: bool) -> Poll | None:
        """Reads a run's files, or returns None if this observer is switched off.

        Writes the observer's name for the owner, in case this process dies during the read.
        """
        if FILES_NAME in self._link.observers_off():
            return None
        self._link.state.activity.write(FILES, FILES_NAME)
        try:
            return files.poll(heartbeats)
        finally:
            self._link.state.activity.write(FILES, "")

    def _has_changed(self) -> bool:
        """Returns whether the stamps of the watched files differ from those of the last call."""
        stamps: list[object] = [rundir.stamp(path) for path in self._watched]
        if stamps == self._stamps:
            return False
        self._stamps = stamps
        return True
