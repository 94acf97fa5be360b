"""Are the GPUs there that a plan needs? NVML counts them, and the kernel's driver lists them."""

from __future__ import annotations

from pathlib import Path

from console.model import Result
from console.sources import nvml
from trainers.contract import flags
from trainers.contract.errors import ContractError
from trainers.contract.plan import Plan

BY_UUID = ("GPU-", "MIG-")


def check(plan: Plan, devices: str, root: Path, limit_s: float) -> tuple[Result, str]:
    """Returns whether a plan's GPUs are there; `devices` are those of --devices.

    A plan without GPUs rests on neither source.
    """
    needed, listed = plan.gpus, nvml.kernel_count(root)
    try:
        counted = nvml.count(limit_s)
    except (TimeoutError, ContractError) as error:
        return "fail" if needed else "unknown", f"{error}; see nvidia-smi and the kernel's log"
    if devices and counted == 0:
        text = f"--devices {devices} names GPUs and this machine has none; leave it out"
        return "fail", text
    if needed == 0:
        return "pass", f"none needed, {counted} there"
    if listed is not None and counted > listed:
        return "fail", (
            f"NVML counts {counted} GPUs and the kernel's driver lists {listed}: compare "
            f"nvidia-smi -L with {root / nvml.KERNEL_GPUS}"
        )
    chosen = [devices or _chosen(plan, index) for index in range(len(plan.phases))]
    usable, words = min((usable_of(words, counted), words) for words in chosen)
    if usable < needed:
        return "fail", _too_few(plan, usable, counted, words)
    if listed is None:
        return "unknown", (
            f"{needed} needed, NVML counts {counted}; {root / nvml.KERNEL_GPUS} cannot be read, so "
            "no second source confirms it"
        )
    return "pass", f"{needed} needed, {counted} there; the kernel's driver lists {listed}"


def _chosen(plan: Plan, index: int) -> str:
    """Returns the CUDA_VISIBLE_DEVICES of a phase, "" where it is not set."""
    return plan.phases[index].flags.get(flags.DEVICES) or plan.env.get(flags.DEVICES, "")


def usable_of(devices: str, counted: int) -> int:
    """Returns how many of `counted` GPUs CUDA sees with a value of CUDA_VISIBLE_DEVICES.

    It stops at the first word that names no GPU.
    """
    if not devices:
        return counted
    words = [word.strip() for word in devices.split(",")]
    for place, word in enumerate(words):
        named = word.isdecimal() and int(word) < counted
        if not (named or word.startswith(BY_UUID)) or word in words[:place]:
            return place
    return len(words)


def _too_few(plan: Plan, usable: int, counted: int, devices: str) -> str:
    needs = f"the plan {plan.name} needs {plan.gpus} GPU{'s' if plan.gpus > 1 else ''} and"
    if usable < counted:
        return f"{needs} {flags.DEVICES}={devices} leaves {usable} of the {counted} of this machine"
    return f"{needs} this machine has {usable}; use the plan cpu_smoke, or a machine with GPUs"
