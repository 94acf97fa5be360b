"""Non-finite steps: found on all ranks before the optimizer moves, skipped, counted, ended.

A rank whose loss is not finite poisons its gradients, the reduction of gradients carries that to
every rank, and every rank finds the same non-finite gradient norm: no extra collective, and on a
GPU no wait for the device, because the fused optimizer skips by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainers.failures import NonFiniteError
from trainers.votes import Row


def seed_gradient(loss: Tensor, scale: float) -> Tensor:
    """Returns what backward starts from: `scale`, or NaN where `loss` is not finite."""
    return torch.where(torch.isfinite(loss.detach()), scale, float("nan")).to(loss.dtype)


def clip(model: nn.Module, largest: float) -> tuple[Tensor, Tensor]:
    """Clips the global gradient norm. Returns the norm before, and 1.0 if it is not finite."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), largest)
    return norm, (~torch.isfinite(norm)).to(torch.float32)


def optimise(optimizer: torch.optim.Optimizer, nonfinite: Tensor) -> None:
    """Takes one step unless `nonfinite` is set; the fused kernel asks the device, not the host."""
    if optimizer.defaults.get("fused"):
        optimizer.found_inf = nonfinite  # pyright: ignore[reportAttributeAccessIssue]
        optimizer.step()
    elif not nonfinite.item():
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)


class Guard:
    """Counts skipped steps from what all ranks agreed on."""

    def __init__(self, most_in_a_row: int):
        self._most = most_in_a_row
        self._in_a_row = 0
        self.skipped = 0

    def judge(self, rows: list[Row]) -> None:
        """Raises NonFiniteError on all ranks alike when too many steps in a row were skipped."""
        for row in rows:
            self._in_a_row = self._in_a_row + 1 if row.nonfinite else 0
            self.skipped += row.nonfinite
            if self._in_a_row >= self._most:
                raise NonFiniteError(
                    f"loss or gradients were not finite in {self._in_a_row} steps in a row, the "
                    f"last is step {row.step}; the weights were not touched: lower train.lr"
                )
