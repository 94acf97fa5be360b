"""Describes the end of one rank: its exit, its error, and the out-of-memory kills by the kernel.

Some errors are recognised by their text or exit code: a lost peer, out of memory, and errors that
a restart usually cannot fix.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainers.contract import jsonl

NAMED_CODES: Mapping[int, str] = {
    10: "non-finite loss or gradients", 11: "out of memory", 12: "data error",
    13: "wrong configuration", 14: "a collective failed", 15: "checkpoint error",
}  # fmt: skip
OUT_OF_MEMORY, CONFIGURATION, COLLECTIVE = 11, 13, 14
NO_CODE = "its exit record has no exit code"
NATIVE = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL")

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
}  # fmt: skip
"""Texts in the errors of a rank that lost its peer, each with the source file that writes it."""
_BROKEN_PIPE = re.compile(r"(gloo|NCCL|c10d|TCPStore|SocketImpl|sendBytes).*Broken pipe")
"""EPIPE means a lost peer only in a collective or the store; a write to stdout raises EPIPE too."""

_REQUESTED = re.compile(r"[Tt]ried to allocate ([\d.]+ ?(?:[KMGT]?i?B|bytes))")
_GPU_MEMORY = re.compile(
    r"OutOfMemoryError|(?:CUDA|HIP)(?: driver)?(?: error:)? out of memory|out of GPU memory"
)
_HOST_MEMORY = re.compile(
    r"\bMemoryError\b|DefaultCPUAllocator: can't allocate memory|out of host memory"
)
OOM_ADVICE = "lower train.batch_size or data.seq_len, or set train.recompute to all"

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
    """Returns whether an error suggests that another rank exited or does not answer."""
    return any(sign in text for sign in LOST_PEER_TEXTS) or bool(_BROKEN_PIPE.search(text))


def out_of_memory(text: str, code: int | None = None) -> str:
    """Returns a text on an out-of-memory error, or "" for another error.

    `code` is an exit code of our trainers: 11 means out of memory, whatever the text.
    """
    is_host = _HOST_MEMORY.search(text) and not re.search(r"CUDA|HIP|GPU", text)
    where = "host " if is_host else "GPU " if _GPU_MEMORY.search(text) else ""
    if not where and code != OUT_OF_MEMORY:
        return ""
    found = _REQUESTED.search(text)
    requested = f": asked for {found[1]}" if found else ""
    return f"out of {where}memory{requested}"


def is_permanent(text: str) -> bool:
    """Returns whether the program would probably raise this exception again at each start."""
    return bool(_PERMANENT.match(text))


def without_numbers(text: str) -> str:
    """Returns the start of an error; placeholders replace numbers, addresses, sizes, /tmp paths."""
    for pattern, instead in _VARYING:
        text = pattern.sub(instead, text)
    return text.strip()[:200]


@dataclass(frozen=True, slots=True)
class RankEnd:
    """The end of one rank. `error` is the error in its records, or "" if there is none."""

    rank: int
    code: int | None
    signal: str | None
    step: int
    error: str = ""
    log: str = ""
    """The exception that probably ended the rank, from its log or torchrun's log, or ""."""
    killed_after_failure: bool = False
    """True if a supervisor killed the rank after a failure, or recorded its end as secondary."""
    raised_at: str = ""
    """The place of the exception in `log`, for example "train.py:41"."""
    crashed_in: str = ""
    """The place of a native crash according to faulthandler: "forward (model.py:88)"."""
    last_record: str = ""
    """The kind and the reason of the last record of the rank."""
    ts: float | None = None
    late: bool = False
    """True if the time of the end is not known; the order of two such ends is then not known."""
    observed: bool = True
    """False if the supervisor did not get the exit code or signal from the kernel."""
    doubt: str = ""
    """Why the exit code in the exit record is not accepted, or "" if there is no doubt."""
    phase: str = ""
    """The phase in the last pulse or the exit record, or "" if the phase is not known."""
    is_ours: bool = True
    """False for a rank of a foreign program."""

    @property
    def unknown(self) -> bool:
        """True if no exit code, no signal and no error of the rank is known."""
        return self.code is None and self.signal is None and not self.error

    @property
    def known_code(self) -> int | None:
        """The exit code, or None for a foreign program, whose codes have no known meaning."""
        return self.code if self.is_ours else None

    @property
    def error_words(self) -> str:
        """The error in the rank's record, or else the exception in `log`."""
        return self.error or self.log

    @property
    def failed(self) -> bool:
        return bool(self.signal) or self.code not in (0, None) or bool(self.error)

    @property
    def secondary(self) -> bool:
        """True if another rank probably caused the end: this rank was terminated or lost a peer."""
        return self.killed_after_failure or self.signal == "SIGTERM" or self.lost_peer

    @property
    def lost_peer(self) -> bool:
        """True if a collective failed or a peer was lost, and no signal except SIGABRT is known."""
        found = self.known_code == COLLECTIVE or lost_peer(f"{self.error} {self.log}")
        return found and self.signal in (None, "SIGABRT")

    @property
    def at(self) -> str:
        """The step and the phase of the end: " at step 41 in forward", " at step 41", or ""."""
        inside = f" in {self.phase}" if self.phase else ""
        return f" at step {self.step}{inside}" if self.step else ""

    @property
    def place(self) -> str:
        """The place of the error in the code, or "" if the log has no place of this error."""
        same = self.error[:100] in self.log or (bool(self.log) and self.log[:100] in self.error)
        return self.raised_at if same else ""

    def sentence(self) -> str:
        """Returns a sentence on how the rank ended."""
        who, at = f"rank {self.rank}", self.at
        if self.signal in NATIVE:
            inside = f", in {self.crashed_in}" if self.crashed_in else ""
            thrown = f": {self.log}" if self.signal == "SIGABRT" and self.log else ""
            return f"{who} crashed in native code ({self.signal}){at}{inside}{thrown}"
        if self.signal:
            outside = " (not sent by the supervisor)" if self.signal == "SIGTERM" else ""
            return f"{who} was killed by {self.signal}{at}{outside}"
        if self.unknown:
            last = f"its last record says {self.last_record}" if self.last_record else "no record"
            return f"{who} ended{at}; exit code not available; {last}"
        memory = out_of_memory(self.error_words, self.known_code)
        named = NAMED_CODES.get(self.known_code or 0, "")
        reason = memory or self.error_words or named or self._no_reason()
        place = f" ({self.place})" if self.place else ""
        code = f" (code {self.code})" if self.code else ""
        advice = f"; {OOM_ADVICE}" if memory and self.is_ours else ""
        return f"{who}: {reason}{place}{at}{code}{advice}"

    def _no_reason(self) -> str:
        last = f" its last record says {self.last_record}," if self.last_record else ""
        return f"no reason recorded,{last} see the log of rank {self.rank}"

    def signature(self) -> str:
        """Returns a text that identifies the cause of this end, or "".

        The text is "" if the cause is not known or probably not in this rank.
        """
        words = without_numbers(self.error_words)
        if self.signal in NATIVE:
            return "" if self.lost_peer else f"signal:{self.signal}:{words}:{self.crashed_in}"
        if self.signal or self.secondary or self.unknown or not self.observed:
            return ""
        return f"exit:{self.code}:{words}:{self.place}" if words else ""


def error_of(record: Mapping[str, Any]) -> str:
    """Returns the text of an `error` record, or "" for other records."""
    if record.get("msg") != "error":
        return ""
    words = (jsonl.text(record, key) for key in ("error", "reason", "why", "text"))
    return next(filter(None, words), "an error without a text")[:400]


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
