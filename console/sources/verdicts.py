"""Reads the verdicts that supervisors wrote into the directory `verdicts/` of their runs."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from console.model import Verdict
from console.sources import json_documents, launches
from trainers.contract import jsonl, rundir

MAX_VERDICT_BYTES = 1 << 16
MAX_LAUNCHES, MAX_RUNS, MAX_PER_RUN, MAX_SEARCH_BYTES = 50, 16, 8, 4 << 20
"""Bounds of the search in other runs; at most `MAX_PER_RUN` verdicts of a run are read."""
_NAME = re.compile(r"([0-9]{1,16})\.json")


@dataclass(frozen=True, slots=True)
class Seen:
    """A verdict of another run with the same cause and line of code as the present verdict."""

    run: str
    verdict: Verdict


def stored(run: Path, limit: int = MAX_PER_RUN, until_ts: float = math.inf) -> Iterator[Verdict]:
    """Yields the valid verdicts that `_documents` finds, the newest first."""
    for record, _ in _documents(run, limit, until_ts):
        if record is not None:
            yield json_documents.read(Verdict, record)


def _documents(
    run: Path, limit: int = MAX_PER_RUN, until_ts: float = math.inf
) -> Iterator[tuple[dict[str, Any] | None, int]]:
    """Yields the newest `limit` verdicts of a run, each with its size in bytes, the newest first.

    Verdicts newer than `until_ts` are left out. An invalid verdict is yielded as None.
    """
    names = rundir.names(run / rundir.VERDICTS, run) or []
    verdicts = filter(None, map(_NAME.fullmatch, names))
    found = [match for match in verdicts if int(match[1]) <= until_ts * 1000]
    for match in sorted(found, key=lambda each: int(each[1]), reverse=True)[:limit]:
        path = run / rundir.VERDICTS / match[0]
        data = jsonl.read_bytes(path, MAX_VERDICT_BYTES + 1, 0, below=run)
        yield jsonl.decode(data) if len(data) <= MAX_VERDICT_BYTES else None, len(data)


def newest(run: Path) -> Verdict | None:
    """Returns the newest verdict of a run, or None; a verdict from the future is ignored."""
    until_ts = time.time() + json_documents.CLOCK_S
    return next((each for each in stored(run, until_ts=until_ts) if each.ts <= until_ts), None)


def seen_before(root: Path, run: Path, verdict: Verdict) -> Seen | None:
    """Returns a verdict of another run in `root` with the same cause and line of code, or None.

    The search begins with the newest launch, and reads the last `MAX_RUNS` runs of a launch. The
    search ends after `MAX_LAUNCHES` launches, or after about `MAX_SEARCH_BYTES`. A verdict without
    a line of code has no match.
    """
    left = MAX_SEARCH_BYTES
    for launch in launches.launches(root)[:MAX_LAUNCHES] if verdict.place else ():
        for other in reversed(launches.run_directories(launch)[-MAX_RUNS:]):
            with suppress(OSError):  # one of the directories no longer exists
                if other.is_symlink() or other.samefile(run):
                    continue
            for record, read_bytes in _documents(other):
                found = json_documents.read(Verdict, record) if record else None
                if found and (found.cause, found.place) == (verdict.cause, verdict.place):
                    return Seen(f"{launches.launch_id(launch)}/{other.name}", found)
                left -= read_bytes
                if left <= 0:
                    return None
    return None
