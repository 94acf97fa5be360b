"""The processes of one attempt: torchrun, its ranks and whatever they started.

The owner is the subreaper, so a rank that outlives torchrun becomes its child and leaves a real
exit status; of those that torchrun reaps the kernel tells it. Everything is found by the
attempt's token in its environment; a rank that was found is held, whatever becomes of its token.
"""

from __future__ import annotations

import math
import os
import re
import select
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from console.sources import process
from console.supervisor.link import Link
from trainers.contract import jsonl, rundir

LEFTOVER_GRACE_S = 2.0
SCAN_EVERY_S = 0.2
"""A scan reads the environment of every process of the host."""
FAILED = re.compile(
    rb"rank\s*:\s*(\d{1,6}) \(local_rank: \d+\)\s+exitcode\s*:\s*(-?\d{1,4}) \(pid: (\d+)\)"
)
GONE_STATES = ("Z", "X", process.GONE)
STUCK_S = 1.0
"""A process that lives so long after KILL waits in the kernel."""
REAPED_S = 1.0
"""After so long the owner has told of a process that it reaped."""
ROOT_CAUSE = b"Root Cause (first observed failure):"


@dataclass(slots=True)
class Worker:
    """One rank: its process while it lives, how it ended afterwards."""

    rank: int
    local_rank: int
    handle: process.Handle
    over_ts: float | None = None
    late: bool = False
    """It had ended before this process looked for it: nobody knows when."""
    code: int | None = None
    signal: str | None = None
    seen: bool = False
    """The kernel reported `code` or `signal`; False: a log or a former supervisor claims it."""
    vouched: bool = False
    """Two sources that saw no exit tell the same: torchrun's own exit, or a document, and a log or
    its record."""
    culled: bool = False
    """Killed here because it outlived another rank's failure."""
    unreaped: bool = False
    """Dead, and its parent has not asked how it ended: a stopped torchrun does not."""

    def ended(self, code: int) -> None:
        """Takes the exit code; a negative one is the signal that killed it."""
        self.code, self.signal = (None, process.signal_name(-code)) if code < 0 else (code, None)
        self.over_ts, self.seen = self.over_ts or time.time(), True

    @property
    def failed(self) -> bool:
        """Says whether the kernel reported a bad end."""
        return self.seen and (self.signal is not None or self.code != 0)

    def claimed(self, code: int, vouched: bool) -> None:
        """Takes an exit code that only a log names, unless the kernel reported one."""
        if not self.seen:
            self.ended(code)
            self.seen, self.vouched = False, vouched

    def as_dict(self) -> dict[str, Any]:
        over = None
        if self.over_ts is not None:
            over = {"code": self.code, "signal": self.signal, "ts": self.over_ts}
            over |= {"unreaped": True} if self.unreaped else {}
        return {
            "rank": self.rank, "local_rank": self.local_rank, "host": rundir.host_name(),
            "pid": self.handle.pid, "start_ticks": self.handle.start_ticks, "exit": over,
        }  # fmt: skip


