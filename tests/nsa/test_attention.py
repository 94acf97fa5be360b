"""The NSA layer compared with the reference; its causality, gradients and number of operators."""

from functools import cache, partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.autograd.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from nsa import chunked
from nsa.attention import DenseAttention, NSAttention
from nsa.backends import Switches
from nsa.select import block_scores
from tests.nsa.cases import (
    ROUTES,
    assert_close,
    by_projection,
    configs,
    gradients,
    model_config,
    queries_and_blocks,
    reference_gradients,
    routed,
    selected_blocks,
)
from tests.nsa.reference import nsa_layer

SHORTER_THAN_BLOCK = model_config(block_size=8, block_stride=3, window=12, n_select=3)


NEARLY_CANCELS = model_config(
    heads=(1, 1), d_k=4, d_v=6, block_size=1, block_stride=1, select_block_size=1, n_select=3,
    window=1, gate="softmax",
)  # fmt: skip
MARGIN = 1e-5


class Called(torch.nn.Module):
    """A layer whose forward is `call`."""

    def __init__(self, layer, call):
        super().__init__()
        self.forward = call
        self.named_parameters = layer.named_parameters
        self.modules = layer.modules


def layer_and_input(config, seed, batch, seq_len, dtype, route="masked"):
    torch.manual_seed(seed)
    layer = routed(config, route)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    shape = (batch, seq_len, config.dim)
    return layer.to(dtype), torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)


@pytest.mark.parametrize("route", ROUTES)
@settings(max_examples=15)
@given(configs(), st.integers(1, 26), st.integers(0, 10**6))
@example(SHORTER_THAN_BLOCK, 5, 0)
@example(model_config(heads=(1, 6), window=1), 1, 0)
@example(model_config(heads=(1, 6), n_select=6, block_size=5, block_stride=5), 26, 1)
@example(model_config(heads=(2, 3), n_select=3), 26, 1)
def test_outputs_and_gradients_equal_the_oracle_in_float64(route, config, seq_len, seed):
    layer, x, weight = layer_and_input(config, seed, 1, seq_len, torch.float64, route)
    expected, reference = reference_gradients(layer, x, weight, config, None)
    if smallest_margin(reference) > 1e-12:
        assert_close(gradients(layer, x, weight), expected, torch.float64)


@pytest.mark.parametrize("route", ROUTES)
@settings(max_examples=10)
@given(configs(), st.integers(1, 26), st.integers(0, 10**6))
@example(SHORTER_THAN_BLOCK, 5, 0)
@example(model_config(heads=(2, 3), n_select=3), 26, 1)
@example(NEARLY_CANCELS, 2, 70)
def test_outputs_and_gradients_equal_the_oracle_in_float32(route, config, seq_len, seed):
    layer, x, weight = layer_and_input(config, seed, 1, seq_len, torch.float32, route)
    blocks = selected_blocks(layer, x)
    expected, _ = reference_gradients(layer, x, weight, config, blocks)
    assert_close(gradients(layer, x, weight), expected, torch.float32)


def low_precision(dtype, route, seq_len, compress, gate):
    """Returns a layer, its input and the weight of its output; all routes get the same values."""
    config = model_config(
        heads=(2, 3), d_k=16, d_v=16, dim=64, block_size=8, compress=compress, gate=gate
    )
    return layer_and_input(config, seq_len, 1, seq_len, dtype, route)


@cache
def low_precision_oracle(dtype, seq_len, compress, gate, blocks):
    """Returns output and gradients of the reference; equal `blocks` share one result."""
    layer, x, weight = low_precision(dtype, ROUTES[0], seq_len, compress, gate)
    return reference_gradients(layer, x, weight, layer.config, torch.tensor(blocks))[0]


@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
@pytest.mark.parametrize("compress", ["mlp", "mean"])
@pytest.mark.parametrize("seq_len", [5, 31])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outputs_and_gradients_equal_the_oracle_in_low_precision(
    dtype, route, seq_len, compress, gate
):
    layer, x, weight = low_precision(dtype, route, seq_len, compress, gate)
    blocks = tuple(
        tuple(tuple(tuple(row) for row in group) for group in sequence)
        for sequence in selected_blocks(layer, x).tolist()
    )
    expected = dict(low_precision_oracle(dtype, seq_len, compress, gate, blocks))
    got = gradients(layer, x, weight)
    # The gate's bias has few gradients, whose terms nearly cancel. So these gradients are compared
    # together with those of the gate's weight.
    for found in (got, expected):
        found["gate"] = torch.cat(
            (found.pop("gate.proj.weight").flatten(), found.pop("gate.proj.bias"))
        )
    assert_close(got, expected, dtype)


