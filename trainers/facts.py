"""Facts about the machine, the libraries and the model, for env.json."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from nsa.attention import routes_of
from nsa.backends import in_words
from trainers.loader import Source
from trainers.parallel import Single
from trainers.precision import AUTOCAST, MFU_FORMULA, weights_dtype
from trainers.schema import Settings


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def collect(
    parallel: Single, model: nn.Module, source: Source, settings: Settings
) -> dict[str, Any]:
    """Returns facts about this run that are not among its settings."""
    on_cuda = parallel.device.type == "cuda"
    return {
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "datasets")},
        "cuda": torch.version.cuda,
        "device": {"type": parallel.device.type, "name": device_name(parallel.device)},
        "device_count": torch.cuda.device_count() if on_cuda else 0,
        "threads_per_rank": torch.get_num_threads(),
        "strategy": parallel.name,
        "backend": attention(parallel.device, settings),
        "comm_backend": parallel.backend,
        "comm_hook": parallel.comm_hook,
        "data": {"about": source.about, "fingerprint": source.fingerprint},
        "parameters_counted": sum(p.numel() for p in model.parameters()),
        "mfu_formula": MFU_FORMULA,
    }


def attention(device: torch.device, settings: Settings) -> dict[str, str]:
    """Returns the route of each attention branch in words."""
    precision = settings.train.precision
    dtype = AUTOCAST.get(precision, weights_dtype(precision))
    routes = routes_of(
        settings.model, settings.data.seq_len, device, dtype, settings.attention,
        batch=settings.train.batch_size,
    )  # fmt: skip
    return in_words(routes)


def memory(device: torch.device) -> dict[str, int]:
    """Returns the GPU memory of this rank in MiB, or {} on a CPU."""
    if device.type != "cuda":
        return {}
    return {
        "gpu_mem_alloc": torch.cuda.memory_allocated(device) >> 20,
        "gpu_mem_reserved": torch.cuda.memory_reserved(device) >> 20,
    }
