"""Injects the faults of tests/faults/table.py and reports the alerts and times: `make faults`.

Faults with a time limit are injected several times, and the median is compared with the limit. The
exit code is 1 if a test fails or a median is above its limit.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest

from benchmarks.common import median, publish, table
from tests.faults.table import BY_NUMBER, ROWS, Row

REPEATS = 3
GUARD_S = 600
HEADER = (
    "#", "grade", "fault", "seen in s: median", "worst", "bound", "what was said", "left behind",
    "result",
)  # fmt: skip
MAX_WORDS = 160
FOLDER = re.compile(r"/tmp/(?:[^\s/]+/)+")
"""Directories below /tmp, which are left out of the result."""


@dataclass
class Case:
    """The result of the injections of one row of the table, or of one case of a row."""

    row: Row
    name: str = ""
    seen_s: list[float] = field(default_factory=list)
    words: str = ""
    left: str = ""
    results: list[str] = field(default_factory=list)

    @property
    def late(self) -> bool:
        limit_s = self.row.limit_s
        return bool(self.seen_s) and limit_s is not None and median(self.seen_s) > limit_s

    @property
    def failed(self) -> bool:
        return self.late or "failed" in self.results

    def cells(self) -> tuple[str, ...]:
        fault = f"{self.row.fault} ({self.name})" if self.name else self.row.fault
        seen = (
            [f"{median(self.seen_s):.2f}", f"{max(self.seen_s):.2f}"] if self.seen_s else ["", ""]
        )
        bound = f"≤ {self.row.limit_s:g}" if self.seen_s and self.row.limit_s else ""
        counts = {result: self.results.count(result) for result in dict.fromkeys(self.results)}
        result = ", ".join(f"{count} {name}" for name, count in counts.items())
        words = FOLDER.sub("…/", self.words).replace("|", "\\|").replace("\n", " ")
        words = words if len(words) <= MAX_WORDS else f"{words[:MAX_WORDS]}…"
        return (
            self.row.number, self.row.grade, fault, *seen, bound, words, self.left,
            f"{result}, too late" if self.late else result,
        )  # fmt: skip


class Recorder:
    """A pytest plugin: repeats timed tests and collects the notes of the scenes."""

    def __init__(self, repeats: int):
        self._repeats = repeats
        self.cases: dict[tuple[str, str], Case] = {}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        mark = metafunc.definition.get_closest_marker("fault")
        if mark is not None and BY_NUMBER[mark.args[0]].limit_s is not None:
            metafunc.parametrize("injection", range(self._repeats), indirect=True)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            for number, name in _rows_of(item):
                item.user_properties.append(("row", (number, name)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for told, value in report.user_properties:
            if told == "row":
                number, name = value
                case = self.cases.setdefault(value, Case(BY_NUMBER[number], name))
                self._take(case, report)

    def _take(self, case: Case, report: pytest.TestReport) -> None:
        if report.when == "call" or report.skipped:
            case.results.append(report.outcome)
        elif report.failed:
            case.results[-1:] = ["failed"]
        if report.skipped and isinstance(report.longrepr, tuple):
            case.words = report.longrepr[2]
        found: dict[str, Any] | None = dict(report.user_properties).get("fault")
        if report.when == "teardown" and found is not None:
            case.words, case.left = found["words"] or case.words, found["left"]
            if found["seen_s"] is not None:
                case.seen_s.append(found["seen_s"])


def _rows_of(item: pytest.Item) -> list[tuple[str, str]]:
    """Returns the numbers of the rows that a test proves, each with the name of the case."""
    mark = item.get_closest_marker("fault")
    if mark is None:
        node, _, _ = item.nodeid.partition("[")
        name = node.rpartition("::")[2].removeprefix("test_").replace("_", " ")
        return [(row.number, name) for row in ROWS if node in row.elsewhere]
    params = dict(item.callspec.params) if hasattr(item, "callspec") else {}
    params.pop("injection", None)
    words = [*mark.args[1:], *(str(v) for v in params.values() if isinstance(v, str | int))]
    return [(mark.args[0], ", ".join(words))]


def report(cases: list[Case]) -> str:
    """Returns the table in the order of `ROWS`."""
    order = {row.number: place for place, row in enumerate(ROWS)}
    cases = sorted(cases, key=lambda case: order[case.row.number])
    return table(HEADER, [case.cells() for case in cases])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("-k", dest="only", default="", help="as in pytest; writes no result")
    options = parser.parse_args()
    recorder = Recorder(options.repeats)
    elsewhere = [node for row in ROWS for node in row.elsewhere]
    only = ["-k", options.only] if options.only else []
    # A test that hangs is one failure. The usual `timeout_method` would end all later tests.
    guard = ["-o", f"timeout={GUARD_S}", "-o", "timeout_method=signal"]
    words = ["-m", "slow or not slow", "-q", "--durations=0", "--durations-min=30", *guard, *only]
    code = pytest.main(["tests/faults", *elsewhere, *words], plugins=[recorder])
    cases = list(recorder.cases.values())
    failed = [case for case in cases if case.failed]
    if options.only:
        print(report(cases))
    else:
        seen = sum(len(case.results) for case in cases)
        publish(
            "faults", "Injected faults", report(cases),
            f"{seen} injections and proofs; failed or too late: {len(failed)}. Timed "
            f"faults are injected {options.repeats} times; the time runs from the injection to the "
            "time when an open console, which polls every 20 ms, shows the fault. The screen polls "
            "once a second, and within 0.25 s after a file of the run has changed. An injection "
            "fails if a rank was killed that should have continued.",
        )  # fmt: skip
    return 1 if failed or code not in (0, pytest.ExitCode.NO_TESTS_COLLECTED) else 0


if __name__ == "__main__":
    sys.exit(main())
