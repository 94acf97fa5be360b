"""The compressed branch: the blocks that a query sees, and queries that see none."""

import pytest
import torch

from nsa.compress import BlockMLP, attend_compressed, to_blocks, weights_in_chunks


@torch.no_grad()
def compressed_weights(q, k, size, stride):
    """Returns p_cmp of all tokens, joined from its chunks."""
    p_cmp = torch.zeros(q.shape[0], k.shape[1], q.shape[2], k.shape[2])
    for rows, weights in weights_in_chunks(q, k, size, stride):
        p_cmp = p_cmp.to(weights.dtype)
        p_cmp[:, :, rows, : weights.shape[-1]] = weights
    return p_cmp


def attend(seq_len, size, stride, requires_grad=False):
    """Attends with equal scores to one-hot values, so the output shows the blocks that are seen."""
    blocks = len(range(size, seq_len + 1, stride))
    q = torch.randn(2, 3, seq_len, 4, dtype=torch.float64, requires_grad=requires_grad)
    k = torch.zeros(2, 1, blocks, 4, dtype=torch.float64, requires_grad=requires_grad)
    v = torch.eye(blocks, dtype=torch.float64).expand(2, 1, -1, -1)
    out = attend_compressed(q, k, v, size, stride)
    return q, k, out, compressed_weights(q, k, size, stride)


@pytest.mark.parametrize("size", [1, 4, 5])
@pytest.mark.parametrize("stride", [1, 3])
def test_a_block_is_visible_from_its_last_token_on(size, stride):
    seq_len = 17
    _, _, out, p_cmp = attend(seq_len, size, min(size, stride))
    for t in range(seq_len):
        seen = [i for i in range(out.shape[-1]) if i * min(size, stride) + size - 1 <= t]
        assert out[0, 0, t].nonzero().flatten().tolist() == seen
        assert p_cmp[1, 0, t].nonzero().flatten().tolist() == seen
        equal = [1 / len(seen) for _ in seen]
        assert out[0, 0, t, seen].tolist() == pytest.approx(equal)
        assert p_cmp[0, 0, t].sum().item() == pytest.approx(3 if seen else 0)


@pytest.mark.parametrize("seq_len", [1, 3, 4, 5, 12])
def test_rows_without_a_visible_block_are_exactly_zero_and_pass_no_gradient(seq_len):
    size = 4
    q, k, out, p_cmp = attend(seq_len, size, 2, requires_grad=True)
    blind = min(size - 1, seq_len)
    assert out[..., :blind, :].abs().sum() == 0
    assert p_cmp[..., :blind, :].abs().sum() == 0
    (out * torch.randn_like(out)).sum().backward()
    assert q.grad is not None
    assert k.grad is not None
    assert q.grad.isfinite().all()
    assert k.grad.isfinite().all()
    assert q.grad[..., :blind, :].abs().sum() == 0


def test_a_sequence_shorter_than_a_block_has_no_blocks_but_keeps_its_graph():
    x = torch.randn(2, 3, 5, 4, requires_grad=True)
    phi = BlockMLP(8, 4)
    out = phi(to_blocks(x, 8, 2))
    assert out.shape == (2, 3, 0, 4)
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum() == 0
    assert all(p.grad is not None and p.grad.abs().sum() == 0 for p in phi.parameters())


def test_compressed_attention_computes_in_float32_for_low_precision():
    q, k = torch.randn(1, 2, 9, 8).bfloat16(), torch.randn(1, 1, 6, 8)
    out, p_cmp = attend_compressed(q, k, k, 4, 1), compressed_weights(q, k, 4, 1)
    exact = attend_compressed(q.double(), k.double(), k.double(), 4, 1)
    p_exact = compressed_weights(q.double(), k.double(), 4, 1)
    assert out.dtype == torch.bfloat16
    assert p_cmp.dtype == torch.float32
    torch.testing.assert_close(p_cmp.double(), p_exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out.double(), exact, rtol=1e-2, atol=1e-2)
