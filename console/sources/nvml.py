"""Samples the values and the Xids of each GPU through pynvml, in one thread per GPU.

A GPU that hangs does not delay the others. Until NVML finds a GPU, one thread retries, at first
after 5 s, later once a minute. Each read that ends returns a row (a `Gpu`), even after an error.
An Xid is an error of one GPU that the NVIDIA driver reports.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from console.model import RECENT_XID_S, Gpu
from console.sources import procfs

LIBRARY = "libnvidia-ml.so.1"
KERNEL_GPUS = "proc/driver/nvidia/gpus"
SILENT_S = 5.0
RETRY_S, LONGEST_RETRY_S = 5.0, 60.0
"""The first and the longest wait before NVML is initialised again; a failure doubles the wait."""
NO_DRIVER_CODES = (9, 12)
"""NVML_ERROR_DRIVER_NOT_LOADED and _LIBRARY_NOT_FOUND."""
MIB = 1 << 20
UNSUPPORTED_CODES = (3, 13)
"""NVML_ERROR_NOT_SUPPORTED and _FUNCTION_NOT_FOUND: the GPU or driver lacks the sensor."""
LOST_CODE = 15
"""NVML_ERROR_GPU_IS_LOST."""
GONE_CODES = (LOST_CODE, 6, 28)
"""`LOST_CODE`, and two codes of nvmlDeviceGetHandleByIndex: _NOT_FOUND and _GPU_NOT_FOUND."""
THROTTLES = {0x08: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal",
             0x80: "power brake"}  # fmt: skip
"""Bits of nvmlDeviceGetCurrentClocksThrottleReasons that show a protection of the GPU."""
DEVICE_FILE = re.compile(r"/dev/nvidia([0-9]{1,4})")
KEPT = 8
WAIT_MS = 1
TIMEOUT_CODE = 10
"""NVML_ERROR_TIMEOUT: no event is pending."""


def code_of(error: BaseException) -> int | None:
    """Returns the code of an NVMLError, or None for an error without an int `value`."""
    code = getattr(error, "value", None)
    return code if isinstance(code, int) else None


def words_of(error: BaseException) -> str:
    """Returns NVML's sentence for an error, or the name and text of another exception."""
    if code_of(error) is None:
        return f"{type(error).__name__}: {error}"
    return str(error)


def opened_by(pid: int, proc: str = "/proc") -> frozenset[int] | None:
    """Returns N for each file /dev/nvidiaN that a process has open, or None if not available.

    CUDA opens the files of all GPUs that it sees. So an open file does not show that the GPU is in
    use. The device file of WSL has the number -1. At most `procfs.MAX_DESCRIPTORS` open files are
    read. The answer is not available if none can be read, or if this limit is reached without a
    GPU. The driver is not called.
    """
    links = procfs.open_links(pid, proc).values()
    found = {int(file[1]) for link in links if (file := DEVICE_FILE.fullmatch(link))}
    found |= {-1 for link in links if link == "/dev/dxg"}
    return frozenset(found) if found or 0 < len(links) < procfs.MAX_DESCRIPTORS else None


@dataclass(frozen=True, slots=True)
class Xid:
    """The Xids of one GPU: the newest numbers, the total count, and the time of the last Xid."""

    numbers: tuple[int, ...]
    count: int
    ts: float


def xid_words(numbers: tuple[int, ...], count: int) -> str:
    """Returns the Xids as text, for example "Xid 79" or "Xid 31, 79, 3 times"."""
    text = f"Xid {', '.join(str(number) for number in dict.fromkeys(numbers))}"
    return text if count < 2 else f"{text}, {count} times"


