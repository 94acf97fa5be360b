"""The table of rules that find the cause of a stall in the evidence about the named ranks.

The first rule that applies to the named rank gives the cause. The confidence "high" needs two
independent sources that name the same ranks, and no source that names another rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from console.diagnose import gpu_signs
from console.diagnose.evidence import NO_WHERE, RAN_SHARE, Evidence, Sign, signs
from console.diagnose.stack_classes import Where, loader_thread
from console.diagnose.stall import UNREPORTED, RankEvidence
from console.diagnose.verdict import ENDED_STATES, Case, exits, others, resume, stalled
from console.model import Gpu, Sure, Verdict
from console.sources.descriptors import BlockedOn
from console.sources.flight import Difference
from console.sources.kernel_evidence import ProcessEvidence
from console.sources.stacks import Frame

WORKER = "pt_data_worker"
"""Start of the name that torch gives to the worker processes of its loader."""
NO_PROCESS_WAIT = BlockedOn("none", "")


@dataclass(frozen=True, slots=True)
class Suspect:
    """The evidence about one rank that is named as the cause."""

    rank: RankEvidence
    process: ProcessEvidence | None
    where: Where
    share: float | None
    runs: bool
    """True if the rank uses a core and waits neither for its peers nor for its GPU."""
    difference: Difference
    loader: tuple[str, bool]
    """The result of `loader_thread` for this rank."""
    gpus: Sequence[Gpu] = ()
    uses_a_core: bool = False
    """True if the rank uses a core, also while it waits for its peers or its GPU."""
    python: bool | None = None
    """True if the rank's running main thread is in Python code, None if that is not known."""
    ran: bool | None = None
    """True if the rank's main thread ran between the samples, None if that is not known."""

    @property
    def in_futex(self) -> bool:
        """True if the rank's own code waits in a futex, for a lock or sometimes for the GIL."""
        return self.main.kind == "futex" and self.where.kind == "own"

    @property
    def state(self) -> str:
        """The kernel's letter for the state of the process, or "gone" if the process has ended."""
        if self.process is None or self.rank.state in ENDED_STATES:
            return self.rank.state
        return self.process.state

    @property
    def main(self) -> BlockedOn:
        """The object on which the main thread's system call waits."""
        return self.process.main if self.process else NO_PROCESS_WAIT


@dataclass(frozen=True, slots=True)
class Cause:
    """One rule. `explain` returns the cause in words, or "" if the rule does not apply."""

    name: str
    explain: Callable[[Suspect], str]
    action: str
    """The next step of an operator, with {pid}, {place} and {resume} for the values of the rank."""


def _traced(of: Suspect) -> str:
    if of.state != "t":
        return ""
    tracer = of.process.tracer if of.process else None
    return f"is traced by pid {tracer[0]} ({tracer[1]})" if tracer else "is traced by a debugger"


def _exited(of: Suspect) -> str:
    if of.state == "Z":
        return "has exited but its parent has not reaped it (the parent is not running)"
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
    # An ended child with another program's name is no worker, because many programs leave such
    # children.
    names = {thread.name for thread in of.process.threads[:1]} if of.process else set()
    ill = [f"worker {child.pid} ({child.name}) is in state {child.state}"
           for child in (of.process.children if of.process else ())
           if child.state in "TtD" or (child.state in "ZX" and (
               child.name in names or child.name.startswith(WORKER)))]  # fmt: skip
    return ", ".join(["waits for its data loader", *ill[:4], *([fed] if fed and not ill else [])])


def _mismatch(of: Suspect) -> str:
    found = of.difference
    is_other = found.kind == "mismatch" and of.rank.rank in found.ranks
    return "calls another collective" if is_other else ""


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
        return ""  # the queue in the stack waits in this call
    return of.where.text if of.where.kind in ("lock", "queue", "thread", "file") else ""


def _native(of: Suspect) -> str:
    if of.where.kind != "native":
        alone = of.runs and of.python is False
        return f"runs native code{_used(of)} and makes no progress" if alone else ""
    if of.main.kind == "futex":
        return "waits for the GIL, which native code holds, perhaps in another thread"
    return of.where.text


