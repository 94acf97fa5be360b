"""The requests of a launch: each is taken once, executed once and answered once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from console.supervisor import requests
from console.supervisor.requests import Request
from console.supervisor.rundir_io import Directory

OLDER = "the request is older than this supervisor; send it again"
Outcome = tuple[bool, str, list[str]]
"""Whether it was done, a sentence, and more lines."""
Execute = Callable[[Request], Outcome | None]
"""Does what is asked; None: the answer follows."""


class Mailbox:
    """Owns which requests were seen; a second file with the same id is answered, not executed.

    A request from before `since_ns`, when this supervisor came, may have been executed before, so
    it is refused. Only times of the file system are compared: nobody's clock, and no time that a
    request tells.
    """

    def __init__(
        self, directory: Directory, attempt_in: Callable[[Path], int], since_ns: int = 0
    ):  # fmt: skip
        self._directory, self._attempt_in = directory, attempt_in
        self._known: dict[str, tuple[Path | None, bool]] = {}
        """The file of each request that was taken, None once it is removed, and whether the request
        is done."""
        self.since_ns = since_ns

    def remember(self, answered: Mapping[str, Path]) -> None:
        """Takes requests as answered that a former supervisor answered: id and mailbox."""
        self._known |= {name: (box, True) for name, box in answered.items()}

    def take(self, found: Sequence[Request], execute: Execute) -> bool:
        """Executes what is new and answers it, unless the answer is to follow; False: none was."""
        new = False
        for request in found:
            known = self._known.get(request.key)
            if known is not None and (known[0] == request.path or not known[1]):
                continue
            new = True
            if known is not None and not request.error:
                self.answer(request, (False, "a request with this id was executed already", []))
                continue
            self._known[request.key] = request.path, False
            folder, asked = request.path.parent.parent, request.action or "something"
            self._directory.event(
                folder, self._attempt_in(folder), "request", f"{asked} asked",
                by=request.by, request=request.id, action=request.action,
            )  # fmt: skip
            error = request.error or (OLDER if self._is_older(request) else "")
            outcome = (False, error, []) if error else execute(request)
            if outcome is not None:
                self.answer(request, outcome)
        return new

    def _is_older(self, request: Request) -> bool:
        """Says whether it is from before `since_ns`; a clock that has gone back tells nothing."""
        return request.written_ns <= self.since_ns <= request.found_ns

    def answer(self, request: Request, outcome: Outcome) -> None:
        """Writes the answer into the events beside the mailbox and empties the mailbox of it."""
        ok, text, detail = outcome
        self._known[request.key] = request.path, True
        folder = request.path.parent.parent
        self._directory.event(
            folder, self._attempt_in(folder), "answer", text, "info" if ok else "warn",
            request=request.id, action=request.action, ok=ok, detail=detail, asked_by=request.by,
        )  # fmt: skip
        self._directory.job(
            lambda: requests.remove(request.path), lambda _, error: error or self._removed(request),
            request.path,
        )  # fmt: skip

    def _removed(self, request: Request) -> None:
        """Takes that another file may have the name."""
        if self._known.get(request.key) != (request.path, True):
            return
        if request.named:
            self._known[request.key] = None, True
        else:
            del self._known[request.key]
