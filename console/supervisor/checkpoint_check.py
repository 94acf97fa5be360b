"""Loads new checkpoints of a run in another process, and runs the back-up of the plan.

The back-up follows a successful load. One program runs at a time, at the lowest priority. If
several checkpoints wait, only the newest is loaded. A save that failed is an alert.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from console.model import Level, Result
from console.plan import PLACEHOLDER, Checkpoints
from console.sources import procfs
from console.sources.reducer import Reducer
from console.sources.sanitize import clean
from console.sources.tail import is_missing
from console.supervisor import program, run_files
from console.supervisor.alerts import CHECKPOINT_ALERT, Alerts
from console.supervisor.launch_spec import inherited
from trainers.contract import flags, jsonl, rundir

LOW_PRIORITY = ("nice", "-n", "19")
LOADS = (sys.executable, "-P", "-m", "trainers.load")
DAMAGED = 15
"""The exit code of `trainers.load` for a checkpoint that does not load."""
PROGRAM_BYTES = 512 << 20
"""Memory that the loading program may need in addition to the size of the files.

On x86, the program needed 294 MiB in addition to 937 MiB of files.
"""
ALERTS = {what: f"{CHECKPOINT_ALERT}{what}" for what in ("save", "load", "backup")}
Outcome = tuple[Result, Level, str]


class CheckpointCheck:
    """Owns the check of the newest checkpoint; `event` and `alerts` are those of the run."""

    def __init__(
        self, run: Path, plan: Checkpoints, event: Callable[..., object], alerts: Alerts,
        reducer: Reducer, loads: tuple[str, ...] = LOADS,
    ):  # fmt: skip
        self._run, self._plan, self._event, self._alerts = run, plan, event, alerts
        self._reducer, self._loads = reducer, loads
        self._newest = 0, 0
        """Attempt and step of the newest checkpoint whose check began."""
        self._doing = ""
        """The program that runs: a key of `ALERTS`, or "" for none."""
        self._job: Future[Outcome] | None = None
        self._threads = ThreadPoolExecutor(1, "checkpoint")
        self._stopped = False
        """True if no further program may start."""
        self._program = partial(program.run, keeps_output=True, stopped=lambda: self._stopped)

    @property
    def doing(self) -> str:
        """A sentence on the checkpoint that is being loaded or backed up, or ""."""
        verb = {"load": "loaded", "backup": "backed up"}.get(self._doing)
        return f"the checkpoint of step {self._newest[1]} is being {verb}" if verb else ""

    def poll(self, attempt: int, newest: int) -> None:
        """Reports a program that has ended, and starts the next program if one is due; never waits.

        `newest` is the step of the newest checkpoint of this attempt, or 0. Raises RuntimeError if
        no thread can start, or OSError if no descriptor is left. The check then has no result.
        """
        self._check_saves(attempt, newest)
        if self._job is not None:
            if not self._job.done():
                return
            ended, self._job = self._job, None
            self._report(ended)
        wanted = self._plan.load or self._plan.backup
        if self._job is None and wanted and newest and (attempt, newest) != self._newest:
            self._newest = attempt, newest
            self._begin("load", self._load)

    def _check_saves(self, attempt: int, newest: int) -> None:
        """Raises an alert if the newest recorded save of a rank failed; else clears the alert."""
        heads = self._reducer.heads(attempt).values()
        saves = [head.save for head in heads if head.save]
        failed = next((each for each in saves if each["msg"] == "checkpoint_failed"), None)
        if failed:
            saved = max(newest, *(head.first_step - 1 for head in heads))
            still = f"newest checkpoint: step {saved:,}" if saved else "there is no checkpoint"
            text = f"a save failed: {clean(jsonl.text(failed, 'error'), 400)}; {still}"
            self._alerts.raise_(ALERTS["save"], text, "crit")
        elif saves:
            self._alerts.clear(ALERTS["save"], "a later save succeeded")

    def stop(self) -> None:
        """Makes the running program get TERM; no further program starts."""
        self._stopped = True

    def _begin(self, what: str, work: Callable[[int, Path], Outcome]) -> None:
        if self._stopped:
            return
        step = self._newest[1]
        path = self._run.absolute() / rundir.CHECKPOINTS / f"step_{step:08d}"
        self._job, self._doing = self._threads.submit(work, step, path), what

    def _report(self, ended: Future[Outcome]) -> None:
        """Records a result; after a successful load, begins the back-up if the plan has one."""
        what, self._doing, step = self._doing, "", self._newest[1]
        result, level, text = ended.result()
        self._event("checkpoint", text, level, step=step, what=what, result=result)
        if level != "info" or result == "pass":
            self._alerts.clear(ALERTS[what], f"a newer result: {text}")
        if level != "info":
            self._alerts.raise_(ALERTS[what], text, level)
        if what == "load" and result == "pass":
            self._reducer.summary.take_load(self._newest[0], step, True)
            if self._plan.backup:
                self._begin("backup", self._back_up)

    # --- in the thread -------------------------------------------------------------------------

    def _load(self, step: int, path: Path) -> Outcome:
        name, argv = f"checkpoint step {step}", (*LOW_PRIORITY, *self._loads, str(path))
        if lack := _lack_of_memory(path):
            return "unknown", "warn", f"{name} is not loaded: {lack}"
        environment = inherited() | {flags.DEVICES: "", "OMP_NUM_THREADS": "1"}
        ended = self._program(argv, environment, self._plan.load_s)
        if not ended.failure:
            return "pass", "info", f"{name} is loaded: {ended.last_line}"
        if end := self._harmless(step, path):
            return "unknown", "info", f"{name} is not loaded: {end}"
        if ended.code == DAMAGED:
            return "fail", "crit", f"{name} does not load: {ended.last_line}"
        why = f"{ended.failure} {ended.last_line}".strip()
        return "unknown", "warn", f"{name} is not loaded: the program that loads it {why}"

    def _back_up(self, step: int, path: Path) -> Outcome:
        words = [word.replace(PLACEHOLDER, str(path)) for word in self._plan.backup]
        if not any(PLACEHOLDER in word for word in self._plan.backup):
            words.append(str(path))
        ended = self._program((*LOW_PRIORITY, *words), inherited(), self._plan.backup_s)
        if not ended.failure:
            return "pass", "info", f"checkpoint step {step} is backed up: {ended.last_line}"
        if end := self._harmless(step, path):
            return "unknown", "info", f"checkpoint step {step} is not backed up: {end}"
        why = f"{words[0]} {ended.failure}: {ended.last_line}"
        return "fail", "warn", f"checkpoint step {step} is not backed up: {why}"

    def _harmless(self, step: int, path: Path) -> str:
        """Returns why a failure needs no operator, or "" if it may need an operator.

        If there is a newer checkpoint, a missing checkpoint needs no operator. The record of the
        newer checkpoint may not exist yet, so this function looks for the checkpoint itself.
        """
        if self._stopped:
            return "the run ends"
        newest = run_files.newest_checkpoint(self._run) or 0
        return "it was removed" if newest > step and is_missing(path) else ""


def _lack_of_memory(path: Path) -> str:
    """Returns why loading could take the memory of the training, or "" if no reason is known."""
    spare = procfs.spare_bytes()
    needed = PROGRAM_BYTES + sum(map(jsonl.size_bytes, path.glob("*")))
    if spare is None or needed <= spare:
        return ""
    return (f"it needs about {needed >> 20:,} MiB and {max(0, spare) >> 20:,} MiB are left; with "
            "memory.oom.group=1, as in Kubernetes, running out of memory would end the training "
            "too; raise the memory limit")  # fmt: skip
