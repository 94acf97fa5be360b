"""One run as a `RunState`: reads what is new in its directory and in its live pulses.

Nothing here raises on what a run directory holds; what cannot be read is counted or None.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from console.model import RANK_GONE, Alert, LaunchState, Level, RunState, State
from console.run_state import decide
from console.sources import documents, legacy, liveness
from console.sources.launches import is_launch, launch_id, launch_of, run_directories
from console.sources.ranks import data_age_s, newest_step, read_ranks
from console.sources.records import RECENT_BYTES, Reads, Records
from console.sources.reducer import Reducer
from console.sources.series import Series
from console.sources.summary import Summary
from trainers.contract import jsonl, rundir
from trainers.contract.flags import DEVICES

WHOLE_BYTES = 1 << 30
"""One look reads at most this much where nobody waits for it."""
IN_RECENT = f"in the newest {RECENT_BYTES >> 10} KiB of each file"
UNARMED, HELD = "nothing, no supervisor lives", "nothing, the supervisor is stopped"
NO_ATTEMPT = "no attempt begins, the supervisor is stopped"
ORPHANED = "no supervisor: no further phase starts; R, or nsa-console adopt, gives it a new one"


class RunSource:
    """Follows a run, or a launch's current run. One thread at a time may `poll`.

    One `poll` reads about `limit_bytes` of records; the state says how much is left. `reads` as in
    `Records`; with `charts` the first poll shows how the run is now, what is drawn of the time
    before comes later.
    """

    def __init__(self, path: Path, limit_bytes: int = WHOLE_BYTES, reads: Reads = "recent"):
        self._limit_bytes = limit_bytes
        self._reads: Reads = reads
        self.launch_path = launch_of(path)
        self.whole = is_launch(path)
        """A launch was asked for, and not one run of it."""
        self._fixed = None if self.whole else path
        self.run_path: Path | None = self._fixed
        self._documents: dict[Path, documents.Document] = {}
        self._reader: Records | None = None
        self._filling: Records | None = None
        """Reads what is drawn of the time before, and then takes the reader's place."""
        self._away = False
        """A launch's run is no directory: not there, or a link that is not followed."""
        self._began_away = False
        """It was so when the reader began, which then has not looked for a snapshot."""

    @property
    def reducer(self) -> Reducer:
        """The records of the run that was read last."""
        return self._reader.reducer if self._reader is not None else Reducer(Series())

    @property
    def series(self) -> Series:
        """The series of the run that was read last."""
        return self.reducer.series

    @property
    def summary(self) -> Summary | None:
        """The sums over the records of the run that was read last, None before there is one."""
        return self._reader.summary if self._reader is not None else None

    @property
    def is_whole(self) -> bool:
        """Says whether all records count, as a sum over them needs it."""
        return self._reader is None or self._reader.reading.is_whole

    @property
    def counted(self) -> tuple[bool, float | None, int]:
        """Returns what the sums are of: a snapshot, its time, and how many heartbeats were read."""
        reader = self._reader
        return (
            (False, None, 0) if reader is None
            else (reader.has_snapshot, reader.snapshot_ts, reader.reducer.counted)
        )  # fmt: skip

    def read_all(self, told: Callable[[int], object] = lambda _: None) -> RunState:
        """Polls until nothing is left that can be read; `told` gets how many bytes are."""
        state = self.poll()
        while state.behind_bytes:
            before = state.behind_bytes
            told(before)
            state = self.poll()
            if state.behind_bytes >= before:
                break
        return state

    def of_phase(self, run: Path) -> RunSource:
        """Returns a source for another run of the launch that reads as much."""
        return RunSource(run, reads=self._reads)

    def poll(self) -> RunState:
        """Returns the state as it is on disk and in shared memory now."""
        launch = self._launch()
        if self._fixed is None:
            self.run_path = self._current_run(launch)
        run = self.run_path
        if run is None:
            return _empty(self.launch_path, launch, self._troubles())
        self._away = self._fixed is None and not _is_directory(run)
        supervisor = self._document(run / rundir.SUPERVISOR)
        reader = self._read(run, supervisor)
        return self._state(run, launch, supervisor, reader)

    def _read(self, run: Path, supervisor: dict[str, Any]) -> Records:
        """Returns the records of a run, with what is new in them."""
        told = jsonl.integer(supervisor, "attempt")
        world = jsonl.integer(self._document(run / rundir.RUN), "world")
        again = self._began_away and not self._away
        if self._reader is None or self._reader.run != run or again:
            first: Reads = "recent" if self._reads == "charts" else self._reads
            self._began_away = self._away
            self._reader, self._filling = Records(run, "all" if self._away else first), None
        elif self._reads == "charts" and self._filling is None and not self._away:
            drawn = not (self._reader.reading.left_out_bytes or self._reader.has_snapshot)
            self._filling = self._reader if drawn else Records(run, "charts")
        for reader in {id(each): each for each in (self._reader, self._filling) if each}.values():
            if not self._away:
                reader.poll(told, world, self._limit_bytes)
        if self._filling is not None and not self._filling.reading.behind_bytes:
            self._reader = self._filling
        return self._reader

    def _behind_bytes(self, reader: Records) -> int:
        """Returns how much is still to be read, with what is drawn of the time before."""
        if self._reads != "charts" or self._filling is reader:
            return reader.reading.behind_bytes
        reading = reader.reading
        return self._filling.reading.behind_bytes if self._filling else reading.left_out_bytes

    def _state(
        self, run: Path, launch: LaunchState | None, supervisor: dict[str, Any], reader: Records
    ) -> RunState:
        told = self._said_by_launch(run)
        unread = bool(told) and (self._away or not supervisor)
        supervisor = supervisor or told
        born, reading = self._document(run / rundir.RUN), reader.reading
        gates = documents.gates(self._document(run / rundir.GATES))
        backend = documents.backend(self._document(run / rundir.ENV))
        live = liveness.live_directory(supervisor)
        status = (rundir.read_json(live / rundir.LIVE_STATUS) if live else None) or {}
        end = legacy.end(run, reader.last) if reading.is_legacy and not supervisor else told
        supervisor = liveness.newest(supervisor, reader.state_event, status, end)
        trouble, behind = self._documents[run / rundir.SUPERVISOR].trouble, reading.behind_bytes > 0
        state, why = decide(
            liveness.facts(supervisor, born, reader.last, reader.halts, behind, trouble)
        )
        ended = state in liveness.ENDED
        flags = documents.flag_field(born, "value")
        ranks = read_ranks(supervisor, reader, live, flags.get(DEVICES, ""), ended)
        step = newest_step(supervisor, ranks, reader)
        planned = documents.setting_int(born, "train.steps")
        moves = not ended and state != "stalled"
        blocked = None if ended else jsonl.number(status, "blocked_s")
        unwell = [] if ended else liveness.unwell(supervisor, status)
        missing = _missing(run, self._away) if unread and state != "starting" else ""
        more = self._observed(launch, ended, missing, reader) + unwell
        launch = launch and documents.sequenced(launch, run.name, state, why)
        alerts = reader.alerts({} if ended else status, more)
        if not liveness.has_lost_rank(supervisor):
            alerts = tuple(alert for alert in alerts if alert.id != RANK_GONE)
        return RunState(
            id=documents.line(born, "run", f"{launch.id}/{run.name}" if launch else run.name),
            path=str(run), state=state, why=why, step=step, steps_planned=planned,
            since_ts=liveness.since_ts(supervisor, state, reader.last),
            attempt=reader.attempt,
            host=documents.line(supervisor, "host", documents.line(born, "host", "")),
            world=len(ranks),
            eta_s=self.series.eta_s(step, planned) if step and planned and moves else None,
            data_age_s=None if ended else data_age_s(ranks, reader),
            ranks=ranks,
            gpus=reader.gpus,
            figures=reader.figures(bool(born.get("settings")) or reading.is_legacy),
            alerts=alerts,
            verdict=documents.verdict(supervisor),
            gates=gates, bounds=documents.bounds(born), launch=launch,
            armed=_armed(supervisor, "armed", state, unwell),
            armed_short=_armed(supervisor, "armed_short", state, unwell),
            skipped_records=reading.skipped,
            skipped_in="" if reading.is_whole else IN_RECENT,
            directory_blocked_s=blocked or 0.0,
            checkpoint="" if self._away else documents.latest_checkpoint(run),
            environment=flags,
            decided=documents.decided(jsonl.mapping(born, "settings")),
            origins=documents.flag_field(born, "origin"),
            argv=documents.words(born, "argv"), backend=backend,
            behind_bytes=self._behind_bytes(reader),
        )  # fmt: skip

    def _launch(self) -> LaunchState | None:
        if self.launch_path is None:
            return None
        paths = [self.launch_path / name for name in (rundir.PLAN, rundir.PLAN_STATE)]
        plan, state = map(self._document, paths)
        return documents.launch_state(
            self.launch_path, launch_id(self.launch_path), plan, state,
            [self._documents[path].trouble for path in paths],
            [path.name for path in run_directories(self.launch_path)],
        )  # fmt: skip

    def _said_by_launch(self, run: Path) -> dict[str, Any]:
        """Returns what a launch knows of its run, under the names of supervisor.json.

        {} for a run that did not begin; `ts` is when it ended.
        """
        held = self._document(self.launch_path / rundir.PLAN_STATE) if self.launch_path else {}
        for index, phase in enumerate(jsonl.entries(held, "phases")):
            if phase.get("dir") == run.name and jsonl.text(phase, "state") in liveness.STATES:
                now = index == jsonl.integer(held, "phase")
                return jsonl.mapping(held, "supervisor") | {
                    "state": phase["state"], "why": phase.get("why"), "steps": phase.get("steps"),
                    "ts": phase.get("ended_ts"), "updated_ts": held.get("updated_ts"),
                    "since_ts": phase.get("ended_ts") or phase.get("started_ts"),
                    "live_dir": held.get("live_dir") if now else "",
                }  # fmt: skip
        return {}

    def _current_run(self, launch: LaunchState | None) -> Path | None:
        if launch is None or self.launch_path is None:
            return None
        if launch.state == "unsupervised" or (launch.doubt and not launch.under_way):
            for run in reversed(run_directories(self.launch_path)):
                if liveness.living_in(run):
                    return run
        for phase in reversed(launch.phases[: launch.phase + 1]):
            run = self.launch_path / phase.dir
            begun = phase.state in liveness.STATES or _is_directory(run)
            if phase.dir and begun:
                return run
        return None

    def _document(self, path: Path) -> dict[str, Any]:
        held = self._documents.get(path)
        if held is None:
            held = self._documents[path] = documents.Document(path)
        return held.record if self._away and path.parent == self.run_path else held.read()

    def _troubles(self) -> list[Alert]:
        """Returns an alert for each document that is there and cannot be shown."""
        return [
            Alert(f"document {path.name}", time.time(), "warn", document.trouble, observed=True)
            for path, document in self._documents.items() if document.trouble
        ]  # fmt: skip

    def _observed(
        self, launch: LaunchState | None, ended: bool, unread: str, reader: Records
    ) -> list[Alert]:
        """Returns the alerts of this reader on a launch without supervisor, and on unread files."""

        def add(name: str, level: Level, text: str, key: str = "") -> None:
            found.append(Alert(name, time.time(), level, text, key, observed=True))

        found = self._troubles()
        said = {launch.why if launch else "", *(alert.text for alert in found)}
        if ended and launch is not None and launch.state == "unsupervised":
            add("no-supervisor", "crit", ORPHANED, "R")
        if launch and launch.doubt and launch.doubt not in said:
            add("documents", "crit", f"it is unknown how the launch is: {launch.doubt}")
        if unread:
            add("directory", "warn", f"{unread}; this is what {rundir.PLAN_STATE} says of it")
        if behind_bytes := self._behind_bytes(reader):
            left = f"{size_words(behind_bytes)} of records are still to be read"
            add("behind", "info", left)
        return found


