"""Decoding: prefill and then token by token gives the numbers of the batched forward."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa.backends import Switches
from nsa.cache import Cache
from nsa.model import Transformer
from tests.nsa.cases import configs, model_config, routed


@pytest.mark.parametrize("ranges", [False, True])
@settings(max_examples=25)
@given(configs(), st.integers(1, 30), st.data())
def test_a_layer_decodes_what_it_computes_at_once(ranges, config, seq_len, data):
    prefilled = data.draw(st.integers(0, seq_len))
    torch.manual_seed(seq_len)
    layer = routed(config, "masked").double()
    layer.switches = Switches(sel_ranges=ranges)
    x = torch.randn(2, seq_len, config.dim, dtype=torch.float64)
    expected = layer(x)
    cache = Cache(config.nsa)
    with torch.no_grad():
        pieces = [layer(x[:, :prefilled], cache)] if prefilled else []
        pieces += [layer.step(x[:, t : t + 1], cache) for t in range(prefilled, seq_len)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, rtol=1e-9, atol=1e-11)
    assert cache.length == seq_len


def test_a_cache_keeps_no_more_than_later_tokens_can_use():
    config = model_config(window=6, block_size=4, block_stride=2)
    layer, cache = routed(config, "masked"), Cache(config.nsa)
    with torch.no_grad():
        layer(torch.randn(1, 20, config.dim), cache)
        for _ in range(20):
            layer.step(torch.randn(1, 1, config.dim), cache)
    compressed, selected, window = 4, 40, 6
    held = [compressed, compressed, selected, selected, window, window]
    assert [rows.shape[2] for rows in cache.kv] == held
    assert [rows.shape[2] for rows in cache.blocks] == [19, 19]


@pytest.mark.parametrize("prefill_batched", [True, False])
@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_a_model_decodes_the_logits_of_its_forward(attention, prefill_batched):
    torch.manual_seed(0)
    config = model_config(n_layers=3, attention=attention, init_std=0.5)
    model = Transformer(config, Switches(prefill_batched=prefill_batched)).double()
    tokens = torch.randint(64, (2, 40))
    expected = model(tokens)
    with torch.no_grad():
        caches = model.caches()
        found = [model(tokens[:, :25], caches)]
        found += [model(tokens[:, t : t + 1], caches) for t in range(25, 40)]
    torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=1e-9, atol=1e-9)
