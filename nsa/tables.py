"""Constant tensors (masks, rotary tables) built once per shape and device, shared by all layers."""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def cached_table(build: Callable[P, T]) -> Callable[P, T]:
    """Caches a function that builds constant tensors from hashable arguments.

    The tables belong to no module: neither to its state dict nor to its checkpointed inputs. They
    are built outside inference mode, so that a later training step may save them for its backward.
    While torch.compile traces the function, its result becomes part of the graph.
    """

    @lru_cache(maxsize=128)
    def cached(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.inference_mode(False), torch.no_grad():
            return build(*args, **kwargs)

    @wraps(build)
    def table(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            return build(*args, **kwargs)
        return cached(*args, **kwargs)

    return table
