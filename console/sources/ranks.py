"""Reads the present ranks of a run from supervisor.json, samples, records and pulses."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from console.model import Gpu, Pulse, Rank
from console.sources import json_documents, liveness
from console.sources.record_files import MAX_RANKS
from console.sources.run_records import FRESH_SAMPLE_S, RunRecords
from trainers.contract import jsonl, pulse, rundir
from trainers.contract.flags import DEVICES

BY_UUID = ("GPU-", "MIG-")
NO_DEVICES = "-1"
"""The usual CUDA_VISIBLE_DEVICES with which CUDA sees no GPU."""
Record = Mapping[str, Any]
EMPTY: Record = {}


@dataclass(frozen=True, slots=True)
class _Sources:
    """The entries of one rank in all sources; {} if a source has no entry of the rank."""

    rank: int
    worker: Record
    """The rank's entry in supervisor.json."""
    entry: Record
    """The rank's entry in the newest sample, which is `sample`."""
    sample: Record
    record: Record
    """The rank's newest heartbeat record."""

    @property
    def pid(self) -> int:
        pids = (jsonl.integer(each, "pid") for each in (self.worker, self.entry, self.record))
        return next(filter(None, pids), 0)

    @property
    def local_rank(self) -> int:
        local = jsonl.integer(self.worker, "local_rank")
        return self.rank if local is None else local

    @property
    def sample_age_s(self) -> float | None:
        return liveness.age(jsonl.number(self.sample, "ts"))


def read_ranks(
    supervisor: Record, run: Record, records: RunRecords, live: Path | None, ended: bool
) -> tuple[Rank, ...]:
    """Returns the ranks in supervisor.json, in the samples and in the records.

    `run` is run.json, and `live` is the live directory. Ranks of a run that has `ended` have no age
    and no figures of CPU and memory.
    """
    own, devices = own_gpus(run, records.gpus), _devices(run)
    gpus: dict[int | None, Gpu] = {gpu.index: gpu for gpu in own}
    return tuple(
        _rank(each, live, gpus.get(gpu_index(devices, each.local_rank, own)), ended)
        for each in _by_rank(supervisor, records)
    )


def _by_rank(supervisor: Record, records: RunRecords) -> list[_Sources]:
    workers = _entries(supervisor, "workers")
    sampled = {rank: (entry, sample) for sample in records.samples.values()
               for rank, entry in _entries(sample, "ranks").items()}  # fmt: skip
    newest = {rank: head.last for rank, head in records.heads.items()}
    return [
        _Sources(rank, workers.get(rank, EMPTY), *sampled.get(rank, (EMPTY, EMPTY)),
                 newest.get(rank, EMPTY))
        for rank in sorted({*workers, *sampled, *newest})
    ]  # fmt: skip


def _entries(record: Record, key: str) -> dict[int, Record]:
    return {
        rank: entry for entry in jsonl.entries(record, key)
        if (rank := jsonl.integer(entry, "rank")) is not None and 0 <= rank < MAX_RANKS
    }  # fmt: skip


def _rank(sources: _Sources, live: Path | None, gpu: Gpu | None, ended: bool) -> Rank:
    worker, entry, record = sources.worker, sources.entry, sources.record
    found = _live_pulse(live, sources) or _exit_pulse(record)
    found = found or _sampled_pulse(sources)
    ages = [liveness.age(jsonl.number(record, "ts")), found.age_s if found else None]
    age_s = min((age for age in ages if age is not None), default=None)
    sampled_s, state = sources.sample_age_s, json_documents.line(entry, "state", "")
    exit_words = liveness.exit_words(worker, record)
    is_present = not (ended or exit_words) and sampled_s is not None and sampled_s <= FRESH_SAMPLE_S
    if not is_present:
        gpu = gpu and replace(gpu, util_pct=None, power_w=None)
    return Rank(
        rank=sources.rank, pid=sources.pid, gpu=gpu, exit=exit_words,
        host=json_documents.line(worker, "host", json_documents.line(sources.sample, "host", "")),
        state=state if is_present or state == "gone" else "",
        cpu_pct=jsonl.number(entry, "cpu_pct") if is_present else None,
        rss_mib=jsonl.number(entry, "rss_mib") if is_present else None,
        pulse=replace(found, since_s=None) if found and ended else found,
        age_s=None if ended else age_s,
    )  # fmt: skip


def _devices(run: Record) -> str:
    return json_documents.flag_field(run, "value").get(DEVICES, "")


