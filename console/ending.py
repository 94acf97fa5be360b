"""The end of one rank: its exit, the error that it named, and the sentence that tells of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from console import error_patterns
from trainers.contract import jsonl

NAMED_CODES: Mapping[int, str] = {
    10: "non-finite loss or gradients", 11: "out of memory", 12: "data", 13: "configuration",
    14: "a collective failed", 15: "checkpoint",
}  # fmt: skip
COLLECTIVE = 14
NATIVE = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL")
SIGNAL_WORDS: Mapping[str, str] = {
    "SIGXCPU": "its limit of CPU time is used up, see ulimit -t",
    "SIGXFSZ": "its limit of file size is reached, see ulimit -f",
    "SIGTERM": "nobody here sent it",
}
"""The likely cause of a signal that ended a rank."""


@dataclass(frozen=True, slots=True)
class End:
    """How one rank ended, and the error it named ("" for none)."""

    rank: int
    code: int | None
    signal: str | None
    step: int
    error: str = ""
    log: str = ""
    """The last exception in its log, for a rank that named no error."""
    culled: bool = False
    """Killed by the supervisor because it outlived another rank's failure."""
    at: str = ""
    """Where the exception in its log was raised: "train.py:41"."""
    fatal_at: str = ""
    """Where it was when it crashed, as faulthandler wrote: "forward (model.py:88)"."""
    said: str = ""
    """Its last record."""
    ts: float | None = None
    seen: bool = True
    """The kernel reported the exit code or signal; False: only a record or a log claims it."""
    doubt: str = ""
    """The evidence against the good end that its last record announces, "" for none."""

    @property
    def unknown(self) -> bool:
        """Ended, and neither the kernel nor a record of its own tells how."""
        return self.code is None and self.signal is None and not self.error

    @property
    def words(self) -> str:
        """The error it named, else the last one in its log."""
        return self.error or self.log

    @property
    def bad(self) -> bool:
        return bool(self.signal) or self.code not in (0, None) or bool(self.error)

    @property
    def secondary(self) -> bool:
        """Ended because another rank did: told to by torchrun, or its peer was gone."""
        return self.culled or self.signal == "SIGTERM" or self.lost_peer

    @property
    def lost_peer(self) -> bool:
        """Failed in a collective; NCCL's watchdog ends the process by SIGABRT."""
        found = self.code == COLLECTIVE or error_patterns.lost_peer(f"{self.error} {self.log}")
        return found and self.signal in (None, "SIGABRT")

    @property
    def place(self) -> str:
        """The place in the code of the error in `words`, "" where the log has another error."""
        same = self.error[:100] in self.log or (bool(self.log) and self.log[:100] in self.error)
        return self.at if same else ""

    def sentence(self) -> str:
        """Says how it ended; for the rank to blame."""
        who = f"rank {self.rank}"
        at = f" at step {self.step}" if self.step else ""
        if self.signal in NATIVE:
            inside = f", in {self.fatal_at}" if self.fatal_at else ""
            thrown = f": {self.log}" if self.signal == "SIGABRT" and self.log else ""
            return f"{who} crashed in native code ({self.signal}){at}{inside}{thrown}"
        if self.signal:
            known = SIGNAL_WORDS.get(self.signal, "")
            return f"{who} was killed by {self.signal}{at}" + (f" ({known})" if known else "")
        if self.unknown:
            said = f"its last record says {self.said}" if self.said else "it left no record"
            return f"{who} ended{at}, its exit code is not known; {said}"
        both = f"{self.error} {self.log}"
        text = both if self.code == error_patterns.OUT_OF_MEMORY else self.words
        memory = error_patterns.out_of_memory(text, self.code)
        named = NAMED_CODES.get(self.code or 0, "")
        reason = memory or self.words or named or self._no_reason()
        place = f" ({self.place})" if self.place else ""
        code = f" (exit {self.code})" if self.code else ""
        return f"{who}: {reason}{place}{at}{code}"

    def _no_reason(self) -> str:
        said = f" its last record says {self.said}," if self.said else ""
        return f"no reason given,{said} see logs of rank {self.rank}"

    def signature(self) -> str:
        """Returns what stays the same when it ends in the same way again; "" if that tells nothing.

        Who was killed from outside or lost its peer is not the cause of its end.
        """
        words = error_patterns.same_words(self.words)
        if self.signal in NATIVE:
            return "" if self.lost_peer else f"signal:{self.signal}:{words}:{self.fatal_at}"
        if self.signal == "SIGXCPU":
            return f"signal:{self.signal}"
        if self.signal or self.secondary or self.unknown or not self.seen:
            return ""
        return f"exit:{self.code}:{words}:{self.place}" if words else ""


def error_of(record: Mapping[str, Any]) -> str:
    """Returns what a heartbeat of `error` says, "" for other records."""
    if record.get("msg") != "error":
        return ""
    words = (jsonl.text(record, key) for key in ("error", "reason", "why", "text"))
    return next(filter(None, words), "an error without words")[:400]
