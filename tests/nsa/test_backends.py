"""The route of each branch with its reason, the switches, and the fallbacks."""

import dataclasses
import sys
import types

import pytest
import torch
import torch.nn.functional as F

from nsa.attention import DenseAttention, NSAttention
from nsa.backends import Case, Switches, effective, in_words
from nsa.config import ModelConfig
from nsa.model import Transformer
from nsa.window import attend_flash_attn, attend_window
from tests.nsa.cases import gradients, model_config

M7C = ModelConfig(dim=768, n_layers=12, n_heads=12, n_kv_groups=2, d_k=64, d_v=64, mlp_hidden=2048)


def names(seq_len=2048, device="cpu", dtype="float32", config=M7C, flash_attn=False, **switches):
    case = Case(config, seq_len, device, dtype, Switches(**switches), flash_attn)
    return {branch: route.name for branch, route in effective(case).items()}


def fallbacks(**case):
    switches = Switches(**case.pop("switches"))
    whole = {"seq_len": 8192, "device": "cpu", "dtype": "float32", "flash_attn": False} | case
    routes = effective(Case(**{"config": M7C, "switches": switches} | whole))
    return {branch: route.fallback for branch, route in routes.items() if route.fallback}


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ({"seq_len": 16}, ("none", "causal", "causal")),
        ({"seq_len": 512}, ("masked", "causal", "causal")),
        ({"seq_len": 1024}, ("masked", "causal", "banded")),
        ({"seq_len": 2048}, ("masked", "chunked", "banded")),
        ({"seq_len": 2048, "device": "cuda"}, ("masked", "masked", "banded")),
        ({"seq_len": 8192, "device": "cuda"}, ("masked", "chunked", "banded")),
        ({"seq_len": 8192, "sel_ranges": True}, ("masked", "ranges", "banded")),
        ({"prefill_batched": False}, ("sequential",) * 3),
    ],
)
def test_the_table_picks(case, expected):
    assert names(config=dataclasses.replace(M7C, attention="dense")) == {"all": "causal"}
    assert names(**case) == dict(zip(("cmp", "sel", "win"), expected, strict=True))


def test_the_table_says_where_heads_are_folded():
    """Folding depends on the groups in the batch and on the threads, not only on the kernel."""
    usual = {"seq_len": 2048, "device": "cpu", "threads": 2}

    def folded(**changes):
        case = Case(
            dtype="float32", switches=Switches(), flash_attn=False,
            **{"config": M7C} | usual | changes,
        )  # fmt: skip
        return [branch for branch, route in effective(case).items() if route.folded]

    assert folded() == ["sel", "win"]
    assert in_words(effective(Case(M7C, 512, "cpu", "float32", Switches(), False, threads=1))) == {
        "cmp": "masked", "sel": "causal, heads folded", "win": "causal, heads folded",
    }  # fmt: skip
    assert folded(config=dataclasses.replace(M7C, attention="dense"), seq_len=1024) == ["all"]
    no_such = (
        {"threads": 3}, {"threads": 0}, {"device": "cuda"}, {"first": 512},
        {"config": dataclasses.replace(M7C, d_v=32)},
        {"config": dataclasses.replace(M7C, n_kv_groups=12)},
        {"config": dataclasses.replace(M7C, attention="dense")},
    )  # fmt: skip
    assert [folded(**changes) for changes in no_such] == [[]] * len(no_such)
    assert folded(threads=3, batch=2) == ["sel", "win"]


def test_flash_attn_serves_where_all_it_needs_is_there():
    wish = {"device": "cuda", "dtype": "bfloat16", "flash_attn": True, "use_fa2": True}
    assert names(**wish)["win"] == "flash-attn"
    for change, reason in (
        ({"flash_attn": False}, "flash-attn is not installed"),
        ({"device": "cpu"}, "flash-attn needs a CUDA device"),
        ({"dtype": "float32"}, "flash-attn needs bf16 or fp16"),
    ):
        case = {key: value for key, value in (wish | change).items() if key != "use_fa2"}
        assert fallbacks(switches={"use_fa2": True}, **case) == {"win": reason}
        assert names(**(wish | change))["win"] == "banded"
    both = {"use_fa2": True, "prefill_batched": False}
    case = {key: value for key, value in wish.items() if key != "use_fa2"}
    assert fallbacks(switches=both, **case) == {"win": "prefill_batched is off"}


