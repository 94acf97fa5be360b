"""Runs the phases of a launch one after the other, and executes its requests."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from console.plans import gates
from console.sources import process
from console.sources.tail import is_missing
from console.status_text import RESULT_WORDS, not_passed, with_word
from console.supervisor import cross_check, former_documents, live_directory, overrides
from console.supervisor.alerts import Alerts
from console.supervisor.context import Services
from console.supervisor.dump import Dumps
from console.supervisor.inbox import FILES_NAME, Inbox, Outcome, Poller, Request
from console.supervisor.launch_spec import LaunchSpec
from console.supervisor.next_flags import NextFlags
from console.supervisor.observers import Observers
from console.supervisor.report_writer import ReportWriter
from console.supervisor.rule_actions import Policy
from console.supervisor.run import BUSY_S, IDLE_S, QUIET_S, REFRESH_S, Run
from console.supervisor.rundir_io import POLL_EVERY_S
from trainers.contract import VERSION, jsonl, rundir
from trainers.contract.errors import UsageError

FILES = {"checkpoint": rundir.CHECKPOINT_NOW, "profile": rundir.PROFILE_NOW}
"""The file in the run directory by which the ranks get each of these actions."""
DONE = "all phases are done"
UPDATED = "; if the code was updated since the launch, resume uses the new code"


class Launch:
    """Owns plan_state.json and the sequence of phases; `tick` does the work that is due.

    The method `_do_<action>` executes the request for an action.
    `former` is the plan_state.json of a former process, whose launch is continued.
    """

    def __init__(
        self, path: Path, spec: LaunchSpec, services: Services,
        former: Mapping[str, Any] | None = None,
    ):  # fmt: skip
        self._path, self._spec = path, spec
        self.state: Literal["running", "waiting", "ended"] = "running"
        self._why, self._index = "", 0
        self.run: Run | None = None
        self._services, self._directory = services, services.directory
        self._phases = spec.entries()
        self._next_flags = NextFlags(spec)
        self._report = ReportWriter(path, services.directory, self._event)
        self._inbox = Inbox(self._directory, self._attempt_in, services.lock.since_ns)
        self._dumps = Dumps(self._directory)
        self._policy = Policy(self._directory, self._dumps, self.end)
        self._own_observers = Observers(Alerts(self._event, self._directory), services.link)
        self._poller = Poller(
            self._directory, path, self._take_requests, lambda: self._policy.halt_launch(self.run),
            services.link,
        )  # fmt: skip
        self._ended_by, self._requested = "", set[str]()
        """Why no further phase starts, or ""; received `STOPS`, as "ACTION requested by SENDER"."""
        self._numbers: dict[Path, int] = {}
        """The newest attempt of each run that ended under this process."""
        self._last_poll, self.over, self._refreshed = False, False, 0.0
        self._directory.call(lambda: (path / rundir.REQUESTS).mkdir(mode=0o700, exist_ok=True))
        if former is None:
            live_directory.sweep()
            self._start(0)
        else:
            self._continue(former)

    @property
    def pause_s(self) -> float:
        """Longest wait until the next tick (s). Ticks 1 s apart start at full monotonic seconds."""
        if self._quiet and not self._poller.is_polling:
            return 1 - time.monotonic() % 1
        return min(self._pace_s, IDLE_S)

    @property
    def _quiet(self) -> bool:
        """Returns whether the next tick can wait for a wake-up or for the next second."""
        return self._pace_s == QUIET_S and not self._services.hooks.busy

    @property
    def _pace_s(self) -> float:
        if self._dumps.busy:
            return BUSY_S
        return self.run.pace_s if self.run else QUIET_S if self.state == "waiting" else IDLE_S

    def tick(self) -> None:
        """Does the work that is due.

        While little changes, a tick that starts a poll leaves the rest of the work to the next
        tick. The end of the poll wakes the main loop for this next tick.
        """
        self._directory.deliver()
        self._report.poll()
        if self._start_poll() and self._quiet:
            return
        self._observers.run("stack dumps", lambda: self._dumps.poll(self._inbox.answer), None)
        self._observers.run("alert hook", self._services.hooks.poll, None)
        self._observers.run("alive hook", self._beat, None)
        while self._directory.unexpected_errors:
            self._observers.failed(FILES_NAME, self._directory.unexpected_errors.popleft())
        if self.run is not None:
            before = self.run.state
            self.run.tick()
            self._policy.apply(self.run)
            if self.run.over:
                self._end_of_phase(self.run)
            elif self.run.state != before:
                self._publish()
        else:
            self._observers.run("the directory", self._observers.alerts.check_directory, None)
        if time.monotonic() - self._refreshed >= REFRESH_S:
            self._publish()

    @property
    def _observers(self) -> Observers:
        """The observers of the run, or the observers of the launch while no phase runs."""
        return self._own_observers if self.run is None else self.run.observers

    def _beat(self) -> None:
        name, state = (self.run.id, self.run.state) if self.run else (self._spec.launch, self.state)
        self._services.alive.beat(name, state)

    def end(self, action: str, by: str) -> str:
        """Ends the launch, and the running phase if there is one; returns the answer."""
        if self.state != "ended":
            self._ended_by = self._ended_by or f"{action} requested by {by}"
            if self.run is not None:
                self._publish()  # first, because an adoption reads `ended_by` of plan_state.json
                return self.run.end(action, by)
            self._end(f"{self._ended_by} before the next phase")
        return "the launch has ended; no phase was running"

    # --- phases --------------------------------------------------------------------------------

    def _start(self, index: int) -> None:
        self._index = index
        entry = self._phases[index]
        entry |= {"state": "starting", "started_ts": time.time()}
        self.state, self._why = "running", ""
        self._services.hooks.clear(self._spec.launch, "", "waiting")
        # plan_state.json is published first, because the next child must know of the run. With the
        # state "waiting", the child would wait for the phase after this one. On disk, the document
        # comes before run.json, so that it contains each run that has begun.
        self._publish(keeps_place=True)
        flags = self._spec.flags(index, self._next_flags.values())
        try:
            self.run = Run(self._services, self._spec, index, self._path / entry["dir"], flags)
        except UsageError as error:
            why = f"{error}{UPDATED * (index > 0 and self._spec.plan.phases[index].is_ours)}"
            entry |= {"state": "failed", "why": why, "result": "fail"}
            return self._end(f"{entry['name']} cannot start: {why}")
        self._next_flags.started()
        if index + 1 < len(self._phases):
            self._phases[index + 1]["state"] = "next"
        self._event("phase", f"{entry['name']} starts")
        return self._publish()

    def _continue(self, former: Mapping[str, Any]) -> None:
        """Continues the launch of a former process, at the phase in plan_state.json.

        Raises ContractError if the documents of the launch contradict each other; then no event is
        written.
        """
        runs = [self._path / entry["dir"] for entry in self._phases]
        self._index = min(max(0, jsonl.integer(former, "phase") or 0), len(self._phases) - 1)
        self._next_flags.pending, warnings = cross_check.read_launch(
            self._services.link, self._path, former, self._spec, self._index, runs
        )
        for entry, progress in zip(self._phases, former_documents.phases(former), strict=False):
            entry |= progress
        self._ended_by = jsonl.text(former, "ended_by")[:400]
        self._requested = {self._ended_by} if former.get("is_requested") is True else set()
        # This job must run before the first poll of the mailboxes.
        self._directory.job(
            lambda: cross_check.Evidence(self._path, runs).answered_requests(),
            lambda answered, _: self._inbox.restore(answered or ()),
        )
        if former.get("state") != "ended":
            self._continue_phase(former, warnings)
        else:
            self.state, self._why = "ended", jsonl.text(former, "why")[:400]
        for run in runs[: self._index + 1]:
            if self.run is None or self.run.path != run:
                self._services.write_last_documents(run)
        self._publish()
        if former.get("state") == "ended":
            self._own_observers.call("report", self._report.start, None)

    def _continue_phase(self, former: Mapping[str, Any], warnings: Sequence[str]) -> None:
        """Waits for confirmation again, continues or starts the phase, or ends the launch."""
        link, run = self._services.link, self._path / self._phases[self._index]["dir"]
        found, end = None, link.state.former_end
        if former.get("state") == "waiting" and self._index + 1 < len(self._phases):
            self.state, self._why = "waiting", jsonl.text(former, "why")[:400]
        elif link.stored(run / rundir.RUN) or not is_missing(run / rundir.RUN):
            found = cross_check.read_run(link, run, self._spec, self._index, bool(self._ended_by))
        text = "a new supervisor adopts the launch; the former one has died"
        if end:
            text = f"the supervisor's working process {end}; a new one has replaced it"
        # While a phase runs, its alert `supervisor-replaced` runs the hook instead of this event.
        self._event("state", text, "crit" if end and self.state == "waiting" else "warn")
        for warning in warnings:
            self._event("note", warning, "warn")
        if found is not None:
            self.run = Run(self._services, self._spec, self._index, run, found.flags, found)
        elif self.state != "waiting" and self._ended_by:
            self._end(self._ended_by)
        elif self.state != "waiting":
            self._start(self._index)

    def _end_of_phase(self, run: Run) -> None:
        result = gates.overall(run.gates)
        self._dumps.abandon(self._inbox.answer)
        self._numbers[run.path] = run.number
        self._ended_by = self._ended_by or f"{rundir.HALT} exists" * run.attempt.known.halt_file
        entry, self.run = self._phases[self._index], None
        entry |= {
            "state": run.state, "why": run.why,
            "result": result if run.gates or run.state == "completed" else "unknown",
            "steps": self._steps(run) or (0 if run.summary.ranks else None),
            "ended_ts": time.time(),
        }  # fmt: skip
        name = entry["name"]
        gate_words = f", gates {RESULT_WORDS[result]}" if run.gates else ""
        self._event("phase", f"{name} {run.state}{gate_words}: {run.why}")
        own, *later = self._spec.plan.phases[self._index :]
        if reason := self._why_no_next(run, result):
            self._end(f"{name}: {reason}")
        elif not later:
            self._end(DONE)
        elif self._spec.plan.between == "ask" and (not own.sweep or own.sweep != later[0].sweep):
            self.state = "waiting"
            command = process.command("do", self._path, "proceed")
            self._why = f"{name} is done; to start {later[0].name}: {command}"
            self._event("state", self._why, "crit")
            self._publish()
        else:
            self._start(self._index + 1)

    def _why_no_next(self, run: Run, result: str) -> str:
        """Returns why the launch ends after this run, or "" if the next phase may start."""
        if run.state != "completed":
            return with_word(run.state, run.why)
        if result != "pass":
            return not_passed(run.gates)
        return self._ended_by if self._index + 1 < len(self._phases) else ""

    def _end(self, why: str) -> None:
        self.state, self._why = "ended", why
        for entry in self._phases:
            if entry["state"] == "next":
                entry["state"] = "later"
        is_expected = why == DONE or self._ended_by in self._requested
        self._event("state", f"the launch has ended: {why}", "info" if is_expected else "crit")
        self._publish()
        self._own_observers.call("report", self._report.start, None)

    # --- requests ------------------------------------------------------------------------------

    def _start_poll(self) -> bool:
        """Starts the next poll of the files if it is due; returns whether a poll was started."""
        last = self.state == "ended" and not self._report.busy
        every_s = math.inf if self._quiet else 0.0 if last else POLL_EVERY_S
        attempt = self.run.attempt if self.run is not None else None
        runs = [self._path / entry["dir"] for entry in self._phases[: self._index + 1]]
        begun = self._poller.start(runs, attempt, every_s)
        self._last_poll = last if begun else self._last_poll
        return begun

    def _take_requests(self, found: Sequence[Request]) -> None:
        """Executes requests; the launch is over when the last poll finds no new request."""
        new = self._inbox.execute(found, self._execute)
        self.over = self._last_poll and not new

    def _execute(self, request: Request) -> Outcome | None:
        if self.state == "ended":
            return False, f"the launch has ended: {self._why}", []
        if request.action == "proceed":  # an error ends this process, and the next one continues
            return self._do_proceed(request)
        failure = False, f"the request failed with an error, see {rundir.SUPERVISOR_LOG}", []
        if request.action in former_documents.STOPS:
            self._requested.add(f"{request.action} requested by {request.by}")
        name = f"_do_{request.action.replace('-', '_')}"
        return self._observers.call("requests", lambda: getattr(self, name)(request), failure)

    def _addressed(self, request: Request) -> Run | None:
        """Returns the run of the running phase if the request is in its mailbox, else None."""
        return self.run if self.run and request.folder == self.run.path else None

    def _do_halt(self, request: Request) -> Outcome | None:
        """Writes `.HALT` (the answer follows later), or ends a plan that has no running phase."""
        if self.run is None:
            return self._do_stop(request)
        self._policy.halt(self.run, request.by, partial(self._inbox.answer, request))
        return None

    def _do_checkpoint(self, request: Request) -> Outcome | None:
        run = self._addressed(request)
        if run is None or not run.attempt.tree.handles():
            return self._without_ranks(request)
        name = FILES[request.action]
        text = f"{name} is written; a trainer of this project reads it at the end of its step"
        self._directory.write_request(
            run.path, name, request.by,
            lambda why: self._inbox.answer(request, (not why, why or text, [])),
        )  # fmt: skip
        return None

    _do_profile = _do_checkpoint

    def _without_ranks(self, request: Request) -> Outcome:
        run = self._addressed(request)
        if run is not None and run.state in ("starting", "restarting"):
            name, again = run.path.name, f"send {request.action} again in a few seconds"
            return False, f"{name} is {run.state}, so no rank is running yet; {again}", []
        return False, f"no rank is running, so a {request.action} is not possible", []

    def _do_stop(self, request: Request) -> Outcome:
        return True, self.end(request.action, request.by), []

    _do_kill = _do_stop

    def _do_ack(self, request: Request) -> Outcome:
        name, run = request.args["alert"], self._addressed(request)
        if run is None or name not in run.alerts.open():
            return False, f"there is no open alert {name!r}", []
        run.event("ack", f"{name} acknowledged", by=request.by, alert=name)
        return True, f"{name} acknowledged", []

    def _attempt_in(self, folder: Path) -> int:
        """Returns the attempt to which an event of a launch or run belongs."""
        run = self.run
        return run.number if run and folder == run.path else self._numbers.get(folder, 1)

    def _do_note(self, request: Request) -> Outcome:
        folder, text = request.folder, request.args["text"]
        self._directory.event(folder, self._attempt_in(folder), "note", text, by=request.by)
        return True, "noted", []

    def _do_set_flag(self, request: Request) -> Outcome:
        done, text = self._next_flags.set(self._index + 1, request.args, request.by)
        self._publish()
        return done, text, []

    def _do_proceed(self, request: Request) -> Outcome:
        now, wanted = self._phases[self._index]["name"], request.args.get("phase")
        if self.state != "waiting":  # a former working process may have executed this request
            return wanted == now, f"{now} is running; no further phase was started", []
        phase = self._phases[self._index + 1]["name"]
        if wanted not in (None, phase):
            return False, f"the next phase is {phase!r}, not {wanted!r}; no phase was started", []
        self._start(self._index + 1)
        return self.run is not None, f"{phase} starts" if self.run else self._why, []

    def _do_override(self, request: Request) -> Outcome:
        phases = [entry["name"] for entry in self._phases]
        return overrides.apply(self.run, phases, self._index, request.args, request.by)

    def _do_dump(self, request: Request) -> Outcome | None:
        run = self._addressed(request)
        if run is None or not run.attempt.tree.handles():
            return self._without_ranks(request)
        return self._dumps.request(run.path, run.live, run.attempt.tree.handles(), request)

    # --- records -------------------------------------------------------------------------------

    def _event(self, *words: str, **more: Any) -> dict[str, Any]:
        """Writes an event of the launch; `words` are the kind, the text and perhaps the level."""
        return self._services.event(self._path, self._spec.launch, self.state, 1, *words, **more)

    def _steps(self, run: Run) -> int | None:
        """Returns the number of completed steps, or its former value until the snapshot is read."""
        return gates.steps_done(run.summary) if run.is_read else self._phases[self._index]["steps"]

    def _publish(self, keeps_place: bool = False) -> None:
        """Replaces plan_state.json."""
        self._refreshed = time.monotonic()
        run = self.run
        if run is not None:
            steps = self._steps(run) or None
            self._phases[self._index] |= {"state": run.state, "why": run.why, "steps": steps}
        self._services.publish(self._path / rundir.PLAN_STATE, {
            "v": VERSION, "launch": self._spec.launch, "state": self.state, "why": self._why,
            "phase": self._index, "phases": [dict(entry) for entry in self._phases],
            "between": self._spec.plan.between, "next_flags": self._next_flags.pending,
            "ended_by": self._ended_by, "is_requested": self._ended_by in self._requested,
            "supervisor": {**self._services.link.state.identity,
                           "token": self._services.lock.token, "child": rundir.identity()},
            "live_dir": str(run.live) if run is not None and run.live else "",
            "updated_ts": time.time(),
        }, keeps_place)  # fmt: skip
