"""Builds launch and run directories as docs/run-directory.md describes them, for the readers."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from console.supervisor import lock
from trainers.contract import environ, jsonl, rundir

DEAD = {"pid": 2**22 - 3, "start_ticks": 1}
"""The identity of a process that is gone."""
BOOT = (
    '{"ts": %f, "iso": "%s", "pid": 22412, "rank": %d, "step": 0, "msg": "boot", "phase": "start"}'
)
PROGRESS = (
    '{"ts": %f, "iso": "2026-11-20T15:17:04.151594Z", "pid": 22412, "rank": 0, "step": %d, "msg": '
    '"progress", "loss": %s, "toks_per_s": 297.40469675232174, "grad_norm": 0.0, '
    '"gate_entropy_mean": 1.0985525846481323, "gate_entropy_min": 1.0982354879379272, '
    '"gate_max_gate": 0.34433916211128235, "gate_collapse_frac": 0.0, "gate_branch_shares": '
    '[0.33628594875335693, 0.33264023065567017, 0.3310738503932953], "fb_total_fallbacks": 0, '
    '"sel_k_mean": 49.0, "sel_k_max": 128, "sel_rows": 1024, "sel_pct_at_max": 0.0078125}'
)
STEP_END = (
    '{"ts": %f, "iso": "2026-11-20T15:17:04.151711Z", "pid": 22412, "rank": 0, "step": %d, '
    '"msg": "step_end", "phase": "end"}'
)
DUMP = (
    '{"ts": %f, "iso": "2026-11-20T15:17:04.151711Z", "pid": 22412, "rank": 0, "step": 0, '
    '"msg": "watchdog_dump", "path": "x"}'
)
"""Lines as the ancestor wrote them."""


def launch(root: Path, plan: str = "toy", stamp: str = "20261121-030000") -> Path:
    path = root / plan / stamp
    path.mkdir(parents=True)
    document(
        path / rundir.PLAN,
        {
            "v": 1, "launch": f"{plan}-{stamp}", "name": plan,
            "phases": [
                {"name": "first", "proves": "something", "dir": "0-first"},
                {"name": "second", "proves": "more", "dir": "1-second"},
            ],
        },
    )  # fmt: skip
    document(
        path / rundir.PLAN_STATE,
        {
            "v": 1, "state": "running", "phase": 0, "between": "ask", "why": "",
            "phases": [
                {"name": "first", "state": "running", "dir": "0-first"},
                {"name": "second", "state": "later", "dir": "1-second"},
            ],
            "next_flags": {"NSA_LR": {"value": "0.1", "by": "ann@host", "ts": time.time()}},
            "supervisor": rundir.identity(),
        },
    )  # fmt: skip
    return path


@contextmanager
def owned(path: Path) -> Iterator[None]:
    """Holds the lock of a launch as its supervisor does, with one token in lock and documents."""
    fd = os.open(path / rundir.LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        lock.claim(fd, path.name, "tester")
        told(path, rundir.lock_token(path))
        yield
    finally:
        os.close(fd)


def told(path: Path, token: str, **owner: Any) -> None:
    """Puts a token into the documents of a launch's supervisor, and what else identifies it."""
    held = json.loads((path / rundir.PLAN_STATE).read_text())
    held["supervisor"] |= {"token": token} | owner
    document(path / rundir.PLAN_STATE, held)
    for each in path.glob(f"[0-9]*/{rundir.SUPERVISOR}"):
        document(each, json.loads(each.read_text()) | {"lock_token": token} | owner)


def run(path: Path, world: int = 2, state: str = "running", **supervisor: Any) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    document(
        path / rundir.RUN,
        {
            "v": 1, "run": f"toy/{path.name}", "host": rundir.host_name(), "argv": ["a", "b"],
            "environment": {environ.RUN_DIR: str(path)},
            "flags": {"NSA_LR": {"value": "0.2", "origin": "flag"}},
            "settings": {
                "train.steps": {"value": 100, "origin": "config"},
                "train.accumulate": {"value": 4, "origin": "config"},
                "optim.fused": {"value": True, "origin": "default"},
                "train.lr": {"value": {"no": "number"}},
            },
        },
    )  # fmt: skip
    record = {
        "v": 1, "state": state, "why": "", "attempt": 1, "since_ts": time.time(),
        "updated_ts": time.time(), **rundir.identity(),
        "workers": [
            {"rank": r, "local_rank": r, **rundir.identity(), "exit": None} for r in range(world)
        ],
    }  # fmt: skip
    document(path / rundir.SUPERVISOR, record | supervisor)
    return path


def document(path: Path, record: dict[str, Any]) -> None:
    path.write_text(json.dumps(record))


def beat(path: Path, rank: int, step: int, msg: str = "progress", **figures: Any) -> None:
    file = rundir.heartbeat(path, rank)
    number = file.read_bytes().count(b"\n") + 1 if file.exists() else 1
    record = {
        "v": 1, "n": number, "run": "toy", "attempt": 1, "ts": time.time(),
        "mono": time.monotonic(), "host": rundir.host_name(), "pid": os.getpid(), "rank": rank,
        "step": step, "msg": msg,
    } | figures  # fmt: skip
    append(file, record)


def sample(path: Path, **fields: Any) -> None:
    host = fields.pop("host", rundir.host_name())
    append(
        rundir.samples(path, host),
        {"v": 1, "ts": time.time(), "mono": time.monotonic(), "host": host, "attempt": 1,
         "gpus": [], "ranks": [], "disk": {"free_gib": 3.5, "total_gib": 9.0}, "load1": 0.5}
        | fields,
    )  # fmt: skip


def event(path: Path, kind: str, **fields: Any) -> None:
    append(path / rundir.EVENTS, {"v": 1, "ts": time.time(), "kind": kind} | fields)


def append(path: Path, record: dict[str, Any]) -> None:
    with path.open("ab") as stream:
        stream.write(jsonl.encode(record))


def ancestor(path: Path, gap_s: float, age_s: float, loss: str = "5.72") -> Path:
    """A directory of the ancestor: records at steps 0, 1, 20, 40, 60, the last `age_s` old."""
    path.mkdir()
    last = time.time() - age_s
    steps = (1, 20, 40, 60)
    lines = [BOOT % (last - gap_s * 3.1, "2026-11-20T15:16:54Z", 0)]
    for back, step in zip((3, 2, 1, 0), steps, strict=True):
        at = last - back * gap_s
        lines += [PROGRESS % (at, step, loss), STEP_END % (at + 1e-4, step), DUMP % (at + 190)]
    rows = "".join(f"{step},{loss},6e-05,187\n" for step in steps)
    (path / rundir.TRAINING_CSV).write_text(rows)
    rundir.heartbeat(path, 0).write_text("\n".join(lines[:-1]) + "\n")
    rank1 = BOOT % (last - gap_s * 3.1, "2026-11-20T15:16:54Z", 1)
    rundir.heartbeat(path, 1).write_text(rank1 + "\n")
    return path
