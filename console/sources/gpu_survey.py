"""Reads the GPUs of this host once; a child process calls NVML, because a call may hang.

KILL does not end a child that hangs in the driver. So after KILL the parent waits only `KILLED_S`.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from console.model import Gpu
from console.sources import json_documents, nvml
from console.sources.nvml import Device, code_of, words_of
from trainers.contract import jsonl
from trainers.contract.errors import ContractError

LIMIT_S = 10.0
"""The default time within which the driver must answer."""
KILLED_S = 0.2
MAX_PIDS = 64
PROGRAM = "import sys; sys.path.insert(0, sys.argv[1]); from console.sources import gpu_survey as s"
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU, the processes that compute on it, and whether MIG divides it."""

    gpu: Gpu
    pids: tuple[int, ...] = ()
    mig: bool = False


@dataclass(frozen=True, slots=True)
class Survey:
    """The GPUs that NVML finds. `cuda` is the newest CUDA that the driver supports, or (0, 0)."""

    cards: tuple[Card, ...] = ()
    driver: str = ""
    cuda: tuple[int, int] = (0, 0)


def survey(limit_s: float = LIMIT_S) -> Survey:
    """Returns the GPUs that NVML finds; a GPU that does not answer has the state "error".

    Without a driver, the survey has no GPUs. Raises TimeoutError if the driver does not answer, and
    ContractError with the reason if the GPUs cannot be read.
    """
    if not nvml.has_library():
        return Survey()
    try:
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", f"{PROGRAM}; s.main()", str(ROOT)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    except OSError as error:
        raise ContractError(f"cannot start a process to read the GPUs: {error.strerror}") from None
    try:
        answer, _ = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired as late:
        answer = late.output or b""
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(KILLED_S)
        if b"\n" not in answer:
            text = f"the NVIDIA driver does not answer within {limit_s:g} s"
            raise TimeoutError(text) from None
    return _parsed(answer, limit_s, child.returncode)


def _parsed(answer: bytes, limit_s: float, code: int | None) -> Survey:
    header, *rows = [jsonl.decode(line) or {} for line in (*answer.split(b"\n"), b"")]
    if not header or "error" in header:
        what = jsonl.text(header, "error") or f"the process that reads the GPUs exited with {code}"
        raise ContractError(what)
    silent = f"NVML has not answered within {limit_s:g} s"
    count = min(jsonl.integer(header, "count") or 0, json_documents.MAX_GPUS)
    cuda = jsonl.integer(header, "cuda") or 0
    cards = {index: Card(Gpu(index, "GPU", "error", why=silent)) for index in range(count)}
    for row in rows:
        for gpu in json_documents.gpus({"gpus": [row.get("gpu")]}):
            cards[gpu.index] = Card(gpu, tuple(jsonl.integers(row, "pids")), row.get("mig") is True)
    numbers = (cuda // 1000, cuda % 1000 // 10)
    return Survey(tuple(cards.values()), jsonl.text(header, "driver"), numbers)


def main() -> None:
    """Prints JSON lines: the header or an error, then a line for each GPU that answers."""
    import pynvml

    lock = threading.Lock()

    def say(record: dict[str, Any]) -> None:
        with lock:
            sys.stdout.write(f"{json.dumps(record)}\n")
            sys.stdout.flush()

    def value(ask: Callable[..., Any], *args: Any) -> Any:
        with contextlib.suppress(pynvml.NVMLError):
            return ask(*args)
        return None

    def read(index: int) -> None:
        gpu = Device(pynvml, index).read()
        handle = value(pynvml.nvmlDeviceGetHandleByIndex, index)
        processes, mig, gaps = (), (0, 0), list[str]()
        try:
            processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        except pynvml.NVMLError as error:
            gaps.append(f"its processes are not available ({words_of(error)})")
        try:
            mig = pynvml.nvmlDeviceGetMigMode(handle)
        except pynvml.NVMLError as error:
            if code_of(error) != pynvml.NVML_ERROR_NOT_SUPPORTED:
                gaps.append(f"its MIG mode is not available ({words_of(error)})")
        why = "; ".join(filter(None, [gpu.why, *gaps])) if gpu.state == "ok" else gpu.why
        known = asdict(gpu) | {"why": why}
        pids = [process.pid for process in processes][:MAX_PIDS]
        say({"gpu": known, "pids": pids, "mig": mig[0] == 1})

    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        why = f"NVML cannot be initialised ({words_of(error)})"
        is_absent = code_of(error) in nvml.NO_DRIVER_CODES
        return say({"count": 0} if is_absent else {"error": why})
    driver = value(pynvml.nvmlSystemGetDriverVersion)
    say({"count": count, "driver": driver, "cuda": value(pynvml.nvmlSystemGetCudaDriverVersion)})
    for index in range(count):
        threading.Thread(target=read, args=(index,)).start()
    return None
