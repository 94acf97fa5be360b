"""Describes the end of one rank: its exit, its error, and a sentence on both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from console import error_patterns
from trainers.contract import jsonl

NAMED_CODES: Mapping[int, str] = {
    10: "non-finite loss or gradients", 11: "out of memory", 12: "data error",
    13: "wrong configuration", 14: "a collective failed", 15: "checkpoint error",
}  # fmt: skip
COLLECTIVE = 14
NATIVE = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL")
SIGNAL_WORDS: Mapping[str, str] = {
    "SIGXCPU": "CPU time limit reached, see ulimit -t",
    "SIGXFSZ": "file size limit reached, see ulimit -f",
    "SIGTERM": "not sent by the supervisor",
}
"""The likely cause of a signal that ended a rank."""


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
    observed: bool = True
    """False if the supervisor did not get the exit code or signal from the kernel."""
    doubt: str = ""
    """Why exit code 0 in the exit record is not accepted, or "" if there is no doubt."""
    phase: str = ""
    """The phase in the last pulse or the exit record, or "" if the phase is not known."""

    @property
    def unknown(self) -> bool:
        """True if no exit code, no signal and no error of the rank is known."""
        return self.code is None and self.signal is None and not self.error

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
        """True if a collective failed or a peer was lost, and the signal, if any, is SIGABRT."""
        found = self.code == COLLECTIVE or error_patterns.lost_peer(f"{self.error} {self.log}")
        return found and self.signal in (None, "SIGABRT")

    @property
    def at(self) -> str:
        """The step and phase of the end: " at step 41 in forward", or "" if no step is known."""
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
            known = SIGNAL_WORDS.get(self.signal, "")
            return f"{who} was killed by {self.signal}{at}" + (f" ({known})" if known else "")
        if self.unknown:
            last = f"its last record says {self.last_record}" if self.last_record else "no record"
            return f"{who} ended{at}; exit code not available; {last}"
        both = f"{self.error} {self.log}"
        text = both if self.code == error_patterns.OUT_OF_MEMORY else self.error_words
        memory = error_patterns.out_of_memory(text, self.code)
        named = NAMED_CODES.get(self.code or 0, "")
        reason = memory or self.error_words or named or self._no_reason()
        place = f" ({self.place})" if self.place else ""
        code = f" (code {self.code})" if self.code else ""
        return f"{who}: {reason}{place}{at}{code}"

    def _no_reason(self) -> str:
        last = f" its last record says {self.last_record}," if self.last_record else ""
        return f"no reason recorded,{last} see the log of rank {self.rank}"

    def signature(self) -> str:
        """Returns a text that identifies the cause of this end, or "".

        The text is "" if the cause is not known or probably not in this rank.
        """
        words = error_patterns.without_numbers(self.error_words)
        if self.signal in NATIVE:
            return "" if self.lost_peer else f"signal:{self.signal}:{words}:{self.crashed_in}"
        if self.signal == "SIGXCPU":
            return f"signal:{self.signal}"
        if self.signal or self.secondary or self.unknown or not self.observed:
            return ""
        return f"exit:{self.code}:{words}:{self.place}" if words else ""


def error_of(record: Mapping[str, Any]) -> str:
    """Returns the text of an `error` record, or "" for other records."""
    if record.get("msg") != "error":
        return ""
    words = (jsonl.text(record, key) for key in ("error", "reason", "why", "text"))
    return next(filter(None, words), "an error without a text")[:400]
