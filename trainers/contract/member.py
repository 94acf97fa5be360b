"""Connects a rank to its run: pulse, heartbeat, stack dumps, and the step at which to halt.

A torchrun program calls `join`, `step` and `end_step`:

    run, loss = join(), None
    for step in range(1, steps + 1):
        if run.step(step, loss=loss):  # the loss of the previous step
            break
        loss = …  # the program's own step
    run.end_step(loss=loss)  # the loss of the last step

The console then shows the ranks of the program and can dump their stacks. If all ranks are on one
host and every step has a collective of all ranks, the ranks halt at the same step. A `with` block
reports a phase. A verdict then names the phase, and an evaluation or a save has its own stall
limit:

        with run.phase("eval"):
            evaluate()
"""

from __future__ import annotations

import atexit
import contextlib
import math
import operator
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial
from numbers import Real
from pathlib import Path
from types import FrameType
from typing import Any

from trainers.contract import VERSION, dumps, environ, rundir
from trainers.contract.ending import Ending
from trainers.contract.errors import RefusedError, UsageError, did_you_mean
from trainers.contract.halt_board import HaltBoard
from trainers.contract.pulse import PulseWriter
from trainers.contract.recorder import STDOUT, Recorder

HALT_POLL_S = 0.05
HALTING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals on which a rank requests a halt; torchrun sends one of them before it kills the ranks."""
PULSE_MIRROR_S = 0.25
COUNTING = ("progress", "exit")
"""Records that contain the number of steps with a non-finite loss, if such steps are counted."""
STEP_PHASES = ("fetch", "forward", "backward", "optimizer", "log", "eval", "save")
"""The phases that a program may report within a step."""
_RAISED_IN = "_nsa_phase"
"""The attribute of an exception that names the phase in which it was raised."""


class Member:
    """One rank in one attempt of one run.

    After the start, no method of this class except `close` waits for the disk in the caller.
    `halt_reason` is the reason why this rank requests a halt, or "" if there is none. Before they
    halt, all ranks must agree on the step. `Joined.step` makes the ranks of one host agree, if
    every step has a collective of all ranks.
    """

    def __init__(self, run: Path, variables: Mapping[str, str]):
        self.run = run
        self.rank = environ.integer(variables, "RANK", 0)
        self.local_rank = environ.integer(variables, "LOCAL_RANK", 0)
        self.world = environ.integer(variables, "WORLD_SIZE", 1)
        self.attempt = environ.integer(variables, environ.ATTEMPT, 1)
        self.run_id = variables.get(environ.RUN_ID) or run.name
        self.supervised = environ.RUN_ID in variables
        live = variables.get(environ.LIVE_DIR)
        self.live = Path(live) if live and Path(live).is_dir() else None
        if self.supervised:
            self._attach_log()
        self.home = rundir.OpenDirectory(run)
        self.recorder = Recorder(self.home.is_there)
        self.pulse = PulseWriter(
            rundir.pulse(self.live, self.rank) if self.live else None, self.rank
        )
        self._heartbeat = rundir.heartbeat(run, self.rank)
        self._fields = {
            "v": VERSION, "attempt": self.attempt, "host": rundir.host_name(), "world": self.world,
            "run": self.run_id, "pid": os.getpid(), "rank": self.rank, "local_rank": self.local_rank
        }  # fmt: skip
        """The fields that are equal in all records of this rank."""
        self._numbering = threading.Lock()
        """Held while a record is numbered and queued, so that the numbers in the queue ascend."""
        self.halt_reason = ""
        self._former: dict[int, Any] = {}
        """The handlers that `start` replaced."""
        self._is_forked = False
        """True in a forked child."""
        self._ignored_halt = None if self.supervised else rundir.stamp(run / rundir.HALT)
        self._known_requests = {name: rundir.stamp(run / name) for name in rundir.REQUEST_FILES}
        self._requests: set[str] = set()
        self._is_mirrored = True
        """False from the time a copy of the pulse is queued until the recorder makes the copy."""
        self.dumper = dumps.StackDumper(run, self.live, self.rank, self.recorder.call)
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="nsa-watcher", daemon=True)

    def start(self) -> None:
        """Registers handlers of the dump signals and of `HALTING`, and starts to poll for requests.

        A signal of `HALTING` that the process ignores stays ignored. torchrun also sends these
        signals to the children of the ranks. In a forked child they have no effect, because a
        worker that loads data must not end before its rank halts. Only SIGTERM has its former
        effect there, because multiprocessing ends a child with it and then waits.
        """
        self.dumper.install()
        os.register_at_fork(
            before=self._before_fork, after_in_parent=self._after_fork,
            after_in_child=self._after_fork_in_child,
        )  # fmt: skip
        for number in HALTING:
            former = signal.getsignal(number)
            if former is not signal.SIG_IGN:
                self._former[number] = former
                signal.signal(number, self._on_signal)
        self._watcher.start()

    def _before_fork(self) -> None:
        """Delays a SIGTERM to the child until the child has the former handler."""
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def _after_fork(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _after_fork_in_child(self) -> None:
        self._is_forked = True
        self.pulse.memory = bytearray(self.pulse.memory[:])  # the file is that of the rank
        if signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, self._former.get(signal.SIGTERM) or signal.SIG_DFL)
        self._after_fork()

    def record(self, msg: str, step: int, /, **figures: Any) -> None:
        """Queues one heartbeat record; `figures` are additional fields.

        A dropped record also uses up its number, so the gap in the numbers is visible.
        """
        figures.pop("cut", None)  # a program can set neither this field nor the next
        figures.pop("nonfinite_loss_steps", None)
        if msg in COUNTING and self.pulse.nonfinite_steps >= 0:
            figures["nonfinite_loss_steps"] = self.pulse.nonfinite_steps
        figures |= self._fields
        figures["step"], figures["msg"] = step, msg
        with self._numbering:
            figures["n"] = self.pulse.next_record_number()
            figures["ts"], figures["mono"] = time.time(), time.monotonic()
            self.recorder.put(self._heartbeat, figures)

    def log(self, text: str) -> None:
        """Queues one line for stdout; a line above 4 KiB is cut."""
        self.recorder.put(STDOUT, f"{text}\n".encode("utf-8", "replace"))

    def close(self, step: int, phase: str = "", **figures: Any) -> bool:
        """Queues the exit record and waits for the writer; returns False if this takes too long.

        A private pulse is then copied once more, so that the copy counts the exit record.

        `phase` is the phase in which the rank ends; the default is the phase of the pulse. The
        record contains the phase only if it is one of `STEP_PHASES`.
        """
        self._stop.set()
        phase = phase or self.pulse.phase
        if phase in STEP_PHASES:
            figures["phase"] = phase
        self.pulse.set(step, "exit")
        self.record("exit", step, dropped_records=self.recorder.dropped, **figures)
        if self.live is None:
            self.recorder.call(self._mirror_pulse)
        written = self.recorder.close()
        self.dumper.uninstall()
        return written

    def _attach_log(self) -> None:
        """Redirects stdout and stderr to the end of this rank's log."""
        path = rundir.rank_log(self.run, self.attempt, self.rank)
        for folder in (path.parent.parent, path.parent):
            folder.mkdir(mode=0o700, exist_ok=True)
        fd = rundir.open_append(path)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.halt_reason = self.halt_reason or signal.Signals(number).name

    def new_requests(self) -> frozenset[str]:
        """Returns the files of `rundir.REQUEST_FILES` that `_watch` found since the last call."""
        found = frozenset(self._requests)
        self._requests -= found
        return found

    def _watch(self) -> None:
        """Polls for files, and queues copies of a private pulse.

        A thread does this, so that a directory that hangs does not stall a step.
        """
        mirrored = 0.0
        while not self._stop.wait(HALT_POLL_S):
            found = rundir.stamp(self.run / rundir.HALT)
            if found not in (None, self._ignored_halt) and self.home.is_there():
                self.halt_reason = self.halt_reason or rundir.HALT
            for name in rundir.REQUEST_FILES:
                seen = rundir.stamp(self.run / name)
                if seen not in (None, self._known_requests[name]) and self.home.is_there():
                    self._known_requests[name] = seen
                    self._requests.add(name)
            is_due = self.live is None and time.monotonic() - mirrored >= PULSE_MIRROR_S
            if is_due and (self._is_mirrored or not self.recorder.waiting):
                mirrored, self._is_mirrored = time.monotonic(), False
                self.recorder.call(self._mirror_pulse)

    def _mirror_pulse(self) -> None:
        """Copies the private pulse into the run directory."""
        self._is_mirrored = True
        path = rundir.pulse(self.run, self.rank)
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags, 0o600), "wb", buffering=0) as file:
            file.write(self.pulse.memory[:])


