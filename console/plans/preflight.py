"""The checks before a launch: the table of checks, and the measurements that follow them.

A new check is one row in `TABLE`. Processes that import torch measure devices, data and attention.
These measurements need `preflight: {measure: true}` in the plan, or `check PLAN --measure`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from console.model import RESULTS, Result
from console.plans import catalog, config_checks, gpu_checks, host_checks
from console.plans.case import Case, Check, Found
from console.sources import gpu_survey
from console.sources.sanitize import clean
from trainers.contract import environ, jsonl
from trainers.contract.errors import ContractError


@dataclass(frozen=True, slots=True)
class Row:
    """One check, and the resource that it reads; rows with the same `needs` run in sequence."""

    name: str
    check: Callable[[Case], Found]
    needs: str = "this machine"


PLAN, DISK, DATA = "the plan", "the file system", "the data (folder, mirror or hub)"
DRIVER, PROCESSES = "the NVIDIA driver", "the other processes"
LIMIT_S: Mapping[str, float] = {DRIVER: gpu_survey.LIMIT_S + 2, DATA: 8.0}
"""Time limit of the rows, by their `needs`; `USUAL_S` is the limit of all other rows."""
USUAL_S, SAID_S = 20.0, 2.0
"""After `SAID_S`, the preflight reports the resources for which it still waits."""
TABLE: tuple[Row, ...] = (
    Row("torch", gpu_checks.torch),
    Row("device", gpu_checks.device, PLAN), Row("program", config_checks.program, PLAN),
    Row("gpus", gpu_checks.gpus, DRIVER),
    Row("driver", gpu_checks.driver, DRIVER), Row("gpu memory", config_checks.gpu_memory, DRIVER),
    Row("nccl", gpu_checks.nccl, PLAN), Row("leftovers", host_checks.leftovers, PROCESSES),
    Row("cores", host_checks.cores), Row("memory", host_checks.memory),
    Row("shm", host_checks.shm), Row("limits", host_checks.limits), Row("ports", host_checks.ports),
    Row("clock", host_checks.clock, DISK), Row("disk", config_checks.disk, DISK),
    Row("directory", config_checks.directory, DISK), Row("resume", config_checks.resume, DISK),
    Row("data", config_checks.data, DATA),
    Row("code", host_checks.code), Row("shell", host_checks.shell),
    Row("logout", host_checks.logout), Row("hook", host_checks.hook),
)  # fmt: skip
ROWS: Mapping[str, Row] = {row.name: row for row in TABLE}


def run(case: Case, said: Callable[[str], None] | None = None) -> tuple[Check, ...]:
    """Returns the results of all rows and of the measurements.

    `said` gets a text if rows last longer than `SAID_S`, and before the measurements.
    """
    phases: dict[str, int] = {}
    for index, phase in enumerate(case.plan.phases):  # one row for all runs of a variant
        phases.setdefault(f"{phase.sweep} {phase.variant}" if phase.sweep else phase.name, index)
    rows = [*TABLE, *(
        Row(f"config {name}", functools.partial(config_checks.config, index=index), PLAN)
        for name, index in phases.items()
    )]  # fmt: skip
    answers: dict[str, Future[Found]] = {row.name: Future() for row in rows}
    for need in {row.needs for row in rows}:
        work = [(row.check, answers[row.name]) for row in rows if row.needs == need]
        thread = threading.Thread(target=_answer, args=(case, work), name="preflight", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread can be started
            _answer(case, work)
    begun = time.monotonic()
    late = wait(answers.values(), SAID_S).not_done
    if late and said:
        needs = sorted({row.needs for row in rows if answers[row.name] in late})
        said(f"the preflight is still waiting for {' and '.join(needs)}")
    checks = tuple(_in_time(case, row, answers[row.name], begun) for row in rows)
    refused = any(check.result == "fail" for check in checks)
    return (*checks, *measure(case, refused, said))


def _answer(case: Case, work: Sequence[tuple[Callable[[Case], Found], Future[Found]]]) -> None:
    for check, answer in work:
        try:
            answer.set_result(check(case))
        except BaseException as error:  # `_in_time` raises or reports it
            answer.set_exception(error)


def _in_time(case: Case, row: Row, answer: Future[Found], begun: float) -> Check:
    """Returns the result of a row; a check that is late or raises an error has failed.

    A ContractError is raised again. A late answer of `PROCESSES` only warns: one process in state D
    can delay the check. With assumed GPUs, only rows that need `PLAN` or `DRIVER` can fail.
    """
    limit_s = LIMIT_S.get(row.needs, USUAL_S)
    try:
        result, text = answer.result(max(0.0, begun + limit_s - time.monotonic()))
    except TimeoutError:
        result = "unknown" if row.needs == PROCESSES else "fail"
        text = f"no answer from {row.needs} within {limit_s:g} s"
    except ContractError:
        raise
    except Exception as error:  # a check may read files that other users wrote
        text = f"the check itself failed: {type(error).__name__}: {clean(str(error), 200)}"
        result = "fail"
    if case.assumed and result == "fail" and row.needs not in (PLAN, DRIVER):
        result, text = "unknown", f"on this machine: {text}"
    return Check(row.name, result, text)


# --- measurements -------------------------------------------------------------------------------

MEASURED = ("matmul", "all-reduce", "first batch", "causality", "parity")
MEASURE_S, SPARE_S, ENDING_S = 300.0, 5.0, 1.0
"""All measurements together get `MEASURE_S`. `timeout` would end them `SPARE_S` later. After KILL,
the preflight waits at most `ENDING_S`."""
ANSWER_BYTES, LOG_BYTES, MAX_TEXT = 1 << 18, 1 << 12, 600
MODULE = "trainers.device_probe"


def measure(case: Case, refused: bool, said: Callable[[str], None] | None) -> tuple[Check, ...]:
    """Returns the results of `MEASURED`, or one row "measured" that says why nothing is measured.

    `refused` says that another check failed. A GPU may then be unusable, or in use by others.
    """
    phases = {
        phase.name: {key: entry["value"] for key, entry in held.items()}
        for phase, held in zip(case.plan.phases, case.settings, strict=True) if held
    }  # fmt: skip
    reasons = (
        (not phases, "all programs are foreign"), (case.assumed, "the GPUs are assumed"),
        (not case.measure, "use check PLAN --measure"), (refused, "another check failed"),
    )  # fmt: skip
    if why := next((text for applies, text in reasons if applies), ""):
        text = f"{', '.join(MEASURED)} are not measured: {why}"
        return (Check("measured", "unknown" if case.plan.gpus else "pass", text),)
    if said:
        said(f"the preflight measures {', '.join(MEASURED)}, at most {MEASURE_S:g} s")
    data = b""
    try:
        with tempfile.TemporaryDirectory(prefix="nsa-preflight-") as name:
            request = jsonl.encode({"world": case.nproc, "phases": phases})
            (Path(name) / "request.json").write_bytes(request)
            end = _run_probe(case, Path(name))
            data = jsonl.read_bytes(Path(name) / "answers", ANSWER_BYTES, 0)
    except OSError as error:
        end = f"cannot start the process that measures: {error.strerror} (check disk and limits)"
    records = [jsonl.decode(line) or {} for line in data.split(b"\n")]
    answers = {jsonl.text(record, "row"): record for record in records}
    return tuple(_measured(row, answers.get(row), end) for row in MEASURED)


def _run_probe(case: Case, folder: Path) -> str:
    """Runs the measuring processes in a session of their own; returns how they ended."""
    phase = max(case.plan.phases, key=lambda each: each.nproc)
    path = os.pathsep.join(filter(None, (str(catalog.PROJECT), environ.get("PYTHONPATH"))))
    variables = environ.inherited() | environ.DEVICE_ORDER | {"PYTHONPATH": path}
    variables |= {**case.plan.env, **phase.flags}
    with (folder / "answers").open("wb") as answers, (folder / "log").open("wb") as log:
        child = subprocess.Popen(
            # `timeout` ends the processes even if the console is killed.
            ["timeout", "--kill-after=2", f"{MEASURE_S + SPARE_S:g}", sys.executable, "-P", "-m",
             MODULE, str(folder / "request.json")], env=variables,
            stdin=subprocess.DEVNULL, stdout=answers, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        fd = os.pidfd_open(child.pid)
        is_over = bool(select.select([fd], [], [], MEASURE_S)[0])
        os.close(fd)
    finally:
        # The child is not reaped yet, so no other group of processes can have its number.
        os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(ENDING_S)
    if not is_over:
        return f"no answer within {MEASURE_S:g} s"
    log_end = jsonl.read_bytes(folder / "log", LOG_BYTES).decode("utf-8", "replace")
    last = log_end.rstrip().rpartition("\n")[2]
    return clean(f"the process that measures exited with {child.returncode}: {last}", MAX_TEXT)


def _measured(row: str, record: Mapping[str, Any] | None, end: str) -> Check:
    """Returns the result of a row: "unknown" if it did not begin, "fail" if it did not end."""
    if record is None:
        return Check(row, "unknown", f"not measured: {end}")
    known: dict[str, Result] = {each: each for each in RESULTS}
    result = known.get(jsonl.text(record, "result"))
    if result is None:
        return Check(row, "fail", end)
    text = clean(jsonl.text(record, "text"), MAX_TEXT)
    return Check(row, result, text, jsonl.mapping(record, "figures"))
