"""Finds how the ranks of an attempt ended: from the kernel, else from records, logs and pulses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from console.rank_end import NO_CODE, OomEvidence, RankEnd
from console.run_state import Facts
from console.sources import crash_log, process, procfs
from console.sources.crash_log import Crash
from console.sources.reducer import NO_RECORDS, LatestRecords
from console.sources.sanitize import clean
from console.status_text import rank_names
from console.supervisor.former_documents import ENDINGS
from console.supervisor.live_directory import LastPulses
from console.supervisor.process_tree import Tree, Worker
from trainers.contract import jsonl, pulse, rundir

AGENT_LOST, STUCK, UNSTARTED = "torchrun-gone", "not-ended", "not-started"
EXIT_HANGS = "exit-hangs"
LATE_END_S = 5.0
"""Time within which torchrun usually reaps an ended rank, and the rank's last record arrives."""


class Ends:
    """Finds how the ranks of one attempt ended.

    After all processes have ended, `conclude` sets `crashes`, the last error in each log.
    """

    def __init__(
        self, tree: Tree, heads: Callable[[], Mapping[int, LatestRecords]], pulses: LastPulses,
        is_ours: bool,
    ):  # fmt: skip
        self._tree, self._heads, self._pulses, self._is_ours = tree, heads, pulses, is_ours
        self.crashes: Mapping[int, Crash] = {}
        self._oom_before = procfs.oom_counts()

    def of(self, worker: Worker) -> RankEnd:
        """Returns how a rank ended."""
        step = self._pulses.step(worker.rank, worker.handle.pid)
        head = self._heads().get(worker.rank, NO_RECORDS)
        found = end_of(worker, head, self.crashes.get(worker.rank), step)
        phase = self._pulses.phase(worker.rank, found.step) or found.phase
        return replace(found, phase=phase, is_ours=self._is_ours)

    def so_far(self) -> list[RankEnd]:
        """Returns a `RankEnd` for each rank that has ended so far."""
        over = [each for each in self._tree.workers.values() if each.over_ts is not None]
        return [self.of(worker) for worker in over]

    def failure(self, grace_s: float) -> str:
        """Returns a sentence on the ranks that failed while others are alive, or "".

        The exit code or the signal of a rank shows the failure. If the exit is not observed within
        `LATE_END_S`, the exit code in the last record is used.
        """
        found = [str(n) for n, each in sorted(self._tree.workers.items()) if self._has_failed(each)]
        if not (found and self._tree.alive()):
            return ""
        others = "the others wait" if self._tree.agent_over else "torchrun ends the others"
        return (f"rank {', '.join(found)} failed, {others}; ranks still alive after {grace_s:g} s "
                "are killed")  # fmt: skip

    def _has_failed(self, worker: Worker) -> bool:
        if worker.over_ts is None:
            return False
        late = worker.over_ts < time.time() - LATE_END_S
        if worker.observed:
            return worker.failed and (late or not worker.unreaped)
        return late and self._heads().get(worker.rank, NO_RECORDS).code not in (None, 0)

    def without_torchrun(self) -> str:
        """Returns a sentence if torchrun has exited while ranks still run, or "" otherwise."""
        # `alive` may still contain a rank that has just ended.
        left = [w.rank for w in self._tree.alive() if not w.handle.is_over()]
        if not (self._tree.agent_over and left):
            return ""
        status = self._tree.agent_status
        how = "code not available" if status is None else f"code {status}"
        return (f"torchrun (pid {self._tree.agent_pid}) has exited ({how}); "
                f"{rank_names(left, 'still runs', 'still run')}")  # fmt: skip

    def alerts(
        self, is_ending: bool, late_s: float, exit_s: float
    ) -> Iterator[tuple[str, str, str]]:  # fmt: skip
        """Yields name, text and key of each alert on late or stuck processes or a lost torchrun.

        `late_s` is 0 until the time limit for the start of the ranks has passed; then it is this
        limit. A rank hangs at its exit if its process is alive `exit_s` after its exit record. With
        `is_ending`, the only alert is on processes that KILL has not ended.
        """
        tree, heads, now = self._tree, self._heads(), time.monotonic()
        if stuck := tree.stuck():
            why = "a process in state D waits for a disk or a driver"
            yield STUCK, f"KILL has not ended pid {', '.join(stuck)}; {why}", ""
        if is_ending:
            return
        if text := self.without_torchrun():
            yield AGENT_LOST, text, ""
        if late_s and tree.incomplete:
            found = f"{len(tree.workers)} of {tree.nproc} ranks were found within {late_s:g} s"
            agent = f"pid {tree.agent_pid}, state {process.state(tree.agent_pid)}"
            where = f"see {rundir.TORCHRUN_LOG}; stop ends the run"
            yield UNSTARTED, f"{found} of the start of torchrun ({agent}); {where}", "K"
        alive = [rank for rank, worker in sorted(tree.workers.items()) if worker.over_ts is None]
        ended = [rank for rank in alive if heads.get(rank, NO_RECORDS).has_end]
        if hung := [rank for rank in ended if heads[rank].pace.age_s(now) >= exit_s]:
            text = (
                f"{rank_names(hung, 'still runs', 'still run')} {exit_s:g} s after the exit record"
            )
            yield EXIT_HANGS, f"{text}, so the run does not end; stop ends it", "K"

    def conclude(self, log: bytes, crashes: Mapping[int, Crash]) -> str:
        """Adds the ends that torchrun's `log`, the last errors, the records and the pulses show.

        Returns a sentence if torchrun failed and no rank was found, or "" otherwise.
        """
        take_log(self._tree, log)
        self.crashes = crashes
        if self._tree.agent_status is None:  # the exit of torchrun was not observed
            self._tree.add_unseen({rank: x.last for rank, x in self._heads().items()})
        pids = {rank: worker.handle.pid for rank, worker in self._tree.workers.items()}
        self._pulses.read_all(pids, self._tree.nproc)
        if self._tree.workers or not self._tree.agent_status:
            return ""
        error = crash_log.read(log).error or f"see {rundir.TORCHRUN_LOG}"
        return f"torchrun started no rank: {error}"

    def oom_kills(self) -> OomEvidence:
        """Returns the kernel's out-of-memory kills since this object was created."""
        return procfs.oom_since(self._oom_before)

    def documents(self, facts: Facts) -> list[dict[str, Any]]:
        """Returns the value of the key `workers` of supervisor.json.

        If a request or a signal to torchrun ended all ranks, none ended because of another rank.
        """
        is_requested = facts.requested in ENDINGS[1:] or facts.ended_by_signal
        blamed = None if is_requested and not facts.rank_failure else facts.culprit()
        found = []
        for _, worker in sorted(self._tree.workers.items()):
            record = worker.as_dict()
            if record["exit"] is not None:
                end = self.of(worker)
                secondary = blamed is not None and end.secondary and end.failed and end != blamed
                record["exit"] |= {"code": end.code, "signal": end.signal, "secondary": secondary}
            found.append(record)
        return found


