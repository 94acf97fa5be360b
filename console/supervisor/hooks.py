"""Runs the operator's hooks: one process of each at a time, with a time limit and an interval.

`timeout` of coreutils ends a hook that hangs, even if the supervisor has died.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from console.sources.sanitize import clean
from console.supervisor.launch_spec import inherited
from console.user_config import Settings
from trainers.contract import VERSION, environ, jsonl, rundir

LIMIT_S, GRACE_S = 10.0, 2.0
"""A hook gets TERM after the limit, and KILL after the grace."""
SPARE_S, LAST_OUTPUT_S = 5.0, 0.5
POLL_S = 0.02
OK = "ok"
REPORTED_FAILURES = 3
MAX_TEXT, MAX_EARLIER = 1000, 16
LOG, MAX_LOG_BYTES, MAX_OUTPUT_BYTES = "hooks.log", 1 << 20, 32 << 10
CHUNK_BYTES = 1 << 16


class Hooks:
    """Owns the alerts that wait for the hook, and the running hook.

    `event(kind, text, level)` writes an event of the launch. `log(work)` calls a function that
    writes into the launch directory, on a thread that may hang.
    """

    name = "alert hook"

    def __init__(
        self, settings: Settings, folder: Path, event: Callable[[str, str, str], object],
        log: Callable[[Callable[[], None]], object], limit_s: float = LIMIT_S,
    ):  # fmt: skip
        self._folder, self._event, self._log = folder, event, log
        self._settings, self._argv = settings, settings.hook
        self._limit_s = limit_s
        self._waiting: deque[Mapping[str, Any]] = deque(maxlen=MAX_EARLIER + 1)
        self._count = self._failures = 0
        self._runs = ThreadPoolExecutor(1, "hook")
        self._run: Future[tuple[str, bytes]] | None = None
        self._next_at = 0.0

    def alert(self, record: Mapping[str, Any]) -> None:
        """Queues an event for the hook if the operator's settings include its level."""
        if self._argv and jsonl.text(record, "level") in self._settings.hook_levels:
            self._waiting.append(record)
            self._count += 1

    @property
    def busy(self) -> bool:
        """Returns whether a hook is running or an alert is waiting for the hook."""
        return self._run is not None or self._count > 0

    def poll(self) -> None:
        """Reports a hook that has ended, and starts the next one when it is due; never waits."""
        if self._run is not None:
            if not self._run.done():
                return
            ended, self._run = self._run, None
            self._report(*ended.result())
        if self._count and time.monotonic() >= self._next_at:
            self._next_at = time.monotonic() + self._settings.hook_every_s
            alert = document(list(self._waiting), self._count)
            self._waiting.clear()
            self._count = 0
            self._run = self._runs.submit(run, self._argv, self._folder, alert, self._limit_s)

    def close(self) -> None:
        """Waits for the running hook, then runs the hook once more if alerts are waiting.

        Returns at the latest after the time limits of two hooks.
        """
        self._next_at = 0.0
        until = time.monotonic() + 2 * (self._limit_s + GRACE_S + SPARE_S)
        while self.busy and time.monotonic() < until:
            self.poll()
            time.sleep(POLL_S)

    def _report(self, how: str, output: bytes) -> None:
        name = self._argv[0]
        self._log(lambda: write_log(self._folder, f"{name}: {how}", output))
        if how == OK:
            if self._failures >= REPORTED_FAILURES:
                self._event("hook", f"the {self.name} {name} works again", "info")
            self._failures = 0
            return
        self._failures += 1
        text = f"the {self.name} {name} {how}; see {LOG}"
        if self._failures == REPORTED_FAILURES:
            text += (
                f"; it failed {REPORTED_FAILURES} times in a row, further failures are not reported"
            )
        if self._failures <= REPORTED_FAILURES:
            self._event("hook", text, "warn")


