"""Reads the values of one GPU through NVML, and collects the Xids of all GPUs in a thread.

Each read returns a row, even after an error. An Xid is a critical error of one GPU that the NVIDIA
driver reports.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from console.model import Gpu

MIB = 1 << 20
UNSUPPORTED_CODES = (3, 13)
"""NVML_ERROR_NOT_SUPPORTED and _FUNCTION_NOT_FOUND: the GPU or driver lacks the sensor."""
LOST_CODE = 15
"""NVML_ERROR_GPU_IS_LOST."""
GONE_CODES = (LOST_CODE, 6, 28)
"""`LOST_CODE`, and two codes of the call for a handle: _NOT_FOUND and _GPU_NOT_FOUND."""
THROTTLES = {0x08: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal",
             0x80: "power brake"}  # fmt: skip
"""Bits of nvmlDeviceGetCurrentClocksThrottleReasons that show a protection of the GPU."""
DEVICE_FILE = re.compile(r"/dev/nvidia([0-9]{1,4})")
MAX_DESCRIPTORS, MAX_ENVIRONMENT_BYTES = 1024, 1 << 18
KEPT = 8
WAIT_MS = 1000
TIMEOUT_CODE = 10
"""NVML_ERROR_TIMEOUT: no event is pending."""
RETRY_S = 1.0
BATCH_S = 0.2
"""GPUs that are opened within this time share one event set."""


def code_of(error: BaseException) -> int | None:
    """Returns the code of an NVMLError, or None for any other exception."""
    code = getattr(error, "value", None)
    return code if isinstance(code, int) else None


def words_of(error: BaseException) -> str:
    """Returns NVML's sentence for an error, or the exception's name."""
    if code_of(error) is None:
        return f"{type(error).__name__}: {error}"
    return str(error)


def opened_by(pid: int, proc: Path = Path("/proc")) -> frozenset[int] | None:
    """Returns N for each file /dev/nvidiaN that a process has open, or None if not available.

    CUDA opens the files of all GPUs that it sees, so an open file does not show that the GPU is in
    use. A GPU that has no such file, for example in WSL, has the number -1. The driver is not
    called.
    """
    try:
        names = os.listdir(proc / f"{pid}/fd")
    except OSError:
        return None
    found = set()
    for name in names[:MAX_DESCRIPTORS]:
        with contextlib.suppress(OSError):
            link = str((proc / f"{pid}/fd/{name}").readlink())
            if file := DEVICE_FILE.fullmatch(link):
                found.add(int(file[1]))
            elif link == "/dev/dxg":
                found.add(-1)
    return frozenset(found) if found or len(names) <= MAX_DESCRIPTORS else None


def visible_devices(pid: int) -> str:
    """Returns the CUDA_VISIBLE_DEVICES of a process at its start, or "" if not available."""
    try:
        with Path(f"/proc/{pid}/environ").open("rb") as file:
            variables = file.read(MAX_ENVIRONMENT_BYTES).split(b"\0")
    except OSError:
        return ""
    name = b"CUDA_VISIBLE_DEVICES="
    found = next((each for each in variables if each.startswith(name)), name)
    return found.removeprefix(name).decode("ascii", "replace")


@dataclass(frozen=True, slots=True)
class Xid:
    """The Xids of one GPU: the newest numbers, the total count, and the time of the last one."""

    numbers: tuple[int, ...]
    count: int
    ts: float


def xid_words(numbers: tuple[int, ...], count: int) -> str:
    """Returns "Xid 79", or "Xid 31, 79, 3 times"."""
    text = f"Xid {', '.join(str(number) for number in dict.fromkeys(numbers))}"
    return text if count < 2 else f"{text}, {count} times"


class XidLog:
    """Waits for events of all GPUs in one thread; `found` is replaced at each change, never edited.

    All GPUs share one event set, and each event contains the handle of its GPU. When a GPU is lost,
    the wait fails; the set is then created again for the other GPUs.
    """

    def __init__(self, nvml: Any, stop: threading.Event):
        self.found: Mapping[int, Xid] = {}
        self._nvml, self._stop = nvml, stop
        self._lock = threading.Lock()
        self._handles: Mapping[int, Any] = {}
        self._opened = threading.Event()
        self._addresses: dict[int | None, int] = {}
        """The GPU of each handle that was ever opened, because an event may come late."""

    def add_gpu(self, index: int, handle: Any) -> None:
        """Adds a GPU, or replaces its handle."""
        address = _address(handle)
        with self._lock:
            if index not in self._handles or _address(self._handles[index]) != address:
                self._handles = {**self._handles, index: handle}
                self._addresses[address] = index
                self._opened.set()

    def remove_gpu(self, index: int) -> None:
        """Removes a GPU until its handle is added again; its pending events are still read."""
        with self._lock:
            if index in self._handles:
                self._handles = {i: h for i, h in self._handles.items() if i != index}

    def follow(self) -> None:
        """Reads events until `stop`, and retries after an error of NVML."""
        while not self._stop.is_set():
            try:
                registered = self._read_events()
            except Exception:  # the row of each GPU has its error
                registered = 0
            if not registered:
                self._opened.wait(RETRY_S)
                self._opened.clear()
                self._stop.wait(BATCH_S)

    def _read_events(self) -> int:
        """Reads events until the GPUs change; returns the number of GPUs that report events.

        Pending events are read first. After an error the event set is not freed, because NVML may
        already have freed the set.
        """
        nvml, handles = self._nvml, self._handles
        if not handles:
            return 0
        events = nvml.nvmlEventSetCreate()
        registered = self._register(handles, events)
        while registered and not self._stop.is_set():
            if not self._read_event(events) and handles is not self._handles:
                break
        nvml.nvmlEventSetFree(events)
        return registered

    def _register(self, handles: Mapping[int, Any], events: Any) -> int:
        """Registers the GPUs for Xid events; returns how many of them support such events."""
        nvml, count = self._nvml, 0
        for handle in handles.values():
            try:
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
                count += 1
            except nvml.NVMLError:
                continue
        return count

    def _read_event(self, events: Any) -> bool:
        """Waits for the next event; returns False after a timeout."""
        try:
            event = self._nvml.nvmlEventSetWait_v2(events, WAIT_MS)
        except self._nvml.NVMLError as error:
            if error.value == TIMEOUT_CODE:
                return False
            raise
        index, number = self._addresses.get(_address(event.device)), int(event.eventData)
        if index is None:
            return True
        before = self.found.get(index, Xid((), 0, 0.0))
        now = Xid((*before.numbers, number)[-KEPT:], before.count + 1, time.time())
        self.found = {**self.found, index: now}
        return True


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


@dataclass(slots=True)
class Device:
    """One GPU. Its constant properties remain known after the GPU is lost."""

    nvml: Any
    index: int
    xids: XidLog
    _handle: Any = None
    _known: Gpu = field(init=False)
    """The row with the constant properties only."""
    _refused: dict[str, str] = field(default_factory=dict)
    """The sensors whose last read failed, with the reason."""

    def __post_init__(self) -> None:
        self._known = Gpu(self.index, "GPU", "error")

    def read(self) -> Gpu:
        """Returns a row, even after an error; the next read then opens the handle again."""
        try:
            if self._handle is None:
                self._open()
            gpu = self._measure()
        except Exception as error:
            gpu = self._failed(error)
        if gpu.state != "ok":
            self._handle = None
        if gpu.state == "lost":
            self.xids.remove_gpu(self.index)
        return gpu

    def _failed(self, error: Exception) -> Gpu:
        state, why = "error", words_of(error)
        if code_of(error) in GONE_CODES:
            state, why = "lost", f"lost: {why}"
        return replace(self._known, state=state, why=why)

    def _open(self) -> None:
        nvml = self.nvml
        handle = nvml.nvmlDeviceGetHandleByIndex(self.index)
        limit = self._read_sensor("power limit", nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        self._known = replace(
            self._known,
            name=self._read_sensor("name", nvml.nvmlDeviceGetName, handle) or self._known.name,
            uuid=self._read_sensor("uuid", nvml.nvmlDeviceGetUUID, handle) or self._known.uuid,
            minor=self._read_sensor("minor number", nvml.nvmlDeviceGetMinorNumber, handle),
            power_limit_w=None if limit is None else limit / 1000,
        )
        self._handle = handle
        self.xids.add_gpu(self.index, handle)

    def _measure(self) -> Gpu:
        nvml, handle, figure = self.nvml, self._handle, self._read_sensor
        memory = figure("memory", nvml.nvmlDeviceGetMemoryInfo, handle)
        if memory is not None:
            self._known = replace(self._known, mem_total_mib=memory.total / MIB)
        use = figure("utilization", nvml.nvmlDeviceGetUtilizationRates, handle)
        power = figure("power", nvml.nvmlDeviceGetPowerUsage, handle)
        reasons = figure("throttle reasons", nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        kind = nvml.NVML_TEMPERATURE_GPU
        temp_c = figure("temperature", nvml.nvmlDeviceGetTemperature, handle, kind)
        sm_mhz = figure("clock", nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)
        ecc = figure(
            "ECC errors", nvml.nvmlDeviceGetTotalEccErrors, handle,
            nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC,
        )  # fmt: skip
        figures = (memory, use, power, reasons, temp_c, sm_mhz, ecc)
        silent = self._refused and all(each is None for each in figures)
        return replace(
            self._known, state="error" if silent else "ok",
            util_pct=None if use is None else float(use.gpu),
            power_w=None if power is None else power / 1000,
            mem_used_mib=None if memory is None else round(memory.used / MIB, 1),
            temp_c=temp_c, sm_mhz=sm_mhz, ecc_uncorrected=ecc,
            why=", ".join(set(self._refused.values())) if silent else self._missing(),
            throttle=", ".join(word for bit, word in THROTTLES.items() if (reasons or 0) & bit),
        )  # fmt: skip

    def _missing(self) -> str:
        """Returns the sensors whose last read failed, grouped by reason."""
        by_reason: dict[str, list[str]] = {}
        for sensor, reason in self._refused.items():
            by_reason.setdefault(reason, []).append(sensor)
        parts = (f"no {', '.join(sensors)} ({reason})" for reason, sensors in by_reason.items())
        return "; ".join(parts)

    def _read_sensor(self, sensor: str, ask: Callable[..., Any], *args: Any) -> Any:
        """Returns the value of a sensor, or None if the read fails; raises if the GPU is lost."""
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
