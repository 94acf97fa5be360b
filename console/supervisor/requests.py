"""Requests: the one table of actions, and the mailbox they arrive in.

A request may hold anything: it is bounded, must be a regular file of ours, and its arguments are
checked against the table before anything happens.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainers.contract import VERSION, flags, jsonl, rundir
from trainers.contract.errors import UsageError, did_you_mean
from trainers.contract.values import TRUE

MAX_REQUEST_BYTES = 64 << 10
MAX_REQUESTS_A_LOOK = 64
NO_OBJECT = "the request is no small JSON object, or cannot be read; send it again"
IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
Mailbox = Literal["run", "launch"]


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of an action. `convert` raises ValueError with what it takes, or UsageError."""

    name: str
    convert: Callable[[Any], Any]
    help: str
    required: bool = True


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that an operator can ask for."""

    name: str
    mailboxes: tuple[Mailbox, ...]
    help: str
    args: tuple[Argument, ...] = ()


def _text(limit: int) -> Callable[[Any], str]:
    def convert(value: Any) -> str:
        if not isinstance(value, str) or not value.strip() or len(value) > limit:
            raise ValueError(f"a text of at most {limit} characters")
        return value.strip()

    return convert


def _rank(value: Any) -> int:
    text = str(value)
    if isinstance(value, bool) or not text.isdecimal() or len(text) > 6:
        raise ValueError("the number of a rank")
    return int(text)


def _yes(value: Any) -> bool:
    if value is True or (isinstance(value, str) and value.lower() in TRUE):
        return True
    raise ValueError("yes=true: it ends all ranks without a checkpoint")


def _flag_name(value: Any) -> str:
    return flags.lookup(str(value)).name


def _flag_value(value: Any) -> str | None:
    """A null, or an empty text, takes the change back."""
    if value is None or value == "":
        return None
    return flags.format_value(value) if isinstance(value, bool | int | float) else str(value)


TABLE: tuple[Action, ...] = (
    Action("dump", ("run",), "Write the stacks of all ranks, or of one.",
           (Argument("rank", _rank, "only this rank", required=False),)),
    Action("halt", ("run", "launch"), "All ranks stop at the same step and save; the plan ends."),
    Action("checkpoint", ("run",), "All ranks save after the step that they are in, and go on."),
    Action("profile", ("run",), "All ranks profile their next steps, into `profiles/`."),
    Action("stop", ("run", "launch"), "TERM, the grace time, then KILL; the plan ends."),
    Action("kill", ("run",), "KILL the whole tree now, without a checkpoint.",
           (Argument("yes", _yes, "yes=true means it"),)),
    Action("ack", ("run",), "Take note of an alert.",
           (Argument("alert", _text(80), "the alert's id"),)),
    Action("note", ("run", "launch"), "Write a sentence into the record.",
           (Argument("text", _text(1000), "the sentence"),)),
    Action("set-flag", ("launch",), "Set a flag for the next phase; without a value: undo.",
           (Argument("name", _flag_name, "the flag"),
            Argument("value", _flag_value, "its value", required=False))),
    Action("proceed", ("launch",), "Start the next phase of a plan that waits.",
           (Argument("phase", _text(80), "its name, to be sure", required=False),)),
)  # fmt: skip

ACTIONS: dict[str, Action] = {action.name: action for action in TABLE}


def check(action: str, args: Mapping[str, Any], mailbox: Mailbox | None = None) -> dict[str, Any]:
    """Returns the converted arguments. Raises UsageError that says what would be right."""
    row = ACTIONS.get(action)
    if row is None:
        raise UsageError(f"there is no action {action[:80]!r}{did_you_mean(action[:80], ACTIONS)}")
    if mailbox is not None and mailbox not in row.mailboxes:
        raise UsageError(f"{action} is asked of a {row.mailboxes[0]}, not of a {mailbox}")
    known = {argument.name: argument for argument in row.args}
    for name in args:
        if name not in known:
            takes = did_you_mean(str(name)[:80], known) if known else "; it takes none"
            raise UsageError(f"{action} has no argument {str(name)[:80]!r}{takes}")
    found = {}
    for name, argument in known.items():
        if name not in args and argument.required:
            raise UsageError(f"{action} needs {name}: {argument.help}")
        if name in args:
            try:
                found[name] = argument.convert(args[name])
            except ValueError as error:
                raise UsageError(f"{action}: {name} takes {error}") from None
    return found


@dataclass(frozen=True, slots=True)
class Request:
    """One request file. `error` says why it cannot be executed, "" when it can.

    Whoever asks may have `named` it; else it has an id from the name of its file.
    """

    path: Path
    id: str
    action: str
    args: Mapping[str, Any]
    by: str
    error: str = ""
    named: bool = False
    written_ns: int = 0
    """When its file was written, and when it was found there: both by the clock of the file system,
    which is the same for all writers."""
    found_ns: int = 0

    @property
    def key(self) -> str:
        """The id that was given, else the file: a request with the same key is executed once."""
        return self.id if self.named else str(self.path)


def disk_ns(place: Path | int) -> int:
    """Returns the time by the clock of the file system, from a file or folder that is touched.

    Where that is not possible it is the time of this host.
    """
    try:
        os.utime(place)
        return os.stat(place).st_mtime_ns
    except OSError:
        return time.time_ns()


def scan(folder: Path, mailbox: Mailbox) -> list[Request]:
    """Returns the requests that wait in a run or launch, files first, oldest name first.

    What cannot be a request comes last: no heap of it holds up what can. A mailbox that is a link
    is none.
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
    return [_read(box / name, mailbox, found_ns) for name in names[:MAX_REQUESTS_A_LOOK]]


def _read(path: Path, mailbox: Mailbox, found_ns: int) -> Request:
    name = path.name.removesuffix(".json")
    if not IDENTIFIER.fullmatch(name):
        name = f"unnamed-{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}"
    try:
        status = os.lstat(path)
    except OSError:
        return Request(path, name, "", {}, "?", NO_OBJECT)
    if status.st_uid != os.geteuid():
        return Request(path, name, "", {}, "?", "the request file belongs to somebody else")
    record = rundir.read_json(path, MAX_REQUEST_BYTES, path.parents[1])
    if record is None:
        return Request(path, name, "", {}, "?", NO_OBJECT)
    action, args = jsonl.text(record, "action"), record.get("args", {})
    by, error = jsonl.text(record, "by", "?")[:200], "the request is not of version 1"
    if record.get("v") == VERSION and isinstance(args, dict):
        try:
            args, error = check(action, args, mailbox), ""
        except UsageError as wrong:
            error = str(wrong)
    given = IDENTIFIER.fullmatch(jsonl.text(record, "id"))
    return Request(
        path, given[0] if given else name, action[:80], args, by, error, given is not None,
        status.st_mtime_ns, found_ns,
    )  # fmt: skip


def remove(path: Path) -> None:
    """Takes a request out of the mailbox, whatever it is; what cannot go is renamed away."""
    try:
        path.unlink()
    except FileNotFoundError:
        return
    except OSError:
        path.rename(path.with_name(f".refused-{os.urandom(4).hex()}"))
