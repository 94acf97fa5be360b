"""Converts heartbeats and the end of a legacy run to records of the run contract.

A legacy run is a run of the system that this console replaces. Values that the legacy system
measured wrongly are left out.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from console.plan import Watch
from console.sources.tail import READ_CHUNK_BYTES, Tail
from trainers.contract import VERSION, jsonl, rundir

WATCH = Watch(stall_floor_s=180.0, startup_s=900.0, stall_act_s=900.0)
"""The stall limit of the legacy system, and the timeout of its collectives (15 minutes)."""
METRICS = ("metrics.json", "metrics_fsdp.json")
MESSAGES = {"beat": "step_start"}
WRONG = ("grad_norm",)
"""Fields without a meaning, because they were measured after the gradients were cleared."""
OWN_DUMP = "watchdog_dump"
"""A record of the legacy watchdog; its step 0 does not show progress of the training."""
HEAD_BYTES = 1 << 16
LEFT_OUT_BYTES, PID_BYTES = 64 << 20, 20
"""The most bytes that are read for the processes, and the length of a match of `_PID`."""
_PID = re.compile(rb'"pid": ?([0-9]{1,9})[,}]')
CSV_COLUMNS = ("step", "loss", "lr", "toks_per_s")
"""Columns of a legacy training.csv, which has no header."""


def is_legacy(run: Path) -> bool:
    """Returns whether a run has no run.json, and the first record of rank 0 is a legacy record."""
    if rundir.stamp(run / rundir.RUN) is not None:
        return False
    head = jsonl.read_bytes(rundir.heartbeat(run, 0), HEAD_BYTES, 0)
    record = jsonl.decode(head.partition(b"\n")[0]) or {}
    return "v" not in record and "iso" in record and isinstance(record.get("msg"), str)


def tail(run: Path, rank: int, recent_bytes: int | None) -> Tail:
    """Returns a `Tail` of one rank's heartbeat file; restarts append to the same file.

    `recent_bytes` has the same meaning as in `Tail`. Of the left out bytes, only the processes are
    read, so that each rank has the same number of attempts; of `LEFT_OUT_BYTES` at most.
    """
    path, count, last = rundir.heartbeat(run, rank), 0, -1
    if recent_bytes is not None:
        left_out = min(jsonl.size_bytes(path) - recent_bytes, LEFT_OUT_BYTES)
        for start in range(0, left_out, READ_CHUNK_BYTES):
            chunk = jsonl.read_bytes(path, READ_CHUNK_BYTES + PID_BYTES, start)
            for pid in map(int, _PID.findall(chunk[: left_out - start])):
                count, last = count + (pid != last), pid
    return Tail(path, _Heartbeats(rank, count, last).record, recent_bytes)


class _Heartbeats:
    """Converts one rank's records and counts its attempts, after the attempt of process `pid`."""

    def __init__(self, rank: int, attempt: int, pid: int):
        self._rank, self._attempt, self._pid = rank, attempt, pid

    def record(self, record: dict[str, Any]) -> dict[str, Any] | None:
        """Returns a record of the run contract, or None for `OWN_DUMP` or an invalid record."""
        step, pid = jsonl.integer(record, "step"), jsonl.integer(record, "pid")
        msg, ts = jsonl.text(record, "msg"), jsonl.number(record, "ts")
        if step is None or step < 0 or pid is None or ts is None or msg in ("", OWN_DUMP):
            return None
        if pid != self._pid:
            self._attempt, self._pid = self._attempt + 1, pid
        kept = {key: value for key, value in record.items() if key not in WRONG}
        return kept | {
            "v": VERSION, "attempt": self._attempt, "rank": self._rank,
            "msg": MESSAGES.get(msg, msg),
        }  # fmt: skip


def end(run: Path, records: Collection[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the end of a run as a `state` event, or {} if there is none.

    `records` are the newest records of the ranks; a file of `METRICS` older than these is ignored.
    A run writes such a file when it completes, halts or meets a non-finite loss; the file does not
    say which. So the run gets the state "completed" only if a record shows all planned steps.
    """
    newest_ts = max((jsonl.number(record, "ts") or 0.0 for record in records), default=0.0)
    for name in METRICS:
        stamp = rundir.stamp(run / name)
        if stamp is None or stamp[2] < newest_ts * 1e9:
            continue
        planned = jsonl.integer(rundir.read_json(run / name) or {}, "steps")
        step = max((record["step"] for record in records), default=0)
        why = f"the run has ended: {name} is newer than the last record (step {step})"
        done = planned is not None and step >= planned
        return {
            "ts": stamp[2] / 1e9, "state": "completed" if done else "stopped",
            "why": why if done else f"{why}; no reason is recorded",
        }  # fmt: skip
    return {}
