"""The configurations for M7C and its control: the figures in their comments are correct."""

from pathlib import Path

import pytest
import torch

from nsa.config import flops_per_token, parameter_count
from nsa.model import Transformer
from trainers.settings import resolve

CONFIGS = Path(__file__).parents[2] / "configs"
NAMES = ("m7c_125m", "dense_125m")


def load(name):
    return resolve(CONFIGS / f"{name}.yaml", {}).settings


@pytest.mark.parametrize("name", NAMES)
def test_the_comments_of_a_config_give_its_true_counts(name):
    settings, text = load(name), (CONFIGS / f"{name}.yaml").read_text()
    model, seq_len = settings.model, settings.data.seq_len
    with torch.device("meta"):
        counted = sum(p.numel() for p in Transformer(model).parameters())
    assert counted == parameter_count(model)
    full, causal = (flops_per_token(model, seq_len, causal) for causal in (False, True))
    assert f"{counted:,}" in text
    assert f"At seq_len {seq_len}, flops_per_token is {full:,.0f} and" in text
    assert f"flops_per_token_exact is {causal:,.0f}." in text


def test_the_control_differs_in_attention_and_mlp_only_and_has_as_many_parameters():
    sparse, dense = (load(name) for name in NAMES)
    changed = {
        key for key, value in vars(sparse.model).items() if value != getattr(dense.model, key)
    }
    assert changed - {"nsa"} == {
        "attention",
        "mlp_hidden",
    }  # `nsa` has no effect on dense attention
    assert (sparse.data, sparse.train, sparse.optim) == (dense.data, dense.train, dense.optim)
    counts = [parameter_count(settings.model) for settings in (sparse, dense)]
    assert counts[1] == pytest.approx(counts[0], rel=1e-3)


@pytest.mark.parametrize("tuned", ["", "_tuned"])
def test_the_production_configs_have_the_model_and_the_batch_that_they_name(tuned):
    name = f"m7c_125m_2xa100_production{tuned}"
    settings, text = load(name), (CONFIGS / f"{name}.yaml").read_text()
    assert settings.model == load("m7c_125m").model
    assert 2 * settings.train.batch_size * settings.train.accumulate == 4
    assert "4 sequences a step" in text
    assert tuned or f"{parameter_count(settings.model):,}" in text
    assert (settings.checkpoint.every, settings.eval.every) == (5000, 1000)
