"""Decoding: a prefill and then single tokens give the results of the batched forward."""

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa.backends import Switches
from nsa.cache import Cache, Rows
from nsa.compress import make_phi
from nsa.functional import nsa_attention
from nsa.model import Transformer
from tests.nsa.cases import configs, model_config, routed


def test_a_cache_keeps_no_more_than_later_tokens_can_use():
    config = model_config(window=6, block_size=4, block_stride=2)
    layer, cache = routed(config, "masked"), Cache(config.nsa)
    with torch.no_grad():
        layer(torch.randn(1, 20, config.dim), cache)
        for _ in range(20):
            layer(torch.randn(1, 1, config.dim), cache)
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
        caches, edges = model.caches(), [0, 0, 25, 25, *range(26, 41), 40]  # three empty blocks
        found = [model(tokens[:, i:j], caches) for i, j in pairwise(edges)]
    torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=1e-9, atol=1e-9)


def test_a_prompt_computed_token_by_token_is_continued_in_bfloat16():
    """Meta tensors check dtypes like the kernels of a device that computes in bfloat16."""
    with torch.device("meta"), torch.no_grad():
        model = Transformer(model_config(), Switches(prefill_batched=False)).bfloat16()
        caches = model.caches()
        model(torch.zeros(2, 20, dtype=torch.long), caches)
        assert model(torch.zeros(2, 1, dtype=torch.long), caches).shape == (2, 1, 64)


@pytest.mark.parametrize("route", ["masked", "chunked", "ranges", "sequential"])
@settings(max_examples=12)
@given(configs(), st.integers(2, 40), st.data())
def test_blocks_of_any_length_continue_a_sequence(route, config, seq_len, data):
    """A prefill in blocks of random lengths, also of one token, equals one forward."""
    cuts = sorted(data.draw(st.sets(st.integers(1, seq_len - 1), max_size=4)))
    torch.manual_seed(seq_len)
    layer = routed(config, route).double()
    x = torch.randn(2, seq_len, config.dim, dtype=torch.float64)
    cache = layer.new_cache(capacity=data.draw(st.sampled_from([0, 5, 64])))
    with torch.no_grad():
        expected = layer(x)
        edges = [0, *cuts, seq_len]
        pieces = [layer(x[:, i:j], cache) for i, j in pairwise(edges)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, rtol=1e-9, atol=1e-11)


def test_a_cached_row_is_written_once():
    """Most appends copy only new rows; a full buffer is replaced by a new buffer."""
    rows, buffers = Rows(), set()
    for _ in range(1000):
        buffers.add(rows.append(torch.zeros(1, 2, 1, 4)).untyped_storage().data_ptr())
    assert len(buffers) <= 14
    assert Rows(None, 1000).append(torch.zeros(1, 2, 1, 4)).untyped_storage().nbytes() == 32_000
    window = Rows(keep=6)
    for count in range(1, 500):
        assert window.append(torch.full((1, 1, 1, 1), float(count))).shape[2] == min(count, 7)
    assert window.rows.flatten().tolist() == [494, 495, 496, 497, 498, 499]
    assert window.rows.untyped_storage().nbytes() < 2000


@settings(max_examples=30)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 12))
def test_a_window_of_rows_is_the_last_ones_however_many_come_at_once(counts, keep):
    rows, tokens = Rows(keep), torch.arange(float(sum(counts))).view(1, 1, -1, 1)
    for end, part in zip(accumulate(counts), tokens.split(counts, dim=2), strict=True):
        begin = max(end - part.shape[2] - keep, 0)
        assert torch.equal(rows.append(part), tokens[:, :, begin:end])
        assert torch.equal(rows.rows, tokens[:, :, max(end - keep, 0) : end])
    assert rows.rows.untyped_storage().nbytes() <= 4 * 2 * keep


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_a_cache_of_another_configuration_is_refused(attention):
    config = model_config(attention=attention)
    layer = Transformer(config).attention_layers()[0]
    other_kind = Cache(config.nsa if attention == "dense" else None)
    for other in (other_kind, Cache(model_config(window=5).nsa)):
        with torch.no_grad(), pytest.raises(ValueError, match=r"the cache is for .*, not for"):
            layer(torch.randn(1, 4, 16), other)
        assert other.length == 0


