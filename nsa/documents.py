"""Documents packed in one sequence: each document is computed as if it were alone.

Documents of the same length are computed as one batch. So positions, compressed blocks, selection
and window begin anew in each document, whatever the kernel.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from nsa.cache import Cache, DenseCache

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


def each_document(attend: Attend, parts: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    """Returns the results of `attend(*parts)` for each document, `[B, H, S, D]`.

    Each of the parts is `[B, …, S, …]` with S tokens along dimension 2.
    """
    batch = parts[0].shape[0]
    pieces = [part.split(list(lengths), dim=2) for part in parts]
    found: dict[int, Tensor] = {}
    for length in dict.fromkeys(lengths):
        members = [i for i, each in enumerate(lengths) if each == length and length]
        if members:
            together = [torch.cat([piece[i] for i in members]) for piece in pieces]
            found |= zip(members, attend(*together).split(batch), strict=True)
    return torch.cat([found[i] for i in sorted(found)], dim=2)


def each_document_cached(
    attend: Attend, parts: Sequence[Tensor], lengths: Sequence[int], cache: Cache | DenseCache
) -> Tensor:
    """`each_document` with a decoding cache: the first document continues the cached document.

    The last document stays in the cache. If the first document is empty, the cached document ends.
    """
    found = []
    for number, pieces in enumerate(zip(*(p.split(list(lengths), 2) for p in parts), strict=True)):
        if number:
            cache.reset()
        if pieces[0].shape[2]:
            found.append(attend(*pieces))
    return torch.cat(found, dim=2)
