"""Runs the operator's hooks. Each hook has one process at a time, a time limit and an interval."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from console.settings_file import LEVELS, Settings
from console.sources.sanitize import clean
from console.supervisor import program
from console.supervisor.launch_spec import inherited
from trainers.contract import VERSION, environ, jsonl

LIMIT_S = 10.0
POLL_S = 0.02
MAX_TEXT, MAX_EARLIER = 1000, 16
RETRIES, MAX_PAUSE_S = 20, 1800.0
"""After the newest alert, a hook that fails is run again at most `RETRIES` times (about 8 h).

The pause between two starts doubles with each failure, up to `MAX_PAUSE_S`.
"""


class Hooks:
    """Owns the alerts that wait for the hook, and the running hook.

    `event(kind, text, level)` writes an event of the launch.
    """

    name, retries = "alert hook", RETRIES

    def __init__(
        self, settings: Settings, event: Callable[[str, str, str], object], limit_s: float = LIMIT_S
    ):
        self._settings, self._argv = settings, settings.hook
        self._event, self._limit_s = event, limit_s
        self._waiting: list[Mapping[str, Any]] = []
        self._count, self._failure = 0, ""
        self._sent: list[Mapping[str, Any]] = []
        """The alerts of the running hook, or of a failed hook that is run again."""
        self._sent_count = self._retries_left = 0
        self._runs = ThreadPoolExecutor(1, "hook")
        self._run: Future[str] | None = None
        self._started_at, self._pause_s = -math.inf, settings.hook_every_s

    def alert(self, record: Mapping[str, Any]) -> None:
        """Queues an event if the operator's settings have a hook for its level."""
        if self._argv and jsonl.text(record, "level") in self._settings.hook_levels:
            self._waiting = _worst([*self._waiting, record])
            self._count += 1
            self._retries_left, self._pause_s = self.retries, self._settings.hook_every_s

    def clear(self, run: str, name: str, state: str = "") -> None:
        """Drops a failed alert of a run or launch or, with the name "", its failed `state`."""

        def is_over(record: Mapping[str, Any]) -> bool:
            same = (record["run"], jsonl.text(record, "alert")) == (run, name)
            return same and (name != "" or record["state"] == state)

        before = self._sent
        self._sent = [each for each in before if not is_over(each)]
        self._sent_count -= len(before) - len(self._sent)

    @property
    def busy(self) -> bool:
        """Returns whether a hook is running or a new alert is waiting for the hook."""
        return self._run is not None or self._count > 0

    @property
    def _is_due(self) -> bool:
        return time.monotonic() >= self._started_at + self._pause_s

    def poll(self) -> None:
        """Reports the end of the hook, and starts the hook when it is due; never waits."""
        if self._run is not None:
            if not self._run.done():
                return
            ended, self._run = self._run, None
            error = ended.exception()  # for example, no descriptor is left
            self._take_result(f"cannot be started: {error}" if error else ended.result())
        if (self._sent or self._waiting) and self._is_due:
            self._start()

    def _start(self) -> None:
        self._started_at = time.monotonic()
        self._sent = _worst([*self._sent, *self._waiting])
        self._sent_count += self._count
        self._waiting, self._count = [], 0
        alert = document(self._sent, self._sent_count)
        try:
            self._run = self._runs.submit(run, self._argv, alert, self._limit_s)
        except RuntimeError as error:  # the old pool would run this alert later, a second time
            self._runs = ThreadPoolExecutor(1, "hook")
            self._take_result(f"cannot be started: {error}")

    def _take_result(self, failure: str) -> None:
        self._report(failure)
        if not failure or not (self._retries_left or self._count):
            self._sent, self._sent_count = [], 0
        elif not self._count:  # a new alert does not wait for the longer pause
            self._retries_left -= 1
            self._pause_s = max(self._pause_s, min(2 * self._pause_s, MAX_PAUSE_S))

    def close(self) -> None:
        """Waits for the running hook, then runs the hook once more if alerts are waiting or failed.

        Each of the two runs may take `limit_s` and the grace times of `program.run`.
        """
        self._pause_s, self._retries_left = 0.0, int(self._run is not None and not self._count)
        until = time.monotonic() + 2 * (self._limit_s + program.GRACE_S + program.SPARE_S)
        while (self.busy or self._sent) and time.monotonic() < until:
            self.poll()
            time.sleep(POLL_S)

    def _report(self, failure: str) -> None:
        """Writes an event if the result of the hook differs from its previous result."""
        before, self._failure = self._failure, failure
        if failure == before:
            return
        text = f"the {self.name} {self._argv[0]} {failure or 'works again'}"
        self._event("hook", text, "warn" if failure else "info")


class Alive(Hooks):
    """Owns the alive hook, which runs at intervals while the supervisor works."""

    name, retries = "alive hook", 0

    def __init__(self, settings: Settings, *more: Any, **options: Any):
        """Accepts the arguments of `Hooks`."""
        own = {"hook": settings.alive, "hook_every_s": settings.alive_every_s}
        super().__init__(replace(settings, **own, hook_levels=("info",)), *more, **options)

    def beat(self, run: str, state: str) -> None:
        """Starts the hook if it is due; `run` is the name of the run or launch. Never waits."""
        if not self.busy and self._is_due:
            self._queue(run, state, f"the supervisor works; {run} is {state}")
        self.poll()

    def end(self, launch: str) -> None:
        """Runs the hook for the last time, with the state "ended", and waits for it."""
        self._queue(launch, "ended", f"the launch {launch} has ended")
        self.close()

    def _queue(self, run: str, state: str, text: str) -> None:
        words = {"text": text, "run": run, "state": state}
        self.alert({"kind": "alive", "level": "info", "ts": time.time(), **words})


def run(argv: Sequence[str], alert: Mapping[str, Any], limit_s: float) -> str:
    """Runs the hook once; returns how the hook failed, or "". The output is not kept.

    The hook runs in /, because the server of a launch directory may not answer.
    """
    environment = inherited() | variables(alert)
    return program.run(argv, environment, limit_s, Path("/"), jsonl.encode(alert)).failure


def document(records: list[Mapping[str, Any]], count: int) -> dict[str, Any]:
    """Returns the document for the hook's stdin: one alert, the count, and the other texts.

    The alert is the newest of those with the worst level.
    """
    worst = max(reversed(records), key=_level)
    texts = {key: _line(worst, key) for key in ("level", "text", "run", "state")}
    return {
        "v": VERSION, "name": _line(worst, "alert") or _line(worst, "kind"), "count": count,
        **texts, "ts": jsonl.number(worst, "ts"),
        "earlier": [_line(each, "text") for each in records if each is not worst],
    }  # fmt: skip


def _worst(records: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the records without the oldest of the lowest level, if there are too many."""
    kept = list(records)
    while len(kept) > MAX_EARLIER + 1:
        kept.remove(min(kept, key=_level))
    return kept


def _level(record: Mapping[str, Any]) -> int:
    return LEVELS.index(record["level"])


def _line(record: Mapping[str, Any], key: str) -> str:
    return clean(jsonl.text(record, key), MAX_TEXT)


def variables(alert: Mapping[str, Any]) -> dict[str, str]:
    """Returns an alert as environment variables, one for each of `environ.ALERT_NAMES`."""
    keys = ((name, name.removeprefix(environ.ALERT_PREFIX).lower()) for name in environ.ALERT_NAMES)
    return {name: "" if alert[key] is None else str(alert[key]) for name, key in keys}
