"""The causes of a stall: a suspected rank with its evidence, and the rules that name its cause."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from console.diagnose import gpu_signs
from console.diagnose.rank_evidence import (
    ENDED_STATES,
    LASTING_STATES,
    NAMED_AFTER_S,
    UNREPORTED,
    RankEvidence,
)
from console.diagnose.stack_classes import Where, loader_thread
from console.model import Gpu
from console.sources.descriptors import NOTHING, BlockedOn
from console.sources.kernel_evidence import ProcessEvidence, ThreadEvidence, cpu_share
from console.sources.stacks import Stack

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
GIL_WAITS_PER_S, NATIVE_WAITS_PER_S = 4.0, 1.0
WATCHER_PER_S, GIL_HELD_PER_S = (5.0, 21.0), 120.0
"""Numbers of waits per second. A main thread that runs Python code waits at least
`GIL_WAITS_PER_S` times, because it passes the GIL to the contract's watcher thread. In native code
that has released the GIL, it waits at most `NATIVE_WAITS_PER_S` times, for example to write a dump.
A watcher that never waits for the GIL is within `WATCHER_PER_S`, because it polls 20 times a
second. A watcher that asks for the GIL every 5 ms and never gets it waits at least
`GIL_HELD_PER_S` times."""
OWN_WAITS = ("lock", "pipe", "child", "timer", "disk")
"""Kinds of system calls that count as a wait of the rank itself, not as a wait for its peers."""
FOR_PEERS = ("peers", "device", "none")
"""Classes of stacks: a wait for peers or for a GPU, or no stack."""
WORKER = "pt_data_worker"
"""Start of the name that torch gives to the worker processes of its loader."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """One rank with the evidence about it: two samples of its process, its stack and its GPU."""

    rank: RankEvidence
    before: ProcessEvidence | None
    after: ProcessEvidence | None
    where: Where
    stacks: Mapping[int, Stack]
    """The stacks of all ranks that have one."""
    gpu: Gpu | None
    """The value of the rank in `Evidence.gpus`."""
    uses_gpu: bool
    """True if the rank has a value in `Evidence.gpus`."""
    is_alone: bool
    """True if the run has no other rank."""
    holder: int | None = None
    """The other rank for whose file lock this rank waits, or None."""
    calls_other: bool = False
    """True if the rank calls another collective than its peers, by flight records or stacks."""

    @property
    def number(self) -> int:
        return self.rank.rank

    @property
    def has_stack(self) -> bool:
        return self.number in self.stacks

    @property
    def loader(self) -> tuple[str, bool]:
        """The result of `loader_thread` for this rank, or ("", False) without a stack."""
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
        """True if all samples show the same kind of wait, and the kind is one of `OWN_WAITS`.

        A timer does not count if the stack shows a wait for the peers: a library may poll them.
        """
        is_for_peers = self.main.kind == "timer" and self.where.kind == "peers"
        if self.main.kind not in OWN_WAITS or is_for_peers:
            return False
        return self.before is None or self.before.main.kind == self.main.kind

    @property
    def runs(self) -> bool:
        """True if the rank uses a core, and the class of its stack is not in `FOR_PEERS`.

        False without a stack, because CUDA and NCCL also use a core while they wait. False too if
        the main thread is known to wait in a system call other than a futex.
        """
        blocked = self.main.kind not in ("none", "futex")
        return self.where.kind not in FOR_PEERS and not blocked and self.uses_a_core

    @property
    def runs_python(self) -> bool | None:
        """True if the main thread runs Python code, False for native code, None if not known.

        A thread in native code does not wait for the GIL: it holds the GIL, or has released it. Up
        to Python 3.13, Python's threads have the name of the main thread; the threads of libraries
        rarely have this name.
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
        is_free = own <= NATIVE_WAITS_PER_S and low <= most <= high
        return False if is_free or most >= GIL_HELD_PER_S else None

    @property
    def stuck_thread(self) -> ThreadEvidence | None:
        """Another thread in state D that did not run between the samples.

        None if the main thread does not wait for a thread.
        """
        if self.where.kind not in ("thread", "queue", "lock"):
            return None
        if self.before is None or self.after is None or self.main.kind not in ("futex", "none"):
            return None
        same = (each for each in self.after.threads if each in self.before.threads)
        return next((t for t in same if t.state == "D" and t.tid != self.after.pid), None)

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

    @property
    def gpu_computes(self) -> bool:
        """True if the rank waits for its GPU, which computes: the rank waits for no peer."""
        return self.where.kind == "device" and gpu_signs.kernel_words(self.gpu) == "computes"


