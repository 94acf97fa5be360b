"""The measurements of the preflight: a leak in one branch is found, and correct code passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nsa import functional
from nsa.attention import NSAttention
from tests.trainers.runs import CONFIG, SMALL
from trainers import device_probe, settings
from trainers.device_probe import Phase, causality, compared, first_batch, parity

TOKENS = {"data.seq_len": 64, "model.nsa.n_select": 4}
CHUNKED = {"data.seq_len": 520, "model.nsa.n_select": 3, "train.precision": "bf16"}
"""Settings with a sequence for which the CPU uses the route `chunked` and no mask."""


def phase(name: str = "train", **sets: Any) -> Phase:
    resolved = settings.resolve(Path(CONFIG), {}, SMALL | TOKENS | sets)
    return Phase(name, resolved.settings, torch.device("cpu"))


@pytest.mark.parametrize(
    "sets",
    [{}, {"train.precision": "bf16"}, {"attention.sel_ranges": True},
     {"model.nsa.n_select": 64, "model.nsa.window": 64},
     pytest.param({"train.precision": "fp64"}, marks=pytest.mark.slow),
     pytest.param({"attention.prefill_batched": False}, marks=pytest.mark.slow)],
    ids=str,
)  # fmt: skip
def test_sound_attention_is_causal_and_as_in_float64_on_each_route(sets):
    chosen = phase(**sets)
    assert causality([chosen])[:2] == (
        "pass", "no output depends on a later token, 63 of 63 cuts"
    )  # fmt: skip
    result, text, _ = parity([chosen])
    assert (result, "differs from float64 by" in text) == ("pass", True), text


def test_dense_attention_is_causal_and_not_compared():
    chosen = phase(**{"model.attention": "dense"})
    assert causality([chosen])[0] == "pass"
    assert parity([chosen])[0] == "unknown"


def leaking(true: Any) -> Any:
    """Adds 1/32 of a later value, without the gradient of this value, to one output in 50."""

    def leak(q: Any, k: Any, v: Any, *more: Any, **named: Any) -> Any:
        out, rows = true(q, k, v, *more, **named), torch.arange(49, q.shape[2] - 1, 50)
        later = v[:, :, (rows + 1) * v.shape[2] // q.shape[2]]
        later = later.repeat_interleave(q.shape[1] // v.shape[1], 1).detach()
        return out.index_add(2, rows, (later / 32).to(out.dtype))

    return leak


@pytest.mark.parametrize(
    ("function", "sets"),
    [("attend_window", {}), ("attend_window", {"train.precision": "bf16"}),
     ("attend_compressed", {}), ("masked", {}),
     pytest.param("attend_chunked", CHUNKED, marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_leak_in_one_row_of_50_of_one_branch_is_found(function, sets, monkeypatch):
    if function == "masked":
        true = functional.SELECTED["masked"]
        monkeypatch.setitem(functional.SELECTED, "masked", leaking(true))
    else:
        monkeypatch.setattr(functional, function, leaking(getattr(functional, function)))
    result, text, _ = causality([phase("smoke", **sets)])
    assert (result, text.startswith("phase 'smoke': output ")) == ("fail", True), text


def test_a_leak_of_the_backward_alone_is_found(monkeypatch):
    class Leaks(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, out: torch.Tensor) -> torch.Tensor:
            return out.clone()

        @staticmethod
        def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient + 1e-3 * gradient.roll(1, 1)

    true = NSAttention.forward
    monkeypatch.setattr(NSAttention, "forward", lambda *given: Leaks.apply(true(*given)))
    result, text, _ = causality([phase()])
    assert (result, "have a gradient at the later token" in text) == ("fail", True), text


def test_cuts_that_were_not_checked_in_time_are_no_pass(monkeypatch):
    monkeypatch.setattr(device_probe, "CAUSALITY_S", 0.0)
    result, text, _ = causality([phase(), phase(**{"data.seq_len": 48})])
    assert result == "unknown"
    assert "32 of 63 cuts, 32 of 47 cuts; the others were not checked" in text


def one_percent_off(true: Any) -> Any:
    """Changes the output of a call with several queries; the calls in float64 have one query."""
    return lambda q, *more: (0.99 if q.shape[2] > 1 else 1.0) * true(q, *more)


def test_a_dense_phase_hides_no_difference_of_another_phase(monkeypatch):
    phases = [phase("control", **{"model.attention": "dense"}), phase("smoke")]
    result, text, _ = parity(phases)
    assert result == "unknown"
    assert "differs from float64 by" in text
    assert text.endswith(", phase 'control': dense attention is not compared")
    monkeypatch.setattr(functional, "attend_window", one_percent_off(functional.attend_window))
    result, text, _ = parity(phases)
    assert (result, text.startswith("phase 'smoke': ")) == ("fail", True), text


def test_a_first_batch_warns_of_folders_that_are_not_read(tmp_path):
    folder, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    for each in (folder, elsewhere):
        each.mkdir()
        (each / "a.txt").write_text("text " * 9999)
    of_text = phase(**{"data.source": "text", "data.path": str(folder)})
    (folder / "itself").symlink_to(folder)
    assert first_batch([of_text, phase()])[0] == "pass"
    (folder / "linked").symlink_to(elsewhere)
    result, text, _ = first_batch([of_text, phase()])
    assert (result, "folders that are links: linked;" in text) == ("unknown", True)


def test_a_gpu_far_below_its_peers_is_named():
    assert compared([250.0, 240.0], "H100", on_cuda=True)[0] == "pass"
    result, text, figures = compared([250.0, 120.0, 251.0], "H100", on_cuda=True)
    assert (result, "rank 1 is below 70% of the fastest" in text) == ("fail", True), text
    assert figures == {"matmul_tflops": [250.0, 120.0, 251.0]}
    assert compared([0.05, 0.02], "x86", on_cuda=False)[0] == "unknown"
