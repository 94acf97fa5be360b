"""Runs what was asked for beside the screen, with a time limit, and brings back one sentence.

Each deed has a daemon thread of its own: a directory that does not answer freezes nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from textual.app import App
from textual.message import Message

from trainers.contract.errors import ContractError

ANSWER_S = 15.0
LIMIT_S = 20.0


Then = Callable[[Any], object]
Failed = Callable[[str], object]


class Done(Message):
    """A deed ended: with a result, or with an error's sentence."""

    def __init__(self, number: int, result: Any, error: str):
        super().__init__()
        self.number, self.result, self.error = number, result, error


class Deeds:
    """Starts deeds and knows which are not done. `finish` hands each result out once."""

    def __init__(self, app: App[Any]):
        self._app = app
        self._last = 0
        self._open: dict[int, tuple[Then, Failed | None]] = {}

    def start(
        self,
        label: str,
        work: Callable[[], Any],
        then: Then,
        failed: Failed | None = None,
    ) -> None:
        """Runs `work` in a thread; `then` gets its result, `failed` the sentence of its error."""
        self._last += 1
        number = self._last
        self._open[number] = then, failed

        def body() -> None:
            result, error = None, ""
            try:
                result = work()
            except (ContractError, OSError) as problem:
                error = str(problem) or type(problem).__name__
            except Exception as mistake:
                error = f"{label} failed: {type(mistake).__name__}: {mistake}; please report it"
            self._app.post_message(Done(number, result, error))

        threading.Thread(target=body, name=f"deed-{label}", daemon=True).start()
        late = (
            f"{label}: no answer within {LIMIT_S:.0f} s; the directory may be frozen, "
            "and what was asked may still happen"
        )
        self._app.set_timer(LIMIT_S, lambda: self._give_up(Done(number, None, late)))

    def _give_up(self, done: Done) -> None:
        if done.number in self._open:
            self._app.post_message(done)

    def finish(self, done: Done, say: Failed) -> None:
        """Hands a result to who waits for it; drops one that is late or was given up."""
        then, failed = self._open.pop(done.number, (None, None))
        if then is None:
            return
        if done.error:
            (failed or say)(done.error)
        else:
            then(done.result)


def request(path: Path, action: str, args: Mapping[str, Any]) -> str:
    """Asks by `nsa-console do` (or `adopt`), in a process of its own: a thread that writes into a
    frozen directory could not be ended, and would keep the console from leaving.

    Returns who did what. Raises ContractError with the refusal.
    """
    words = [f"{name}={'' if value is None else value}" for name, value in args.items()]
    named = ["do", str(path.absolute()), action, *words, "--timeout", str(ANSWER_S)]
    if action == "adopt":
        named = ["adopt", str(path.absolute())]
    done = subprocess.run(
        [sys.executable, "-m", "console", *named, "--json"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        start_new_session=True,
    )  # fmt: skip
    try:
        event = json.loads(done.stdout)
    except ValueError:
        raise ContractError(f"{action}: {done.stderr.strip()[-300:] or 'no answer'}") from None
    text = str(event.get("text") or event.get("error") or "done")
    if done.returncode:
        raise ContractError(text)
    return text if text.startswith(action) else f"{action}: {text}"
