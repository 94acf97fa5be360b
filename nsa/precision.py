"""Float32 for the parts of the model that need it under low-precision weights or autocast."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def upcast_fp32(x: Tensor) -> Tensor:
    """Returns `x` in float32; float64 stays unchanged."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def has_autocast(kind: str) -> bool:
    """Returns False for "meta" only; torch.compile cannot trace torch's own test (torch 2.11)."""
    return kind != "meta"


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Returns a context without autocast on a device."""
    if not has_autocast(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