def _device(of: Suspect) -> str:
    if of.where.kind != "device":
        return ""
    kernel = gpu_signs.kernel_words(of.gpus)
    return _device_words(of.where, kernel)


def _device_words(where: Where, kernel: str) -> str:
    return where.text.partition(" in ")[0].rstrip(",") + (f", which {kernel}" if kernel else "")


def _busy(of: Suspect) -> str:
    code = " Python code" if of.python else ""
    runs = of.runs or (of.in_futex and of.ran)
    return f"runs{code}{_used(of)} and makes no progress" if runs else ""


def _waiting(kind: str, *stacks: str) -> Callable[[Suspect], str]:
    """Returns a rule that applies to one kind of system call, or to some classes of stacks."""

    def explain(of: Suspect) -> str:
        if of.main.kind == kind and of.where.kind != "peers":
            return f"waits{_on(of)}"
        # Python also uses a timer to wait for a subprocess.
        is_timed = of.main.kind == "timer" and kind != "child"
        return of.where.text if of.where.kind in stacks and not is_timed else ""

    return explain


CAUSES: tuple[Cause, ...] = (
    Cause("stopped", lambda of: "is stopped (SIGSTOP)" if of.state == "T" else "", "{resume}"),
    Cause("traced", _traced, "detach the debugger: kill -CONT does not resume the rank"),
    Cause("frozen", lambda of: "is frozen by its cgroup" if of.process and of.process.frozen
          else "", "thaw its container or cgroup (write 0 to cgroup.freeze)"),
    Cause("exited", _exited, "stop the run, then resume it from the newest checkpoint"),
    Cause("disk", _disk, "check the disk, the network file system and the driver"),
    Cause("startup", _startup, "check the log of the rank, and the rendezvous address and port"),
    Cause("loader", _loader, "check the loader's workers and the storage that they read"),
    Cause("mismatch", _mismatch, "compare the calls in the stacks; a restart repeats the stall"),
    Cause("native", _native, "py-spy dump --native --pid {pid} shows the native frames"),
    Cause("device", _device, "see the GPU's Xids; py-spy dump --native --pid {pid} shows the call"),
    Cause("child", _waiting("child", "process"), "resume or kill that process"),
    Cause("lock", _lock, "stop its holder, or release the lock"),
    Cause("network", _waiting("network", "socket"), "check that server and the network to it"),
    Cause("pipe", _waiting("pipe", "pipe"),
          "start or stop the process at the other side of the pipe"),
    Cause("busy", _busy, "dump again: an endless loop shows equal frames, slow code shows others"),
    Cause("sleep", _waiting("timer", "sleep"), "see {place}"),
)  # fmt: skip
"""The first rule that applies gives the cause."""
SEEN_BY_ONE = frozenset(("stopped", "traced", "frozen", "exited", "disk", "startup", "mismatch"))
"""Causes that one source proves; other causes need the stack and the process of the rank."""
OF_LIBRARY = ("loader", "socket")
"""Classes of stacks that show which object a `poll` waits for; the system call does not."""
ALIKE = Cause("transport", lambda of: "", "check the network between the ranks; see their logs")


