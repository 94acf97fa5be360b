"""Reads the stacks of a process with py-spy, if the operator has installed this program.

py-spy reads the memory of the process and never pauses it, so the process need not answer. The
kernel must allow this, as it does for a debugger.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from typing import Any

from console.sources.sanitize import clean
from console.sources.stacks import MAX_FRAMES
from trainers.contract import environ, jsonl, rundir
from trainers.contract.jsonl import entries

LEAST_S, SPARE_S = 0.05, 0.5
MAX_BYTES, MAX_THREADS = 4 << 20, 100
COMMAND = '"$0" dump --nonblocking --json --pid "$1" | head -c "$2"'


def dump(pid: int, start_ticks: int | None, limit_s: float) -> str:
    """Returns the stacks of a process in the form of a dump, or "" if they are not available.

    If the process with this pid did not start at `start_ticks`, they are not available.
    """
    program = shutil.which("py-spy")
    is_known = start_ticks is not None and rundir.start_ticks(pid) == start_ticks
    if not (program and is_known) or limit_s < LEAST_S:
        return ""
    try:
        done = subprocess.run(
            ["timeout", "--signal=KILL", f"{limit_s:.2f}", "sh", "-c", COMMAND, program,
             f"{pid}", f"{MAX_BYTES}"],
            env={"PATH": environ.get("PATH")}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, start_new_session=True, timeout=limit_s + SPARE_S,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return as_dump(pid, done.stdout) if rundir.start_ticks(pid) == start_ticks else ""


def as_dump(pid: int, output: bytes) -> str:
    """Returns the JSON output of py-spy in the form of a dump, or "" without a main thread."""

    def is_other(thread: Mapping[str, Any]) -> bool:
        name = jsonl.text(thread, "thread_name")
        return jsonl.integer(thread, "os_thread_id") != pid and name != "MainThread"

    record = jsonl.decode(b'{"threads":%b}' % output) or {}
    main, *others = [*sorted(entries(record, "threads"), key=is_other)[:MAX_THREADS], {}]
    if is_other(main):
        return ""
    lines = [f"=== pid {pid}, read by py-spy", "Stack (most recent call first):", *_frames(main)]
    for each in others[:-1]:
        name = clean(jsonl.text(each, "thread_name"), 100)
        name = name or f"{jsonl.integer(each, 'thread_id') or 0:#x}"
        lines += [f"Thread {name} (most recent call first):", *_frames(each)]
    return "\n".join([*lines, ""])


def _frames(thread: Mapping[str, Any]) -> list[str]:
    found = list[str]()
    for each in entries(thread, "frames")[:MAX_FRAMES]:
        file, function = (clean(jsonl.text(each, key), 400) for key in ("filename", "name"))
        found.append(f'  File "{file}", line {jsonl.integer(each, "line") or 0} in {function}')
    return found
