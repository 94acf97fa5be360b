"""The evidence from the GPUs of stalled ranks: lost, idle, or running a kernel.

A host that waits for its GPU spins: state R, a whole core, one Python line. Only the GPU shows
whether that is such a wait or an endless loop: measured on an H100, a kernel that never ends shows
100 % utilisation at 120 of 700 W.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from console.model import Gpu

IDLE_PCT, RUNNING_PCT = 5.0, 90.0
"""NVML's utilisation is the share of time in which a kernel ran, however little it computed."""
SPINS_SHARE = 0.3
"""A GPU that runs a kernel below this share of its power limit computes little."""


def is_idle(rows: Sequence[Gpu]) -> bool:
    """Returns whether every GPU of a rank is known to be idle."""
    return bool(rows) and all(
        gpu.state == "ok" and gpu.util_pct is not None and gpu.util_pct <= IDLE_PCT for gpu in rows
    )


def is_running(rows: Sequence[Gpu]) -> bool:
    """Returns whether a GPU of a rank is known to run a kernel."""
    return any(
        gpu.state == "ok" and gpu.util_pct is not None and gpu.util_pct >= RUNNING_PCT
        for gpu in rows
    )


def words(rows: Sequence[Gpu]) -> str:
    """Returns "GPU 0 at 100 %, 120 of 700 W", with the reason if a figure is missing."""
    return ", ".join(_words(gpu) for gpu in rows[:8])


def _words(gpu: Gpu) -> str:
    if gpu.state != "ok":
        return f"GPU {gpu.index} {gpu.why or gpu.state}"
    used = "not available" if gpu.util_pct is None else f"{gpu.util_pct:.0f} %"
    has_power = gpu.power_w is not None and gpu.power_limit_w is not None
    power = f", {gpu.power_w:.0f} of {gpu.power_limit_w:.0f} W" if has_power else ""
    return f"GPU {gpu.index} at {used}{power}" + (f" ({gpu.why})" if gpu.why else "")


def kernel_words(rows: Sequence[Gpu]) -> str:
    """Returns what a GPU with a running kernel does, as its power shows, or "" if unknown."""
    shares = [
        gpu.power_w / gpu.power_limit_w for gpu in rows
        if gpu.power_w is not None and gpu.power_limit_w
    ]  # fmt: skip
    if not is_running(rows) or not shares:
        return ""
    if max(shares) < SPINS_SHARE:
        return "runs a kernel that computes little, as one that waits for a peer"
    return "computes"


def odd_ranks(gpus: Mapping[int, Sequence[Gpu]]) -> tuple[int, ...]:
    """Returns the ranks whose GPU is lost, or else those whose GPU is idle while others are busy.

    Ranks that share a GPU cannot be distinguished.
    """
    indices = [gpu.index for rows in gpus.values() for gpu in rows]
    if len(indices) != len(set(indices)):
        return ()
    if lost := [rank for rank, rows in gpus.items() if any(gpu.state == "lost" for gpu in rows)]:
        return tuple(sorted(lost))
    idle = [rank for rank, rows in gpus.items() if is_idle(rows)]
    running = [rank for rank, rows in gpus.items() if is_running(rows)]
    return tuple(sorted(idle)) if idle and len(idle) + len(running) == len(gpus) > 1 else ()
