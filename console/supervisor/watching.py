"""The watchdog over one attempt: its sample, pulses and records, once a second."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from console.diagnose.readings import Readings
from console.diagnose.stall import Seen
from console.diagnose.watch import Change, Watchdog
from console.sources import documents, process
from console.supervisor.follow import Story
from trainers.contract import jsonl, rundir
from trainers.contract.plan import Watch

LONGEST_STILL_S = 1e9


class Watching:
    """Turns what the supervisor knows into readings; `look` says what the rules make of them."""

    def __init__(
        self, watch: Watch, actions: Mapping[str, str] | None = None, interval_s: float = 1.0
    ):
        self.dog = Watchdog(watch, actions or {}, interval_s)

    def look(
        self,
        sample: Mapping[str, Any],
        seen: Sequence[Seen],
        story: Story,
        records_only: bool = False,
    ) -> Sequence[Change]:
        """Returns what changed with this sample and evidence.

        `seen` is empty while nobody is to be waited for: ranks that are being ended do not stall.
        """
        return self.dog.look(readings(sample, seen, story, records_only))


def readings(
    sample: Mapping[str, Any], seen: Sequence[Seen], story: Story, records_only: bool = False
) -> Readings:
    """Returns one moment from a line of samples, which may hold anything, and the records."""
    disk = jsonl.mapping(sample, "disk")
    here = sample.get("host", rundir.host_name()) == rundir.host_name()
    total_mib, free_mib = process.host_memory_mib() if here else (None, None)
    rss_mib = {
        rank: rss for entry in documents.entries(sample, "ranks")
        if (rank := jsonl.integer(entry, "rank")) is not None
        and (rss := jsonl.number(entry, "rss_mib")) is not None
    }  # fmt: skip
    return Readings(
        mono=time.monotonic(),
        ts=time.time(),
        seen=tuple(each for each in seen if 0 <= each.still_s < LONGEST_STILL_S),
        records_only=records_only,
        fresh=story.take_fresh(),
        progress=story.progress,
        rss_mib=rss_mib,
        host_total_mib=total_mib,
        host_free_mib=free_mib,
        gpus=documents.gpus(sample),
        disk_free_gib=jsonl.number(disk, "free_gib"),
        checkpoint_gib=jsonl.number(disk, "checkpoint_gib"),
        newest_ts=story.newest_ts,
    )
