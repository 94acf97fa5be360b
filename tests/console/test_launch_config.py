"""Launches of a config, and of phases whose config names no device."""

from __future__ import annotations

import pytest

from console import actions
from console.actions import LaunchOptions
from console.plans import gpu_checks
from console.sources import nvml
from tests.console.test_actions import plan


@pytest.mark.parametrize(("device", "gpus"), [("cuda", 3), ("cpu", 0), ("auto", 0)])
def test_a_config_is_launched_as_a_plan_of_one_phase(tmp_path, monkeypatch, device, gpus):
    monkeypatch.setattr(nvml, "has_library", lambda: False)
    config = tmp_path / "My_Run.yaml"
    config.write_text(f"train: {{device: {device}, steps: 7}}\n")
    chosen = LaunchOptions(
        config=config, trainer="fsdp", root=tmp_path / "artifacts", nproc=3,
        sets={"train.lr": "0.5"},
    )  # fmt: skip
    prepared = actions.prepare(chosen)
    (phase,) = prepared.phases
    assert (prepared.plan.name, prepared.plan.gpus, phase["nproc"]) == ("my_run", gpus, 3)
    assert phase["argv"][-6:] == [
        "-m", "trainers.fsdp", "--config", str(config), "--set", "train.lr=0.5"
    ]  # fmt: skip
    assert phase["settings"]["train.steps"] == {"value": 7, "origin": f"config {config}"}
    assert {"gpus", "disk", "config train"} <= {check.name for check in prepared.checks}


@pytest.fixture
def on_gpu_machine(monkeypatch):
    """Returns a function that plants a driver with two GPUs, and the CUDA version of torch."""

    def plant(torch_cuda):
        monkeypatch.setattr(nvml, "has_library", lambda: True)
        monkeypatch.setattr(nvml, "kernel_count", lambda *_: 2)
        monkeypatch.setattr(gpu_checks, "torch_cuda", lambda: torch_cuda)

    return plant


@pytest.mark.parametrize(
    ("devices", "assumed", "torch_cuda", "gpus"),
    [("", "", (13, 0), 2), ("0,1", "", (13, 0), 2), ("-1", "", (13, 0), 0), ("", "", None, 0),
     ("NoDevFiles", "", (13, 0), 0),
     ("", "2xA100", None, 2)],
)  # fmt: skip
def test_a_config_without_a_device_trains_on_the_gpus_of_the_machine_and_they_are_checked(
    tmp_path, on_gpu_machine, devices, assumed, torch_cuda, gpus
):
    on_gpu_machine(torch_cuda)
    config = tmp_path / "run.yaml"
    config.write_text("train: {steps: 7}\n")
    prepared = actions.prepare(LaunchOptions(
        config=config, root=tmp_path / "artifacts", nproc=2, devices=devices, assume_gpus=assumed
    ))  # fmt: skip
    assert prepared.plan.gpus == prepared.spec.plan.gpus == gpus
    assert prepared.phases[0]["settings"]["train.device"]["value"] == ("cuda" if gpus else "auto")
    rows = {check.name: check.text for check in prepared.checks}
    assert rows["device"] == ("cuda" if gpus else "no GPU is needed")


def test_a_plan_without_gpus_whose_config_has_no_device_may_use_gpus_that_are_not_checked(
    tmp_path, on_gpu_machine
):
    on_gpu_machine((13, 0))
    chosen = LaunchOptions(plan(tmp_path, phases=[{"name": "one"}]), root=tmp_path)
    rows = {check.name: (check.result, check.text) for check in actions.prepare(chosen).checks}
    assert rows["device"] == ("unknown", (
        "the phase 'one' trains on auto (train.device, default), so it uses the GPUs of this "
        "machine, and they are not checked; set gpus in the plan, or train.device=cpu"
    ))  # fmt: skip
