"""Runs the attempts of one phase; writes the state and the supervisor heartbeat of the run."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from console.diagnose.readings import setting_values
from console.model import Gate, Gpu, State, loss_unit
from console.plans import gates
from console.run_state import Facts, decide
from console.sources import liveness, ranks
from console.supervisor import former_documents, launch_spec, restart
from console.supervisor.alerts import HALT_FAILED, Alerts
from console.supervisor.attempt import Attempt
from console.supervisor.checkpoint_check import CheckpointCheck
from console.supervisor.context import Services, run_context
from console.supervisor.ends import UNSTARTED
from console.supervisor.former_documents import FormerRun
from console.supervisor.launch_spec import FlagValue, LaunchSpec
from console.supervisor.observers import ALERT, SETTLED_S, Observers
from console.supervisor.snapshot_writer import Snapshots
from trainers.contract import VERSION, environ, jsonl, rundir
from trainers.contract.errors import RefusedError, UsageError

REFRESH_S = 5.0
BUSY_S, IDLE_S, QUIET_S = 0.05, 0.2, 1.0
"""Seconds between two ticks: during fast changes, normally, and while little changes."""
PAGED_STATES = frozenset(("stalled", "failed", "crashed", "lost", "restarting"))
"""States whose event has the level crit, for the alert hook."""
REPLACED, CODE_CHANGED, CHECK = "supervisor-replaced", "code-changed", "the check of checkpoints"


class Run:
    """Owns supervisor.json, the events and the attempts of one phase; `tick` does the due work.

    With `former`, the run of a former process is continued. Raises UsageError if run.json of a new
    run cannot be made, for example because a setting is not valid.
    """

    def __init__(
        self, services: Services, spec: LaunchSpec, index: int, path: Path,
        flags: Mapping[str, FlagValue], former: FormerRun | None = None,
    ):  # fmt: skip
        self._services, self._directory, self._link = services, services.directory, services.link
        self._spec, self.path, self._flags = spec, path, flags
        self.phase, self.id = spec.plan.phases[index], f"{spec.launch}/{path.name}"
        former_state = former.state if former else {}
        self.number = former.number if former else 1
        self._ended = former.ended if former else []
        self.is_final = former is not None and former.is_final
        self.state: State = "running" if former and not former.is_unstarted else "starting"
        self.why, self._since_ts, self.over = "", time.time(), False
        self.gates: tuple[Gate, ...] = ()
        self._halt_file = False
        """True if the newest attempt is a restart, and its preparation found a `.HALT`."""
        self._next_at: float | None = None
        """When the next attempt is due (monotonic s); None while the run waits for no attempt."""
        self._git: Mapping[str, Any] = jsonl.mapping(former_state, "git")
        """The newest recorded `git_facts` of the code, or {}."""
        self._changed_code = ""
        """A sentence on changed code, until an alert is raised, or ""."""
        self._published: dict[str, Any] = {}
        """The newest content of supervisor.json."""
        self._published_at = self._status_at = 0.0
        self._begun = time.monotonic()
        self.alerts = Alerts(self.event, self._directory)
        self.observers = Observers(self.alerts, self._link)
        self.alerts.restore(
            former_documents.alerts(former_state),
            lambda name: name in (REPLACED, HALT_FAILED) or name.startswith(ALERT),
        )
        self._context = run_context(
            services, path, self.phase, spec.plan, former, self.number, self.observers
        )
        self.summary = self._context.reducer.summary
        self._check = CheckpointCheck(
            path, spec.plan.checkpoints, self.event, self.alerts, self._context.reducer
        )
        self._snapshots = Snapshots(services, path, self.id, self._context.reducer, self.alerts)
        self._record = former.record if former else self._new_record(index)
        self.summary.loss_unit = loss_unit(self.settings)
        if former:
            # Only a snapshot in the owner is used; an adopting supervisor reads the records again.
            self._snapshots.load(self._link.stored(path / rundir.SNAPSHOT))
        self.attempt = self._new_attempt(former)
        if former:
            self._continue(former)
        self.publish()

    @property
    def settings(self) -> Mapping[str, Any]:
        """The values of the run's settings by name."""
        return setting_values(self._record)

    def own_gpus(self, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
        """Returns the GPUs that the ranks use, as `ranks.own_gpus` does."""
        return ranks.own_gpus(self._record, gpus)

    def _new_record(self, index: int) -> dict[str, Any]:
        """Returns run.json of a new run; the owner stores a copy. Raises UsageError."""
        try:
            record = self._spec.run_record(index, self.path, self._flags, self._contract())
        except (UsageError, OSError) as error:  # for example, the working directory was removed
            self._context.live.remove()
            raise UsageError(str(error)) from error
        self._link.store(self.path / rundir.RUN, record)
        return record

    def _continue(self, former: FormerRun) -> None:
        """Continues the newest attempt, or continues to wait for the next attempt."""
        # Stored only now: a child starts torchrun if the owner has run.json but no processes.
        self._link.store(self.path / rundir.RUN, self._record)
        self._directory.call(lambda: self._directory.set_run(self.path))
        if not former.is_stored:
            self._directory.call(lambda: self._read_code(begins=False))
        for warning in former.warnings:
            self.event("note", warning, "warn")
        if not self._continue_waiting(former.state):
            asked = jsonl.text(former.state, "asked")
            if former.is_stored and asked in former_documents.ENDINGS:
                self.attempt.end(asked, jsonl.text(former.state, "asked_by", "?"))
            self._decide()
        if end := self._link.state.former_end:
            log = f"; see {rundir.SUPERVISOR_LOG}" if end.startswith("exited") else ""
            self.alerts.raise_(
                REPLACED, f"the supervisor's working process {end}; a new one has replaced it, "
                f"which interrupts no rank{log}", "crit",
            )  # fmt: skip
        else:
            self.event("note", "a new supervisor watches this run", "warn")

    def _continue_waiting(self, state: Mapping[str, Any]) -> bool:
        """Waits for the next attempt; returns False if the former process did not wait for it."""
        policy = self._spec.plan.restart
        again = len(self._ended) >= self.number and restart.next_attempt(self._ended, policy)
        if not again:
            return False
        wait_s = policy.backoff_s if isinstance(again, str) else again.wait_s
        self.attempt.abandon()
        self._since_ts = jsonl.number(state, "since_ts") or self._since_ts
        waited_s = liveness.age(self._since_ts) or 0.0
        # At least 1 s, so that a `.HALT` is found before the attempt begins.
        self._next_at = time.monotonic() + max(1.0, wait_s - waited_s)
        self.state, self.why = "restarting", jsonl.text(state, "why")[:400]
        return True

    # --- called by the launch ------------------------------------------------------------------

    @property
    def live(self) -> Path | None:
        """The live directory, or None if the run has none."""
        return self._context.live.path

    @property
    def is_read(self) -> bool:
        """False while the snapshot of a former child is being read."""
        return self._snapshots.is_loaded

    @property
    def pace_s(self) -> float:
        """Seconds until the next tick: 1 s only if all ranks run and no records wait, else less."""
        attempt, tree = self.attempt, self.attempt.tree
        starts = tree.incomplete and UNSTARTED not in self.alerts.open()
        changing = attempt.stage != "run" or self.state == "stopping" or starts
        if changing and self._next_at is None:
            return IDLE_S if attempt.stage == "over" and self._check.doing else BUSY_S
        whole = len(tree.alive()) == self.phase.nproc and not tree.agent_over
        return QUIET_S if whole and self.state == "running" and not attempt.behind else IDLE_S

    def tick(self) -> None:
        """Does the work that is due."""
        if self._next_at is not None:
            self._wait()
        elif not self.over:
            self.attempt.tick()
            self._decide()
        now = time.monotonic()
        if int(now) != int(self._status_at):
            self.observers.run("the run directory", self._watch_directory, None)
            self.observers.run("the snapshot", self._snapshots.poll, None)
            self.observers.run(CHECK, self._poll_check, None)
            self._send_heartbeat()
        if now - self._published_at >= REFRESH_S:
            self.publish()

    def _watch_directory(self) -> None:
        self.alerts.check_directory()
        if not self.over and self._next_at is None:
            self._context.live.watch(self.alerts)
        if time.monotonic() - self._begun >= SETTLED_S:
            self.alerts.clear(REPLACED, "the supervisor works again")
        if self._changed_code:
            self.alerts.raise_(CODE_CHANGED, self._changed_code, "warn")
            self._changed_code = ""

    def _poll_check(self) -> str:
        """Checks the newest checkpoint; returns a sentence on the check in progress, or ""."""
        if not self.over:
            self._check.poll(self.number, self.attempt.saved)
        return self._check.doing

    def end(self, action: str, by: str) -> str:
        """Halts, restarts, stops or kills the run as `Attempt.end` does; returns the answer.

        A run that waits for its next attempt ends, whatever the action is.
        """
        self.is_final = self.is_final or action in former_documents.STOPS
        if action in ("stop", "kill"):
            self._check.stop()
        if self.over:  # a second request in one poll
            return "the run has ended; no further attempt starts"
        if self._next_at is not None:
            facts = Facts(previous_end=self._ended[-1].why, requested=action, by=by)
            self._conclude(*decide(facts))
            return "no rank is running; no further attempt starts"
        answer = self.attempt.end(action, by)
        self._decide()
        return answer

    def event(self, kind: str, text: str, level: str = "info", **more: Any) -> dict[str, Any]:
        """Appends an event to the run's events as `Services.event` does."""
        if kind in ("alert", "clear"):
            self._published_at = 0.0  # publish soon, because the next child needs the open alerts
        return self._services.event(
            self.path, self.id, self.state, self.number, kind, text, level, **more
        )

    # --- attempts ------------------------------------------------------------------------------

    def _contract(self) -> dict[str, str]:
        """Returns the environment variables that identify the run for its ranks."""
        variables = {
            environ.RUN_DIR: self._context.home, environ.RUN_ID: self.id,
            environ.ATTEMPT: str(self.number), environ.TOKEN: self._context.token,
        }  # fmt: skip
        return variables | ({environ.LIVE_DIR: str(self.live)} if self.live is not None else {})

    def command(self) -> tuple[Sequence[str], Mapping[str, str]]:
        """Returns the arguments and the environment of torchrun."""
        logs, grace_s = rundir.logs(self.path, self.number), self._context.watch.grace_s
        environment = launch_spec.environment(self.phase, self._flags, self._contract())
        return launch_spec.argv(self.phase, grace_s, logs), environment

    def _new_attempt(self, former: FormerRun | None = None) -> Attempt:
        attempt = Attempt(self._context, self, self.number, former)
        if former is None and self.live is None:
            self.event("note", self._context.live.missing_words(), "warn")
        self.observers.report_switched_off()
        return attempt

    def prepare(self) -> None:
        """Creates the run directory for the first attempt, or checks it for a later attempt.

        Raises OSError or RefusedError, for example if a `.HALT` exists before a later attempt.
        """
        self._halt_file = self.number > 1 and os.path.lexists(self.path / rundir.HALT)
        if self._halt_file:
            raise RefusedError(f"{rundir.HALT} exists")
        if self.number > 1:
            self._directory.check_token(self.path, self._context.token)
        elif aside := self._directory.make_run(self.path, self._record):
            self.event("note", f"a .HALT from before the start was renamed to {aside.name}", "warn")
        self._read_code(begins=True)

    def _read_code(self, begins: bool) -> None:
        """Reads the commit of the code, on the thread of the run directory.

        With `begins` False, the attempt was adopted, and a recorded commit stays.
        """
        found = launch_spec.git_facts(launch_spec.code_folder(self.phase))
        former = self._git or (self._spec.git if self.phase.is_ours else {})
        self._changed_code = launch_spec.changed_words(former, found)
        if begins or not self._git:
            self._git = found

    def _wait(self) -> None:
        """Starts the next attempt when it is due, or ends the run after a `.HALT` or a stop."""
        if self.attempt.known.halt_file:
            self._conclude(*decide(Facts(previous_end=self._ended[-1].why, halt_file=True)))
        elif self.is_final:  # a former process got the request to end this waiting run
            self._conclude(self._ended[-1].state, self._ended[-1].why)
        elif self._next_at is not None and time.monotonic() >= self._next_at:
            self._next_at = None
            self.number += 1
            self.summary.attempts = self.number
            self._context.live.renew(self.number)
            self.attempt = self._new_attempt()
            self._decide()

    def _ended_as(self, state: State, why: str) -> restart.AttemptEnd:
        facts = self.attempt.facts()
        former = self._ended[-1].checkpoint if self._ended else 0
        if state == "stopped" and not self.attempt.known.requested:
            state = "crashed"  # nobody requested this stop, and only torchrun's log shows it
        return restart.AttemptEnd(
            state, why, self.attempt.checkpoint(former), restart.signature(facts),
            restart.is_permanent(facts), jsonl.text(self._git, "sha"),
        )  # fmt: skip

    # --- the state -----------------------------------------------------------------------------

    def _decide(self) -> None:
        state, why = self.attempt.decided()
        if self.attempt.stage != "over":
            return self._become(state, why)
        known, spawned = self.attempt.known, self.attempt.tree.spawned
        if not spawned and self._ended and (known.requested or self._halt_file):
            facts = replace(known, halt_file=self._halt_file, previous_end=self._ended[-1].why)
            return self._conclude(*decide(facts))
        ended = [*self._ended, self._ended_as(state, why)]
        ending = self.is_final or known.halt_wanted or not spawned
        again = "" if ending else restart.next_attempt(ended, self._spec.plan.restart)
        if isinstance(again, str) and (doing := self.observers.call(CHECK, self._poll_check, "")):
            return self._become("stopping", f"all processes have ended; {doing}")
        self._ended = ended
        if isinstance(again, str):
            return self._conclude(state, f"{why}; {again}" if again else why)
        self._next_at = time.monotonic() + again.wait_s
        text = again.sentence(self.number + 1, self.phase.is_ours)
        return self._become(*decide(Facts(previous_end=why, next_attempt=text)))

    def _become(self, state: State, why: str) -> None:
        self.why = why
        if state == self.state:
            return
        level = "crit" if state in PAGED_STATES else "info"
        self.event("state", f"{self.state} → {state}" + (f": {why}" if why else ""), level,
                   state=state, why=why)  # fmt: skip
        self.state, self._since_ts = state, time.time()
        self.publish()

    def _conclude(self, state: State, why: str) -> None:
        """Ends the run; writes its gates, its last state and a supervisor heartbeat."""
        self._next_at, self.over = None, True
        self.alerts.clear_gates("the run has ended")
        self.gates = gates.unknown(self.phase.gates, "the records were not read")
        if self.is_read:
            self.gates = self.observers.call(
                "gates", lambda: gates.evaluate(self.summary, self.phase.gates),
                gates.unknown(self.phase.gates, "the gates could not be evaluated"),
            )  # fmt: skip
        self._services.publish(
            self.path / rundir.GATES,
            {"v": VERSION, "run": self.id, "ts": time.time(), "result": gates.overall(self.gates),
             "gates": [asdict(gate) for gate in self.gates]},
        )  # fmt: skip
        if self.is_read:
            self.observers.call("the snapshot", self._snapshots.write, None)
        self._become(state, why)
        self._send_heartbeat()
        self.publish()
        self._directory.call(self._remove_memory)

    def _remove_memory(self) -> None:
        if not self._directory.unwritten:
            self._context.live.remove()

    def publish(self) -> None:
        """Replaces supervisor.json."""
        self._published_at = time.monotonic()
        now = {
            "state": self.state, "why": self.why, "since_ts": self._since_ts,
            "attempt": self.number, "alerts": self.alerts.open(), "updated_ts": time.time(),
        }  # fmt: skip
        document = self.observers.run(rundir.SUPERVISOR, self._document, self._published)
        self._published = document | now
        self._services.publish(self.path / rundir.SUPERVISOR, self._published)

    def _document(self) -> dict[str, Any]:
        return dict(self._link.state.identity) | self.attempt.document() | {
            "v": VERSION, "run": self.id, "child": rundir.identity(),
            "lock_token": self._services.lock.token, "launch": self._spec.launch,
            "ended": [asdict(each) for each in self._ended],
            "live_dir": "" if self.over else str(self.live or ""),
            "watch": asdict(self._context.watch), "git": self._git,
            **restart.armed(
                *self.attempt.monitor.on_stall(), not self._context.live.why, self._ended,
                self._spec.plan.restart, self.attempt.saved,
                self.is_final or self.attempt.known.halt_wanted,
            ), **self.summary.as_dict(),
        }  # fmt: skip

    def _send_heartbeat(self) -> None:
        """Writes the supervisor heartbeat to shared memory, if any; this needs no disk."""
        self._status_at = time.monotonic()
        status = {
            "v": VERSION, "ts": time.time(), "mono": self._status_at, "state": self.state,
            "why": self.why, "since_ts": self._since_ts, "run": self.id,
            "blocked_s": round(self._directory.blocked_s(), 2),
            "waiting": self._directory.waiting, "dropped": self._directory.dropped,
            "alerts": list(self.alerts.open().values()), "verdict": self._published.get("verdict"),
        }  # fmt: skip
        self.observers.run(
            "the supervisor heartbeat", lambda: self._context.live.write_status(status), None
        )
