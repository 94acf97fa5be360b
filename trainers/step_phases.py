"""The current phase of this rank in its step, and the time spent in each phase."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from trainers.contract.pulse import PulseWriter

ON_DEVICE = ("forward", "backward", "optimizer")


class Phases:
    """Updates the pulse at each change of phase, and sums the seconds per phase.

    The host's clock measures the phases. On CUDA, the host runs ahead of the device; so CUDA events
    measure the phases in `ON_DEVICE`, and show the position of the device. The events are queried
    without waiting.
    """

    def __init__(self, pulse: PulseWriter, cuda: Any = None, nvtx: bool = False):
        self._pulse, self._cuda = pulse, cuda
        self._nvtx: Any = cuda.nvtx if cuda is not None and nvtx else None
        if self._nvtx is not None:
            self._nvtx.range_push("boot")
        self._name, self._since = "boot", time.perf_counter()
        self._seconds: dict[str, float] = {}
        self._edges: deque[tuple[int, str, Any]] = deque()
        self._device_step, self._device_phase = -1, ""

    def enter(self, step: int, name: str) -> None:
        """Starts a phase and ends the previous one."""
        now = time.perf_counter()
        took = now - self._since
        if self._cuda is None or self._name not in ON_DEVICE:
            self._seconds[self._name] = self._seconds.get(self._name, 0.0) + took
        self._name, self._since = name, now
        if self._cuda is not None:
            self._record(step, name)
        if self._nvtx is not None:
            self._nvtx.range_pop()
            self._nvtx.range_push(name)
        self._pulse.set(step, name, self._device_step, self._device_phase)

    def take(self) -> dict[str, float]:
        """Returns the seconds of ended phases since the last call, by phase."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _record(self, step: int, name: str) -> None:
        event = self._cuda.Event(enable_timing=True)
        event.record()
        self._edges.append((step, name, event))
        while len(self._edges) > 1 and self._edges[1][2].query():
            _, ended, begun = self._edges.popleft()
            self._device_step, self._device_phase, reached = self._edges[0]
            if ended in ON_DEVICE:
                took = begun.elapsed_time(reached) / 1e3
                self._seconds[ended] = self._seconds.get(ended, 0.0) + took
