"""One GPU as NVML describes it: a row for each read, whatever NVML answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from console.model import Gpu
from console.sources.xid import XidLog

MIB = 1 << 20
UNSUPPORTED_CODES = (3, 13)
"""NVML_ERROR_NOT_SUPPORTED and _FUNCTION_NOT_FOUND: this GPU or driver has no such sensor."""
LOST_CODE = 15
"""NVML_ERROR_GPU_IS_LOST."""
GONE_CODES = (LOST_CODE, 6, 28)
"""Also NVML_ERROR_NOT_FOUND and _GPU_NOT_FOUND, which the call for a handle returns."""
THROTTLES = {0x08: "hardware slowdown", 0x20: "software, heat", 0x40: "hardware, heat",
             0x80: "power brake"}  # fmt: skip
"""Bits of nvmlDeviceGetCurrentClocksThrottleReasons that protect the GPU; a power cap does not."""


def code_of(error: BaseException) -> int | None:
    """Returns the code of an NVMLError, None for any other exception."""
    code = getattr(error, "value", None)
    return code if isinstance(code, int) else None


def words_of(error: BaseException) -> str:
    """Returns NVML's sentence for an error, or the exception's name."""
    if code_of(error) is None:
        return f"{type(error).__name__}: {error}"
    return str(error)


@dataclass(slots=True)
class Device:
    """One device; keeps what does not change, and what was known before it was lost."""

    nvml: Any
    index: int
    xids: XidLog
    _handle: Any = None
    _uuid: str = ""
    _name: str = "GPU"
    _limit_w: float | None = None
    _total_mib: float | None = None
    _refused: dict[str, str] = field(default_factory=dict)
    """The sensors that gave nothing when they were last asked, with the reason."""

    def read(self) -> Gpu:
        """Returns a row; an error is a row too, and the handle is then asked for again."""
        try:
            if self._handle is None:
                self._open()
            gpu = self._measure()
        except Exception as error:
            gpu = self._failed(error)
        if gpu.state != "ok":
            self._handle = None
        if gpu.state == "lost":
            self.xids.lost(self.index)
        return gpu

    def _failed(self, error: Exception) -> Gpu:
        state, why = "error", words_of(error)
        if code_of(error) in GONE_CODES:
            state, why = "lost", f"lost: {why}"
        return Gpu(
            self.index, self._name, state, power_limit_w=self._limit_w,
            mem_total_mib=self._total_mib, why=why, uuid=self._uuid,
        )  # fmt: skip

    def _open(self) -> None:
        nvml = self.nvml
        handle = nvml.nvmlDeviceGetHandleByIndex(self.index)
        self._name = self._figure("name", nvml.nvmlDeviceGetName, handle) or self._name
        self._uuid = self._figure("uuid", nvml.nvmlDeviceGetUUID, handle) or self._uuid
        limit = self._figure("power limit", nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        self._limit_w = None if limit is None else limit / 1000
        self._handle = handle
        self.xids.opened(self.index, handle)

    def _measure(self) -> Gpu:
        nvml, handle, figure = self.nvml, self._handle, self._figure
        memory = figure("memory", nvml.nvmlDeviceGetMemoryInfo, handle)
        if memory is not None:
            self._total_mib = memory.total / MIB
        use = figure("utilization", nvml.nvmlDeviceGetUtilizationRates, handle)
        power = figure("power", nvml.nvmlDeviceGetPowerUsage, handle)
        held = figure("throttle reasons", nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        kind = nvml.NVML_TEMPERATURE_GPU
        temp_c = figure("temperature", nvml.nvmlDeviceGetTemperature, handle, kind)
        sm_mhz = figure("clock", nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)
        ecc = figure(
            "ECC errors", nvml.nvmlDeviceGetTotalEccErrors, handle,
            nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC,
        )  # fmt: skip
        figures = (memory, use, power, held, temp_c, sm_mhz, ecc)
        silent = self._refused and all(each is None for each in figures)
        return Gpu(
            self.index, self._name, "error" if silent else "ok",
            util_pct=None if use is None else float(use.gpu),
            power_w=None if power is None else power / 1000,
            power_limit_w=self._limit_w,
            mem_used_mib=None if memory is None else round(memory.used / MIB, 1),
            mem_total_mib=self._total_mib,
            temp_c=temp_c,
            sm_mhz=sm_mhz,
            why=", ".join(set(self._refused.values())) if silent else self._missing(),
            throttle=", ".join(word for bit, word in THROTTLES.items() if (held or 0) & bit),
            uuid=self._uuid,
            ecc_uncorrected=ecc,
        )  # fmt: skip

    def _missing(self) -> str:
        """Says which sensors gave nothing, by reason."""
        by_reason: dict[str, list[str]] = {}
        for sensor, reason in self._refused.items():
            by_reason.setdefault(reason, []).append(sensor)
        parts = (f"no {', '.join(sensors)} ({reason})" for reason, sensors in by_reason.items())
        return "; ".join(parts)

    def _figure(self, sensor: str, ask: Callable[..., Any], *args: Any) -> Any:
        """Returns a figure, None where this sensor gives none; only the loss of the GPU raises."""
        self._refused.pop(sensor, None)
        try:
            return ask(*args)
        except self.nvml.NVMLError as error:
            code = code_of(error)
            if code == LOST_CODE:
                raise
            if code not in UNSUPPORTED_CODES:
                self._refused[sensor] = words_of(error)
            return None
