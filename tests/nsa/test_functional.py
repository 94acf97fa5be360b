"""The shapes, dtypes and positions that `nsa_attention` refuses."""

from functools import partial

import pytest
import torch

from nsa.cache import Cache
from nsa.functional import nsa_attention
from tests.nsa.cases import (
    model_config,
)


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [("q", (1, 4, 9), None), ("q", (1, 3, 9, 8), None), ("k", (2, 1, 2, 9, 8), None),
     ("k", (3, 1, 2, 9, 4), None), ("v", (3, 2, 2, 9, 8), None), ("v", (3, 1, 0, 9, 8), None),
     ("gates", (1, 4, 9, 3), None), ("k", (3, 1, 2, 9, 8), torch.bfloat16),
     ("v", (3, 1, 2, 9, 6), torch.float64)],
)  # fmt: skip
def test_other_shapes_and_dtypes_are_refused_in_one_sentence(name, shape, dtype):
    shapes = {"q": (1, 4, 9, 8), "k": (3, 1, 2, 9, 8), "v": (3, 1, 2, 9, 6), "gates": (1, 9, 4, 3)}
    given = {key: torch.zeros(x) for key, x in shapes.items()}
    call = partial(nsa_attention, config=model_config().nsa)
    assert call(**given).shape == (1, 4, 9, 6)
    refused = pytest.raises(ValueError, match=r"q must be \[B, H, S, Dk\], .* got the shapes \[\[")
    with refused:
        call(**{**given, name: torch.zeros(shape, dtype=dtype)})
    with refused:  # a batch without sequences
        call(q=given["q"][:0], k=given["k"][:, :0], v=given["v"][:, :0], gates=given["gates"][:0])


@pytest.mark.parametrize(
    ("keys", "first", "offsets"), [(12, 2, None), (8, -1, None), (12, 3, [0, 9]), (12, 3, [0, 12])]
)
def test_keys_of_another_number_than_the_queries_are_refused(keys, first, offsets):
    q, k, gates = torch.zeros(1, 4, 9, 8), torch.zeros(3, 1, 2, keys, 8), torch.zeros(1, 9, 4, 3)
    said = f"9 queries from position {first} need keys from 0 on, .*; got {keys} keys and 0 in"
    with pytest.raises(ValueError, match=said):
        nsa_attention(q, k, k, gates, model_config().nsa, first=first, cu_seqlens=offsets)


@pytest.mark.parametrize(("first", "queries", "keys"), [(48, 3, 1), (52, 3, 5), (40, 10, 0)])
def test_queries_that_do_not_follow_the_cache_with_their_keys_are_refused(first, queries, keys):
    config = model_config().nsa
    cache = Cache(config)

    def call(first, queries, keys):
        q, gates = torch.zeros(1, 4, queries, 8), torch.zeros(1, queries, 4, 3)
        k = torch.zeros(3, 1, 2, keys, 8)
        return nsa_attention(q, k, k, gates, config, first=first, cache=cache)

    call(0, 50, 50)
    with pytest.raises(ValueError, match=f"got {keys} keys and 50 in the cache"):
        call(first, queries, keys)
    assert cache.length == 50