def explain(base: Verdict, case: Case, evidence: Evidence) -> Verdict:
    """Returns the verdict with its cause, the evidence for and against it, and the next step."""
    found = signs(case.running, evidence)
    culprits = _culprits(found, case, evidence)
    if base.cause == "exited-early" and not any(
        evidence.is_abnormal(each.rank) for each in case.running
    ):  # fmt: skip
        return _with_signs(base, found, set(), evidence)
    if not culprits:
        return _alike(base, case, evidence, found)
    difference, first = evidence.difference(case.running), culprits[0]
    of = _suspect(first, evidence, difference)
    cause = next((each for each in CAUSES if each.explain(of)), None)
    if cause is not None:  # keep the ranks with the same cause
        culprits = [each for each in culprits
                    if cause.explain(_suspect(each, evidence, difference))]  # fmt: skip
    numbers = {each.rank for each in culprits}
    why = [sign for sign in found if first.rank in sign.ranks]
    contrary = [sign for sign in found if sign.ranks and first.rank not in sign.ranks]
    # Incomplete flight records name no rank, but are contrary evidence if they show another rank.
    unlike = bool(difference.ranks) and first.rank not in difference.ranks
    everyone = len(culprits) == len(case.running) > 1
    stopped = everyone and all(evidence.is_abnormal(each.rank) for each in culprits)
    agree = len(why) + stopped + (difference.confirmed and evidence.calls_differ(numbers))
    sure = _sure(agree, max(len(contrary), unlike), cause is not None)
    if sure == "high" and (cause is None or _is_unsure(of, cause, evidence)):
        sure = "medium"
    if of.where.kind == "device" and not gpu_signs.is_running(of.gpus):
        sure = "low"
    calls = difference.text if difference.kind in ("behind", "mismatch") else ""
    name = cause.name if cause else "slowest-rank" if len(case.running) > 1 else base.cause
    native = of.where.kind == "native" and of.main.kind == "futex"
    frame = None if native else of.where.own or of.where.frame
    at, who = f" ({frame.short})" if frame else "", "it" if len(culprits) == 1 else "each"
    verdict = case.verdict(
        None if everyone else first, name, sure,
        stalled(case, culprits) + (f": {who} {cause.explain(of)}" if cause else "") + at, calls,
        others(case, culprits), exits(case.exited),
    )  # fmt: skip
    action = _action(cause, culprits, frame) if cause else ""
    if of.where.own and not native:
        verdict = replace(verdict, place=of.where.own.place)
    return _with_signs(verdict, found, numbers, evidence, action)


def _suspect(rank: RankEvidence, evidence: Evidence, difference: Difference) -> Suspect:
    number, stacks = rank.rank, evidence.stacks
    own_share = evidence.main_share(number)
    return Suspect(
        rank, evidence.after.get(number), evidence.places().get(number, NO_WHERE),
        evidence.share(number), evidence.runs(number), difference,
        loader_thread(number, stacks) if number in stacks else ("", False),
        evidence.gpus.get(number, ()), evidence.uses_a_core(number),
        evidence.runs_python(number), None if own_share is None else own_share >= RAN_SHARE,
    )  # fmt: skip


def _culprits(
    found: Sequence[Sign], case: Case, evidence: Evidence
) -> list[RankEvidence]:  # fmt: skip
    """Returns the ranks that cause a stall: those that cannot run, or else those with most signs.

    A rank that cannot run is not the cause if two other sources name other ranks.
    """
    ranks = [each for each in case.running
             if each.state in ENDED_STATES or evidence.is_abnormal(each.rank)]  # fmt: skip
    numbers = {each.rank for each in ranks}
    contrary = [sign for sign in found if sign.ranks and not numbers & set(sign.ranks)]
    if ranks and len(contrary) < 2:
        votes = Counter(rank for sign in found for rank in sign.ranks)
        return sorted(ranks, key=lambda each: (-votes[each.rank], each.position))
    named = [set(sign.ranks) for sign in (contrary if ranks else found) if sign.ranks]
    if not named:
        return list(case.running) if len(case.running) == 1 else []
    best = max(named, key=lambda ranks: sum(bool(ranks & other) for other in named))
    for other in named:  # keep the ranks that all agreeing sources name
        best = best & other or best
    return [each for each in case.running if each.rank in best]


