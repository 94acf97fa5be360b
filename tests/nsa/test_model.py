"""The transformer: initial loss, initial weights, gradients, causality."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from nsa.model import Transformer
from tests.nsa.cases import model_config
from trainers.schema import TINY_MODEL


def next_token_loss(model, tokens):
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_the_first_loss_is_ln_of_the_vocabulary(attention):
    torch.manual_seed(0)
    model = Transformer(replace(TINY_MODEL, init_std=0.02, attention=attention))
    loss = next_token_loss(model, torch.randint(256, (4, 129)))
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)


def test_every_parameter_of_the_model_gets_a_gradient():
    model = Transformer(model_config(n_layers=2))
    next_token_loss(model, torch.randint(64, (2, 40))).backward()
    dead = [n for n, p in model.named_parameters() if p.grad is None or p.grad.abs().max() == 0]
    assert dead == []


def test_initial_weights_are_what_the_docstring_says():
    torch.manual_seed(0)
    model = Transformer(model_config(dim=64, d_k=32, d_v=32, n_layers=8, init_std=0.05))
    stds = {name: p.std().item() for name, p in model.named_parameters() if p.dim() > 1}
    for name, std in stds.items():
        expected = 0.05
        if name.endswith(("attn.out.weight", "mlp.down.weight")):
            expected = 0.05 / 4
        elif "phi" in name:
            fan_in = dict(model.named_parameters())[name].shape[1]
            expected = 0 if "position" in name else fan_in**-0.5
        assert std == pytest.approx(expected, rel=0.2), name
    assert all((p == 1).all() for n, p in model.named_parameters() if "norm" in n)


def test_training_after_inference_mode_works():
    """Masks and tables are shared between calls, so they must not be inference tensors."""
    model = Transformer(model_config(window=9))
    tokens = torch.randint(64, (2, 46))
    with torch.inference_mode():
        model(tokens)
    next_token_loss(model, torch.randint(64, (2, 47))).backward()


def test_a_future_token_moves_no_earlier_logit():
    model, tokens = Transformer(model_config(n_layers=2)), torch.randint(64, (2, 40))
    changed = tokens.clone()
    changed[:, 20:] = (tokens[:, 20:] + 1) % 64
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :20], after[:, :20])
    assert (before[:, 20:] != after[:, 20:]).any(-1).all()


def test_a_batch_is_computed_row_by_row():
    model, tokens = Transformer(model_config(n_layers=2)).double(), torch.randint(64, (3, 30))
    single = torch.cat([model(row[None]) for row in tokens])
    torch.testing.assert_close(model(tokens), single, rtol=1e-9, atol=1e-12)


def test_a_model_without_memory_says_what_it_would_return():
    with torch.device("meta"):
        logits = Transformer(model_config())(torch.zeros(2, 40, dtype=torch.long))
    assert logits.shape == (2, 40, 64)


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_tokens_without_a_batch_are_refused(attention):
    """With as many groups as heads, dense attention would take the widths of a head as tokens."""
    model = Transformer(model_config(heads=(4, 1), attention=attention))
    with pytest.raises(ValueError, match="must be "):
        model(torch.zeros(20, dtype=torch.long))
    with pytest.raises(ValueError, match="must be "):
        model.attention_layers()[0](torch.zeros(20, 16))
