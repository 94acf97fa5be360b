"""Explains recorded drills again, with all evidence and without one or two kinds of it.

`python -m benchmarks.drill_without DIR [--publish]`: DIR has the files of `benchmarks.drills
--record DIR`. The exit code is 1 if a verdict of high confidence is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.common import publish, table
from benchmarks.drill_cases import Case, truth
from benchmarks.drill_evidence import Inputs, explained, read
from benchmarks.drill_score import Score, said_by, score, share
from console.diagnose.evidence import Evidence
from console.diagnose.rank_evidence import STARTING_PHASES, UNREPORTED, RankEvidence
from console.sources.descriptors import NO_PEER, NOTHING, BlockedOn
from console.sources.kernel_evidence import ProcessEvidence
from console.sources.stacks import MAIN, Stack

HELD_BY = re.compile(r", held by pid .*$")


Change = Callable[[Inputs, int], Inputs]
"""A function that removes a part of the inputs. The number is the rank with the fault, or 0 if all
ranks have the fault."""


def _evidence(change: Callable[[Evidence], Evidence]) -> Callable[[Inputs], Inputs]:
    return lambda of: replace(of, evidence=change(of.evidence))


def _process(change: Callable[[ProcessEvidence], ProcessEvidence]) -> Callable[[Inputs], Inputs]:
    """Returns a change of both samples of each process."""

    def all_of(found: Mapping[int, ProcessEvidence]) -> dict[int, ProcessEvidence]:
        return {rank: change(each) for rank, each in found.items()}

    return _evidence(lambda e: replace(e, before=all_of(e.before), after=all_of(e.after)))


def _ranks(change: Callable[[RankEvidence], RankEvidence]) -> Callable[[Inputs], Inputs]:
    return lambda of: replace(of, ranks=tuple(map(change, of.ranks)))


def _without_states(of: Inputs) -> Inputs:
    """Removes the states of ranks, processes, threads and children, the tracer and the freezer."""
    blank = _process(lambda p: replace(
        p, state="?", tracer=None, frozen=False,
        threads=tuple(replace(each, state="?") for each in p.threads),
        children=tuple(replace(each, state="?") for each in p.children),
    ))  # fmt: skip
    return _ranks(lambda rank: replace(rank, state="?"))(blank(of))


def _without_calls(process: ProcessEvidence) -> ProcessEvidence:
    threads = tuple(replace(each, wchan="") for each in process.threads)
    return replace(process, wchan="", main=NOTHING, threads=threads)


def _without_descriptors(process: ProcessEvidence) -> ProcessEvidence:
    """Removes from `main` what neither the system call nor the wchan shows; drops connections."""
    main, wchan = process.main, process.wchan
    if main.kind in ("pipe", "network"):
        by_wchan = "pipe" in wchan or wchan == "wait_for_partner"
        by_wchan |= bool(re.match("wait_woken|inet_|tcp_|sk_|unix_|__skb_|skb_|sock_", wchan))
        text = NO_PEER if main.kind == "network" else "a pipe or FIFO"
        main = BlockedOn(main.kind, text) if by_wchan else NOTHING
    elif main.kind == "lock":
        main = replace(main, text="a file lock") if not main.unsure else NOTHING
    elif main.kind == "disk":
        main = replace(main, text="a disk or a driver")
    elif main.unsure:  # an event loop, or a timer that may poll a lock
        main = NOTHING if main.kind != "timer" else main
    return replace(process, main=main, connections=())


def _without_locks(process: ProcessEvidence) -> ProcessEvidence:
    main = process.main
    if main.kind == "lock" and main.unsure and "holds a lock" in main.text:
        main = BlockedOn("timer", "a timer", unsure=True)
    main = replace(main, text=HELD_BY.sub("", main.text), holder=0)
    return replace(process, main=main, has_flock=False)


def _without_tables(process: ProcessEvidence) -> ProcessEvidence:
    main = process.main
    if main.kind == "network":
        main = replace(main, text=NO_PEER)
    return replace(process, main=main, connections=())


def _without_names(of: Inputs) -> Inputs:
    """Makes the names of threads and children alike; in stacks, the main thread keeps its name."""
    process = _process(lambda p: replace(
        p, threads=tuple(replace(each, name=p.threads[0].name) for each in p.threads),
        children=tuple(replace(each, name="") for each in p.children),
    ))  # fmt: skip
    return _evidence(lambda e: replace(
        e, stacks={rank: _unnamed(stack) for rank, stack in e.stacks.items()}
    ))(process(of))  # fmt: skip


def _unnamed(stack: Stack) -> Stack:
    return replace(stack, threads=tuple(
        each if each.name == MAIN else replace(each, name=f"0x{number:x}")
        for number, each in enumerate(stack.threads)
    ))  # fmt: skip


def _without_phase(rank: RankEvidence) -> RankEvidence:
    named = rank.phase and rank.phase not in (*STARTING_PHASES, "exit")
    return replace(rank, phase=UNREPORTED, p99_s=None) if named else rank


def _of_one(field: str, of_culprit: bool) -> Change:
    """Returns a change that removes one kind of evidence of the culprit or of another rank."""

    def change(of: Inputs, culprit: int) -> Inputs:
        ranks = [each.rank for each in of.ranks if (each.rank == culprit) == of_culprit]
        for name in ("before", "after") if field == "processes" else (field,):
            kept = getattr(of.evidence, name)
            kept = {rank: each for rank, each in kept.items() if rank not in ranks[:1]}
            of = replace(of, evidence=replace(of.evidence, **{name: kept}))
        return of

    return change


KINDS: Mapping[str, Callable[[Inputs], Inputs]] = {
    "nothing": lambda of: of,
    "stacks": _evidence(lambda e: replace(e, stacks={})),
    "flight records": _evidence(lambda e: replace(e, flights={})),
    "all of /proc": lambda of: _ranks(lambda r: replace(r, state="?"))(
        _evidence(lambda e: replace(e, before={}, after={}))(of)
    ),
    "the second sample of /proc": _evidence(lambda e: replace(e, before={})),
    "states of processes and threads": _without_states,
    "CPU time and context switches": _evidence(lambda e: replace(
        e, before={rank: replace(p, mono=0.0, threads=()) for rank, p in e.before.items()},
        after={rank: replace(p, mono=0.0) for rank, p in e.after.items()},
    )),
    "system call and wchan": _process(_without_calls),
    "descriptors": _process(_without_descriptors),
    "file locks": _process(_without_locks),
    "child processes": _process(lambda p: replace(p, children=())),
    "TCP tables": _process(_without_tables),
    "names of threads": _without_names,
    "pulse phases": _ranks(_without_phase),
    "times of the records": _ranks(lambda r: replace(r, records_s=None, p99_s=None)),
}  # fmt: skip
"""The function that removes a kind of evidence of all ranks, by kind; "nothing" removes none."""
OF_ONE: Mapping[str, Change] = {
    f"the {name} of {who}": _of_one(field, of_culprit)
    for field, name in (("stacks", "stack"), ("flights", "flight record"),
                        ("processes", "process evidence"))
    for who, of_culprit in (("the culprit", True), ("one other rank", False))
}  # fmt: skip
WITHOUT_PHASES = "pulse phases"


@dataclass(frozen=True, slots=True)
class Marks:
    """The score of the verdict on one case, and the confidence and cause in the verdict."""

    case: Case
    score: Score
    sure: str
    cause: str


def marks(case: Case, kinds: Sequence[str], inputs: Inputs) -> Marks:
    """Returns the marks of the verdict that follows without these kinds of evidence."""
    for kind in kinds:
        inputs = OF_ONE[kind](inputs, case.rank or 0) if kind in OF_ONE else KINDS[kind](inputs)
    right, found = truth(case), explained(inputs)
    if WITHOUT_PHASES in kinds:
        right = replace(right, phases=frozenset())
    words = (
        {key: getattr(found, key) for key in ("cause", "rank", "phase", "sure")} if found else {}
    )
    said = said_by(words, 0.0, 0.0)
    return Marks(case, score(right, said), said.sure, said.cause)


def row(kind: str, found: list[Marks]) -> tuple[str, ...]:
    """Returns a line of the table."""
    phases = [each.score.phase for each in found if each.score.phase is not None]
    high = [each for each in found if each.sure == "high"]
    wrong = sum(each.score.wrong_high for each in high)
    shares = [share(of) for of in ([e.score.rank for e in found], phases,
                                   [e.score.cause for e in found])]  # fmt: skip
    cells = [f"{of[0]} = {of[1]}" if of[1] else "" for of in shares]
    return kind, *cells, f"{len(high)}", f"{wrong}"


def wrong_high(kind: str, found: list[Marks]) -> list[str]:
    """Returns a line for each verdict of high confidence that is wrong."""
    return [f"- without {kind}: {each.case.name}: {each.cause}"
            for each in found if each.sure == "high" and each.score.wrong_high]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--publish", action="store_true", help="write the result")
    options = parser.parse_args()
    cases: list[tuple[Case, Inputs]] = []
    for path in sorted(options.folder.glob("*.json")):
        record, inputs = read(path)
        keys = ("fault", "world", "rank", "phases")
        cases.append((Case(**{key: record["case"][key] for key in keys}), inputs))
    found = {kind: [marks(case, (kind,), inputs) for case, inputs in cases]
             for kind in (*KINDS, *OF_ONE)}  # fmt: skip
    pairs = {f"{a} and {b}": [marks(case, (a, b), inputs) for case, inputs in cases]
             for a, b in itertools.combinations([*found][1:], 2)}  # fmt: skip
    wrong = [line for kind, each in (found | pairs).items() for line in wrong_high(kind, each)]
    header = ("without", "rank", "phase", "cause", "high", "of these wrong")
    text = table(header, [row(kind, each) for kind, each in found.items()])
    both = row("", list(itertools.chain(*pairs.values())))
    text += (
        f"\n\nWithout any two of these ({len(pairs)} pairs): rank {both[1]}, cause {both[3]}, "
        f"{both[4]} of high confidence, {both[5]} of these wrong."
    )
    text += "\n\n" + "\n".join(wrong) if wrong else ""
    if options.publish:
        text = f"{len(cases)} cases.\n\n{text}"
        title = "Verdicts without one kind of evidence (CPU, gloo)"
        publish("diagnosis_without", title, text, NOTES, "drill_without")
    else:
        print(text)
    return 1 if wrong else 0


NOTES = (
    "Each case was recorded once, with all evidence, and then explained again without a kind of "
    "evidence. The table counts correct ranks, phases and causes. A verdict of high confidence is "
    "wrong if its rank, phase or cause is wrong. The first line is for all evidence. The functions "
    "of `nsa-console diagnose` collected this evidence after the supervisor's verdict. "
    "Without descriptors, a wait shows only its system call and its wchan. Cases whose run had "
    "ended are left out, because the reason of an end needs no such evidence. These runs had no "
    "GPU figures (no GPU) and no counts of collectives in pulses (the program counts none), so "
    "these two kinds are not removed. The end of a log is no input of a verdict. Without any "
    "pulse, no stall is detected, and an alert says so."
)


if __name__ == "__main__":
    sys.exit(main())
