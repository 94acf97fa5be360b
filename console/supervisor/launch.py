"""A launch: its phases one after the other, its mailbox, its sign of life."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from console.plans import gates
from console.sources.nvml import Nvml
from console.supervisor import live, requests
from console.supervisor.attempt import REFRESH_S, Attempt
from console.supervisor.directory import Directory, Job
from console.supervisor.dump import Dump
from console.supervisor.orders import FlagValue, Orders
from console.supervisor.requests import Request
from trainers.contract import VERSION, flags, rundir
from trainers.contract.errors import UsageError

LOOK_EVERY_S = 0.2
HEARTBEATS_EVERY_S = 1.0
REMEMBERED = 4096
FILES = {
    "halt": rundir.HALT, "checkpoint": rundir.CHECKPOINT_NOW, "profile": rundir.PROFILE_NOW,
}  # fmt: skip
"""What is left in the run directory for the ranks to find."""
Outcome = tuple[bool, str, list[str]]


@dataclass(frozen=True, slots=True)
class _Known:
    """A request that was taken; its file may still be seen until it is removed."""

    path: Path
    done: bool = False


class Launch:
    """Owns plan_state.json and the sequence of phases; `tick` moves everything on."""

    def __init__(
        self, path: Path, given: Orders, directory: Directory, nvml: Nvml, poller: select.poll
    ):
        self.path, self.orders = path, given
        self.state: Literal["running", "waiting", "ended"] = "running"
        self.why = ""
        self.attempt: Attempt | None = None
        self._index = -1
        self._directory, self._nvml, self._poller = directory, nvml, poller
        self._phases: list[dict[str, Any]] = [
            {"name": phase.name, "state": "next" if i == 0 else "later", "why": "", "result": "",
             "steps": None, "started_ts": None, "ended_ts": None, "dir": f"{i}-{phase.name}"}
            for i, phase in enumerate(given.plan.phases)
        ]  # fmt: skip
        self._next_flags: dict[str, dict[str, Any]] = {}
        self._requests: dict[str, _Known] = {}
        self._dump: tuple[Dump, list[Request]] | None = None
        self._left: list[tuple[Job[None], Request]] = []
        self._look: Job[list[Request]] | None = None
        self._ended_by = ""
        self._last_look = self.over = False
        self._looked = self._beats = self._refreshed = 0.0
        self._actions: Mapping[str, Callable[[Request], Outcome | None]] = {
            "dump": self._do_dump, "halt": self._do_halt, "stop": self._do_end,
            "kill": self._do_end, "ack": self._do_ack, "note": self._do_note,
            "checkpoint": self._do_ask, "profile": self._do_ask,
            "set-flag": self._do_set_flag, "proceed": self._do_proceed,
        }  # fmt: skip
        directory.call(lambda: (path / rundir.REQUESTS).mkdir(mode=0o700, exist_ok=True))
        live.sweep()
        self._start(0)

    @property
    def busy(self) -> bool:
        """Says whether something is under way that wants to be looked at often."""
        attempt = self.attempt
        if attempt is None:
            return False
        changing = attempt.stage != "run" or attempt.state == "stopping"
        return self._dump is not None or changing or attempt.tree.incomplete

    def tick(self) -> None:
        """Does what is due; never waits."""
        now = time.monotonic()
        self._poll_left()
        self._look_around(now)
        if self._dump is not None:
            self._poll_dump(*self._dump)
        if self.attempt is not None:
            before = self.attempt.state
            self.attempt.tick()
            if self.attempt.stage == "over":
                self._end_of_phase(self.attempt)
            elif self.attempt.state != before:
                self._publish()
        if now - self._refreshed >= REFRESH_S:
            self._publish()

    def terminate(self, by: str) -> None:
        """Stops the running phase and ends the plan: what SIGTERM asks for."""
        self._end_by("stop", by)

    def give_up(self, why: str) -> None:
        """Ends everything because the supervisor itself is broken."""
        attempt = self.attempt
        if attempt is not None:
            attempt.give_up(why)
            self._publish()
            self.attempt = None
        self._end(why)

    def _end_by(self, action: str, by: str) -> str:
        """Ends the running phase, and the plan with it; returns the answer."""
        if self.attempt is None:
            if self.state != "ended":
                self._end(f"{action} asked by {by} before the next phase")
            return "the plan has ended; nothing was running"
        self._ended_by = self._ended_by or f"{action} asked by {by}"
        return self.attempt.end(action, by)

    # --- phases --------------------------------------------------------------------------------

    def _start(self, index: int) -> None:
        self._index = index
        entry = self._phases[index]
        pending = {
            name: FlagValue(held["value"], f"operator {held['by']}")
            for name, held in self._next_flags.items()
        }
        try:
            self.attempt = Attempt(
                self.orders, index, self.path / entry["dir"], pending, self._directory,
                self._nvml, self._poller,
            )  # fmt: skip
        except UsageError as error:
            entry |= {"state": "failed", "why": str(error), "result": "fail"}
            return self._end(f"{entry['name']} cannot start: {error}")
        self._next_flags = {}
        self.state, self.why = "running", ""
        entry |= {"state": self.attempt.state, "started_ts": time.time()}
        if index + 1 < len(self._phases):
            self._phases[index + 1]["state"] = "next"
        self._event("phase", f"{entry['name']} starts")
        return self._publish()

    def _end_of_phase(self, attempt: Attempt) -> None:
        result = gates.overall(attempt.gates)
        for request in self._dump[1] if self._dump else ():
            self._answer(request, (False, "the ranks ended before they answered", []))
        entry, self.attempt, self._dump = self._phases[self._index], None, None
        entry |= {
            "state": attempt.state, "why": attempt.why,
            "result": result if attempt.gates or attempt.state == "completed" else "unknown",
            "steps": attempt.story.summary.steps, "ended_ts": time.time(),
        }  # fmt: skip
        name = entry["name"]
        judged = f", gates {result}" if attempt.gates else ""
        self._event("phase", f"{name} {attempt.state}{judged}: {attempt.why}")
        refusal = self._why_not_on(attempt, result)
        if refusal:
            self._end(f"{name}: {refusal}")
        elif self._index + 1 == len(self._phases):
            self._end("all phases are done")
        elif self.orders.plan.between == "ask":
            self.state = "waiting"
            self.why = f"{name} is done; proceed starts {self._phases[self._index + 1]['name']}"
            self._event("state", self.why)
            self._publish()
        else:
            self._start(self._index + 1)

    def _why_not_on(self, attempt: Attempt, result: str) -> str:
        """Says why the plan ends here, "" when the next phase may start."""
        if attempt.state != "completed":
            return f"{attempt.state}: {attempt.why}"
        if result == "pass":
            return self._ended_by or (f"{rundir.HALT} is there" if attempt.halt_file else "")
        missed = [f"{g.name} {g.result} ({_value(g.value)} {g.unit}, bound {g.bound})"
                  for g in attempt.gates if g.result != "pass"]  # fmt: skip
        return "gate " + "; gate ".join(missed)

    def _end(self, why: str) -> None:
        self.state, self.why, self._looked = "ended", why, 0.0
        for entry in self._phases:
            if entry["state"] in ("next", "later"):
                entry["state"] = "later"
        self._event("state", f"the plan has ended: {why}")
        self._publish()

    # --- requests ------------------------------------------------------------------------------

    def _look_around(self, now: float) -> None:
        """Takes what the last look brought and asks for the next; never two at once.

        Nobody's question is left without an answer: after the end there is one look more.
        """
        if self._look is not None:
            if not self._look.done:
                return
            ended, self._look = self._look, None
            if not isinstance(ended.error, OSError):
                self._answer_all(ended.value)
            self.over = self._last_look
        if now - self._looked < LOOK_EVERY_S:
            return
        self._looked = now
        heartbeats = now - self._beats >= HEARTBEATS_EVERY_S
        self._beats = now if heartbeats else self._beats
        attempt, path = self.attempt, self.path
        if attempt is not None and attempt.stage != "run":
            attempt = None
        runs = [path / entry["dir"] for entry in self._phases[: self._index + 1]]

        def look() -> list[Request]:
            found = requests.scan(path, "launch")
            for run in runs:
                found += requests.scan(run, "run")
            if attempt is not None:
                attempt.look(heartbeats)
            return found

        self._last_look = self.state == "ended"
        self._look = self._directory.job(look)

    def _answer_all(self, found: list[Request]) -> None:
        for request in found:
            known = self._requests.get(request.id)
            if known is not None and (known.path == request.path or not known.done):
                continue
            if known is not None and not request.error:
                self._answer(request, (False, "a request with this id was executed already", []))
                continue
            if len(self._requests) >= REMEMBERED:
                self._requests.pop(next(iter(self._requests)))
            self._requests[request.id] = _Known(request.path)
            self._record_request(request)
            outcome = (False, request.error, []) if request.error else self._execute(request)
            if outcome is not None:
                self._answer(request, outcome)

    def _execute(self, request: Request) -> Outcome | None:
        if self.state == "ended":
            return False, f"the plan has ended: {self.why}", []
        return self._actions[request.action](request)

    def _addressed(self, request: Request) -> Attempt | None:
        """Returns the running attempt, None when the request lies in a former run's mailbox."""
        attempt = self.attempt
        return attempt if attempt and request.path.parent.parent == attempt.run else None

    def _record_request(self, request: Request) -> None:
        folder = request.path.parent.parent
        self._directory.event(
            folder, 1, "request", f"{request.action or 'something'} asked", by=request.by,
            request=request.id, action=request.action,
        )  # fmt: skip

    def _answer(self, request: Request, outcome: Outcome) -> None:
        ok, text, detail = outcome
        self._requests[request.id] = _Known(request.path, done=True)
        self._directory.event(
            request.path.parent.parent, 1, "answer", text, "info" if ok else "warn",
            request=request.id, action=request.action, ok=ok, detail=detail, asked_by=request.by,
        )  # fmt: skip
        self._directory.call(lambda: requests.remove(request.path))

    def _do_halt(self, request: Request) -> Outcome | None:
        """Writes `.HALT` first: what cannot be written was not asked of the ranks."""
        return self._leave(request, self.attempt) if self.attempt else self._do_end(request)

    def _do_ask(self, request: Request) -> Outcome | None:
        attempt = self._addressed(request)
        if attempt is None or not attempt.tree.alive():
            return False, "no rank is running that could do it", []
        return self._leave(request, attempt)

    def _leave(self, request: Request, attempt: Attempt) -> None:
        """Leaves the file that asks the ranks; the answer follows when it is written."""
        run, name, by = attempt.run, FILES[request.action], request.by
        self._left.append((self._directory.job(lambda: rundir.ask(run, name, by)), request))

    def _poll_left(self) -> None:
        asked, self._left = self._left, []
        for job, request in asked:
            name = FILES[request.action]
            if not job.done:
                self._left.append((job, request))
            elif job.error is not None:
                reason = getattr(job.error, "strerror", None) or job.error
                more = ", stop sends them TERM" if name == rundir.HALT else ""
                why = f"cannot write {name}: {reason}; the ranks go on{more}"
                self._answer(request, (False, why, []))
            elif name == rundir.HALT:
                self._answer(request, self._do_end(request))
            else:
                text = f"{name} is written; a trainer of this project obeys at the end of its step"
                self._answer(request, (True, text, []))

    def _do_end(self, request: Request) -> Outcome:
        return True, self._end_by(request.action, request.by), []

    def _do_ack(self, request: Request) -> Outcome:
        name, attempt = request.args["alert"], self._addressed(request)
        if attempt is None or name not in attempt.alerts.open():
            return False, f"there is no open alert {name!r}", []
        attempt.event("ack", f"{name} acknowledged", by=request.by, alert=name)
        return True, f"{name} acknowledged", []

    def _do_note(self, request: Request) -> Outcome:
        folder = request.path.parent.parent
        self._directory.event(folder, 1, "note", request.args["text"], by=request.by)
        return True, "noted", []

    def _do_set_flag(self, request: Request) -> Outcome:
        name, value = request.args["name"], request.args.get("value")
        index = self._index + 1
        if index >= len(self._phases):
            return False, "there is no next phase, so no process could be born with the flag", []
        phase = self._phases[index]["name"]
        changed = {k: v for k, v in self._next_flags.items() if k != name}
        try:
            if value is not None:
                value = flags.format_value(flags.parse(name, value))
                changed[name] = {"value": value, "by": request.by, "ts": time.time()}
            born_with = self.orders.flags(
                index, {k: FlagValue(v["value"], "operator") for k, v in changed.items()}
            )
            self.orders.settings(index, born_with)
        except UsageError as error:
            return False, str(error), []
        self._next_flags = changed
        self._publish()
        if value is None:
            return True, f"{name} is as the plan says again for {phase}", []
        return True, f"{name}={value} for {phase} only", []

    def _do_proceed(self, request: Request) -> Outcome:
        if self.state != "waiting":
            return False, "the plan does not wait; nothing was started", []
        phase, wanted = self._phases[self._index + 1]["name"], request.args.get("phase")
        if wanted not in (None, phase):
            return False, f"the next phase is {phase!r}, not {wanted!r}; nothing was started", []
        self._start(self._index + 1)
        return True, f"{phase} starts", []

    def _do_dump(self, request: Request) -> Outcome | None:
        attempt = self._addressed(request)
        workers = {w.rank: w for w in attempt.tree.alive()} if attempt is not None else {}
        rank = request.args.get("rank")
        wanted = sorted(workers) if rank is None else [rank]
        if attempt is None or not workers:
            return False, "no rank is running, so there is no stack", []
        if rank is not None and rank not in workers:
            return False, f"rank {rank} is not running", []
        if self._dump is not None:
            if not self._dump[0].ranks() >= set(wanted):
                return False, "another dump is under way; ask again in two seconds", []
            self._dump[1].append(request)
            return None
        dump = Dump(attempt.run, attempt.live, time.time_ns() // 1_000_000)
        for each in wanted:
            dump.ask(each, workers[each].handle)
        self._dump = (dump, [request])
        return None

    def _poll_dump(self, dump: Dump, asked: list[Request]) -> None:
        def keep(path: Path, data: bytes) -> None:
            self._directory.call(lambda: rundir.write_atomic(path, data))

        if dump.poll(keep):
            self._dump = None
            for request in asked:
                self._answer(request, dump.answer())

    # --- records -------------------------------------------------------------------------------

    def _event(self, kind: str, text: str, level: str = "info") -> None:
        self._directory.event(self.path, 1, kind, text, level)

    def _publish(self) -> None:
        """Replaces plan_state.json."""
        self._refreshed = time.monotonic()
        attempt = self.attempt
        if attempt is not None and self._index >= 0:
            entry = self._phases[self._index]
            entry |= {"state": attempt.state, "why": attempt.why,
                      "steps": attempt.story.summary.steps or None}  # fmt: skip
        self._directory.document(self.path / rundir.PLAN_STATE, {
            "v": VERSION, "launch": self.orders.launch, "state": self.state, "why": self.why,
            "phase": self._index, "phases": [dict(entry) for entry in self._phases],
            "between": self.orders.plan.between, "next_flags": dict(self._next_flags),
            "supervisor": rundir.identity(),
            "live_dir": str(attempt.live) if attempt is not None and attempt.live else "",
            "updated_ts": time.time(),
        })  # fmt: skip


def _value(value: float | None) -> str:
    return "no value" if value is None else f"{value:.4g}"
