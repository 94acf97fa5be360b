"""Run directories of the ancestor system: the only module that knows them.

Its heartbeats become records of the contract; what it lacks, or measured wrongly, is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainers.contract import VERSION, jsonl, rundir
from trainers.contract.plan import Watch

WATCH = Watch(stall_floor_s=180.0, startup_s=900.0, stall_act_s=900.0)
"""Its own limit for silence, and the 15 minutes after which its collectives give up."""
METRICS = ("metrics.json", "metrics_fsdp.json")
MESSAGES = {"beat": "step_start"}
UNTRUE = ("grad_norm",)
"""Taken after the gradients were cleared: always zero."""
OWN_DUMP = "watchdog_dump"
"""A record of its internal watchdog, at step 0: no sign of life of the training."""
HEAD_BYTES = 1 << 16
CSV_COLUMNS = ("step", "loss", "lr", "toks_per_s")
"""Columns of its training.csv, which has no header."""


def is_one(run: Path) -> bool:
    """Says whether a directory was written by the ancestor: heartbeats without a version."""
    if (run / rundir.RUN).exists():
        return False
    head = jsonl.read_bytes(rundir.heartbeat(run, 0), HEAD_BYTES, 0)
    record = jsonl.decode(head.partition(b"\n")[0]) or {}
    return "v" not in record and "iso" in record and isinstance(record.get("msg"), str)


def tail(run: Path, rank: int, recent_bytes: int | None) -> jsonl.Tail:
    """Returns a reader that follows one rank's heartbeat file; a restart appends to the same one.

    `recent_bytes` as in `jsonl.Tail`: attempts are then counted from there.
    """
    return jsonl.Tail(rundir.heartbeat(run, rank), _Heartbeats(rank).record, recent_bytes)


class _Heartbeats:
    """Counts the attempts in one rank's records."""

    def __init__(self, rank: int):
        self._rank, self._attempt, self._pid = rank, 0, -1

    def record(self, record: dict[str, Any]) -> dict[str, Any] | None:
        """Returns the record as the contract has it, None for what is no heartbeat."""
        step, pid = jsonl.integer(record, "step"), jsonl.integer(record, "pid")
        msg, ts = jsonl.text(record, "msg"), jsonl.number(record, "ts")
        if step is None or step < 0 or pid is None or ts is None or msg in ("", OWN_DUMP):
            return None
        if pid != self._pid:
            self._attempt, self._pid = self._attempt + 1, pid
        kept = {key: value for key, value in record.items() if key not in UNTRUE}
        return kept | {
            "v": VERSION, "attempt": self._attempt, "rank": self._rank,
            "msg": MESSAGES.get(msg, msg),
        }  # fmt: skip


def end(run: Path, last: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns how a run ended as a `state` event, {} while metrics.json is older than its records.

    It is written when the run completed, was halted or met a non-finite loss, and does not say
    which: only all of its steps in the records say "completed".
    """
    newest_ts = max((jsonl.number(record, "ts") or 0.0 for record in last.values()), default=0.0)
    for name in METRICS:
        stamp = rundir.stamp(run / name)
        if stamp is None or stamp[2] < newest_ts * 1e9:
            continue
        planned = jsonl.integer(rundir.read_json(run / name) or {}, "steps")
        step = max((record["step"] for record in last.values()), default=0)
        why = f"the run has ended: {name} is newer than its records, the last of step {step}"
        done = planned is not None and step >= planned
        return {
            "ts": stamp[2] / 1e9, "state": "completed" if done else "stopped",
            "why": why if done else f"{why}; it does not say why",
        }  # fmt: skip
    return {}
