"""Documents packed in one sequence: each document is computed as if it were alone.

Each document is a separate sequence for every kernel. So positions, compressed blocks, selection
and window begin anew, except in a first document that continues a cached document. Without a cache,
documents of the same length are computed as one batch.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from nsa.cache import Cache

Attend = Callable[..., Tensor]


def lengths_of(cu_seqlens: Sequence[int], seq_len: int) -> list[int]:
    """Returns the lengths of documents from their offsets 0, …, `seq_len`. Raises ValueError."""
    offsets = [int(offset) for offset in cu_seqlens]
    lengths = [end - begin for begin, end in pairwise(offsets)]
    if offsets[:1] != [0] or offsets[-1] != seq_len or min(lengths, default=-1) < 0:
        raise ValueError(
            f"cu_seqlens must ascend from 0 to the number of tokens ({seq_len}); it has "
            f"{len(offsets)} offsets from {offsets[:1]} to {offsets[-1:]}."
        )
    return lengths


def each_document(
    attend: Attend, parts: Sequence[Tensor], lengths: Sequence[int], cache: Cache | None
) -> Tensor:
    """Returns the results of `attend(*parts)` for each document, `[B, H, S, D]`.

    Each of the parts is `[B, …, S, …]` with S tokens along dimension 2. With a decoding cache, the
    first document continues the cached document, and the last document stays in the cache. If the
    first document is empty and another follows, the cached document ends.
    """
    pieces = [part.split(list(lengths), dim=2) for part in parts]
    batch, found = parts[0].shape[0], dict[int, Tensor]()
    together: dict[int, list[int]] = {}
    for i, length in enumerate(lengths):
        # With a cache, each document is computed by itself and in order.
        together.setdefault(length if cache is None else i, []).append(i)
    for documents in together.values():
        if cache is not None and documents[0]:
            cache.reset()
        if lengths[documents[0]] or not sum(lengths):  # a sequence without tokens is computed too
            joined = [torch.cat([piece[i] for i in documents]) for piece in pieces]
            found |= zip(documents, attend(*joined).split(batch), strict=True)
    return torch.cat([found[i] for i in sorted(found)], dim=2)
