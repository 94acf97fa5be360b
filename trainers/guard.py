"""Steps that must not count, and training that is not what it seems.

Non-finite steps are found on all ranks before the optimizer moves, skipped, counted, ended.

A rank whose loss is not finite poisons its gradients, the reduction of gradients carries that to
every rank, and every rank finds the same non-finite gradient norm: no extra collective, and on a
GPU no wait for the device, because the fused optimizer skips by itself.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainers.failures import LeakError, NonFiniteError
from trainers.step_reduction import Row

SPIKE_WINDOW_STEPS = 128
LEAK_TOKENS, LEAK_NATS = 16_384, 0.02
"""A window in which chance alone never lies so far below ln 256 (a deviation is about 0.002)."""


def seed_gradient(loss: Tensor, scale: float | Tensor) -> Tensor:
    """Returns what backward starts from: `scale`, or NaN where `loss` is not finite."""
    return torch.where(torch.isfinite(loss.detach()), scale, float("nan")).to(loss.dtype)


def clip(model: nn.Module, largest: float) -> tuple[Tensor, Tensor]:
    """Clips the global gradient norm. Returns the norm before, and 1.0 if it is not finite."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), largest)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    return norm, (~torch.isfinite(norm)).to(torch.float32)


def optimise(optimizer: torch.optim.Optimizer, nonfinite: Tensor) -> None:
    """Takes one step unless `nonfinite` is set; the fused kernel asks the device, not the host."""
    if optimizer.defaults.get("fused"):
        optimizer.found_inf = nonfinite  # pyright: ignore[reportAttributeAccessIssue]
        optimizer.step()
    elif not nonfinite.item():
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def dead_parameters(model: nn.Module) -> list[str]:
    """Returns the parameters whose gradient is missing or zero everywhere; waits for the device.

    All ranks call it: the gradient of a sharded parameter is zero only if all its shards are.
    """
    dead = []
    for name, p in model.named_parameters():
        largest = None if p.grad is None else p.grad.detach().abs().amax()
        if isinstance(largest, DTensor):
            largest = largest.full_tensor()
        if p.requires_grad and (largest is None or largest.item() == 0):
            dead.append(name)
    return dead


class Spikes:
    """Skips steps whose gradient norm lies far above those before, without asking the host.

    The norm, not the loss: it is the same on every rank before the optimizer moves. `sigmas` 0
    skips nothing. The mean and deviation are those of the last finite, unskipped norms.
    """

    def __init__(self, sigmas: float, device: torch.device):
        self._sigmas = sigmas
        self._norms = torch.zeros(SPIKE_WINDOW_STEPS, device=device)
        self._seen = torch.zeros((), dtype=torch.int64, device=device)

    def found(self, norm: Tensor, nonfinite: Tensor) -> Tensor:
        """Returns 1.0 where a step of this norm is a spike; remembers the norm where it is not."""
        if not self._sigmas:
            return torch.zeros_like(nonfinite)
        deviation, mean = torch.std_mean(self._norms)
        full = self._seen >= SPIKE_WINDOW_STEPS
        spike = full & (norm.float() > mean + self._sigmas * deviation)
        kept = ~spike & (nonfinite == 0)
        slot = torch.arange(SPIKE_WINDOW_STEPS, device=norm.device) == (
            self._seen % SPIKE_WINDOW_STEPS
        )
        self._norms = torch.where(slot & kept, norm.detach().float(), self._norms)
        self._seen = self._seen + kept
        return spike.to(nonfinite)


class Guard:
    """Judges what all ranks agreed on, step by step, alike on all of them."""

    def __init__(self, most_nonfinite_in_a_row: int, chance_nats: float = 0.0):
        self._most = most_nonfinite_in_a_row
        self._in_a_row = 0
        self._chance_nats = chance_nats
        self._recent: deque[Row] = deque()
        self.skipped = self.nonfinite_loss = self.overflow = self.spikes = 0
        """Steps of this process."""

    def count(self, rows: list[Row]) -> None:
        """Counts skipped steps by cause; a step that was not finite is no spike."""
        for row in rows:
            self.skipped += row.skipped
            self.nonfinite_loss += row.nonfinite_loss
            self.overflow += row.overflow
            self.spikes += row.spike and not row.nonfinite

    def judge(self, rows: list[Row]) -> None:
        """Raises NonFiniteError when too many steps in a row were skipped, and LeakError when
        random bytes were predicted better than chance (`chance_nats`; 0: the bytes are not random).
        """
        for row in rows:
            self._in_a_row = self._in_a_row + 1 if row.nonfinite else 0
            if self._in_a_row >= self._most:
                raise NonFiniteError(
                    f"loss or gradients were not finite in {self._in_a_row} steps in a row, the "
                    f"last is step {row.step}; the weights were not touched: lower train.lr"
                )
            if self._chance_nats:
                self._look_for_a_leak(row)

    def _look_for_a_leak(self, row: Row) -> None:
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
