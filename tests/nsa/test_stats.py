"""Statistics: their values, and their computation without a wait for the device."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa.config import NSAConfig
from nsa.model import Transformer
from nsa.select import top_blocks
from nsa.stats import gate_stats, selection_stats
from tests.nsa.cases import model_config

SPARSE = NSAConfig(block_size=4, block_stride=2, select_block_size=4, n_select=5, window=8)
GATE_NAMES = {
    "gate_entropy_mean", "gate_entropy_min", "gate_entropy_layers", "gate_max_gate",
    "gate_collapse_frac", "gate_branch_shares",
}  # fmt: skip
SELECTION_NAMES = {
    "sel_entropy", "sel_forced_share", "sel_distance_mean", "sel_distance_hist", "sel_overlap",
}  # fmt: skip


@pytest.mark.parametrize(
    ("open_heads", "expected"),
    [(0, (1.0, 1.0, 1 / 3, 0.0, [1 / 3] * 3)), (1, (0.75, 0.0, 0.5, 0.25, [0.25, 0.5, 0.25]))],
)
def test_gate_statistics_of_even_and_of_collapsed_heads(open_heads, expected):
    """Of four heads, none or one has all its weight on one branch; ln 3 is the unit of entropy."""
    logits = torch.zeros(2, 5, 4, 3)
    logits[:, :, :open_heads, 1] = 30
    stats = gate_stats(logits, "softmax")
    mean, least, largest, collapsed, shares = expected
    assert stats["gate_entropy"].item() == pytest.approx(mean * math.log(3))
    assert stats["gate_entropy_min"].item() == pytest.approx(least * math.log(3), abs=1e-6)
    assert stats["gate_max_gate"].item() == pytest.approx(largest)
    assert stats["gate_collapse_frac"].item() == pytest.approx(collapsed)
    assert stats["gate_branch_shares"].tolist() == pytest.approx(shares)


def loops(p_sel, blocks, config):
    """Computes the figures of `nsa.stats.selection_stats` for one pick after the other."""
    size = config.select_block_size
    entropies, forced_shares, distances, ages, kept, later = [], [], [], [], 0, 0
    both = (tensor.flatten(0, 1).tolist() for tensor in (p_sel, blocks))
    for row, chosen in zip(*both, strict=True):
        for t, scores in enumerate(row):
            current = t // size
            forced = {0, current - 1, current}
            if t >= config.block_size - 1:
                shares = [score / sum(scores) for score in scores]
                entropies.append(-sum(p * math.log(p) for p in shares if p))
                forced_shares.append(sum(p for j, p in enumerate(shares) if j in forced))
            if t < config.n_select * size:
                continue
            for j in set(chosen[t]) - forced:
                distances.append(t - (j * size + size - 1))
                ages.append(current - j)
                if t > config.n_select * size:
                    later += 1
                    kept += j in chosen[t - 1]
    return entropies, forced_shares, distances, ages, kept / later


@settings(max_examples=10)
@given(st.integers(22, 60), st.integers(0, 99))
def test_selection_statistics_follow_their_definitions(seq_len, seed):
    torch.manual_seed(seed)
    p_sel = torch.rand(2, 2, seq_len, -(-seq_len // 4), dtype=torch.float64)
    blocks = top_blocks(p_sel, SPARSE)
    stats = selection_stats(p_sel, blocks, SPARSE)
    entropies, forced_shares, distances, ages, overlap = loops(p_sel, blocks, SPARSE)
    assert stats["sel_entropy"].item() == pytest.approx(sum(entropies) / len(entropies))
    assert stats["sel_forced_share"].item() == pytest.approx(
        sum(forced_shares) / len(forced_shares)
    )
    assert stats["sel_distance_mean"].item() == pytest.approx(sum(distances) / len(distances))
    assert stats["sel_overlap"].item() == pytest.approx(overlap)
    octaves = [sum(2**i <= age < 2 ** (i + 1) for age in ages) for i in range(1, 6)]
    hist = stats["sel_distance_hist"].tolist()
    assert hist == pytest.approx([n / len(ages) for n in octaves[: len(hist)]])
    assert sum(hist) == pytest.approx(1)


@pytest.mark.parametrize(
    ("seq_len", "left_out"),
    [
        (3, SELECTION_NAMES),
        (21, {"sel_distance_mean", "sel_distance_hist", "sel_overlap"}),
        (22, set()),
    ],
)
def test_what_a_sequence_is_too_short_for_is_left_out(seq_len, left_out):
    p_sel = torch.rand(1, 1, seq_len, -(-seq_len // 4))
    stats = selection_stats(p_sel, top_blocks(p_sel, SPARSE), SPARSE)
    assert set(stats) == SELECTION_NAMES - left_out
    assert all(value.isfinite().all() for value in stats.values())


def test_statistics_never_ask_the_device_for_a_value():
    """A meta tensor has no values, so code that reads a value fails."""
    logits = torch.empty(2, 40, 4, 3, device="meta")
    p_sel = torch.empty(2, 2, 40, 10, device="meta")
    found = gate_stats(logits, "sigmoid")
    found |= selection_stats(p_sel, top_blocks(p_sel, SPARSE), SPARSE)
    assert all(value.device.type == "meta" for value in found.values())


def test_a_model_reports_all_names_once_collected():
    model = Transformer(model_config(n_layers=3, n_select=3 + 1))
    tokens = torch.randint(64, (2, 40))
    assert model.read_stats() == {}
    plain = model(tokens)
    assert model.read_stats() == {}
    with model.collect_stats():
        assert torch.equal(model(tokens), plain)
    stats = model.read_stats()
    model(torch.randint(64, (2, 40)))
    after = model.read_stats()
    assert all(torch.equal(stats[name], after[name]) for name in stats), "collected outside"
    assert set(stats) == GATE_NAMES | SELECTION_NAMES
    assert stats["gate_entropy_layers"].shape == (3,)
    assert stats["gate_entropy_mean"].item() == pytest.approx(
        stats["gate_entropy_layers"].mean().item()
    )
    assert stats["gate_entropy_min"] <= stats["gate_entropy_layers"].min()
    assert stats["gate_branch_shares"].sum().item() == pytest.approx(1)
    assert not any(value.requires_grad for value in stats.values())


def test_dense_attention_has_no_statistics():
    model = Transformer(model_config(attention="dense"))
    with model.collect_stats():
        model(torch.randint(64, (1, 40)))
    assert model.read_stats() == {}
