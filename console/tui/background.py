"""Runs actions of the operator, and other slow work of the screen, in daemon threads.

Each piece of work has its own thread, so a directory that does not answer blocks neither keys nor
painting. Requests and launches are commands in other processes, which continue if the screen ends.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from console.sources.process import NAME
from console.tui.feed import Feed
from trainers.contract import environ
from trainers.contract.errors import ContractError

ANSWER_S = 300.0
"""Longest wait of `nsa-console do` for the answer to a request."""
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
    """An action or other work that has no result yet. `since` is a monotonic time.

    `later` says in one or more lines what becomes of the action if the screen ends now, or is "".
    """

    label: str
    about: str
    since: float
    later: str = ""

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self.since

    @property
    def is_late(self) -> bool:
        return self.waited_s > LIMIT_S

    def __str__(self) -> str:
        return f"{self.label} of {self.about}" if self.about else self.label


def run_in_background(
    screen: Screen, label: str, work: Callable[[], Any], then: Callable[[Any], object],
    failed: Callable[[str], object] | None = None, about: str = "", later: str = "",
) -> None:  # fmt: skip
    """Runs `work` in a thread; calls `then` with the result, or `failed` with an error sentence.

    By default, `failed` shows the error. Until `then` or `failed` is called, `screen.pending` has
    the action. Once the screen has ended, neither is called.
    """
    fail = failed or (lambda sentence: screen.say(sentence, "error"))
    pending = Pending(label, about, time.monotonic(), later)
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


def prepare(options: Any) -> Any:
    """Checks a launch in this process, as `console.actions.prepare` does."""
    from console import actions  # its import costs time and memory

    return actions.prepare(options)


def launch(options: Any) -> tuple[Path, list[str]]:
    """Starts a launch by `nsa-console launch` or `resume`; returns its directory, and messages.

    `options` are those of a draft or of a resume. Messages are returned only for a resume, for
    example on a flag that differs in the shell.
    """
    words = ["launch", options.plan, "--between", options.between, "--digest", options.digest]
    words += [f"--flag={name}={value}" for name, value in options.flags.items()]
    if options.resume is not None:
        words = ["resume", str(options.resume.absolute())]
    event, messages = _run("launch", ["--root", str(options.root), *words])
    return Path(event["path"]), messages if options.resume else []


def request(path: Path, action: str, args: Mapping[str, Any]) -> str:
    """Sends a request by `nsa-console do` (or `adopt`); returns the answer."""
    words = [f"{name}={'' if value is None else value}" for name, value in args.items()]
    command = ["do", str(path.absolute()), action, *words, "--timeout", str(ANSWER_S)]
    if action == "adopt":
        command = ["adopt", str(path.absolute())]
    text = str(_run(action, command)[0].get("text") or "done")
    return text if text.startswith(action) else f"{action}: {text}"


def _run(action: str, command: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Runs a command of `nsa-console` in a process with its own session.

    The process continues if the screen ends. If the screen itself wrote into a directory that does
    not answer, the console might be unable to exit. Returns two values: the result, and the lines
    on standard error. Raises ContractError if the command fails, for example after a rejection.
    """
    from console.supervisor import launch_spec

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
    if done.returncode:
        raise ContractError(str(event.get("text") or event.get("error")))
    return event, [line.removeprefix(f"{NAME}: ") for line in done.stderr.splitlines()]
