"""The attention gate: its weights, and an entropy that is comparable between both kinds."""

import math

import pytest
import torch

from nsa.gate import Gate, branch_shares, gate_entropy


def test_weights_are_per_token_and_head():
    torch.manual_seed(0)
    weights, logits = Gate(8, 5, "sigmoid")(torch.randn(2, 7, 8))
    assert weights.shape == logits.shape == (2, 7, 5, 3)
    torch.testing.assert_close(weights, logits.sigmoid())
    assert weights.flatten(0, 2).std(0).min() > 0.01


@pytest.mark.parametrize("kind", ["sigmoid", "softmax"])
@pytest.mark.parametrize("level", [-60.0, 0.0, 60.0])
def test_equal_branches_have_the_largest_entropy(kind, level):
    shares = branch_shares(torch.full((4, 3), level), kind)
    assert gate_entropy(shares).tolist() == pytest.approx([math.log(3)] * 4)


@pytest.mark.parametrize("kind", ["sigmoid", "softmax"])
def test_one_branch_alone_has_no_entropy(kind):
    shares = branch_shares(torch.tensor([[-200.0, 5.0, -200.0]]), kind)
    assert shares.tolist() == [pytest.approx([0, 1, 0])]
    assert gate_entropy(shares).item() == 0


def test_shares_of_the_sigmoid_gate_are_its_weights_over_their_sum():
    logits = torch.randn(50, 3)
    weights = logits.sigmoid()
    torch.testing.assert_close(
        branch_shares(logits, "sigmoid"), weights / weights.sum(-1, keepdim=True)
    )
