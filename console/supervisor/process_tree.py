"""The processes of one attempt: torchrun, its ranks and their descendants.

The owner is the subreaper: if a rank outlives torchrun, the owner becomes its parent and reads its
exit code. torchrun reaps the other ranks. The kernel may still report their exit codes through
their handles; otherwise the codes come from torchrun's log or from the records. Processes are found
by the token of the run in their environment. If a known rank overwrites the token, its pidfd still
identifies it.
"""

from __future__ import annotations

import math
import os
import select
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from console.sources import process
from console.supervisor.link import Link
from trainers.contract import jsonl, rundir

LEFTOVER_GRACE_S = 2.0
SCAN_EVERY_S = 0.2
"""Least time until `is_over` repeats a scan that found processes, and `enforce` repeats KILL."""
GONE_STATES = ("Z", "X", process.GONE)
LATE_S = 1.0
"""Time within which a process usually ends after KILL, and the owner reports an exit."""


@dataclass(slots=True)
class Worker:
    """One rank: its process while the process is alive, and its exit afterwards."""

    rank: int
    local_rank: int
    handle: process.Handle
    over_ts: float | None = None
    late: bool = False
    """True if the rank ended before this process observed it, so the time is unknown."""
    code: int | None = None
    signal: str | None = None
    observed: bool = False
    """True if the kernel reported the exit. Otherwise the exit has another source or is unknown."""
    confirmed: bool = False
    """True if an exit from a log or a document needs no other source."""
    killed_after_failure: bool = False
    """True if a supervisor killed the rank after a failure, or recorded its end as secondary."""
    unreaped: bool = False
    """True while the rank is a zombie, for example because torchrun is stopped and cannot reap."""

    def ended(self, code: int) -> None:
        """Sets the exit that the kernel reported; a negative code is a signal."""
        self.code, self.signal = (None, process.signal_name(-code)) if code < 0 else (code, None)
        self.over_ts, self.observed = self.over_ts or time.time(), True

    @property
    def failed(self) -> bool:
        """True if the kernel reported a signal or an exit code other than 0."""
        return self.observed and (self.signal is not None or self.code != 0)

    def claimed(self, code: int, confirmed: bool) -> None:
        """Sets an exit code from torchrun or its log, unless the kernel reported the exit."""
        if not self.observed:
            self.late = self.late or self.over_ts is None
            self.ended(code)
            self.observed, self.confirmed = False, confirmed

    def as_dict(self) -> dict[str, Any]:
        over: dict[str, Any] | None = {"code": self.code, "signal": self.signal, "ts": self.over_ts}
        over |= {name: True for name in ("late", "unreaped") if getattr(self, name)}
        return {
            "rank": self.rank, "local_rank": self.local_rank, "host": rundir.host_name(),
            "pid": self.handle.pid, "start_ticks": self.handle.start_ticks,
            "exit": None if self.over_ts is None else over,
        }  # fmt: skip


