"""Names for what a branch runs, in a profiler's trace: `nsa.sel.chunked`, `nsa.win.banded`.

Merged ranges are `nsa.sel.ranges_v2`, the name that the operators' tools look for.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.profiler import record_function

PREFIX = "nsa."


def mark(branch: str, route: str, nvtx: bool = False) -> AbstractContextManager[object]:
    """A range around a branch; with `nvtx` (CUDA) for Nsight Systems too. Nothing is marked while
    torch.compile traces."""
    if torch.compiler.is_compiling():
        return nullcontext()
    name = f"{PREFIX}{branch}.{'ranges_v2' if route == 'ranges' else route}"
    return _both(name) if nvtx else record_function(name)


@contextmanager
def _both(name: str) -> Iterator[None]:
    with record_function(name), torch.cuda.nvtx.range(name):
        yield
