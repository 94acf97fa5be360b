"""Executes the actions of watch rules on a run, and a `.HALT` in the launch directory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

from console.diagnose.watchdog import Change
from console.supervisor.alerts import HALT_FAILED
from console.supervisor.attempt import Attempt
from console.supervisor.dump import Dumps
from console.supervisor.inbox import Outcome
from console.supervisor.run import Run
from console.supervisor.rundir_io import Directory
from trainers.contract import rundir

HALT_AGAIN_S = 10.0
"""Time after which a failed halt by a watch rule or by `.HALT` is tried again."""


class Policy:
    """Owns the actions that wait for execution; `end` ends the running phase and the plan."""

    def __init__(self, directory: Directory, dumps: Dumps, end: Callable[[str, str], str]):
        self._directory, self._dumps, self._end = directory, dumps, end
        self._due: list[tuple[float, Attempt, Change]] = []
        """Actions of rules: the earliest time of each (monotonic s), its attempt, the action."""
        self._halt_at = 0.0
        """A `.HALT` in the launch directory has no effect before this time."""

    def apply(self, run: Run) -> None:
        """Dumps the stacks that a verdict or an action needs; then executes the actions.

        A due action is executed only if its rule is still raised and its attempt still runs. A
        halt that is no longer due clears the alert on its failure.
        """
        if not self._dumps.busy and (wanted := run.attempt.monitor.pop_dump_wanted()):
            handles = run.attempt.tree.handles().items()
            self._dumps.start(run.path, run.live, {r: h for r, h in handles if r in wanted})
        for change in run.attempt.monitor.pop_actions():
            self._dumps.start(run.path, run.live, run.attempt.tree.handles())
            if change.action != "dump":
                self._due.append((0.0, run.attempt, change))
        if self._dumps.busy:
            return
        now = time.monotonic()
        due = [each for each in self._due if each[0] <= now]
        self._due = [each for each in self._due if each[0] > now]
        for _, of, change in due:
            runs = of is run.attempt and of.stage == "run"
            if runs and of.monitor.is_raised(change.rule.name):
                self._execute(run, change)
            elif change.action == "halt":
                run.alerts.clear(HALT_FAILED, "the halt is no longer due")

    def _execute(self, run: Run, change: Change) -> None:
        rule, action, path = change.rule, change.action, run.path
        by = f"the watch rule {rule.name}"
        if action == "restart" and (run.is_final or run.attempt.known.halt_wanted):
            why = "its end was requested, so no attempt would follow; stop ends it now"
            run.event("note", f"{by} does not restart the run: {why}", "warn")
            return
        if action == "restart":
            run.end(action, by)
            return
        word = f"{rule.anomaly or rule.name}\n"
        self._directory.reported_job(
            lambda: rundir.write_atomic(path / rundir.ANOMALY, word), lambda why: None, path
        )
        if action == "halt":
            self.halt(run, by, partial(self._report_failure, run, change))
        else:
            self._end(action, by)

    def halt(self, run: Run, by: str, then: Callable[[Outcome], object]) -> None:
        """Writes `.HALT` for the ranks; if that works, ends the launch. `then` gets the outcome."""

        def report(why_not: str) -> None:
            if why_not:
                then((False, f"{why_not}; request stop to end them", []))
            else:
                run.alerts.clear(HALT_FAILED, ".HALT is written")
                then((True, self._end("halt", by), []))

        self._directory.write_request(run.path, rundir.HALT, by, report)

    def halt_launch(self, run: Run | None) -> None:
        """Executes a `.HALT` in the launch directory as `halt` does; `run` may be None."""
        if time.monotonic() < self._halt_at:
            return
        self._halt_at, by = math.inf, f"{rundir.HALT} in the launch directory"
        if run is None:
            self._end("halt", by)
        else:
            self.halt(run, by, partial(self._report_failure, run, None))

    def _report_failure(self, run: Run, change: Change | None, outcome: Outcome) -> None:
        """If a halt failed, raises an alert and plans a retry; `change` is None for a `.HALT`."""
        done, text, _ = outcome
        if done:
            return
        again_at = time.monotonic() + HALT_AGAIN_S
        run.alerts.raise_(HALT_FAILED, text, "crit", "K")
        if change is None:
            self._halt_at = again_at
        else:
            self._due.append((again_at, run.attempt, change))