def _missing(run: Path, away: bool) -> str:
    """Says what of a run cannot be read: its directory, or only the document of its supervisor."""
    try:
        names = None if away else os.listdir(run)
    except OSError:
        names = None
    if names is None:
        return f"{run} cannot be read"
    how = "cannot be read" if rundir.SUPERVISOR in names else "is missing"
    return f"{rundir.SUPERVISOR} of {run.name} {how}"


def _armed(
    supervisor: dict[str, Any], key: str, state: State, unwell: Sequence[Alert]
) -> str:  # fmt: skip
    """Says what would act on a fault; `unwell` tells which processes are stopped."""
    if state == "unsupervised":
        return UNARMED if key == "armed" else "nothing"
    ids = [alert.id for alert in unwell]
    if liveness.WORK_STOPPED in ids:
        return HELD if key == "armed" else "nothing"
    held = liveness.SUPERVISOR_STOPPED in ids and key == "armed"
    return documents.line(supervisor, key, "") + (f"; {NO_ATTEMPT}" if held else "")


def size_words(size_bytes: int) -> str:
    """Returns a size in the unit that fits it; what is there is never 0."""
    units = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
    unit, name = next((each for each in units if size_bytes >= each[0]), (1, "bytes"))
    return f"{size_bytes / unit:,.1f} {name}" if unit > 1 else f"{size_bytes} bytes"


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _empty(path: Path | None, launch: LaunchState | None, troubles: list[Alert]) -> RunState:
    """The state of a launch that has no run yet."""
    name = launch.id if launch else ""
    why = launch.why if launch else "no run"
    state: State = "lost" if launch and launch.state == "unsupervised" else "queued"
    return RunState(name, str(path or ""), state, why, launch=launch, alerts=tuple(troubles))
