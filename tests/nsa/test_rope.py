"""Rotary embedding: products depend only on the distance of the positions."""

import pytest
import torch

from nsa.rope import rotate


def score(q, k, query_position, key_position):
    q = rotate(q[None], 10000.0, first=query_position)
    k = rotate(k[None], 10000.0, first=key_position)
    return (q @ k.T).item()


def test_a_score_depends_on_the_distance_only():
    q, k = torch.randn(2, 16, dtype=torch.float64)
    expected = score(q, k, 7, 0)
    for position in (10, 1010, 100_010):
        assert score(q, k, position + 7, position) == pytest.approx(expected, rel=1e-9)
    assert score(q, k, 8, 0) != pytest.approx(expected, rel=1e-3)


def test_rows_stand_at_the_positions_that_first_and_step_say():
    x = torch.randn(4, 8)
    strided = rotate(x, 100.0, first=5, step=3)
    for i in range(4):
        alone = rotate(x[i : i + 1], 100.0, first=5 + 3 * i)
        torch.testing.assert_close(strided[i], alone[0])


def test_low_precision_is_rotated_in_float32():
    x = torch.randn(3000, 8).bfloat16()
    turned = rotate(x, 10000.0)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, rotate(x.float(), 10000.0).bfloat16())


def test_far_positions_are_exact():
    x = torch.randn(1, 8)
    exact = rotate(x.double(), 10000.0, first=1_000_003)
    turned = rotate(x, 10000.0, first=1_000_003)
    torch.testing.assert_close(turned.double(), exact, atol=1e-6, rtol=0)
