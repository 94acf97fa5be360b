"""Runs one attempt of a run; decides the run's state from its processes and records."""

from __future__ import annotations

import math
import os
import time
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Literal

from console.model import RANK_GONE, State
from console.run_state import Facts, ReaderView, decide
from console.supervisor.alerts import DROPPED
from console.supervisor.context import AttemptOwner, RunContext
from console.supervisor.ends import EXIT_HANGS, UNSTARTED, Ends
from console.supervisor.former_documents import ENDINGS, FormerRun
from console.supervisor.live_directory import LastPulses
from console.supervisor.monitor import Monitor
from console.supervisor.process_tree import Tree
from console.supervisor.rotation import Upkeep
from console.supervisor.run_files import Files, FinalRead, Poll
from console.supervisor.sampling import Sampler
from trainers.contract import jsonl, rundir
from trainers.contract.errors import RefusedError

Stage = Literal["prepare", "run", "collect", "over"]
ENDED_FROM_HERE = ENDINGS[1:]
"""The actions by which the supervisor itself ends the ranks."""
UNPREPARED = "restart-waits"
PREPARE_AGAIN_S, READ_AGAIN_S, LONG_COLLECTING_S = 1.0, 3.0, 3.0
COLLECT_S = 60.0
"""After the end of an attempt, its remaining records are read for at most about this time."""
RECORDS_OLD_S = 5.0
"""Records that were last read longer ago than this do not confirm the pulses."""


