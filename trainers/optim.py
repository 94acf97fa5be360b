"""AdamW, and the schedule of the learning rate."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from trainers.schema import OptimSettings, TrainSettings


def build(model: nn.Module, settings: OptimSettings) -> torch.optim.AdamW:
    """Returns AdamW; weight decay applies to parameters with two or more dimensions."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    betas = (settings.beta1, settings.beta2)
    return torch.optim.AdamW(groups, betas=betas, eps=settings.eps, fused=settings.fused)


def empty_state(p: nn.Parameter) -> dict[str, Tensor]:
    """Returns the AdamW state before the first step, with averages sharded like the parameter."""
    step = torch.zeros((), dtype=torch.float32, device=p.device)
    return {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}


def learning_rate(step: int, settings: TrainSettings) -> float:
    """Returns the learning rate of `step` (from 1): linear warm-up, cosine, then constant."""
    if step <= settings.warmup_steps:
        return settings.lr * step / settings.warmup_steps
    span = max((settings.schedule_steps or settings.steps) - settings.warmup_steps, 1)
    done = min((step - settings.warmup_steps) / span, 1.0)
    low = settings.min_lr_ratio
    return settings.lr * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done)))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
