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
from typing import TYPE_CHECKING, Any

from trainers.contract.errors import ContractError

if TYPE_CHECKING:
    from console.tui.main import ConsoleApp

ANSWER_S = 15.0
LIMIT_S = 20.0


def beside(
    app: ConsoleApp,
    label: str,
    work: Callable[[], Any],
    then: Callable[[Any], object],
    failed: Callable[[str], object] | None = None,
) -> None:
    """Runs `work` in a thread; `then` gets its result, `failed` the sentence of its error.

    Without `failed` the screen says it. What comes after the time limit is dropped.
    """
    fail = failed or (lambda sentence: app.say(sentence, "error"))
    settled = False

    def settle(end: Callable[[Any], object], outcome: Any) -> None:
        nonlocal settled
        if app.is_running and not settled:
            settled = True
            end(outcome)
            app.feed.nudge()

    def body() -> None:
        try:
            end, outcome = then, work()
        except (ContractError, OSError) as problem:
            end, outcome = fail, str(problem) or type(problem).__name__
        except Exception as mistake:
            text = f"{label} failed: {type(mistake).__name__}: {mistake}; please report it"
            end, outcome = fail, text
        app.call_later(settle, end, outcome)

    late = (
        f"{label}: no answer within {LIMIT_S:.0f} s; the directory may be frozen, "
        "and what was asked may still happen"
    )
    threading.Thread(target=body, name=f"deed-{label}", daemon=True).start()
    app.set_timer(LIMIT_S, lambda: settle(fail, late))


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
