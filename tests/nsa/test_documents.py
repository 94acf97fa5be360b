"""Documents packed in one sequence have the same outputs and gradients as each alone."""

from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nsa.attention import DenseAttention
from nsa.model import Transformer
from tests.nsa.cases import ROUTES, configs, model_config, routed
from tests.nsa.test_attention import layer_and_input

SHORT_AND_LONG = [1, 3, 1, 5, 40, 3]
"""Lengths: one token, shorter than a block (4), shorter than the window (6), and many tokens."""


def offsets(lengths):
    return [sum(lengths[:i]) for i in range(len(lengths) + 1)]


def assert_equal(got, expected):
    for name, value in expected.items():
        error, largest = (got[name] - value).abs().max(), value.abs().max()
        assert error <= 1e-12 * max(largest, 1), name


def layer_of(config, route, seed=0):
    if route == "dense":
        torch.manual_seed(seed)
        return DenseAttention(config).double()
    return layer_and_input(config, seed, 1, 1, torch.float64, route)[0]


@pytest.mark.parametrize("route", [*ROUTES, "dense"])
@settings(max_examples=8)
@given(configs(), st.lists(st.integers(1, 24), min_size=1, max_size=5), st.integers(1, 2))
@example(model_config(), SHORT_AND_LONG, 2)
def test_packed_documents_equal_each_alone(route, config, lengths, batch):
    layer = layer_of(config, route)
    x = torch.randn(batch, sum(lengths), config.dim, dtype=torch.float64)
    weight, x = torch.randn_like(x), x.requires_grad_()

    def results(compute):
        layer.zero_grad()
        x.grad = None
        out = compute()
        (out * weight).sum().backward()
        grads = {name: p.grad.clone() for name, p in layer.named_parameters()}
        return grads | {"out": out.detach(), "x": x.grad}

    alone = results(lambda: torch.cat([layer(part) for part in x.split(lengths, 1)], dim=1))
    packed = results(lambda: layer(x, cu_seqlens=offsets(lengths)))
    assert_equal(packed, alone)


@pytest.mark.parametrize("route", [*ROUTES, "dense"])
@settings(max_examples=8)
@given(configs(), st.lists(st.integers(1, 20), min_size=1, max_size=5), st.data())
@example(model_config(), SHORT_AND_LONG, None)
def test_packed_documents_are_decoded_as_each_alone(route, config, lengths, data):
    """A part between two cuts may be one token, or contain the ends of several documents."""
    total, ends = sum(lengths), offsets(lengths)
    cuts = {8, 9, 10, 30} if data is None else data.draw(st.sets(st.integers(1, total), max_size=5))
    edges = sorted({0, total} | {cut for cut in cuts if cut < total})
    layer = layer_of(config, route)
    x = torch.randn(2, total, config.dim, dtype=torch.float64)
    cache, found = layer.new_cache(), []
    with torch.no_grad():
        alone = torch.cat([layer(part) for part in x.split(lengths, 1)], dim=1)
        for begin, end in pairwise(edges):
            inside = [cut - begin for cut in ends if begin <= cut < end and cut]
            found.append(layer(x[:, begin:end], cache, [0, *inside, end - begin]))
    assert_equal({"out": torch.cat(found, dim=1)}, {"out": alone})


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_a_model_computes_packed_documents_as_each_alone(attention):
    torch.manual_seed(0)
    model = Transformer(model_config(n_layers=2, attention=attention, init_std=0.5)).double()
    model.recompute = range(1)
    tokens = torch.randint(64, (1, sum(SHORT_AND_LONG)))
    packed = model(tokens, cu_seqlens=offsets(SHORT_AND_LONG))
    alone = torch.cat([model(part) for part in tokens.split(SHORT_AND_LONG, 1)], dim=1)
    assert_equal({"logits": packed}, {"logits": alone})
    assert (packed - model(tokens)).abs().max() > 1e-3
    with model.collect_stats():
        model(tokens, cu_seqlens=offsets(SHORT_AND_LONG))
    assert bool(model.read_stats()) == (attention == "nsa")


@pytest.mark.parametrize("wrong", [[], [0], [1, 9], [0, 8], [0, 6, 4, 9], [0, 10]])
def test_offsets_that_do_not_fit_are_one_sentence(wrong):
    layer = routed(model_config(), "masked")
    with pytest.raises(ValueError, match="cu_seqlens must ascend from 0"):
        layer(torch.randn(1, 9, 16), cu_seqlens=wrong)
