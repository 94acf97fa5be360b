"""The evidence from the GPUs of stalled ranks: whether a GPU is lost, is idle or runs a kernel.

A process that waits for its GPU usually spins: it is in state R, uses a whole core, and stays at
one Python line. The GPU helps to distinguish this wait from an endless loop. On an H100, a kernel
that never ends showed 100 % utilisation at 120 of 700 W.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from console.model import Gpu
from console.sources.ranks import gpu_index
from trainers.contract.environ import DEVICE_ORDER
from trainers.contract.flags import DEVICES

IDLE_PCT, RUNNING_PCT = 5.0, 90.0
"""A GPU with at most the first utilisation is idle. A GPU with at least the second runs a kernel.
NVML's utilisation is the share of time in which any kernel ran, even if it computed little."""
SPINS_SHARE = 0.3
"""A kernel computes little if its GPU draws less than this share of the power limit."""


def own_gpus(
    opened: Mapping[int, frozenset[int] | None], environments: Mapping[int, Mapping[str, str]],
    rows: Sequence[Gpu],
) -> dict[int, Gpu | None]:  # fmt: skip
    """Returns the row of each rank's own GPU, or None if that GPU is not known.

    A rank that has no GPU file open has no key. If `rows` is empty, a rank whose open files are not
    available has no key either.

    `opened` has the numbers N of the files /dev/nvidiaN that each rank has open, or None if they
    are not available. The environment of a rank is {} if it cannot be read. CUDA opens the files of
    all GPUs that it sees. If a rank sees several GPUs, rank N has the GPU with the number N among
    them, as in programs under torchrun. A GPU that several ranks share counts as not known.
    """
    found = dict[int, Gpu | None]()
    for rank, minors in opened.items():
        if (minors is None and not rows) or (minors is not None and not minors):
            continue
        mine = [gpu for gpu in rows if minors is None or gpu.minor in minors]
        if len(mine) != 1:
            index = _index(environments[rank], rank, rows)
            mine = [gpu for gpu in mine if gpu.index == index]
        found[rank] = mine[0] if mine else None
    owners = Counter(gpu.index for gpu in found.values() if gpu)
    return {rank: gpu if gpu and owners[gpu.index] == 1 else None for rank, gpu in found.items()}


def _index(variables: Mapping[str, str], rank: int, rows: Sequence[Gpu]) -> int | None:
    """Returns the index that NVML gives to a rank's GPU, or None if it is not known.

    Without `DEVICE_ORDER`, CUDA gives the first numbers to the fastest of different GPUs.
    """
    if len({gpu.name for gpu in rows}) > 1 and not DEVICE_ORDER.items() <= variables.items():
        return None
    return gpu_index(variables.get(DEVICES, ""), rank, rows) if variables else None


def is_idle(gpu: Gpu | None) -> bool:
    """Returns whether the GPU of a rank is known to be idle."""
    used_pct = _used_pct(gpu)
    return used_pct is not None and used_pct <= IDLE_PCT


def is_running(gpu: Gpu | None) -> bool:
    """Returns whether the GPU of a rank is known to run a kernel."""
    used_pct = _used_pct(gpu)
    return used_pct is not None and used_pct >= RUNNING_PCT


def _used_pct(gpu: Gpu | None) -> float | None:
    return gpu.util_pct if gpu and gpu.state == "ok" else None


def words(gpu: Gpu) -> str:
    """Returns a text such as "GPU 0 at 100 %, 120 of 700 W"."""
    if gpu.state != "ok":
        return f"GPU {gpu.index} {gpu.why or gpu.state}"
    used = "not available" if gpu.util_pct is None else f"{gpu.util_pct:.0f} %"
    has_power = gpu.power_w is not None and gpu.power_limit_w is not None
    power = f", {gpu.power_w:.0f} of {gpu.power_limit_w:.0f} W" if has_power else ""
    return f"GPU {gpu.index} at {used}{power}" + (f" ({gpu.why})" if gpu.why else "")


def kernel_words(gpu: Gpu | None) -> str:
    """Returns what a running kernel does according to the GPU's power draw.

    Returns "" if no kernel is known to run, or if the power or its limit is not known.
    """
    if gpu is None or not is_running(gpu) or gpu.power_w is None or not gpu.power_limit_w:
        return ""
    if gpu.power_w / gpu.power_limit_w < SPINS_SHARE:
        return "runs a kernel that computes little"
    return "computes"


def odd_ranks(gpus: Mapping[int, Gpu | None]) -> tuple[int, ...]:
    """Returns the ranks that the GPUs name as the cause of a stall.

    Lost GPUs name their ranks. If no GPU is lost, each GPU must be idle, or run a kernel with a
    known power draw; otherwise returns (). A kernel that computes little perhaps waits for a peer.
    If all other GPUs run such kernels, the idle GPUs name their ranks, or else the GPUs that
    compute. If some GPUs are idle and others compute, returns (): the ranks of the idle GPUs may
    wait on the CPU for the others.
    """
    groups: dict[str, list[int]] = {}
    for rank, gpu in gpus.items():
        kind = "idle" if is_idle(gpu) else kernel_words(gpu)
        kind = "lost" if gpu and gpu.state == "lost" else kind
        groups.setdefault(kind, []).append(rank)
    if "lost" in groups:
        return tuple(sorted(groups["lost"]))
    if "" in groups or len(groups) < 2 or {"idle", "computes"} <= groups.keys():
        return ()
    return tuple(sorted(groups.get("idle") or groups.get("computes", ())))
