"""GPUs through pynvml: one thread a device, so that a device that hangs ages alone.

Without NVML's library one thread looks for it, at most once a minute, and nothing else happens.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from console.model import RECENT_XID_S, Gpu
from console.sources.gpu import Device, code_of, words_of
from console.sources.xid import UNNAMED, XidLog
from trainers.contract.errors import ContractError

ANSWER_S = 10.0
"""A driver that has not counted its GPUs after this time is said to hang."""
COUNT = """
import pynvml
try:
    pynvml.nvmlInit()
    print(pynvml.nvmlDeviceGetCount())
except pynvml.NVMLError as error:
    print(0 if error.value in (9, 12) else f"NVML cannot be initialised ({error})")
"""
LIBRARY = "libnvidia-ml.so.1"
KERNEL_GPUS = "proc/driver/nvidia/gpus"
SILENT_S = 5.0
KILLED_S = 0.2
RETRY_S, LONGEST_RETRY_S = 5.0, 60.0
"""Time between two attempts to initialise NVML; it doubles."""
NO_DRIVER_CODES = (9, 12)
"""NVML_ERROR_DRIVER_NOT_LOADED and _LIBRARY_NOT_FOUND."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The newest answer of one device, and when (monotonic seconds) it came."""

    gpu: Gpu
    at: float


