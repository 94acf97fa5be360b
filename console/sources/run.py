"""Reads one run, or the current run of a launch, as a `RunState`; each poll reads new records.

Damaged content is not an error. Lines that are not records are counted. An alert names a document
that is not a JSON object.
"""

from __future__ import annotations

import stat
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from console.model import Alert, LaunchState, RunState, State
from console.sources import liveness
from console.sources.assembly import Assembly
from console.sources.json_documents import Document
from console.sources.launch_documents import launch_state
from console.sources.launches import is_launch, launch_id, launch_of, run_directories
from console.sources.reducer import LatestRecords, Reducer
from console.sources.run_records import Reads, RunRecords
from console.sources.series import Series
from console.sources.summary import Summary
from trainers.contract import jsonl, rundir

WHOLE_BYTES = 1 << 30
"""The default of `limit_bytes`: for most runs one poll is enough."""


class RunSource:
    """Follows a run, or the current run of a launch. Only one thread at a time may call `poll`.

    `reads` selects the records as in `RunRecords`. One `poll` reads at most about `limit_bytes` of
    records; the state has the number of bytes left. With `reads="charts"` a poll reads up to twice
    as many bytes. The first polls show the present state; later polls add the older series. If
    `only` has names, the series have only these quantities.
    """

    def __init__(
        self, path: Path, limit_bytes: int = WHOLE_BYTES, reads: Reads = "recent",
        only: Collection[str] = (),
    ):  # fmt: skip
        self._limit_bytes, self._only = limit_bytes, only
        self._reads: Reads = reads
        self.launch_path = launch_of(path)
        self.is_launch = is_launch(path)
        """True for the path of a launch, False for the path of a run."""
        self._fixed = None if self.is_launch else path
        self.run_path: Path | None = self._fixed
        self._documents: dict[Path, Document] = {}
        self._records: RunRecords | None = None
        self._charts: RunRecords | None = None
        """The records for the charts. After all of them have been read, they replace `_records`."""
        self._is_away = False
        """True if the path of a launch's current run is not a directory, or is a link."""
        self._began_away = False
        """The value of `_is_away` when `_records` was made; if True, `_records` has no snapshot."""

    @property
    def reducer(self) -> Reducer:
        """The reducer of the run that was read last, or an empty reducer if no run was read."""
        return self._records.reducer if self._records is not None else Reducer(Series())

    @property
    def heads(self) -> Mapping[int, LatestRecords]:
        """The newest records of each rank, as in `RunRecords.heads`; {} if no run was read."""
        return self._records.heads if self._records is not None else {}

    @property
    def series(self) -> Series:
        """The series in `reducer`."""
        return self.reducer.series

    @property
    def summary(self) -> Summary | None:
        """The totals of the run that was read last, or None if no run was read."""
        return self._records.summary if self._records is not None else None

    @property
    def has_all_records(self) -> bool:
        """False if the start of a heartbeat file is left out and is not in a snapshot either."""
        return self._records is None or self._records.files.has_all_records

    @property
    def counted(self) -> tuple[bool, float | None, int]:
        """Three values: whether the totals include a snapshot, its time or None, and a count.

        The count is the number of heartbeat records in the totals besides those in the snapshot.
        """
        records = self._records
        if records is None:
            return False, None, 0
        return records.has_snapshot, records.snapshot_ts, records.reducer.counted

    def read_all(self, progress: Callable[[int], object] = lambda _: None) -> RunState:
        """Polls while bytes are left and their number decreases; `progress` gets this number."""
        state = self.poll()
        while before := state.behind_bytes:
            progress(before)
            state = self.poll()
            if state.behind_bytes >= before:
                break
        return state

    def of_phase(self, run: Path) -> RunSource:
        """Returns a source that reads the same kinds of records, for another run of the launch."""
        return RunSource(run, reads=self._reads, only=self._only)

    def poll(self) -> RunState:
        """Reads documents, new records and pulses; returns the state of the run."""
        launch = self._launch()
        if self._fixed is None:
            self.run_path = self._current_run(launch)
        run = self.run_path
        if run is None:
            return self._without_run(launch)
        self._is_away = self._fixed is None and not _is_directory(run)
        supervisor = self._document(run / rundir.SUPERVISOR)
        run_json = self._document(run / rundir.RUN)
        records = self._read(
            run, jsonl.integer(supervisor, "attempt"), jsonl.integer(run_json, "world")
        )
        return Assembly(
            run, self._is_away, launch, supervisor, self._phase_of(run), run_json,
            self._document(run / rundir.GATES), self._document(run / rundir.ENV), records,
            self._behind_bytes(records), self._documents[run / rundir.SUPERVISOR].trouble,
            self._troubles(),
        ).run_state()  # fmt: skip

    # --- records -------------------------------------------------------------------------------

    def _read(self, run: Path, attempt: int | None, world: int | None) -> RunRecords:
        """Reads new records unless `_is_away`; returns the `RunRecords` of the run."""
        records = self._records
        is_back = self._began_away and not self._is_away
        if records is None or records.run != run or is_back:
            records, self._charts = self._begin(run), None
        elif self._reads == "charts" and self._charts is None and not self._is_away:
            has_all = not (records.files.left_out_bytes or records.has_snapshot)
            self._charts = records if has_all else RunRecords(run, "charts", self._only)
        if not self._is_away:
            records.poll(attempt, world, self._limit_bytes)
            if self._charts is not None and self._charts is not records:
                self._charts.poll(attempt, world, self._limit_bytes)
        if self._charts is not None and not self._charts.files.behind_bytes:
            records = self._charts
        self._records = records
        return records

    def _begin(self, run: Path) -> RunRecords:
        """Returns a new `RunRecords` of a run, without the snapshot if `_is_away`."""
        self._began_away = self._is_away
        first: Reads = "recent" if self._reads == "charts" else self._reads
        return RunRecords(run, "all" if self._is_away else first, self._only)

    def _behind_bytes(self, records: RunRecords) -> int:
        """Returns the number of bytes left to read; with `reads="charts"`, for the charts."""
        if self._reads != "charts" or self._charts is records:
            return records.files.behind_bytes
        charts = self._charts
        return charts.files.behind_bytes if charts else records.files.left_out_bytes

    # --- documents -----------------------------------------------------------------------------

    def _launch(self) -> LaunchState | None:
        if self.launch_path is None:
            return None
        # The directories are read first, so that plan_state.json names the phase of each.
        existing = [path.name for path in run_directories(self.launch_path)]
        paths = [self.launch_path / name for name in (rundir.PLAN, rundir.PLAN_STATE)]
        plan, state = map(self._document, paths)
        return launch_state(
            self.launch_path, launch_id(self.launch_path), plan, state,
            [self._documents[path].trouble for path in paths], existing,
        )  # fmt: skip

    def _phase_of(self, run: Path) -> dict[str, Any]:
        """Returns the entry of a run in plan_state.json, with the keys of supervisor.json.

        `ts` is the time at which the run ended, or None. Returns {} if there is no valid state.
        """
        state = self._document(self.launch_path / rundir.PLAN_STATE) if self.launch_path else {}
        for index, phase in enumerate(jsonl.entries(state, "phases")):
            if phase.get("dir") == run.name and jsonl.text(phase, "state") in liveness.STATES:
                is_current = index == jsonl.integer(state, "phase")
                return jsonl.mapping(state, "supervisor") | {
                    "state": phase["state"], "why": phase.get("why"), "steps": phase.get("steps"),
                    "ts": phase.get("ended_ts"), "updated_ts": state.get("updated_ts"),
                    "since_ts": phase.get("ended_ts") or phase.get("started_ts"),
                    "live_dir": state.get("live_dir") if is_current else "",
                }  # fmt: skip
        return {}

    def _current_run(self, launch: LaunchState | None) -> Path | None:
        """Returns the run of the last phase that has started, or None if there is none.

        In two cases the newest run with living processes is preferred: the launch is unsupervised;
        or its documents are in doubt, and it is not under way.
        """
        if launch is None or self.launch_path is None:
            return None
        if launch.state == "unsupervised" or (launch.doubt and not launch.under_way):
            for run in reversed(run_directories(self.launch_path)):
                if liveness.living_in(run):
                    return run
        for phase in reversed(launch.phases[: launch.phase + 1]):
            run = self.launch_path / phase.dir
            if phase.dir and (phase.state in liveness.STATES or _is_directory(run)):
                return run
        return None

    def _document(self, path: Path) -> dict[str, Any]:
        document = self._documents.setdefault(path, Document(path))
        if self._is_away and path.parent == self.run_path:
            return document.record
        return document.read()

    def _troubles(self) -> list[Alert]:
        """Returns an alert for each document of the launch and of the run that has a `trouble`."""
        return [
            Alert(f"document {path.name}", time.time(), "warn", document.trouble, observed=True)
            for path, document in self._documents.items()
            if document.trouble and path.parent in (self.launch_path, self.run_path)
        ]

    def _without_run(self, launch: LaunchState | None) -> RunState:
        state: State = "queued"
        if launch and launch.state == "unsupervised":
            plan_state = self._document(Path(launch.path) / rundir.PLAN_STATE)
            is_elsewhere = liveness.elsewhere(jsonl.mapping(plan_state, "supervisor"))
            state = "unsupervised" if is_elsewhere else "lost"
        return RunState(
            launch.id if launch else "", str(self.launch_path or ""), state,
            launch.why if launch else "no run", launch=launch, alerts=tuple(self._troubles()),
        )  # fmt: skip


def _is_directory(path: Path) -> bool:
    """Returns whether a path is a directory and no link; False also if this is unknown."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False
