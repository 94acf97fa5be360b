"""Native Sparse Attention (arXiv 2502.11089) in PyTorch.

The names below are imported when they are used, so `import nsa.config` does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsa.attention import DenseAttention, NSAttention
    from nsa.backends import Switches
    from nsa.cache import Cache
    from nsa.config import ModelConfig, NSAConfig
    from nsa.directory import load_model, save_model
    from nsa.functional import Execution, nsa_attention
    from nsa.model import Transformer

__all__ = [
    "Cache", "DenseAttention", "Execution", "ModelConfig", "NSAConfig", "NSAttention", "Switches",
    "Transformer", "load_model", "nsa_attention", "save_model",
]  # fmt: skip
_MODULES = {
    "Cache": "cache", "DenseAttention": "attention", "Execution": "functional",
    "ModelConfig": "config", "NSAConfig": "config", "NSAttention": "attention",
    "Switches": "backends", "Transformer": "model", "load_model": "directory",
    "nsa_attention": "functional", "save_model": "directory",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'nsa' has no attribute {name!r}")
    return getattr(importlib.import_module(f"nsa.{_MODULES[name]}"), name)
