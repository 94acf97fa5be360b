"""The window branch: each query sees the last w tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa.window import attend_window


@pytest.mark.parametrize("folded", [False, True])
@settings(max_examples=30)
@given(st.integers(1, 80), st.integers(1, 85))
def test_a_query_sees_exactly_the_last_w_tokens_itself_included(folded, seq_len, window):
    values = torch.eye(seq_len).expand(2, 1, -1, -1)
    width = seq_len if folded else 4  # the folded route needs equal widths
    q, k = torch.zeros(2, 2, seq_len, width), torch.zeros(2, 1, seq_len, width)
    out = attend_window(q, k, values, window, folded)
    for t in range(seq_len):
        tokens = list(range(max(0, t - window + 1), t + 1))
        assert out[1, 1, t].nonzero().flatten().tolist() == tokens
        assert out[1, 1, t, tokens].tolist() == pytest.approx([1 / len(tokens)] * len(tokens))


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("window", [1, 100, 1099, 2000])
def test_window_attention_is_banded_softmax_over_several_tiles_of_the_kernel(window, folded):
    """Outputs and gradients are compared."""
    torch.manual_seed(0)
    q, grad = torch.randn(2, 1, 6, 1100, 8, dtype=torch.float64)
    inputs = (q, *torch.randn(2, 1, 2, 1100, 8, dtype=torch.float64))
    q, k, v = (x.requires_grad_() for x in inputs)
    token = torch.arange(1100)
    age = token[:, None] - token
    k_each, v_each = (x.repeat_interleave(3, 1) for x in (k, v))
    scores = q @ k_each.mT / 8**0.5
    weights = scores.masked_fill((age < 0) | (age >= window), -torch.inf).softmax(-1)
    expected, got = weights @ v_each, attend_window(q, k, v, window, folded)
    torch.testing.assert_close(got, expected)
    wanted = torch.autograd.grad(expected, inputs, grad)
    torch.testing.assert_close(torch.autograd.grad(got, inputs, grad), wanted)
