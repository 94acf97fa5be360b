"""The times of steps and phases. For a GPU, the device and the clock of the host are fake."""

from __future__ import annotations

import time

import pytest
import torch

from tests.trainers.runs import CONFIG, heartbeats, small
from trainers import settings
from trainers.contract.member import Member
from trainers.run_records import Report
from trainers.step_phases import Phases
from trainers.step_reduction import FIGURES, StepReduction

STEP_S, EVAL_S, LOG_EVERY, STEPS = 0.04, 0.5, 10, 40


class Gpu:
    """A device that runs what the host launched, in order; both have one virtual clock."""

    def __init__(self):
        self.now = self.free = 100.0

    def launch(self, host_s: float, device_s: float) -> None:
        """Launches work for `host_s`; the device ends it after the launch, at the earliest."""
        began = max(self.free, self.now)
        self.now += host_s
        self.free = max(began + device_s, self.now)

    def wait(self, at: float) -> None:
        self.now = max(self.now, at)

    def reduce(self, _vector: torch.Tensor):
        done = self.free
        return lambda: self.wait(done)

    def Event(self, enable_timing: bool):
        return Event(self)


class Event:
    def __init__(self, gpu: Gpu):
        self._gpu, self.at = gpu, 0.0

    def record(self) -> None:
        self.at = max(self._gpu.now, self._gpu.free)

    def query(self) -> bool:
        return self.at <= self._gpu.now

    def synchronize(self) -> None:
        self._gpu.now = max(self._gpu.now, self.at)

    def elapsed_time(self, later: Event) -> float:
        return (later.at - self.at) * 1e3


def test_no_ended_step_is_missing_although_nothing_else_waited_for_the_device(tmp_path):
    gpu = Gpu()
    phases = Phases(Member(tmp_path, {}).pulse, gpu)
    for step in (1, 2):
        for name in ("fetch", "forward", "log"):
            phases.enter(step, name)
            gpu.launch(0.0, STEP_S if name == "forward" else 0.0)
    assert phases.take()[1] == pytest.approx([STEP_S, STEP_S])


@pytest.mark.parametrize("eval_every", [0, 5, 7, 20])
@pytest.mark.parametrize("host_s", [0.3 * STEP_S, 0.7 * STEP_S, 1.5 * STEP_S])
def test_each_step_has_its_own_time_although_the_host_runs_ahead(tmp_path, host_s, eval_every):
    resolved = settings.resolve(
        CONFIG, {}, small(train__steps=STEPS, report__log_every=LOG_EVERY)
    )  # fmt: skip
    member, gpu = Member(tmp_path, {}), Gpu()
    report, phases = Report(resolved, member), Phases(member.pulse, gpu)
    reduction = StepReduction(gpu.reduce, torch.device("cpu"))
    for step in range(1, STEPS + 1):
        report.begin(step)
        phases.enter(step, "fetch")
        phases.enter(step, "forward")
        gpu.launch(host_s, STEP_S)
        phases.enter(step, "log")
        reduction.start(step, torch.zeros(len(FIGURES), dtype=torch.float64), frozenset())
        reduction.finish(include_newest=report.due(step))
        report.end(step, phases.training_s())
        if report.due(step):
            times = dict(zip(("phases_s", "steps_s"), phases.take(), strict=True))
            report.progress(step, loss=1.0, lr=0.1, grad_norm=1.0, **times)
        if eval_every and step % eval_every == 0:
            phases.enter(step, "eval")
            gpu.launch(EVAL_S, EVAL_S)
            gpu.wait(gpu.free)
    assert member.close(STEPS)
    records = heartbeats(tmp_path, 0, "progress")
    step_s = max(host_s, STEP_S)
    tokens = resolved.settings.tokens_per_step
    for before, record in zip([{"step": 0}, *records], records, strict=False):
        assert record["steps_dt_s"] == pytest.approx([step_s] * (record["step"] - before["step"]))
        assert record["dt_forward_s"] == pytest.approx(step_s)
        assert record["toks_per_s"] == pytest.approx(tokens / step_s, rel=1e-3)


def test_evaluations_and_saves_are_part_of_no_step(tmp_path):
    phases = Phases(Member(tmp_path, {}).pulse)
    for step in range(1, 4):
        for name in ("fetch", "log", "eval", "save"):
            phases.enter(step, name)
            time.sleep(0.01)
    phases_s, steps_s = phases.take()
    assert len(steps_s) == 3
    assert phases_s["fetch"] <= sum(steps_s) <= phases_s["fetch"] + phases_s["log"]
    assert phases.training_s() == pytest.approx(phases_s["fetch"] + phases_s["log"])
