"""Samples GPUs, processes and pulses, as records and as evidence for a verdict.

Only pulses are read from the run directory, and only if the ranks have no shared memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from console.diagnose.rank_evidence import Doubt, RankEvidence, with_records
from console.diagnose.readings import Readings
from console.model import Gpu
from console.sources import process, procfs
from console.sources.nvml import Nvml
from console.sources.pace import Progress
from console.sources.reducer import NO_RECORDS, LatestRecords
from console.supervisor.process_tree import Worker
from trainers.contract import VERSION, jsonl, rundir
from trainers.contract.pulse import Pulse

LONGEST_STILL_S = 1e9
BUSY_PCT = 3.0
"""A process that uses less of a CPU core between two samples, and has no children, is idle."""
STOPPED_SAMPLES = 4
"""A process counts as stopped once it is stopped in this number of samples, for about 3 s, and has
not run between them. A tracer such as strace or py-spy stops a process for moments only."""


class Sampler:
    """Makes the records of `samples_{host}.jsonl`, and the evidence for a verdict."""

    def __init__(
        self, nvml: Nvml, read_pulse: Callable[[int], Pulse | None],
        own_gpus: Callable[[Sequence[Gpu]], tuple[Gpu, ...]],
    ):  # fmt: skip
        """`own_gpus` returns those GPUs of this host that the ranks use."""
        self._nvml, self._read_pulse, self._own_gpus = nvml, read_pulse, own_gpus
        self._meter = process.Meter()
        self._busy_at: dict[int, float] = {}
        """When each process was last seen not to be idle (monotonic time), by pid."""
        self._stops: dict[int, tuple[int | None, int]] = {}
        """For each process: its context switches, and the number of samples since it last ran."""
        self._host = rundir.host_name()
        self.disk: Mapping[str, float] = {}
        self.csv: Progress | None = None
        self.env: Mapping[str, Any] = {}
        self.gpus: tuple[Gpu, ...] = ()
        self.rss_mib: dict[int, float] = {}
        self.evidence: tuple[RankEvidence, ...] = ()

    def clear(self) -> None:
        """Drops the last sample; the caller does this if no new sample could be made."""
        self.evidence, self.gpus, self.rss_mib = (), (), {}

    def sample(
        self, workers: Sequence[Worker], heads: Mapping[int, LatestRecords], attempt: int,
        begun: float,
    ) -> dict[str, Any]:  # fmt: skip
        """Returns one sample; sets `evidence`, `gpus` and `rss_mib` from the same data."""
        now = time.monotonic()
        found = [
            self._rank(worker, heads.get(worker.rank, NO_RECORDS), now, begun)
            for worker in sorted(workers, key=lambda w: w.rank)
        ]
        rows, self.evidence = [row for row, _ in found], tuple(seen for _, seen in found)
        self.gpus = self._own_gpus(self._nvml.rows())
        self.rss_mib = {row["rank"]: row["rss_mib"] for row in rows if row["rss_mib"] is not None}
        return {
            "v": VERSION, "ts": time.time(), "mono": now, "host": self._host, "attempt": attempt,
            "gpus": [asdict(gpu) for gpu in self.gpus],
            "ranks": rows, "disk": self.disk,
            "load1": round(os.getloadavg()[0], 2),
        }  # fmt: skip

    def _rank(
        self, worker: Worker, head: LatestRecords, now: float, begun: float
    ) -> tuple[dict[str, Any], RankEvidence]:
        pid = worker.handle.pid
        ended = process.ProcessUse("Z" if worker.unreaped else process.GONE)
        use = self._meter.sample(pid) if worker.over_ts is None else ended
        # /proc shows the main thread; only the pidfd shows whether the process has ended.
        state = "?" if worker.over_ts is None and use.state in ("Z", "X") else use.state
        counted = self._counted_state(pid, state)
        found = self._read_pulse(worker.rank)
        if found is not None and found.pid != pid:
            found = None
        is_busy = use.cpu_pct is None or use.cpu_pct >= BUSY_PCT
        if is_busy or (found is None and process.children(pid)):
            self._busy_at[pid] = now
        row: dict[str, Any] = {
            "rank": worker.rank, "pid": pid, "state": state,
            "cpu_pct": use.cpu_pct, "rss_mib": use.rss_mib, "pulse": None,
        }  # fmt: skip
        if found is None:
            doubt: Doubt = "" if head is NO_RECORDS else "lost"
            p99_s = head.pace.p99_s()
            return row, RankEvidence(
                worker.rank, pid, counted, 0, "", now - begun, p99_s=p99_s, doubt=doubt,
                start_ticks=worker.handle.start_ticks, idle_s=now - self._busy_at.get(pid, now),
            )  # fmt: skip
        since_s, age_s = max(0.0, now - found.since), max(0.0, now - found.beat)
        row["pulse"] = {
            "step": found.step, "phase": found.phase, "since_s": round(since_s, 3),
            "age_s": round(age_s, 3), "collectives": found.collectives,
            "device_step": found.device_step, "device_phase": found.device_phase,
        }  # fmt: skip
        seen = RankEvidence(
            worker.rank, pid, counted, found.step, found.phase, min(since_s, age_s),
            found.collectives, code=worker.code, nonfinite_steps=found.nonfinite_steps,
            records=found.records, start_ticks=worker.handle.start_ticks,
        )  # fmt: skip
        return row, with_records(seen, head)

    def _counted_state(self, pid: int, state: str) -> str:
        """Returns the state of a process, or "R" if it is stopped but does not count as stopped.

        A process that is stopped in its first sample counts at once: a former supervisor may have
        reported it.
        """
        if state not in process.STOPPED:
            self._stops[pid] = None, 0
            return state
        switches = procfs.number_after(procfs.status(pid), "voluntary_ctxt_switches")
        before, samples = self._stops.get(pid, (switches, STOPPED_SAMPLES))
        samples = samples + 1 if switches == before else 1
        self._stops[pid] = switches, samples
        return state if samples >= STOPPED_SAMPLES else "R"


def readings(
    heads: Mapping[int, LatestRecords], seen: Sequence[RankEvidence], rss_mib: Mapping[int, float],
    gpus: tuple[Gpu, ...], disk: Mapping[str, float], here: bool = True, records_only: bool = False,
    csv: Progress | None = None, stall_doubt: str = "", env: Mapping[str, Any] | None = None,
) -> Readings:  # fmt: skip
    """Returns the readings of one poll, made from samples and records.

    `here` is True if the ranks run on this host. `csv` and `stall_doubt` come from second sources,
    as in `Readings`.
    """
    record_ts = [jsonl.number(head.last, "ts") or 0.0 for head in heads.values()]
    return Readings(
        mono=time.monotonic(), ts=time.time(),
        ranks=tuple(each for each in seen if 0 <= each.unchanged_s < LONGEST_STILL_S),
        records_only=records_only,
        fresh=[each for head in heads.values() for each in head.pace.take_fresh()],
        progress={r: p for r, head in heads.items() if (p := head.pace.progress)},
        newest_ts=max(record_ts, default=None), csv=csv, stall_doubt=stall_doubt, env=env or {},
        rss_mib=rss_mib, memory=procfs.memories() if here else (), gpus=gpus,
        suspended_s=time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic(),
        disk_free_gib=disk.get("free_gib"), checkpoint_gib=disk.get("checkpoint_gib"),
    )  # fmt: skip
