"""In steps without a progress record, the host does not wait for the device."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.trainers.runs import CONFIG, small
from trainers import loop, settings
from trainers.contract import rundir
from trainers.contract.member import Member
from trainers.parallel import Single
from trainers.run_records import Report
from trainers.step_reduction import FIGURES, StepReduction

READS = {
    "_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2",
}  # fmt: skip
"""Operators whose result the host needs; each of them waits for the device."""
FROM_HOST = "lift_fresh"
"""The operator of `torch.tensor`, which copies host values from pageable memory to a device."""


class Operators(TorchDispatchMode):
    """Records the operators in `READS` and `FROM_HOST` of the main thread, with their steps."""

    def __init__(self, member: Member):
        super().__init__()
        self.found, self._member = [], member

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in READS or name == FROM_HOST:
            self.found.append((self._member.pulse.step, name))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("reason", ["", rundir.HALT, "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"])
def test_each_reason_to_halt_is_recorded_as_it_is(reason):
    cpu = torch.device("cpu")
    reduction = StepReduction(Single(cpu).reduce, cpu)
    figures = torch.zeros(len(FIGURES), dtype=torch.float64)
    reduction.start(7, figures, frozenset({reason, rundir.PROFILE_NOW}))
    (row,) = reduction.finish(include_newest=True)
    assert (row.step, row.halt_reason) == (7, reason)
    assert row.asked == {reason, rundir.PROFILE_NOW} - {""}


def test_the_host_waits_for_the_device_at_log_steps_only(tmp_path):
    changes = {
        "train.steps": 10, "report.log_every": 10, "train.precision": "fp16", "data.source": "text",
        "data.documents": "separate", "optim.skip_spikes_sigma": 6, "attention.uniform_gate": True,
        "train.accumulate": 2, "checkpoint.at_end": False,
    }  # fmt: skip
    resolved = settings.resolve(CONFIG, {}, small(**changes))
    member = Member(tmp_path, {})
    with Operators(member) as operators:
        assert loop.train(resolved.settings, member, Report(resolved, member)) == "done"
    assert member.close(10)
    assert (10, "_local_scalar_dense") in operators.found
    # `StepReduction.start` makes the only tensor of host values, in pinned memory for a GPU.
    quiet = [(step, name) for step, name in operators.found if 5 < step < 10]
    assert quiet == [(step, FROM_HOST) for step in range(6, 10)]


def test_the_device_has_ended_a_step_before_its_evaluation_begins(tmp_path, monkeypatch):
    """The time of an evaluation is taken out of the training, so it must not contain a step."""
    changes = {"train.steps": 8, "report.log_every": 8, "eval.every": 7}
    resolved = settings.resolve(CONFIG, {}, small(**changes, checkpoint__at_end=False))
    member, unread = Member(tmp_path, {}), []
    monkeypatch.setattr(
        loop, "evaluate", lambda t, step: unread.append((step, t.reduction.finish(True)))
    )
    loop.train(resolved.settings, member, Report(resolved, member))
    assert member.close(8)
    assert unread == [(7, [])]