class Joined(Member):
    """One rank of a foreign program."""

    pid = 0
    """The process that has joined a run; a forked child has not joined."""

    def __init__(self, run: Path, variables: Mapping[str, str]):
        super().__init__(run, variables)
        self._is_of_torchrun = environ.TORCHRUN_ID in variables
        self._is_interrupted = False
        self._board = HaltBoard(self.live or run, self.attempt, self.rank, self.world)
        self._last_step = 0
        self._last_at = time.monotonic()
        self._in_step = False
        self._apart_s = 0.0
        """The time of the evaluations and saves in this step, which is no time of the step."""
        self._reason = ""
        """The reason of a halt, or "" if the rank does not halt."""
        self._raised_in, self._exits = "", False
        """The phase in which an exception was raised ("" from the next step or phase on), and
        whether it was SystemExit."""
        self.pulse.nonfinite_steps = 0
        self.start()
        Joined.pid = os.getpid()
        self.record("boot", 0)
        self._ending = Ending()
        atexit.register(self._exit)
        os.register_at_fork(after_in_child=partial(atexit.unregister, self._exit))
        os.register_at_fork(after_in_child=self._board.leave)

    def step(self, step: int, /, **figures: Any) -> bool:
        """Starts `step` and returns False, or returns True if all ranks halt before this step.

        `figures` belong to the previous step. Steps with a non-finite `loss` are counted until a
        step has no loss, or one that is no plain number. A figure cannot replace a field of the
        contract. Raises TypeError if `step` is not a whole number.
        """
        step = operator.index(step)
        self.end_step(**figures)
        if self._board.decide(bool(self.halt_reason)):
            self._reason = self.halt_reason or "agreed"
            self.pulse.set(self._last_step, "halt")
            self.record("halt", self._last_step, reason=self._reason)
            return True
        self._last_step, self._last_at, self._in_step = step, time.monotonic(), True
        self._apart_s, self._raised_in = 0.0, ""
        self.pulse.set(step, "step")
        return False

    def end_step(self, /, **figures: Any) -> None:
        """Ends the present step, to which `figures` belong; does nothing if this step has ended.

        `step` calls `end_step`, so a program needs this call only after its last step.
        """
        if self._in_step:
            self._count(figures.get("loss"))
            self._end_step(figures)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Marks a phase of this step (for example "fetch" or "eval") during a `with` block.

        Raises UsageError for an unknown phase.
        """
        if name not in STEP_PHASES:
            raise UsageError(f"there is no phase {name!r}{did_you_mean(name, STEP_PHASES)}")
        before, self._raised_in = self.pulse.phase, ""
        self.pulse.set(self._last_step, name)
        began, apart_s = time.monotonic(), self._apart_s
        try:
            yield
        except BaseException as error:  # a reference to it here would keep its frames alive
            vars(error).setdefault(_RAISED_IN, name)
            self._raised_in, self._exits = self._raised_in or name, isinstance(error, SystemExit)
            raise
        finally:  # the time of a phase that began in an earlier step is no part of this step
            if name in ("eval", "save") and began >= self._last_at:
                # Also replaces the time of such phases within this one.
                self._apart_s = apart_s + time.monotonic() - began
            self.pulse.set(self._last_step, before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Also calls a handler that the program set before `join`, for example to save its work.

        Without such a handler, a second SIGINT raises KeyboardInterrupt. But on Ctrl-C, the ranks
        of torchrun get two: from the terminal and from torchrun, which later sends KILL.
        """
        super()._on_signal(number, frame)
        former = self._former.get(number)
        if former is signal.default_int_handler and not self._is_interrupted:
            self._is_interrupted = not self._is_of_torchrun
        elif callable(former) and not self._is_forked:
            former(number, frame)

    def _end_step(self, figures: Mapping[str, Any]) -> None:
        if self._in_step:
            self._in_step = False
            duration_s = time.monotonic() - self._last_at - self._apart_s
            self.record("progress", self._last_step, **{**figures, "steps_dt_s": [duration_s]})

    def _count(self, loss: object) -> None:
        """Counts a non-finite loss.

        The first loss that is missing or not a plain number ends the count. A tensor is not read,
        because reading it could wait for a device.
        """
        if not isinstance(loss, Real):
            self.pulse.nonfinite_steps = -1
        elif self.pulse.nonfinite_steps >= 0:
            try:
                finite = math.isfinite(loss)
            except OverflowError:  # a number that no float can express
                finite = False
            self.pulse.nonfinite_steps += not finite

    def close(self, step: int, phase: str = "", **figures: Any) -> bool:
        """Does the same as `Member.close`; nothing is then recorded at the end of the process."""
        atexit.unregister(self._exit)
        return super().close(step, phase, **figures)

    def _exit(self) -> None:
        """Records the last step if the program is not known to fail, then writes the exit record.

        `exit_code` is null in the record if it is not known.
        """
        code, error = self._ending.found()
        if not code:
            self._end_step({})
        reason = error or self._reason or ("done" if code == 0 else "")
        raised = getattr(sys, "last_value", None)
        phase = self._raised_in if code or self._exits else ""
        phase = phase if raised is None else vars(raised).get(_RAISED_IN, "")
        super().close(self._last_step, phase, reason=reason, exit_code=code)


