"""Recognises known errors by their text, and OOM kills by the counters of the kernel.

The known errors are a lost peer, out of memory, and errors that a restart usually cannot fix.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

LOST_PEER_TEXTS: Mapping[str, str] = {
    "onnection closed by peer": "gloo/transport/tcp/pair.cc; NCCL misc/socket.cc",
    "onnection reset by peer": "gloo/transport/tcp/pair.cc, from errno ECONNRESET",
    "onnection closed by remote peer": "NCCL misc/socket.cc",
    "onnection closed by localRank": "NCCL proxy.cc, service thread",
    "pplication timeout caused pair closure": "gloo/transport/tcp/unbound_buffer.cc",
    "ms for recv operation to complete": "gloo/transport/tcp/unbound_buffer.cc",
    "ms for send operation to complete": "gloo/transport/tcp/unbound_buffer.cc",
    "remote process exited or there was a network error": "NCCL src/init.cc, ncclGetErrorString",
    "ncclRemoteError": "torch/csrc/distributed/c10d/NCCLUtils.cpp",
    "NCCL communicator was aborted": "torch/csrc/distributed/c10d/NCCLUtils.hpp",
    "Watchdog caught collective operation timeout": "torch ProcessGroupNCCL.cpp",
    "Connection was likely closed. Did the remote server": "torch c10d/Utils.hpp, TCPStore",
    "another rank has exited": "trainers/failures.py",
}  # fmt: skip
"""Texts of a rank that lost its peer, with the source file that writes each text."""
_BROKEN_PIPE = re.compile(r"(gloo|NCCL|c10d|TCPStore|SocketImpl|sendBytes).*Broken pipe")
"""EPIPE means a lost peer only in a collective or the store; a write to stdout raises EPIPE too."""

_SIZE = r"[\d.]+ ?(?:[KMGT]?i?B|bytes)"
_REQUESTED = re.compile(rf"[Tt]ried to allocate ({_SIZE})")
_FREE = re.compile(
    rf"GPU (?P<gpu>\d+) has a total capacity of (?P<total>{_SIZE}) of which "
    rf"(?P<free>{_SIZE}) is free"
)
"""A text that c10/cuda/CUDACachingAllocator.cpp writes."""
_GPU_MEMORY = re.compile(
    r"OutOfMemoryError|(?:CUDA|HIP)(?: driver)?(?: error:)? out of memory|out of GPU memory"
)
_HOST_MEMORY = re.compile(
    r"\bMemoryError\b|DefaultCPUAllocator: can't allocate memory|out of host memory"
)
GPU_ADVICE = "lower train.batch_size or data.seq_len, or set train.recompute to all"
HOST_ADVICE = "lower train.batch_size or data.seq_len"

OUT_OF_MEMORY = 11
PERMANENT_CODES: Mapping[int, str] = {13: "trainers/failures.py: configuration"}
_PERMANENT = re.compile(
    r"(?:[\w.]+\.)?(?:UsageError|RefusedError|ModuleNotFoundError|ImportError|SyntaxError|"
    r"IndentationError|TabError)(?::|$)"
)
"""Exceptions that a program usually raises again at each start."""

_NUMBER = r"[-+]?\d+(?:[.,:]\d+)*(?:[eE][-+]?\d+)?"
_HEX = r"0x[0-9a-fA-F]+|\b(?=[a-fA-F-]*\d)[0-9a-fA-F]{8}[0-9a-fA-F-]*\b"
_VARYING = (
    (re.compile(r"/tmp\S*"), "/tmp"),
    (re.compile(rf"{_NUMBER}(?!\w)|{_HEX}|{_NUMBER}"), "#"),
    (re.compile(r"# ?(?:[KMGT]?i?B|bytes)\b"), "#B"),
    (re.compile(r"\s+"), " "),
)


def lost_peer(text: str) -> bool:
    """Returns whether an error means that another rank exited or does not answer."""
    return any(sign in text for sign in LOST_PEER_TEXTS) or bool(_BROKEN_PIPE.search(text))


def out_of_memory(text: str, code: int | None = None) -> str:
    """Returns a sentence on an out-of-memory error, with known sizes and advice, or "".

    Exit code 11 means out of memory, whatever the text.
    """
    if _HOST_MEMORY.search(text) and not re.search(r"CUDA|HIP|GPU", text):
        return f"out of host memory{_requested(text)}; {HOST_ADVICE}"
    if not _GPU_MEMORY.search(text):
        return f"out of memory{_requested(text)}; {GPU_ADVICE}" if code == OUT_OF_MEMORY else ""
    sizes = _FREE.search(text)
    free = f", {sizes['free']} of {sizes['total']} free on GPU {sizes['gpu']}" if sizes else ""
    return f"out of GPU memory{_requested(text)}{free}; {GPU_ADVICE}"


def _requested(text: str) -> str:
    found = _REQUESTED.search(text)
    return f": asked for {found[1]}" if found else ""


def is_permanent(text: str) -> bool:
    """Returns whether the program would probably raise this exception again at each start."""
    return bool(_PERMANENT.match(text))


def without_numbers(text: str) -> str:
    """Returns the start of an error; placeholders replace numbers, addresses, sizes, /tmp paths."""
    for pattern, instead in _VARYING:
        text = pattern.sub(instead, text)
    return text.strip()[:200]


@dataclass(frozen=True, slots=True)
class OomCounts:
    """Numbers of out-of-memory kills so far: in a cgroup with its children, and on the host.

    A number that is not available is None.
    """

    cgroup: int | None = None
    host: int | None = None
    path: str = ""
    """The file that contains the number `cgroup`."""


@dataclass(frozen=True, slots=True)
class OomEvidence:
    """The numbers of out-of-memory kills before and after an attempt."""

    before: OomCounts
    after: OomCounts

    @property
    def here(self) -> bool:
        """True if the kernel killed a process in the counted cgroup, because memory ran out."""
        return _rose(self.before.cgroup, self.after.cgroup)

    @property
    def perhaps(self) -> bool:
        """True if no count of the cgroup is available, and the count of the host rose."""
        return self.after.cgroup is None and _rose(self.before.host, self.after.host)

    def words(self) -> str:
        """Returns the counter to which `here` or `perhaps` refers: "cgroup oom_kill 0 → 1"."""
        if self.here:
            return f"cgroup oom_kill {self.before.cgroup} → {self.after.cgroup}"
        return f"host-wide oom_kill {self.before.host} → {self.after.host}"


def _rose(before: int | None, after: int | None) -> bool:
    return before is not None and after is not None and after > before