class Alive(Hooks):
    """Owns the alive hook, which runs again and again while the supervisor works."""

    name = "alive hook"

    def __init__(self, settings: Settings, *more: Any, **options: Any):
        """Accepts the arguments of `Hooks`."""
        own = {"hook": settings.alive, "hook_every_s": settings.alive_every_s}
        super().__init__(replace(settings, **own, hook_levels=("info",)), *more, **options)

    def beat(self, run: str, state: str) -> None:
        """Starts the hook if it is due; `run` is the name of the run or launch. Never waits."""
        if not self.busy and time.monotonic() >= self._next_at:
            self._queue(run, state)
        self.poll()

    def end(self, launch: str) -> None:
        """Runs the hook for the last time, with the state "ended", and waits for it."""
        self._queue(launch, "ended")
        self.close()

    def _queue(self, run: str, state: str) -> None:
        words = {"text": f"the supervisor works; {run} is {state}", "run": run, "state": state}
        self.alert({"kind": "alive", "level": "info", "ts": time.time(), **words})


def run(
    argv: Sequence[str], folder: Path, alert: Mapping[str, Any], limit_s: float
) -> tuple[str, bytes]:
    """Runs the hook once; returns how it ended, and the first bytes of its output.

    The process group of the hook gets KILL before its leader is reaped, so that the number of the
    group cannot be reused before.
    """
    begun = time.monotonic()
    with os.fdopen(os.memfd_create("alert"), "r+b", buffering=0) as stdin:
        os.pwrite(stdin.fileno(), jsonl.encode(alert), 0)
        try:
            process = subprocess.Popen(
                ["timeout", f"--kill-after={GRACE_S:g}", f"{limit_s:g}", *argv], cwd=folder,
                env=inherited() | variables(alert), bufsize=0, stdin=stdin,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return f"cannot be started: {error.strerror}", b""
    output = bytearray()
    reader = threading.Thread(target=_drain, args=(process.stdout, output), daemon=True)
    reader.start()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    reader.join(LAST_OUTPUT_S)  # a process that left the group may keep the pipe open
    if time.monotonic() - begun >= limit_s:
        return f"ran longer than {limit_s:g} s and was ended", bytes(output)
    return f"exited (code {code})" if code else OK, bytes(output)


def _drain(out: IO[bytes], output: bytearray) -> None:
    """Reads the whole output and stores only its first bytes."""
    while data := out.read(CHUNK_BYTES):
        output += data[: MAX_OUTPUT_BYTES - len(output)]


def write_log(folder: Path, text: str, output: bytes) -> None:
    """Appends the result of one hook to the log; truncates a long log first. Raises OSError."""
    with os.fdopen(rundir.open_append(folder / LOG), "wb") as log:
        if os.fstat(log.fileno()).st_size > MAX_LOG_BYTES:
            log.truncate(0)
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        log.write(f"{stamp} UTC {text}\n".encode("utf-8", "replace") + output)


def document(records: list[Mapping[str, Any]], count: int) -> dict[str, Any]:
    """Returns the document for the hook's stdin: newest alert, count, texts of earlier alerts."""
    newest = records[-1]
    texts = {key: _line(newest, key) for key in ("level", "text", "run", "state")}
    return {
        "v": VERSION, "name": _line(newest, "alert") or _line(newest, "kind"), "count": count,
        **texts, "ts": jsonl.number(newest, "ts"),
        "earlier": [_line(each, "text") for each in records[:-1]],
    }  # fmt: skip


def _line(record: Mapping[str, Any], key: str) -> str:
    return clean(jsonl.text(record, key), MAX_TEXT)


def variables(alert: Mapping[str, Any]) -> dict[str, str]:
    """Returns an alert as environment variables, one for each of `environ.ALERT_NAMES`."""
    keys = ((name, name.removeprefix(environ.ALERT_PREFIX).lower()) for name in environ.ALERT_NAMES)
    return {name: "" if alert[key] is None else str(alert[key]) for name, key in keys}
