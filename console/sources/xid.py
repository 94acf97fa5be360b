"""Xids: the critical errors that the NVIDIA driver reports, with the GPU that each is about."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KEPT = 8
WAIT_MS = 1000
TIMEOUT_CODE = 10
"""NVML_ERROR_TIMEOUT: no event is waiting."""
RETRY_S = 1.0
TOGETHER_S = 0.2
"""GPUs that are opened within this time come into one event set."""


@dataclass(frozen=True, slots=True)
class Xid:
    """The Xids of one GPU: the newest numbers in their order, how many in all, the last's time."""

    numbers: tuple[int, ...]
    count: int
    ts: float


def said(numbers: tuple[int, ...], count: int) -> str:
    """Returns "Xid 79", with all numbers where they differ and the count where it is not one."""
    text = f"Xid {', '.join(str(number) for number in dict.fromkeys(numbers))}"
    return text if count < 2 else f"{text}, {count} times"


class XidLog:
    """Waits for events of all GPUs in one thread; `found` is replaced, never changed.

    One event set holds all GPUs: each event names its own. NVML fails a wait when one of them is
    lost, so the set is then made again of those that it still takes.
    """

    def __init__(self, nvml: Any, stop: threading.Event):
        self.found: Mapping[int, Xid] = {}
        self._nvml, self._stop = nvml, stop
        self._lock = threading.Lock()
        self._handles: Mapping[int, Any] = {}
        self._opened = threading.Event()
        self._addresses: dict[int | None, int] = {}
        """The GPU behind each handle that was ever opened: an event may come late."""

    def opened(self, index: int, handle: Any) -> None:
        """Adds a GPU, or gives it another handle."""
        address = _address(handle)
        with self._lock:
            if index not in self._handles or _address(self._handles[index]) != address:
                self._handles = {**self._handles, index: handle}
                self._addresses[address] = index
                self._opened.set()

    def lost(self, index: int) -> None:
        """Leaves a GPU out until it is opened again; an event of it that waits is still taken."""
        with self._lock:
            if index in self._handles:
                self._handles = {i: h for i, h in self._handles.items() if i != index}

    def follow(self) -> None:
        """Takes events until `stop`; an error of NVML is only a pause."""
        while not self._stop.is_set():
            try:
                registered = self._take_all()
            except Exception:  # each GPU's own row says what is wrong with it
                registered = 0
            if not registered:
                self._opened.wait(RETRY_S)
                self._opened.clear()
                self._stop.wait(TOGETHER_S)

    def _take_all(self) -> int:
        """Takes events until other handles are known and none waits; returns the number of GPUs.

        After an error the event set is not freed: NVML may have freed it.
        """
        nvml, handles = self._nvml, self._handles
        if not handles:
            return 0
        events = nvml.nvmlEventSetCreate()
        registered = self._register(handles, events)
        while registered and not self._stop.is_set():
            if not self._take_next(events) and handles is not self._handles:
                break
        nvml.nvmlEventSetFree(events)
        return registered

    def _register(self, handles: Mapping[int, Any], events: Any) -> int:
        """Returns how many GPUs can report Xids; some kinds cannot, and a lost one neither."""
        nvml, count = self._nvml, 0
        for handle in handles.values():
            try:
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
                count += 1
            except nvml.NVMLError:
                continue
        return count

    def _take_next(self, events: Any) -> bool:
        """Takes an event as soon as there is one; False when none came in time."""
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
