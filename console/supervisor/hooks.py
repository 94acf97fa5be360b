"""The operator's program that is run on alerts: one at a time, in bounded time, rarely.

A process of `hook_runner` stands between, so nothing here waits. Whoever reaps that process first
may: its end is seen through a pidfd, and how the program ended comes through a pipe.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from console.settings import Hook
from console.sources import process
from console.sources.sanitize import clean
from console.supervisor.hook_runner import GRACE_S, WELL
from console.supervisor.orders import inherited
from trainers.contract import VERSION, environ, jsonl, rundir

LIMIT_S = 10.0
SPARE_S = 5.0
"""A runner is given up when it takes this much longer than its program may."""
POLL_S = 0.02
SAID_FAILURES = 3
MAX_TEXT, MAX_NAME, MAX_EARLIER = 1000, 80, 16


class _Runner:
    """One process of the runner, and what it says of its program."""

    def __init__(self, hook: Hook, folder: Path, alert: Mapping[str, Any], limit_s: float):
        told_read, told_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        stdin = os.memfd_create("alert", os.MFD_CLOEXEC)
        try:
            os.pwrite(stdin, jsonl.encode(alert), 0)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "console.supervisor.hook_runner", str(told_write),
                 str(limit_s), str(folder.absolute()), *hook.argv],
                env=inherited() | variables(alert), stdin=stdin, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, start_new_session=True, pass_fds=(told_write,),
            )  # fmt: skip
        except BaseException:
            os.close(told_read)
            raise
        finally:
            os.close(told_write)
            os.close(stdin)
        pid = self._process.pid
        try:
            self._handle = process.Handle(pid, os.pidfd_open(pid), rundir.start_ticks(pid) or 0)
        except OSError:
            self._process.kill()
            os.close(told_read)
            raise
        self._told = told_read
        self._until = time.monotonic() + limit_s + GRACE_S + SPARE_S

    def poll(self) -> str | None:
        """Returns how the program ended, None while it runs.

        What the runner does after its word, or cannot do in a frozen directory, is not waited for.
        """
        try:
            said = os.read(self._told, 4096).decode("utf-8", "replace")
        except BlockingIOError:
            late_s = time.monotonic() - self._until
            if late_s > 0:
                self._handle.send(signal.SIGKILL)
            if late_s <= SPARE_S and not self._handle.is_over():
                return None
            said = ""
        if self._handle.is_over():
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PIDFD, self._handle.fd, os.WEXITED | os.WNOHANG)
        self._process.returncode = 0  # whoever reaps it may
        self._handle.close()
        os.close(self._told)
        return said or "was given up: nothing is known of its end"


class Hooks:
    """Owns what waits to be told and the one run that is under way.

    `event(kind, text, level)` writes what failed beside the launch's mailbox.
    """

    def __init__(
        self, hook: Hook, folder: Path, event: Callable[[str, str, str], object],
        limit_s: float = LIMIT_S,
    ):  # fmt: skip
        self._hook, self._folder, self._event, self._limit_s = hook, folder, event, limit_s
        self._waiting: deque[Mapping[str, Any]] = deque(maxlen=MAX_EARLIER + 1)
        self._count = self._failures = 0
        self._run: _Runner | None = None
        self._next_at = 0.0

    def alert(self, record: Mapping[str, Any]) -> None:
        """Takes an event (with `run` and `state`, where there are any) to be told to the hook."""
        if self._hook.argv and jsonl.text(record, "level") in self._hook.levels:
            self._waiting.append(record)
            self._count += 1

    @property
    def busy(self) -> bool:
        """Says whether something runs or waits to be told."""
        return self._run is not None or self._count > 0

    def poll(self) -> None:
        """Does what is due; never waits."""
        if self._run is not None:
            how = self._run.poll()
            if how is None:
                return
            self._run = None
            self._take_end(how)
        if self._count and time.monotonic() >= self._next_at:
            self._start()

    def close(self) -> None:
        """Lets the run under way end, and tells once what waits, however short ago the last was.

        Takes at most as long as two runs may.
        """
        self._next_at = 0.0
        until = time.monotonic() + 2 * (self._limit_s + GRACE_S + SPARE_S)
        while self.busy and time.monotonic() < until:
            self.poll()
            time.sleep(POLL_S)

    def _start(self) -> None:
        self._next_at = time.monotonic() + self._hook.every_s
        alert = told(list(self._waiting), self._count)
        self._waiting.clear()
        self._count = 0
        try:
            self._run = _Runner(self._hook, self._folder, alert, self._limit_s)
        except OSError as error:
            self._take_end(f"cannot be started: {error.strerror}")

    def _take_end(self, how: str) -> None:
        name = self._hook.argv[0]
        if how == WELL:
            if self._failures >= SAID_FAILURES:
                self._event("hook", f"the alert hook {name} works again", "info")
            self._failures = 0
            return
        self._failures += 1
        text = f"the alert hook {name} {how}"
        if self._failures < SAID_FAILURES:
            self._event("hook", text, "warn")
        elif self._failures == SAID_FAILURES:
            self._event(
                "hook",
                f"{text}, {SAID_FAILURES} times in a row; it goes on being tried, and is not "
                "spoken of until it works",
                "warn",
            )


def told(records: list[Mapping[str, Any]], count: int) -> dict[str, Any]:
    """Returns what a hook reads on stdin: the newest alert, how many there were, the earlier."""
    newest = records[-1]
    return {
        "v": VERSION, "name": clean(_name(newest), MAX_NAME), "count": count,
        "level": clean(jsonl.text(newest, "level"), MAX_NAME),
        "text": clean(jsonl.text(newest, "text"), MAX_TEXT),
        "run": clean(jsonl.text(newest, "run"), MAX_TEXT),
        "state": clean(jsonl.text(newest, "state"), MAX_NAME),
        "ts": jsonl.number(newest, "ts"),
        "earlier": [clean(jsonl.text(each, "text"), MAX_TEXT) for each in records[:-1]],
    }  # fmt: skip


def variables(alert: Mapping[str, Any]) -> dict[str, str]:
    """Returns an alert as environment variables, one for each of `environ.ALERT_NAMES`."""
    keys = ((name, name.removeprefix(environ.ALERT_PREFIX).lower()) for name in environ.ALERT_NAMES)
    return {name: "" if alert[key] is None else str(alert[key]) for name, key in keys}


def _name(record: Mapping[str, Any]) -> str:
    return jsonl.text(record, "alert") or jsonl.text(record, "kind")
