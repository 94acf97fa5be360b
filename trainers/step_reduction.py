"""Sums figures, halt reasons and requests over all ranks, in one all-reduce per step.

The sum of a step is read one step later. The sum of a step with a progress record, an evaluation or
a save is read in the same step, and the last sum at the end of the training. Every rank starts and
finishes the all-reduce at the same place in the loop, so all ranks decide alike without another
collective.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainers.contract.member import HALTING
from trainers.contract.rundir import HALT, REQUEST_FILES

HALT_REASONS = (HALT, *(number.name for number in HALTING))
"""The reasons for which a rank requests a halt, as `Member.halt_reason` names them."""
ASKED = (*HALT_REASONS, *REQUEST_FILES)
"""The requests that a rank can make in a step."""

FIGURES = ("loss_sum", "tokens", "right", "nonfinite", "spike", "scale_lowered")


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one step, summed over all ranks."""

    step: int
    loss_sum: float
    tokens: int
    right: int
    nonfinite: bool
    spike: bool
    scale_lowered: bool = False
    """True if the step lowered the loss scale of fp16."""
    asked: frozenset[str] = frozenset()
    """The requests of all ranks, in the words of `ASKED`."""

    @property
    def halt_reason(self) -> str:
        """The first of `HALT_REASONS` that a rank requested, or "" if there is none."""
        return next((reason for reason in HALT_REASONS if reason in self.asked), "")

    @property
    def skipped(self) -> bool:
        """True if the optimizer did not change the weights in this step."""
        return self.nonfinite or self.spike

    @property
    def nonfinite_loss(self) -> bool:
        """True if the loss of a rank was not finite."""
        return not math.isfinite(self.loss_sum)

    @property
    def overflow(self) -> bool:
        """True if the gradients were not finite although the loss was finite."""
        return self.nonfinite and not self.nonfinite_loss

    @property
    def loss(self) -> float:
        """The token-weighted mean loss over all ranks, in nats."""
        return self.loss_sum / max(self.tokens, 1)


class StepReduction:
    """Reduces the figures of each step.

    `reduce` starts to sum a vector over ranks, in place, and returns a function that waits for the
    sum.
    """

    def __init__(self, reduce: Callable[[Tensor], Callable[[], object]], device: torch.device):
        self._reduce, self._device = reduce, device
        self._open: deque[tuple[int, Tensor, Callable[[], object]]] = deque()
        self._side: Any = torch.cuda.Stream() if device.type == "cuda" else None

    def start(self, step: int, figures: Tensor, asked: frozenset[str]) -> None:
        """Starts to sum this rank's `FIGURES` (float64) and the requests of this rank."""
        flags = [float(name in asked) for name in ASKED]
        on_cuda = self._side is not None
        extra = torch.tensor(flags, dtype=torch.float64, pin_memory=on_cuda)
        vector = torch.cat((figures, extra.to(self._device, non_blocking=True)))
        self._open.append((step, *self._send(vector)))

    def finish(self, include_newest: bool) -> list[Row]:
        """Waits for the sums of the open steps, and returns their rows, oldest first.

        The newest step is included only with `include_newest`.
        """
        rows = []
        while len(self._open) > (0 if include_newest else 1):
            step, vector, wait = self._open.popleft()
            wait()
            rows.append(_row(step, vector.tolist()))
        return rows

    def _send(self, vector: Tensor) -> tuple[Tensor, Callable[[], object]]:
        wait = self._reduce(vector)
        if self._side is None:
            return vector, wait
        # The copy to the host overlaps the next step; the host waits only for the copy's event.
        host = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            wait()
            host.copy_(vector, non_blocking=True)
            vector.record_stream(self._side)
            copied = torch.cuda.Event()
            copied.record()
        return host, copied.synchronize


def _row(step: int, values: list[float]) -> Row:
    loss_sum, tokens, right, *signs = values[: len(FIGURES)]
    counts = zip(ASKED, values[len(FIGURES) :], strict=True)
    asked = frozenset(name for name, count in counts if count)
    nonfinite, spike, lowered = (sign > 0 for sign in signs)
    return Row(step, loss_sum, int(tokens), int(right), nonfinite, spike, lowered, asked)
