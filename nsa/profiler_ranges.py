"""Named ranges of the branches in a profiler's trace, for example `nsa.sel.chunked`.

The route `ranges` has the name `nsa.sel.ranges_v2`, because the operators' tools expect this name.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.profiler import record_function

PREFIX = "nsa."


def mark(branch: str, route: str, nvtx: bool = False) -> AbstractContextManager[object]:
    """Returns a profiler range around a branch; with `nvtx` (CUDA) also for Nsight Systems.

    While torch.compile traces, the context does nothing.
    """
    if torch.compiler.is_compiling():
        return nullcontext()
    name = f"{PREFIX}{branch}.{'ranges_v2' if route == 'ranges' else route}"
    return _both(name) if nvtx else record_function(name)


@contextmanager
def _both(name: str) -> Iterator[None]:
    with record_function(name), torch.cuda.nvtx.range(name):
        yield