@settings(max_examples=15)
@given(configs(), st.integers(1, 40), st.integers(0, 10**6))
def test_selected_sets_equal_the_oracle_where_scores_differ(config, seq_len, seed):
    layer, x, weight = layer_and_input(config, seed, 1, seq_len, torch.float32)
    _, reference = reference_gradients(layer, x, weight, config, None)
    blocks = selected_blocks(layer, x)
    n_blocks = -(-seq_len // config.nsa.select_block_size)
    compared = 0
    for (b, g, t), chosen in reference.selected.items():
        if row_margin(reference.scores[b, g, t], chosen) > MARGIN:
            compared += 1
            assert [j for j in blocks[b, g, t].tolist() if j < n_blocks] == chosen
    assert compared


def row_margin(scores, chosen):
    """Returns the lowest score of a free pick minus the highest score of a block not selected.

    The result is infinite if there is no choice, or if both scores are 0 and the index decides.
    """
    current = len(scores) - 1
    free = [scores[j] for j in chosen if j not in (0, current - 1, current)]
    left = [score for j, score in enumerate(scores) if j not in chosen]
    decided = bool(free and left and (min(free) or max(left)))
    return min(free) - max(left) if decided else float("inf")


def smallest_margin(reference):
    rows = reference.scores.items()
    return min(row_margin(scores, reference.selected[row]) for row, scores in rows)


@pytest.mark.parametrize("route", [*ROUTES, "dense"])
@settings(max_examples=8)
@given(configs(), st.integers(2, 40), st.data())
def test_the_future_has_no_influence(route, config, seq_len, data):
    t = data.draw(st.integers(0, seq_len - 2))
    torch.manual_seed(t)
    layer = DenseAttention(config) if route == "dense" else routed(config, route)
    x = torch.randn(2, seq_len, config.dim, requires_grad=True)
    out = layer(x)
    (out[:, : t + 1] * torch.randn(2, t + 1, config.dim)).sum().backward()
    assert x.grad is not None
    assert x.grad[:, t + 1 :].abs().max() == 0
    assert x.grad[:, t].abs().max() > 0
    changed = x.detach().clone()
    changed[:, t + 1 :] += 10 * torch.randn(2, seq_len - t - 1, config.dim)
    moved = (layer(changed)[:, : t + 1] - out[:, : t + 1]).abs().max()
    # The selections of other queries change the tile of a query, and so the rounding.
    assert moved <= (1e-6 * out.abs().max() if route == "chunked" else 0)


@pytest.mark.parametrize("offsets", [None, [0, 0], [0, 0, 0]])
@pytest.mark.parametrize(
    "switches",
    [Switches(), Switches(sel_ranges=True), Switches(prefill_batched=False), None],
    ids=["usual", "ranges", "sequential", "dense"],
)
def test_no_tokens_give_an_empty_output_and_gradients_of_zero(switches, offsets):
    config = model_config()
    layer = NSAttention(config, switches) if switches else DenseAttention(config)
    layer.collecting = True  # without tokens, there are no statistics
    x = torch.randn(2, 0, config.dim)
    found = gradients(Called(layer, partial(layer, cu_seqlens=offsets)), x, x)
    assert found.pop("out").shape == found.pop("x").shape == x.shape
    assert found
    assert all(gradient.abs().max() == 0 for gradient in found.values())
    with torch.no_grad():
        assert layer(x, cache := layer.new_cache(), offsets).shape == x.shape
    assert cache.length == 0


def test_every_branch_reaches_as_far_as_it_should():
    """With one branch open at a time, the last output depends on the expected inputs."""
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


def operators(config, batch, seq_len, route):
    """Returns the number of operators, except `fill_`, in a forward and backward."""
    layer, x, weight = layer_and_input(config, 0, batch, seq_len, torch.float32, route)
    (layer(x) * weight).sum().backward()
    with profile(use_kineto=False) as profiled:
        (layer(x) * weight).sum().backward()
    names = [event.name for event in profiled.function_events or ()]
    # Large tensors are set to zero by fill_, small tensors by a memset.
    return sum(name.startswith("aten::") and name != "aten::fill_" for name in names)


@pytest.mark.parametrize("route", ["masked", "chunked", "ranges"])
@pytest.mark.parametrize("lengths", [(40, 44, 56), (5, 6, 6)], ids=["beyond", "within window"])
def test_operator_count_does_not_depend_on_batch_heads_groups_or_length(lengths, route):
    short, middle, long = lengths
    counts = set()
    # No batch and no number of heads is 1, because some reshapes need no copy then. All tensors are
    # below torch's grain size of 32,768 elements, above which `cat` with several threads slices its
    # result.
    shapes = ((2, (2, 2), short), (5, (2, 2), short), (2, (2, 6), middle), (2, (4, 3), long))
    for batch, heads, seq_len in shapes:
        config = model_config(heads=heads, window=6, block_size=1, block_stride=1)
        counts.add(operators(config, batch, seq_len, route))
    assert len(counts) == 1, counts


@pytest.mark.parametrize("route", ["masked", "chunked", "ranges"])
def test_the_host_waits_for_no_result_of_a_gpu(route):
    """A meta tensor has no values, so code that reads a value, and would wait for a GPU, fails."""
    with torch.device("meta"):
        layer = routed(model_config(), route)
        x = torch.randn(2, 500, layer.config.dim)
        gradients(layer, x, x)
        q, k, blocks = (torch.zeros(2, n, 500, 8) for n in (4, 2, 2))
        case = q[:, :, 32:], k, k, blocks[:, :, 32:, :6].long(), 4, True
        # These are the bodies of the operators; for a meta tensor, an operator calls its fake only.
        out, lse = chunked._tiled._init_fn(*case)
        chunked._tiled_backward._init_fn(out, *case[:4], out, lse, *case[4:])


@pytest.mark.parametrize("route", ["masked", "chunked"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_gives_the_same_gradients(reentrant, route):
    layer, x, weight = layer_and_input(model_config(), 0, 2, 40, torch.float32, route)
    plain = gradients(layer, x, weight)

    again = gradients(Called(layer, partial(checkpoint, layer, use_reentrant=reentrant)), x, weight)
    assert all(torch.equal(plain[name], again[name]) for name in plain)


@pytest.mark.parametrize(
    "route", ["chunked", *(pytest.param(r, marks=pytest.mark.slow) for r in ("masked", "ranges"))]
)
def test_the_layer_compiles_as_one_graph(route):
    layer, x, weight = layer_and_input(model_config(), 0, 2, 40, torch.float32, route)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))
    expected, got = gradients(layer, x, weight), gradients(compiled, x, weight)
    for name, value in got.items():
        torch.testing.assert_close(value, expected[name.removeprefix("_orig_mod.")])


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_compiled_layer_evaluates_without_gradients(context):
    layer, x, _ = layer_and_input(model_config(), 0, 1, 8, torch.float32)
    with context():
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x), layer(x))