class XidLog:
    """The Xids of all GPUs by index; `found` is replaced at each change, never edited.

    Each GPU has an event set of its own, so that a lost GPU does not end the events of the others.
    The event set of one GPU may have events of another GPU; the handle of an event names its GPU.
    """

    def __init__(self, nvml: Any):
        self.found: Mapping[int, Xid] = {}
        self._nvml, self._lock = nvml, threading.Lock()
        self._addresses: dict[int | None, int] = {}
        """The GPU of each handle that was ever opened, because an event may come late."""

    def listen(self, index: int, handle: Any) -> Any:
        """Returns a new event set, or None after an error; some GPUs report no Xids."""
        nvml, self._addresses[_address(handle)] = self._nvml, index
        with contextlib.suppress(nvml.NVMLError):
            events = nvml.nvmlEventSetCreate()
            try:
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
                return events
            except nvml.NVMLError:
                nvml.nvmlEventSetFree(events)
        return None

    def read(self, events: Any) -> None:
        """Reads the pending events of a set. Raises NVMLError, for example if the GPU is lost."""
        while True:
            try:
                event = self._nvml.nvmlEventSetWait_v2(events, WAIT_MS)
            except self._nvml.NVMLError as error:
                if code_of(error) == TIMEOUT_CODE:
                    return
                raise
            index, number = self._addresses.get(_address(event.device)), int(event.eventData)
            if index is not None:
                with self._lock:
                    old = self.found.get(index, Xid((), 0, 0.0))
                    new = Xid((*old.numbers, number)[-KEPT:], old.count + 1, time.time())
                    self.found = {**self.found, index: new}


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


@dataclass(slots=True)
class Device:
    """One GPU. Its constant properties remain known after the GPU is lost."""

    nvml: Any
    index: int
    xids: XidLog | None = None
    """None if the Xids are not to be read."""
    _handle: Any = None
    _events: Any = None
    _known: Gpu = field(init=False)
    """A row that has only the constant properties."""
    _refused: dict[str, str] = field(default_factory=dict)
    """The sensors whose last read failed, with the reason; unsupported sensors are left out."""

    def __post_init__(self) -> None:
        self._known = Gpu(self.index, "GPU", "error")

    def read(self) -> Gpu:
        """Returns a row, even after an error; the next read then opens the handle again."""
        try:
            if self._handle is None:
                self._open()
            self._read_events()
            gpu = self._measure()
        except Exception as error:
            gpu = self._failed(error)
        if gpu.state != "ok":
            self._handle = None
        return gpu

    def _read_events(self) -> None:
        """Reads the Xids. After an error, the next read makes a new event set."""
        if self.xids is None:
            return
        events = self._events or self.xids.listen(self.index, self._handle)
        self._events = None
        try:
            if events is not None:
                self.xids.read(events)
        except self.nvml.NVMLError as error:
            if code_of(error) == LOST_CODE:
                raise
            with contextlib.suppress(self.nvml.NVMLError):
                self.nvml.nvmlEventSetFree(events)
            return
        self._events = events

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
            why=self._missing(),
            throttle=", ".join(word for bit, word in THROTTLES.items() if (reasons or 0) & bit),
        )  # fmt: skip

    def _missing(self) -> str:
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


@dataclass(frozen=True, slots=True)
class Reading:
    """The newest row of one GPU and its time (monotonic s; inf if NVML is not initialised)."""

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
    """Returns the number of GPUs in the kernel driver's list, or None if the list cannot be read.

    In a container or a batch job NVML may count fewer GPUs: it skips GPUs that it may not open.
    """
    try:
        return sum(1 for _ in (root / KERNEL_GPUS).iterdir())
    except OSError:
        return None


class Nvml:
    """Samples the GPUs that NVML finds; `rows` never waits. `root` is the parent of /proc.

    NVML is not shut down. While a process uses NVML, the driver cannot be unloaded.
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
        """Returns the newest row of each GPU; if a GPU does not answer, `why` says for how long.

        If no row is known, and the initialisation of NVML does not end, returns one error row.
        """
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

        The GPUs in the kernel driver's list are expected. If this list is empty or missing, one GPU
        is expected, but none if the error says that there is no driver.
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
