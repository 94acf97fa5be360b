"""Number formats, and the peak that MFU is measured against."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch

PEAK_TFLOPS: tuple[tuple[str, dict[str, float]], ...] = (
    ("H200", {"bf16": 989.5, "fp32": 67.0}),
    ("H100 PCIe", {"bf16": 756.0, "fp32": 51.0}),
    ("H100", {"bf16": 989.5, "fp32": 67.0}),
    ("A100", {"bf16": 312.0, "fp32": 19.5}),
    ("A10G", {"bf16": 70.0, "fp32": 31.2}),
    ("L40S", {"bf16": 362.0, "fp32": 91.6}),
    ("L4", {"bf16": 121.0, "fp32": 30.3}),
    ("RTX 4090", {"bf16": 165.2, "fp32": 82.6}),
)
"""Dense peak by a part of the device's name, from the vendor's data sheets; first match counts."""

MFU_FORMULA = "flops_per_token(causal=False) * toks_per_s / (world * peak_flops)"


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Returns the context of the forward pass."""
    if precision == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return contextlib.nullcontext()


def peak_flops(device_name: str, precision: str) -> float | None:
    """Returns FLOP/s of one device, None where the table has no such device (a CPU, say)."""
    for part, peaks in PEAK_TFLOPS:
        if part in device_name:
            return peaks[precision] * 1e12
    return None
