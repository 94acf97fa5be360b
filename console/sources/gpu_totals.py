"""The use of each GPU over the time in which all ranks step, added up from the samples of a run.

Samples are not numbered. If the time between two samples is longer than `EVERY_S`, the excess is
treated as idle, so that missing samples can only lower the use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trainers.contract import jsonl

EVERY_S = 1.0
STEPPING = ("fetch", "forward", "backward", "optimizer", "log", "step")
MAX_GPUS, MAX_ATTEMPTS = 1024, 1000


class GpuTotals:
    """The time in which all ranks step, and the busy time and sampled time of each GPU."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.busy_s: dict[int, float] = {}
        self.seen_s: dict[int, float] = {}
        self.covered: dict[int, int] = {}
        """The number of steps between the samples, by attempt."""
        self.trouble = ""
        """Why the use of the GPUs is not known, or "" if it is known."""
        self._newest: tuple[int, float, int] | None = None
        """Attempt, monotonic time and step of the newest sample, if all ranks stepped in it."""
        self._mono = -math.inf

    def add(self, sample: Mapping[str, Any]) -> None:
        """Adds a sample; a sample that is not newer than the newest one is ignored."""
        mono, attempt = jsonl.number(sample, "mono"), jsonl.integer(sample, "attempt")
        if mono is None or attempt is None or not self._mono < mono < math.inf:
            return
        self._mono = mono
        pulses = [jsonl.mapping(each, "pulse") for each in jsonl.entries(sample, "ranks")]
        before, self._newest = self._newest, None
        if pulses and all(jsonl.text(each, "phase") in STEPPING for each in pulses):
            step = min(jsonl.integer(each, "step") or 0 for each in pulses)
            self._newest = attempt, mono, step
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

    def as_dict(self) -> dict[str, Any]:
        """Returns the totals in the form that a snapshot stores."""
        return {
            "seconds": self.seconds, "mono": self._mono,
            "busy_s": {str(i): x for i, x in self.busy_s.items()},
            "seen_s": {str(i): x for i, x in self.seen_s.items()},
            "covered": {str(i): x for i, x in self.covered.items()},
            "trouble": self.trouble, "newest": self._newest and list(self._newest),
        }  # fmt: skip

    @classmethod
    def load(cls, saved: Mapping[str, Any]) -> GpuTotals:
        """Returns the totals from the result of `as_dict`. Raises ValueError for other values."""
        found = cls()
        numbers = [jsonl.number(saved, key) for key in ("seconds", "mono")]
        busy_s, seen_s = (
            {int(i): jsonl.number({"": x}, "") for i, x in saved[key].items()}
            for key in ("busy_s", "seen_s")
        )
        covered = {int(i): jsonl.integer({"": x}, "") for i, x in saved["covered"].items()}
        if None in (*numbers, *busy_s.values(), *seen_s.values(), *covered.values()):
            raise ValueError("these are no totals of GPUs")
        found.seconds, found._mono = (value or 0.0 for value in numbers)
        found.busy_s = {index: value or 0.0 for index, value in busy_s.items()}
        found.seen_s = {index: value or 0.0 for index, value in seen_s.items()}
        found.covered = {attempt: steps or 0 for attempt, steps in covered.items()}
        found.trouble = jsonl.text(saved, "trouble")
        if saved["newest"] is not None:
            attempt, mono, step = saved["newest"]
            found._newest = int(attempt), float(mono), int(step)
        return found
