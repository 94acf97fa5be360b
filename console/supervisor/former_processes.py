"""Finds the processes of an attempt that are alive, from the document of a former supervisor.

The document may be older than the processes, and any user can copy a token or write a file. So
processes with the token are sorted by certainty, and a process that is only in the document is
checked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from console.sources import process
from trainers.contract import jsonl, rundir


class FormerProcesses:
    """The processes in `document`, the former supervisor.json of attempt `number`.

    With `is_stored` the document came from the owner process. It is then trusted without a look at
    the logs, because the disk of the logs may hang.
    """

    def __init__(self, document: Mapping[str, Any], run: Path, number: int, is_stored: bool):
        self._is_stored = is_stored and document.get("attempt") == number
        self._place = {key: document.get(key) for key in ("boot_id", "host")}
        self._run, self._logs = run, rundir.logs(run, number)
        self.agent = jsonl.mapping(document, "torchrun")
        self.workers = sorted(jsonl.entries(document, "workers"), key=_end_ts)
        """The entries of the ranks, in the order in which they ended."""
        named = (*self.workers, self.agent)
        self._named = {
            (jsonl.integer(each, "pid"), jsonl.integer(each, "start_ticks")) for each in named
        }
        ended = (each for each in self.workers if each.get("exit") is not None)
        self._ended = {str(each.get("rank")) for each in ended}

    def find(self, token: str, home: str) -> list[int]:
        """Returns the processes that are alive and have the token, the most certain first.

        Processes in the document come first. Older processes come before newer ones. A process that
        is not in the document may have a copied token, so it is left out if its rank has ended.
        """
        found = []
        for pid in process.with_token(token, home):
            ticks = rundir.start_ticks(pid)
            if ticks is None:
                continue
            is_doubtful = (pid, ticks) not in self._named
            if not (is_doubtful and process.environment(pid).get("RANK") in self._ended):
                found.append((is_doubtful, ticks, pid))
        return [pid for _, _, pid in sorted(found)]

    def hold(self, entry: Mapping[str, Any]) -> process.Handle | None:
        """Returns a handle of the process in an entry, or None if the process has ended."""
        logs = None if self._is_stored else self._logs
        return process.open_named(self._place | dict(entry), self._run, logs)


def _end_ts(entry: Mapping[str, Any]) -> float:
    return jsonl.number(jsonl.mapping(entry, "exit"), "ts") or math.inf
