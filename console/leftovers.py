"""Ends the trainers that a dead supervisor left behind, at the request of an operator.

A process gets a signal only if all sources agree on two facts: it belongs to a launch of this user,
and the supervisor of this launch is dead. docs/decisions.md (`end-leftovers`) lists the sources.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from console.plans.host_checks import unsupervised
from console.sources import liveness, process
from console.sources.sanitize import clean
from trainers.contract import environ, jsonl, rundir

GRACE_S, KILLED_S, POLL_S = 30.0, 2.0, 0.05
PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Leftover:
    """A process of a launch whose supervisor is dead; `name` describes it for the operator."""

    handle: process.Handle
    name: str
    run: Path
    token: str


def find() -> tuple[list[Leftover], list[str]]:
    """Returns the leftovers, and a sentence on each other trainer that seems unsupervised."""
    found, others = [], []
    for pid in unsupervised(PROC):
        variables = process.environment(pid)
        run, token = Path(variables.get(environ.RUN_DIR, "")), variables.get(environ.TOKEN, "")
        why = _why_not(run, token)
        handle = None if why else process.open_process(pid, token)
        if handle:
            rank = f"rank {variables['RANK']}" if "RANK" in variables else "torchrun"
            found.append(Leftover(handle, clean(f"pid {pid} ({rank} of {run})", 400), run, token))
        else:
            others.append(clean(f"pid {pid} gets no signal: {why or 'it has ended'}", 400))
    return found, others


def _why_not(run: Path, token: str) -> str:
    """Returns why a process with this run and token is not a leftover, or "" if it is."""
    if why := liveness.why_foreign(run, token):
        return why
    own, plan = (
        rundir.read_json(path, below=run.parent) or {}
        for path in (run / rundir.SUPERVISOR, run.parent / rundir.PLAN_STATE)
    )
    stop = f"stop the run with {process.command('stop', run)}"
    if liveness.is_locked(run.parent):
        return f"a supervisor has the lock of {run.parent}; {stop}"
    for named in (own, jsonl.mapping(plan, "supervisor")):
        if not named.get("host") or rundir.other_host(named):
            return f"the supervisor of {run} is not known on this host"
        if rundir.is_alive(named) or rundir.is_alive(jsonl.mapping(named, "child")):
            return f"the supervisor of {run} is alive; {stop}"
    return ""


def end(found: Sequence[Leftover]) -> Iterator[str]:
    """Sends TERM, then KILL to those alive after `GRACE_S`; yields a sentence on each process.

    A process whose run was adopted after `found` was collected gets no signal.
    """
    living = list(found)
    for number, limit_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, KILLED_S)):
        for each in living:
            if not _why_not(each.run, each.token):
                each.handle.send(number)
        until = time.monotonic() + limit_s
        while not all(each.handle.is_over() for each in living) and time.monotonic() < until:
            time.sleep(POLL_S)
        over = [each for each in living if each.handle.is_over()]
        yield from (f"{each.name} ended after {number.name}" for each in over)
        living = [each for each in living if each not in over]
    for each in living:
        yield f"{each.name} is alive: {_why_not(each.run, each.token) or 'it does not end'}"
