"""Encodes and validates heartbeat records of version 1; a line above 4 KiB loses figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainers.contract import VERSION, jsonl

REQUIRED_INTEGERS = ("v", "rank", "step", "attempt")
LARGEST: Mapping[str, int] = {"rank": 10**6, "attempt": 10**6, "step": 10**12}
"""Upper limits; `accept` returns None for a record with a larger value."""
TRIMMABLE = ("steps_dt_s", "gate_entropy_layers")
"""Lists that grow with the number of steps or layers; in a long line they are shortened."""
KEPT = ("v", "n", "run", "attempt", "ts", "mono", "host", "pid", "rank", "world", "step", "msg",
        "nonfinite_loss_steps", "exit_code")  # fmt: skip
"""The fields that a record of any length has."""
FIGURES = frozenset({
    "loss", "bits_per_byte", "lr", "grad_norm", "toks_per_s", "toks_per_s_rank", "tokens_total",
    "mfu", "mfu_exact", "steps_dt_s", "dt_fetch_s", "dt_forward_s", "dt_backward_s",
    "dt_optimizer_s", "fetch_p50_ms", "fetch_p95_ms", "gpu_mem_alloc", "gpu_mem_reserved",
    "rss_mib", "bytes_right", "batch_crc32", "skipped_steps", "nonfinite_loss_steps",
    "overflow_steps", "scale_lowered_steps", "spike_steps", "dropped_records", "gate_entropy_mean",
    "gate_entropy_min", "gate_entropy_layers", "gate_max_gate", "gate_collapse_frac",
    "gate_branch_shares", "fb_total", "sel_entropy", "sel_forced_share", "sel_distance_mean",
    "sel_distance_hist", "sel_overlap",
})  # fmt: skip
"""The figures of the contract. A long record loses all other figures first."""


def encode(record: dict[str, Any]) -> bytes:
    """Returns the line of a record; above 4 KiB, fields are removed, or lists shortened.

    In a cut record, `cut` says "other figures" if only figures outside `FIGURES` were removed. Else
    it names the list that was shortened last, or says "all figures".
    """
    line = jsonl.encode(record)
    if len(line) <= jsonl.MAX_HEARTBEAT_BYTES:
        return line
    record = {key: record[key] for key in record if key in KEPT or key in FIGURES}
    line = jsonl.encode(record | {"cut": "other figures"})
    if len(line) <= jsonl.MAX_HEARTBEAT_BYTES:
        return line
    for key in TRIMMABLE:
        values = record.get(key)
        while isinstance(values, list) and len(values) > 1:
            values = record[key] = values[len(values) // 2 :]
            record["cut"] = key
            line = jsonl.encode(record)
            if len(line) <= jsonl.MAX_HEARTBEAT_BYTES:
                return line
    record = {key: record[key] for key in KEPT if key in record}
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
