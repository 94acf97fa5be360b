"""Reads the verdicts that supervisors wrote into the directory `verdicts/` of their runs."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from console.model import CLOCK_S, Verdict
from console.sources import json_documents, launches
from trainers.contract import rundir

MAX_VERDICT_BYTES = 1 << 16
MAX_LAUNCHES, MAX_RUNS, MAX_PER_RUN = 50, 16, 8
REPLACED = "replaced by the next verdict"
"""The `end` of a verdict that another verdict on the same stall follows."""
_NAME = re.compile(r"([0-9]{1,16})\.json")


@dataclass(frozen=True, slots=True)
class Seen:
    """The verdict on an earlier stall with the same cause and line of code."""

    run: str
    verdict: Verdict


def stored(run: Path, limit: int = MAX_PER_RUN, until_ts: float = math.inf) -> Iterator[Verdict]:
    """Yields the verdicts in the newest `limit` files until `until_ts`, the newest first.

    A file that cannot be read is left out. A field that is invalid gets its default.
    """
    names = rundir.names(run / rundir.VERDICTS, run) or []
    every = filter(None, map(_NAME.fullmatch, names))
    found = [match for match in every if int(match[1]) <= until_ts * 1000]
    found.sort(key=lambda match: int(match[1]))
    for match in found[: -limit - 1 : -1]:
        record = rundir.read_json(run / rundir.VERDICTS / match[0], MAX_VERDICT_BYTES, run)
        if record is not None:
            yield json_documents.read(Verdict, record)


def newest(run: Path) -> Verdict | None:
    """Returns the newest verdict of a run, or None; ignores times later than now + `CLOCK_S`."""
    until_ts = time.time() + CLOCK_S
    return next((each for each in stored(run, until_ts=until_ts) if each.ts <= until_ts), None)


def seen_before(root: Path, run: Path, verdict: Verdict) -> Seen | None:
    """Returns the verdict on an earlier stall with the same cause and line of code, or None.

    The search begins with the newest of the last `MAX_LAUNCHES` launches in `root`, and reads the
    last `MAX_RUNS` runs of a launch. A verdict without a line of code has no match. In `run`
    itself, only the last verdict of a stall that has ended counts.
    """
    for launch in launches.launches(root)[:MAX_LAUNCHES] if verdict.place else ():
        for other in reversed(launches.run_directories(launch)[-MAX_RUNS:]):
            if other.is_symlink():
                continue
            unended = ("", REPLACED) if _is_same(other, run) else ()
            for found in stored(other, until_ts=verdict.ts):
                same = (found.cause, found.place) == (verdict.cause, verdict.place)
                if same and 0 <= found.ts < verdict.ts and found.end not in unended:
                    return Seen(f"{launches.launch_id(launch)}/{other.name}", found)
    return None


def _is_same(other: Path, run: Path) -> bool:
    try:
        return other.samefile(run)
    except OSError:  # one of the directories may no longer exist
        return False
