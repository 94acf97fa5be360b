"""Builds launch and run directories as docs/run-directory.md describes them, for the readers."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from console.sources import procfs
from console.supervisor import lock
from trainers.contract import environ, jsonl, rundir

DEAD = {"pid": 2**22 - 3, "start_ticks": 1}
"""The identity of a process that does not exist."""
ELSEWHERE = {"host": "elsewhere", "boot_id": "another"}
"""Another host, in the identity of a process."""
FIGURES = {
    "toks_per_s": 297.4, "grad_norm": 0.0, "gate_entropy_mean": 1.0985525846481323,
    "gate_branch_shares": [0.336, 0.333, 0.331], "fb_total_fallbacks": 0, "sel_k_mean": 49.0,
}  # fmt: skip
"""Figures of a legacy progress record."""


def launch(root: Path, plan: str = "toy", stamp: str = "20261121-030000") -> Path:
    path = root / plan / stamp
    path.mkdir(parents=True)
    document(
        path / rundir.PLAN,
        {
            "v": 1, "launch": f"{plan}-{stamp}", "name": plan, "cwd": str(root),
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
        told(path, lock.token_of(path))
        yield
    finally:
        os.close(fd)


def told(path: Path, token: str, **owner: Any) -> None:
    """Puts a token into the documents of a launch's supervisor; `owner` changes its identity."""
    held = json.loads((path / rundir.PLAN_STATE).read_text())
    change(path / rundir.PLAN_STATE, supervisor=held["supervisor"] | {"token": token} | owner)
    for each in path.glob(f"[0-9]*/{rundir.SUPERVISOR}"):
        change(each, lock_token=token, **owner)


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


def completed(
    path: Path, bounds: Mapping[str, Any], gates: Sequence[Mapping[str, Any]], steps: int = 20,
    figures: Callable[[int], dict[str, Any]] = lambda _: {"loss": 1.0}, **born: Any,
) -> Path:  # fmt: skip
    """Makes a run of one rank that completed; `gates` has the results of the gates in `bounds`."""
    run(path, 1, "completed", why=f"all ranks done after step {steps}")
    change(path / rundir.RUN, **{"world": 1, "gates": bounds} | born)
    document(path / rundir.GATES, {"v": 1, "result": "pass", "gates": gates})
    event(path, "state", attempt=1, state="completed")
    beat(path, 0, 0, "boot")
    for step in range(1, steps + 1):
        beat(path, 0, step, **figures(step))
    beat(path, 0, steps, "exit", exit_code=0)
    return path


def end(path: Path, *results: str, why: str = "all phases are done") -> None:
    """Changes a launch to one that has ended, with these results of its phases (default: pass)."""
    runs = sorted(path.glob("[0-9]*-*"), key=lambda run: int(run.name.partition("-")[0]))
    phases = [
        {"name": run.name.partition("-")[2], "state": "completed", "result": result,
         "dir": run.name}
        for run, result in zip(runs, results or ["pass"] * len(runs), strict=True)
    ]  # fmt: skip
    change(path / rundir.PLAN_STATE, state="ended", phase=len(runs) - 1, why=why, phases=phases)


def unreadable(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Callable[[bool], None]:
    """Returns a function that makes reads in a directory fail like those of a restarted server."""
    is_away = False

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def read(path: Any = ".", *words: Any, **more: Any) -> Any:
            if is_away and not isinstance(path, int) and Path(path).is_relative_to(folder):
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
            return real(path, *words, **more)

        return read

    def set_away(wanted: bool) -> None:
        nonlocal is_away
        is_away = wanted

    for name in ("stat", "lstat", "scandir", "listdir", "open", "readlink", "statvfs"):
        monkeypatch.setattr(os, name, failing(getattr(os, name)))
    return set_away


def document(path: Path, record: Mapping[str, Any]) -> None:
    """Replaces a document as a whole; a reader gets either the old or the new document."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(json.dumps(record))
    temporary.replace(path)


def change(path: Path, **fields: Any) -> None:
    """Replaces fields of a document; removes the fields whose new value is `...`."""
    held = (rundir.read_json(path) or {}) | fields
    document(path, {key: value for key, value in held.items() if value is not ...})


def change_at(path: Path, *keys: str | int, to: Any) -> None:
    """Replaces one value inside a document; `keys` lead to it."""
    held = inner = json.loads(path.read_text())
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = to
    document(path, held)


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


def cgroup(root: Path, patch: pytest.MonkeyPatch, **files: str) -> None:
    """Writes files of our cgroup, and makes the readers look for them in `root`."""
    places = (line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines()
              if line.startswith("0::"))  # fmt: skip
    folder = root / "cgroups" / next(places).strip("/")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    (root / "mounts").write_text(f"none {root / 'cgroups'} cgroup2 rw 0 0\n")
    patch.setattr(procfs, "MOUNTS", str(root / "mounts"))


def legacy(path: Path, gap_s: float, age_s: float, loss: str = "5.72") -> Path:
    """Makes a legacy run with records of steps 0, 1, 20, 40 and 60; step 60 is `age_s` old."""
    path.mkdir()
    last, steps = time.time() - age_s, (1, 20, 40, 60)
    lines: dict[int, list[dict[str, Any]]] = {0: [], 1: []}

    def add(ts: float, step: int, msg: str, rank: int = 0, **fields: Any) -> None:
        record = {"ts": ts, "iso": "2026-11-20T15:17:04Z", "pid": 22412, "rank": rank, "step": step}
        lines[rank].append(record | {"msg": msg} | fields)

    for rank in lines:
        add(last - gap_s * 3.1, 0, "boot", rank, phase="start")
    for back, step in zip((3, 2, 1, 0), steps, strict=True):
        at = last - back * gap_s
        add(at, step, "progress", loss=float(loss), **FIGURES)
        add(at + 1e-4, step, "step_end", phase="end")
        if back:
            add(at + 190, 0, "watchdog_dump", path="x")
    for rank, records in lines.items():
        text = "".join(json.dumps(record) + "\n" for record in records)
        rundir.heartbeat(path, rank).write_text(text)
    rows = "".join(f"{step},{loss},6e-05,187\n" for step in steps)
    (path / rundir.TRAINING_CSV).write_text(rows)
    return path
