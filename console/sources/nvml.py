"""GPUs through pynvml: one thread a device, so that a device that hangs ages alone.

Without an NVIDIA driver there is nothing: no thread, no import.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from console.model import Gpu

LIBRARY = "libnvidia-ml.so.1"
SILENT_S = 5.0
MIB = 1 << 20
LOST_CODE = 15
"""NVML_ERROR_GPU_IS_LOST."""
UNSUPPORTED_CODES = (3, 13)
"""NVML_ERROR_NOT_SUPPORTED and _FUNCTION_NOT_FOUND: this GPU or driver has no such sensor."""
THROTTLES = {0x08: "hardware slowdown", 0x20: "software, heat", 0x40: "hardware, heat",
             0x80: "power brake"}  # fmt: skip
"""Bits of nvmlDeviceGetCurrentClocksThrottleReasons that protect the GPU; a power cap does not."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The newest answer of one device, and when (monotonic seconds) it came."""

    gpu: Gpu
    at: float


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def has_driver() -> bool:
    """Says whether NVML can be loaded here."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


class Nvml:
    """Samples all GPUs of this host; `rows` never waits."""

    def __init__(self, period_s: float = 1.0):
        self.period_s = period_s
        self._readings: dict[int, Reading] = {}
        self._stop = threading.Event()

    def start(self) -> None:
        """Starts the threads where there is a driver; the first rows come a little later."""
        if has_driver():
            self._spawn("nvml", self._discover)

    def stop(self) -> None:
        self._stop.set()

    def rows(self) -> list[Gpu]:
        """Returns each GPU's newest row; one that went silent says for how long."""
        now = time.monotonic()
        rows = []
        for _, reading in sorted(self._readings.items()):
            silent, gpu = now - reading.at, reading.gpu
            if silent > SILENT_S:
                gpu = replace(
                    gpu, state="error", why=f"NVML has not answered for {silent:.0f} s",
                    util_pct=None, power_w=None, temp_c=None, sm_mhz=None,
                )  # fmt: skip
            rows.append(gpu)
        return rows

    def _spawn(self, name: str, work: Callable[..., None], *args: Any) -> None:
        threading.Thread(target=work, args=args, name=name, daemon=True).start()

    def _discover(self) -> None:
        import pynvml

        try:
            pynvml.nvmlInit()
            count = pynvml.nvmlDeviceGetCount()
        except pynvml.NVMLError:
            return
        for index in range(count):
            empty = Gpu(index, "GPU", "error", why="NVML has not answered yet")
            self._readings[index] = Reading(empty, time.monotonic())
            self._spawn(f"nvml-{index}", self._follow, pynvml, index)

    def _follow(self, nvml: Any, index: int) -> None:
        """Reads one device until `stop`; the only thread that ever asks for it."""
        device = _Device(nvml, index)
        while not self._stop.is_set():
            begun = time.monotonic()
            self._readings[index] = Reading(device.read(), time.monotonic())
            self._stop.wait(max(0.05, self.period_s - (time.monotonic() - begun)))


class _Device:
    """One device; keeps what does not change, and what was known before it was lost."""

    def __init__(self, nvml: Any, index: int):
        self._nvml, self._index = nvml, index
        self._handle: Any = None
        self._uuid, self._name = "", "GPU"
        self._limit_w: float | None = None
        self._total_mib: float | None = None
        self._events: Any = None
        self._xid = 0

    def read(self) -> Gpu:
        """Returns a row; an error of NVML is a row too."""
        nvml = self._nvml
        try:
            if self._handle is None:
                self._open()
            self._look_for_xid()
            return self._measure()
        except nvml.NVMLError as error:
            lost = getattr(error, "value", None) == LOST_CODE
            why = f"lost: {error}" if lost else str(error)
            if self._xid:
                why += f", Xid {self._xid}"
            return Gpu(
                self._index, self._name, "lost" if lost else "error",
                power_limit_w=self._limit_w, mem_total_mib=self._total_mib, why=why,
                xid=self._xid or None, uuid=self._uuid,
            )  # fmt: skip

    def _open(self) -> None:
        nvml = self._nvml
        handle = nvml.nvmlDeviceGetHandleByIndex(self._index)
        self._name = _text(nvml.nvmlDeviceGetName(handle))
        self._uuid = _text(nvml.nvmlDeviceGetUUID(handle))
        limit = self._optional(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        self._limit_w = None if limit is None else limit / 1000
        self._handle = handle
        try:
            self._events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._events)
        except nvml.NVMLError:
            self._events = None

    def _look_for_xid(self) -> None:
        """Takes the driver's critical error number when one came; never waits."""
        if self._events is None:
            return
        try:
            self._xid = int(self._nvml.nvmlEventSetWait_v2(self._events, 0).eventData) or self._xid
        except self._nvml.NVMLError:
            return

    def _measure(self) -> Gpu:
        nvml, handle = self._nvml, self._handle
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        self._total_mib = memory.total / MIB
        use = self._optional(nvml.nvmlDeviceGetUtilizationRates, handle)
        power = self._optional(nvml.nvmlDeviceGetPowerUsage, handle)
        held = self._optional(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
        return Gpu(
            self._index,
            self._name,
            "ok",
            util_pct=None if use is None else float(use.gpu),
            power_w=None if power is None else power / 1000,
            power_limit_w=self._limit_w,
            mem_used_mib=round(memory.used / MIB, 1),
            mem_total_mib=self._total_mib,
            temp_c=self._optional(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            sm_mhz=self._optional(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            why=f"Xid {self._xid}" if self._xid else "",
            throttle=", ".join(word for bit, word in THROTTLES.items() if held & bit),
            xid=self._xid or None,
            uuid=self._uuid,
            ecc_uncorrected=self._optional(
                nvml.nvmlDeviceGetTotalEccErrors, handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                nvml.NVML_VOLATILE_ECC,
            ),
        )  # fmt: skip

    def _optional(self, ask: Callable[..., Any], *args: Any) -> Any:
        """Returns a figure, None where this GPU has no such sensor."""
        try:
            return ask(*args)
        except self._nvml.NVMLError as error:
            if getattr(error, "value", None) in UNSUPPORTED_CODES:
                return None
            raise
