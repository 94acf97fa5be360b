"""Reads the stacks of a process with py-spy, if the operator has installed this program.

With `--nonblocking`, py-spy reads the memory of the process and does not pause the process. So the
process need not answer. The kernel must allow this access, as it does for a debugger.
"""

from __future__ import annotations

import shutil
import subprocess

from console.sources.sanitize import clean
from console.sources.stacks import MAX_DUMP_BYTES, MAX_FRAMES
from trainers.contract import environ, jsonl, rundir

MAX_THREADS, LEAST_S = 100, 0.05
ENOUGH_BYTES = MAX_DUMP_BYTES // 3
"""No further thread is added to a longer dump; one thread has at most twice this size."""
COMMAND = '"$0" dump --nonblocking --json --pid "$1" | head -c 4194304'


def dump(pid: int, start_ticks: int | None, limit_s: float) -> str:
    """Returns the stacks of a process in the form of a dump, or "" if they are not available.

    If the process with this pid did not start at `start_ticks`, they are not available.
    """
    path = environ.get("PATH")
    program = shutil.which("py-spy", path=path) if path else None
    is_known = start_ticks is not None and rundir.start_ticks(pid) == start_ticks
    if not (program and is_known) or limit_s < LEAST_S:
        return ""
    words = ["timeout", "--signal=KILL", f"{limit_s:.2f}", "sh", "-c", COMMAND, program, str(pid)]
    try:
        done = subprocess.run(
            words, env={"PATH": path}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True, check=False,
        )  # fmt: skip
    except OSError:
        return ""
    return as_dump(done.stdout) if rundir.start_ticks(pid) == start_ticks else ""


def as_dump(output: bytes) -> str:
    """Returns the JSON output of py-spy in the form of a dump, or "" if it has no main thread."""
    threads = jsonl.entries(jsonl.decode(b'{"threads":%b}' % output) or {}, "threads")
    names = [jsonl.text(each, "thread_name") for each in threads]
    if "MainThread" not in names:
        return ""
    threads.insert(0, threads.pop(names.index("MainThread")))
    lines = list[str]()
    for each in threads[:MAX_THREADS]:
        if sum(len(line.encode()) for line in lines) > ENOUGH_BYTES:
            break
        name = clean(jsonl.text(each, "thread_name"), 100) or "0x"
        lines.append(f"{f'Thread {name}' if lines else 'Stack'} (most recent call first):")
        for frame in jsonl.entries(each, "frames")[:MAX_FRAMES]:
            file, function = (clean(jsonl.text(frame, key), 400) for key in ("filename", "name"))
            line = jsonl.integer(frame, "line") or 0
            lines.append(f'  File "{file}", line {line} in {function}')
    return "\n".join([*lines, ""])
