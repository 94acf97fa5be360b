"""The current phase of this rank in its step, and the times of the phases and of the steps."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from trainers.contract.pulse import PulseWriter

ON_DEVICE = ("forward", "backward", "optimizer")
NOT_TRAINING = ("boot", "eval", "save")
"""The phases that are part of no step."""


class Phases:
    """Updates the pulse at each change of phase, and sums the seconds per phase and per step.

    A step lasts from the start of the phase `log` of the previous step to that of its own, without
    `NOT_TRAINING`. The host's clock measures phases and steps. On CUDA, the host runs ahead of the
    device; so CUDA events measure the steps and the phases in `ON_DEVICE`, and show the position of
    the device. Only `take` waits for them.
    """

    def __init__(self, pulse: PulseWriter, cuda: Any = None, nvtx: bool = False):
        self._pulse, self._cuda = pulse, cuda
        self._nvtx: Any = cuda.nvtx if cuda is not None and nvtx else None
        if self._nvtx is not None:
            self._nvtx.range_push("boot")
        self._name, self._since = "boot", time.perf_counter()
        self._seconds: dict[str, float] = {}
        self._training_s = self._step_s = 0.0
        self._steps_s: list[float] = []
        self._edges: deque[tuple[int, str, Any]] = deque()
        self._device_step, self._device_phase = -1, ""

    def enter(self, step: int, name: str) -> None:
        """Starts a phase and ends the previous one."""
        now = time.perf_counter()
        ended, took = self._name, now - self._since
        self._name, self._since = name, now
        if ended not in NOT_TRAINING:
            self._training_s += took
        if self._cuda is None or ended not in ON_DEVICE:
            self._seconds[ended] = self._seconds.get(ended, 0.0) + took
        if self._cuda is None:
            self._add_to_step(ended, took, name)
        else:
            event = self._cuda.Event(enable_timing=True)
            event.record()
            self._edges.append((step, name, event))
            self._read_events()
        if self._nvtx is not None:
            self._nvtx.range_pop()
            self._nvtx.range_push(name)
        self._pulse.set(step, name, self._device_step, self._device_phase)

    def training_s(self) -> float:
        """Returns the seconds of all steps until now, by the host's clock."""
        current_s = time.perf_counter() - self._since
        return self._training_s + (0.0 if self._name in NOT_TRAINING else current_s)

    def take(self) -> tuple[dict[str, float], list[float]]:
        """Returns the seconds of ended phases, by phase, and of ended steps since the last call.

        Waits until the device has begun the present phase, so that no ended step is missing.
        """
        if self._edges:
            self._edges[-1][2].synchronize()
        self._read_events()
        taken = self._seconds, self._steps_s
        self._seconds, self._steps_s = {}, []
        return taken

    def _add_to_step(self, ended: str, took: float, begun: str) -> None:
        if ended not in NOT_TRAINING:
            self._step_s += took
        if begun == "log":
            self._steps_s.append(self._step_s)
            self._step_s = 0.0

    def _read_events(self) -> None:
        while len(self._edges) > 1 and self._edges[1][2].query():
            _, ended, begun = self._edges.popleft()
            self._device_step, self._device_phase, reached = self._edges[0]
            took = begun.elapsed_time(reached) / 1e3
            self._add_to_step(ended, took, self._device_phase)
            if ended in ON_DEVICE:
                self._seconds[ended] = self._seconds.get(ended, 0.0) + took
