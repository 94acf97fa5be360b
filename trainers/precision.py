"""Number formats, fp16 loss scaling, and the peak FLOP/s for MFU."""

from __future__ import annotations

import contextlib
import re
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from trainers.schema import ScalerSettings

PEAK_TFLOPS: tuple[tuple[str, dict[str, float]], ...] = (
    *((other, {}) for other in ("MIG", "Laptop", "RTX 4090 D")),
    ("H200 NVL", {"bf16": 835.5, "fp32": 60.0}),
    ("H200", {"bf16": 989.5, "fp32": 67.0}),
    ("H100 NVL", {"bf16": 835.5, "fp32": 60.0}),
    ("H100 PCIe", {"bf16": 756.0, "fp32": 51.0}),
    ("H100", {"bf16": 989.5, "fp32": 67.0}),
    ("A100", {"bf16": 312.0, "fp32": 19.5}),
    ("A10G", {"bf16": 70.0, "fp32": 31.2}),
    ("L40S", {"bf16": 362.0, "fp32": 91.6}),
    ("L40", {"bf16": 181.0, "fp32": 90.5}),
    ("L4", {"bf16": 121.0, "fp32": 30.3}),
    ("RTX 4090", {"bf16": 165.2, "fp32": 82.6}),
)
"""Dense peak in TFLOP/s by whole words of the device's name, from data sheets. The first match is
used. The first rows have no peak: a slice of a GPU, and other GPUs with similar names."""

PEAK_OF = {
    "fp32": ("fp32", 1.0),
    "tf32": ("bf16", 0.5),
    "bf16": ("bf16", 1.0),
    "fp16": ("bf16", 1.0),
}
"""The peak of the table and a factor: tensor cores are as fast with fp16 as with bf16, and half as
fast with TF32. The table has no peak for fp64."""

LEAST_SCALE = 1.0
"""Lowest loss scale; gradients that overflow at this scale are too large for fp16."""

MFU_FORMULA = {
    "mfu": "flops_per_token * toks_per_s / (world * peak_flops); each query counts all keys",
    "mfu_exact": "flops_per_token_exact * toks_per_s / (world * peak_flops); exact number of keys",
}
"""The formula of each figure; `nsa.config.flops_per_token` computes the FLOPs per token."""

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Returns the context of the forward pass."""
    if precision in AUTOCAST:
        return torch.autocast(device.type, dtype=AUTOCAST[precision])
    return contextlib.nullcontext()


def weights_dtype(precision: str) -> torch.dtype:
    """Returns the type of weights, gradients and optimizer state."""
    return torch.float64 if precision == "fp64" else torch.float32


def compute_dtype(precision: str) -> torch.dtype:
    """Returns the type of the matrix products."""
    return AUTOCAST.get(precision, weights_dtype(precision))


def allow_tf32(allowed: bool) -> None:
    """Allows or forbids TF32 in fp32 products, for this process."""
    torch.set_float32_matmul_precision("high" if allowed else "highest")


class LossScale:
    """The dynamic scale of an fp16 loss, stored and updated on the device; no step waits for it.

    The rule follows `torch.amp.GradScaler`, with the lower limit `LEAST_SCALE`. Without fp16 the
    scale is 1.
    """

    def __init__(self, settings: ScalerSettings, active: bool, device: torch.device):
        self._settings, self.active = settings, active
        first = settings.init_scale if active else 1.0
        self.scale = torch.tensor(first, dtype=torch.float32, device=device)
        self.finite_steps = torch.zeros((), dtype=torch.float32, device=device)

    def unscale(self, model: nn.Module) -> None:
        """Divides the gradients by the scale."""
        if self.active:
            back = self.scale.reciprocal()
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.mul_(back)

    def update(self, nonfinite: Tensor) -> Tensor:
        """Adapts the scale; `nonfinite` is 1.0 for a step that was non-finite on any rank.

        Returns 1.0 if the scale was lowered, else 0.0.
        """
        if not self.active:
            return torch.zeros_like(nonfinite)
        settings, bad = self._settings, nonfinite > 0
        self.finite_steps = torch.where(bad, 0.0, self.finite_steps + 1)
        grows = self.finite_steps >= settings.growth_interval
        factor = torch.where(grows, settings.growth_factor, 1.0)
        before, change = self.scale, torch.where(bad, settings.backoff_factor, factor)
        self.scale = (before * change).clamp(min=LEAST_SCALE)
        self.finite_steps = torch.where(grows, 0.0, self.finite_steps)
        return (self.scale < before).to(nonfinite.dtype)


def peak_flops(device_name: str, precision: str, tf32: bool = False) -> float | None:
    """Returns the peak FLOP/s of one device, or None if the table has no such peak.

    `tf32` says that fp32 products may use TF32.
    """
    name, factor = PEAK_OF.get("tf32" if tf32 and precision == "fp32" else precision, ("", 0.0))
    matches = (peaks for words, peaks in PEAK_TFLOPS if re.search(rf"\b{words}\b", device_name))
    found = next(matches, {})
    return found[name] * factor * 1e12 if name in found else None
