"""The window: exactly w tokens, at any length."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa.attend import attend_causal
from nsa.window import attend_window


@settings(max_examples=40)
@given(st.integers(1, 40), st.integers(1, 45))
def test_a_query_sees_exactly_the_last_w_tokens_itself_included(seq_len, window):
    q = torch.zeros(2, 2, seq_len, 4)
    values = torch.eye(seq_len).expand(2, 1, -1, -1)
    out = attend_window(q, torch.zeros(2, 1, seq_len, 4), values, window)
    for t in range(seq_len):
        tokens = list(range(max(0, t - window + 1), t + 1))
        assert out[1, 1, t].nonzero().flatten().tolist() == tokens
        assert out[1, 1, t, tokens].tolist() == pytest.approx([1 / len(tokens)] * len(tokens))


@pytest.mark.parametrize("window", [1, 100, 1099, 2000])
def test_window_attention_is_banded_softmax_over_several_tiles_of_the_kernel(window):
    torch.manual_seed(0)
    q = torch.randn(1, 6, 1100, 8, dtype=torch.float64)
    k, v = torch.randn(2, 1, 2, 1100, 8, dtype=torch.float64)
    token = torch.arange(1100)
    age = token[:, None] - token
    k_each, v_each = (x.repeat_interleave(3, 1) for x in (k, v))
    scores = q @ k_each.mT / 8**0.5
    weights = scores.masked_fill((age < 0) | (age >= window), -torch.inf).softmax(-1)
    torch.testing.assert_close(attend_window(q, k, v, window), weights @ v_each)


def test_causal_attention_refuses_unequal_lengths():
    q, k = torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 3, 4)
    with pytest.raises(ValueError, match="as many keys as queries"):
        attend_causal(q, k, k)