def has_library() -> bool:
    """Says whether NVML can be loaded here; the driver is not called."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


def kernel_count(root: Path = Path("/")) -> int | None:
    """Returns how many GPUs the kernel's NVIDIA driver lists, None where it has no list.

    In a container or a batch job NVML may count fewer: it leaves out those that it may not open.
    """
    try:
        return sum(1 for _ in (root / KERNEL_GPUS).iterdir())
    except OSError:
        return None


def count(limit_s: float = ANSWER_S) -> int:
    """Returns how many GPUs NVML counts, 0 without a driver.

    A child asks: a call that hangs in the driver cannot be ended, not even by KILL, and a process
    with such a thread does not end either. Raises TimeoutError, or ContractError with the reason.
    """
    if not has_library():
        return 0
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", COUNT], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True, errors="replace",
    )  # fmt: skip
    try:
        answer, _ = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(KILLED_S)
        raise TimeoutError(f"the NVIDIA driver does not answer within {limit_s:g} s") from None
    answer = answer.strip()
    if answer.isdecimal():
        return int(answer)
    raise ContractError(answer or f"the process that asks NVML exited with {child.returncode}")


class Nvml:
    """Samples all GPUs of this host; `rows` never waits. `root` holds the kernel's /proc."""

    def __init__(
        self, period_s: float = 1.0, root: Path = Path("/"), retry_s: float = RETRY_S
    ) -> None:
        self._period_s, self._root, self._retry_s = period_s, root, retry_s
        self._readings: dict[int, Reading] = {}
        self._followed: set[int] = set()
        self._xids: XidLog | None = None
        self._initialising_at: float | None = None
        self._session = 0
        """Number of the last initialisation that succeeded, 0 while NVML has to be initialised."""
        self._sessions = 0
        self._stop, self._lapsed = threading.Event(), threading.Event()

    def start(self) -> None:
        """Starts the thread that looks for devices; the first rows come a little later."""
        self._spawn("nvml", self._discover)

    def stop(self) -> None:
        self._stop.set()
        self._lapsed.set()

    def rows(self) -> list[Gpu]:
        """Returns each GPU's newest row; one that NVML gives no answer for says for how long."""
        now = time.monotonic()
        rows = []
        for index, reading in sorted(dict(self._readings).items()):
            silent, gpu = now - reading.at, reading.gpu
            if silent > SILENT_S:
                gpu = Gpu(
                    index, gpu.name, "error", power_limit_w=gpu.power_limit_w,
                    mem_total_mib=gpu.mem_total_mib, uuid=gpu.uuid, why=_silence(silent),
                )  # fmt: skip
            rows.append(self._with_xids(gpu))
        begun = self._initialising_at
        if not rows and begun is not None and now - begun > SILENT_S:
            rows.append(Gpu(0, "GPU", "error", why=_silence(now - begun)))
        if self._xids is not None and UNNAMED in self._xids.found:
            rows.append(self._with_xids(Gpu(UNNAMED, "a GPU that NVML does not name", "ok")))
        return rows

    def _with_xids(self, gpu: Gpu) -> Gpu:
        xid = self._xids.found.get(gpu.index) if self._xids is not None else None
        if xid is None:
            return gpu
        recent = xid.words() if time.time() - xid.ts < RECENT_XID_S else ""
        return replace(
            gpu, xid=xid.numbers[-1], xids=xid.numbers, xid_count=xid.count, xid_ts=xid.ts,
            why=", ".join(part for part in (gpu.why, recent) if part),
        )  # fmt: skip

    def _spawn(self, name: str, work: Callable[..., None], *args: Any) -> None:
        threading.Thread(target=work, args=args, name=name, daemon=True).start()

    # --- initialising --------------------------------------------------------------------------

    def _discover(self) -> None:
        """Initialises NVML, again after a failure and after the driver was reloaded."""
        delay_s = self._retry_s
        while not self._stop.is_set():
            self._lapsed.clear()
            if has_library() and self._initialise():
                delay_s = self._retry_s
                self._lapsed.wait()
            self._stop.wait(delay_s)
            delay_s = min(2 * delay_s, LONGEST_RETRY_S)

    def _initialise(self) -> bool:
        """Initialises NVML and starts a thread for each device that has none."""
        import pynvml

        self._session, self._initialising_at = 0, time.monotonic()
        listed = kernel_count(self._root) or 0
        for index in range(listed):
            empty = Gpu(index, "GPU", "error", why="NVML has not answered yet")
            self._readings.setdefault(index, Reading(empty, time.monotonic()))
        try:
            with self._xids.paused() if self._xids is not None else contextlib.nullcontext():
                if self._sessions:
                    _shut_down(pynvml)
                pynvml.nvmlInit()
                count = pynvml.nvmlDeviceGetCount()
        except Exception as error:
            self._fail(error, listed)
            return False
        finally:
            self._initialising_at = None
        self._drop_rows(count)
        self._begin_session(pynvml, count)
        return count > 0

    def _begin_session(self, nvml: Any, count: int) -> None:
        self._sessions += 1
        if self._xids is None:
            self._xids = XidLog(nvml, self._stop)
            self._spawn("nvml-xid", self._xids.follow)
        self._session = self._sessions
        for index in range(count):
            if index not in self._followed:
                self._followed.add(index)
                empty = Gpu(index, "GPU", "error", why="NVML has not answered yet")
                self._readings[index] = Reading(empty, time.monotonic())
                self._spawn(f"nvml-{index}", self._follow, nvml, index)

    def _fail(self, error: Exception, listed: int) -> None:
        """Gives each GPU that there should be a row with the reason.

        A library without a driver is no GPU; any other failure means that there is at least one.
        """
        least = 0 if code_of(error) in NO_DRIVER_CODES else 1
        why = f"NVML cannot be initialised ({words_of(error)}); trying again"
        self._drop_rows(max(listed, least))
        for index in range(max(listed, least, len(self._followed))):
            held = self._readings.get(index)
            gpu = held.gpu if held is not None else Gpu(index, "GPU", "error")
            row = Gpu(index, gpu.name, "error", why=why, uuid=gpu.uuid)
            self._readings[index] = Reading(row, math.inf)

    def _drop_rows(self, count: int) -> None:
        """Removes the rows beyond `count` that no thread follows."""
        for index in [i for i in self._readings if i >= count and i not in self._followed]:
            del self._readings[index]

    # --- devices -------------------------------------------------------------------------------

    def _follow(self, nvml: Any, index: int) -> None:
        """Reads one device until `stop`; the only thread that ever asks for it."""
        assert self._xids is not None
        device = Device(nvml, index, self._xids)
        while not self._stop.is_set():
            begun, session = time.monotonic(), self._session
            if session:
                gpu = device.read(session)
                self._readings[index] = Reading(gpu, time.monotonic())
                if device.lapsed and session == self._session:
                    self._session = 0
                    self._lapsed.set()
            self._stop.wait(max(0.05, self._period_s - (time.monotonic() - begun)))


def _silence(seconds: float) -> str:
    return f"NVML has not answered for {seconds:.0f} s"


def _shut_down(nvml: Any) -> None:
    """Ends the last initialisation; a driver that is gone has ended it already."""
    try:
        nvml.nvmlShutdown()
    except nvml.NVMLError:
        return