class Tree:
    """Owns the processes of one attempt; every method returns at once.

    They are known by the token and the run directory (`home`) in their environment.
    """

    def __init__(
        self, token: str, nproc: int, poller: select.poll, link: Link, home: str = ""
    ):  # fmt: skip
        self.token, self.nproc, self._home, self._link = token, nproc, home, link
        self._parent, self._poller = link.state.identity.get("pid", 0), poller
        self.agent: process.Handle | None = None
        """torchrun, None before it was started."""
        self.agent_status: int | None = None
        """Its exit code; None while it lives, and for ever where nobody could see it."""
        self.agent_over = False
        self.workers: dict[int, Worker] = {}
        self.order: list[int] = []
        """Ranks in the order in which they ended."""
        self._kill_at = self._ranks_kill_at = math.inf
        """The end of the grace time; 0: KILL was sent."""
        self._scanned = self._killed = self._first_killed = self._agent_over_at = 0.0
        self._left: list[int] = []
        self._over_at: dict[int, float] = {}
        """When a process was first seen to be over whose exit code is not known yet."""

    @property
    def spawned(self) -> bool:
        return self.agent is not None

    @property
    def agent_pid(self) -> int:
        return self.agent.pid if self.agent else 0

    @property
    def incomplete(self) -> bool:
        """Says whether torchrun lives and some of its ranks have not been found yet."""
        return self.spawned and not self.agent_over and len(self.workers) < self.nproc

    def spawn(
        self, argv: Sequence[str], environment: Mapping[str, str], log_fd: int, grace_s: float
    ) -> None:
        """Has the owner start torchrun in its own session. Raises OSError where it cannot."""
        pid, fd = self._link.spawn(argv, environment, log_fd, grace_s)
        self.agent = self._taken(process.Handle(pid, fd, rundir.start_ticks(pid) or 0))

    def adopt(self, held: Mapping[str, Any], run: Path, number: int) -> None:
        """Takes over the processes that are there; a former supervisor's document may lag behind.

        It only tells of ranks that have lost their token, and how those ended that are gone. Exit
        codes of processes that are no children of ours, and of what ended while nobody looked, may
        stay unknown. Anybody can copy a token: who is named by the document, or writes into a log
        of the attempt, goes first, and nobody else is a rank that has ended by the document. One
        that the owner kept is believed without its logs, which may lie on a disk that hangs.
        """
        is_kept = self._link.stored(run / rundir.SUPERVISOR) is not None
        is_kept = is_kept and held.get("attempt") == number
        entries, agent = jsonl.entries(held, "workers"), jsonl.mapping(held, "torchrun")
        told = {(jsonl.integer(entry, "start_ticks"), jsonl.integer(entry, "pid"))
                for entry in (*entries, agent)}  # fmt: skip
        over = {str(entry.get("rank")) for entry in entries if entry.get("exit") is not None}
        here, logs = {key: held.get(key) for key in ("boot_id", "host")}, rundir.logs(run, number)
        found = [
            ((ticks, pid) not in told and (is_kept or not process.writes_into(pid, run, logs)),
             ticks, pid)
            for pid in process.with_token(self.token, self._home)
            if (ticks := rundir.start_ticks(pid)) is not None
        ]  # fmt: skip
        for uncertain, _, pid in sorted(found):
            if uncertain and process.environment(pid).get("RANK") in over:
                continue
            # The first of a rank is the rank: what it starts inherits its environment.
            if "RANK" in process.environment(pid):
                self._take_rank(pid)
            elif self.agent is None:
                self.agent = self._taken(process.hold(pid, self.token))

        def named(entry: Mapping[str, Any]) -> process.Handle | None:
            return self._taken(process.hold_named(
                here | dict(entry), run, None if is_kept else logs
            ))  # fmt: skip

        entries.sort(key=lambda e: jsonl.number(jsonl.mapping(e, "exit"), "ts") or math.inf)
        for entry in entries:
            rank = jsonl.integer(entry, "rank")
            if rank is not None and 0 <= rank < self.nproc and rank not in self.workers:
                self._adopt_named(rank, entry, named(entry))
        self.agent = self.agent or named(agent)
        for worker in self.workers.values():
            worker.late = worker.late or (worker.over_ts is None and worker.handle.is_over())
        if self.agent is None:
            pid = self._link.state.torchrun_pid or jsonl.integer(agent, "pid") or 0
            self.agent = process.Handle(pid, -1, 0)
            self._look_at_agent()

    def _adopt_named(
        self, rank: int, entry: Mapping[str, Any], handle: process.Handle | None
    ) -> None:
        """Takes a rank as the document tells of it; without a handle it has ended."""
        local, over = jsonl.integer(entry, "local_rank") or 0, jsonl.mapping(entry, "exit")
        gone = process.Handle(jsonl.integer(entry, "pid") or 0, -1, 0)
        self.workers[rank] = worker = Worker(rank, local, handle or gone)
        if handle is not None:
            return
        told_ts = jsonl.number(over, "ts")
        worker.over_ts, worker.late = told_ts or time.time(), told_ts is None
        worker.code, name = jsonl.integer(over, "code"), jsonl.text(over, "signal")
        worker.signal, worker.culled = name or None, over.get("secondary") is True
        worker.vouched = worker.code == 0 and worker.signal is None
        self.order.append(rank)

    def _taken(self, handle: process.Handle | None) -> process.Handle | None:
        """Watches for the end of a process that is held."""
        if handle is not None:
            self._poller.register(handle.fd, select.POLLIN)
        return handle

    def look(self) -> bool:
        """Finds new ranks, takes what ended; True when something changed."""
        new = process.children(self.agent_pid) if self.incomplete else []
        changed = bool(sum(map(self._take_rank, new)))
        for worker in self.workers.values():
            if worker.handle.is_over():
                changed = self._take_end(worker) or changed
        return self._look_at_agent() or changed

    def alive(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.over_ts is None]

    def handles(self) -> dict[int, process.Handle]:
        """Returns the ranks that live, to signal them."""
        return {worker.rank: worker.handle for worker in self.alive()}

    def is_over(self) -> bool:
        """Says whether no process of this attempt is left; ends leftover helpers."""
        if not self.spawned or not self.agent_over or self.alive():
            return False
        now = time.monotonic()
        if now - self._scanned < SCAN_EVERY_S and self._left:
            return False
        self._scanned, self._left = now, self._found() + self._strays()
        if self._left and now - self._agent_over_at > LEFTOVER_GRACE_S:
            self.kill()
        if not self._left:
            self.look()
        return not self._left

    def terminate(self, grace_s: float) -> None:
        """Sends TERM to torchrun, or to the ranks if it is gone; KILL follows after the grace."""
        if not self.spawned:
            return
        if self._kill_at == math.inf:
            self._kill_at = time.monotonic() + grace_s
            self._link.kill_after(grace_s)
        if self._link.state.term_sent:
            return  # the owner did, where no child was there in time
        if self.agent is not None and not self.agent_over:
            self.agent.send(signal.SIGTERM)
            return
        for worker in self.alive():
            worker.handle.send(signal.SIGTERM)

    def expire(self, grace_s: float) -> None:
        """Gives the ranks this long: torchrun waits 30 s for those left by a failed one."""
        self._ranks_kill_at = min(self._ranks_kill_at, time.monotonic() + grace_s)

    def kill(self) -> None:
        """Sends KILL to every process of this attempt, and again at each `enforce`."""
        if not self.spawned:
            return
        if self._kill_at != 0.0:
            self._first_killed = time.monotonic()
            self._link.kill_after(0.0)
        self._kill_at, self._killed = 0.0, time.monotonic()
        if self.agent is not None and not self.agent_over:
            self.agent.send(signal.SIGKILL)
        self._kill_ranks()
        if self.agent_over and not self.alive():
            for pid in self._strays():
                self._send_kill(process.hold_child(pid, self._parent))

    def stuck(self) -> list[str]:
        """Returns the processes that live on after KILL, with their state: "8302 (D)"."""
        if self._kill_at != 0.0 or time.monotonic() - self._first_killed < STUCK_S:
            return []
        states = {pid: process.state(pid) for pid in self._found()}
        return [f"{pid} ({state})" for pid, state in states.items() if state not in GONE_STATES]

    def _kill_ranks(self) -> None:
        """Sends KILL to all but torchrun, which then says who failed first."""
        for worker in self.alive():
            worker.handle.send(signal.SIGKILL)
        for pid in self._found():
            if pid != self.agent_pid:
                self._send_kill(process.hold(pid, self.token))

    def _send_kill(self, handle: process.Handle | None) -> None:
        if handle is not None:
            handle.send(signal.SIGKILL)
            handle.close()

    def _found(self) -> list[int]:
        """Returns the processes that carry the token of this attempt."""
        return process.with_token(self.token, self._home)

    def _strays(self) -> list[int]:
        """Returns what lost its token and its parents: the owner, the subreaper, is its parent."""
        left = process.children(self._parent) if self._parent else []
        return [pid for pid in left if pid not in (os.getpid(), self.agent_pid)
                and process.state(pid) not in GONE_STATES]  # fmt: skip

    def enforce(self) -> bool:
        """Kills what has outlived its grace; True when it just did so for the first time."""
        now = time.monotonic()
        if now >= self._ranks_kill_at and self.alive():
            for worker in self.alive():
                worker.culled = True
            self._kill_ranks()
        if now < max(self._kill_at, self._killed + SCAN_EVERY_S):
            return False
        first = self._kill_at > 0
        self.kill()
        return first

    def take_log(self, log: bytes) -> None:
        """Takes the exits that nobody else saw from the summary at the end of torchrun's log.

        A rank that ended before it was found is known from there alone. Text never replaces an
        exit that the kernel reported, and what torchrun's own exit does not confirm is a claim.
        """
        root = log.rfind(ROOT_CAUSE)
        for match in FAILED.finditer(log):
            rank, code, pid = (int(group) for group in match.groups())
            if rank >= self.nproc:
                continue
            unseen = Worker(rank, rank, process.Handle(pid, -1, 0))
            worker = self.workers.setdefault(rank, unseen)
            if worker.handle.pid != pid or worker.seen or not code:
                continue
            worker.claimed(code, self.agent_status not in (0, None))
            if rank not in self.order:
                self.order.insert(0 if match.start() > root >= 0 else len(self.order), rank)
        if self.agent_status == 0:
            for worker in self.workers.values():
                worker.claimed(0, True)

    def close(self) -> None:
        for worker in self.workers.values():
            self._forget(worker.handle)
        if self.agent is not None:
            self._forget(self.agent)

    def _take_rank(self, pid: int) -> bool:
        """Takes a process as the rank that its environment names, unless that rank is known."""
        variables = process.environment(pid)
        rank, local = variables.get("RANK", ""), variables.get("LOCAL_RANK", "")
        if not rank.isdecimal() or not local.isdecimal() or int(rank) in self.workers:
            return False
        handle = self._taken(process.hold(pid, self.token) if int(rank) < self.nproc else None)
        if handle is None:
            return False
        self.workers[int(rank)] = Worker(int(rank), int(local), handle)
        return True

    def _take_end(self, worker: Worker) -> bool:
        """Takes the end of a rank, and how it ended as soon as somebody tells; says if it is new.

        The kernel tells of those that torchrun reaps, the owner of those that it left behind.
        """
        before, handle = (worker.over_ts, worker.seen, worker.unreaped), worker.handle
        code = None if worker.seen else self._link.state.exit_codes.get(handle.pid)
        if worker.over_ts is None:
            code = handle.exit_code() if code is None else code
            orphan = self.agent is not None and self.agent.is_over()
            if code is None and orphan and self._waits_for_exit(handle):
                return False
            worker.over_ts, worker.unreaped = time.time(), True
            self.order.append(worker.rank)
        if code is not None:
            worker.ended(code)
        worker.unreaped = worker.unreaped and handle.is_unreaped()
        self._forget(handle)
        return before != (worker.over_ts, worker.seen, worker.unreaped)

    def _look_at_agent(self) -> bool:
        """Takes the end of torchrun; says whether it is new."""
        agent = self.agent
        if agent is None or self.agent_over or not agent.is_over():
            return False
        code = self._link.state.exit_codes.pop(agent.pid, agent.exit_code())
        is_reaped_here = self._link.state.torchrun_pid == agent.pid
        if code is None and is_reaped_here and self._waits_for_exit(agent):
            return False
        self.agent_status, self.agent_over = code, True
        self._agent_over_at = time.monotonic()
        self._forget(agent)
        return True

    def _waits_for_exit(self, handle: process.Handle) -> bool:
        """Says whether the owner may still tell how a process ended that it reaped."""
        now = time.monotonic()
        return now - self._over_at.setdefault(handle.pid, now) < REAPED_S

    def _forget(self, handle: process.Handle) -> None:
        if handle.fd >= 0:
            self._poller.unregister(handle.fd)
            handle.close()
