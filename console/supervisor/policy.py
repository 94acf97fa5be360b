"""Acts on a run: those that watch rules want done, and the halt that `.HALT` asks for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

from console.diagnose.watch import Change
from console.supervisor.dump import Dumps
from console.supervisor.mailbox import Outcome
from console.supervisor.run import Run
from console.supervisor.rundir_io import Directory
from trainers.contract import rundir

HALT_AGAIN_S = 10.0


class Acts:
    """Owns the acts that watch rules want done; `end` ends the running phase and the plan."""

    def __init__(self, directory: Directory, dumps: Dumps, end: Callable[[str, str], str]):
        self._directory, self._dumps, self._end = directory, dumps, end
        self._due: list[tuple[Run, Change]] = []
        self._halt_at = 0.0

    def begin(self, run: Run) -> None:
        """Takes what watch rules are to do; what ends a run does so when its stacks are kept."""
        for change in run.attempt.watching.take_acts():
            self._dumps.begin(run.path, run.live, run.attempt.tree.handles())
            if change.action != "dump":
                self._due.append((run, change))
        if not self._dumps.busy:
            due, self._due = self._due, []
            for of, change in due:
                if of is run and not run.over and run.attempt.watching.is_raised(change.rule.name):
                    self._act(run, change)

    def _act(self, run: Run, change: Change) -> None:
        rule, action, path = change.rule, change.action, run.path
        by = f"the watch rule {rule.name}"
        if action == "restart":
            run.end(action, by)
            return
        word = f"{rule.anomaly or rule.name}\n"
        self._directory.told(
            lambda: rundir.write_atomic(path / rundir.ANOMALY, word), lambda why: None, path
        )
        if action == "halt":
            self.halt(run, by, partial(self._note_refusal, run))
        else:
            self._end(action, by)

    def halt(self, run: Run, by: str, then: Callable[[Outcome], object]) -> None:
        """Writes `.HALT` for the ranks; what could not be written was not asked of them."""

        def told(why_not: str) -> None:
            refusal = f"{why_not}, stop sends them TERM"
            then((not why_not, refusal if why_not else self._end("halt", by), []))

        self._directory.ask(run.path, rundir.HALT, by, told)

    def take_halt(self, run: Run | None) -> None:
        """Halts the present run for a `.HALT` in the launch directory."""
        if time.monotonic() < self._halt_at:
            return
        self._halt_at, by = math.inf, f"{rundir.HALT} in the launch directory"
        if run is None:
            self._end("halt", by)
        else:
            self.halt(run, by, partial(self._note_refusal, run))

    def _note_refusal(self, run: Run, outcome: Outcome) -> None:
        """Says that a halt which nobody waits for was not possible; it is tried again later."""
        done, text, _ = outcome
        if not done:
            self._halt_at = time.monotonic() + HALT_AGAIN_S
            run.event("note", text, "crit")
