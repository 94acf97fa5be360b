"""The checks that measure devices, data and attention, in processes that import torch.

They run only if the plan has `preflight: {measure: true}`, or with `check PLAN --measure`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from console.model import RESULTS, Result
from console.plans import catalog
from console.plans.case import Case, Check
from console.sources.sanitize import clean
from trainers.contract import environ, jsonl

ROWS = ("matmul", "all-reduce", "first batch", "causality", "parity")
LIMIT_S, SPARE_S, ENDING_S = 300.0, 5.0, 1.0
"""Time limit of all rows together, extra time before `timeout` ends their processes, and longest
wait for the end of a killed process."""
ANSWER_BYTES, LOG_BYTES, MAX_TEXT = 1 << 18, 1 << 12, 600
MODULE = "trainers.device_probe"


def measure(case: Case, refused: bool, said: Callable[[str], None] | None) -> tuple[Check, ...]:
    """Returns the results of `ROWS`, or one row "measured" that says why nothing is measured.

    `refused` says that another check failed. A GPU may then be unusable, or in use by others.
    """
    phases = {
        phase.name: {key: entry["value"] for key, entry in held.items()}
        for phase, held in zip(case.plan.phases, case.settings, strict=True) if held
    }  # fmt: skip
    reasons = (
        (not case.measure, "use check PLAN --measure"), (case.assumed, "the GPUs are assumed"),
        (refused, "another check failed"), (not phases, "all programs are foreign"),
    )  # fmt: skip
    if why := next((text for applies, text in reasons if applies), ""):
        text = f"{', '.join(ROWS)} are not measured: {why}"
        return (Check("measured", "unknown" if case.plan.gpus else "pass", text),)
    if said:
        said(f"the preflight measures {', '.join(ROWS)}, at most {LIMIT_S:g} s")
    data = b""
    try:
        with tempfile.TemporaryDirectory(prefix="nsa-preflight-") as name:
            request = jsonl.encode({"world": case.nproc, "phases": phases})
            (Path(name) / "request.json").write_bytes(request)
            end = _run(case, Path(name))
            data = jsonl.read_bytes(Path(name) / "answers", ANSWER_BYTES, 0)
    except OSError as error:
        end = f"cannot start the process that measures: {error.strerror} (check disk and limits)"
    records = [jsonl.decode(line) or {} for line in data.split(b"\n")]
    answers = {jsonl.text(record, "row"): record for record in records}
    return tuple(_check(row, answers.get(row), end) for row in ROWS)


def _run(case: Case, folder: Path) -> str:
    """Runs the measuring processes in a session of their own; returns how they ended."""
    phase = max(case.plan.phases, key=lambda each: each.nproc)
    path = os.pathsep.join(filter(None, (str(catalog.PROJECT), environ.get("PYTHONPATH"))))
    variables = {**environ.inherited(), "PYTHONPATH": path, **case.plan.env, **phase.flags}
    with (folder / "answers").open("wb") as answers, (folder / "log").open("wb") as log:
        child = subprocess.Popen(
            # `timeout` ends the processes even if the console is killed.
            ["timeout", "--kill-after=2", f"{LIMIT_S + SPARE_S:g}", sys.executable, "-P", "-m",
             MODULE, str(folder / "request.json")], env=variables,
            stdin=subprocess.DEVNULL, stdout=answers, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        fd = os.pidfd_open(child.pid)
        is_over = bool(select.select([fd], [], [], LIMIT_S)[0])
        os.close(fd)
    finally:
        # The process is not reaped yet, so the number of its group cannot belong to others.
        os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(ENDING_S)
    if not is_over:
        return f"no answer within {LIMIT_S:g} s"
    log_end = jsonl.read_bytes(folder / "log", LOG_BYTES).decode("utf-8", "replace")
    last = log_end.rstrip().rpartition("\n")[2]
    return clean(f"the process that measures exited with {child.returncode}: {last}", MAX_TEXT)


def _check(row: str, record: Mapping[str, Any] | None, end: str) -> Check:
    """Returns the result of a row: unknown if the row did not begin, "fail" if it did not end."""
    if record is None:
        return Check(row, "unknown", f"not measured: {end}")
    known: dict[str, Result] = {each: each for each in RESULTS}
    result = known.get(jsonl.text(record, "result"))
    if result is None:
        return Check(row, "fail", end)
    text = clean(jsonl.text(record, "text"), MAX_TEXT)
    return Check(row, result, text, jsonl.mapping(record, "figures"))
