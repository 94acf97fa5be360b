"""The attention on a CUDA device: the reference, causality and the shapes of production."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa.attention import NSAttention
from nsa.backends import Route
from nsa.model import Transformer
from tests.nsa.cases import (
    ROUTES,
    assert_close,
    configs,
    gradients,
    reference_gradients,
    selected_blocks,
)
from tests.nsa.test_attention import layer_and_input, low_precision, smallest_margin
from trainers.settings import resolve

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
M7C = (
    resolve(ROOT / "configs/m7c_125m.yaml", {}).settings.model
    if torch.cuda.is_available()
    else None
)
FAST = ("masked", "chunked", "ranges")


def on_cuda(layer, *tensors):
    return layer.cuda(), *(x.cuda() for x in tensors)


def gradients_on_cuda(layer, x, weight):
    return {name: value.cpu() for name, value in gradients(*on_cuda(layer, x, weight)).items()}


@pytest.fixture(autouse=True)
def exact_products():
    """Switches TF32 off for matrix products during a test."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("route", ROUTES)
@settings(max_examples=12)
@given(configs(), st.integers(1, 26), st.integers(0, 10**6))
def test_outputs_and_gradients_equal_the_oracle_in_float64(route, config, seq_len, seed):
    layer, x, weight = layer_and_input(config, seed, 1, seq_len, torch.float64, route)
    expected, reference = reference_gradients(layer, x, weight, config, None)
    if smallest_margin(reference) > 1e-12:
        assert_close(gradients_on_cuda(layer, x, weight), expected, torch.float64)


@pytest.mark.parametrize("route", ROUTES)
@settings(max_examples=8)
@given(configs(), st.integers(1, 26), st.integers(0, 10**6))
def test_outputs_and_gradients_equal_the_oracle_in_float32(route, config, seq_len, seed):
    layer, x, weight = layer_and_input(config, seed, 1, seq_len, torch.float32, route)
    blocks = selected_blocks(*on_cuda(layer, x)).cpu()
    expected, _ = reference_gradients(layer.cpu(), x, weight, config, blocks)
    assert_close(gradients_on_cuda(layer, x, weight), expected, torch.float32)


@pytest.mark.parametrize("compress", ["mlp", "mean"])
@pytest.mark.parametrize("seq_len", [5, 31])
@pytest.mark.parametrize("route", FAST)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outputs_and_gradients_are_near_the_oracle_in_low_precision(
    dtype, route, seq_len, compress
):
    layer, x, weight = low_precision(dtype, route, seq_len, compress, "sigmoid")
    blocks = selected_blocks(*on_cuda(layer, x)).cpu()
    expected, _ = reference_gradients(layer.cpu(), x, weight, layer.config, blocks)
    got = gradients_on_cuda(layer, x, weight)
    for name, right in expected.items():
        error = (got[name].double() - right).norm() / right.norm().clamp_min(1e-30)
        # Products in low precision round their operands; the reference does not.
        assert error <= 3e-2, f"{name}: {error:.1e}"


def m7c_layer(route: str, seed: int = 0) -> NSAttention:
    assert M7C is not None
    torch.manual_seed(seed)
    layer = NSAttention(M7C)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    usual = layer.routes
    layer.routes = lambda *tokens: {**usual(*tokens), "sel": Route(route, "test")}
    return layer.cuda()


@pytest.mark.parametrize("seq_len", [2048, 8192])
def test_routes_agree_on_the_shapes_of_production(seq_len):
    x, weight = torch.randn(2, 1, seq_len, 768, device="cuda")
    found = {route: gradients(m7c_layer(route), x, weight) for route in FAST}
    for route in FAST[1:]:
        for name, right in found["masked"].items():
            error = (found[route][name] - right).norm() / right.norm()
            assert error <= 2e-4, f"{route} {name}: {error:.1e}"


@pytest.mark.parametrize("route", FAST)
def test_bf16_is_near_float32_on_the_shapes_of_production(route):
    torch.manual_seed(1)
    layer, x = m7c_layer(route), torch.randn(2, 2048, 768, device="cuda")
    right = layer(x)
    with torch.autocast("cuda", torch.bfloat16):
        got = layer(x)
    # Rounding selects other blocks for some queries, whose branch then differs.
    errors = (got.float() - right).norm(dim=-1) / right.norm(dim=-1)
    assert errors.median() <= 1e-2
    assert errors.isfinite().all()


@pytest.mark.parametrize("seq_len", [2048, 4096 + 64])
@pytest.mark.parametrize("route", FAST)
def test_the_future_has_no_influence_on_the_shapes_of_production(route, seq_len):
    torch.manual_seed(2)
    layer, cut = m7c_layer(route), seq_len // 2 + 17
    x = torch.randn(1, seq_len, 768, device="cuda")
    changed = x.clone()
    changed[:, cut:] = torch.randn_like(changed[:, cut:])
    with torch.autocast("cuda", torch.bfloat16), torch.no_grad():
        before, after = layer(x), layer(changed)
    moved = (before[:, :cut] - after[:, :cut]).abs().max()
    # The selections of other queries change the tile of a query, and so the rounding.
    assert moved <= (2e-2 * before.abs().max() if route == "chunked" else 0)
    x.requires_grad_()
    layer(x)[:, :cut].square().sum().backward()
    assert x.grad is not None
    assert x.grad[:, cut:].abs().max() == 0
    assert x.grad[:, :cut].abs().amax(-1).min() > 0


def test_a_model_compiles_as_one_graph_and_computes_the_same():
    import dataclasses

    assert M7C is not None
    torch.manual_seed(3)
    model = Transformer(dataclasses.replace(M7C, n_layers=2)).cuda()
    tokens = torch.randint(256, (1, 2048), device="cuda")
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True)
    losses = []
    for each in (model, compiled):
        logits = each(tokens)
        loss = torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:])
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_decoding_equals_the_forward():
    import dataclasses

    assert M7C is not None
    torch.manual_seed(4)
    model = Transformer(dataclasses.replace(M7C, n_layers=2)).cuda().eval()
    tokens = torch.randint(256, (2, 700), device="cuda")
    with torch.no_grad():
        whole = model(tokens)
        caches = model.caches()
        parts = [model(tokens[:, :650], caches)]
        parts += [model(tokens[:, t : t + 1], caches) for t in range(650, 700)]
    assert torch.cat(parts, 1).allclose(whole, atol=1e-3)


@pytest.mark.parametrize("route", ["masked", "ranges"])
def test_a_layer_waits_for_the_device_nowhere(route):
    """After `set_sync_debug_mode("error")`, an operation that waits for the device fails."""
    layer = m7c_layer(route)
    x = torch.randn(1, 2048, 768, device="cuda", requires_grad=True)
    layer(x).square().mean().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x).square().mean().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
