"""One case of the error sweep: a supervisor whose calls on files fail, and the end of its run.

The supervisor starts as the launcher starts it, with a library that makes calls fail. The calls of
the ranks do not fail, so the documents of the run must agree with the ends of the ranks.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from console import actions, status_text
from console.model import Gate, RunState
from console.plans.gate_check import poll_confirmed
from console.sources import process, record_files
from console.sources.record_files import RecordFiles
from console.sources.run import RunSource
from console.supervisor import lock
from console.supervisor.launch_spec import LaunchSpec, inherited
from tests.fakes import errors
from tests.fakes.errors import Failure
from tests.launches import PROGRAMS, STUB, phase, write_plan
from trainers.contract import jsonl, rundir

LIVE = f"{rundir.LIVE_PREFIX}{os.geteuid()}-"
STEPS, LONG = 40, 100_000
LIMIT_S, PATIENT_S, STOP_AFTER_S, END_S, POLL_S = 150.0, 12.0, 0.6, 100.0, 0.02
COMES_S = 6.0
"""The ranks continue after this time even without a new supervisor, long before they stall."""
GATES = {"steps_done": STEPS, "loss_finite": True, "no_stall": True}
WORKERS, TRIES = 4, 3
FALSE_WORDS = re.compile(
    r"\b(moved|replaced|removed|stalled|crashed|killed|stopped|is not running|has exited|"
    r"rank \d+ failed)\b"
)
"""Words that an alert may contain only if the event happened to the run."""

FALSE_ANSWER = re.compile(r"is older than|was received already")
AFTER_STEP = re.compile(r"after step (\d+)")
DUMPED = re.compile(r"dumped: \S*/(\S+)")
LOST_RANK = "alert: rank 1 failed"


@dataclass(frozen=True, slots=True)
class Course:
    """The actions of the ranks in a case, and the states and failed gates that may be shown."""

    name: str
    mode: str = ""
    steps: int = STEPS
    states: frozenset[str] = frozenset({"completed"})
    failed: frozenset[str] = frozenset()
    attempts: int = 1
    stopped: bool = False
    """True if the supervisor gets TERM after the failures have begun."""
    program: str = "sick_supervisor.py"
    gates: Mapping[str, Any] = field(default_factory=lambda: GATES)
    told: str = LOST_RANK
    """The start of an alert that is true in this course."""
    is_adopted: bool = False
    """True if the supervisor is killed, and the calls of the adopting supervisor fail."""
    has_few: bool = False
    """True if only call sites fail that the first course lacks: the first call, or all calls."""


COURSES = (
    Course("to the end", "ask"),
    Course("a gate fails", "poor", failed=frozenset({"loss_finite"})),
    Course("halt", "halt", LONG, frozenset({"halted"}), frozenset({"steps_done"})),
    Course("restart", "again", attempts=2),
    Course(
        "TERM", "stop", LONG, frozenset({"stopped", "halted"}), frozenset({"steps_done"}), 1, True
    ),
    Course("files grow", "grow", 150, program="growing_supervisor.py", has_few=True),
    Course(
        "a stall",
        "stand",
        gates={"steps_done": STEPS, "loss_finite": True},
        has_few=True,
        told="alert: rank 1",
    ),
    Course("taken over", "adopt", is_adopted=True, has_few=True),
)


@dataclass(slots=True)
class Outcome:
    """The result of one case; `wrong` has a sentence on each error that was found."""

    course: Course
    failure: Failure | None
    wrong: list[str] = field(default_factory=list)
    seen: int = 0
    failed: int = 0
    stopped: bool = False
    """True if the supervisor got TERM."""
    state: str = ""
    seconds: float = 0.0


def orders(course: Course, folder: Path) -> LaunchSpec:
    """Returns the launch of a course, which all cases of the course share."""
    phases = [phase("one", "swept.py", course.steps, course.mode, gates=course.gates)]
    if course.failed:
        phases.append(phase("two", "swept.py", 1))
    again = {"when": "crash", "attempts": 2, "backoff_s": 0.1} if course.attempts > 1 else "never"
    floor_s = 3 if course.mode == "stand" else 60
    watch = {"stall_floor_s": floor_s, "startup_s": 60, "grace_s": 3}
    plan = write_plan(folder, phases=phases, restart=again, watch=watch)
    return actions.prepare(actions.LaunchOptions(plan=str(plan), run_dir=folder / "launch")).spec


class Case:
    """A launch in its own folder, with one supervisor at a time; `run` returns the outcome."""

    def __init__(
        self, course: Course, given: LaunchSpec, failure: Failure | None, folder: Path,
        library: Path,
    ):  # fmt: skip
        self._course, self._folder, self._library = course, folder, library
        self._given, self._launch, self._control = given, folder / "launch", folder / "control"
        self.record = folder / "calls"
        self._found = Outcome(course, failure)

    def run(self) -> Outcome:
        begun = time.monotonic()
        supervisor = self.start()
        try:
            if self._course.is_adopted:
                supervisor = self._take_over(supervisor)
            self._wait(supervisor)
        finally:
            self._found.wrong += self.left_behind(supervisor)
        self._found.seen, self._found.failed = errors.counts(self._control)
        self._found.wrong += self._untrue()
        self._found.seconds = time.monotonic() - begun
        for token in self._tokens():
            shutil.rmtree(rundir.SHARED_MEMORY / f"{LIVE}{token}", ignore_errors=True)
        return self._found

    def start(self, *adopt: str) -> subprocess.Popen[bytes]:
        """Starts the supervisor of the course with the library; does not wait until it is ready.

        With `adopt`, the supervisor gets no settings of an operator.
        """
        self._folder.mkdir(exist_ok=True)
        rundir.make_directory(self._launch)
        if not adopt:
            rundir.write_json(self._launch / rundir.PLAN, self._given.as_dict(time.time()))
        held = os.open(self._launch / rundir.LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        log = rundir.open_append(self._launch / rundir.SUPERVISOR_LOG)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock.claim(held, self._given.launch, "tester")
            variables = inherited()
            variables["PYTHONPATH"] = f"{STUB['PYTHONPATH']}:{variables['PYTHONPATH']}"
            errors.write(self._control, self._found.failure, armed=bool(adopt))
            variables |= errors.environment(
                self._library, self._control, self._launch, self.record
            ) | {"ERRORS_LIVE": str(rundir.SHARED_MEMORY / LIVE)}
            return subprocess.Popen(
                [sys.executable, str(PROGRAMS / self._course.program), str(self._launch),
                 "--lock-fd", str(held), *adopt],
                env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, pass_fds=(held,),
            )  # fmt: skip
        finally:
            os.close(held)
            os.close(log)

    # --- while it runs -------------------------------------------------------------------------

    def _take_over(self, former: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        """Kills the supervisor and starts the next one; then lets the ranks continue."""
        until = time.monotonic() + END_S
        while len(list(self._folder.glob("ready*"))) < 2 and time.monotonic() < until:
            time.sleep(POLL_S)
        former.kill()
        former.wait()
        following = self.start("--adopt")
        until = time.monotonic() + COMES_S
        while following.poll() is None and time.monotonic() < until and not self._has_come():
            time.sleep(POLL_S)
        (self._folder / "go").touch()
        return following

    def _has_come(self) -> bool:
        events = _lines(self._launch / "0-one" / rundir.EVENTS)
        return any("a new supervisor watches" in event["text"] for event in events)

    def _wait(self, supervisor: subprocess.Popen[bytes]) -> None:
        """Waits for the end; sends TERM if the course has it, or if a failure may delay the end."""
        failure, begun = self._found.failure, 0.0
        until = time.monotonic() + LIMIT_S
        while supervisor.poll() is None and time.monotonic() < until:
            time.sleep(POLL_S)
            if not begun and errors.is_armed(self._control):
                begun = time.monotonic()
            waits = failure is not None and (failure.lasting or self._course.steps == LONG)
            after_s = STOP_AFTER_S if self._course.stopped else PATIENT_S if waits else LIMIT_S
            if begun and not self._found.stopped and time.monotonic() - begun > after_s:
                supervisor.terminate()
                self._found.stopped = True
                until = time.monotonic() + END_S

    def left_behind(self, supervisor: subprocess.Popen[bytes]) -> Iterator[str]:
        """Ends the processes that are left; yields a sentence on each, and on a wrong exit code."""
        code = supervisor.poll()
        if code is None:
            yield "the supervisor did not end"
            supervisor.kill()
            supervisor.wait()
        elif self._course.is_adopted:  # if the supervisor rejects the launch, ranks continue
            until = time.monotonic() + END_S
            while any(map(process.with_token, self._tokens())) and time.monotonic() < until:
                time.sleep(POLL_S)
        elif code and not (self._found.stopped and code == -signal.SIGTERM):  # not by TERM
            yield f"the supervisor ended with {code}"
        for token in self._tokens():
            for pid in process.with_token(token):
                yield f"process {pid} was left behind"
                os.kill(pid, signal.SIGKILL)

    def _tokens(self) -> set[str]:
        born = rundir.read_json(self._launch / "0-one" / rundir.RUN) or {}
        told = jsonl.text(jsonl.mapping(born, "environment"), "NSA_CONSOLE_TOKEN")
        return {
            token for token in (told, *(jsonl.text(end, "token") for end in self._ends())) if token
        }

    # --- checks of the records and the state ---------------------------------------------------

    def _ends(self) -> list[dict[str, Any]]:
        return _lines(self._folder / "ends.jsonl")

    def _untrue(self) -> Iterator[str]:
        state = poll_confirmed(RunSource(self._launch))
        self._found.state = state.state
        yield from self._wrong_ends()
        yield from self._wrong_state(state)
        yield from self._wrong_events()
        yield from self._wrong_parts()
        log = (self._launch / rundir.SUPERVISOR_LOG).read_text(errors="replace")
        if "Traceback" in log:
            yield f"the supervisor failed: {log.splitlines()[-1]}"

    def _wrong_ends(self) -> Iterator[str]:
        """Yields a sentence on each end of a rank that is missing, not expected or too early."""
        course, stopped = self._course, self._found.stopped
        wanted = {("0-one", course.attempts, rank) for rank in range(2)}
        ends = {(end["phase"], end["attempt"], end["rank"]): end for end in self._ends()}
        if not stopped or ends or course.stopped:
            for key in wanted ^ set(ends):
                yield f"{'no ' if key in wanted else ''}end of {key}"
        for end in ends.values():
            done = end["step"] == course.steps and not end["halted"]
            if not (end["halted"] and stopped) and done != (course.steps != LONG):
                yield f"rank {end['rank']} ended at step {end['step']}"

    def _wrong_state(self, state: RunState) -> Iterator[str]:
        course = self._course
        may = course.states | {"lost"} | ({"stopped", "halted"} if self._found.stopped else set())
        if state.state not in may:
            yield f"state {state.state}: {state.why}"
        at = AFTER_STEP.search(state.why)
        if at and course.steps != LONG and not self._found.stopped and int(at[1]) != course.steps:
            yield f"it ended at step {course.steps}, and not so: {state.why}"
        for gate in state.gates:
            truth = "fail" if gate.name in course.failed and not self._went_on(gate) else "pass"
            if gate.result not in ("unknown", truth) and not self._found.stopped:
                yield f"gate {gate.name} {gate.result}: {status_text.gate_line(gate)}"
        good = course.states == {"completed"} and not course.failed and self._is_whole()
        if status_text.exit_code(state, whole=True) == 0 and not good:
            yield "GO"
        if self._found.failure is None and good and status_text.exit_code(state, whole=True):
            yield f"no GO without a failure: {state.state}, {state.why}, {state.gates}"

    def _is_whole(self) -> bool:
        """Returns whether no TERM was sent, or both ranks had completed all their steps."""
        done = [end for end in self._ends() if end["step"] == self._course.steps]
        return not self._found.stopped or len(done) == 2

    def _went_on(self, gate: Gate) -> bool:
        """Returns whether the gate is `steps_done`, and all ranks did its steps."""
        done = min((end["step"] for end in self._ends()), default=0)
        return gate.name == "steps_done" and done >= float(gate.bound.split()[-1])

    def _wrong_events(self) -> Iterator[str]:
        may = {"starting", "running", "halting", "stopping", "lost", *self._course.states}
        may |= {"restarting"} if self._course.attempts > 1 else set()
        may |= {"stalled"} if self._course.mode == "stand" else set()
        may |= {"stopped", "halted"} if self._found.stopped else set()
        for folder in (self._launch, self._launch / "0-one"):
            for event in _lines(folder / rundir.EVENTS):
                text = f"{event['kind']}: {event['text']}"
                if event["kind"] == "state" and event.get("state", "running") not in may:
                    yield text
                known = self._course.attempts > 1 or self._course.mode == "stand"
                known = known and text.startswith(self._course.told)
                if event["kind"] == "alert" and FALSE_WORDS.search(text) and not known:
                    yield text
                if "mistake" in text or "working process" in text:
                    yield text
                if event["kind"] == "answer":
                    yield from self._wrong_answer(event)

    def _wrong_parts(self) -> Iterator[str]:
        """Yields a sentence if samples in the parts are lost, doubled or damaged."""
        run = self._launch / "0-one"
        path = rundir.samples(run, rundir.host_name())
        numbers = [number for number, _ in record_files.parts(path)]
        read = [each for each in RecordFiles(run).poll(1 << 30) if each.name == path.name]
        found = [record["ts"] for batch in read for record in batch.records]
        if numbers != [*range(1, len(numbers) + 1)] or found != sorted(set(found)):
            yield f"samples are lost or doubled: parts {numbers}, {found}"
        if read and read[-1].cursor.skipped and numbers:
            yield f"{read[-1].cursor.skipped} samples are damaged"

    def _wrong_answer(self, event: Mapping[str, Any]) -> Iterator[str]:
        """Yields a sentence on an answer that the files contradict."""
        run, action, done = self._launch / "0-one", event["action"], event["ok"]
        asked_by = {"halt": rundir.HALT, "checkpoint": rundir.CHECKPOINT_NOW}.get(action)
        halts = action != "halt" or done != self._found.stopped
        if asked_by and not ((run / asked_by).exists() == done and halts):
            yield f"{action} was answered with {done}, {event['text']!r}"
        if FALSE_ANSWER.search(event["text"]):
            yield f"{action} was answered with {event['text']!r}"
        if action == "dump":
            said = DUMPED.findall(" ".join(event["detail"]))
            kept = sorted(path.name for path in run.glob("stackdump_rank*_*.txt"))
            if said != kept or done != bool(kept):
                yield f"{action} was answered with {event['text']!r}, {said}: there are {kept}"


def _lines(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes() if path.exists() else b""
    return [record for line in data.splitlines() if (record := jsonl.decode(line)) is not None]


class Sweep:
    """The cases of one course, each in its own folder below `folder`."""

    def __init__(self, course: Course, folder: Path, library: Path):
        folder.mkdir()
        self._course, self._folder, self._library = course, folder, library
        self._given, self._numbers = orders(course, folder), itertools.count()

    def _case(self, failure: Failure | None) -> Case:
        folder = self._folder / f"case{next(self._numbers)}"
        return Case(self._course, self._given, failure, folder, self._library)

    def record(self) -> dict[tuple[str, str], int]:
        """Returns the number of calls at each call site of a run without a failure."""
        case = self._case(None)
        found = case.run()
        assert not found.wrong, found
        return errors.sites(case.record)

    def run(self, failure: Failure) -> Outcome:
        """Injects one failure; if the run has too few calls, tries again with its last call."""
        found = self._case(failure).run()
        for _ in range(1, TRIES):
            if found.failed or not found.seen or found.wrong:
                break
            found = self._case(replace(failure, at=found.seen)).run()
        return found


def run_all(cases: Iterable[tuple[Sweep, Failure]], workers: int = WORKERS) -> list[Outcome]:
    """Returns the outcomes of the cases; up to `workers` cases run at the same time."""
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda case: case[0].run(case[1]), cases))
