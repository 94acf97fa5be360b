"""Signs in texts and counters of a lost peer, of memory, and of errors that no restart cures."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

PEER_SIGNS: Mapping[str, str] = {
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
    "another rank is gone": "trainers/failures.py",
}  # fmt: skip
"""Texts of a rank whose peer is gone or does not come, with the file that writes each."""
_BROKEN_PIPE = re.compile(r"(gloo|NCCL|c10d|TCPStore|SocketImpl|sendBytes).*Broken pipe")
"""EPIPE is of a peer only where a collective or the store says so: stdout has it too."""

_SIZE = r"[\d.]+ ?(?:[KMGT]?i?B|bytes)"
_ASKED = re.compile(rf"[Tt]ried to allocate ({_SIZE})")
_FREE = re.compile(
    rf"GPU (?P<gpu>\d+) has a total capacity of (?P<total>{_SIZE}) of which "
    rf"(?P<free>{_SIZE}) is free"
)
"""c10/cuda/CUDACachingAllocator.cpp"""
_GPU_MEMORY = re.compile(
    r"OutOfMemoryError|(?:CUDA|HIP)(?: driver)?(?: error:)? out of memory|out of GPU memory"
)
_HOST_MEMORY = re.compile(
    r"\bMemoryError\b|DefaultCPUAllocator: can't allocate memory|out of host memory"
)
GPU_ADVICE = "lower train.batch_size or set train.recompute to all"
HOST_ADVICE = "lower train.batch_size or data.seq_len"

OUT_OF_MEMORY = 11
HOPELESS_CODES: Mapping[int, str] = {13: "trainers/failures.py: configuration"}
_HOPELESS = re.compile(
    r"(?:[\w.]+\.)?(?:UsageError|RefusedError|ModuleNotFoundError|ImportError|SyntaxError|"
    r"IndentationError|TabError)(?::|$)"
)
"""Exceptions that come again however often the same program is started."""

_NUMBER = r"[-+]?\d+(?:[.,:]\d+)*(?:[eE][-+]?\d+)?"
_HEX = r"0x[0-9a-fA-F]+|\b(?=[a-fA-F-]*\d)[0-9a-fA-F]{8}[0-9a-fA-F-]*\b"
_VARYING = (
    (re.compile(r"/tmp\S*"), "/tmp"),
    (re.compile(rf"{_NUMBER}(?!\w)|{_HEX}|{_NUMBER}"), "#"),
    (re.compile(r"# ?(?:[KMGT]?i?B|bytes)\b"), "#B"),
    (re.compile(r"\s+"), " "),
)


def lost_peer(text: str) -> bool:
    """Says whether an error is what a rank writes that was left alone by another."""
    return any(sign in text for sign in PEER_SIGNS) or bool(_BROKEN_PIPE.search(text))


def out_of_memory(text: str, code: int | None = None) -> str:
    """Returns what was asked for, what was free and what to do; "" for another error.

    An exit code of 11 says that memory ran out, whatever the text.
    """
    if _HOST_MEMORY.search(text) and not re.search(r"CUDA|HIP|GPU", text):
        return f"out of host memory{_asked(text)}; {HOST_ADVICE}"
    if not _GPU_MEMORY.search(text):
        return f"out of memory{_asked(text)}; {GPU_ADVICE}" if code == OUT_OF_MEMORY else ""
    held = _FREE.search(text)
    free = f", {held['free']} of {held['total']} free on GPU {held['gpu']}" if held else ""
    return f"out of GPU memory{_asked(text)}{free}; {GPU_ADVICE}"


def _asked(text: str) -> str:
    found = _ASKED.search(text)
    return f": asked for {found[1]}" if found else ""


def hopeless(text: str) -> bool:
    """Says whether an exception comes again however often the program is started."""
    return bool(_HOPELESS.match(text))


def same_words(text: str) -> str:
    """Returns an error without what differs from time to time: numbers, addresses, sizes."""
    for pattern, instead in _VARYING:
        text = pattern.sub(instead, text)
    return text.strip()[:200]


@dataclass(frozen=True, slots=True)
class OomCounts:
    """Out-of-memory kills since boot: of one cgroup and those below it, and of the whole host.

    None for not known.
    """

    cgroup: int | None = None
    host: int | None = None
    path: str = ""
    """The file that `cgroup` was read from."""


@dataclass(frozen=True, slots=True)
class OomEvidence:
    """The counters from before a run and from after it."""

    before: OomCounts
    after: OomCounts

    @property
    def here(self) -> bool:
        """Says whether the kernel killed in the cgroup of the run."""
        return _rose(self.before.cgroup, self.after.cgroup)

    @property
    def elsewhere(self) -> bool:
        """Says whether it killed on this host, but none that the cgroup of the run counts."""
        known = self.after.cgroup is not None
        return known and not self.here and _rose(self.before.host, self.after.host)

    @property
    def perhaps(self) -> bool:
        """Says whether it killed on this host and no cgroup tells whom."""
        return self.after.cgroup is None and _rose(self.before.host, self.after.host)

    def words(self) -> str:
        """Returns the counter that rose: "cgroup oom_kill 0 → 1"."""
        if self.here:
            return f"cgroup oom_kill {self.before.cgroup} → {self.after.cgroup}"
        return f"host-wide oom_kill {self.before.host} → {self.after.host}"


def _rose(before: int | None, after: int | None) -> bool:
    return before is not None and after is not None and after > before
