"""The table of causes: rules that name the cause of a stall from the evidence about one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from console.diagnose import gpu_signs
from console.diagnose.rank_evidence import UNREPORTED
from console.diagnose.suspect import Suspect

WORKER = "pt_data_worker"
"""Start of the name that torch gives to the worker processes of its loader."""


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
    if of.state != "D" and of.main.kind != "disk":
        return ""
    return f"is in uninterruptible sleep{_on(of)}" if of.state == "D" else f"waits{_on(of)}"


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
    starting = not of.rank.phase or of.rank.phase == "boot" or of.where.kind == "store"
    if not starting or of.main.kind in ("lock", "child", "pipe"):
        return ""
    does = f" and runs{_used(of)}" * of.uses_a_core or f" and waits{_on(of)}" * bool(of.main.text)
    return f"has not joined the other ranks{does}"


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
    return of.where.text


def device(of: Suspect) -> str:
    """Returns the wait for the GPU in words, or "" if the class of the rank is not "device"."""
    if of.where.kind != "device":
        return ""
    kernel = gpu_signs.kernel_words(of.gpus or ())
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
        # A timer contradicts these stacks, except for a subprocess: Python polls it with a timer.
        is_timed = of.main.kind == "timer" and kind != "child"
        return of.where.text if of.where.kind in stacks and not is_timed else ""

    return explain


CAUSES: tuple[Cause, ...] = (
    Cause("stopped", lambda of: "is stopped (SIGSTOP)" if of.state == "T" else "", "{resume}"),
    Cause("traced", _traced, "detach the debugger: kill -CONT does not resume the rank"),
    Cause("frozen", lambda of: "is frozen by its cgroup" if of.after and of.after.frozen else "",
          "thaw its container or cgroup (write 0 to cgroup.freeze)"),
    Cause("exited", _exited, "stop the run, then resume it from the newest checkpoint"),
    Cause("disk", _disk, "check the disk, the network file system and the driver"),
    Cause("startup", _startup, "check the log of the rank, and the rendezvous address and port"),
    Cause("loader", _loader, "check the loader's workers and the storage that they read"),
    Cause("mismatch", lambda of: "calls another collective" if of.calls_other else "",
          "compare the calls in the stacks; a restart repeats the stall"),
    Cause("native", _native, "py-spy dump --native --pid {pid} shows the native frames"),
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
)  # fmt: skip
"""The first rule that applies to a rank gives its cause."""
SEEN_BY_ONE = frozenset(("stopped", "traced", "frozen", "exited", "disk", "startup", "mismatch"))
"""Causes that can have the confidence "high" without a stack of the rank. For this confidence, the
other rows of `CAUSES` need the stack and the evidence from the process."""
OF_LIBRARY = ("loader", "socket")
"""Classes of stacks that show what a `poll` call waits for; the call itself does not show it."""
ALIKE = Cause("transport", lambda of: "", "check the network between the ranks; see their logs")


def _used(of: Suspect) -> str:
    return "" if of.share is None else f" at {of.share:.0%} of a core"


def _on(of: Suspect) -> str:
    return f" for {of.main.text}" if of.main.text else ""