def own_gpus(run: Record, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """Returns the GPUs in `gpus` that the ranks of a run use, according to `run` (run.json).

    A foreign program may use every GPU that it sees. If some of the GPUs are not known, all `gpus`
    are returned, for example for a MIG slice, or while NVML fails.
    """
    setting = jsonl.mapping(jsonl.mapping(run, "settings"), "train.device")
    device, devices = jsonl.text(setting, "value"), _devices(run)
    if device == "cpu" or devices == NO_DEVICES:
        return ()
    needed = jsonl.integer(run, "nproc") if device else None
    seen = visible(devices, _uuids(gpus))[:needed]
    if None in seen or len(seen) < (needed or 1):
        return tuple(gpus)
    return tuple(gpu for gpu in gpus if gpu.index in seen)


def gpu_index(devices: str, local: int, gpus: Sequence[Gpu]) -> int | None:
    """Returns the index of a rank's GPU, or None if it is not known.

    `devices` is CUDA_VISIBLE_DEVICES, and `local` is the number of the rank on its host.
    """
    seen = visible(devices, _uuids(gpus))
    return seen[local] if 0 <= local < len(seen) else None


def _uuids(gpus: Sequence[Gpu]) -> list[str]:
    """Returns the UUID of each index; "" for an index that is missing in `gpus`."""
    known = {gpu.index: gpu.uuid for gpu in gpus if 0 <= gpu.index < json_documents.MAX_GPUS}
    return [known.get(index, "") for index in range(max(known, default=-1) + 1)]


def visible(devices: str, uuids: Sequence[str]) -> list[int | None]:
    """Returns the index of each GPU that CUDA sees with this CUDA_VISIBLE_DEVICES.

    A MIG slice, or a UUID that no GPU has, has the index None. The result ends before the first
    entry that is neither a valid index nor a UUID. If an entry before that is repeated, the result
    is []: torch then sees no GPU.
    """
    if not devices:
        return list(range(len(uuids)))
    words, found = [word.strip() for word in devices.split(",")], list[int | None]()
    for place, word in enumerate(words):
        named = word.isdecimal() and int(word) < len(uuids)
        if word in words[:place]:
            return []
        if not (named or word.startswith(BY_UUID)):
            break
        of_uuid = (i for i, uuid in enumerate(uuids) if uuid.startswith(word))
        found.append(int(word) if named else next(of_uuid, None))
    return found


def _live_pulse(live: Path | None, sources: _Sources) -> Pulse | None:
    """Returns the pulse in shared memory of a rank's living process, or None if there is none.

    A pulse file is ignored as a copy if the newest record is a progress record of a later step, and
    the pulse does not show its number. Steps may begin anew in each epoch.
    """
    found, pid = pulse.read(rundir.pulse(live, sources.rank)) if live else None, sources.pid
    if found is None or (pid and found.pid != pid):
        return None
    record = sources.record
    is_known = 0 < (jsonl.integer(record, "n") or 0) <= found.records
    if record.get("msg") == "progress" and record["step"] > found.step and not is_known:
        return None
    ticks, worker = rundir.start_ticks(found.pid), sources.worker
    is_reused = worker.get("pid") == found.pid and worker.get("start_ticks") not in (None, ticks)
    if ticks is None or is_reused:
        return None
    since_s = max(0.0, time.monotonic() - found.since)
    return Pulse(
        found.step, found.phase, since_s, 0.0, found.collectives or None, found.device_step,
        found.device_phase, True,
    )  # fmt: skip


def _exit_pulse(record: Record) -> Pulse | None:
    """Returns a pulse made from a rank's exit record, or None if the record is of another kind."""
    if record.get("msg") != "exit":
        return None
    age_s, step = liveness.age(jsonl.number(record, "ts")), record["step"]
    return Pulse(step, "exit", age_s, age_s, None, step, "exit", False)


def _sampled_pulse(sources: _Sources) -> Pulse | None:
    """Returns the pulse in a rank's sample, or None if there is none."""
    sampled = jsonl.mapping(sources.entry, "pulse")
    step, phase = jsonl.integer(sampled, "step"), jsonl.text(sampled, "phase")
    if step is None or phase not in pulse.CODES:
        return None
    age_s, since_s = sources.sample_age_s, jsonl.number(sampled, "since_s") or 0.0
    device = jsonl.text(sampled, "device_phase")
    return json_documents.read(
        Pulse, {"device_step": step} | sampled, age_s=age_s, live=False,
        since_s=None if age_s is None else since_s + age_s,
        device_phase=device if device in pulse.CODES else phase,
        collectives=jsonl.integer(sampled, "collectives") or None,
    )  # fmt: skip


def newest_step(supervisor: Record, ranks: tuple[Rank, ...], records: RunRecords) -> int | None:
    """Returns the highest step in pulses, records and supervisor.json, or None if there is none."""
    steps = [rank.pulse.step if rank.pulse else None for rank in ranks]
    steps += [head.step or head.last["step"] for head in records.heads.values()]
    steps.append(jsonl.integer(supervisor, "steps"))
    # The last records of a rank may be lost; its last pulse then still has its last step.
    ends = (e for e in jsonl.entries(supervisor, "ends") if e.get("attempt") == records.attempt)
    steps += [jsonl.integer(end, "step") or None for end in ends]  # 0 without a pulse
    return max((each for each in steps if each is not None), default=None)


def data_age_s(ranks: tuple[Rank, ...], records: RunRecords) -> float | None:
    """Returns the age of the newest pulse, record or sample, or None if no age is known."""
    ages = [rank.age_s for rank in ranks]
    ages += [liveness.age(jsonl.number(sample, "ts")) for sample in records.samples.values()]
    return min((age for age in ages if age is not None), default=None)