def take_log(tree: Tree, log: bytes) -> None:
    """Reads the exits of ranks from the summary at the end of torchrun's log.

    An exit from the log does not replace an exit that the kernel reported. An exit from the
    log is confirmed only if torchrun's own exit agrees. Exit code 0 of torchrun stands for
    code 0 of each rank whose exit the kernel did not report.
    """
    for rank, code, pid, is_root in crash_log.failed_ranks(log):
        if rank >= tree.nproc:
            continue
        unseen = Worker(rank, rank, process.Handle(pid, -1, 0))
        worker = tree.workers.setdefault(rank, unseen)
        if worker.handle.pid != pid or worker.observed or not code:
            continue
        worker.claimed(code, tree.agent_status not in (0, None))
        if rank not in tree.order:
            tree.order.insert(0 if is_root else len(tree.order), rank)
    if tree.agent_status == 0:
        for worker in tree.workers.values():
            worker.claimed(0, True)


def end_of(
    worker: Worker, head: LatestRecords, words: Crash | None = None, step: int = 0
) -> RankEnd:
    """Returns how a rank ended: from its exit, its records and the last error in its log (`words`).

    If the kernel did not report the exit code, the code comes from a log, a document or the last
    record. Such a code 0 needs a second source. `step` is the step in the pulse; a crash may lose
    the last records.
    """
    rank, code, signal = worker.rank, worker.code, worker.signal
    doubt = "" if worker.observed or worker.confirmed else _doubt(worker, head, step)
    if doubt:
        code = signal = None
    elif not (worker.observed or code or (head.has_end and head.code is None)):
        code = head.code  # exit 0 that was not observed counts only if recorded
    last, record = words or Crash(), head.last
    phase = jsonl.text(record, "phase") if record.get("msg") == "exit" else ""
    said = ": ".join(filter(None, (jsonl.text(record, "msg"), jsonl.text(record, "reason"))))
    return RankEnd(
        rank, code, signal, max(step, head.step), head.error_words,
        last.error, worker.killed_after_failure,
        raised_at=last.raised_at, crashed_in=last.crashed_in,
        last_record=clean(said, 200), ts=None if worker.late else worker.over_ts,
        late=worker.late, observed=worker.observed, doubt=doubt,
        phase=phase if phase in pulse.CODES else "",
    )  # fmt: skip


def _doubt(worker: Worker, head: LatestRecords, step: int) -> str:
    """Returns why the exit in the last record of a rank is not accepted, or "" if nothing is wrong.

    Only exit 0, and an exit record without a known code, can be in doubt.
    """
    recorded = head.step
    claimed = worker.signal or (f"exit {worker.code}" if worker.code else "")
    if head.has_end and head.code is None and not claimed:
        return NO_CODE
    if head.code != 0 or (step == recorded and not claimed):
        return ""
    if claimed:
        return f"its last record says exit 0, but a log or a document says {claimed}"
    pulse = f"its pulse is of step {step}" if step else "it has no pulse"
    return f"its last record says exit 0 at step {recorded}, no supervisor observed it, and {pulse}"