# --- the table of causes -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cause:
    """One rule. `explain` returns the cause in words, or "" if the rule does not apply."""

    name: str
    explain: Callable[[Suspect], str]
    action: str
    """The next step of the operator. The verdict replaces {pid}, {place} and {resume}."""


def _traced(of: Suspect) -> str:
    if of.state != "t":
        return ""
    tracer = of.after.tracer if of.after else None
    return f"is traced by pid {tracer[0]} ({tracer[1]})" if tracer else "is traced by a debugger"


def _exited(of: Suspect) -> str:
    if of.state == "Z":
        return "has exited but its parent has not reaped it (the parent may be stopped)"
    return "has exited" if of.state in ("X", "gone") else ""


def _disk(of: Suspect) -> str:
    if of.state == "D":
        return f"is in uninterruptible sleep{_on(of)}"
    if (thread := of.stuck_thread) and not _loader(of):
        within = f" (in {thread.wchan})" if thread.wchan else ""
        return f"{of.where.text}, and its thread {thread.tid} is in uninterruptible sleep{within}"
    return f"waits{_on(of)}" if of.main.kind == "disk" else ""


def _loader(of: Suspect) -> str:
    kind, in_fetch, fed = of.where.kind, of.rank.phase == "fetch", of.loader[0]
    blocked = kind == "lock" and of.main.kind in ("futex", "none")
    waits = in_fetch and (blocked or kind in ("queue", "thread", "pipe", "process"))
    waits = waits and of.main.kind not in ("network", "timer")
    by_thread = fed and kind in ("queue", "thread", "lock") and (
        in_fetch or of.rank.phase == UNREPORTED
    )  # fmt: skip
    if not (kind == "loader" or waits or by_thread):
        return ""
    # Programs often leave ended children. An ended child counts only if it has the name of the
    # rank's process or of a worker.
    names = {thread.name for thread in of.after.threads[:1]} if of.after else set()
    ill = [f"worker {child.pid} ({child.name}) is in state {child.state}"
           for child in (of.after.children if of.after else ())
           if child.state in "TtD" or (child.state in "ZX" and (
               child.name in names or child.name.startswith(WORKER)))]  # fmt: skip
    return ", ".join(["waits for its data loader", *ill[:4], *([fed] if fed and not ill else [])])


def _startup(of: Suspect) -> str:
    # The only rank waits for no other rank, so its process may show another cause.
    starting = of.rank.phase in ("", "boot") and not (of.is_alone and of.after)
    starting = starting or of.where.kind == "store"
    if not starting or of.rank.phase == "exit" or of.main.kind in ("lock", "child", "pipe"):
        return ""
    waits = of.where.text if of.where.kind == "file" else f"waits{_on(of)}" * bool(of.main.text)
    does = f" and runs{_used(of)}" * of.uses_a_core or f" and {waits}" * bool(waits)
    return f"has not {'finished its start-up' if of.is_alone else 'joined the other ranks'}{does}"


def _lock(of: Suspect) -> str:
    if of.main.kind == "lock" or (of.in_futex and not of.ran):
        return f"waits{_on(of)}"
    if of.main.kind in ("pipe", "network", "child", "disk"):
        return ""  # the process waits in this call, even if the stack shows a queue
    return of.where.text if of.where.kind in ("lock", "queue", "thread", "file") else ""


