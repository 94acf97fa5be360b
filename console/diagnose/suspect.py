"""One suspected rank, with the evidence from its process, its stack and its GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from console.diagnose.rank_evidence import (
    ENDED_STATES,
    NAMED_AFTER_S,
    STOPPED_STATES,
    RankEvidence,
)
from console.diagnose.stack_classes import Where, loader_thread
from console.model import Gpu
from console.sources.descriptors import NOTHING, BlockedOn
from console.sources.kernel_evidence import ProcessEvidence, cpu_share
from console.sources.stacks import Stack

LASTING_STATES = (*STOPPED_STATES, *ENDED_STATES)
ABNORMAL_STATES = ("D", *LASTING_STATES)
SPIN_SHARE = 0.5
"""Least share of a core that a main thread uses while it spins in a wait for its GPU. The share is
low because ranks may share cores."""
BUSY_SHARE = 0.7
"""A process that uses at least this share of a core is busy: it computes, or spins in a wait."""
RAN_SHARE = 0.025
"""A main thread that is blocked between the samples uses less than this share of a core."""
ALONE_SHARE = 0.8
"""Least share of a process's CPU time that its main thread uses if no other thread computes."""
GIL_WAITS_PER_S, WATCHER_PER_S, GIL_HELD_PER_S = 4.0, (5.0, 21.0), 120.0
"""Numbers of waits per second. A main thread that runs Python code waits at least
`GIL_WAITS_PER_S` times, because it passes the GIL to the contract's watcher thread. A watcher that
never waits for the GIL is within `WATCHER_PER_S`, because it polls 20 times a second. A watcher
that asks for the GIL every 5 ms and never gets it waits at least `GIL_HELD_PER_S` times."""
OWN_WAITS = ("lock", "pipe", "child", "timer", "disk")
"""Kinds of system calls that count as a wait of the rank itself, not as a wait for its peers."""
FOR_PEERS = ("peers", "device", "none")
"""Classes of stacks that do not blame their rank: a wait for peers or for a GPU, or no stack."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """One rank with the evidence about it: two samples of its process, its stack and its GPU."""

    rank: RankEvidence
    before: ProcessEvidence | None
    after: ProcessEvidence | None
    where: Where
    stacks: Mapping[int, Stack]
    """The stacks of all ranks."""
    gpus: Sequence[Gpu] | None
    """The value of the rank in `Evidence.gpus`, or None if there is none."""
    calls_other: bool = False
    """True if flight records or stacks show that the rank calls another collective than others."""

    @property
    def number(self) -> int:
        return self.rank.rank

    @property
    def has_stack(self) -> bool:
        return self.number in self.stacks

    @property
    def loader(self) -> tuple[str, bool]:
        """The result of `loader_thread` for this rank."""
        return loader_thread(self.number, self.stacks) if self.has_stack else ("", False)

    @property
    def state(self) -> str:
        """The kernel's letter for the state of the process, "gone", or "?" if it is not known."""
        if self.after is None or self.rank.state in ENDED_STATES:
            return self.rank.state
        return self.after.state

    @property
    def main(self) -> BlockedOn:
        """The object that the main thread waits for in its system call."""
        return self.after.main if self.after else NOTHING

    @property
    def in_futex(self) -> bool:
        """True if the main thread waits in a futex (perhaps the GIL's) in the program's code."""
        return self.main.kind == "futex" and self.where.kind == "own"

    @property
    def cannot_run(self) -> bool:
        """True if the process has ended, or if it cannot run and did not change its state.

        A process cannot run if it is stopped, frozen or in state D. Without a second sample, the
        state of the rank counts if its pulse has not changed for `NAMED_AFTER_S`.
        """
        before, after = self.before, self.after
        if self.rank.state in ENDED_STATES:
            return True
        if after is None:
            return self.rank.state in ABNORMAL_STATES and self.rank.unchanged_s > NAMED_AFTER_S
        if not (after.state in ABNORMAL_STATES or after.frozen):
            return False
        return before is None or after.state in (before.state, *ENDED_STATES)

    @property
    def waits(self) -> bool:
        """True if all samples show the same kind of wait, and the kind is one of `OWN_WAITS`."""
        if self.main.kind not in OWN_WAITS:
            return False
        return self.before is None or self.before.main.kind == self.main.kind

    @property
    def runs(self) -> bool:
        """True if the rank uses a core, and its stack shows no wait for peers or for its GPU.

        False without a stack, because CUDA and NCCL also use a core while they wait. False too if
        the main thread is known to wait in a system call other than a futex.
        """
        blocked = self.main.kind not in ("none", "futex")
        return self.where.kind not in FOR_PEERS and not blocked and self.uses_a_core

    @property
    def runs_python(self) -> bool | None:
        """True if the main thread runs Python code, False for native code, None if not known.

        Native code never waits for the GIL: it holds the GIL, or has released the GIL.
        Python's threads have the name of the main thread; threads of libraries rarely have it.
        """
        before, after = self.before, self.after
        if before is None or after is None or after.mono <= before.mono or not after.threads:
            return None
        seconds, first = after.mono - before.mono, {each.tid: each for each in before.threads}
        pairs = [(first[each.tid], each) for each in after.threads if each.tid in first]
        waits = {b.tid: (b.waits - a.waits) / seconds for a, b in pairs
                 if b.name == after.threads[0].name and min(a.waits, b.waits) >= 0}  # fmt: skip
        ticks = {b.tid: b.cpu_ticks - a.cpu_ticks for a, b in pairs}
        own = waits.pop(after.pid, None)
        if own is None or ticks[after.pid] < ALONE_SHARE * sum(ticks.values()):
            return None
        if own >= GIL_WAITS_PER_S:
            return True
        most, (low, high) = max(waits.values(), default=0.0), WATCHER_PER_S
        return False if own == 0 and (low <= most <= high or most >= GIL_HELD_PER_S) else None

    @property
    def uses_a_core(self) -> bool:
        """True if the process runs in both samples, or uses most of a core."""
        return self._is_running or (self.share or 0.0) >= BUSY_SHARE

    @property
    def _is_running(self) -> bool:
        return all(each is not None and each.state == "R" for each in (self.before, self.after))

    @property
    def share(self) -> float | None:
        """The mean number of cores that the process used between the samples."""
        return cpu_share(self.before, self.after) if self.before and self.after else None

    @property
    def main_share(self) -> float | None:
        """The share of a core that the main thread used between the samples."""
        samples = [each for each in (self.before, self.after) if each is not None]
        own = [replace(of, cpu_ticks=t.cpu_ticks)
               for of in samples for t in of.threads if t.tid == of.pid]  # fmt: skip
        return cpu_share(*own) if len(own) == 2 else None

    @property
    def ran(self) -> bool:
        """True if the main thread is known to have run between the samples."""
        return (self.main_share or 0.0) >= RAN_SHARE

    @property
    def may_wait_for_gpu(self) -> bool:
        """True if the main thread runs, and is not known to run Python code.

        It may then spin in a CUDA call, which has no Python frame.
        """
        if self.before is None or self.after is None or self.main.kind != "none":
            return False
        main_runs = self._is_running or (self.main_share or 0.0) >= SPIN_SHARE
        return main_runs and not self.runs_python
