"""The NSA layer against the oracle; causality, gradients and cost, whatever the numbers."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from nsa.attention import DenseAttention, NSAttention
from nsa.reference import nsa_layer
from tests.nsa.cases import (
    assert_close,
    configs,
    gradients,
    model_config,
    reference_gradients,
)

SHORTER_THAN_BLOCK = model_config(block_size=8, block_stride=3, window=12, n_select=3)
MARGIN = 1e-5


def layer_and_input(config, seed, batch, seq_len, dtype):
    torch.manual_seed(seed)
    layer = NSAttention(config)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    shape = (batch, seq_len, config.dim)
    return layer.to(dtype), torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)


@settings(max_examples=20)
@given(configs(), st.integers(1, 26), st.integers(0, 10**6))
@example(SHORTER_THAN_BLOCK, 5, 0)
@example(model_config(heads=(1, 6), window=1), 1, 0)
@example(model_config(heads=(1, 6), n_select=6, block_size=5, block_stride=5), 26, 1)
def test_outputs_and_gradients_equal_the_oracle_in_float64(config, seq_len, seed):
    layer, x, weight = layer_and_input(config, seed, 1, seq_len, torch.float64)
    expected, reference = reference_gradients(layer, x, weight, config, None)
    if smallest_margin(reference) > 1e-12:
        assert_close(gradients(layer, x, weight), expected, torch.float64)


@settings(max_examples=15)
@given(configs(), st.integers(1, 26), st.integers(0, 10**6))
@example(SHORTER_THAN_BLOCK, 5, 0)
def test_outputs_and_gradients_equal_the_oracle_in_float32(config, seq_len, seed):
    layer, x, weight = layer_and_input(config, seed, 1, seq_len, torch.float32)
    blocks = layer.selected_blocks(x)
    expected, _ = reference_gradients(layer, x, weight, config, blocks)
    assert_close(gradients(layer, x, weight), expected, torch.float32)


@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
@pytest.mark.parametrize("compress", ["mlp", "mean"])
@pytest.mark.parametrize("seq_len", [5, 31])
def test_outputs_and_gradients_equal_the_oracle_in_bfloat16(seq_len, compress, gate):
    config = model_config(
        heads=(2, 3), d_k=16, d_v=16, dim=64, block_size=8, compress=compress, gate=gate
    )
    layer, x, weight = layer_and_input(config, seq_len, 1, seq_len, torch.bfloat16)
    blocks = layer.selected_blocks(x)
    expected, _ = reference_gradients(layer, x, weight, config, blocks)
    got = gradients(layer, x, weight)
    # The few entries of the bias are sums of either sign over all tokens: measured with its weight.
    for found in (got, expected):
        found["gate"] = torch.cat(
            (found.pop("gate.proj.weight").flatten(), found.pop("gate.proj.bias"))
        )
    assert_close(got, expected, torch.bfloat16)


@settings(max_examples=15)
@given(configs(), st.integers(1, 40), st.integers(0, 10**6))
def test_selected_sets_equal_the_oracle_where_scores_differ(config, seq_len, seed):
    layer, x, weight = layer_and_input(config, seed, 1, seq_len, torch.float32)
    _, reference = reference_gradients(layer, x, weight, config, None)
    blocks = layer.selected_blocks(x)
    n_blocks = -(-seq_len // config.nsa.select_block_size)
    compared = 0
    for (b, g, t), chosen in reference.selected.items():
        if row_margin(reference.scores[b, g, t], chosen) > MARGIN:
            compared += 1
            assert [j for j in blocks[b, g, t].tolist() if j < n_blocks] == chosen
    assert compared


def row_margin(scores, chosen):
    """By how much the worst freely chosen block beats the best that was left out.

    Infinite where there is no choice, and where neither has a score: then the index decides.
    """
    current = len(scores) - 1
    free = [scores[j] for j in chosen if j not in (0, current - 1, current)]
    left = [score for j, score in enumerate(scores) if j not in chosen]
    decided = bool(free and left and (min(free) or max(left)))
    return min(free) - max(left) if decided else float("inf")


def smallest_margin(reference):
    rows = reference.scores.items()
    return min(row_margin(scores, reference.selected[row]) for row, scores in rows)


@pytest.mark.parametrize("kind", [NSAttention, DenseAttention])
@settings(max_examples=15)
@given(configs(), st.integers(2, 40), st.data())
def test_the_future_has_no_influence(kind, config, seq_len, data):
    t = data.draw(st.integers(0, seq_len - 2))
    torch.manual_seed(t)
    layer = kind(config)
    x = torch.randn(2, seq_len, config.dim, requires_grad=True)
    out = layer(x)
    (out[:, : t + 1] * torch.randn(2, t + 1, config.dim)).sum().backward()
    assert x.grad is not None
    assert x.grad[:, t + 1 :].abs().max() == 0
    assert x.grad[:, t].abs().max() > 0
    changed = x.detach().clone()
    changed[:, t + 1 :] += 10 * torch.randn(2, seq_len - t - 1, config.dim)
    assert torch.equal(layer(changed)[:, : t + 1], out[:, : t + 1])


def test_the_future_has_no_influence_over_several_tiles_of_the_kernel():
    config = model_config(window=70, block_size=16, block_stride=8, select_block_size=16)
    layer, x, _ = layer_and_input(config, 0, 1, 1100, torch.float32)
    changed = x.clone()
    changed[:, 600:] = torch.randn(1, 500, config.dim)
    before, after = layer(x), layer(changed)
    assert torch.equal(before[:, :600], after[:, :600])
    assert before.isfinite().all()
    assert (before[:, 600:] != after[:, 600:]).any(-1).all()


@pytest.mark.parametrize("compress", ["mlp", "mean"])
@pytest.mark.parametrize("seq_len", [1, 3, 40])
def test_every_parameter_gets_a_gradient(seq_len, compress):
    config = model_config(compress=compress)
    layer, x, weight = layer_and_input(config, 0, 2, seq_len, torch.float32)
    found = gradients(layer, x, weight)
    dead = [name for name, gradient in found.items() if gradient.abs().max() == 0]
    if seq_len < config.nsa.block_size:
        dead = [name for name in dead if "cmp" not in name and "phi" not in name]
    if seq_len == 1:
        dead = [name for name in dead if not name.startswith(("q.", "k_"))]
    assert dead == []


def test_every_branch_reaches_as_far_as_it_should():
    """With one branch open at a time, which inputs move the last output."""
    config = model_config(
        n_select=3, window=6, block_size=4, block_stride=4, select_block_size=4, gate="softmax"
    )
    reach = {0: set(range(31)), 1: {0, 1, 2, 3, *range(24, 31)}, 2: set(range(25, 31))}
    for branch, expected in reach.items():
        layer, x, _ = layer_and_input(config, 0, 1, 31, torch.float64)
        with torch.no_grad():
            layer.gate.proj.weight.zero_()
            logits = layer.gate.proj.bias.view(4, 3)
            logits.fill_(-1e4)
            logits[:, branch] = 0
        x.requires_grad_()
        layer(x)[:, 30].sum().backward()
        assert x.grad is not None
        moved = set(x.grad.abs().amax((0, 2)).nonzero().flatten().tolist())
        assert moved - {30} == {t for t in expected if branch or t < 28} - {30}


class Counter(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("lengths", [(7, 24, 60), (2, 3, 5)], ids=["beyond", "within window"])
def test_operator_count_does_not_depend_on_batch_heads_groups_or_length(lengths):
    short, middle, long = lengths
    counts = set()
    # No size is 1: a reshape that has to copy is free along such a dimension.
    for batch, heads, seq_len in [
        (2, (2, 2), short),
        (5, (2, 2), short),
        (2, (2, 6), middle),
        (2, (4, 3), long),
    ]:
        config = model_config(heads=heads, window=6, block_size=1, block_stride=1)
        layer, x, _ = layer_and_input(config, 0, batch, seq_len, torch.float32)
        with torch.no_grad():
            layer(x)
            with Counter() as counter:
                layer(x)
        counts.add(counter.count)
    assert len(counts) == 1, counts


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_gives_the_same_gradients(reentrant):
    layer, x, weight = layer_and_input(model_config(), 0, 2, 40, torch.float32)
    plain = gradients(layer, x, weight)

    class Recomputed(torch.nn.Module):
        def forward(self, x):
            return checkpoint(layer, x, use_reentrant=reentrant)

        def named_parameters(self, *args, **kwargs):
            return layer.named_parameters()

    again = gradients(Recomputed(), x, weight)
    assert all(torch.equal(plain[name], again[name]) for name in plain)


def test_the_layer_compiles_as_one_graph():
    layer, x, _ = layer_and_input(model_config(), 0, 2, 40, torch.float32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_output_has_the_dtype_of_the_input(dtype):
    layer, x, _ = layer_and_input(model_config(), 0, 1, 20, dtype)
    assert layer(x).dtype == dtype


def test_autocast_leaves_the_selection_scores_in_float32():
    layer, x, _ = layer_and_input(model_config(), 0, 1, 40, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        q, k_cmp, v_cmp, *_ = layer.project(x)
        out, p_slc = layer.compressed(q, k_cmp, v_cmp)
    assert (q.dtype, out.dtype, p_slc.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)


def test_dense_attention_is_softmax_over_all_earlier_keys():
    config = model_config(heads=(2, 3), d_v=6, attention="dense")
    torch.manual_seed(0)
    layer = DenseAttention(config).double()
    x = torch.randn(2, 9, config.dim, dtype=torch.float64)
    sparse = NSAttention(config).double()
    with torch.no_grad():  # a window over everything, alone, is dense attention
        sparse.gate.proj.weight.zero_()
        sparse.gate.proj.bias.copy_(torch.tensor([-1e4, -1e4, 1e4] * 6))
        for ours, theirs in (("q", "q"), ("k_win", "k"), ("v_win", "v"), ("out", "out")):
            getattr(sparse, ours).weight.copy_(getattr(layer, theirs).weight)
        changed = model_config(heads=(2, 3), d_v=6, window=9)
        sparse.config = changed
    torch.testing.assert_close(layer(x), sparse(x))
    params = dict(sparse.named_parameters())
    torch.testing.assert_close(layer(x), nsa_layer(params, x, changed).out)
