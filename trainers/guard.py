"""Clips gradients, steps AdamW, and detects non-finite steps, spikes and target leaks.

A rank with a non-finite loss makes its gradients NaN. After the reduction, every rank has the same
non-finite gradient norm, so all ranks skip the step without an extra collective. The fused
optimizer skips the step on the device, so the host does not wait for the GPU.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nsa.projection import Projection
from trainers.failures import LeakError, NonFiniteError
from trainers.step_reduction import Row

SPIKE_WINDOW_STEPS, LEAST_DEVIATION = 128, 0.01
"""Number of norms in the window of `Spikes`, and least deviation as a fraction of the mean norm."""
LEAK_TOKENS, LEAK_NATS = 16_384, 0.02
"""Least tokens in the window of the leak check, and nats below chance that are a leak."""


def seed_gradient(loss: Tensor, scale: float | Tensor) -> Tensor:
    """Returns the initial gradient of the backward: `scale`, or NaN for a non-finite `loss`."""
    return torch.where(torch.isfinite(loss.detach()), scale, float("nan")).to(loss.dtype)


def clip(model: nn.Module, largest: float) -> tuple[Tensor, Tensor]:
    """Clips the global gradient norm.

    Returns two values: the norm before clipping, and 0.0 if that norm is finite, else 1.0.
    """
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), largest)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    return norm, (~torch.isfinite(norm)).to(torch.float32)


def optimise(optimizer: torch.optim.Optimizer, skipped: Tensor) -> None:
    """Steps the optimizer unless `skipped` is 1 (non-finite or a spike); deletes the gradients."""
    if optimizer.defaults.get("fused"):
        optimizer.found_inf = skipped  # pyright: ignore[reportAttributeAccessIssue]
        optimizer.step()
    elif not skipped.item():
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def dead_parameters(model: nn.Module) -> list[str]:
    """Returns the names of parameters with no or zero gradient; waits for the device.

    Each part of a `Projection` is treated as a parameter, unless its gradient is missing. All ranks
    must call this function, because each rank has a part of a sharded gradient.
    """
    dead = []
    joined = {f"{n}.weight": m for n, m in model.named_modules() if isinstance(m, Projection)}
    for name, p in model.named_parameters():
        whole = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        parts = {"": whole}
        if name in joined and whole is not None:
            parts = {f" ({part})": rows for part, rows in joined[name].rows(whole).items()}
        dead += [name + part for part, grad in parts.items() if grad is None or not grad.any()]
    return dead


class Spikes:
    """Detects steps whose gradient norm is far above earlier norms, without waiting for the GPU.

    All ranks have the same norm, so they detect the same spikes. With `sigmas` 0 nothing is
    detected, and the window stays empty. The window contains the last finite norms; a spike is
    replaced by the limit that it exceeded. So one spike changes the limit little. After a lasting
    rise of the norm, the limit grows until the new level is no spike.
    """

    def __init__(self, sigmas: float, device: torch.device):
        self._sigmas = sigmas
        self.norms = torch.zeros(SPIKE_WINDOW_STEPS, device=device)
        self.seen = torch.zeros((), dtype=torch.int64, device=device)

    def detect(self, norm: Tensor, nonfinite: Tensor) -> Tensor:
        """Returns 1.0 if `norm` is a spike, else 0.0; a finite norm updates the window."""
        if not self._sigmas:
            return torch.zeros_like(nonfinite)
        deviation, mean = torch.std_mean(self.norms)
        limit = mean + self._sigmas * torch.maximum(deviation, LEAST_DEVIATION * mean)
        # A window of zeros has no level to compare with.
        norm, full = norm.detach().float(), (self.seen >= SPIKE_WINDOW_STEPS) & (limit > 0)
        kept, finite = torch.where(full, torch.minimum(norm, limit), norm), nonfinite == 0
        slots = torch.arange(SPIKE_WINDOW_STEPS, device=norm.device)
        newest = slots == self.seen % SPIKE_WINDOW_STEPS
        self.norms = torch.where(newest & finite, kept, self.norms)
        self.seen = self.seen + finite
        return (full & (norm > limit)).to(nonfinite)


class Guard:
    """Counts skipped steps and ends a failing training; all ranks get the same result."""

    def __init__(self, most_nonfinite_in_a_row: int, chance_nats: float = 0.0):
        self._most = most_nonfinite_in_a_row
        self.in_a_row = 0
        """Non-finite steps since a finite step, except overflows that lowered the loss scale."""
        self._chance_nats = chance_nats
        self._recent: deque[Row] = deque()
        self.skipped = self.nonfinite_loss = self.overflow = self.scale_lowered = self.spikes = 0
        """Counts of steps in this process; `skipped` also counts steps before a resume."""

    def count(self, rows: list[Row]) -> None:
        """Counts skipped steps by cause; a non-finite step is not counted as a spike."""
        for row in rows:
            self.skipped += row.skipped
            self.nonfinite_loss += row.nonfinite_loss
            self.overflow += row.overflow
            self.scale_lowered += row.overflow and row.scale_lowered
            self.spikes += row.spike and not row.nonfinite

    def check(self, rows: list[Row]) -> None:
        """Raises NonFiniteError after too many non-finite steps in a row, and LeakError on a leak.

        An overflow that lowers the loss scale is not counted, because it shows only that the scale
        was too large. A leak means that random bytes were predicted better than chance,
        `chance_nats`. If that is 0, the data are not random, and there is no check.
        """
        for row in rows:
            if not row.nonfinite:
                self.in_a_row = 0
            elif not (row.overflow and row.scale_lowered):
                self.in_a_row += 1
            if self.in_a_row >= self._most:
                raise NonFiniteError(
                    f"loss or gradients were not finite in {self.in_a_row} steps in a row, up to "
                    f"step {row.step}; these steps changed no weights, so the weights may be "
                    "unusable, and no final checkpoint is saved; lower train.lr"
                )
            if self._chance_nats:
                self._check_for_leak(row)

    def _check_for_leak(self, row: Row) -> None:
        self._recent.append(row)
        while sum(each.tokens for each in self._recent) - self._recent[0].tokens >= LEAK_TOKENS:
            self._recent.popleft()
        tokens = sum(each.tokens for each in self._recent)
        mean = sum(each.loss_sum for each in self._recent) / max(tokens, 1)
        if tokens >= LEAK_TOKENS and mean < self._chance_nats - LEAK_NATS:
            raise LeakError(
                f"uniform random bytes were predicted with {mean:.4f} nats over steps "
                f"{self._recent[0].step} to {row.step}, chance is {self._chance_nats:.4f}: "
                "the model sees what it has to predict"
            )