def test_autocast_leaves_the_selection_scores_in_float32():
    layer, x, _ = layer_and_input(model_config(), 0, 1, 40, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        q, k_blocks = queries_and_blocks(layer, x)
        p_sel = block_scores(q, k_blocks, layer.config.nsa)
        out = layer(x)
    assert (out.dtype, q.dtype, p_sel.dtype) == (torch.bfloat16, torch.float32, torch.float32)


@pytest.mark.parametrize("route", ["masked", "chunked", "ranges", "sequential"])
def test_under_autocast_the_branches_still_compute_in_float32_on_the_cpu(route):
    layer, x, _ = layer_and_input(model_config(), 0, 1, 40, torch.float32, route)
    kinds = set()

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "attention" in str(func) or func is torch.ops.aten.bmm.default:
                kinds.update(x.dtype for x in args[:3] if isinstance(x, torch.Tensor))
            return func(*args, **(kwargs or {}))

    with torch.autocast("cpu", torch.bfloat16), Watched():
        layer(x)
    assert kinds == {torch.float32}


def test_under_autocast_the_backward_of_the_chunked_route_computes_in_float32():
    """With unequal head widths, the parts use plain products, which autocast would convert."""
    layer, x, _ = layer_and_input(model_config(d_v=6), 0, 1, 40, torch.float32)
    blocks, (q, k, v) = selected_blocks(layer, x), layer.project(x)
    out = chunked.attend_chunked(q[:, :, 16:], k[1], v[1], blocks[:, :, 16:], layer.config.nsa)
    backward = partial(torch.autograd.grad, out.sum(), (q, k[1], v[1]), retain_graph=True)
    expected = backward()
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, backward(), expected))


def test_the_sparse_layer_of_a_dense_configuration_works():
    layer = NSAttention(model_config(attention="dense"))
    assert layer(torch.zeros(1, 9, 16)).shape == (1, 9, 16)


def test_dense_attention_is_softmax_over_all_earlier_keys():
    config = model_config(heads=(2, 3), d_v=6, attention="dense")
    torch.manual_seed(0)
    layer = DenseAttention(config).double()
    x = torch.randn(2, 9, config.dim, dtype=torch.float64)
    sparse = NSAttention(config).double()
    with torch.no_grad():  # a window over all tokens, without the other branches
        sparse.gate.proj.weight.zero_()
        sparse.gate.proj.bias.copy_(torch.tensor([-1e4, -1e4, 1e4] * 6))
        mine, theirs = (x.qkv.rows(x.qkv.weight) for x in (sparse, layer))
        for name, source in (("q", "q"), ("k_win", "k"), ("v_win", "v")):
            mine[name].copy_(theirs[source])
        sparse.out.weight.copy_(layer.out.weight)
        changed = model_config(heads=(2, 3), d_v=6, window=9)
        sparse.config = changed
    torch.testing.assert_close(layer(x), sparse(x))
    params = by_projection(sparse, dict(sparse.named_parameters()))
    torch.testing.assert_close(layer(x), nsa_layer(params, x, changed).out)
