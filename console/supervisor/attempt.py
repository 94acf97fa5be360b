"""One attempt of one phase: from its directory to the state it ended in."""

from __future__ import annotations

import os
import secrets
import select
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from console.diagnose.stall import diagnose
from console.model import Gate, State, Verdict
from console.plans import gates
from console.sources.nvml import Nvml
from console.supervisor import live, orders
from console.supervisor.directory import Directory, Job
from console.supervisor.ending import End, Facts, decide
from console.supervisor.follow import Files, News, Rest, Story
from console.supervisor.orders import FlagValue, Orders
from console.supervisor.sampling import Sampler
from console.supervisor.tree import Tree, Worker
from trainers.contract import VERSION, environ, jsonl, rundir
from trainers.contract.errors import ContractError

Stage = Literal["prepare", "run", "collect", "over"]
REFRESH_S = 5.0
ENDINGS = ("halt", "stop", "kill")
"""What can be asked, each stronger than the one before."""
AGENT_LOST, RANK_LOST = "torchrun-gone", "rank-gone"


class Attempt:
    """Owns the processes, the state and the records of one attempt; `tick` moves it on.

    Raises UsageError when the phase's settings and flags do not fit together.
    """

    def __init__(
        self, given: Orders, index: int, run: Path, pending: Mapping[str, FlagValue],
        directory: Directory, nvml: Nvml, poller: select.poll,
    ):  # fmt: skip
        self.orders, self.index, self.run = given, index, run
        self.phase, self.watch = given.plan.phases[index], given.plan.watch
        self.number = 1
        self.id = f"{given.launch}/{run.name}"
        self.token = secrets.token_hex(8)
        self.flags = given.flags(index, pending)
        self.live = live.create(self.token)
        self.stage: Stage = "prepare"
        self.state: State = "starting"
        self.why = ""
        self.gates: tuple[Gate, ...] = ()
        self.story = Story()
        self.tree = Tree(self.token, self.phase.nproc, poller)
        self.begun_ts = self.since_ts = time.time()
        self._directory = directory
        self._files = Files(run, self.number, self.phase.nproc)
        self._news: deque[News] = deque()
        self._sampler = Sampler(nvml, self.live or run)
        self._begun = time.monotonic()
        self._verdict: Verdict | None = None
        self._asked = self._by = self._failure = ""
        self._words: Mapping[int, str] = {}
        self._halt_file = self._ending = False
        self._alerts: set[str] = set()
        self._refreshed = self._sampled = 0.0
        self._record = self._run_record()
        self._prepared: Job[int] = directory.job(self._prepare)
        self._collected: Job[Rest] | None = None
        self._publish()

    # --- what the launch calls -----------------------------------------------------------------

    def tick(self) -> None:
        """Does what is due; never waits."""
        self._take_news()
        {"prepare": self._begin, "run": self._watch_it, "collect": self._conclude,
         "over": lambda: None}[self.stage]()  # fmt: skip
        self._decide()

    def look(self, heartbeats: bool) -> None:
        """Reads the run's files; runs on the directory's thread. The next tick takes it in."""
        self._news.append(self._files.look(heartbeats))

    def _take_news(self) -> None:
        while self._news:
            self._take(self._news.popleft())

    def _take(self, news: News) -> None:
        for record in news.records:
            self.story.take(record)
        self._halt_file = self._halt_file or news.halt_file
        if news.ending and not self._ending and self._asked not in ("stop", "kill"):
            self._ending = True
            self.tree.expire(self.watch.grace_s)
            gone = [w.rank for w in self.tree.workers.values() if w.over_ts is not None]
            who = f"rank {', '.join(map(str, gone))}" if gone else "a rank"
            self.alert(RANK_LOST, f"{who} is gone, torchrun ends the others; what is left "
                       f"after {self.watch.grace_s:g} s is killed", "crit")  # fmt: skip
        if news.disk:
            self._sampler.disk = news.disk

    def end(self, action: str, by: str) -> str:
        """Halts, stops or kills the ranks, unless as much was asked before; returns the answer."""
        if self.stage in ("collect", "over"):
            return "the ranks have ended already; no further phase starts"
        if self._asked and ENDINGS.index(action) <= ENDINGS.index(self._asked):
            return f"{self._asked} is under way, asked by {self._by}"
        self._asked, self._by = action, by
        if action == "halt":
            self._directory.call(lambda: rundir.ask_halt(self.run, by))
            answer = ".HALT is written; all ranks stop at the same step and save"
        elif action == "stop":
            self.tree.terminate(self.watch.grace_s)
            answer = f"TERM is sent; what is left after {self.watch.grace_s:g} s is killed"
        else:
            self.tree.kill()
            answer = "KILL is sent to every process of the run"
        self._decide()
        return answer

    def event(self, kind: str, text: str, level: str = "info", **more: Any) -> None:
        self._directory.event(self.run, self.number, kind, text, level, **more)

    def alert(self, name: str, text: str, level: str = "warn", key: str = "") -> None:
        """Raises an alert, once until it is cleared."""
        if name not in self._alerts:
            self._alerts.add(name)
            self.story.summary.take_event({"kind": "alert", "alert": name})
            self.event("alert", text, level, alert=name, key=key)

    def clear(self, name: str, text: str) -> None:
        if name in self._alerts:
            self._alerts.discard(name)
            self.event("clear", text, alert=name)

    def open_alerts(self) -> frozenset[str]:
        return frozenset(self._alerts)

    # --- stages --------------------------------------------------------------------------------

    def _prepare(self) -> int:
        """Makes the run directory; returns the descriptor of torchrun's log."""
        rundir.make_directory(self.run)
        logs = rundir.logs(self.run, self.number)
        for folder in (self.run / rundir.REQUESTS, self.run / rundir.VERDICTS, logs):
            rundir.make_directory(folder)
        aside = rundir.set_aside_stale_halt(self.run)
        if aside is not None:
            self.event("note", f"a .HALT from before the start was set aside as {aside.name}",
                       "warn")  # fmt: skip
        rundir.write_json(self.run / rundir.RUN, self._record)
        return rundir.open_append(logs / rundir.TORCHRUN_LOG)

    def _argv(self) -> list[str]:
        return orders.argv(self.phase, self.watch.grace_s, rundir.logs(self.run, self.number))

    def _environment(self) -> dict[str, str]:
        contract = {
            environ.RUN_DIR: str(self.run.absolute()), environ.RUN_ID: self.id,
            environ.ATTEMPT: str(self.number), environ.TOKEN: self.token,
        }  # fmt: skip
        if self.live is not None:
            contract[environ.LIVE_DIR] = str(self.live)
        return orders.environment(self.flags, contract)

    def _run_record(self) -> dict[str, Any]:
        settings = self.orders.settings(self.index, self.flags)
        planned = settings.get("train.steps", {}).get("value", self.phase.gates.get("steps_done"))
        return {
            "v": VERSION, "run": self.id, "launch": self.orders.launch,
            "plan": self.orders.plan.name, "phase": self.phase.name, "index": self.index,
            "proves": self.phase.proves, "by": self.orders.by, "created_ts": self.begun_ts,
            "nnodes": 1, "nproc": self.phase.nproc, "world": self.phase.nproc,
            "steps_planned": planned, "argv": self._argv(),
            "cwd": str(Path.cwd()), "environment": self._environment(),
            "flags": {name: asdict(flag) for name, flag in self.flags.items()},
            "settings": settings, "gates": dict(self.phase.gates), "watch": asdict(self.watch),
            "host": rundir.host_name(), "machine": dict(self.orders.host),
            "git": dict(self.orders.git),
        }  # fmt: skip

    def _begin(self) -> None:
        if not self._prepared.done:
            return
        try:
            log_fd = self._prepared.value
        except (OSError, ContractError) as error:
            self._never_began(f"the run directory cannot be prepared: {error}")
            return
        try:
            self._spawn(log_fd)
        except OSError as error:
            self._never_began(f"torchrun cannot be started: {error}")
        finally:
            os.close(log_fd)

    def _spawn(self, log_fd: int) -> None:
        if self._asked:
            self._never_began(f"{self._asked} was asked by {self._by} before the start")
            return
        self.tree.spawn(self._argv(), self._environment(), log_fd)
        self._begun, self.stage = time.monotonic(), "run"
        self.event("phase", f"{self.phase.name}: torchrun started as pid {self.tree.agent_pid}")
        self._publish()

    def _never_began(self, why: str) -> None:
        self._failure = why
        self._begin_collecting()

    def _watch_it(self) -> None:
        changed = self.tree.look()
        if self.tree.enforce():
            self.event("note", f"KILL after {self.watch.grace_s:g} s of grace", "warn")
        self._watch_agent()
        now = time.monotonic()
        if now - self._sampled >= 1.0:
            self._sampled = now
            self._sample()
        if self.tree.is_over():
            self._begin_collecting()
        elif changed or now - self._refreshed >= REFRESH_S:
            self._publish()

    def _watch_agent(self) -> None:
        if self.tree.agent_status is not None and self.tree.alive():
            ranks = ", ".join(str(worker.rank) for worker in self.tree.alive())
            self.alert(AGENT_LOST, f"torchrun (pid {self.tree.agent_pid}) is gone "
                       f"({self.tree.agent_status}); rank {ranks} still runs", "crit")  # fmt: skip

    def _sample(self) -> None:
        workers = list(self.tree.workers.values())
        sample = self._sampler.sample(workers, self.story, self.number, self._begun)
        path = rundir.samples(self.run, rundir.host_name())
        self._directory.put(path, jsonl.encode(sample))
        ending = self._ending or self._asked in ("stop", "kill")
        ending = ending or self.tree.agent_status is not None
        verdict = None if ending else diagnose(self._sampler.seen, self.watch, time.time())
        self._take_verdict(verdict)

    def _take_verdict(self, verdict: Verdict | None) -> None:
        before, self._verdict = self._verdict, verdict
        if verdict is None:
            if before is not None:
                self.clear("stall", f"the pulses move again: {before.cause} is over")
            return
        place = (verdict.cause, verdict.rank, verdict.phase, verdict.step)
        if before is not None and place == (before.cause, before.rank, before.phase, before.step):
            self._verdict = replace(verdict, ts=before.ts)
            return
        path = self.run / rundir.VERDICTS / f"{int(verdict.ts * 1000)}.json"
        self._directory.document(path, {"v": VERSION} | asdict(verdict))
        self.event("verdict", verdict.sentence, "crit", rank=verdict.rank, cause=verdict.cause)
        self.alert("stall", verdict.sentence, "crit", "3")
        self._publish()

    def _begin_collecting(self) -> None:
        self.stage = "collect"
        self._collected = self._directory.job(self._files.rest)

    def _conclude(self) -> None:
        if self._collected is None or not self._collected.done:
            return
        try:
            rest = self._collected.value
        except OSError as error:
            rest = Rest()
            self._failure = self._failure or f"the run directory cannot be read: {error}"
        self._take_news()
        self._take(rest.news)
        self.tree.take_log(rest.log)
        self.story.summary.take_metrics(rest.metrics)
        self._words = rest.words
        self.gates = gates.evaluate(self.story.summary, self.phase.gates)
        self._verdict, self.stage = None, "over"
        for name in self.open_alerts():
            self.clear(name, "the run has ended")
        self._directory.document(
            self.run / rundir.GATES,
            {"v": VERSION, "run": self.id, "ts": time.time(), "result": gates.overall(self.gates),
             "gates": [asdict(gate) for gate in self.gates]},
        )  # fmt: skip
        self._decide()
        self.tree.close()
        live.remove(self.live)
        self.live = None
        self._publish()

    # --- the state -----------------------------------------------------------------------------

    def _facts(self) -> Facts:
        ends = [self._end_of(worker) for worker in self.tree.workers.values()
                if worker.over_ts is not None]  # fmt: skip
        phases = self._sampler.phases.values()
        pulsed = max((seen.step for seen in self._sampler.seen), default=0)
        return Facts(
            spawned=self.tree.spawned,
            over=self.stage == "over",
            asked=self._asked,
            by=self._by,
            halt_file=self._halt_file,
            halting_ranks=sum(phase == "halt" for phase in phases),
            step=max(pulsed, self.story.summary.steps, *self.story.steps.values(), 0),
            verdict=self._verdict.sentence if self._verdict else "",
            agent_code=self.tree.agent_status,
            agent_gone=self.tree.agent_status is not None,
            ends=ends,
            order=tuple(self.tree.order),
            halt_steps=self.story.halts,
            world=self.phase.nproc,
            failure=self._failure,
        )

    def _end_of(self, worker: Worker) -> End:
        rank, code = worker.rank, worker.code
        if code is None and worker.signal is None:
            code = self.story.codes.get(rank)
        story, words = self.story, self._words.get(rank, "")
        return End(
            rank, code, worker.signal, story.steps.get(rank, 0), story.errors.get(rank, ""), words,
            worker.culled,
        )  # fmt: skip

    def _decide(self) -> None:
        if self.stage == "collect":
            return
        state, why = decide(self._facts())
        changed = state != self.state
        self.why = why
        if not changed:
            return
        level = "crit" if state in ("stalled", "failed", "crashed") else "info"
        self.event("state", f"{self.state} → {state}" + (f": {why}" if why else ""), level,
                   state=state)  # fmt: skip
        self.state, self.since_ts = state, time.time()
        self._publish()

    def _publish(self) -> None:
        """Replaces supervisor.json."""
        self._refreshed = time.monotonic()
        workers = [w.as_dict() for _, w in sorted(self.tree.workers.items())]
        torchrun = {"pid": self.tree.agent_pid, "start_ticks": self.tree.agent_ticks}
        record = rundir.identity() | {
            "v": VERSION, "run": self.id, "state": self.state, "why": self.why,
            "since_ts": self.since_ts, "attempt": self.number, "launch": self.orders.launch,
            "torchrun": torchrun if self.tree.spawned else None, "workers": workers,
            "live_dir": str(self.live) if self.live else "", "watch": asdict(self.watch),
            "armed": armed(self.watch.stall_floor_s),
            "verdict": asdict(self._verdict) if self._verdict else None,
            "updated_ts": time.time(),
        }  # fmt: skip
        self._directory.document(self.run / rundir.SUPERVISOR, record)


def armed(floor_s: float) -> str:
    """Says what happens by itself when the run stalls."""
    return f"if it stalls for {floor_s:g} s: alert only"
