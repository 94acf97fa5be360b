"""Samples each GPU through pynvml in its own thread.

A GPU that hangs does not delay the others. Until NVML is initialised, one thread retries, at first
after 5 s, later once a minute.
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from console.model import RECENT_XID_S, Gpu
from console.sources.gpu import Device, XidLog, code_of, words_of, xid_words

LIBRARY = "libnvidia-ml.so.1"
KERNEL_GPUS = "proc/driver/nvidia/gpus"
SILENT_S = 5.0
RETRY_S, LONGEST_RETRY_S = 5.0, 60.0
"""The time between two attempts to initialise NVML doubles from the first value to the second."""
NO_DRIVER_CODES = (9, 12)
"""NVML_ERROR_DRIVER_NOT_LOADED and _LIBRARY_NOT_FOUND."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The newest row of one GPU, and the time of its read (monotonic s)."""

    gpu: Gpu
    at: float


def has_library() -> bool:
    """Returns whether the NVML library can be loaded; does not call the driver."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


def kernel_count(root: Path = Path("/")) -> int | None:
    """Returns the number of GPUs in the kernel driver's list, or None without such a list.

    In a container or a batch job NVML may count fewer GPUs, because it skips GPUs that it may not
    open.
    """
    try:
        return sum(1 for _ in (root / KERNEL_GPUS).iterdir())
    except OSError:
        return None


class Nvml:
    """Samples all GPUs of this host; `rows` never waits. `root` is the parent of /proc.

    NVML is initialised once and stays in use. While a process uses NVML, the kernel neither unloads
    the driver nor resets a GPU.
    """

    def __init__(
        self, period_s: float = 1.0, root: Path = Path("/"), retry_s: float = RETRY_S
    ) -> None:
        self._period_s, self._root, self._retry_s = period_s, root, retry_s
        self._readings: dict[int, Reading] = {}
        self._xids: XidLog | None = None
        self._initialising_at: float | None = None
        self._stop = threading.Event()

    def start(self) -> None:
        """Starts the thread that finds the GPUs; the first rows are available a little later."""
        self._spawn("nvml", self._discover)

    def stop(self) -> None:
        self._stop.set()

    def rows(self) -> list[Gpu]:
        """Returns the newest row of each GPU; if a GPU does not answer, `why` says for how long."""
        now = time.monotonic()
        rows = []
        for index, reading in sorted(dict(self._readings).items()):
            silent, gpu = now - reading.at, reading.gpu
            if silent > SILENT_S:
                gpu = Gpu(
                    index, gpu.name, "error", power_limit_w=gpu.power_limit_w,
                    mem_total_mib=gpu.mem_total_mib, uuid=gpu.uuid, minor=gpu.minor,
                    why=_silence(silent),
                )  # fmt: skip
            rows.append(self._with_xids(gpu))
        begun = self._initialising_at
        if not rows and begun is not None and now - begun > SILENT_S:
            rows.append(Gpu(0, "GPU", "error", why=_silence(now - begun)))
        return rows

    def _with_xids(self, gpu: Gpu) -> Gpu:
        xid = self._xids.found.get(gpu.index) if self._xids is not None else None
        if xid is None:
            return gpu
        recent = xid_words(xid.numbers, xid.count) if time.time() - xid.ts < RECENT_XID_S else ""
        return replace(
            gpu, xid=xid.numbers[-1], xids=xid.numbers, xid_count=xid.count, xid_ts=xid.ts,
            why=", ".join(part for part in (gpu.why, recent) if part),
        )  # fmt: skip

    def _spawn(self, name: str, work: Callable[..., None], *args: Any) -> None:
        threading.Thread(target=work, args=args, name=name, daemon=True).start()

    def _discover(self) -> None:
        """Initialises NVML, with retries, and starts one thread per GPU."""
        delay_s = self._retry_s
        while not self._stop.is_set():
            if has_library() and self._initialise():
                return
            self._stop.wait(delay_s)
            delay_s = min(2 * delay_s, LONGEST_RETRY_S)

    def _initialise(self) -> bool:
        import pynvml

        self._initialising_at = time.monotonic()
        listed = kernel_count(self._root) or 0
        try:
            pynvml.nvmlInit()
            count = pynvml.nvmlDeviceGetCount()
        except Exception as error:
            self._fail(error, listed)
            return False
        finally:
            self._initialising_at = None
        self._readings = {index: _unread(index) for index in range(count)}
        if not count:
            return False
        self._xids = xids = XidLog(pynvml)
        for index in range(count):
            self._spawn(f"nvml-{index}", self._follow, Device(pynvml, index, xids))
        return True

    def _fail(self, error: Exception, listed: int) -> None:
        """Sets an error row for each expected GPU.

        A library without a driver means that there is no GPU. After any other failure, at least one
        GPU is expected.
        """
        least = 0 if code_of(error) in NO_DRIVER_CODES else 1
        why = f"NVML cannot be initialised ({words_of(error)}); retrying"
        self._readings = {
            index: Reading(Gpu(index, "GPU", "error", why=why), math.inf)
            for index in range(max(listed, least))
        }

    def _follow(self, device: Device) -> None:
        """Reads one GPU until `stop`; no other thread reads it."""
        while not self._stop.is_set():
            begun = time.monotonic()
            self._readings[device.index] = Reading(device.read(), time.monotonic())
            self._stop.wait(max(0.05, self._period_s - (time.monotonic() - begun)))


def _unread(index: int) -> Reading:
    return Reading(Gpu(index, "GPU", "error", why="NVML has not answered yet"), time.monotonic())


def _silence(seconds: float) -> str:
    return f"NVML has not answered for {seconds:.0f} s"
