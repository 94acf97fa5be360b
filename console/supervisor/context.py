"""The services of a launch (`Services`), and the fixed data of a run (`RunContext`)."""

from __future__ import annotations

import secrets
import select
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from console.model import Gpu
from console.plan import Phase, Plan, Watch
from console.sources.nvml import Nvml
from console.sources.record_files import WARM_UP_BYTES, RecordFiles
from console.sources.reducer import Reducer
from console.sources.series import Series
from console.sources.summary import Summary
from console.sources.tail import is_missing
from console.supervisor import former_documents
from console.supervisor.former_documents import FormerRun
from console.supervisor.hooks import Alive, Hooks
from console.supervisor.link import Link
from console.supervisor.live_directory import Live
from console.supervisor.lock import LaunchLock
from console.supervisor.observers import Observers
from console.supervisor.rundir_io import Directory
from trainers.contract import rundir


@dataclass(frozen=True, slots=True)
class Services:
    """The objects that a launch shares with its runs.

    The thread of `directory` works on the run directory. The main loop waits on `poller`. `link` is
    the connection to the owner.
    """

    directory: Directory
    nvml: Nvml
    poller: select.poll
    hooks: Hooks
    alive: Alive
    lock: LaunchLock
    link: Link

    def event(
        self, folder: Path, run: str, state: str, attempt: int, /, kind: str, text: str,
        level: str = "info", **more: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """Appends an event of a run or launch; passes alerts and crit states to the hook.

        `state` is the state before the event.
        """
        record = self.directory.event(folder, attempt, kind, text, level, **more)
        if kind == "alert" or (kind == "state" and level == "crit"):
            self.hooks.alert({"state": state} | record | {"run": run})
        if kind == "clear" or (kind == "state" and state == "stalled"):  # the stall is over
            self.hooks.clear(run, more.get("alert", ""), state)
        return record

    def publish(self, path: Path, record: Mapping[str, Any], keeps_place: bool = False) -> None:
        """Replaces a document on disk; the owner stores a copy for the next child."""
        self.directory.document(path, record, keeps_place)
        self.link.store(path, record)

    def write_last_documents(self, run: Path) -> None:
        """Writes gates.json and supervisor.json of an ended run again, as the owner stored them.

        A former child may have died before it wrote them. If the run was removed, nothing is
        written, because the writes would fail for ever. If another run is at the path, nothing is
        written either: the documents of that run would be overwritten.
        """
        stored = {run / name: self.link.stored(run / name)
                  for name in (rundir.GATES, rundir.SUPERVISOR)}  # fmt: skip
        documents = {path: document for path, document in stored.items() if document is not None}
        token = rundir.token(self.link.stored(run / rundir.RUN) or {})

        def write() -> None:
            unwritten = self.directory.unwritten  # these are written with the next document
            unwritten.update(documents)
            found = rundir.token(rundir.read_json(run / rundir.RUN) or {})
            # If run.json cannot be read now, a later write tries again.
            is_there = found in ("", token) and not is_missing(run / rundir.RUN)
            for path in () if is_there else documents:
                del unwritten[path]

        self.directory.call(write)


@dataclass(frozen=True, slots=True)
class RunContext:
    """Objects and settings that are the same for all attempts of one run."""

    services: Services
    path: Path
    home: str
    """The value of `NSA_CONSOLE_RUN_DIR` in the environment of the run's processes."""
    token: str
    phase: Phase
    watch: Watch
    actions: Mapping[str, str]
    """The action of some watch rules, by rule. The plan may give the rule another action."""
    live: Live
    reducer: Reducer
    reading: RecordFiles
    """Reads the files of records for the reducer, on the directory's thread."""
    observers: Observers


def run_context(
    services: Services, path: Path, phase: Phase, plan: Plan, former: FormerRun | None, number: int,
    observers: Observers,
) -> RunContext:  # fmt: skip
    """Returns the objects of a new run, or of a `former` run whose newest attempt is `number`."""
    world = phase.nproc
    if former is None:
        home, token = str(path.absolute()), secrets.token_hex(8)
        summary = Summary(world, 1, 0)
    else:
        home = former_documents.home(former.record)
        token = former_documents.token(former.record)
        checked_with = None if former.is_stored else path
        summary = former_documents.summary(former.state, checked_with, world, number)
    reducer = Reducer(Series(keeps=False), summary, timed=True)
    reading = RecordFiles(path, cursors=reducer.cursors, again_bytes=WARM_UP_BYTES)
    live = Live(token, world, number, path, former is not None)
    if former and former.is_unstarted and live.path is None:
        live.renew(number)
    actions = {"stall": "restart"} if plan.restart.when == "stall" else {}
    return RunContext(
        services, path, home, token, phase, plan.watch, actions, live, reducer, reading, observers
    )


class AttemptOwner(Protocol):
    """The part of a run that its attempts and their monitors use."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """The values of the run's settings by name."""
        ...

    def own_gpus(self, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
        """Returns the GPUs that the ranks use, as `ranks.own_gpus` does."""
        ...

    def event(self, kind: str, text: str, level: str = "info", **more: Any) -> dict[str, Any]:
        """Appends an event to the run's events and returns the event."""
        ...

    def publish(self) -> None:
        """Replaces supervisor.json."""

    def prepare(self) -> None:
        """Prepares the run directory for an attempt; runs on the thread of the run directory."""

    def command(self) -> tuple[Sequence[str], Mapping[str, str]]:
        """Returns the arguments and the environment of torchrun."""
        ...
