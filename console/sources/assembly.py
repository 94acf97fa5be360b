"""Assembles the `RunState` of one run from its documents and records."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from console import status_text
from console.model import (
    END_MISSING,
    LIVE_STATES,
    RANK_GONE,
    STALL,
    Alert,
    Gate,
    LaunchState,
    Level,
    RunState,
    State,
    Verdict,
    loss_unit,
)
from console.run_state import decide
from console.sources import json_documents, launches, legacy, liveness
from console.sources.launch_documents import with_run_state
from console.sources.ranks import data_age_s, newest_step, own_gpus, read_ranks
from console.sources.run_records import RECENT_BYTES, RunRecords
from trainers.contract import jsonl, rundir

IN_RECENT = f"in the newest {RECENT_BYTES >> 10} KiB of each file"
NO_POLICY, UNKNOWN_POLICY = "none (no supervisor)", "not known (no news from the supervisor)"
STOPPED_POLICY = "none (the supervisor is stopped)"
NO_RESTART = "no restart (the supervisor is stopped)"
ORPHANED = "no supervisor: no further phase starts; R, or nsa-console adopt, starts a supervisor"
Record = Mapping[str, Any]


@dataclass
class Assembly:
    """The documents and records of one run; `run_state` assembles a `RunState` from them."""

    run: Path
    is_away: bool
    """True if the current run of a launch has no directory, or has a link in its place."""
    launch: LaunchState | None
    supervisor: Record
    """The last valid content of supervisor.json, or {}."""
    by_launch: Record
    """The entry of the run in plan_state.json with the keys of supervisor.json, or {}."""
    run_json: Record
    """The last valid content of run.json, or {}."""
    gates: Record
    env: Record
    records: RunRecords
    behind_bytes: int
    """Bytes of records that are left to read, including the records for the charts."""
    trouble: str
    """Why the newest content of supervisor.json cannot be shown, or ""."""
    troubles: Sequence[Alert]
    """An alert for each document whose newest content cannot be shown."""

    def __post_init__(self) -> None:
        supervisor = self.supervisor or self.by_launch
        self._moved = "" if self.is_away else launches.why_not_in_place(self.run)
        self._live = None if self._moved else liveness.live_directory(supervisor)
        status = rundir.read_json(self._live / rundir.LIVE_STATUS) if self._live else None
        self._status: Record = status or {}
        others = (self.records.state_event, self._status, self._recorded_end())
        known = [each for each in others if not liveness.is_written_soon(supervisor, each)]
        self._newest = liveness.with_newest_state(supervisor, *known)
        self._described = self.run_json or self.env  # a training by hand has only env.json
        is_legacy, behind = self.records.files.is_legacy, self.records.files.behind_bytes > 0
        self._is_ours = is_legacy or bool(self._described.get("settings"))
        self._state: State
        self._state, self._why = decide(
            liveness.facts(
                self._newest, self.run_json, self.records.heads, self._is_ours, behind,
                self.trouble, self._moved,
            )
        )  # fmt: skip
        self._has_ended = self._state in liveness.ENDED
        self._supervisor_alerts = (
            [] if self._has_ended else liveness.supervisor_alerts(self._newest, self._status)
        )

    def _recorded_end(self) -> Record:
        """Returns the entry in plan_state.json, or a legacy run's end in its metrics, or {}."""
        if self.records.files.is_legacy and not self.supervisor:
            records = [head.last for head in self.records.heads.values()]
            return legacy.end(self.run, records)
        return self.by_launch

    def run_state(self) -> RunState:
        """Returns the state of the run."""
        records, supervisor, run_json = self.records, self._newest, self.run_json
        ranks = read_ranks(supervisor, run_json, records, self._live, self._has_ended)
        step = newest_step(supervisor, ranks, records)
        planned = json_documents.planned_steps(self._described)
        return RunState(
            id=self._id, path=str(self.run), state=self._state, why=self._why,
            since_ts=liveness.since_ts(supervisor, self._state, records.heads),
            attempt=records.attempt,
            host=json_documents.line(supervisor, "host", json_documents.line(run_json, "host", "")),
            world=len(ranks), step=step, steps_planned=planned, eta_s=self._eta_s(step, planned),
            data_age_s=None if self._has_ended else data_age_s(ranks, records),
            ranks=ranks, gpus=own_gpus(run_json, records.gpus),
            figures=records.figures(loss_unit(self._is_ours)),
            alerts=self._alerts(), verdict=self._verdict(),
            gates=self._gates, bounds=json_documents.bounds(run_json),
            armed=self._policy("armed"), armed_short=self._policy("armed_short"),
            launch=self.launch and with_run_state(
                self.launch, self.run.name, self._state, self._why
            ),
            skipped_records=records.files.skipped,
            skipped_in="" if records.files.has_all_records else IN_RECENT,
            behind_bytes=self.behind_bytes, directory_blocked_s=self._blocked_s,
            checkpoint=(
                "" if self.is_away
                else json_documents.latest_checkpoint(self.run, self._has_ended) or ""
            ),
            resumed_step=max((head.first_step - 1 for head in records.heads.values()), default=0),
            environment=json_documents.flag_field(run_json, "value"),
            origins=json_documents.flag_field(run_json, "origin"),
            decided=json_documents.flag_settings(jsonl.mapping(run_json, "settings")),
            argv=json_documents.words(run_json, "argv"),
            backend=json_documents.backend(self.env),
        )  # fmt: skip

    def _verdict(self) -> Verdict | None:
        """Returns the verdict of a run that is stalled, or was when it ended, else None.

        The verdict of a run that has ended has no next step.
        """
        found = json_documents.verdict(self._newest)
        if self._state == "stalled":
            return found
        return found.of_past() if found and self._has_ended else None

    @property
    def _id(self) -> str:
        launch, name = self.launch, self.run.name
        default = f"{launch.id}/{name}" if launch else name
        return json_documents.line(self.run_json, "run", default)

    def _eta_s(self, step: int | None, planned: int | None) -> float | None:
        stays = self._has_ended or self._state in ("stalled", "halting", "stopping")
        if not step or not planned or stays:
            return None
        return self.records.reducer.series.eta_s(step, planned)

    @property
    def _gates(self) -> tuple[Gate, ...]:
        """The stored results; () for a live run, whose results are only written at its end."""
        return () if self._state in LIVE_STATES else json_documents.gates(self.gates)

    @property
    def _blocked_s(self) -> float:
        is_known = not self._has_ended and liveness.is_recent(self._status)
        return (jsonl.number(self._status, "blocked_s") or 0.0) if is_known else 0.0

    def _policy(self, key: str) -> str:
        """Returns the policy of the supervisor in words; `key` is a key of supervisor.json."""
        is_long = key == "armed"
        if self._state == "unsupervised":
            is_elsewhere = liveness.elsewhere(self._newest)
            return (UNKNOWN_POLICY if is_elsewhere else NO_POLICY) if is_long else "none"
        stopped = [alert.id for alert in self._supervisor_alerts]
        if liveness.WORK_STOPPED in stopped:
            return STOPPED_POLICY if is_long else "none"
        policy = json_documents.line(self._newest, key, "")
        if is_long and liveness.SUPERVISOR_STOPPED in stopped:
            return f"{policy}; {NO_RESTART}"
        return policy

    # --- alerts --------------------------------------------------------------------------------

    def _alerts(self) -> tuple[Alert, ...]:
        """Returns the open alerts of the run and of this reader, ordered by `RunRecords.alerts`.

        The alert `RANK_GONE` is left out if no rank is known to have ended. The alert `STALL` is
        left out if no supervisor can clear it.
        """
        status = {} if self._has_ended else self._status
        own = [*self.troubles, *self._reader_alerts(), *self._supervisor_alerts]
        alerts = self.records.alerts(status, own)
        if self._has_ended or self._state == "unsupervised":
            alerts = tuple(alert for alert in alerts if alert.id != STALL)
        others = tuple(alert for alert in alerts if alert.id != RANK_GONE)
        return alerts if others == alerts or liveness.has_lost_rank(self._newest) else others

    def _reader_alerts(self) -> list[Alert]:
        """Returns the alerts of a reader, for example on a missing supervisor or unread records."""

        def add(name: str, level: Level, text: str, key: str = "") -> None:
            found.append(Alert(name, time.time(), level, text, key, observed=True))

        found: list[Alert] = []
        launch = self.launch
        if launch is not None:
            # This is the launch as its documents describe it, before `with_run_state`.
            known = {launch.why, *(alert.text for alert in self.troubles)}
            if self._has_ended and launch.state == "unsupervised":
                away = self._moved or (liveness.elsewhere(self._newest) and launch.why)
                add("no-supervisor", "crit", away or ORPHANED, "" if away else "R")
            if launch.doubt and launch.doubt not in known:
                add("documents", "crit", f"the state of the launch is unknown: {launch.doubt}")
        is_written = (
            jsonl.text(self.supervisor or {"state": self._state}, "state") in liveness.ENDED
        )
        if self._has_ended and self._state != "lost" and not is_written:
            lack = f"{rundir.SUPERVISOR} does not contain the end of the run (no supervisor, or a "
            add(END_MISSING, "warn", f"{lack}full disk): ranks and figures may be older than it")
        if missing := self._unreadable():
            others = f"{rundir.PLAN_STATE}, the live directory and earlier reads"
            add("directory", "warn", f"{missing}; the run's state is the newest in {others}")
        if behind_bytes := self.behind_bytes:
            add("behind", "info", f"{status_text.size(behind_bytes)} of records are not read yet")
        return found

    def _unreadable(self) -> str:
        """Returns a text if supervisor.json was never read, or if the run `is_away`; else "".

        The text is also "" if the launch does not list the run, and while the run starts.
        """
        is_unread = bool(self.by_launch) and (self.is_away or not self.supervisor)
        if not is_unread or self._state == "starting":
            return ""
        names = None if self.is_away else rundir.names(self.run)
        if names is None:
            return f"{self.run} cannot be read"
        how = "cannot be read" if rundir.SUPERVISOR in names else "is missing"
        return f"{rundir.SUPERVISOR} of {self.run.name} {how}"