def open_run(run: Path | None = None) -> tuple[Path, dict[str, str]]:
    """Returns two values: the run directory of this process, and the environment variables.

    The directory is that of the environment, or else `run`; it is created if needed. Its path is
    absolute, because a program may change its working directory. Raises UsageError if neither names
    a directory, and RefusedError if the directory cannot be used.
    """
    variables = environ.snapshot()
    named = variables.get(environ.RUN_DIR)
    if named:
        run = Path(named)
    if run is None:
        raise UsageError(
            f"no run directory: start this program with nsa-console, or set {environ.RUN_DIR}"
        )
    run = run.absolute()
    rundir.make_directory(run)
    return run, variables


def join(run: Path | None = None) -> Joined:
    """Joins the run that the environment names, or `run`. Call `join` once, in the main thread.

    Raises RefusedError if this process has joined a run, or if another process, for example the
    parent of this one, is the same rank.
    """
    if Joined.pid == os.getpid():
        raise RefusedError("this process has already called join; use the result of that call")
    run, variables = open_run(run)
    rank = environ.integer(variables, "RANK", 0)
    try:
        rundir.lock_rank(run, rank)
    except RefusedError as error:
        raise RefusedError(
            f"another process has joined {run} as rank {rank}, for example the parent of a spawned "
            "process; call join below if __name__ == '__main__'"
        ) from error
    return Joined(run, variables)
