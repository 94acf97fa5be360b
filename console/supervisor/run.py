"""A run: its directory, its state, its sign of life, and its attempts one after the other."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from console.diagnose.watch import STRONG
from console.model import Gate, State
from console.plans import gates
from console.run_state import Facts, decide
from console.sources import liveness
from console.sources.record_files import RecordFiles
from console.sources.reducer import Reducer
from console.sources.series import Series
from console.sources.summary import Summary
from console.supervisor import cross_check, launch_spec, recovery, restart
from console.supervisor.alerts import Alerts
from console.supervisor.attempt import ENDINGS, Attempt
from console.supervisor.git_commit import Commit
from console.supervisor.launch_spec import FlagValue, LaunchSpec
from console.supervisor.observers import ALERT, SETTLED_S, Observers
from console.supervisor.services import RunContext, Services
from console.supervisor.shm import Live
from console.supervisor.snapshots import Snapshots
from trainers.contract import VERSION, environ, jsonl, rundir

REFRESH_S = 5.0
WARM_UP_BYTES = 256 << 10
BUSY_S, IDLE_S, QUIET_S = 0.05, 0.2, 1.0
"""Between two looks while something changes fast, usually, and while nothing changes."""
NO_MEMORY, REPLACED = "live-directory", "supervisor-replaced"


class Run:
    """Owns supervisor.json, the events and the attempts of one phase; `tick` moves it on.

    With `adopt` it goes on with the processes and records that are there. Raises UsageError when
    the phase's settings and flags do not fit together, RefusedError when the records are of another
    directory.
    """

    def __init__(
        self, services: Services, given: LaunchSpec, index: int, path: Path,
        pending: Mapping[str, FlagValue], adopt: bool = False,
    ):  # fmt: skip
        self.spec, self.path, self._index = given, path, index
        self.phase, self.id = given.plan.phases[index], f"{given.launch}/{path.name}"
        self.state: State = "starting"
        self.why = ""
        self.since_ts = time.time()
        self.number = 1
        self.over = self._final = False
        self._services, self._directory, self._link = services, services.directory, services.link
        self._ended: list[restart.Ended] = []
        self._again_at: float | None = None
        self.gates: tuple[Gate, ...] = ()
        self._told: dict[str, Any] = {}
        """The newest content of supervisor.json."""
        self._refreshed = self._said = 0.0
        self._begun = time.monotonic()
        self.alerts = Alerts(self.event, self._directory)
        self.observers = Observers(self.alerts, self._link)
        self._flags = given.flags(index, pending)
        held = self._read_held() if adopt else None
        opened = jsonl.mapping(self._link.kept(path / rundir.SUPERVISOR) or {}, "alerts")
        self.alerts.restore(opened, lambda name: name == REPLACED or name.startswith(ALERT))
        self._context = self._shared(held)
        self.summary = self._context.reducer.summary
        self._snapshots = Snapshots(services, path, self.id, self._context.reducer, self.alerts)
        if held is not None:
            # A snapshot on disk of a former supervisor is not believed: the records are read again.
            self._snapshots.load(self._link.kept(path / rundir.SNAPSHOT))
        if held is None:
            self._record = given.run_record(index, path, self._flags, self._contract())
            self._link.keep(path / rundir.RUN, self._record)
        for name in self._link.off():
            self.observers.leave_out(name)
        folder = launch_spec.code_folder(self.phase)
        self._commit = Commit(folder, self.alerts, jsonl.mapping(held or {}, "git"))
        self.attempt = self._attempt(held=held)
        if held is not None:
            self._go_on(held)
        self.publish()

    def _shared(self, held: Mapping[str, Any] | None) -> RunContext:
        """Returns what is the same for all attempts; `held` is a former supervisor's document."""
        path, world, plan = self.path, self.phase.nproc, self.spec.plan
        if held is None:
            home, token = str(path.absolute()), secrets.token_hex(8)
            summary = Summary(world, 1, 0)
        else:
            home, token = recovery.home(self._record), recovery.token(self._record)
            is_kept = self._link.kept(path / rundir.RUN) is not None
            summary = recovery.summary(held, None if is_kept else path, world, self.number)
        reducer = Reducer(Series(keeps=False), summary, timed=True)
        # A new reader begins before the snapshot's end: it has to learn what is usual.
        reading = RecordFiles(path, cursors=reducer.cursors, warm_up_bytes=WARM_UP_BYTES)
        live = Live(token, world, self.number, path, held is not None)
        if held is not None and live.path is None and self._link.began(path, home, self.number):
            live.renew(self.number)  # no process has it yet
        actions = {"stall": "restart"} if plan.restart.when == "stall" else {}
        return RunContext(
            self._services, path, home, token, self.phase, plan.watch, actions, live, reducer,
            reading, self.observers,
        )  # fmt: skip

    def _go_on(self, held: Mapping[str, Any]) -> None:
        """Goes on where the former supervisor, or the former child of this owner, was."""
        self._link.keep(self.path / rundir.RUN, self._record)
        self._directory.call(lambda: self._directory.hold(self.path))
        if not self._wait_on(held):
            if (asked := jsonl.text(held, "asked")) in ENDINGS:
                self.attempt.end(asked, jsonl.text(held, "asked_by", "?"))
            self._decide()
        if mishap := self._link.charge.mishap:
            said = f"; see {rundir.SUPERVISOR_LOG}" if mishap.startswith("ended with exit") else ""
            self.alerts.raise_(
                REPLACED, f"the supervisor's working process {mishap}; the ranks go on, a new one "
                f"watches them{said}", "crit",
            )  # fmt: skip

    def _read_held(self) -> dict[str, Any]:
        """Takes what a former child of this owner kept, else what a former supervisor left.

        Returns its document.
        """
        record = self._link.kept(self.path / rundir.RUN)
        held = self._link.kept(self.path / rundir.SUPERVISOR) or {}
        if record is None:
            record, held, doubts = cross_check.of_run(self.path, self.spec, self._index)
            for doubt in doubts:
                self.event("note", doubt, "warn")
        self._record = record
        self._flags = recovery.checked(jsonl.mapping(record, "flags"), "origin")
        running = recovery.check_processes(record, held)
        self._ended = recovery.ended(held)
        told = min(jsonl.integer(held, "attempt") or 1, len(self._ended) + 1)
        self.number = running or max(1, told)
        if running or jsonl.text(held, "state") != "restarting":
            del self._ended[self.number - 1 :]
        self._final = jsonl.text(held, "state") in recovery.FINAL
        self.state = "running"
        return held

    def _wait_on(self, held: Mapping[str, Any]) -> bool:
        """Goes on waiting for the next attempt where the former supervisor waited."""
        policy = self.spec.plan.restart
        if len(self._ended) < self.number or not (again := restart.after(self._ended, policy)):
            return False
        wait_s = policy.backoff_s if isinstance(again, str) else again.wait_s
        self.attempt.abandon()
        self.since_ts = jsonl.number(held, "since_ts") or self.since_ts
        waited_s = liveness.age(self.since_ts) or 0.0
        # Long enough for a look that finds `.HALT`.
        self._again_at = time.monotonic() + max(1.0, wait_s - waited_s)
        self.state, self.why = "restarting", jsonl.text(held, "why")[:400]
        return True

    # --- what the launch calls -----------------------------------------------------------------

    @property
    def live(self) -> Path | None:
        """The memory-backed directory of the ranks' pulses, None without shared memory."""
        return self._context.live.path

    @property
    def is_read(self) -> bool:
        """Says whether what former records add up to is known: a new process reads it first."""
        return self._snapshots.is_loaded

    @property
    def pace_s(self) -> float:
        """Seconds until the next look; 1 s while all ranks live and run."""
        attempt, tree = self.attempt, self.attempt.tree
        changing = attempt.stage != "run" or self.state == "stopping" or tree.incomplete
        if changing and self._again_at is None:
            return BUSY_S
        whole = len(tree.alive()) == self.phase.nproc and not tree.agent_over
        return QUIET_S if whole and self.state == "running" and not attempt.behind else IDLE_S

    def tick(self) -> None:
        """Does what is due; never waits."""
        if self._again_at is not None:
            self._wait()
        elif not self.over:
            self.attempt.tick()
            self._decide()
        now = time.monotonic()
        if int(now) != int(self._said):
            self.observers.run("the run directory", self._watch_directory, None)
            self.observers.run("the snapshot", self._snapshots.look, None)
            self._say_alive()
        if now - self._refreshed >= REFRESH_S:
            self.publish()

    def _watch_directory(self) -> None:
        self.alerts.watch_writes()
        if not self.over and self._again_at is None:
            self._watch_memory()
        if time.monotonic() - self._begun >= SETTLED_S:
            self.alerts.clear(REPLACED, "the supervisor works again")
        if self._commit.take():
            self.publish()

    def _watch_memory(self) -> None:
        if self._context.live.is_removed():
            self.alerts.raise_(
                NO_MEMORY, f"shared memory {self.live} was removed while the run goes on "
                "(RemoveIPC=yes at a logout?): stack dumps are not available until the next "
                "attempt; run loginctl enable-linger", "warn",
            )  # fmt: skip
        else:
            self.alerts.clear(NO_MEMORY, "the run has shared memory again")

    def end(self, action: str, by: str) -> str:
        """Halts, stops or kills the run, unless as much was asked before; returns the answer."""
        if self._again_at is not None:
            self._conclude(*decide(Facts(previous_end=self._ended[-1].why, asked=action, by=by)))
            return "no rank was running; no further attempt starts"
        answer = self.attempt.end(action, by)
        self._decide()
        return answer

    def event(self, kind: str, text: str, level: str = "info", **more: Any) -> dict[str, Any]:
        """Appends to the run's events, under the attempt's number; alerts also reach the hook."""
        record = self._directory.event(self.path, self.number, kind, text, level, **more)
        if kind in ("alert", "clear"):
            self._refreshed = 0.0  # the next process goes on with what is open
        if kind == "alert" or (kind == "state" and level == "crit"):
            self._services.hooks.alert({"state": self.state} | record | {"run": self.id})
        return record

    # --- attempts ------------------------------------------------------------------------------

    def _contract(self) -> dict[str, str]:
        """Returns what the ranks are told about the run that they belong to."""
        told = {
            environ.RUN_DIR: self._context.home, environ.RUN_ID: self.id,
            environ.ATTEMPT: str(self.number), environ.TOKEN: self._context.token,
        }  # fmt: skip
        return told | ({environ.LIVE_DIR: str(self.live)} if self.live is not None else {})

    def command(self, number: int) -> tuple[Sequence[str], Mapping[str, str]]:
        """Returns the arguments and the environment of torchrun."""
        logs, grace_s = rundir.logs(self.path, number), self._context.watch.grace_s
        environment = launch_spec.environment(self.phase, self._flags, self._contract())
        return launch_spec.argv(self.phase, grace_s, logs), environment

    def _attempt(self, held: Mapping[str, Any] | None = None) -> Attempt:
        attempt = Attempt(self._context, self, self.number, held)
        self._commit.ask(held is None)
        if held is None and self.live is None:
            self.event(
                "note", f"nothing can be made in {rundir.SHARED_MEMORY} "
                f"({self._context.live.why}): the ranks' pulses come through the run directory, "
                "four times a second, and a stall is only an alert; make room there (for a "
                "container, a larger --shm-size)", "warn",
            )  # fmt: skip
        return attempt

    def prepare(self, number: int) -> None:
        """Makes the run directory for the first attempt, checks it for a later one."""
        if number > 1:
            return self._directory.check_token(self.path, self._context.token)
        aside = self._directory.make_run(self.path, self._record)
        if aside is not None:
            text = f"a .HALT from before the start was set aside as {aside.name}"
            self.event("note", text, "warn")
        return None

    def _wait(self) -> None:
        """Starts the next attempt when its time has come; a `.HALT` ends the waiting."""
        self.attempt.tick()
        if self.attempt.known.halt_file:
            self._conclude(*decide(Facts(previous_end=self._ended[-1].why, halt_file=True)))
        elif self._again_at is not None and time.monotonic() >= self._again_at:
            self._again_at = None
            self.number += 1
            self.summary.attempts = self.number
            self._context.live.renew(self.number)
            self.attempt = self._attempt()
            self._decide()

    def _ended_as(self, state: State, why: str) -> restart.Ended:
        facts = self.attempt.facts()
        former = self._ended[-1].checkpoint if self._ended else 0
        if state == "stopped" and not self.attempt.known.asked:
            state = "crashed"  # only torchrun's log says that somebody stopped it
        return restart.Ended(
            state, why, self.attempt.checkpoint(former), restart.signature(facts),
            restart.deterministic(facts), jsonl.text(self._commit.git, "sha"),
        )  # fmt: skip

    # --- the state -----------------------------------------------------------------------------

    def _decide(self) -> None:
        state, why = self.attempt.decided()
        if self.attempt.stage != "over":
            return self._become(state, why)
        self._ended.append(self._ended_as(state, why))
        known = self.attempt.known
        ending = self._final or known.halt_wanted or not self.attempt.tree.spawned
        again = "" if ending else restart.after(self._ended, self.spec.plan.restart)
        if isinstance(again, str):
            return self._conclude(state, f"{why}; {again}" if again else why)
        self._again_at = time.monotonic() + again.wait_s
        text = f"attempt {self.number + 1} begins in {again.wait_s:g} s from {again.origin}"
        return self._become(*decide(Facts(previous_end=why, next_attempt=text)))

    def _become(self, state: State, why: str) -> None:
        self.why = why
        if state == self.state:
            return
        level = "crit" if state in ("stalled", "failed", "crashed", "restarting") else "info"
        self.event("state", f"{self.state} → {state}" + (f": {why}" if why else ""), level,
                   state=state, why=why)  # fmt: skip
        self.state, self.since_ts = state, time.time()
        self.publish()

    def _conclude(self, state: State, why: str) -> None:
        """Writes the last word; while the disk does not take it, it stands in shared memory."""
        self._again_at, self.over = None, True
        self.gates = held = gates.unknown(self.phase.gates, "the records were not read")
        if self.is_read:
            self.gates = held = self.observers.once(
                "gates", lambda: gates.evaluate(self.summary, self.phase.gates),
                gates.unknown(self.phase.gates, "they could not be evaluated"),
            )  # fmt: skip
        self._directory.document(
            self.path / rundir.GATES,
            {"v": VERSION, "run": self.id, "ts": time.time(), "result": gates.overall(held),
             "gates": [asdict(gate) for gate in held]},
        )  # fmt: skip
        if self.is_read:
            self.observers.once("the snapshot", self._snapshots.write, None)
        self._become(state, why)
        self._say_alive()
        self.publish()
        self._directory.call(self._leave_memory)

    def _leave_memory(self) -> None:
        if not self._directory.unwritten:
            self._context.live.remove()

    def publish(self) -> None:
        """Replaces supervisor.json."""
        self._refreshed = time.monotonic()
        now = {
            "state": self.state, "why": self.why, "since_ts": self.since_ts, "attempt": self.number,
            "updated_ts": time.time(),
        }  # fmt: skip
        self._told = self.observers.run(rundir.SUPERVISOR, self._document, self._told) | now
        self._services.publish(
            self.path / rundir.SUPERVISOR, self._told, alerts=self.alerts.open(),
            oom=asdict(self.attempt.oom_before),
        )  # fmt: skip

    def _document(self) -> dict[str, Any]:
        return dict(self._link.charge.identity) | self.attempt.document() | {
            "v": VERSION, "run": self.id, "child": rundir.identity(),
            "lock_token": self._services.lock_token, "launch": self.spec.launch,
            "ended": [asdict(each) for each in self._ended],
            "live_dir": "" if self.over else str(self.live or ""),
            "watch": asdict(self._context.watch), "git": self._commit.git, **self._armed(),
            **self.summary.as_dict(),
        }  # fmt: skip

    def _armed(self) -> dict[str, str]:
        """Returns what happens by itself when the run stalls or crashes, also in a word or two."""
        policy = self.spec.plan.restart
        action, text = self.attempt.watching.on_stall()
        if self._context.live.why and action in STRONG:
            action, text = "warn", "if it stalls: alert only, there is no shared memory"
        short = "alert" if action == "warn" else action
        if policy.when != "never":
            left = restart.left(self._ended, policy, self.attempt.saved)
            then = f"restart, {left} left" if left else "no restart, none is left"
            text, short = f"{text}; if it crashes: {then}", f"{short} ↻{left}"
        return {"armed": text, "armed_short": short}

    def _say_alive(self) -> None:
        """Replaces the sign of life: all of it also where the run directory takes no writes."""
        self._said = time.monotonic()
        self.observers.run("the sign of life", self._write_status, None)

    def _write_status(self) -> None:
        self._context.live.write_status({
            "v": VERSION, "ts": time.time(), "mono": self._said, "state": self.state,
            "why": self.why, "since_ts": self.since_ts, "run": self.id,
            "blocked_s": round(self._directory.blocked_s(), 2),
            "waiting": self._directory.waiting, "dropped": self._directory.dropped,
            "alerts": list(self.alerts.open().values()),
        })  # fmt: skip
