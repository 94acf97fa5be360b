"""The checks of GPUs, driver, torch and the flags of NCCL.

A plan that needs GPUs is rejected if a GPU of its ranks is known to be faulty or busy.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from console.plan import DEVICE, Plan
from console.plans.case import Case, Found
from console.sources import nvml
from console.sources.gpu_survey import Card
from console.sources.ranks import visible
from trainers.contract import flags

BUSY_PCT, BUSY_MIB = 20.0, 2048.0
"""A GPU above one of these limits is busy, even if NVML reports no process on it."""
SLOW = (
    ("NCCL_DEBUG", "INFO", "slows the run down; use WARN to measure"),
    ("NCCL_DEBUG", "TRACE", "slows the run down; use WARN to measure"),
    ("NCCL_P2P_DISABLE", "1", "copies between GPUs through the host"),
)
"""Flags with the values that can make a run slow."""
CUDA_OF_TORCH = re.compile(r"^cuda\b.*= '(\d+)\.(\d+)", re.MULTILINE)


def torch_cuda() -> tuple[int, int] | None:
    """Returns the CUDA version of torch's build, or None without CUDA; does not import torch.

    Also returns None if torch is not installed, or if its version.py cannot be read.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(errors="replace")
    except OSError:
        return None
    found = CUDA_OF_TORCH.search(text)
    return (int(found[1]), int(found[2])) if found else None


def with_gpus(plan: Plan, settings: Mapping[str, Any], assumed: str) -> Plan:
    """Returns the plan of a config with its number of GPUs; `settings` are resolved.

    If the device is auto, the phase gets the device CUDA if CUDA is available, or if GPUs are
    `assumed`.
    """
    (phase,), device = plan.phases, settings[DEVICE]["value"]
    if device == "auto" and (assumed or _has_cuda(phase.flags.get(flags.DEVICES, ""))):
        phase, device = replace(phase, set={**phase.set, DEVICE: "cuda"}), "cuda"
    return replace(plan, phases=(phase,), gpus=phase.nproc * (device == "cuda"))


def _has_cuda(devices: str) -> bool:
    """Returns whether ranks with this CUDA_VISIBLE_DEVICES find CUDA on this machine."""
    count = nvml.kernel_count() or 0
    return bool(visible(devices, [""] * count) and nvml.has_library() and torch_cuda())


def torch(case: Case) -> Found:
    """Checks that torch is installed, and has CUDA if the plan needs GPUs."""
    if importlib.util.find_spec("torch") is None:
        return "fail", "torch is not installed; run make console, or pip install -e ."
    from importlib.metadata import version

    text = f"torch {version('torch')}"
    if case.plan.gpus == 0:
        return "pass", text
    built = torch_cuda()
    if built is None:
        return "fail", (
            f"{text} is built without CUDA, and the plan {case.plan.name} needs GPUs; install a "
            "CUDA build of torch, or use a plan for CPUs"
        )
    return "pass", f"{text}, CUDA {built[0]}.{built[1]}"


def device(case: Case) -> Found:
    """Checks that each phase of a plan for GPUs trains on GPUs, with at most one rank per GPU.

    In a plan without GPUs, a phase may train on cuda only if torch is built with CUDA. If a phase
    on the device auto finds CUDA, the result is "unknown". A phase of a foreign program is not
    checked.
    """
    plan = case.plan
    for index, phase in enumerate(plan.phases):
        if not (setting := case.settings[index].get(DEVICE)):
            continue
        trains = f"the phase {phase.name!r} trains on {setting['value']}"
        advice = f"{trains} (train.device, {setting['origin']}); remove that setting"
        if plan.gpus == 0 and setting["value"] == "cuda" and torch_cuda() is None:
            return "fail", f"torch is built without CUDA, and {advice}"
        if plan.gpus == 0 and setting["value"] == "auto" and _has_cuda(chosen(case, index)):
            return "unknown", (
                f"{trains} (train.device, {setting['origin']}), so it uses the GPUs of this "
                "machine, and they are not checked; set gpus in the plan, or train.device=cpu"
            )
        if plan.gpus and setting["value"] != "cuda":
            return "fail", f"the plan {plan.name} needs GPUs, and {advice}, or set gpus: 0"
        if phase.nproc > plan.gpus > 0:
            return "fail", (
                f"the phase {phase.name!r} has {phase.nproc} ranks for gpus: {plan.gpus}; each "
                "rank needs a GPU of its own"
            )
    return "pass", "cuda" if plan.gpus else "no GPU is needed"