class Tree:
    """Owns the processes of one attempt; of the methods, only `spawn` waits for the owner.

    The environment of torchrun contains `token` and `home` (the run directory). Its descendants
    inherit both.
    """

    def __init__(self, token: str, nproc: int, poller: select.poll, link: Link, home: str = ""):
        self.token, self.nproc, self._home, self._link = token, nproc, home, link
        self._parent, self._poller = link.state.identity.get("pid", 0), poller
        self.agent: process.Handle | None = None
        """The process of torchrun, None before it starts."""
        self.agent_status: int | None = None
        """The exit code of torchrun; None while torchrun is alive, or if the code is unknown."""
        self.agent_over = False
        self.workers: dict[int, Worker] = {}
        self.order: list[int] = []
        """Ranks in the order in which they ended."""
        self._kill_at = self._ranks_kill_at = math.inf
        """When KILL is due: for all processes (0 after this KILL), and for the ranks only."""
        self._first_killed = math.inf
        """The time of the first KILL: to all processes, or to the ranks if only they got KILL."""
        self._scanned = self._killed = self._agent_over_at = 0.0
        self._left: list[int] = []
        self._over_at: dict[int, float] = {}
        """When the end of a process without an exit code was first seen, by pid."""

    @property
    def spawned(self) -> bool:
        return self.agent is not None

    @property
    def agent_pid(self) -> int:
        return self.agent.pid if self.agent else 0

    @property
    def incomplete(self) -> bool:
        """True if torchrun is alive and some of its ranks have not been found yet."""
        return self.spawned and not self.agent_over and len(self.workers) < self.nproc

    def spawn(
        self, argv: Sequence[str], environment: Mapping[str, str], log_fd: int, grace_s: float
    ) -> None:
        """Asks the owner to start torchrun in a new session. Raises as `Link.spawn` does."""
        pid, fd = self._link.spawn(argv, environment, log_fd, grace_s)
        self.agent = self._watch(process.Handle(pid, fd, rundir.start_ticks(pid) or 0))

    def adopt(self, document: Mapping[str, Any], run: Path, number: int) -> None:
        """Takes over the processes of an attempt that a former supervisor or child started.

        `document` is the former supervisor.json. It may be older than the processes, so a process
        without the token is checked. If a process has already ended, or is not a child of the
        owner, its exit code may stay unknown.
        """
        # If the owner has the document, the logs are not read, because their disk may hang.
        stored = self._link.stored(run / rundir.SUPERVISOR) or {}
        logs = None if stored.get("attempt") == number else rundir.logs(run, number)
        with_token = {pid: process.environment(pid).get("RANK") for pid in self._found()}

        def named(entry: Mapping[str, Any], rank: int = -1) -> process.Handle | None:
            family = [pid for pid, its in with_token.items() if its == str(rank)]
            owner = process.identity_in(document, entry)
            return self._watch(process.open_named(owner, run, logs, family))

        agent, entries = jsonl.mapping(document, "torchrun"), jsonl.entries(document, "workers")
        known = {rank: each for each in sorted(entries, key=_end_ts) if
                 (rank := jsonl.integer(each, "rank")) is not None and 0 <= rank < self.nproc
                 }  # fmt: skip
        for rank, entry in known.items():
            # A rank that overwrote its token may have children that have the token and the RANK.
            if jsonl.integer(entry, "pid") not in with_token and (handle := named(entry, rank)):
                self._adopt_named(rank, entry, handle)
        ended = {str(rank) for rank, entry in known.items() if entry.get("exit") is not None}
        self._adopt_found([*with_token], ended)
        for rank, entry in known.items():
            if rank not in self.workers:
                self._adopt_named(rank, entry, named(entry, rank))
        for worker in self.workers.values():
            worker.late = worker.late or (worker.over_ts is None and worker.handle.is_over())
        self.agent = self.agent or named(agent)
        if self.agent is None:
            pid = self._link.state.torchrun_pid or jsonl.integer(agent, "pid") or 0
            self.agent = process.Handle(pid, -1, 0)
            self._look_at_agent()

    def _adopt_found(self, pids: Sequence[int], ended: Collection[str]) -> None:
        """Finds torchrun and ranks in `pids`, processes with the token; skips `ended` ranks.

        Children inherit the RANK of their parent, so the oldest process with a RANK is the rank
        itself. If the rank has ended, it is a child, or a process with a copied token.
        """
        for pid in sorted(pids, key=lambda pid: rundir.start_ticks(pid) or math.inf):
            rank = process.environment(pid).get("RANK")
            if rank is not None and rank not in ended:
                self._add_rank(pid)
            elif rank is None and self.agent is None:
                self.agent = self._watch(process.open_process(pid, self.token))

    def _adopt_named(
        self, rank: int, entry: Mapping[str, Any], handle: process.Handle | None
    ) -> None:
        """Adds a rank from its entry in the document; a rank without a handle has ended."""
        local, exit_ = jsonl.integer(entry, "local_rank") or 0, jsonl.mapping(entry, "exit")
        ended = process.Handle(jsonl.integer(entry, "pid") or 0, -1, 0)
        self.workers[rank] = worker = Worker(rank, local, handle or ended)
        if handle is not None:
            return
        ended_ts = jsonl.number(exit_, "ts")
        is_late = bool(exit_.get("late", ended_ts is None))
        worker.over_ts, worker.late = ended_ts or time.time(), is_late
        worker.code = jsonl.integer(exit_, "code")
        worker.signal = jsonl.text(exit_, "signal") or None
        worker.killed_after_failure = exit_.get("secondary") is True
        worker.confirmed = worker.code == 0 and worker.signal is None
        self.order.append(rank)

    def add_unseen(self, records: Mapping[int, Mapping[str, Any]]) -> None:
        """Adds the ranks that ended before a supervisor saw them, from their last records."""
        for rank, record in records.items():
            if rank < self.nproc and rank not in self.workers:
                self._adopt_named(rank, record, None)

    def _watch(self, handle: process.Handle | None) -> process.Handle | None:
        """Makes the end of the process wake the main loop; returns the handle."""
        if handle is not None:
            self._poller.register(handle.fd, select.POLLIN)
        return handle

    def poll(self) -> bool:
        """Records new ranks and the ends of ranks and torchrun; returns whether anything is new."""
        new = process.children(self.agent_pid) if self.incomplete else []
        changed = bool(sum(map(self._add_rank, new)))
        for worker in self.workers.values():
            if worker.handle.is_over():
                changed = self._record_end(worker) or changed
        return self._look_at_agent() or changed

    def alive(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.over_ts is None]

    def handles(self) -> dict[int, process.Handle]:
        """Returns the handles of the ranks that are alive."""
        return {worker.rank: worker.handle for worker in self.alive()}

    def is_over(self) -> bool:
        """Returns whether all processes have ended.

        Once all ranks have ended, processes that outlive torchrun by `LEFTOVER_GRACE_S` are killed.
        """
        if not self.spawned or not self.agent_over or self.alive():
            return False
        now = time.monotonic()
        if now - self._scanned < SCAN_EVERY_S and self._left:
            return False
        self._scanned, self._left = now, self._found() + self._strays()
        if not self._left:
            self.poll()
        elif now - self._agent_over_at > LEFTOVER_GRACE_S:
            self.kill()
        return not self._left

    def terminate(self, grace_s: float) -> None:
        """Sends TERM to torchrun, which passes it to the ranks, and KILL after `grace_s`.

        If torchrun has ended or is stopped, also sends TERM to the ranks. TERM is not sent if the
        owner has already sent it.
        """
        if not self.spawned:
            return
        if self._kill_at == math.inf:
            self._kill_at = time.monotonic() + grace_s
            self._link.kill_after(grace_s)
        if self._link.state.term_sent:
            return  # the owner sent TERM, because no child did so in time
        if self.agent is not None and not self.agent_over:
            self.agent.send(signal.SIGTERM)
            if process.state(self.agent.pid) not in process.STOPPED:
                return
        for worker in self.alive():
            worker.handle.send(signal.SIGTERM)

    def kill_ranks_after(self, grace_s: float) -> None:
        """Sets the time of KILL for the ranks; torchrun itself may wait 30 s after a failure."""
        self._ranks_kill_at = min(self._ranks_kill_at, time.monotonic() + grace_s)

    def kill(self) -> None:
        """Sends KILL to the processes of this attempt; later calls of `enforce` repeat this."""
        if not self.spawned:
            return
        if self._kill_at != 0.0:
            self._kill_at, self._first_killed = 0.0, time.monotonic()
            self._link.kill_after(0.0)
        if self.agent is not None and not self.agent_over:
            self.agent.send(signal.SIGKILL)
        self._kill_ranks()
        if self.agent_over and not self.alive():
            for pid in self._strays():
                self._send_kill(process.open_child(pid, self._parent))

    def stuck(self) -> list[str]:
        """Returns the processes that KILL does not end, with their state: "8302 (D)".

        If only the ranks got KILL, torchrun and orphans without the token are left out.
        """
        if time.monotonic() - self._first_killed < LATE_S:
            return []
        pids = {worker.handle.pid for worker in self.alive()} | set(self._found())
        pids = pids | set(self._strays()) if self._kill_at == 0.0 else pids - {self.agent_pid}
        states = {pid: process.state(pid) for pid in sorted(pids)}
        return [f"{pid} ({state})" for pid, state in states.items() if state not in GONE_STATES]

    def _kill_ranks(self) -> None:
        """Sends KILL to the ranks and to processes with the token, except torchrun."""
        self._killed = time.monotonic()
        self._first_killed = min(self._first_killed, self._killed)
        for worker in self.alive():
            worker.handle.send(signal.SIGKILL)
        for pid in self._found():
            if pid != self.agent_pid:
                self._send_kill(process.open_process(pid, self.token))

    def _send_kill(self, handle: process.Handle | None) -> None:
        if handle is not None:
            handle.send(signal.SIGKILL)
            handle.close()

    def _found(self) -> list[int]:
        """Returns the processes with the run's token; reads the environments of all processes."""
        return process.with_token(self.token, self._home)

    def _strays(self) -> list[int]:
        """Returns the orphans that the owner inherited as subreaper, with or without the token."""
        children = process.children(self._parent)
        return [pid for pid in children if pid not in (os.getpid(), self.agent_pid)
                and process.state(pid) not in GONE_STATES]  # fmt: skip

    def enforce(self) -> bool:
        """Sends KILL after a grace time; returns whether all processes get KILL for the first time.

        KILL to the ranks alone does not count.
        """
        now = time.monotonic()
        if now < self._killed + SCAN_EVERY_S:
            return False
        if now >= self._ranks_kill_at and self.alive():
            for worker in self.alive():
                worker.killed_after_failure = True
            self._kill_ranks()
        if now < self._kill_at:
            return False
        first = self._kill_at > 0
        self.kill()
        return first

    def close(self) -> None:
        for handle in filter(None, (self.agent, *(each.handle for each in self.workers.values()))):
            self._forget(handle)

    def _add_rank(self, pid: int) -> bool:
        """Adds a process as the rank that its environment names; returns whether it was added."""
        variables = process.environment(pid)
        rank, local = variables.get("RANK", ""), variables.get("LOCAL_RANK", "")
        if not rank.isdecimal() or not local.isdecimal() or int(rank) in self.workers:
            return False
        handle = self._watch(
            process.open_process(pid, self.token) if int(rank) < self.nproc else None
        )
        if handle is None:
            return False
        self.workers[int(rank)] = Worker(int(rank), int(local), handle)
        return True

    def _record_end(self, worker: Worker) -> bool:
        """Records the end of a rank, and its exit when known; returns whether anything is new.

        The exit code comes from the owner, or else from the kernel.
        """
        before, handle = (worker.over_ts, worker.observed, worker.unreaped), worker.handle
        code = None if worker.observed else self._link.state.exit_codes.get(handle.pid)
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
        return before != (worker.over_ts, worker.observed, worker.unreaped)

    def _look_at_agent(self) -> bool:
        """Records the end of torchrun; returns whether this is new."""
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
        """Returns whether the owner may still report the exit code of a process."""
        now = time.monotonic()
        return now - self._over_at.setdefault(handle.pid, now) < LATE_S

    def _forget(self, handle: process.Handle) -> None:
        if handle.fd >= 0:
            self._poller.unregister(handle.fd)
            handle.close()


def _end_ts(entry: Mapping[str, Any]) -> float:
    return jsonl.number(jsonl.mapping(entry, "exit"), "ts") or math.inf
