"""The guards: skipped steps, their counts, and the end of a failing training."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from console.plans import gates
from tests.trainers.runs import Run, small
from trainers import guard
from trainers.failures import LeakError, NonFiniteError
from trainers.guard import SPIKE_WINDOW_STEPS, Guard, Spikes
from trainers.precision import LEAST_SCALE, LossScale
from trainers.schema import ScalerSettings
from trainers.step_reduction import Row

NO, YES = torch.tensor(0.0), torch.tensor(1.0)


def row(step: int, loss: float, tokens: int = 1024) -> Row:
    return Row(step, loss * tokens, tokens, 0, False, False)


def test_a_norm_far_above_the_last_finite_ones_is_a_spike():
    torch.manual_seed(0)
    spikes, off = (Spikes(sigmas, torch.device("cpu")) for sigmas in (6.0, 0.0))
    for number in range(SPIKE_WINDOW_STEPS):
        large = torch.tensor(10.0**number) if number < 8 else torch.tensor(float("nan"))
        assert not off.detect(large, NO)
        assert not spikes.detect(torch.tensor(float("nan")), YES)
        assert not spikes.detect(1 + 0.1 * torch.rand(()), NO)
    for norm, spike in ((1.1, False), (1e9, True), (3.0, True), (1.1, False)):
        assert bool(spikes.detect(torch.tensor(norm), NO)) == spike


def test_after_norms_of_zero_no_norm_is_a_spike():
    spikes = Spikes(6.0, torch.device("cpu"))
    for norm in (*[NO] * SPIKE_WINDOW_STEPS, YES):
        assert not spikes.detect(norm, NO)


@pytest.mark.parametrize(("rise", "most"), [(1.3, 20), (1e6, 200)])
@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_a_lasting_rise_of_the_norm_is_accepted_after_some_steps(rise, most, noise):
    torch.manual_seed(0)
    spikes = Spikes(6.0, torch.device("cpu"))

    def skipped(level: float, steps: int) -> int:
        norms = level * (1 + noise * torch.randn(steps))
        return sum(int(spikes.detect(norm, NO)) for norm in norms)

    assert skipped(1.0, 2 * SPIKE_WINDOW_STEPS) == 0
    assert 1 <= skipped(rise, most) < most
    assert skipped(rise, 2 * SPIKE_WINDOW_STEPS) == 0


def overflow(step: int, lowered: bool) -> Row:
    return Row(step, 1.0, 1, 0, True, False, scale_lowered=lowered)


def test_overflows_end_a_run_only_when_the_loss_scale_is_at_its_floor():
    scale = LossScale(ScalerSettings(), True, torch.device("cpu"))
    rows = [overflow(step, bool(scale.update(YES))) for step in range(1, 22)]
    assert [row.scale_lowered for row in rows] == [True] * 16 + [False] * 5
    assert scale.scale == LEAST_SCALE
    judge = Guard(5)
    judge.check(rows[:-1])
    with pytest.raises(NonFiniteError, match="in 5 steps in a row, up to step 21;"):
        judge.check(rows[-1:])
    fixed = LossScale(ScalerSettings(backoff_factor=1.0), True, torch.device("cpu"))
    assert not fixed.update(YES)
    assert not LossScale(ScalerSettings(), False, torch.device("cpu")).update(YES)


def test_a_run_survives_more_overflows_than_it_may_skip_while_its_loss_scale_is_too_large(tmp_path):
    changes = small(
        train__steps=20, train__precision="fp16", scaler__init_scale=2**32, report__log_every=1,
        train__max_nonfinite_steps=3, checkpoint__at_end=False,
    )  # fmt: skip
    last = Run(tmp_path, changes, nproc=1).done().records(0, "progress")[-1]
    assert 3 < last["overflow_steps"] == last["skipped_steps"] < 20
    assert last["scale_lowered_steps"] == last["overflow_steps"]


def test_steps_that_are_skipped_are_counted_by_their_cause():
    """A non-finite step has a non-finite loss, or is an overflow."""
    rows = [
        Row(1, math.nan, 1, 0, True, False), Row(2, math.inf, 1, 0, True, True),
        Row(3, 1.0, 1, 0, True, True), Row(4, 1.0, 1, 0, False, True), row(5, 1.0),
    ]  # fmt: skip
    judge = Guard(50)
    judge.count(rows)
    assert (judge.nonfinite_loss, judge.overflow, judge.spikes, judge.skipped) == (2, 1, 1, 4)


def test_random_bytes_below_chance_are_a_leak_over_enough_tokens_only():
    judge = Guard(5, math.log(256))
    judge.check([row(step, math.log(256) - 0.03) for step in range(1, 16)])
    with pytest.raises(LeakError, match=r"over steps 1 to 16, chance is 5\.5452"):
        judge.check([row(16, math.log(256) - 0.03)])
    judge = Guard(5, math.log(256))
    judge.check([row(step, math.log(256) - 0.019) for step in range(1, 500)])


def test_a_parameter_that_the_backward_does_not_reach_is_named():
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "dead": nn.Linear(2, 2, bias=False)})
    (model["used"](torch.ones(2)).sum() + 0 * model["dead"](torch.ones(2)).sum()).backward()
    model["used"].bias.grad = None
    assert guard.dead_parameters(model) == ["used.bias", "dead.weight"]


def test_a_dead_parameter_is_said_after_the_first_step_of_each_attempt(tmp_path):
    for steps in (2, 4):
        changes = small(train__steps=steps, checkpoint__resume="auto")
        run = Run(tmp_path, changes, nproc=1, broken="no_attention").done()
    said = run.records(0, "dead_parameters")
    assert [record["step"] for record in said] == [1, 3]
    for record in said:
        assert "blocks.0.attn.qkv.weight (k_sel)" in record["parameters"]
        assert "blocks.0.mlp.up.weight" not in record["parameters"]


def test_an_infinite_norm_in_the_first_step_makes_no_parameter_dead(tmp_path):
    """The clip of an infinite norm makes each finite gradient 0."""
    changes = small(train__steps=2, checkpoint__at_end=False)
    run = Run(tmp_path, changes, nproc=1, broken="infinite_gradient_at_step_1").done()
    progress = run.records(0, "progress")
    assert [(r["overflow_steps"], r["grad_norm"] == "inf") for r in progress] == [
        (1, True), (1, False),
    ]  # fmt: skip
    assert not run.records(0, "dead_parameters")


def test_steps_that_were_not_finite_between_two_records_fail_the_gate(tmp_path):
    """Records are due at steps 1 to 5, 10 and 20; the loss is NaN in steps 6 to 9."""
    changes = small(train__steps=20, report__log_every=10, checkpoint__at_end=False)
    nans = ",".join(f"nan@{step}" for step in range(6, 10))
    run = Run(tmp_path, changes, nproc=1, flags={"NSA_DRILL": nans}).done()
    assert not [r for r in run.records(0, "progress") if r["loss"] == "nan"]
    summary = gates.Summary(world=1, attempts=1, stalls=0)
    for record in run.records(0):
        summary.add(record)
    (gate,) = gates.evaluate(summary, {"loss_finite": True})
    assert (gate.result, gate.value) == ("fail", 4)
    assert gates.overall(gates.evaluate(summary, {"steps_done": 20})) == "pass"
