"""Reads logs, the newest checkpoint, and the speed of an earlier phase, for the gates.

Each read has a limit, and a file that is a link is not read. If a log cannot be read completely,
the gate `no_log_errors` cannot pass: it fails if the part that was read has an error, and is
unknown otherwise.
"""

from __future__ import annotations

import math
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from console.rank_end import lost_peer
from console.sources import json_documents
from console.sources.rank_totals import LAST_STEPS, MAX_ATTEMPTS, RankTotals
from console.sources.record_files import read_end, rotated_log
from console.sources.sanitize import clean
from console.sources.tail import READ_CHUNK_BYTES, Tail
from trainers.contract import heartbeat, jsonl, rundir

LOG_BYTES, ALL_BYTES, SPEED_BYTES = 2 << 20, 64 << 20, READ_CHUNK_BYTES - 1
MAX_FILES, SPEED = 4096, "toks_per_s_50_above"
ERROR = re.compile(
    r"CUDA error|CUDA driver error|cudaError|CUBLAS_STATUS_|CUDNN_STATUS_|device-side assert|"
    r"NCCL error|NCCL WARN|nccl\w*Error|DistBackendError|illegal memory access|\bXid\b"
)


@dataclass(frozen=True, slots=True)
class GateFiles:
    """The facts that gates need from files; `*_doubt` says why a fact is unknown, or is ""."""

    errors: int = 0
    """Number of lines with an error."""
    first_error: str = ""
    log_doubt: str = ""
    checkpoint: str = ""
    checkpoint_mib: float | None = None
    checkpoint_doubt: str = ""
    single: str = ""
    """The run of the newest earlier phase that has one rank, or "" without such a phase."""
    single_toks_per_s: float | None = None


def read(run: Path, attempts: int, world: int) -> GateFiles:
    """Returns facts from the logs, the newest checkpoint and an earlier phase."""
    name, left = json_documents.latest_checkpoint(run) or "", ""
    size_bytes = 0
    if name:
        size_bytes, left = _size(run / rundir.CHECKPOINTS / name, run)
    mib = size_bytes / (1 << 20) if name and not left else None
    return GateFiles(*_read_logs(run, attempts, world), name, mib, left, *_single(run))


def _single(run: Path) -> tuple[str, float | None]:
    """Returns two values: the newest earlier run that has one rank, or "", and its last speed.

    The speed is known only if the gate on the speed passed with the same value, to 0.1 %.
    """
    launch = run.parent
    plan = rundir.read_json(launch / rundir.PLAN, below=launch) or {}
    planned = (jsonl.text(each, "name") for each in jsonl.entries(plan, "phases"))
    names = [name for name in (f"{index}-{each}" for index, each in enumerate(planned))
             if rundir.RUN_NAME.fullmatch(name)]  # fmt: skip
    for name in reversed(names[: names.index(run.name)] if run.name in names else []):
        folder = launch / name
        if (rundir.read_json(folder / rundir.RUN, below=folder) or {}).get("world") == 1:
            record = rundir.read_json(folder / rundir.GATES, below=folder) or {}
            own = _last_speed(folder)
            passed = any((each.get("name"), each.get("result")) == (SPEED, "pass")
                         and _is_same(jsonl.number(each, "value"), own)
                         for each in jsonl.entries(record, "gates"))  # fmt: skip
            return name, own if passed else None
    return "", None


def _is_same(written: float | None, own: float | None) -> bool:
    return None not in (written, own) and math.isclose(written or 0.0, own or 0.0, rel_tol=1e-3)


def _last_speed(run: Path) -> float | None:
    """Returns the speed (tok/s) of the last `LAST_STEPS` steps, or None if fewer are known."""
    totals = RankTotals(0)
    tail = Tail(rundir.heartbeat(run, 0), heartbeat.accept, SPEED_BYTES)
    for record in tail.poll():
        if record["rank"] == 0:
            totals.add(record)
    figures = totals.figures()
    return figures["toks_per_s"] if figures["steps"] == LAST_STEPS else None


def _read_logs(run: Path, attempts: int, world: int) -> tuple[int, str, str]:
    """Returns the number of lines with an error, the first such line, and a doubt.

    The doubt says why a log or an attempt was not read completely, or is "".
    """
    count, first, doubt, left = 0, "", "", ALL_BYTES
    if attempts > MAX_ATTEMPTS:
        doubt = f"there are more than {MAX_ATTEMPTS} attempts"
    for attempt in range(1, min(attempts, MAX_ATTEMPTS) + 1):
        folder = rundir.logs(run, attempt)
        there = rundir.names(folder)
        if there is None:
            doubt = doubt or f"{folder.name} is missing or unreadable"
            continue
        paths = [rundir.rank_log(run, attempt, rank) for rank in range(world)]
        for path in (*paths, folder / rundir.TORCHRUN_LOG):
            if doubt and path.name not in there:
                continue
            name = f"{path.parent.name}/{path.name}"
            size_bytes = _size_of(path)  # read first, because the log may grow
            limit = min(LOG_BYTES, left)
            data = read_end(path, limit + 1, run)
            if not 0 <= size_bytes <= len(data) <= limit:
                doubt = doubt or f"{name} is missing, unreadable or too long to be read completely"
            left -= len(data)
            for line in data.decode("utf-8", "replace").splitlines():
                if ERROR.search(line) or lost_peer(line):
                    count += 1
                    first = first or f"{name}: {clean(line.strip(), 160)}"
    return count, first, doubt


def _size_of(log: Path) -> int:
    """Returns the size of a log in bytes, or -1 if it cannot be read or was rotated."""
    try:
        with jsonl.opened(log) as fd:
            return -1 if os.path.lexists(rotated_log(log)) else os.fstat(fd).st_size
    except OSError:
        return -1


def _size(folder: Path, run: Path) -> tuple[int, str]:
    """Returns the size of a checkpoint, and why the manifest does not confirm this size, or ""."""
    record: dict[str, Any] = rundir.read_json(folder / "manifest.json", below=run) or {}
    files = list(jsonl.mapping(record, "files").items())[:MAX_FILES]
    total = 0
    for name, entry in files:
        listed = entry[0] if isinstance(entry, list) and entry else None
        try:
            status = os.lstat(folder / Path(name).name)
        except (OSError, ValueError):  # a name can contain NUL or half of a surrogate pair
            return 0, f"{folder.name}: {clean(name, 80)} is missing"
        if not stat.S_ISREG(status.st_mode) or status.st_size != listed:
            return 0, f"{folder.name}: {clean(name, 80)} has another size than in its manifest"
        total += status.st_size
    return total, "" if files else f"{folder.name} has no readable manifest with files"
