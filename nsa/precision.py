"""The parts of the model that compute in float32 whatever its weights or autocast say."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def widen(x: Tensor) -> Tensor:
    """`x` in float32; float64 stays as it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Suspend autocast on a device; devices without autocast (meta) need nothing."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