def gpus(case: Case) -> Found:
    """Checks the GPUs of the ranks; compares NVML with the list of the kernel's driver."""
    plan, survey, needed = case.plan, case.survey, case.plan.gpus
    if isinstance(survey, str):
        return "fail" if needed else "unknown", f"{survey}; check nvidia-smi and dmesg"
    counted, listing = len(survey.cards), case.root / nvml.KERNEL_GPUS
    if case.devices and counted == 0:
        return "fail", (
            f"--devices {case.devices} names GPUs, but this machine has no GPU; omit --devices"
        )
    if needed == 0:
        return "pass", f"no GPU is needed, NVML counts {counted}"
    listed = counted if case.assumed else nvml.kernel_count(case.root)
    if listed is not None and counted > listed:
        return "fail", (
            f"NVML counts {counted} and the kernel's driver lists {listed}; compare "
            f"nvidia-smi -L with {listing}"
        )
    gaps = ""
    for words in dict.fromkeys(chosen(case, i) for i in range(len(plan.phases))):
        why, unknown = _not_usable(plan, survey.cards, words)
        if why:
            return "fail", why
        gaps = gaps or unknown
    if case.assumed:
        return "unknown", f"{needed} needed, {case.assumed} assumed and not read"
    text = f"{needed} needed, NVML counts {counted}"
    if listed is None:
        return "unknown", (f"{text}; {listing} cannot be read, so no second source confirms it")
    if gaps:
        return "unknown", f"{text}, but the state of some GPUs is not known: {gaps}"
    return "pass", f"{text}, the kernel's driver lists {listed}; needed GPUs are healthy and idle"


def chosen(case: Case, index: int) -> str:
    """Returns the CUDA_VISIBLE_DEVICES of a phase, or "" if the variable is not set."""
    of_phase = case.plan.phases[index].flags.get(flags.DEVICES)
    return case.devices or of_phase or case.plan.env.get(flags.DEVICES, "")


def _not_usable(plan: Plan, cards: Sequence[Card], devices: str) -> tuple[str, str]:
    """Returns two values: why the ranks' GPUs cannot be used, and what is not known about them."""
    seen = visible(devices, [card.gpu.uuid for card in cards])[: plan.gpus]
    needs = f"the plan {plan.name} needs {plan.gpus} GPU{'s' if plan.gpus > 1 else ''}"
    if len(seen) < min(plan.gpus, len(cards)):
        return f"{needs}, but {flags.DEVICES}={devices} leaves {len(seen)} of {len(cards)} GPUs", ""
    if len(seen) < plan.gpus:
        return (
            f"{needs}, but this machine has {len(seen)}; use the plan cpu_smoke, or a machine with "
            "more GPUs"
        ), ""
    sick = {card.gpu.index: why for card in cards if (why := not_healthy(card))}
    bad = [index for index in seen if index in sick]
    if not bad:
        gaps = (f"GPU {card.gpu.index}: {card.gpu.why}" for card in cards
                if card.gpu.index in seen and card.gpu.why)  # fmt: skip
        return "", "; ".join([*gaps, *(["a MIG slice is not checked"] * (None in seen))])
    good = [str(card.gpu.index) for card in cards if card.gpu.index not in sick][: plan.gpus]
    enough = len(good) == plan.gpus
    then = f"pass --devices {','.join(good)}" if enough else "free or repair GPUs, and check again"
    reasons = "; ".join(f"GPU {index} {sick[index]}" for index in bad if index is not None)
    found = f"{len(bad)} of the chosen GPUs cannot be used"
    return f"{needs}, and {found}: {reasons}; {then}", ""


def not_healthy(card: Card) -> str:
    """Returns why a GPU cannot be used, or "" if no fault and no other use is known."""
    gpu, found = card.gpu, []
    if gpu.state != "ok":
        return f"is not usable ({gpu.why or gpu.state})"
    if gpu.ecc_uncorrected:
        found.append(f"has {gpu.ecc_uncorrected} uncorrected ECC errors")
    if gpu.throttle:
        found.append(f"is throttled ({gpu.throttle})")
    if card.mig:
        found.append("is divided by MIG")
    util, used = gpu.util_pct or 0.0, gpu.mem_used_mib or 0.0
    if card.pids or util > BUSY_PCT or used > BUSY_MIB:
        pids = f", pid {', '.join(map(str, card.pids))}" if card.pids else ""
        found.append(f"is busy ({util:.0f} %, {used / 1024:.1f} GiB{pids})")
    return " and ".join(found)


def driver(case: Case) -> Found:
    """Checks that the driver supports the major version of CUDA that torch was built with."""
    survey, built = case.survey, torch_cuda()
    if case.plan.gpus == 0 or case.assumed:
        return "pass", f"{case.assumed} assumed" if case.assumed else "no GPU is needed"
    if isinstance(survey, str) or built is None or not survey.cards or not survey.cuda[0]:
        return "unknown", "the versions are not available; see the rows torch and gpus"
    newest = f"the driver {survey.driver} supports CUDA {survey.cuda[0]}.{survey.cuda[1]}"
    if survey.cuda[0] < built[0]:
        return "fail", (
            f"{newest}, and torch needs CUDA {built[0]}; install a newer driver, or torch for CUDA "
            f"{survey.cuda[0]}"
        )
    return "pass", f"{newest}, torch needs {built[0]}.{built[1]}"


def nccl(case: Case) -> Found:
    """For a plan with GPUs, reports flags of `SLOW`."""
    if not case.plan.gpus:
        return "pass", "no GPU is needed"
    parts = (case.plan.env, *(phase.flags for phase in case.plan.phases))
    given = {item for each in parts for item in each.items()}
    found = [f"{name}={value} {effect}" for name, value, effect in SLOW if (name, value) in given]
    chosen = "NCCL chooses by the topology, except for the flags of the plan"
    return ("unknown", "; ".join(found)) if found else ("pass", chosen)
