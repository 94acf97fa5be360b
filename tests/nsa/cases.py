"""The common part of the attention tests: configurations, gradients, and comparisons."""

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from nsa.attention import NSAttention
from nsa.backends import Route, Switches
from nsa.compress import summaries
from nsa.config import ModelConfig, NSAConfig
from nsa.projection import Projection
from nsa.rope import rotate
from nsa.select import block_scores, top_blocks
from tests.nsa.reference import Reference, nsa_layer

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}


def model_config(
    *, heads: tuple[int, int] = (2, 2), d_k: int = 8, d_v: int = 8, dim: int = 16, **changes
) -> ModelConfig:
    """Returns a small config; `heads` is (groups, heads per group), `changes` other settings."""
    sparse = {name: changes.pop(name) for name in list(changes) if hasattr(NSAConfig, name)}
    small: dict[str, Any] = {
        "block_size": 4, "block_stride": 2, "select_block_size": 4, "n_select": 4, "window": 6,
    }  # fmt: skip
    groups, per_group = heads
    base: dict[str, Any] = {"n_layers": 1, "mlp_hidden": 16, "vocab_size": 64}
    return ModelConfig(
        **base | changes,
        dim=dim,
        n_heads=groups * per_group,
        n_kv_groups=groups,
        d_k=d_k,
        d_v=d_v,
        nsa=NSAConfig(**small | sparse),
    )


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    """Draws configurations; l, d, l', n, w, groups and head widths need not divide each other."""
    size = draw(st.integers(1, 9))
    return model_config(
        heads=draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2), (3, 1)])),
        d_k=draw(st.sampled_from([4, 8])),
        d_v=draw(st.sampled_from([4, 6, 8])),
        block_size=size,
        block_stride=draw(st.integers(1, size)),
        select_block_size=draw(st.integers(1, 9)),
        n_select=draw(st.integers(3, 6)),
        window=draw(st.integers(1, 12)),
        compress=draw(st.sampled_from(["mlp", "mean"])),
        gate=draw(st.sampled_from(["sigmoid", "softmax"])),
        gate_hidden=draw(st.sampled_from([0, 0, 5])),
    )


ROUTES = ("masked", "chunked", "ranges", "sequential", "sequential ranges")


def routed(config: ModelConfig, route: str) -> NSAttention:
    """Returns a layer whose selected branch has this route."""
    switches = Switches(prefill_batched="sequential" not in route, sel_ranges="ranges" in route)
    layer = NSAttention(config, switches)
    usual = layer.routes
    if route in ("masked", "chunked"):
        layer.routes = lambda *tokens: {**usual(*tokens), "sel": Route(route, "test")}
    return layer


def selected_blocks(layer: NSAttention, x: Tensor) -> Tensor:
    """Returns the blocks that `layer(x)` selects, `[B, G, S, n]` as from `top_blocks`."""
    return top_blocks(
        block_scores(*queries_and_blocks(layer, x), layer.config.nsa), layer.config.nsa
    )


def queries_and_blocks(layer: NSAttention, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the rotated queries and compressed keys of `layer(x)`."""
    q, k, v = layer.project(x)
    base, phi = layer.config.rope_base, (layer.phi_k, layer.phi_v)
    return rotate(q, base), summaries(k[0], v[0], phi, layer.config.nsa, base)[0]


def by_projection(layer: nn.Module, named: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Returns `named`; one tensor per projection replaces the tensor of `qkv`, if there is one."""
    whole = next((name for name in named if name.endswith("qkv.weight")), "")
    module = next((m for m in layer.modules() if isinstance(m, Projection)), None)
    if not whole or module is None:
        return named
    prefix, rows = whole.removesuffix("qkv.weight"), named[whole]
    split = {} if rows is None else module.rows(rows)
    parts = {f"{prefix}{part}.weight": split.get(part) for part in module.widths}
    return {name: value for name, value in named.items() if name != whole} | parts


def gradients(layer: nn.Module, x: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """Returns the output of `layer(x)`, and the gradients of (output · weight), by name."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    out = layer(x)
    (out * weight).sum().backward()
    found = {"out": out, "x": x.grad}
    found |= by_projection(layer, {name: p.grad for name, p in layer.named_parameters()})
    missing = [name for name, value in found.items() if value is None]
    assert not missing, f"no gradient for {missing}"
    return {name: value.detach() for name, value in found.items()}  # pyright: ignore


def reference_gradients(
    layer: nn.Module, x: Tensor, weight: Tensor, config: ModelConfig, selected: Tensor | None
) -> tuple[dict[str, Tensor], Reference]:
    """Returns the output and the gradients of the reference by name, and the reference.

    The reference computes in float64, from weights and `x` that are rounded to their own dtype.
    """
    weights = by_projection(layer, {n: p.detach() for n, p in layer.named_parameters()})
    params = {n: p.double().clone().requires_grad_() for n, p in weights.items() if p is not None}
    x = x.detach().double().requires_grad_()
    reference = nsa_layer(params, x, config, selected)
    (reference.out * weight.double()).sum().backward()
    found = {"out": reference.out.detach(), "x": x.grad}
    found |= {name: p.grad for name, p in params.items()}
    zeros = {"x": x, **params}
    return {
        name: torch.zeros_like(zeros[name]) if value is None else value
        for name, value in found.items()
    }, reference


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Checks that max|a - b| / max|b| of each tensor is in the tolerance, apart from rounding.

    If the terms of a gradient nearly cancel, only rounding may be left of the gradient. The
    backward of attention subtracts dO·O from dO·V, and both have the rounding error of the largest
    terms.
    """
    assert got.keys() == expected.keys()
    scale = max(value.abs().max().item() for value in expected.values())
    rounding = 2 * torch.finfo(dtype).eps * scale
    for name, b in expected.items():
        a = got[name].double()
        largest = b.abs().max().item()
        allowed = TOLERANCE[dtype] * largest
        if largest < 1e-13 * scale:
            allowed = 4 * rounding
        elif dtype in (torch.float32, torch.float64):
            allowed = max(allowed, rounding)
        error = (a - b).abs().max().item()
        assert error <= allowed, f"{name}: {error:.2e} of {largest:.2e}, {dtype}"
