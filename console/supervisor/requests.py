"""Reads the request files of a run or launch.

A request may hold anything: it is bounded, must be a regular file of ours, and its arguments are
checked against `console.request_schema` before anything happens.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from console.request_schema import Mailbox, check
from trainers.contract import VERSION, jsonl, rundir
from trainers.contract.errors import UsageError

MAX_REQUEST_BYTES = 64 << 10
MAX_REQUESTS_A_LOOK = 64
NO_OBJECT = "the request is no small JSON object, or cannot be read; send it again"
IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


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
