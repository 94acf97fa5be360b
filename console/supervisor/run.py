"""A run: its directory, its state, its sign of life, and its attempts one after the other."""

from __future__ import annotations

import errno
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from console.diagnose.watch import STRONG
from console.model import Gate, State
from console.plans import gates
from console.run_state import Facts, decide
from console.sources import presence
from console.sources.summary import Summary
from console.supervisor import belief, inheritance, orders, restart
from console.supervisor.alerts import Alerts
from console.supervisor.attempt import Attempt
from console.supervisor.live import Live
from console.supervisor.observers import SETTLED_S, Observers
from console.supervisor.orders import FlagValue, Orders
from console.supervisor.services import Services
from trainers.contract import VERSION, environ, jsonl, rundir
from trainers.contract.errors import RefusedError

REFRESH_S = 5.0
CODE_CHANGED, NO_MEMORY, REPLACED = "code-changed", "live-directory", "supervisor-replaced"


class Run:
    """Owns supervisor.json, the events and the attempts of one phase; `tick` moves it on.

    With `adopt` it goes on with the processes and records that are there. Raises UsageError when
    the phase's settings and flags do not fit together, RefusedError when the records are of another
    directory.
    """

    def __init__(
        self, services: Services, given: Orders, index: int, path: Path,
        pending: Mapping[str, FlagValue], adopt: bool = False,
    ):  # fmt: skip
        self.orders, self.path, self._index = given, path, index
        self._home = str(path.absolute())
        self.phase, self.watch = given.plan.phases[index], given.plan.watch
        self.id = f"{given.launch}/{path.name}"
        self.state: State = "starting"
        self.why = ""
        self.since_ts = time.time()
        self.number = 1
        self.over = False
        self._services, self._directory = services, services.directory
        self._ended: list[restart.Ended] = []
        self._again_at: float | None = None
        self._final = False
        self.gates: tuple[Gate, ...] = ()
        self._told: dict[str, Any] = {}
        """The newest content of supervisor.json."""
        self.summary = Summary(self.phase.nproc, 1, 0)
        self._refreshed = self._said = 0.0
        self._begun = time.monotonic()
        held = self._read_held() if adopt else None
        flags = given.flags(index, pending) if held is None else inheritance.flags(self._record)
        self._token = secrets.token_hex(8) if held is None else inheritance.token(self._record)
        self._live = Live(self._token, self.phase.nproc, self.number, path, adopt)
        owner = services.owner
        if adopt and self._live.path is None and owner.began(path, self._home, self.number):
            self._live.renew(self.number)  # no process has it yet
        contract = self._contract()
        if held is None:
            self._record = given.run_record(index, path, flags, contract)
            services.owner.keep(path / rundir.RUN, self._record)
        self._environment = orders.environment(self.phase, flags, contract)
        self.alerts = Alerts(self.event, self._directory)
        self.observers = Observers(self.alerts, services.owner)
        for name in services.owner.off():
            self.observers.leave_out(name)
        self._git = jsonl.mapping(held or {}, "git")
        self._git_found: deque[tuple[Mapping[str, Any], bool]] = deque()
        self.attempt = self._attempt(held=held)
        if held is not None:
            services.owner.keep(path / rundir.RUN, self._record)
            self._directory.call(lambda: self._directory.hold(path))
        if held is not None and not self._wait_on(held):
            self._decide()
        self._publish()
        if adopt and services.owner.mishap:
            self.alerts.raise_(
                REPLACED, f"the supervisor's working process {services.owner.mishap}; the ranks go "
                f"on, a new one watches them; see {rundir.SUPERVISOR_LOG}", "crit",
            )  # fmt: skip

    def _read_held(self) -> dict[str, Any]:
        """Takes what a former child of this owner kept, else what a former supervisor left.

        Returns its document.
        """
        record = self._services.owner.kept(self.path / rundir.RUN)
        held = self._services.owner.kept(self.path / rundir.SUPERVISOR) or {}
        if record is None:
            record, held, doubts = belief.of_run(self.path, self.orders, self._index)
            for doubt in doubts:
                self.event("note", doubt, "warn")
        self._record = record
        self._home = inheritance.home(record)
        running = inheritance.check_processes(record, held)
        self._ended = inheritance.ended(held)
        told = min(jsonl.integer(held, "attempt") or 1, len(self._ended) + 1)
        self.number = running or max(1, told)
        if running or jsonl.text(held, "state") != "restarting":
            del self._ended[self.number - 1 :]
        self._final = jsonl.text(held, "state") in inheritance.FINAL
        self.summary = inheritance.summary(held, self.path, self.phase.nproc, self.number)
        self.state = "running"
        return held

    def _wait_on(self, held: Mapping[str, Any]) -> bool:
        """Goes on waiting for the next attempt where the former supervisor waited."""
        if len(self._ended) < self.number:
            return False
        policy = self.orders.plan.restart
        again = restart.after(self._ended, policy)
        waited = jsonl.text(held, "state") == "restarting"  # an event confirms it, too
        if isinstance(again, str) and not (again and waited):
            return False
        wait_s = policy.backoff_s if isinstance(again, str) else again.wait_s
        self.attempt.abandon()
        self.since_ts = jsonl.number(held, "since_ts") or self.since_ts
        waited_s = presence.age(self.since_ts) or 0.0
        # Long enough for a look that finds `.HALT`.
        self._again_at = time.monotonic() + max(1.0, wait_s - waited_s)
        self.state, self.why = "restarting", jsonl.text(held, "why")[:400]
        return True

    # --- what the launch calls -----------------------------------------------------------------

    @property
    def live(self) -> Path | None:
        """The memory-backed directory of the ranks' pulses, None without shared memory."""
        return self._live.path

    @property
    def busy(self) -> bool:
        """Says whether something changes fast and wants to be looked at often."""
        attempt = self.attempt
        changing = attempt.stage != "run" or self.state == "stopping" or attempt.tree.incomplete
        return changing and self._again_at is None

    @property
    def quiet(self) -> bool:
        """Says whether nothing is due but what is done once a second: all ranks live and run."""
        attempt = self.attempt
        whole = len(attempt.tree.alive()) == self.phase.nproc and not attempt.tree.agent_over
        return whole and self.state == "running" and not attempt.behind

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
            self._say_alive()
        if now - self._refreshed >= REFRESH_S:
            self._publish()

    def _watch_directory(self) -> None:
        self.alerts.watch_writes()
        self._watch_memory()
        if time.monotonic() - self._begun >= SETTLED_S:
            self.alerts.clear(REPLACED, "the supervisor works again")
        while self._git_found:
            self._take_git(*self._git_found.popleft())

    def _watch_memory(self) -> None:
        if self.over or self._again_at is not None:
            return
        if self._live.is_removed():
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
            self._conclude(*decide(Facts(before=self._ended[-1].why, asked=action, by=by)))
            return "no rank was running; no further attempt starts"
        answer = self.attempt.end(action, by)
        self._decide()
        return answer

    def event(self, kind: str, text: str, level: str = "info", **more: Any) -> dict[str, Any]:
        """Appends to the run's events, under the attempt's number; alerts also reach the hook."""
        record = self._directory.event(self.path, self.number, kind, text, level, **more)
        if kind == "alert" or (kind == "state" and level == "crit"):
            self._services.hooks.alert({"state": self.state} | record | {"run": self.id})
        return record

    # --- attempts ------------------------------------------------------------------------------

    def _contract(self) -> dict[str, str]:
        """Returns what the ranks are told about the run that they belong to."""
        told = {
            environ.RUN_DIR: self._home, environ.RUN_ID: self.id,
            environ.ATTEMPT: str(self.number), environ.TOKEN: self._token,
        }  # fmt: skip
        return told | ({environ.LIVE_DIR: str(self.live)} if self.live is not None else {})

    def _attempt(
        self, former: Attempt | None = None, held: Mapping[str, Any] | None = None
    ) -> Attempt:
        argv = orders.argv(self.phase, self.watch.grace_s, rundir.logs(self.path, self.number))
        on_stall = {"stall": "restart"} if self.orders.plan.restart.when == "stall" else {}
        attempt = Attempt(
            self._services, self.observers,
            run=self.path, number=self.number, phase=self.phase, watch=self.watch,
            token=self._token, live=self._live, argv=argv,
            environment=self._environment | self._contract(),
            prepare=self._prepare if self.number == 1 else self._check,
            event=self.event, changed=self._publish, actions=on_stall, summary=self.summary,
            former=former, held=held,
        )  # fmt: skip
        self._ask_git(held is None)
        if held is None and self.live is None:
            self.event(
                "note", f"nothing can be made in {rundir.SHARED_MEMORY} ({self._live.why}): the "
                "ranks' pulses come through the run directory, four times a second, and a stall is "
                "only an alert; make room there (for a container, a larger --shm-size)", "warn",
            )  # fmt: skip
        return attempt

    def _ask_git(self, begins: bool) -> None:
        """Asks for the commit of the code in a thread: git may take seconds.

        An attempt that was taken over keeps the commit that it began with.
        """
        folder, found = orders.code_folder(self.phase), self._git_found
        threading.Thread(
            target=lambda: found.append((orders.git_facts(folder), begins)), name="git",
            daemon=True,
        ).start()  # fmt: skip

    def _take_git(self, git: Mapping[str, Any], begins: bool) -> None:
        """Takes the commit of the code; another one than before is said."""
        former = self._git
        if former and git and former != git:
            names = " → ".join(map(_commit, (former, git)))
            text = f"the code changed since the last attempt or supervisor: {names}"
            self.alerts.raise_(CODE_CHANGED, text, "warn")
        self._git = dict(git) if git and (begins or not former) else former
        self._publish()

    def _check(self) -> None:
        """Raises RefusedError when the run directory belongs to another run.

        Raises OSError while nobody can tell: a directory that is away now may come back.
        """
        path = self.path / rundir.RUN
        record = rundir.read_json(path)
        if record is None:
            raise OSError(errno.EIO, "it is not there or cannot be read", str(path))
        if jsonl.text(jsonl.mapping(record, "environment"), environ.TOKEN) != self._token:
            raise RefusedError(f"{self.path} belongs to another run; no further attempt begins")

    def _prepare(self) -> None:
        """Makes the run directory; runs on the directory's thread."""
        rundir.make_directory(self.path)
        self._directory.hold(self.path)
        for folder in (self.path / rundir.REQUESTS, self.path / rundir.VERDICTS):
            rundir.make_directory(folder)
        aside = rundir.set_aside_stale_halt(self.path)
        if aside is not None:
            self.event("note", f"a .HALT from before the start was set aside as {aside.name}",
                       "warn")  # fmt: skip
        rundir.write_json(self.path / rundir.RUN, self._record)

    def _wait(self) -> None:
        """Starts the next attempt when its time has come; a `.HALT` ends the waiting."""
        self.attempt.tick()
        if self.attempt.known.halt_file:
            self._conclude(*decide(Facts(before=self._ended[-1].why, halt_file=True)))
        elif self._again_at is not None and time.monotonic() >= self._again_at:
            self._again_at = None
            self.number += 1
            self.summary.attempts = self.number
            self._live.renew(self.number)
            self.attempt = self._attempt(self.attempt)
            self._decide()

    def _ended_as(self, state: State, why: str) -> restart.Ended:
        facts = self.attempt.facts()
        former = self._ended[-1].checkpoint if self._ended else 0
        if state == "stopped" and not self.attempt.known.asked:
            state = "crashed"  # only torchrun's log says that somebody stopped it
        return restart.Ended(
            state, why, self.attempt.checkpoint(former), restart.signature(facts),
            restart.deterministic(facts),
            self.attempt.known.asked == "restart", jsonl.text(self._git, "sha"),
        )  # fmt: skip

    # --- the state -----------------------------------------------------------------------------

    def _decide(self) -> None:
        state, why = self.attempt.decided()
        if self.attempt.stage != "over":
            return self._become(state, why)
        self._ended.append(self._ended_as(state, why))
        known = self.attempt.known
        ending = self._final or known.halt_file or known.asked == "halt"
        ending = ending or not self.attempt.began
        again = "" if ending else restart.after(self._ended, self.orders.plan.restart)
        if isinstance(again, str):
            return self._conclude(state, f"{why}; {again}" if again else why)
        self._again_at = time.monotonic() + again.wait_s
        text = f"attempt {self.number + 1} begins in {again.wait_s:g} s from {again.origin}"
        return self._become(*decide(Facts(before=why, again=text)))

    def _become(self, state: State, why: str) -> None:
        self.why = why
        if state == self.state:
            return
        level = "crit" if state in ("stalled", "failed", "crashed", "restarting") else "info"
        self.event("state", f"{self.state} → {state}" + (f": {why}" if why else ""), level,
                   state=state, why=why)  # fmt: skip
        self.state, self.since_ts = state, time.time()
        self._publish()

    def _conclude(self, state: State, why: str) -> None:
        """Writes the last word; while the disk does not take it, it stands in shared memory."""
        self._again_at, self.over = None, True
        self.gates = held = self.observers.once(
            "gates", lambda: gates.evaluate(self.summary, self.phase.gates),
            gates.unknown(self.phase.gates, "they could not be evaluated"),
        )  # fmt: skip
        self._directory.document(
            self.path / rundir.GATES,
            {"v": VERSION, "run": self.id, "ts": time.time(), "result": gates.overall(held),
             "gates": [asdict(gate) for gate in held]},
        )  # fmt: skip
        self._become(state, why)
        self._say_alive()
        self._publish()
        self._directory.call(self._leave_memory)

    def _leave_memory(self) -> None:
        if not self._directory.unwritten:
            self._live.remove()

    def _publish(self) -> None:
        """Replaces supervisor.json."""
        self._refreshed = time.monotonic()
        now = {
            "state": self.state, "why": self.why, "since_ts": self.since_ts, "attempt": self.number,
            "updated_ts": time.time(),
        }  # fmt: skip
        self._told = self.observers.run(rundir.SUPERVISOR, self._document, self._told) | now
        self._services.publish(self.path / rundir.SUPERVISOR, self._told)

    def _document(self) -> dict[str, Any]:
        tree, verdict = self.attempt.tree, self.attempt.watching.verdict
        known = self.attempt.known
        agent = tree.agent
        torchrun = {"pid": agent.pid, "start_ticks": agent.start_ticks} if agent else None
        return dict(self._services.owner.identity) | {
            "v": VERSION, "run": self.id, "child": rundir.identity(),
            "lock_token": self._services.lock_token,
            "launch": self.orders.launch, "torchrun": torchrun,
            "workers": self.attempt.workers(), "asked": known.asked,
            "asked_by": known.by, "ended": [asdict(each) for each in self._ended],
            "live_dir": "" if self.over else str(self.live or ""),
            "watch": asdict(self.watch), "git": self._git, **self._armed(),
            **self.summary.as_dict(),
            "verdict": asdict(verdict) if verdict else None,
        }  # fmt: skip

    def _armed(self) -> dict[str, str]:
        """Returns what happens by itself when the run stalls or crashes, also in a word or two."""
        policy = self.orders.plan.restart
        action, text = self.attempt.watching.on_stall()
        if self._live.why and action in STRONG:
            action, text = "warn", "if it stalls: alert only, there is no shared memory"
        short = "alert" if action == "warn" else action
        if policy.when != "never":
            left = restart.left(self._ended, policy, self.attempt.story.saved)
            then = f"restart, {left} left" if left else "no restart, none is left"
            text, short = f"{text}; if it crashes: {then}", f"{short} ↻{left}"
        return {"armed": text, "armed_short": short}

    def _say_alive(self) -> None:
        """Replaces the sign of life: all of it also where the run directory takes no writes."""
        self._said = time.monotonic()
        self.observers.run("the sign of life", self._write_status, None)

    def _write_status(self) -> None:
        self._live.write_status({
            "v": VERSION, "ts": time.time(), "mono": self._said, "state": self.state,
            "why": self.why, "since_ts": self.since_ts, "run": self.id,
            "blocked_s": round(self._directory.blocked_s(), 2),
            "waiting": self._directory.waiting, "dropped": self._directory.dropped,
            "alerts": list(self.alerts.open().values()),
        })  # fmt: skip


def _commit(git: Mapping[str, Any]) -> str:
    changed = " with local changes" if git.get("dirty") else ""
    return f"commit {jsonl.text(git, 'sha')[:12] or '?'}{changed}"
