"""Prints results, errors and progress of the commands; prepares the standard descriptors.

Results and changes go to standard output, error sentences and the progress bar to standard error.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from console import status_text
from console.model import RunState
from console.sources.sanitize import clean
from trainers.contract import jsonl
from trainers.contract.errors import ContractError

BAR_CELLS = 30
MAX_SENTENCE_CHARS = 400
FIGURES_EVERY_S = 10.0


class OutputError(ContractError):
    """Standard output cannot be written; an action that was not rejected has been executed.

    For a rejected action, `exit_code` is that of the rejection.
    """

    exit_code = 6

    def __init__(self, error: OSError, lost: str):
        lost = " ".join(lost.split())
        super().__init__(f"cannot write to standard output: {error.strerror}; not written: {lost}")
        self.is_broken_pipe = error.errno == errno.EPIPE


def prepare() -> None:
    """Opens closed standard descriptors on /dev/null; output escapes what it cannot encode.

    If a standard descriptor stayed closed, the next opened file would get its number. A child would
    then write its output into this file.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def is_terminal() -> bool:
    """Returns whether standard input and standard output are terminals."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))


def print_line(text: str) -> None:
    """Prints a line and flushes it. Raises OutputError."""
    try:
        print(text, flush=True)  # noqa: T201
    except OSError as error:
        raise OutputError(error, text) from error


def emit(record: Any) -> None:
    """Prints one JSON document on one line; non-finite numbers become text. Raises OutputError."""
    print_line(jsonl.encode(record).decode("ascii").rstrip())


def show(as_json: bool, record: Any, lines: Iterable[str]) -> None:
    """Prints a result: one JSON document, or lines of text. Raises OutputError."""
    if as_json:
        emit(record)
        return
    for line in lines:
        print_line(line)


def report_error(error: ContractError, as_json: bool) -> int:
    """Prints the error of a command on standard error; returns the exit code.

    With `as_json`, also prints the error on standard output, as JSON. An `OutputError` goes only to
    standard error.
    """
    if isinstance(error, OutputError):
        discard()
    elif as_json:
        try:
            emit({"error": str(error), "exit_code": error.exit_code})
        except OutputError:
            discard()
    print_error(str(error))
    return error.exit_code


def print_error(sentence: str) -> None:
    """Prints a sentence on standard error, cleaned and perhaps cut; ignores a failed write."""
    sentence = clean(sentence, MAX_SENTENCE_CHARS)
    with contextlib.suppress(OSError):
        print(f"nsa-console: {sentence}", file=sys.stderr, flush=True)  # noqa: T201


def discard() -> None:
    """Discards buffered output, so that Python can exit without an error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show_progress(share: float | None, text: str = "") -> None:
    """Draws a progress bar and `text` over the previous ones, on a terminal; None draws no bar."""
    if not sys.stderr.isatty():
        return
    bar = "" if share is None else f"{'█' * int(BAR_CELLS * share):░<{BAR_CELLS}} {share:4.0%} "
    with contextlib.suppress(OSError):
        print(f"\r\x1b[K{bar}{text}", end="", file=sys.stderr, flush=True)  # noqa: T201


class Changes:
    """Turns successive states into sentences on their changes."""

    def __init__(self) -> None:
        self._last: dict[str, object] = {}
        self._figures_at = 0.0

    def sentences(self, state: RunState, now: float) -> Iterator[str]:
        """Yields sentences on the changes since the last call.

        While the state is `running`, also yields progress and figures every `FIGURES_EVERY_S`, if
        the step has changed.
        """
        for key, value, sentence in _values(state):
            if self._last.get(key) != value:
                self._last[key] = value
                if sentence:
                    yield f"{sentence}."
        found = {f"alert {alert.id}" for alert in state.alerts}
        for key in [key for key in self._last if key.startswith("alert ") and key not in found]:
            del self._last[key]
            yield f"The {key} is no longer open."
        if state.state == "running" and now - self._figures_at >= FIGURES_EVERY_S:
            self._figures_at = now
            if self._last.get("figures") != (state.id, state.step):
                self._last["figures"] = (state.id, state.step)
                yield f"{status_text.progress(state)}{_figures(state)}."


def _values(state: RunState) -> Iterator[tuple[str, object, str]]:
    """Yields each thing that may change: its key, its value, and a sentence or ""."""
    launch, verdict = state.launch, state.verdict
    for phase in launch.phases if launch else ():
        if phase.result:
            gates = status_text.gates_text(phase)
            text = f"Phase {phase.name} is {phase.state}{f', {gates}' if gates else ''}"
            yield f"phase {phase.name}", (phase.state, phase.result), text
    why = f": {state.why}" if state.why else ""
    yield "state", (state.id, state.state, state.attempt), f"{state.id} is {state.state}{why}"
    for alert in state.alerts:
        text = "" if alert.text == state.why else f"{alert.level.upper()}: {alert.text}"
        # The text of an open alert may change at each poll, for example if it contains a duration.
        yield f"alert {alert.id}", alert.observed or alert.ts, text
    text = f"Verdict ({verdict.sure}): {verdict.sentence}" if verdict else ""
    yield "verdict", verdict and verdict.sentence, text
    blocked = state.directory_blocked_s >= 3
    text = "No write to the run directory finishes; training continues" if blocked else ""
    yield "blocked", blocked, text
    for gate in state.gates:
        yield f"gate {state.id} {gate.name}", gate.result, f"Gate {status_text.gate_line(gate)}"
    if launch:
        why = status_text.outcome(state)[1] if launch.state == "ended" else launch.why
        if state.why and state.why in why:
            why = why.partition(state.why)[2].removeprefix("; ")
        text = f"Launch {launch.id} is {launch.state}" + (f": {why}" if why else "")
        yield "launch", (launch.state, launch.why), text


def _figures(state: RunState) -> str:
    """Returns the newest figures; names their step if the ranks are at another step by now."""
    shown = ("loss", "toks_per_s", "grad_norm", "bytes_right")
    found = [(name, state.figures[name]) for name in shown if name in state.figures]
    units = {"": "", "share": ""}
    windows = (each.window for _, each in found)
    at = next((window for window in windows if window.startswith("step ")), "")
    intro = f"; at {at}: " if at not in ("", f"step {state.step}") else ", " * bool(found)
    return intro + ", ".join(
        f"{name} {status_text.number(each.value)}{units.get(each.unit, f' {each.unit}')}"
        for name, each in found
    )