def _native(of: Suspect) -> str:
    if of.where.kind != "native":
        alone = of.runs and of.runs_python is False
        return f"runs native code{_used(of)} and makes no progress" if alone else ""
    if of.main.kind == "futex":
        return "waits for the GIL, which native code holds, perhaps in another thread"
    if of.main.kind != "none":
        return f"waits{_on(of)} while native code holds the GIL, perhaps in another thread"
    unsure = "waits for the GIL, or holds it in native code"
    return "runs native code that holds the GIL" if of.uses_a_core else unsure


def device(of: Suspect) -> str:
    """Returns the wait for the GPU in words, or "" if the class of the stack is not "device"."""
    if of.where.kind != "device":
        return ""
    kernel = gpu_signs.kernel_words(of.gpu)
    return of.where.text.partition(" in ")[0].rstrip(",") + (f", which {kernel}" if kernel else "")


def _busy(of: Suspect) -> str:
    code = " Python code" if of.runs_python else ""
    runs = of.runs or (of.in_futex and of.ran)
    return f"runs{code}{_used(of)} and makes no progress" if runs else ""


def _waiting(kind: str, *stacks: str) -> Callable[[Suspect], str]:
    """Returns an `explain` for system calls of this kind, and for stacks of these classes."""

    def explain(of: Suspect) -> str:
        if of.main.kind == kind and of.where.kind != "peers":
            return f"waits{_on(of)}"
        # A timer contradicts these stacks, except for a subprocess, which Python polls by a timer.
        is_timed = of.main.kind == "timer" and kind != "child"
        return of.where.text if of.where.kind in stacks and not is_timed else ""

    return explain


CAUSES: tuple[Cause, ...] = (
    Cause("stopped", lambda of: "is stopped (SIGSTOP)" if of.state == "T" else "", "{resume}"),
    Cause("traced", _traced, "detach the debugger: kill -CONT does not resume the rank"),
    Cause("frozen", lambda of: "is frozen by its cgroup" if of.after and of.after.frozen else "",
          "thaw its container or cgroup (write 0 to cgroup.freeze)"),
    Cause("exited", _exited,
          "stop the run, then resume it, or launch it again if it has no checkpoint"),
    Cause("disk", _disk, "check the disk, the network file system and the driver"),
    Cause("startup", _startup, "check the log of the rank, and the rendezvous address and port"),
    Cause("loader", _loader, "check the loader's workers and the storage that they read"),
    Cause("mismatch", lambda of: "calls another collective" if of.calls_other else "",
          "compare the calls in the stacks; a restart repeats the stall"),
    Cause("native", _native,
          "py-spy dump --native --pid {pid} shows the native frames (pip install py-spy)"),
    Cause("device", device, "see the GPU's Xids; py-spy dump --native --pid {pid} shows the call"),
    Cause("child", _waiting("child", "process"),
          "resume or kill the process that the rank waits for"),
    Cause("lock", _lock, "stop the holder of the lock, or release the lock"),
    Cause("network", _waiting("network", "socket"),
          "check the server that the rank waits for, and the network to it"),
    Cause("pipe", _waiting("pipe", "pipe"),
          "start or stop the process at the other side of the pipe"),
    Cause("busy", _busy,
          "dump again: an endless loop shows the same frames, slow code shows other frames"),
    Cause("sleep", _waiting("timer", "sleep"), "see {place}"),
    Cause("exit-hangs",
          lambda of: "has not ended since its exit record" if of.rank.phase == "exit" else "",
          "see the log of the rank; stop ends the run"),
    Cause("transport", lambda of: "", "check the network between the ranks; see their logs"),
)  # fmt: skip
"""The first rule that applies to a rank gives its cause; "transport" has no rank."""
SEEN_BY_ONE = frozenset(("stopped", "traced", "frozen", "exited", "disk", "startup", "mismatch"))
"""Causes that can have the confidence "high" without a stack of the rank. For this confidence, the
other rows of `CAUSES` need the stack and the evidence from the process."""
OF_LIBRARY = ("loader", "socket")
"""Classes of stacks that show what a `poll` call waits for; the call itself does not show it."""


def _used(of: Suspect) -> str:
    return "" if of.share is None else f" at {of.share:.0%} of a core"


def _on(of: Suspect) -> str:
    return f" for {of.main.text}" if of.main.text else ""
