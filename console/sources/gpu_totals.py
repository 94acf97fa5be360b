"""The use of each GPU over the time in which all ranks step, added up from the samples of a run.

Samples are not numbered. If the time between two samples is longer than `EVERY_S`, the excess is
treated as idle, so that missing samples can only lower the use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainers.contract import jsonl

EVERY_S = 1.0
STEPPING = ("fetch", "forward", "backward", "optimizer", "log", "step")
MAX_GPUS, MAX_ATTEMPTS = 1024, 1000


@dataclass(slots=True)
class GpuTotals:
    """The time in which all ranks step, and the busy time and sampled time of each GPU."""

    seconds: float = 0.0
    busy_s: dict[int, float] = field(default_factory=dict)
    seen_s: dict[int, float] = field(default_factory=dict)
    covered: dict[int, int] = field(default_factory=dict)
    """The number of steps between the samples, by attempt."""
    trouble: str = ""
    """Why the use of the GPUs is not known, or "" if it is known."""
    newest: tuple[int, float, int] | None = None
    """Attempt, monotonic time and step of the newest sample, if all ranks stepped in it."""
    mono: float = -math.inf

    def add(self, sample: Mapping[str, Any]) -> None:
        """Adds a sample; a sample that is not newer than the newest one is ignored."""
        mono, attempt = jsonl.number(sample, "mono"), jsonl.integer(sample, "attempt")
        if mono is None or attempt is None or not self.mono < mono < math.inf:
            return
        self.mono = mono
        pulses = [jsonl.mapping(each, "pulse") for each in jsonl.entries(sample, "ranks")]
        before, self.newest = self.newest, None
        if pulses and all(jsonl.text(each, "phase") in STEPPING for each in pulses):
            step = min(jsonl.integer(each, "step") or 0 for each in pulses)
            self.newest = attempt, mono, step
            if before is not None:
                self._take(sample, mono - before[1], attempt == before[0])
            if before is not None and attempt == before[0] and len(self.covered) < MAX_ATTEMPTS:
                self.covered[attempt] = self.covered.get(attempt, 0) + step - before[2]

    def _take(self, sample: Mapping[str, Any], since_s: float, is_same: bool) -> None:
        counted_s = min(since_s, EVERY_S) if is_same else 0.0
        self.seconds += since_s
        gpus = jsonl.entries(sample, "gpus")[:MAX_GPUS]
        for index, gpu in {jsonl.integer(each, "index") or 0: each for each in gpus}.items():
            use = jsonl.number(gpu, "util_pct")
            if use is None or not 0 <= use <= 100 or gpu.get("state") != "ok":
                self.trouble = self.trouble or f"a sample has no utilisation of GPU {index}"
                use = 0.0
            self.busy_s[index] = self.busy_s.get(index, 0.0) + use / 100 * counted_s
            self.seen_s[index] = self.seen_s.get(index, 0.0) + counted_s