def test_a_cache_of_another_number_of_sequences_is_refused():
    for attention in ("nsa", "dense"):
        layer = Transformer(model_config(attention=attention)).blocks[0].attn
        cache = layer.new_cache()
        with torch.no_grad():
            layer(torch.randn(2, 4, 16), cache)
            for count in (1, 3):
                with pytest.raises(
                    ValueError, match=r"the cache is for .* \(2, 2, 8, torch.float32\), not \(\d"
                ):
                    layer(torch.randn(count, 1, 16), cache)
            assert cache.length == 4
            layer(torch.randn(2, 1, 16), cache)
            cache.reset()
            x = torch.randn(3, 4, 16)
            torch.testing.assert_close(layer(x, cache), layer(x))


def test_a_cache_refuses_gradients():
    layer = routed(model_config(), "masked")
    with pytest.raises(RuntimeError, match="no gradients"):
        layer(torch.randn(1, 4, 16, requires_grad=True), cache := layer.new_cache())
    with torch.no_grad():
        layer(torch.randn(1, 4, 16), cache)
    assert cache.length == 4, "the cache has no refused tokens"


HARMS = {
    "v needs a gradient": (RuntimeError, lambda v, phi: v.clone().requires_grad_()),
    "phi needs a gradient": (RuntimeError, lambda v, phi: phi[1].requires_grad_() and v),
    "v has another width": (ValueError, lambda v, phi: v[..., :4]),
    "all have another dtype": (ValueError, lambda v, phi: v.bfloat16()),
}


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("count", [1, 8])
def test_a_refused_call_leaves_the_cache_as_it_was(harm, count):
    """The compressed branch is appended first, so its rows must also wait for the checks."""
    torch.manual_seed(0)
    config = model_config().nsa
    q, gates = torch.randn(1, 4, 20, 8), torch.rand(1, 20, 4, 3)
    k, v = torch.randn(3, 1, 2, 20, 8), torch.randn(3, 1, 2, 20, 8)
    phi = make_phi(config, 8).requires_grad_(False), make_phi(config, 8).requires_grad_(False)

    def call(first, end, *, values=v, cache=None):
        now = [x[..., first:end, :].to(values.dtype) for x in (q, k, values)]
        return nsa_attention(*now, gates[:, first:end], config, phi=phi, first=first, cache=cache)

    expected, cache = call(0, 20), Cache(config)
    call(0, 11, cache=cache)
    refusal, harmed = HARMS[harm]
    values = harmed(v, phi)
    with pytest.raises(refusal):
        call(11, 11 + count, values=values, cache=cache)
    assert cache.length == 11
    with torch.no_grad():
        pieces = [call(11, 11 + count, cache=cache), call(11 + count, 20, cache=cache)]
    torch.testing.assert_close(torch.cat(pieces, dim=2), expected[:, :, 11:])


def test_caches_of_an_unfinished_forward_are_refused():
    """Here the first layer appends its tokens, and the second layer refuses to store gradients."""
    model, tokens = Transformer(model_config(n_layers=2)), torch.randint(64, (1, 20))
    model.requires_grad_(False).blocks[1].requires_grad_(True)
    caches = model.caches()
    with pytest.raises(RuntimeError, match="no gradients"):
        model(tokens, caches)
    with torch.no_grad(), pytest.raises(ValueError, match="different or invalid lengths"):
        model(tokens, caches)


@pytest.mark.parametrize("attention", ["nsa", "dense"])
@pytest.mark.parametrize(("layers", "failing"), [(1, 0), (2, 0), (2, 1)])
def test_caches_of_an_interrupted_append_are_refused(monkeypatch, attention, layers, failing):
    """An append that needs a larger buffer can run out of memory."""
    model = Transformer(model_config(n_layers=layers, attention=attention))
    tokens, caches, original = torch.randint(64, (1, 9)), model.caches(), Rows._larger

    def larger(rows, new):
        if rows is caches[failing]._kv[1]:
            raise MemoryError
        return original(rows, new)

    with torch.no_grad():
        monkeypatch.setattr(Rows, "_larger", larger)
        with pytest.raises(MemoryError):
            model(tokens, caches)
        monkeypatch.undo()
        with pytest.raises(ValueError, match="was interrupted; make new caches"):
            model(tokens, caches)
        for cache in caches:
            cache.reset()
        torch.testing.assert_close(model(tokens, caches), model(tokens))
