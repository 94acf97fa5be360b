"""The one small all-reduce of a step: what all ranks learn about a step, read one step later.

Loss, token count, non-finite count and the wish to halt travel together. Every rank issues it at
the same place and reads it at the same place, so what follows from it is decided alike everywhere
without another collective.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainers.contract.rundir import ASKS

WISHES = (".HALT", "SIGTERM", "SIGINT")
"""Reasons to halt; a rank's other words count as the first."""

FIGURES = ("loss_sum", "tokens", "right", "nonfinite", "spike")


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one step, summed over all ranks."""

    step: int
    loss_sum: float
    tokens: int
    right: int
    nonfinite: bool
    spike: bool
    wish: str
    asks: frozenset[str] = frozenset()

    @property
    def skipped(self) -> bool:
        """Says whether the optimizer left the weights alone."""
        return self.nonfinite or self.spike

    @property
    def nonfinite_loss(self) -> bool:
        """Says whether the loss of a rank was not finite."""
        return not math.isfinite(self.loss_sum)

    @property
    def overflow(self) -> bool:
        """Says whether the gradients were not finite although the loss was."""
        return self.nonfinite and not self.nonfinite_loss

    @property
    def loss(self) -> float:
        """Returns the token-weighted mean over all ranks, in nats."""
        return self.loss_sum / max(self.tokens, 1)


class Votes:
    """Issues and collects the rows. `reduce` sums a vector over ranks: `(vector) -> wait()`."""

    def __init__(self, reduce: Callable[[Tensor], Callable[[], None]], device: torch.device):
        self._reduce, self._device = reduce, device
        self._open: deque[tuple[int, Tensor, Callable[[], None]]] = deque()
        self._side: Any = torch.cuda.Stream() if device.type == "cuda" else None

    def cast(self, step: int, figures: Tensor, wish: str, asks: frozenset[str]) -> None:
        """Sends this rank's figures (float64, as `FIGURES`), its wish ("" for none) and asks."""
        wishes = [0.0] * len(WISHES)
        if wish:
            wishes[WISHES.index(wish) if wish in WISHES else 0] = 1.0
        wishes += [float(name in asks) for name in ASKS]
        vector = torch.cat((figures, torch.tensor(wishes, dtype=torch.float64).to(self._device)))
        self._open.append((step, *self._send(vector)))

    def collect(self, all_of_them: bool) -> list[Row]:
        """Returns the finished rows: of all steps but the last, or of `all_of_them`."""
        rows = []
        while len(self._open) > (0 if all_of_them else 1):
            step, vector, wait = self._open.popleft()
            wait()
            rows.append(_row(step, vector.tolist()))
        return rows

    def _send(self, vector: Tensor) -> tuple[Tensor, Callable[[], None]]:
        wait = self._reduce(vector)
        if self._side is None:
            return vector, wait
        # The copy to the host runs beside the next step; only its event is ever waited for.
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
    loss_sum, tokens, right, nonfinite, spike = values[: len(FIGURES)]
    counts = zip((*WISHES, *ASKS), values[len(FIGURES) :], strict=True)
    wished = [name for name, count in counts if count]
    wishes = [name for name in wished if name in WISHES]
    return Row(
        step, loss_sum, int(tokens), int(right), nonfinite > 0, spike > 0,
        wishes[0] if wishes else "", frozenset(wished) - frozenset(wishes),
    )  # fmt: skip
