"""Compares verdicts with the injected truth, and makes the tables of `make drills`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common import median, table
from benchmarks.drill_cases import Case, Truth, truth
from benchmarks.drill_faults import AUTHORS, CAUSES

SAME_CAUSE = {"exited-early": "exited"}
"""Causes of faults by the cause in a verdict, where the two names differ."""
NO_VERDICT = "none"
Z_95 = 1.959964


@dataclass(frozen=True, slots=True)
class Said:
    """A verdict, with the seconds from the fault to the first verdict and to this verdict."""

    cause: str
    rank: int | None
    phase: str
    sure: str
    first_s: float
    final_s: float
    sentence: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one case. `said` is None if there was no verdict.

    `not_run` says why the case does not count, for example because the fault was not injected.
    """

    case: Case
    said: Said | None = None
    not_run: str = ""


@dataclass(frozen=True, slots=True)
class Score:
    """The correctness of one verdict; `phase` is None if the program reports no phases."""

    rank: bool
    phase: bool | None
    cause: bool

    @property
    def wrong_high(self) -> bool:
        """True if the rank, the phase or the cause is wrong."""
        return not (self.rank and self.cause and self.phase is not False)


def said_by(document: Mapping[str, Any], first_s: float, final_s: float) -> Said:
    """Returns the verdict in a document of the console; values of a wrong type are left out."""

    def text(name: str) -> str:
        value = document.get(name)
        return value if isinstance(value, str) else ""

    rank = document.get("rank")
    cause = text("cause") or "unknown"
    number = rank if type(rank) is int else None
    return Said(SAME_CAUSE.get(cause, cause), number, text("phase"), text("sure"), first_s,
                final_s, text("sentence"))  # fmt: skip


def score(right: Truth, said: Said | None) -> Score:
    """Compares a verdict with the truth. A missing verdict or the cause `unknown` is wrong."""
    known = said is not None and said.cause != "unknown"
    phase = known and said.phase in right.phases if right.phases else None
    return Score(
        known and said.rank in right.ranks, phase, known and said.cause == right.cause
    )  # fmt: skip


def wilson(right: int, of: int) -> tuple[float, float]:
    """Returns the 95 % interval of a share by Wilson's score, or (0, 1) if `of` is 0."""
    if of == 0:
        return 0.0, 1.0
    share, z2 = right / of, Z_95**2
    centre = (share + z2 / (2 * of)) / (1 + z2 / of)
    half = Z_95 / (1 + z2 / of) * math.sqrt(share * (1 - share) / of + z2 / (4 * of * of))
    return max(0.0, centre - half), min(1.0, centre + half)


def share(marks: Sequence[bool]) -> tuple[str, str, str]:
    """Returns three texts such as "30/40", "75 %" and, for the interval, "60–86 %"."""
    right, of = sum(marks), len(marks)
    low, high = wilson(right, of)
    percent = f"{100 * right / of:.0f} %" if of else ""
    return f"{right}/{of}", percent, f"{100 * low:.0f}–{100 * high:.0f} %"


def totals(results: Sequence[Result]) -> str:
    """Returns the table of the right ranks, phases and causes, by the kind of program."""
    rows = []
    for kind, wanted in (("all", (True, False)), ("phases", (True,)), ("three lines", (False,))):
        scores = [score(truth(r.case), r.said) for r in results if r.case.phases in wanted]
        phases = [each.phase for each in scores if each.phase is not None]
        rows.append((kind, "rank", *share([each.rank for each in scores])))
        if phases:
            rows.append((kind, "phase", *share(phases)))
        rows.append((kind, "cause", *share([each.cause for each in scores])))
    return table(("program", "right", "cases", "share", "95 % interval (Wilson)"), rows)


def by_author(results: Sequence[Result]) -> str:
    """Returns a table by author: shares of right ranks, phases, causes, and of high confidence."""
    rows = []
    for name, wanted in [("both", AUTHORS), *((str(each), (each,)) for each in AUTHORS)]:
        of = [result for result in results if result.case.author in wanted]
        scores = [score(truth(each.case), each.said) for each in of]
        sure = [result.said is not None and result.said.sure == "high" for result in of]
        marks = {
            "rank": [each.rank for each in scores],
            "phase": [each.phase for each in scores if each.phase is not None],
            "cause": [each.cause for each in scores],
            "of high confidence": sure,
            "of these right": [
                not each.wrong_high for each, high in zip(scores, sure, strict=True) if high
            ],
        }
        rows += [(name, what, *share(right)) for what, right in marks.items()]
    return table(("author", "right", "cases", "share", "95 % interval (Wilson)"), rows)


def confidence(results: Sequence[Result]) -> str:
    """Returns a table: verdicts, verdicts of high confidence, wrong ones among these, times."""
    said = [(score(truth(r.case), r.said), r.said) for r in results if r.said is not None]
    high = [marks for marks, each in said if each.sure == "high"]
    rows = [
        ("verdicts", f"{len(said)} of {len(results)} cases"),
        ("of high confidence", " = ".join(share([e.sure == "high" for _, e in said])[:2])),
        ("of these wrong", " = ".join(share([marks.wrong_high for marks in high])[:2])),
    ]
    for name, field in (("first verdict", "first_s"), ("final verdict", "final_s")):
        seconds = [getattr(each, field) for _, each in said]
        if seconds:
            row = f"{median(seconds):.1f}, {max(seconds):.1f} s"
            rows.append((f"from the fault to the {name}: median, most", row))
    return table(("what", "measured"), rows)


def confusion(results: Sequence[Result]) -> str:
    """Returns the table of true causes by the causes of the verdicts."""
    pairs = Counter(
        (truth(r.case).cause, r.said.cause if r.said else NO_VERDICT) for r in results
    )  # fmt: skip
    found = {cause for _, cause in pairs}
    columns = [*(cause for cause in CAUSES if cause in found), *sorted(found - set(CAUSES))]
    true = [cause for cause in CAUSES if any(pair[0] == cause for pair in pairs)]
    rows = [(cause, *(pairs[cause, said] or "" for said in columns)) for cause in true]
    return table(("true cause ↓ verdict →", *columns), rows)


def listing(results: Sequence[Result]) -> str:
    """Returns a table with a row for each case: its verdict, and what is wrong in it."""
    rows = []
    for result in results:
        right, said = truth(result.case), result.said
        marks = score(right, said)
        checks = (("rank", marks.rank), ("phase", marks.phase), ("cause", marks.cause))
        wrong = ", ".join(name for name, good in checks if good is False)
        words = (
            (
                said.cause,
                "all" if said.rank is None else said.rank,
                said.phase,
                said.sure,
                f"{said.first_s:.1f}",
                f"{said.final_s:.1f}",
            )
            if said
            else (NO_VERDICT, *5 * ("",))
        )
        rows.append((result.case.name, result.case.author, right.cause, *words, wrong))
    header = ("case", "author", "true cause", "verdict", "rank", "phase", "sure", "first s",
              "final s", "wrong")  # fmt: skip
    return table(header, rows)


def report(results: Sequence[Result]) -> str:
    """Returns all tables; cases that do not count are listed with the reason."""
    ran = [result for result in results if not result.not_run]
    skipped = [f"- {each.case.name}: {each.not_run}" for each in results if each.not_run]
    parts = [by_author(ran), totals(ran), confidence(ran), confusion(ran), listing(ran)]
    parts += ["Not run:\n\n" + "\n".join(skipped)] if skipped else []
    return "\n\n".join(parts)
