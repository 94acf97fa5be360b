"""One run as a `RunState`: reads what is new in its directory and in its live pulses.

Nothing here raises on what a run directory holds; what cannot be read is counted or None.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from console.history import History
from console.model import Alert, Figure, Gpu, LaunchState, Pulse, Rank, RunState
from console.sources import documents
from console.sources.launches import is_launch, launch_id, launch_of
from trainers.contract import heartbeat, jsonl, pulse, rundir
from trainers.contract.flags import DEVICES

MAX_RANKS = 4096
MAX_POLLS_PER_FILE = 4
CATCH_UP_POLLS = 64


class RunSource:
    """Follows a run, or a launch's current run. One thread at a time may `poll`."""

    def __init__(self, path: Path):
        self.launch_path = launch_of(path)
        self._fixed = None if is_launch(path) else path
        self.run_path: Path | None = self._fixed
        self._documents: dict[Path, documents.Document] = {}
        self.history = History()
        self._reader: _Records | None = None

    def poll(self) -> RunState:
        """Returns the state as it is on disk and in shared memory now."""
        launch = self._launch()
        if self._fixed is None:
            self.run_path = self._current_run(launch)
        run = self.run_path
        if run is None:
            return _empty(self.launch_path, launch)
        if self._reader is None or self._reader.run != run:
            self.history = History()
            self._reader = _Records(run, self.history)
        supervisor = self._document(run / rundir.SUPERVISOR)
        reader = self._reader
        reader.poll(jsonl.integer(supervisor, "attempt"))
        return self._state(run, launch, supervisor, reader)

    def _state(
        self, run: Path, launch: LaunchState | None, supervisor: dict[str, Any], reader: _Records
    ) -> RunState:
        born = self._document(run / rundir.RUN)
        live = documents.live_directory(supervisor)
        flags = documents.flag_values(born)
        ranks = _ranks(supervisor, reader, live, flags.get(DEVICES, ""))
        state, why = documents.effective_state(supervisor, reader.last)
        step = max((r.pulse.step for r in ranks if r.pulse), default=reader.last_step)
        planned = documents.setting_int(born, "train.steps")
        ended = state in documents.ENDED
        status = rundir.read_json(live / rundir.LIVE_STATUS) if live else None
        blocked = jsonl.number(status, "blocked_s") if status and not ended else None
        return RunState(
            id=documents.line(born, "run", run.name),
            path=str(run),
            state=state,
            why=why,
            since_ts=jsonl.number(supervisor, "since_ts"),
            attempt=reader.attempt,
            host=documents.line(supervisor, "host", documents.line(born, "host", "")),
            world=len(ranks),
            step=step,
            steps_planned=planned,
            eta_s=self.history.eta_s(step, planned) if step and planned and not ended else None,
            data_age_s=None if ended else _data_age(ranks, reader),
            ranks=ranks,
            gpus=reader.gpus,
            figures=reader.figures(),
            alerts=reader.alerts(),
            verdict=documents.verdict(supervisor),
            gates=documents.gates(self._document(run / rundir.GATES)),
            armed=documents.line(supervisor, "armed", ""),
            launch=launch,
            skipped_records=reader.skipped,
            directory_blocked_s=blocked or 0.0,
            checkpoint=documents.latest_checkpoint(run),
            environment=flags,
            origins=documents.flag_origins(born),
            argv=documents.words(born, "argv"),
            backend=documents.backend(self._document(run / rundir.ENV)),
        )

    def _launch(self) -> LaunchState | None:
        if self.launch_path is None:
            return None
        return documents.launch_state(
            self.launch_path,
            launch_id(self.launch_path),
            self._document(self.launch_path / rundir.PLAN),
            self._document(self.launch_path / rundir.PLAN_STATE),
        )

    def _current_run(self, launch: LaunchState | None) -> Path | None:
        if launch is None or self.launch_path is None:
            return None
        for phase in reversed(launch.phases[: launch.phase + 1]):
            run = self.launch_path / phase.dir
            if phase.dir and "/" not in phase.dir and run.is_dir() and not run.is_symlink():
                return run
        return None

    def _document(self, path: Path) -> dict[str, Any]:
        held = self._documents.get(path)
        if held is None:
            held = self._documents[path] = documents.Document(path)
        return held.read()


