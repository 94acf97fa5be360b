"""Encodes and validates heartbeat records of version 1; a line above 4 KiB loses figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainers.contract import VERSION, jsonl

REQUIRED_INTEGERS = ("v", "rank", "step", "attempt")
LARGEST: Mapping[str, int] = {"rank": 10**6, "attempt": 10**6, "step": 10**12}
"""Upper limits; `accept` returns None for a record with a larger value."""
TRIMMABLE = ("steps_dt_s", "gate_entropy_layers")
"""Lists that grow with the number of steps or layers; in a long line they are shortened first."""


def encode(record: dict[str, Any]) -> bytes:
    """Returns the line of a record; above 4 KiB, lists are shortened, or most fields removed.

    In a cut record, `cut` names the field that was shortened last, or says "all figures".
    """
    line = jsonl.encode(record)
    if len(line) <= jsonl.MAX_HEARTBEAT_BYTES:
        return line
    record = dict(record)
    for key in TRIMMABLE:
        values = record.get(key)
        while isinstance(values, list) and len(values) > 1:
            values = record[key] = values[len(values) // 2 :]
            record["cut"] = key
            line = jsonl.encode(record)
            if len(line) <= jsonl.MAX_HEARTBEAT_BYTES:
                return line
    kept = ("v", "n", "run", "attempt", "ts", "mono", "host", "pid", "rank", "world", "step", "msg",
            "nonfinite_loss_steps", "exit_code")  # fmt: skip
    record = {key: record[key] for key in kept if key in record}
    return jsonl.encode(record | {"cut": "all figures"})


def accept(record: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the record if it is a heartbeat of this version, or else None."""
    if any(jsonl.integer(record, key) is None for key in REQUIRED_INTEGERS):
        return None
    if record["v"] != VERSION:
        return None
    if not all(0 <= record[key] <= largest for key, largest in LARGEST.items()):
        return None
    if jsonl.number(record, "ts") is None or not isinstance(record.get("msg"), str):
        return None
    return record
