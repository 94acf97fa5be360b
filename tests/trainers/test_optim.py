"""The settings of the optimizer, and the schedule of the learning rate."""

from __future__ import annotations

import pytest
from torch import nn

from trainers import optim, settings


def test_every_setting_of_the_optimizer_reaches_adamw():
    named = {"beta1": 0.8, "beta2": 0.9, "eps": 1e-6, "weight_decay": 0.3, "fused": False}
    changes = {f"optim.{name}": value for name, value in named.items()}
    found = optim.build(nn.Linear(2, 2), settings.resolve(None, {}, changes).settings.optim)
    assert (found.defaults["betas"], found.defaults["eps"]) == ((0.8, 0.9), 1e-6)
    assert found.defaults["fused"] is False
    assert [group["weight_decay"] for group in found.param_groups] == [0.3, 0.0]


def test_the_rate_warms_up_and_falls_to_its_last_value():
    changes = {"train.steps": 20, "train.warmup_steps": 10, "train.min_lr_ratio": 0.1}
    train = settings.resolve(None, {"NSA_LR": "2"}, changes).settings.train
    rates = [optim.learning_rate(step, train) for step in (1, 10, 15, 20, 30)]
    assert rates == pytest.approx([0.2, 2.0, 1.1, 0.2, 0.2])
