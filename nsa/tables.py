"""Constant tensors (masks, rotary tables), cached by their arguments and shared by all layers."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar, TypeVarTuple

import torch
from torch import Tensor

Ts = TypeVarTuple("Ts")
T = TypeVar("T", bound="Tensor | tuple[Tensor, ...]")

LARGEST_MIB, MOST_TABLES = 256, 1024
"""Limits of the cached tables, in MiB (all devices together) and in number.

The least recently used tables are dropped. A table that alone exceeds the limit is not cached.
"""


class Tables:
    """The cached tables, by function and arguments. Threads may share them."""

    def __init__(self) -> None:
        self.bytes = 0
        self._tables: OrderedDict[Any, Any] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, build: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Returns `build(*args)`; builds the table if it is not cached."""
        key = build, args
        with self._lock:
            if key in self._tables:
                self._tables.move_to_end(key)
                return self._tables[key]
        with torch.inference_mode(False), torch.no_grad():
            table = build(*args)
        with self._lock:
            # Another thread may have stored this table meanwhile.
            if key in self._tables or _bytes(table) > LARGEST_MIB << 20:
                return table
            self._tables[key] = table
            self.bytes += _bytes(table)
            while self.bytes > LARGEST_MIB << 20 or len(self._tables) > MOST_TABLES:
                self.bytes -= _bytes(self._tables.popitem(last=False)[1])
        return table


TABLES = Tables()


def _bytes(table: Tensor | Iterable[Tensor]) -> int:
    each = (table,) if isinstance(table, Tensor) else table
    return sum(x.numel() * x.element_size() for x in each)


def cached_table(build: Callable[[*Ts], T]) -> Callable[[*Ts], T]:
    """Caches a function that builds constant tensors from hashable arguments.

    The tables are neither in the state dict of a module nor among the inputs that recomputation
    stores. They are built outside inference mode, so that a later training step may save them for
    its backward. While torch.compile traces or a CUDA graph is captured, the table becomes part of
    the graph. Under FakeTensorMode it has no values. In these cases the table is not cached.
    """

    @wraps(build)
    def table(*args: *Ts) -> T:
        traced = torch.compiler.is_compiling() or type(torch.empty(0)) is not Tensor
        if traced or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            return build(*args)
        return TABLES.get(build, args)

    return table
