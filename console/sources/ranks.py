"""The ranks of a run as they are now: by the supervisor's document, samples, records and pulses."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from console.model import Gpu, Pulse, Rank
from console.sources import documents, liveness
from console.sources.reading import MAX_RANKS
from console.sources.records import Records
from trainers.contract import jsonl, pulse, rundir

SAMPLED_S = 5.0
"""An older sample of a process does not say how it is now."""


def _gpu_index(devices: str, local: int) -> int | None:
    """Returns NVML's index of a rank's GPU; None when CUDA_VISIBLE_DEVICES does not number it."""
    named = devices.split(",")
    word = named[local].strip() if 0 <= local < len(named) else ""
    return (int(word) if word.isdecimal() else None) if devices else local


def newest_step(
    supervisor: dict[str, Any], ranks: Sequence[Rank], reader: Records
) -> int | None:  # fmt: skip
    """Returns the newest step that a pulse, a record or the supervisor tells of."""
    steps = [rank.pulse.step if rank.pulse else None for rank in ranks]
    steps += [record["step"] for record in reader.last.values()]
    steps.append(jsonl.integer(supervisor, "steps"))
    return max((each for each in steps if each is not None), default=None)


def read_ranks(
    supervisor: dict[str, Any], reader: Records, live: Path | None, devices: str, ended: bool
) -> tuple[Rank, ...]:
    """Returns all ranks that a document, a sample or a record knows; `devices` as for CUDA."""
    workers = {
        rank: entry
        for entry in jsonl.entries(supervisor, "workers")
        if (rank := jsonl.integer(entry, "rank")) is not None and 0 <= rank < MAX_RANKS
    }
    sampled: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
    for sample in reader.sample.values():
        for entry in jsonl.entries(sample, "ranks"):
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
        found = _live_pulse(live, rank, pid) or _last_pulse(beat) or _sampled_pulse(entry, sample)
        beat_age = liveness.age(jsonl.number(beat, "ts"))
        ages = [a for a in (beat_age, found.age_s if found else None) if a is not None]
        told = Rank(
            rank=rank,
            host=documents.line(worker, "host", documents.line(sample, "host", "")),
            pid=pid,
            state=documents.line(entry, "state", ""),
            cpu_pct=jsonl.number(entry, "cpu_pct"),
            rss_mib=jsonl.number(entry, "rss_mib"),
            pulse=found,
            gpu=gpus.get(_gpu_index(devices, rank if local is None else local)),
            exit=liveness.exit_words(worker, beat),
            age_s=min(ages) if ages else None,
        )
        sampled_age = liveness.age(jsonl.number(sample, "ts"))
        is_new = sampled_age is not None and sampled_age <= SAMPLED_S
        told = told if is_new else _at_rest(told)
        ranks.append(_ended(told) if ended else told)
    return tuple(ranks)


def _at_rest(rank: Rank) -> Rank:
    """Returns a rank whose last sample is not of now."""
    gpu = rank.gpu and replace(rank.gpu, util_pct=None, power_w=None)
    state = rank.state if rank.state == "gone" else ""
    return replace(rank, state=state, cpu_pct=None, rss_mib=None, gpu=gpu)


def _ended(rank: Rank) -> Rank:
    """Returns a rank of a run that has ended: no time of it goes on."""
    held = rank.pulse and replace(rank.pulse, since_s=None)
    return replace(_at_rest(rank), pulse=held, age_s=None)


def _live_pulse(live: Path | None, rank: int, pid: int) -> Pulse | None:
    """Reads a rank's pulse from shared memory; only while that process is there."""
    found = pulse.read(rundir.pulse(live, rank)) if live else None
    if found is None or (pid and found.pid != pid) or rundir.start_ticks(found.pid) is None:
        return None
    since = max(0.0, time.monotonic() - found.since)
    return Pulse(
        found.step, found.phase, since, 0.0, found.collectives or None, found.device_step,
        found.device_phase, True,
    )  # fmt: skip


def _last_pulse(beat: dict[str, Any]) -> Pulse | None:
    """The pulse of a rank that wrote its exit: a sample of it may be older."""
    if beat.get("msg") != "exit":
        return None
    age, step = liveness.age(jsonl.number(beat, "ts")) or 0.0, beat["step"]
    return Pulse(step, "exit", age, age, None, step, "exit", False)


def _sampled_pulse(entry: dict[str, Any], sample: dict[str, Any]) -> Pulse | None:
    held = jsonl.mapping(entry, "pulse")
    step, phase = jsonl.integer(held, "step"), jsonl.text(held, "phase")
    if step is None or phase not in pulse.CODES:
        return None
    age = liveness.age(jsonl.number(sample, "ts")) or 0.0
    since = (jsonl.number(held, "since_s") or 0.0) + age
    device = jsonl.text(held, "device_phase")
    device_phase = device if device in pulse.CODES else phase
    held = {"device_step": step} | held
    return documents.read(
        Pulse, held, since_s=since, age_s=age, device_phase=device_phase, live=False,
        collectives=jsonl.integer(held, "collectives") or None,
    )  # fmt: skip


def data_age_s(ranks: tuple[Rank, ...], reader: Records) -> float | None:
    """Returns the age of the newest pulse, record or sample, None without one."""
    ages = [rank.age_s for rank in ranks]
    ages += [liveness.age(jsonl.number(sample, "ts")) for sample in reader.sample.values()]
    return min((age for age in ages if age is not None), default=None)
