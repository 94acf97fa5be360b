"""Runs actions of the operator in daemon threads, and shows each result when it arrives.

Each action has its own thread, so a directory that does not answer blocks neither keys nor
painting.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from console.tui.feed import Feed
from trainers.contract import environ
from trainers.contract.errors import ContractError

ANSWER_S = 300.0
"""Longest wait for a supervisor's answer; the screen shows an answer as soon as it comes."""
LIMIT_S = 20.0
"""After this time without a result, a notice shows the action and the waiting time."""


class Screen(Protocol):
    """The part of the app that this module uses."""

    pending: list[Pending]
    feed: Feed

    @property
    def is_running(self) -> bool: ...
    def call_later(self, callback: Any, *args: Any) -> Any: ...
    def say(self, text: str, level: str = "ok") -> None: ...


@dataclass(frozen=True, slots=True)
class Pending:
    """An action that has no result yet. `since` is a monotonic time."""

    label: str
    about: str
    since: float

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self.since

    @property
    def is_late(self) -> bool:
        return self.waited_s > LIMIT_S

    def __str__(self) -> str:
        return f"{self.label} of {self.about}" if self.about else self.label


def run_in_background(
    screen: Screen,
    label: str,
    work: Callable[[], Any],
    then: Callable[[Any], object],
    failed: Callable[[str], object] | None = None,
    about: str = "",
) -> None:
    """Runs `work` in a thread; calls `then` with the result, or `failed` with an error sentence.

    By default, `failed` shows the error. Until `then` or `failed` is called, `screen.pending` has
    the action.
    """
    fail = failed or (lambda sentence: screen.say(sentence, "error"))
    pending = Pending(label, about, time.monotonic())
    screen.pending.append(pending)

    def settle(end: Callable[[Any], object], outcome: Any) -> None:
        if not screen.is_running:
            return
        screen.pending.remove(pending)
        end(outcome)
        screen.feed.nudge()

    def body() -> None:
        try:
            end, outcome = then, work()
        except (ContractError, OSError) as problem:
            end, outcome = fail, str(problem) or type(problem).__name__
        except Exception as mistake:
            text = f"{label} failed: {type(mistake).__name__}: {mistake}; please report it"
            end, outcome = fail, text
        screen.call_later(settle, end, outcome)

    threading.Thread(target=body, name=f"action-{label}", daemon=True).start()


def request(path: Path, action: str, args: Mapping[str, Any]) -> str:
    """Sends a request by `nsa-console do` (or `adopt`) in another process; returns the answer.

    In this process, a write into a directory that does not answer could keep the console from
    exiting. Raises ContractError if the other process fails, for example after a rejection.
    """
    from console.supervisor import launch_spec

    words = [f"{name}={'' if value is None else value}" for name, value in args.items()]
    command = ["do", str(path.absolute()), action, *words, "--timeout", str(ANSWER_S)]
    if action == "adopt":
        command = ["adopt", str(path.absolute())]
    importable = {"PYTHONPATH": launch_spec.inherited()["PYTHONPATH"]}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "console", *command, "--json"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        start_new_session=True, env=environ.snapshot() | importable,
    )  # fmt: skip
    try:
        event = json.loads(done.stdout)
    except ValueError:
        raise ContractError(f"{action}: {done.stderr.strip()[-300:] or 'no answer'}") from None
    text = str(event.get("text") or event.get("error") or "done")
    if done.returncode:
        raise ContractError(text)
    return text if text.startswith(action) else f"{action}: {text}"