def test_flash_only_says_where_it_cannot_be():
    assert fallbacks(switches={"flash_only": True}) == {}
    refused = fallbacks(switches={"flash_only": True}, device="cuda", dtype="bfloat16")
    assert set(refused) == {"cmp", "sel", "win"}
    assert "no mask" in refused["sel"]
    for branch, config in (("sel", M7C), ("all", dataclasses.replace(M7C, attention="dense"))):

        def refusal(dtype="bfloat16", config=config, branch=branch, **case):
            flash_only = {"switches": {"flash_only": True}, "device": "cuda", "config": config}
            return fallbacks(dtype=dtype, **flash_only | case).get(branch, "")

        assert refusal(seq_len=512) == refusal(seq_len=1, first=512) == ""
        assert "bf16 or fp16" in refusal("float32", seq_len=512)
        assert "no mask" in refusal(seq_len=256, first=512)
    both = Switches(flash_only=True, use_fa2=True)
    route = effective(Case(config, 512, "cuda", "bfloat16", both, False))["all"]
    assert (route.no_flash, route.fallback) == (False, "flash-attn computes the window branch only")


@pytest.mark.parametrize(
    ("switches", "says"),
    [
        ({"flash_only": True, "no_flash": True}, "exclude each other"),
        ({"uniform_gate": True, "force_branch": "win"}, "unset one of them"),
    ],
)
def test_contradictions_are_refused(switches, says):
    with pytest.raises(ValueError, match=says):
        Switches(**switches)


def layer_and_input(config, switches, seq_len=40):
    torch.manual_seed(0)
    layer = NSAttention(config, switches)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return layer.double(), torch.randn(2, seq_len, config.dim, dtype=torch.float64)


def test_a_fallback_is_counted_by_cause_and_said():
    layer, x = layer_and_input(model_config(), Switches(use_fa2=True))
    for _ in range(3):
        layer(x)
    assert layer.fallbacks == {"flash-attn is not installed": 3}
    words = in_words(layer.routes(x))["win"]
    assert words.replace(", heads folded", "") == "banded (flash-attn is not installed)"
    model = Transformer(model_config(n_layers=3), Switches(use_fa2=True))
    assert model.fallbacks() == {}
    model(torch.randint(64, (1, 40)))
    assert model.fallbacks() == {"flash-attn is not installed": 3}


@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
def test_a_forced_branch_is_alone_and_keeps_all_parameters_in_the_graph(gate):
    config = model_config(gate=gate)
    outputs = []
    for branch in ("cmp", "sel", "win"):
        layer, x = layer_and_input(config, Switches(force_branch=branch))
        found = gradients(layer, x, torch.randn_like(x))
        outputs.append(found["out"])
        for name, kept in (("cmp", "v_cmp"), ("sel", "v_sel"), ("win", "v_win")):
            assert bool(found[f"{kept}.weight"].abs().max()) == (name == branch)
        assert found["gate.proj.weight"].abs().max() == 0
        layer.collecting = True
        layer(x)
        expected = [float(name == branch) for name in ("cmp", "sel", "win")]
        assert layer.stats["gate_branch_shares"].tolist() == pytest.approx(expected)
    uniform, x = layer_and_input(config, Switches(uniform_gate=True))
    torch.testing.assert_close(uniform(x), sum(outputs) / 3)
    uniform.collecting = True
    uniform(x)
    assert uniform.stats["gate_branch_shares"].tolist() == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize("switches", [Switches(no_flash=True), Switches(flash_only=True)])
@pytest.mark.parametrize("d_v", [8, 6])
def test_sdpa_kernels_agree(switches, d_v):
    config = model_config(heads=(2, 3), d_v=d_v)
    plain, x = layer_and_input(config, Switches())
    switched, _ = layer_and_input(config, switches)
    weight = torch.randn_like(x)
    expected, got = gradients(plain, x, weight), gradients(switched, x, weight)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value)
    assert bool(switched.fallbacks) == (switches.flash_only and d_v == 6)


def test_sdpa_really_avoids_flash():
    config = model_config(heads=(2, 3))
    for switches, expected in ((Switches(), True), (Switches(no_flash=True), False)):
        for layer in (NSAttention(config, switches), DenseAttention(config, switches)):
            with torch.autograd.profiler.profile(use_kineto=False) as profiled:
                layer(torch.randn(1, 40, config.dim))
            called = {event.name for event in profiled.function_events}
            assert any("flash" in name for name in called) == expected


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """Replaces flash-attn 2, which needs a GPU: its published signature, computed by masks."""
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert (dropout_p, softmax_scale, causal, window_size[1]) == (0.0, None, True, 0)
    token = torch.arange(q.shape[1])
    age = token[:, None] - token
    bias = torch.where((age < 0) | (age > window_size[0]), -torch.inf, 0.0).to(q.dtype)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, bias, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("window", [1, 6, 40])
def test_flash_attn_is_called_as_published_and_gives_the_window(window, monkeypatch):
    package = types.ModuleType("flash_attn")
    package.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 40, 8, dtype=torch.float64) for heads in (6, 2, 2))
    torch.testing.assert_close(attend_flash_attn(q, k, v, window), attend_window(q, k, v, window))