def _is_unsure(of: Suspect, cause: Cause, evidence: Evidence) -> bool:
    """Returns whether another cause is possible although the evidence names the right rank."""
    number, kind = of.rank.rank, of.where.kind
    # A process that cannot run writes no stack, so a stack contradicts its state.
    lies = evidence.is_abnormal(number) and number in evidence.stacks
    waits = (
        ("queue", "thread", "lock", "process")
        if of.main.kind in ("futex", "none")
        else ("queue", "thread")
    )
    # A data loader that the program defines also waits for a queue, a thread, a lock or a pool.
    is_loader = kind in waits and of.rank.phase == UNREPORTED and not of.loader[1]
    native = cause.name == "busy" and not of.python
    # Both the stack and the system call are needed, because one stack can mean different objects,
    # and a library may make the system call.
    by_process = of.main.kind != "none" or of.uses_a_core
    is_seen = number in evidence.stacks and (by_process or (of.process and kind in OF_LIBRARY))
    lacks = cause.name not in SEEN_BY_ONE and (not is_seen or (of.in_futex and of.ran is None))
    # Two ranks have no majority, so either of them may make the wrong call. The cause "device" was
    # only tested on one GPU.
    no_majority = cause.name == "mismatch" and len(evidence.flights) == 2
    return (
        lies
        or lacks
        or is_loader
        or native
        or no_majority
        or cause.name == "device"
        or of.main.unsure
    )


def _sure(agree: int, disagree: int, has_cause: bool) -> Sure:
    if agree >= 2 and not disagree:
        return "high" if has_cause else "medium"
    return "medium" if agree > disagree else "low"


def _alike(
    base: Verdict, case: Case, evidence: Evidence, found: Sequence[Sign]
) -> Verdict:  # fmt: skip
    """Returns the verdict for a stall in which no source names a rank."""
    difference, places, lost = evidence.difference(case.running), evidence.places(), ""
    kinds = {places.get(each.rank, NO_WHERE).kind for each in case.running}
    if difference.kind == "mismatch":
        rule, sure = next(each for each in CAUSES if each.name == "mismatch"), "medium"
    elif evidence.is_together(case.running):
        lost = ", ".join(
            f"packets between rank {a} and rank {b} ({link.here}, {link.peer}) are not acknowledged"
            for (a, b), link in sorted(evidence.lost().items())[:4]
        )  # fmt: skip
        rule, sure = ALIKE, "high" if lost else "medium"
    elif kinds in ({"device"}, {"store"}):
        name = "device" if kinds == {"device"} else "startup"
        rule, sure = next(each for each in CAUSES if each.name == name), "medium"
    else:
        return _with_signs(base, found, set(), evidence)
    why = ": each waits for its peers to join" if rule.name == "startup" else ""
    if rule.name == "device":
        rows = [evidence.gpus.get(each.rank, ()) for each in case.running]
        kernels = set(map(gpu_signs.kernel_words, rows))
        place = places[case.running[0].rank]
        why = f": each {_device_words(place, kernels.pop() if len(kernels) == 1 else '')}"
    verdict = case.verdict(
        None, rule.name, sure, stalled(case, case.running) + why, lost, difference.text
    )  # fmt: skip
    return _with_signs(verdict, found, set(), evidence, rule.action)


def _with_signs(
    verdict: Verdict, found: Sequence[Sign], named: set[int], evidence: Evidence, action: str = ""
) -> Verdict:
    """Adds the evidence for and against a verdict, and the next step."""
    lines, against = list[str](), list[str]()
    for sign in filter(lambda each: each.text, found):
        other = sign.ranks and not named & set(sign.ranks)
        line = f"{sign.source}{evidence.as_of(sign.source)}: {sign.text}"
        (against if other else lines).append(line)
    return replace(
        verdict, evidence=(*lines, *verdict.evidence), against=(*against, *evidence.gaps),
        action=action,
    )  # fmt: skip


def _action(cause: Cause, culprits: Sequence[RankEvidence], frame: Frame | None) -> str:
    place = f"{frame.file}:{frame.line}" if frame else "the stack of the rank"
    return cause.action.format(pid=culprits[0].pid, place=place, resume=resume(culprits))


def _used(of: Suspect) -> str:
    return "" if of.share is None else f" at {of.share:.0%} of a core"


def _on(of: Suspect) -> str:
    return f" for {of.main.text}" if of.main.text else ""
