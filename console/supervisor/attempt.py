"""One attempt at a run: its processes, what they tell, and the state that follows from it."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Literal

from console.error_patterns import OomCounts
from console.model import RANK_GONE, State
from console.run_state import Facts, decide
from console.sources import liveness, oom_counts
from console.supervisor.ends import Ends
from console.supervisor.monitor import Monitor
from console.supervisor.rotation import Upkeep
from console.supervisor.run_files import Files, News, Rest
from console.supervisor.sampling import Sampler
from console.supervisor.services import AttemptOwner, RunContext
from console.supervisor.shm import LastPulses
from console.supervisor.tree import Tree
from trainers.contract import jsonl, rundir
from trainers.contract.errors import RefusedError

Stage = Literal["prepare", "run", "collect", "over"]
ENDINGS = ("halt", "restart", "stop", "kill")
"""The requests that end an attempt, each stronger than the one before."""
ENDED_FROM_HERE = ENDINGS[1:]
"""In these the supervisor itself ends the ranks."""
AGENT_LOST, UNPREPARED, STUCK = "torchrun-gone", "restart-waits", "not-ended"
PREPARE_AGAIN_S, READ_AGAIN_S = 1.0, 3.0
COLLECT_S = 60.0
"""For so long the records of an attempt that has ended are read; what is left then is unknown."""
LONG_COLLECTING_S = 3.0
RECORDS_OLD_S = 5.0
"""Records that were read so long ago do not confirm what the pulses show."""


class Attempt:
    """Owns the processes of one attempt; `tick` moves it on, `decided` is its state.

    With `held`, a former supervisor's document, the attempt takes over the processes that are there
    instead of starting.
    """

    def __init__(
        self, context: RunContext, run: AttemptOwner, number: int,
        held: Mapping[str, Any] | None = None,
    ):  # fmt: skip
        self._context, self._run, self._number = context, run, number
        self.path, self._world = context.path, context.phase.nproc
        self._grace_s = context.watch.grace_s
        services, live, link = context.services, context.live, context.services.link
        self._directory, self._observers = services.directory, context.observers
        self._alerts = context.observers.alerts
        self.stage: Stage = "prepare"
        self.known = Facts(world=self._world)
        """Facts from requests and events; `facts` adds those from processes and records."""
        self._reducer, self._heads = context.reducer, partial(context.reducer.heads, number)
        if held is None:
            self._reducer.settle()
        kept = link.kept(self.path / rundir.SUPERVISOR) or {}
        late = held is not None and not kept
        self.monitor = Monitor(context, run, self._heads, late)
        self.tree = Tree(context.token, self._world, services.poller, link, context.home)
        self.behind = False
        self.files = Files(self.path, number, self._world, context.reading)
        self._samples = rundir.samples(self.path, rundir.host_name())
        self._upkeep = Upkeep(services.directory, self.path, number, self._samples)
        self._sampler = Sampler(services.nvml, live.pulse)
        self._begun = time.monotonic()
        self._pulses = LastPulses(live, partial(context.reducer.summary.take_end, number))
        self._ends = Ends(self.tree, self._heads, self._pulses)
        counts = jsonl.mapping(kept, "oom") if held and kept.get("attempt") == number else {}
        self.oom_before = OomCounts(**counts) if counts else oom_counts.snapshot()
        """Counts of the kernel from before the ranks ran."""
        self._on_disk: int | None = 0
        self._caught_up, self._cut_short = held is None, False
        self._sampled = self._ended_at = self._records_at = 0.0
        self._decided: tuple[State, str] = ("starting", "")
        self._again_at = math.inf
        """Time of the next attempt at the work that the directory did not answer (monotonic s)."""
        self._is_ours = False
        """The run directory was found to be this run's: what fails in it from then on may pass."""
        if held is None or link.began(self.path, context.home, number):
            self._begin_preparing()
        else:
            self._adopt(held)

    def _adopt(self, held: Mapping[str, Any]) -> None:
        """Takes over the processes that are there, from an owner that is gone or with this one."""
        context, link = self._context, self._context.services.link
        self.tree.adopt(held, self.path, self._number)
        if not link.holds(context.home, self._number):
            _, environment = self._run.command(self._number)
            link.hold(self.tree.agent_pid, environment, self._grace_s)
        self.stage = "run"
        self._sample()

    # --- what the run calls --------------------------------------------------------------------

    def tick(self) -> None:
        """Does what is due; never waits."""
        if self.stage == "run":
            self._watch_it()
        elif self.stage != "over" and time.monotonic() >= self._again_at:
            self._again_at = math.inf
            (self._begin_preparing if self.stage == "prepare" else self._read_on)()

    def end(self, action: str, by: str) -> str:
        """Halts, stops or kills the ranks, unless as much was asked before; returns the answer.

        `.HALT` stands already: a halt is only recorded here.
        """
        if self.stage in ("collect", "over"):
            self._cut_short = self._cut_short or action in ("stop", "kill")
            return "the ranks have ended already; no further phase starts"
        asked, grace_s = self.known.asked, self._grace_s
        if asked and ENDINGS.index(action) <= ENDINGS.index(asked):
            return f"{asked} is under way, asked by {self.known.by}"
        self._learn(asked=action, by=by)
        self._run.publish()  # first: whoever has to go on knows of it before a process does
        if action == "halt" and self.monitor.verdict:
            return (".HALT is written; the run is stalled, and ranks obey when all step again; "
                    "stop ends them")  # fmt: skip
        if action == "halt":
            return ".HALT is written; all ranks stop at the same step and save"
        if action == "kill":
            self.tree.kill()
            return "KILL is sent to every process of the run"
        self.tree.terminate(grace_s)
        return f"TERM is sent; what is left after {grace_s:g} s is killed"

    def abandon(self) -> None:
        """Takes this attempt as over: all that there is to tell of it was told before."""
        self.stage = "over"
        self.tree.close()

    def decided(self) -> tuple[State, str]:
        """Returns the state that the facts give; the last one until the rest is read in time."""
        since_end_s = time.monotonic() - self._ended_at
        if self.stage != "collect" or since_end_s > LONG_COLLECTING_S:
            untold: State = "crashed" if self.stage == "over" else self._decided[0]
            self._decided = self._observers.once(
                "the state", lambda: decide(self.facts()), (untold, "its state cannot be decided")
            )
        return self._decided

    # --- stages --------------------------------------------------------------------------------

    def _begin_preparing(self) -> None:
        self._directory.job(self._prepare, self._begin, self.path)

    def _prepare(self) -> int:
        """Makes the directories; returns the descriptor of torchrun's log."""
        self._run.prepare(self._number)
        self._is_ours = True
        logs = rundir.logs(self.path, self._number)
        rundir.make_directory(logs)
        return rundir.open_append(logs / rundir.TORCHRUN_LOG)

    def _begin(self, log_fd: int | None, error: Exception | None) -> None:
        if log_fd is None:
            self._take_unprepared(f"the run directory cannot be prepared: {error}", error)
            return
        if self.stage != "prepare":  # it was given up meanwhile
            os.close(log_fd)
            return
        self._alerts.clear(UNPREPARED, "the run directory can be read again")
        try:
            self._spawn(log_fd)
        except (OSError, ValueError) as error:
            self._never_began(f"torchrun cannot be started: {error}")
        finally:
            os.close(log_fd)

    def _take_unprepared(self, why: str, error: Exception | None) -> None:
        """Tries again later where a restart meets a directory that does not answer as it should."""
        passes = isinstance(error, OSError) or (self._is_ours and isinstance(error, RefusedError))
        if self._number == 1 or not passes or self.known.asked:
            self._never_began(why)
            return
        self._again_at = time.monotonic() + PREPARE_AGAIN_S
        self._alerts.raise_(UNPREPARED, f"{why}; attempt {self._number} waits for it", "crit")

    def _spawn(self, log_fd: int) -> None:
        if self.known.asked:
            asked, by = self.known.asked, self.known.by
            self._never_began(f"{asked} was asked by {by} before the start")
            return
        self.tree.spawn(*self._run.command(self._number), log_fd, self._grace_s)
        self._begun, self.stage = time.monotonic(), "run"
        name = self._context.phase.name
        self._run.event("phase", f"{name}: torchrun started as pid {self.tree.agent_pid}")
        self._run.publish()

    def _never_began(self, why: str) -> None:
        self._learn(failure=why)
        self._begin_collecting()

    def _watch_it(self) -> None:
        changed = self.tree.look()
        if self.tree.enforce():
            self._run.event("note", f"KILL after {self._grace_s:g} s of grace", "warn")
        self._watch_agent()
        self._watch_ranks()
        now = time.monotonic()
        if int(now) != int(self._sampled):
            self._sampled = now
            self._sample()
            self._watch_stuck()
            if not self.tree.agent_over:  # the logs of an end are left whole
                self._upkeep.poll(self._run.event)
        if self.tree.is_over():
            self._begin_collecting()
        elif changed:
            self._run.publish()

    def _watch_stuck(self) -> None:
        stuck = self.tree.stuck()
        if stuck:
            text = f"KILL does not end pid {', '.join(stuck)}: state D waits for a disk or a driver"
            self._alerts.raise_(STUCK, text, "crit")

    def _watch_agent(self) -> None:
        asked = self.known.asked in ENDED_FROM_HERE
        if self.tree.agent_over and self.tree.alive() and not asked:
            left = liveness.still_run("rank", [worker.rank for worker in self.tree.alive()])
            status = self.tree.agent_status
            how = "nobody saw how" if status is None else status
            self._alerts.raise_(AGENT_LOST, f"torchrun (pid {self.tree.agent_pid}) is gone "
                       f"({how}); {left}", "crit")  # fmt: skip

    def _watch_ranks(self) -> None:
        """Ends the other ranks within the grace time after one has failed, by its exit alone.

        torchrun does so too, but may send KILL 30 s later, or never where it is stopped or gone.
        """
        if self.known.ending or self.known.asked in ENDED_FROM_HERE:
            return
        failed, grace_s = self._ends.failed(), self._grace_s
        if failed and self.tree.alive():
            self.tree.expire(grace_s)
            ends = "the others wait for it" if self.tree.agent_over else "torchrun ends the others"
            self._learn(ending=f"rank {', '.join(map(str, failed))} is gone, {ends}; what is left "
                        f"after {grace_s:g} s is killed")  # fmt: skip
            self._alerts.raise_(RANK_GONE, self.known.ending, "crit")

    def _sample(self) -> None:
        workers = list(self.tree.workers.values())
        sample = self._observers.run(
            "processes and pulses",
            lambda: self._sampler.sample(workers, self._heads(), self._number, self._begun), None,
        )  # fmt: skip
        if sample is None:
            self._sampler.clear()
            self.monitor.reset()
        else:
            self._directory.put(self._samples, jsonl.encode(sample))
        ending = bool(self.known.ending) or self.known.asked in ENDED_FROM_HERE
        ending = ending or (self.tree.agent_over and not self.tree.alive())
        # What is usual is not known before the records of a run that was taken over are read.
        seen = self._sampler.seen if self._caught_up and not ending else ()
        halting = self.known.halt_wanted
        looked = self._observers.run(
            "watch rules",
            lambda: self.monitor.poll(self._sampler, seen, ending, halting, self._unread()), False,
        )  # fmt: skip
        if not looked:
            self.monitor.reset()

    def _unread(self) -> str:
        """Says why the records confirm nothing, "" when they do."""
        if self._context.live.path is None:
            return "without shared memory pulses and records come through the same directory"
        if self._directory.failing:
            return f"the run directory takes no records ({self._directory.failing})"
        if self._directory.blocked_s() > RECORDS_OLD_S:
            return "the run directory does not answer"
        if self.behind or time.monotonic() - self._records_at > RECORDS_OLD_S:
            return "the records are not read up to their end"
        return ""

    def _begin_collecting(self) -> None:
        self.decided()
        self.stage, self._ended_at = "collect", time.monotonic()
        self._read_on()

    def _read_on(self) -> None:
        """Reads the next part of what is left of the records, then what is read once."""
        self._directory.job(lambda: self.files.look(True), self._take_part, self.path)

    def _take_part(self, news: News | None, error: Exception | None) -> None:
        """Takes a part; what cannot be read now is asked for again for a while."""
        unread = f"the run directory cannot be read: {error}"
        if news is not None:
            self.take(news)
            unread = news.unread
        if unread and time.monotonic() - self._ended_at < READ_AGAIN_S:
            self._again_at = time.monotonic() + PREPARE_AGAIN_S / 2
            return
        if unread:
            self._learn(failure=self.known.failure or unread)
        behind = news is not None and news.behind
        if behind and not self._cut_short and time.monotonic() - self._ended_at <= COLLECT_S:
            self._read_on()
            return
        if behind:
            left = "the records of this attempt are too many to read: gates may be unknown"
            self._run.event("note", left, "warn")
        self._directory.job(self.files.rest, self._conclude, self.path)

    def _conclude(self, rest: Rest | None, _: object) -> None:
        rest = rest or Rest()
        self.tree.take_log(rest.log)
        self._on_disk = rest.checkpoint
        self._ends.conclude(rest.last)
        self._learn(oom=oom_counts.since(self.oom_before), agent_signal=rest.agent_signal)
        self.monitor.verdict, self.stage = None, "over"
        self._alerts.clear_all("the attempt has ended")
        self.tree.close()

    # --- facts ---------------------------------------------------------------------------------

    def take(self, news: News) -> None:
        """Takes in what a look at the run's files found."""
        self.behind = news.behind
        taken = self._observers.run("records", lambda: self._take_records(news), False)
        if not self._caught_up and news.disk and not news.behind:
            self._caught_up = True
            self._reducer.settle()
        known = self.known
        self._learn(halt_file=known.halt_file or news.halt_file)
        if news.disk:
            self._sampler.disk, self._sampler.csv = news.disk, news.csv
            self._records_at = time.monotonic() if taken and not news.unread else self._records_at

    def _take_records(self, news: News) -> bool:
        for batch in news.batches:
            self._reducer.take(batch, self._world, self._number)
        return True

    def checkpoint(self, former: int) -> int:
        """Returns the step of the newest checkpoint at its end, 0 without one.

        One that is newer than the `former` attempt's is on disk and in a record. A program that
        records nothing has only the disk.
        """
        recorded = max(former, self.saved)
        if self._on_disk is None:
            return recorded
        return min(self._on_disk, recorded) if self._heads() else self._on_disk

    @property
    def saved(self) -> int:
        """The step of the newest checkpoint that a record names, 0 without one."""
        return max((head.saved for head in self._heads().values()), default=0)

    def _learn(self, **told: Any) -> None:
        self.known = replace(self.known, **told)

    def facts(self) -> Facts:
        """Returns everything that the state depends on."""
        tree, heads, verdict = self.tree, self._heads(), self.monitor.verdict
        codes = [heads[rank].code if rank in heads else None for rank in range(self._world)]
        return replace(
            self.known, over=self.stage == "over", collecting=self.stage == "collect",
            spawned=tree.spawned, agent_code=tree.agent_status, agent_gone=tree.agent_over,
            order=tuple(tree.order), ends=self._ends.so_far(), step=self.step,
            halting_ranks=sum(seen.phase == "halt" for seen in self._sampler.seen),
            halt_steps={rank: h.halt for rank, h in heads.items() if h.halt is not None},
            reason=next((head.reason for head in heads.values() if head.reason), ""),
            told=None not in codes or not (heads or self.known.failure),
            verdict=verdict.sentence if verdict else "",
        )  # fmt: skip

    @property
    def step(self) -> int:
        """The newest step that a pulse or a record tells of."""
        pulsed = max((seen.step for seen in self._sampler.seen), default=0)
        recorded = (head.step for head in self._heads().values())
        return max(pulsed, self._pulses.newest, *recorded)

    def workers(self) -> list[dict[str, Any]]:
        """Returns the ranks as supervisor.json holds them."""
        return self._ends.documents(self.facts().culprit())

    def document(self) -> dict[str, Any]:
        """Returns what supervisor.json holds of the attempt."""
        agent, verdict = self.tree.agent, self.monitor.verdict
        return {
            "torchrun": {"pid": agent.pid, "start_ticks": agent.start_ticks} if agent else None,
            "workers": self.workers(), "asked": self.known.asked, "asked_by": self.known.by,
            "verdict": asdict(verdict) if verdict else None,
        }  # fmt: skip
