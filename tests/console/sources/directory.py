"""Builds launch and run directories as docs/run-directory.md describes them, for the readers."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from trainers.contract import jsonl, rundir

DEAD = {"pid": 2**22 - 3, "start_ticks": 1}
"""The identity of a process that is gone."""


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
            "phases": [{"name": "first", "state": "running", "dir": "0-first"}],
            "next_flags": {"NSA_LR": {"value": "0.1", "by": "ann@host", "ts": time.time()}},
            "supervisor": rundir.identity(),
        },
    )  # fmt: skip
    return path


def run(path: Path, world: int = 2, state: str = "running", **supervisor: Any) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    document(
        path / rundir.RUN,
        {
            "v": 1, "run": f"toy/{path.name}", "host": rundir.host_name(), "argv": ["a", "b"],
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
    record = {
        "v": 1, "run": "toy", "attempt": 1, "ts": time.time(), "mono": time.monotonic(),
        "host": rundir.host_name(), "pid": os.getpid(), "rank": rank, "step": step, "msg": msg,
    } | figures  # fmt: skip
    append(rundir.heartbeat(path, rank), record)


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
