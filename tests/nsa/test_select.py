"""Selection: scores of blocks, the choice of blocks, and the attention to exactly these."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa.chunked import attend_chunked
from nsa.config import NSAConfig
from nsa.select import (
    attend_ranges,
    attend_selected,
    block_mask,
    importance,
    top_blocks,
)

ROUTES = [attend_selected, attend_ranges, attend_chunked]


def sparse(**changes):
    small = {"block_size": 4, "block_stride": 2, "select_block_size": 4, "n_select": 4}
    return NSAConfig(**small | changes)


def test_weights_of_the_papers_shape():
    weights = importance(torch.eye(13), NSAConfig(), 4)
    assert weights[:, 1].tolist() == [0, 0, 0, 0.5, 1, 1, 1, 0.5, 0, 0, 0, 0, 0]
    assert weights[:, 0].tolist() == [1, 1, 1, 0.5, *[0] * 9]


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 50))
def test_each_compressed_block_is_shared_out_whole(size, stride, select, seq_len):
    config = sparse(block_size=size, block_stride=min(size, stride), select_block_size=select)
    n_cmp = max(0, (seq_len - size) // config.block_stride + 1)
    n_blocks = -(-seq_len // select)
    weights = importance(torch.eye(n_cmp, dtype=torch.float64), config, n_blocks)
    for i in range(n_cmp):
        tokens = range(i * config.block_stride, i * config.block_stride + size)
        for j in range(n_blocks):
            inside = sum(token // select == j for token in tokens)
            assert weights[i, j].item() == pytest.approx(inside / size)


def test_blocks_that_share_the_same_terms_have_the_same_score_to_the_last_bit():
    config = sparse(block_size=7, block_stride=3, select_block_size=1)
    p_cmp = torch.rand(64, 40, dtype=torch.float64).softmax(-1)
    for n_blocks in range(120, 128):  # for each remainder of a vector register
        p_sel = importance(p_cmp, config, n_blocks)
        for j in range(6, 120, 3):
            assert (p_sel[:, j + 1] == p_sel[:, j + 2]).all()
        seen = importance(p_cmp[:, :20], config, n_blocks)
        masked = importance(p_cmp.masked_fill(torch.arange(40) >= 20, 0), config, n_blocks)
        assert (seen == masked).all()


def test_of_equal_scores_the_lower_index_wins():
    p_sel = torch.full((1, 1, 400, 100), 0.25)
    assert top_blocks(p_sel, sparse(n_select=6))[0, 0, -1].tolist() == [0, 1, 2, 3, 98, 99]
    p_sel[..., 50] = 0.5
    assert top_blocks(p_sel, sparse(n_select=6))[0, 0, -1].tolist() == [0, 1, 2, 50, 98, 99]


@given(st.integers(1, 40), st.integers(1, 9), st.integers(3, 12), st.integers(0, 99))
def test_the_best_of_the_visible_blocks_are_taken(seq_len, size, n_select, seed):
    config = sparse(select_block_size=size, n_select=n_select)
    n_blocks = -(-seq_len // size)
    p_sel = torch.rand(1, 1, seq_len, n_blocks, generator=torch.Generator().manual_seed(seed))
    blocks = top_blocks(p_sel, config)
    assert blocks.shape[-1] == min(n_select, n_blocks)
    for t in range(seq_len):
        current = t // size
        forced = {0, max(0, current - 1), current}
        free = sorted(set(range(current)) - forced, key=lambda j: -p_sel[0, 0, t, j].item())
        expected = sorted(forced | set(free[: n_select - len(forced)]))
        expected += [n_blocks] * (blocks.shape[-1] - len(expected))
        assert blocks[0, 0, t].tolist() == expected, "ascending indices, then the sentinel"


@pytest.mark.parametrize("attend", ROUTES)
@settings(max_examples=20)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(3, 6))
def test_exactly_the_past_tokens_of_the_selected_blocks_are_attended(
    attend, seq_len, size, n_select
):
    config = sparse(select_block_size=size, n_select=n_select)
    blocks = top_blocks(torch.rand(1, 2, seq_len, -(-seq_len // size)), config)
    q = torch.zeros(1, 6, seq_len, 4)
    values = torch.eye(seq_len).expand(1, 2, -1, -1)
    out = attend(q, torch.zeros(1, 2, seq_len, 4), values, blocks, config)
    for g in range(2):
        for t in range(seq_len):
            tokens = [i for i in range(t + 1) if i // size in blocks[0, g, t].tolist()]
            for head in range(3):
                row = out[0, 3 * g + head, t]
                assert row.nonzero().flatten().tolist() == tokens
                assert row.sum().item() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("attend", ROUTES)
def test_selected_attention_is_masked_softmax_over_several_tiles_of_the_kernel(attend, flash):
    torch.manual_seed(0)
    config = sparse(select_block_size=16, n_select=5)
    q = torch.randn(1, 4, 1100, 8, dtype=torch.float64)
    k, v = torch.randn(2, 1, 2, 1100, 8, dtype=torch.float64)
    blocks = top_blocks(torch.rand(1, 2, 1100, 69), config)
    token = torch.arange(1100)
    seen = block_mask(blocks, 69)[..., token // 16] & (token <= token[:, None])
    k_each, v_each, seen = (x.repeat_interleave(2, 1) for x in (k, v, seen))
    weights = (q @ k_each.mT / 8**0.5).masked_fill(~seen, -torch.inf).softmax(-1)
    more = (flash,) if attend is attend_chunked else ()
    out = attend(q, k, v, blocks, config, *more)
    torch.testing.assert_close(out, weights @ v_each)
    if attend is attend_chunked:  # without the tokens that select all blocks
        assert torch.equal(attend(q, k, v, blocks[:, :, 5 * 16 :], config, flash), out)


@pytest.mark.parametrize("may_wait", [True, False])
@pytest.mark.parametrize("flash", [True, False])
def test_many_tiles_of_a_block_equal_masked_attention(flash, may_wait, monkeypatch):
    """The blocks are selected unequally often and fill many tiles.

    Without `may_wait`, as on a GPU, there are spare tiles, and each part may rescale the sums.
    """
    monkeypatch.setattr("nsa.chunked._host_may_wait", lambda _: may_wait)
    monkeypatch.setattr("nsa.chunked.TILE_ROWS", 32)
    monkeypatch.setattr("nsa.chunked.PART_BYTES", 300 << 10)
    torch.manual_seed(0)
    config = sparse(select_block_size=16, n_select=5)
    inputs = [torch.randn(2, n, 500, 8, dtype=torch.float64) for n in (4, 2, 2)]
    weight = torch.randn(2, 4, 500, 8, dtype=torch.float64)
    blocks = top_blocks(torch.rand(2, 2, 500, 32) + torch.arange(32) % 3, config)
    found = []
    for attend, more in ((attend_chunked, (flash,)), (attend_selected, ())):
        q, k, v = (x.clone().requires_grad_() for x in inputs)
        out = attend(q, k, v, blocks, config, *more)
        (out * weight).sum().backward()
        found.append([out, q.grad, k.grad, v.grad])
    torch.testing.assert_close(*found)


def test_the_size_of_a_part_changes_no_bit(monkeypatch):
    """`PART_BYTES` may be changed, and a resume is still exact."""
    torch.manual_seed(0)
    config = sparse(select_block_size=16, n_select=5)
    inputs, calls = [torch.randn(2, n, 500, 32) for n in (4, 2, 2)], []
    blocks = top_blocks(torch.rand(2, 2, 500, 32) + torch.arange(32) % 3, config)
    found = []
    for size in (64 << 20, 256 << 10):
        monkeypatch.setattr("nsa.chunked.PART_BYTES", size)
        q, k, v = (x.clone().requires_grad_() for x in inputs)
        with torch.autograd.profiler.profile(use_kineto=False) as profiled:
            out = attend_chunked(q, k, v, blocks, config)
            out.backward(torch.ones_like(out))
        calls.append(len(profiled.function_events))
        found.append([out, q.grad, k.grad, v.grad])
    assert calls[1] > 2 * calls[0]
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("flash", [True, False])
def test_scores_of_any_size_are_joined_over_the_parts(flash):
    """Scores exceed 1,000, so exp of a whole score would overflow."""
    torch.manual_seed(0)
    config = sparse(select_block_size=16, n_select=5)
    q, k, v, grad = torch.randn(4, 1, 1, 1100, 8)
    q = 300 * q
    blocks = top_blocks(torch.rand(1, 1, 1100, 69), config)
    token = torch.arange(1100)
    seen = block_mask(blocks, 69)[..., token // 16] & (token <= token[:, None])
    inputs = [x.requires_grad_() for x in (q, k, v)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    scores = exact[0] @ exact[1].mT / 8**0.5
    expected = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ exact[2]
    expected.backward(grad.double())
    out = attend_chunked(*inputs, blocks, config, flash)
    out.backward(grad)
    assert scores.abs().max() > 1000
    for mine, theirs in zip(
        (out, *(x.grad for x in inputs)), (expected, *(x.grad for x in exact)), strict=True
    ):
        assert (mine - theirs).abs().max() / theirs.abs().max() < 1e-3
