"""Configuration: rejected values, and the numbers of parameters and FLOPs."""

import math
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from nsa.config import (
    ModelConfig,
    NSAConfig,
    attended_pairs,
    compressed_blocks,
    flops_per_token,
    parameter_count,
)
from nsa.model import Transformer
from tests.nsa.cases import configs, model_config

M7C = ModelConfig(dim=768, n_layers=12, n_heads=12, n_kv_groups=2, d_k=64, d_v=64, mlp_hidden=2048)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"n_kv_groups": 5}, "n_heads (12) must be a multiple of n_kv_groups (5)"),
        ({"d_k": 7}, "d_k must be even"),
        ({"n_select": 2}, "n_select must be at least 3"),
        ({"n_kv_groups": 0}, "all sizes of a model must be at least 1"),
        ({"norm_eps": 0.0}, "rope_base, norm_eps and init_std must be positive and finite"),
        ({"init_std": math.nan}, "rope_base, norm_eps and init_std must be positive and finite"),
        ({"attention": "NSA"}, "attention must be 'nsa' or 'dense'"),
        ({"window": 0}, "all lengths must be at least 1, and compress 'mlp' or 'mean'"),
        ({"compress": "MLP"}, "all lengths must be at least 1, and compress 'mlp' or 'mean'"),
        ({"gate": "Sigmoid"}, "gate must be 'sigmoid' or 'softmax'"),
        ({"block_size": 8}, "block_stride must not exceed block_size (8)"),
    ],
)
def test_values_that_do_not_fit_together_are_refused_in_one_sentence(changes, says):
    cls, base = (ModelConfig, vars(M7C)) if set(changes) <= set(vars(M7C)) else (NSAConfig, {})
    with pytest.raises(ValueError, match=re.escape(says)) as refusal:
        cls(**base | changes)
    message = str(refusal.value)
    assert message[-1] == "."
    assert "\n" not in message
    assert ". " not in message


@settings(max_examples=15)
@given(configs(), st.sampled_from(["nsa", "dense"]), st.integers(1, 3))
def test_parameter_count_is_that_of_the_model(config, attention, n_layers):
    config = replace(config, attention=attention, n_layers=n_layers)
    with torch.device("meta"):
        model = Transformer(config)
    assert parameter_count(config) == sum(p.numel() for p in model.parameters())


@settings(max_examples=50)
@given(configs(), st.integers(1, 60))
def test_attended_pairs_are_those_that_the_definition_gives(config, seq_len):
    nsa = config.nsa
    pairs = {"cmp": 0, "sel": 0, "win": 0}
    for t in range(seq_len):
        ends = range(nsa.block_size - 1, seq_len, nsa.block_stride)
        pairs["cmp"] += sum(end <= t for end in ends)
        current = t // nsa.select_block_size
        earlier = min(nsa.n_select - 1, current) * nsa.select_block_size
        pairs["sel"] += earlier + t - current * nsa.select_block_size + 1
        pairs["win"] += min(nsa.window, t + 1)
    assert attended_pairs(nsa, seq_len) == pairs


def test_the_usual_dense_flops_are_those_that_torch_counts():
    # With unequal head widths, SDPA uses a route whose products torch can count.
    config = model_config(attention="dense", heads=(2, 2), d_k=8, d_v=6, n_layers=2)
    model, tokens = Transformer(config), torch.randint(64, (3, 32))
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    assert counter.get_total_flops() == flops_per_token(config, 32, causal=False) * tokens.numel()


@settings(max_examples=20)
@given(configs(), st.integers(1, 50))
def test_flops_of_nsa_are_the_sum_of_its_parts(config, seq_len):
    counted = flops_per_token(config, seq_len, causal=True)
    pairs = attended_pairs(config.nsa, seq_len)
    per_pair = 6 * (config.d_k + config.d_v)
    attention = per_pair * sum(pairs.values()) + 2 * config.d_k * pairs["cmp"]
    layer = Transformer(config).blocks[0]
    flops = config.n_heads * attention
    for name, p in layer.named_parameters():
        if name.endswith("weight") and "norm" not in name:
            blocks = config.n_kv_groups * compressed_blocks(config.nsa, seq_len)
            flops += 6 * p.numel() * (blocks if "phi" in name else seq_len)
    flops += 6 * config.vocab_size * config.dim * seq_len
    assert counted * seq_len == pytest.approx(flops, rel=1e-12)