class Attempt:
    """Owns the processes of one attempt; `tick` does the due work, `decided` returns the state.

    With `former`, the processes of the attempt that are alive are adopted. Torchrun is then started
    only if the former process began the attempt and did not start torchrun.
    """

    def __init__(
        self, context: RunContext, run: AttemptOwner, number: int,
        former: FormerRun | None = None,
    ):  # fmt: skip
        self._context, self._run, self._number = context, run, number
        self.path, self._world = context.path, context.phase.nproc
        self._grace_s = context.watch.grace_s
        services, live, link = context.services, context.live, context.services.link
        self._directory, self._observers = services.directory, context.observers
        self._alerts = context.observers.alerts
        self.stage: Stage = "prepare"
        self.known = Facts(world=self._world, view=former.end if former else ReaderView())
        """The facts that are stored here; `facts` adds facts from other objects."""
        self._reducer, self._heads = context.reducer, partial(context.reducer.heads, number)
        if former is None:
            self._reducer.mark_old()
        self.monitor = Monitor(context, run, self._heads, bool(former and not former.is_stored))
        self.tree = Tree(context.token, self._world, services.poller, link, context.home)
        self.behind = self._behind_ranks = False
        self.files = Files(self.path, number, self._world, context.reading)
        self._samples = rundir.samples(self.path, rundir.host_name())
        self._upkeep = Upkeep(services.directory, self.path, number, self._samples)
        self._sampler = Sampler(services.nvml, live.pulse, run.own_gpus)
        self._begun = time.monotonic()
        self._pulses = LastPulses(live, partial(context.reducer.summary.take_end, number))
        self._ends = Ends(self.tree, self._heads, self._pulses, context.phase.is_ours)
        self._checkpoint_step: int | None = 0
        self._caught_up, self._cut_short = former is None, False
        self._sampled = self._ended_at = self._records_at = 0.0
        self._decided: tuple[State, str] = ("starting", "")
        self._unwritten = ""
        """The text of the alert `DROPPED` if it was open at the end, or ""."""
        self._again_at = math.inf
        """The time at which the failed work of a stage is tried again (monotonic s)."""
        if former is None or former.is_unstarted:
            self._begin_preparing()
        else:
            self._adopt(former)

    def _adopt(self, former: FormerRun) -> None:
        """Finds the processes that are alive; passes them to an owner that does not have them."""
        context, link = self._context, self._context.services.link
        self.tree.adopt(former.state, self.path, self._number)
        if not link.owns(context.home, self._number):
            _, environment = self._run.command()
            link.adopt(self.tree.agent_pid, environment, self._grace_s)
        self.stage = "run"
        self._sample()

    # --- called by the run ---------------------------------------------------------------------

    def tick(self) -> None:
        """Does the work that is due."""
        if self.stage == "run":
            self._watch_processes()
        elif self.stage != "over" and time.monotonic() >= self._again_at:
            self._again_at = math.inf
            (self._begin_preparing if self.stage == "prepare" else self._read_rest)()

    def end(self, action: str, by: str) -> str:
        """Ends the attempt by a halt, restart, stop or kill; returns the answer.

        A halt is only recorded, because the caller has already written `.HALT`. The other actions
        send no signal before torchrun starts, after all processes have ended, or while the same or
        a stronger action is in progress.
        """
        if self.stage in ("collect", "over"):
            self._cut_short = self._cut_short or action in ("stop", "kill")
            ranks = "the ranks have ended already" if self.tree.spawned else "no rank was started"
            return f"{ranks}; no further attempt or phase starts"
        asked, grace_s = self.known.requested, self._grace_s
        if asked and ENDINGS.index(action) <= ENDINGS.index(asked):
            return f"{asked} is in progress, requested by {self.known.by}; no attempt follows"
        self._learn(requested=action, by=by)
        self._run.publish()  # first, because the next child must know of the request
        if self.stage == "prepare":
            return "no rank is running; torchrun is not started"
        if action == "halt":
            return self.monitor.halt_answer()
        if action == "kill":
            self.tree.kill()
            return "KILL is sent to the processes of the run"
        self.tree.terminate(grace_s)
        return f"TERM is sent; processes still alive after {grace_s:g} s are killed"

    def abandon(self) -> None:
        """Closes an attempt whose end a former process has already reported."""
        self.stage = "over"
        self.tree.close()

    def decided(self) -> tuple[State, str]:
        """Returns the state that follows from the facts, and the reason.

        While the remaining records are read, the result stays the same for up to
        `LONG_COLLECTING_S`.
        """
        since_end_s = time.monotonic() - self._ended_at
        if self.stage != "collect" or since_end_s > LONG_COLLECTING_S:
            fallback: State = "crashed" if self.stage == "over" else self._decided[0]
            self._decided = self._observers.call(
                "the state", lambda: decide(self.facts()), (fallback, "its state cannot be decided")
            )
        state, why = self._decided
        return state, f"{why}; alert at the end: {self._unwritten}" if self._unwritten else why

    # --- stages --------------------------------------------------------------------------------

    def _begin_preparing(self) -> None:
        self._directory.job(self._prepare, self._begin, self.path)

    def _prepare(self) -> int:
        """Makes the directories of the attempt; returns the descriptor of torchrun's log.

        Raises OSError for errors that may be temporary, or RefusedError.
        """
        self._run.prepare()
        logs = rundir.logs(self.path, self._number)
        try:
            rundir.make_directory(logs)
        except RefusedError as error:
            raise OSError(str(error)) from error
        return rundir.open_append(logs / rundir.TORCHRUN_LOG)

    def _begin(self, log_fd: int | None, error: Exception | None) -> None:
        if log_fd is None:
            self._retry_or_end(f"cannot prepare the run directory: {error}", error)
            return
        if self.stage != "prepare":  # the attempt was abandoned while the job waited
            os.close(log_fd)
            return
        try:
            self._spawn(log_fd)
        except (OSError, ValueError) as error:
            self._retry_or_end(f"cannot start torchrun: {error}", error)
        finally:
            os.close(log_fd)

    def _retry_or_end(self, why: str, error: Exception | None) -> None:
        """Retries a restart after OSError if no action was requested; else ends the attempt."""
        if self._number == 1 or not isinstance(error, OSError) or self.known.requested:
            self._end_unstarted(why)
            return
        self._again_at = time.monotonic() + PREPARE_AGAIN_S
        text = f"{why}; attempt {self._number} starts when this is possible"
        self._alerts.raise_(UNPREPARED, text, "crit")

    def _spawn(self, log_fd: int) -> None:
        if self.known.requested:
            asked, by = self.known.requested, self.known.by
            self._end_unstarted(f"{asked} requested by {by} before the start")
            return
        self.tree.spawn(*self._run.command(), log_fd, self._grace_s)
        self._alerts.clear(UNPREPARED, "torchrun started")
        self._begun, self.stage = time.monotonic(), "run"
        name = self._context.phase.name
        self._run.event("phase", f"{name}: torchrun started as pid {self.tree.agent_pid}")
        self._run.publish()

    def _end_unstarted(self, why: str) -> None:
        self._learn(failure=why)
        self._begin_collecting()

    def _watch_processes(self) -> None:
        changed = self.tree.poll()
        if self.tree.enforce():
            text = f"KILL is sent: the grace time of {self._grace_s:g} s is over"
            self._run.event("note", text, "warn")
        self._watch_ranks()
        now = time.monotonic()
        if int(now) != int(self._sampled):
            self._sampled = now
            self._sample()
            self._watch_torchrun()
            if not self.tree.agent_over or self.tree.alive():
                self._upkeep.poll(self._run.event)
        if self.tree.is_over():
            self._begin_collecting()
        elif changed:
            self._run.publish()

    def _watch_torchrun(self) -> None:
        if len(self.tree.workers) == self._world:
            self._alerts.clear(UNSTARTED, "all ranks have started")
        is_ending, watch = self.known.requested in ENDED_FROM_HERE, self._context.watch
        late_s = watch.startup_s if time.monotonic() - self._begun >= watch.startup_s else 0.0
        found = list(self._ends.alerts(is_ending, late_s, watch.stall_floor_s))
        for name, text, key in found:
            self._alerts.raise_(name, text, "crit", key)
        if all(name != EXIT_HANGS for name, *_ in found):
            self._alerts.clear(EXIT_HANGS, "the ranks with an exit record have ended, or are ended")

    def _watch_ranks(self) -> None:
        """After a rank has failed, schedules KILL for the other ranks: one grace time from now.

        torchrun may wait 30 s before its own KILL, and sends nothing if it is stopped or has
        exited. A request that ends the ranks has its own KILL; then this method does nothing.
        """
        if self.known.rank_failure or self.known.requested in ENDED_FROM_HERE:
            return
        if text := self._ends.failure(self._grace_s):
            self.tree.kill_ranks_after(self._grace_s)
            self._learn(rank_failure=text)
            self._alerts.raise_(RANK_GONE, text, "crit")

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
        known, ending = self.known, self.known.rank_failure
        if not ending and known.requested in ENDED_FROM_HERE:
            ending = f"{known.requested}, requested by {known.by}"
        elif not ending and self.tree.agent_over and not self.tree.alive():
            ending = "torchrun and all ranks have ended"
        # A continued run knows the usual duration of a step only after its records were read.
        seen = self._sampler.evidence if self._caught_up and not ending else ()
        looked = self._observers.run(
            "watch rules", lambda: self.monitor.poll(self._sampler, seen, ending, known.halt_wanted,
                                                     self._unread(), self._caught_up), False,
        )  # fmt: skip
        if not looked:
            self.monitor.reset()

    def _unread(self) -> str:
        """Returns why the records cannot confirm the pulses, or "" if they can."""
        if any(map(self._context.live.is_copy, range(self._world))):
            return "there is no shared memory: pulses and records are in one directory"
        if doubt := self._directory.doubt(RECORDS_OLD_S):
            return doubt
        if self._behind_ranks or time.monotonic() - self._records_at > RECORDS_OLD_S:
            return "not all records have been read"
        return ""

    def _begin_collecting(self) -> None:
        self.decided()
        self.stage, self._ended_at = "collect", time.monotonic()
        self._read_rest()

    def _read_rest(self) -> None:
        """Reads the next part of the records that remain after the attempt has ended."""
        self._directory.job(lambda: self.files.poll(True), self._add_part, self.path)

    def _add_part(self, news: Poll | None, error: Exception | None) -> None:
        """Adds a part of the records; starts the next read, or retries briefly after an error."""
        unread = f"cannot read the run directory: {error}"
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
            self._read_rest()
            return
        if behind:
            text = "not all records of the attempt were read: gates may be unknown"
            self._run.event("note", text, "warn")
        read_final = partial(self.files.read_final, self._reducer.summary.resumed_at_end)
        self._directory.job(read_final, self._conclude, self.path)

    def _conclude(self, rest: FinalRead | None, _: object) -> None:
        rest = rest or FinalRead()
        conclude = partial(self._ends.conclude, rest.log, rest.last)
        failure = self._observers.call("the ends of the ranks", conclude, "")
        self._checkpoint_step, summary = rest.checkpoint, self._reducer.summary
        summary.files, summary.former = rest.files, rest.former
        self._learn(
            oom=self._ends.oom_kills(), torchrun_signal=rest.torchrun_signal,
            failure=self.known.failure or failure,
        )  # fmt: skip
        self.stage = "over"
        self._unwritten = jsonl.text(jsonl.mapping(self._alerts.open(), DROPPED), "text")
        self.monitor.close(f"the attempt has ended: {self.decided()[1]}")
        self._alerts.clear_all("the attempt has ended")
        self.tree.close()

    # --- facts ---------------------------------------------------------------------------------

    def take(self, news: Poll) -> None:
        """Adds the new content of the run's files to the attempt."""
        self.behind, self._behind_ranks = news.behind, news.behind_ranks
        taken = self._observers.run("records", lambda: self._take_records(news), False)
        if not self._caught_up and news.disk and not news.behind_ranks:
            self._caught_up = True
            self._reducer.mark_old()
        self._learn(halt_file=self.known.halt_file or news.halt_file)
        if news.disk:
            self._sampler.disk, self._sampler.csv = news.disk, news.csv
            self._sampler.env = news.env
            self._records_at = time.monotonic() if taken and not news.unread else self._records_at

    def _take_records(self, news: Poll) -> bool:
        for batch in news.batches:
            self._reducer.add(batch, self._world, self._number)
        return True

    def checkpoint(self, former: int) -> int:
        """Returns the step of the newest checkpoint at the attempt's end, or 0 if there is none.

        A checkpoint newer than `former` counts if it has both a directory and a record. In an
        attempt without records, the directory is enough. If the directory cannot be read, the
        record is enough.
        """
        recorded = max(former, self.saved)
        if self._checkpoint_step is None:
            return recorded
        return min(self._checkpoint_step, recorded) if self._heads() else self._checkpoint_step

    @property
    def saved(self) -> int:
        """The step of the newest checkpoint in the attempt's records, or 0 if there is none."""
        return max((head.saved for head in self._heads().values()), default=0)

    def _learn(self, **facts: Any) -> None:
        self.known = replace(self.known, **facts)

    def facts(self) -> Facts:
        """Returns the facts that determine the state."""
        tree, heads, verdict = self.tree, self._heads(), self.monitor.verdict
        ends = [rank in heads and heads[rank].has_end for rank in range(self._world)]
        return replace(
            self.known, over=self.stage == "over", collecting=self.stage == "collect",
            spawned=tree.spawned, torchrun_code=tree.agent_status, torchrun_gone=tree.agent_over,
            order=tuple(tree.order), ends=self._ends.so_far(), step=self.step,
            halting_ranks=sum(seen.phase == "halt" for seen in self._sampler.evidence),
            halt_steps={rank: h.halt for rank, h in heads.items() if h.halt is not None},
            reasons={rank: head.reason for rank, head in heads.items() if head.reason},
            has_exit_records=all(ends) or not (heads or self.known.failure),
            verdict=verdict.sentence if verdict else "", unjoined=self.monitor.unjoined,
        )  # fmt: skip

    @property
    def step(self) -> int:
        """The highest step in the pulses and records of this attempt."""
        pulsed = max((seen.step for seen in self._sampler.evidence), default=0)
        recorded = (head.step for head in self._heads().values())
        return max(pulsed, self._pulses.newest, *recorded)

    def document(self) -> dict[str, Any]:
        """Returns the keys of supervisor.json that describe the attempt."""
        agent, verdict = self.tree.agent, self.monitor.verdict
        return {
            "torchrun": {"pid": agent.pid, "start_ticks": agent.start_ticks} if agent else None,
            "workers": self._ends.documents(self.facts()),
            "asked": self.known.requested, "asked_by": self.known.by,
            "verdict": asdict(verdict) if verdict else None,
        }  # fmt: skip