class _Records:
    """The append-only files of one run, followed."""

    def __init__(self, run: Path, history: History):
        self.run, self.history = run, history
        self.attempt = 1
        self.last: dict[int, dict[str, Any]] = {}
        self.progress: dict[int, dict[str, Any]] = {}
        self.sample: dict[str, dict[str, Any]] = {}
        self.gpus: tuple[Gpu, ...] = ()
        self.last_step = 0
        self._tails: dict[str, jsonl.Tail] = {}
        self._alerts: dict[str, Alert] = {}
        self._events = jsonl.Tail(run / rundir.EVENTS, lambda record: record)
        self._first = True

    @property
    def skipped(self) -> int:
        return self._events.skipped + sum(tail.skipped for tail in self._tails.values())

    def poll(self, attempt: int | None) -> None:
        if attempt is not None and attempt > self.attempt:
            self._begin_attempt(attempt)
        self._discover()
        polls = CATCH_UP_POLLS if self._first else MAX_POLLS_PER_FILE
        self._first = False
        for name, tail in self._tails.items():
            take = self._take_sample if name.startswith("samples_") else self._take_heartbeat
            for _ in range(polls):
                records = tail.poll()
                if not records and tail.offset >= tail.size_bytes:
                    break
                for record in records:
                    take(record)
        for record in self._events.poll():
            self._take_event(record)

    def _begin_attempt(self, attempt: int) -> None:
        self.attempt = attempt
        self.last.clear()
        self.progress.clear()
        self.sample.clear()
        self.last_step = 0

    def _discover(self) -> None:
        try:
            names = os.listdir(self.run)
        except OSError:
            return
        for name in names:
            if name in self._tails or not name.endswith(".jsonl") or len(self._tails) > MAX_RANKS:
                continue
            if name.startswith("heartbeat_rank"):
                self._tails[name] = heartbeat.tail(self.run / name)
            elif name.startswith("samples_"):
                self._tails[name] = jsonl.Tail(self.run / name, lambda record: record)

    def _take_heartbeat(self, record: dict[str, Any]) -> None:
        if record["attempt"] > self.attempt:
            self._begin_attempt(record["attempt"])
        if record["attempt"] != self.attempt or record["rank"] >= MAX_RANKS:
            return
        rank, at = record["rank"], jsonl.number(record, "ts") or 0.0
        self.last[rank] = record
        self.last_step = max(self.last_step, record["step"])
        if record["msg"] != "progress":
            return
        self.progress[rank] = record
        if rank != 0:
            self.history.add(f"rss_mib:{rank}", at, jsonl.number(record, "rss_mib"))
            return
        durations = record.get("steps_dt_s")
        if isinstance(durations, list):
            steps = [float(d) for d in durations if isinstance(d, int | float)]
            self.history.add_steps(at, record["step"], steps)
        for name in documents.CHARTED:
            self.history.add(name, at, jsonl.number(record, name))
        layers = record.get("gate_entropy_layers")
        if isinstance(layers, list):
            for index, value in enumerate(layers[:128]):
                self.history.add(f"gate_entropy:{index}", at, documents.as_float(value))

    def _take_sample(self, record: dict[str, Any]) -> None:
        at = jsonl.number(record, "ts")
        if at is None:
            return
        attempt = jsonl.integer(record, "attempt")
        if attempt is not None and attempt < self.attempt:
            return
        host = documents.line(record, "host", "?")
        self.sample[host] = record
        self.gpus = tuple(gpu for s in self.sample.values() for gpu in documents.gpus(s))
        for gpu in documents.gpus(record):
            self.history.add(f"gpu_util:{gpu.index}", at, gpu.util_pct)
            self.history.add(f"gpu_mem_mib:{gpu.index}", at, gpu.mem_used_mib)
            self.history.add(f"gpu_power:{gpu.index}", at, gpu.power_w)
        for entry in documents.entries(record, "ranks"):
            rank = jsonl.integer(entry, "rank")
            self.history.add(f"rss_mib:{rank}", at, jsonl.number(entry, "rss_mib"))
            self.history.add(f"cpu_pct:{rank}", at, jsonl.number(entry, "cpu_pct"))

    def _take_event(self, record: dict[str, Any]) -> None:
        kind = jsonl.text(record, "kind")
        name = documents.line(record, "alert", "")
        if kind == "alert" and name:
            self._alerts[name] = documents.alert(record, name)
        elif kind == "clear":
            self._alerts.pop(name, None)
        elif kind == "ack" and name in self._alerts:
            self._alerts[name] = documents.acknowledged(self._alerts[name])

    def alerts(self) -> tuple[Alert, ...]:
        """Returns the open alerts, worst first."""
        order = {"crit": 0, "warn": 1, "info": 2}
        return tuple(
            sorted(self._alerts.values(), key=lambda a: (a.acknowledged, order[a.level], -a.ts))
        )

    def figures(self) -> Mapping[str, Figure]:
        """Returns the newest figures of rank 0 and of the samples."""
        figures = documents.progress_figures(self.progress)
        percentiles = self.history.step_percentiles_s()
        if percentiles and 0 in self.progress:
            p50, p99, count = percentiles
            at = jsonl.number(self.progress[0], "ts") or 0.0
            window = f"last {count} steps"
            figures["step_p50_s"] = Figure(p50, "s", window, at)
            figures["step_p99_s"] = Figure(p99, "s", window, at)
        figures |= documents.sample_figures(self.sample)
        return figures


