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
from console.ending import End, Facts, decide
from console.model import RANK_GONE, Gate, State, Verdict
from console.plans import gates
from console.sources.nvml import Nvml
from console.supervisor.alerts import Alerts
from console.supervisor.directory import Directory, Job
from console.supervisor.follow import Files, News, Rest, Story
from console.supervisor.live import Live
from console.supervisor.orders import FlagValue, Orders
from console.supervisor.sampling import Sampler
from console.supervisor.tree import Tree, Worker
from trainers.contract import VERSION, environ, jsonl, rundir
from trainers.contract.errors import ContractError

Stage = Literal["prepare", "run", "collect", "over"]
REFRESH_S = 5.0
ENDINGS = ("halt", "stop", "kill")
"""What can be asked, each stronger than the one before."""
AGENT_LOST = "torchrun-gone"


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
        self._live = Live(self.token)
        self.stage: Stage = "prepare"
        self.state: State = "starting"
        self.why = ""
        self.gates: tuple[Gate, ...] = ()
        self.story = Story()
        self.alerts = Alerts(self.event, self.story.summary, directory)
        self.tree = Tree(self.token, self.phase.nproc, poller)
        self.since_ts = time.time()
        self._directory = directory
        self._files = Files(run, self.number, self.phase.nproc)
        self._news: deque[News] = deque()
        self._sampler = Sampler(nvml, self._live.path or run)
        self._begun = time.monotonic()
        self._verdict: Verdict | None = None
        self._asked = self._by = self._failure = self._agent_signal = self._ending = ""
        self._words: Mapping[int, str] = {}
        self.halt_file = self._broken = False
        self._refreshed = self._sampled = self._said = 0.0
        self._record = given.run_record(index, run, self.flags, self._contract())
        self._prepared: Job[int] = directory.job(self._prepare)
        self._collected: Job[Rest] | None = None
        self._publish()

    # --- what the launch calls -----------------------------------------------------------------

    @property
    def live(self) -> Path | None:
        """The memory-backed directory of the ranks' pulses, None without shared memory."""
        return self._live.path

    def tick(self) -> None:
        """Does what is due; never waits."""
        self._take_news()
        {"prepare": self._begin, "run": self._watch_it, "collect": self._conclude,
         "over": lambda: None}[self.stage]()  # fmt: skip
        self._decide()
        if time.monotonic() - self._said >= 1.0:
            self.alerts.watch_writes()
            self._say_alive()

    def look(self, heartbeats: bool) -> None:
        """Reads the run's files; runs on the directory's thread. The next tick takes it in."""
        self._news.append(self._files.look(heartbeats))

    def _take_news(self) -> None:
        while self._news:
            self._take(self._news.popleft())

    def _take(self, news: News) -> None:
        for record in news.records:
            self.story.take(record)
        self.halt_file = self.halt_file or news.halt_file
        self._agent_signal = self._agent_signal or news.agent_signal
        if news.ending and not self._ending and self._asked not in ("stop", "kill"):
            self._take_ending()
        if news.disk:
            self._sampler.disk = news.disk

    def _take_ending(self) -> None:
        """torchrun ends the ranks: because one is gone, unless it got a signal itself."""
        if self.stage != "run":
            return
        self.tree.expire(self.watch.grace_s)
        self.tree.look()
        gone = [w.rank for w in self.tree.workers.values() if w.over_ts is not None]
        who = f"rank {', '.join(map(str, gone))}" if gone else "a rank"
        self._ending = (
            f"{who} is gone, torchrun ends the others; what is left after "
            f"{self.watch.grace_s:g} s is killed"
        )
        if not self._agent_signal:
            self.alerts.raise_(RANK_GONE, self._ending, "crit")

    def end(self, action: str, by: str) -> str:
        """Halts, stops or kills the ranks, unless as much was asked before; returns the answer.

        `.HALT` stands already: a halt is only recorded here.
        """
        if self.stage in ("collect", "over"):
            return "the ranks have ended already; no further phase starts"
        if self._asked and ENDINGS.index(action) <= ENDINGS.index(self._asked):
            return f"{self._asked} is under way, asked by {self._by}"
        self._asked, self._by = action, by
        if action == "halt":
            answer = ".HALT is written; all ranks stop at the same step and save"
        elif action == "stop":
            self.tree.terminate(self.watch.grace_s)
            answer = f"TERM is sent; what is left after {self.watch.grace_s:g} s is killed"
        else:
            self.tree.kill()
            answer = "KILL is sent to every process of the run"
        self._decide()
        return answer

    def event(self, kind: str, text: str, level: str = "info", **more: Any) -> dict[str, Any]:
        return self._directory.event(self.run, self.number, kind, text, level, **more)

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

    def _contract(self) -> dict[str, str]:
        """Returns what the ranks are told about the run that they belong to."""
        told = {
            environ.RUN_DIR: str(self.run.absolute()), environ.RUN_ID: self.id,
            environ.ATTEMPT: str(self.number), environ.TOKEN: self.token,
        }  # fmt: skip
        return told | ({environ.LIVE_DIR: str(self.live)} if self.live is not None else {})

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
        except (OSError, ValueError) as error:
            self._never_began(f"torchrun cannot be started: {error}")
        finally:
            os.close(log_fd)

    def _spawn(self, log_fd: int) -> None:
        if self._asked:
            self._never_began(f"{self._asked} was asked by {self._by} before the start")
            return
        self.tree.spawn(self._record["argv"], self._record["environment"], log_fd)
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
            self.alerts.raise_(AGENT_LOST, f"torchrun (pid {self.tree.agent_pid}) is gone "
                       f"({self.tree.agent_status}); rank {ranks} still runs", "crit")  # fmt: skip

    def _sample(self) -> None:
        workers = list(self.tree.workers.values())
        sample = self._sampler.sample(workers, self.story, self.number, self._begun)
        path = rundir.samples(self.run, rundir.host_name())
        self._directory.put(path, jsonl.encode(sample))
        ending = bool(self._ending) or self._asked in ("stop", "kill")
        ending = ending or self.tree.agent_status is not None
        verdict = None if ending else diagnose(self._sampler.seen, self.watch, time.time())
        self._take_verdict(verdict)

    def _take_verdict(self, verdict: Verdict | None) -> None:
        before, self._verdict = self._verdict, verdict
        if verdict is None:
            if before is not None:
                self.alerts.clear("stall", f"the pulses move again: {before.cause} is over")
            return
        place = (verdict.cause, verdict.rank, verdict.phase, verdict.step)
        if before is not None and place == (before.cause, before.rank, before.phase, before.step):
            self._verdict = replace(verdict, ts=before.ts)
            return
        path = self.run / rundir.VERDICTS / f"{int(verdict.ts * 1000)}.json"
        self._directory.document(path, {"v": VERSION} | asdict(verdict))
        self.event("verdict", verdict.sentence, "crit", rank=verdict.rank, cause=verdict.cause)
        self.alerts.raise_("stall", verdict.sentence, "crit", "3")
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
        self.alerts.clear_all("the run has ended")
        self._directory.document(
            self.run / rundir.GATES,
            {"v": VERSION, "run": self.id, "ts": time.time(), "result": gates.overall(self.gates),
             "gates": [asdict(gate) for gate in self.gates]},
        )  # fmt: skip
        self._decide()
        self._close()

    def _close(self) -> None:
        """Writes the last word; while the disk does not take it, it stands in shared memory."""
        self.tree.close()
        self._say_alive()
        self._publish()
        self._directory.call(self._leave_memory)

    def _leave_memory(self) -> None:
        if not self._directory.unwritten:
            self._live.remove()

    def give_up(self, why: str) -> None:
        """Stops the ranks and ends the attempt here and now: the supervisor itself is broken."""
        self.tree.terminate(self.watch.grace_s)
        until = time.monotonic() + 2 * self.watch.grace_s
        while self.tree.spawned and not self.tree.is_over() and time.monotonic() < until:
            time.sleep(0.05)
            self.tree.look()
            self.tree.enforce()
        self.stage, self._failure = "over", why
        self._broken = True
        self._decide()
        self._close()

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
            halt_file=self.halt_file,
            halting_ranks=sum(phase == "halt" for phase in phases),
            step=max(pulsed, self.story.summary.steps, *self.story.steps.values(), 0),
            verdict=self._verdict.sentence if self._verdict else "",
            agent_code=self.tree.agent_status,
            agent_gone=self.tree.agent_status is not None,
            ends=ends,
            order=tuple(self.tree.order),
            halt_steps=self.story.halts,
            reason=self.story.reason,
            told=len(self.story.codes) == self.phase.nproc or not self.story.steps,
            agent_signal=self._agent_signal,
            ending=self._ending,
            broken=self._broken,
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
                   state=state, why=why)  # fmt: skip
        self.state, self.since_ts = state, time.time()
        self._publish()

    def _publish(self) -> None:
        """Replaces supervisor.json."""
        self._refreshed = time.monotonic()
        workers = [self._worker_record(w) for _, w in sorted(self.tree.workers.items())]
        agent = self.tree.agent
        torchrun = {"pid": agent.pid, "start_ticks": agent.start_ticks} if agent else None
        record = rundir.identity() | {
            "v": VERSION, "run": self.id, "state": self.state, "why": self.why,
            "since_ts": self.since_ts, "attempt": self.number, "launch": self.orders.launch,
            "torchrun": torchrun, "workers": workers,
            "live_dir": "" if self.stage == "over" else str(self.live or ""),
            "watch": asdict(self.watch),
            "armed": armed(self.watch.stall_floor_s),
            "verdict": asdict(self._verdict) if self._verdict else None,
            "updated_ts": time.time(),
        }  # fmt: skip
        self._directory.document(self.run / rundir.SUPERVISOR, record)

    def _worker_record(self, worker: Worker) -> dict[str, Any]:
        record = worker.as_dict()
        if record["exit"] is not None:
            end = self._end_of(worker)
            record["exit"] |= {"code": end.code, "secondary": end.bad and end.secondary}
        return record

    def _say_alive(self) -> None:
        """Replaces the sign of life: all of it also where the run directory takes no writes."""
        self._said = time.monotonic()
        self._live.write_status({
            "v": VERSION, "ts": time.time(), "mono": self._said, "state": self.state,
            "why": self.why, "since_ts": self.since_ts, "run": self.id,
            "blocked_s": round(self._directory.blocked_s(), 2),
            "waiting": self._directory.waiting, "dropped": self._directory.dropped,
            "alerts": list(self.alerts.open().values()),
        })  # fmt: skip


def armed(floor_s: float) -> str:
    """Says what happens by itself when the run stalls."""
    return f"if it stalls for {floor_s:g} s: alert only"