def _gpu_index(devices: str, local: int) -> int | None:
    """Returns NVML's index of a rank's GPU; None when CUDA_VISIBLE_DEVICES does not number it."""
    named = devices.split(",")
    word = named[local].strip() if 0 <= local < len(named) else ""
    return (int(word) if word.isdecimal() else None) if devices else local


def _ranks(
    supervisor: dict[str, Any], reader: _Records, live: Path | None, devices: str
) -> tuple[Rank, ...]:
    workers = {
        rank: entry
        for entry in documents.entries(supervisor, "workers")
        if (rank := jsonl.integer(entry, "rank")) is not None and 0 <= rank < MAX_RANKS
    }
    sampled: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
    for sample in reader.sample.values():
        for entry in documents.entries(sample, "ranks"):
            rank = jsonl.integer(entry, "rank")
            if rank is not None and 0 <= rank < MAX_RANKS:
                sampled[rank] = (entry, sample)
    gpus: dict[int | None, Gpu] = {gpu.index: gpu for gpu in reader.gpus}
    ranks = []
    for rank in sorted({*workers, *sampled, *reader.last}):
        worker = workers.get(rank, {})
        entry, sample = sampled.get(rank, ({}, {}))
        beat = reader.last.get(rank, {})
        pid = jsonl.integer(worker, "pid") or jsonl.integer(entry, "pid")
        pid = pid or jsonl.integer(beat, "pid") or 0
        local = jsonl.integer(worker, "local_rank")
        found = _live_pulse(live, rank, pid) or _sampled_pulse(entry, sample)
        beat_age = documents.age(jsonl.number(beat, "ts"))
        ages = [a for a in (beat_age, found.age_s if found else None) if a is not None]
        ranks.append(
            Rank(
                rank=rank,
                host=documents.line(worker, "host", documents.line(sample, "host", "")),
                pid=pid,
                state=documents.line(entry, "state", ""),
                cpu_pct=jsonl.number(entry, "cpu_pct"),
                rss_mib=jsonl.number(entry, "rss_mib"),
                pulse=found,
                gpu=gpus.get(_gpu_index(devices, rank if local is None else local)),
                exit=documents.exit_words(worker),
                age_s=min(ages) if ages else None,
            )
        )
    return tuple(ranks)


def _live_pulse(live: Path | None, rank: int, pid: int) -> Pulse | None:
    """Reads a rank's pulse from shared memory; only while that process is there."""
    found = pulse.read(rundir.pulse(live, rank)) if live else None
    if found is None or (pid and found.pid != pid) or rundir.start_ticks(found.pid) is None:
        return None
    since = max(0.0, time.monotonic() - found.since)
    return Pulse(
        found.step, found.phase, since, 0.0, found.collectives, found.device_step,
        found.device_phase, True,
    )  # fmt: skip


def _sampled_pulse(entry: dict[str, Any], sample: dict[str, Any]) -> Pulse | None:
    held = entry.get("pulse")
    if not isinstance(held, dict):
        return None
    step, phase = jsonl.integer(held, "step"), jsonl.text(held, "phase")
    if step is None or phase not in pulse.CODES:
        return None
    age = documents.age(jsonl.number(sample, "ts")) or 0.0
    device_step = jsonl.integer(held, "device_step")
    device_phase = jsonl.text(held, "device_phase")
    return Pulse(
        step,
        phase,
        (jsonl.number(held, "since_s") or 0.0) + age,
        age,
        jsonl.integer(held, "collectives") or 0,
        step if device_step is None else device_step,
        device_phase if device_phase in pulse.CODES else phase,
        False,
    )


def _data_age(ranks: tuple[Rank, ...], reader: _Records) -> float | None:
    ages = [rank.age_s for rank in ranks if rank.age_s is not None]
    for sample in reader.sample.values():
        age = documents.age(jsonl.number(sample, "ts"))
        if age is not None:
            ages.append(age)
    return min(ages) if ages else None


def _empty(path: Path | None, launch: LaunchState | None) -> RunState:
    """The state of a launch that has no run yet."""
    name = launch.id if launch else ""
    why = launch.why if launch else "no run"
    return RunState(
        id=name, path=str(path or ""), state="queued", why=why, since_ts=None, attempt=1, host="",
        world=0, step=None, steps_planned=None, eta_s=None, data_age_s=None, launch=launch,
    )  # fmt: skip
