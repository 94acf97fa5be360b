"""The owner of a launch: it has the lock and the processes, and replaces a child that fails.

The owner reads and writes no file of the run, and parses nothing that a rank wrote. The child, a
fork of the owner, reads, writes and decides. The owner stores the newest documents of the child. If
a child fails or is silent for too long, the next child starts with these documents.

The owner gives up if the launch cannot start, or after repeated failures of children. It does not
give up after it killed the last child for silence, or while a process of the attempt is alive. The
child handles TERM and INT. If no child does so in time, the owner sends TERM, and KILL after the
grace time.
"""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from console.sources import process
from console.supervisor import link
from console.supervisor.link import FILES, MAIN, Channel, ChildState, Message
from trainers.contract import environ

PR_SET_PDEATHSIG = 1
SILENT_S, FIRST_S, CLOSING_S = 10.0, 60.0, 3700.0
"""Longest silence before a child is killed: at work, before its first message, while closing."""
WAITS_S = (0.0, 2.0, 10.0, 60.0)
"""Seconds before the next child starts: after the first, second, third and each further failure."""
SETTLED_S = 60.0
"""After a child has been alive for this long, the count of failures starts again."""
HANDLE_S = 0.5
"""The owner handles a signal itself when the child has not done so after this time."""
LATE_S = 0.5
"""The owner itself sends KILL this long after the grace time, if the child has not done so."""
SCAN_EVERY_S, RESEND_EVERY_S, REFORK_S, POLL_S = 0.2, 0.1, 1.0, 2.5


ChildMain = Callable[[Channel, ChildState], int]
"""Runs in the child; returns its exit code."""


class Owner:
    """Owns the processes of a launch; `run` returns when the launch ends or the owner gives up."""

    def __init__(self, child_main: ChildMain):
        self._child_main = child_main
        self._state = ChildState()
        self._pid = 0
        """The pid of the child, 0 while there is none."""
        self._channel: Channel | None = None
        self._received_at = self._forked_at = self._fork_at = 0.0
        self._silent_limit_s, self._failures, self._killed_because = FIRST_S, 0, ""
        self._token, self._grace_s, self._is_parent = "", 0.0, False
        """Token and grace time of the newest attempt, and whether this process started torchrun."""
        self._forwarded = 0
        """The number of signals that the child knows."""
        self._handle_at = self._kill_at = math.inf
        self._scan_at = self._checked_at = 0.0
        self._scan_s = SCAN_EVERY_S
        self._result: int | None = None
        self._wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wakes[1], warn_on_full_buffer=False)

    def add_signal(self, number: int) -> None:
        """Stores a signal that ends the launch; the signal handler calls this method."""
        self._state.signals.append(number)

    def run(self) -> int:
        """Runs the owner; returns the exit code of the supervisor."""
        while self._result is None:
            try:
                self._step()
            except Exception:  # for example, no descriptor is left for a scan, so try again
                time.sleep(SCAN_EVERY_S)
        return self._result

    def _step(self) -> None:
        if not self._pid and time.monotonic() >= self._fork_at:
            try:
                self._fork()
            except OSError:  # no descriptor, process or memory is left, so try again
                self._fork_at = time.monotonic() + REFORK_S
        self._poll()
        self._reap()
        self._flush()
        self._kill_silent_child()
        self._forward_signals()
        self._enforce_deadlines()

    # --- the child -----------------------------------------------------------------------------

    def _fork(self) -> None:
        ours, theirs = socket.socketpair()
        owner = os.getpid()
        self._state.activity.clear()
        copied = len(self._state.signals)  # the child gets a copy of these by fork
        with theirs:
            pid = os.fork()
            if pid == 0:
                ours.close()
                self._become_child(owner, Channel(theirs))
        self._forwarded = copied
        ours.setblocking(False)
        self._attach(pid, Channel(ours))

    def _attach(self, pid: int, channel: Channel) -> None:
        self._pid, self._channel, self._silent_limit_s = pid, channel, FIRST_S
        self._received_at = self._forked_at = time.monotonic()
        self._killed_because = ""

    def _close_channel(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _become_child(self, owner: int, channel: Channel) -> None:
        """Runs as the child and never returns. The kernel ends this process when its owner ends."""
        code = 1
        try:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.set_wakeup_fd(-1)
            for fd in self._wakes:
                os.close(fd)
            for number in (signal.SIGTERM, signal.SIGINT):  # meant for the supervisor
                signal.signal(number, lambda got, _frame: os.kill(owner, got))
            if os.getppid() == owner:
                code = self._child_main(channel, self._state)
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _poll(self) -> None:
        """Waits for a signal, a message of the child, or the next deadline."""
        now = time.monotonic()
        silent_at = math.inf if self._killed_because else self._received_at + self._silent_limit_s
        is_waiting = self._channel is not None and self._channel.is_waiting
        due = [
            silent_at if self._pid else self._fork_at, self._handle_at,
            max(self._kill_at, self._scan_at), now + (RESEND_EVERY_S if is_waiting else POLL_S),
        ]  # fmt: skip
        poller = select.poll()
        poller.register(self._wakes[0], select.POLLIN)
        if self._channel is not None:
            poller.register(self._channel.socket, select.POLLIN)
        for fd, _ in poller.poll(math.ceil(max(0.0, min(due) - now) * 1000)):
            if fd == self._wakes[0]:
                with suppress(BlockingIOError):
                    os.read(fd, 4096)
            else:
                self._receive()

    def _receive(self) -> bool:
        """Handles messages of the child; returns False if nothing was read."""
        if self._channel is None:
            return False
        try:
            messages = self._channel.receive()
        except BlockingIOError:
            return False
        except (EOFError, OSError):  # the child exits
            self._close_channel()
            return False
        self._received_at = time.monotonic()
        if self._silent_limit_s == FIRST_S:
            self._silent_limit_s = SILENT_S
        for message in messages:
            self._handle(message)
        return True

    def _handle(self, message: Message) -> None:
        kind, data, state = message.kind, message.data, self._state
        if kind == link.STORE:
            path, _, content = data.partition(b"\0")
            state.documents[os.fsdecode(path)] = content
        elif kind == link.SPAWN:
            self._spawn(json.loads(data), message.fd)
        elif kind == link.ADOPT:
            named = json.loads(data)
            self._own_attempt(named, named["agent"], is_parent=False)
        elif kind == link.KILL_AFTER:
            self._kill_at = min(self._kill_at, time.monotonic() + float(data) + LATE_S)
        elif kind == link.CLOSING:
            self._silent_limit_s = CLOSING_S

    def _kill_silent_child(self) -> None:
        """Kills a child that is silent for too long.

        A child in state D ends only after its system call. If the owner itself was stopped, the
        silence is counted from now on.
        """
        before, self._checked_at = self._checked_at, time.monotonic()
        if self._checked_at - before > 2 * POLL_S:
            self._received_at = self._checked_at
        if self._pid and not self._killed_because:
            silent_s = self._checked_at - self._received_at
            if silent_s >= self._silent_limit_s:
                self._killed_because = f"was killed after {silent_s:.0f} s of silence"
                os.kill(self._pid, signal.SIGKILL)

    def _child_ended(self, code: int) -> None:
        """Sets the result of the supervisor, or the time at which the next child is forked."""
        closing = self._silent_limit_s == CLOSING_S
        self._pid = 0
        self._close_channel()
        state, now = self._state, time.monotonic()
        if code == 0 and closing:
            self._result = 0
            return
        never_started = not state.documents and not state.torchrun_pid
        if never_started and code > 0:
            self._result = code
            return
        if now - self._forked_at >= SETTLED_S:
            self._failures = 0
            state.observer_deaths.clear()
        # If both threads ran an observer, it is not known which of them ended the child.
        names = [name for slot in (MAIN, FILES) if (name := state.activity.read(slot))]
        state.former_end = self._killed_because or process.end_words(code)
        if names:
            state.former_end += f" in the observer {' or '.join(names)}"
        deaths = state.observer_deaths
        state.observer_deaths = {name: deaths.get(name, 0) + 1 for name in names}
        self._fork_at = now + WAITS_S[min(self._failures, len(WAITS_S) - 1)]
        self._failures += 1
        given_up = self._failures > len(WAITS_S) and not self._killed_because
        if given_up and not self._living():
            self._result = 1

    def _send(self, kind: bytes, data: bytes = b"") -> None:
        """Sends a message to the child; if the child exits, the state informs the next child."""
        with suppress(OSError):  # the child exits
            if self._channel is not None:
                self._channel.send(kind, data)

    def _flush(self) -> None:
        """Sends the waiting messages, as far as the child reads them."""
        with suppress(OSError):  # the child exits
            if self._channel is not None:
                self._channel.flush()

    # --- the processes -------------------------------------------------------------------------

    def _spawn(self, command: Mapping[str, Any], log_fd: int) -> None:
        """Starts torchrun in its own session; SIGUSR1 stays ignored in torchrun."""
        argv, environment = command["argv"], command["environment"]
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, log_fd, 1), (os.POSIX_SPAWN_DUP2, log_fd, 2),
        ]  # fmt: skip
        try:
            pid = os.posix_spawnp(
                argv[0], argv, environment, file_actions=actions, setsid=True,
                setsigdef=(signal.SIGPIPE, signal.SIGXFSZ),
            )  # fmt: skip
        except (OSError, ValueError) as error:
            number = getattr(error, "errno", None) or errno.EINVAL
            self._send(link.NOT_SPAWNED, str(number).encode())
            return
        finally:
            if log_fd >= 0:
                os.close(log_fd)
        self._own_attempt(command, pid, is_parent=True)
        try:
            fd = os.pidfd_open(pid)
            try:
                if self._channel is not None:
                    self._channel.send_fd(link.SPAWNED, str(pid).encode(), fd)
            finally:
                os.close(fd)
        except OSError:  # the next child gets the process in its `ChildState`
            os.kill(self._pid, signal.SIGKILL)

    def _own_attempt(self, named: Mapping[str, Any], torchrun_pid: int, is_parent: bool) -> None:
        """Stores which processes belong to the newest attempt."""
        state, environment = self._state, named["environment"]
        self._token, self._grace_s = environment[environ.TOKEN], named["grace_s"]
        self._is_parent, self._kill_at = is_parent, math.inf
        state.torchrun_pid, state.term_sent = torchrun_pid, False
        state.attempt = environment[environ.RUN_DIR], environment[environ.ATTEMPT]
        state.exit_codes.clear()

    def _reap(self) -> None:
        """Reaps ended processes whose parent is the owner: the child, torchrun, and orphans.

        The last messages of a child are handled before its pid can be reused.
        """
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, flags)
            except ChildProcessError:
                return
            if found is None:
                return
            pid = found.si_pid
            while pid == self._pid and self._receive():
                pass
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if pid == self._pid:
                self._child_ended(code)
                continue
            self._state.add_exit_code(pid, code)
            self._send(link.REAPED, link.PID_AND_CODE.pack(pid, code))

    def _living(self) -> list[int]:
        """Returns the processes of the newest attempt that are alive."""
        if not self._token:
            return []
        torchrun = [self._state.torchrun_pid] if self._torchrun_lives else []
        return sorted({*process.with_token(self._token, self._state.attempt[0]), *torchrun})

    @property
    def _torchrun_lives(self) -> bool:
        """Returns whether torchrun is a child of this process that has not been reaped."""
        return self._is_parent and self._state.torchrun_pid not in self._state.exit_codes

    def _forward_signals(self) -> None:
        """Sends new signals to the child, and limits the time that the child has to handle them."""
        now = time.monotonic()
        for number in self._state.signals[self._forwarded :]:
            self._send(link.SIGNAL, str(number).encode())
            self._forwarded += 1
            self._handle_at = min(self._handle_at, now + HANDLE_S)
            self._fork_at = min(self._fork_at, now)

    def _enforce_deadlines(self) -> None:
        """Does the work of a late child: handles TERM and INT, sends KILL after the grace time."""
        now = time.monotonic()
        if now >= self._handle_at:
            if self._kill_at == math.inf:  # the child did not send KILL_AFTER
                self._terminate()  # repeated if a scan of the processes fails
                self._kill_at = now - HANDLE_S + self._grace_s
            self._handle_at = math.inf
        if now >= max(self._kill_at, self._scan_at):
            self._kill(now)

    def _terminate(self) -> None:
        """Sends TERM to torchrun if it is a child and runs, or else to processes of the attempt.

        If no process is alive, TERM is not sent; the child handles the signal.
        """
        torchrun = self._state.torchrun_pid
        if self._torchrun_lives and process.state(torchrun) not in process.STOPPED:
            os.kill(torchrun, signal.SIGTERM)
        elif living := self._living():
            mine = process.children(os.getpid())
            if self._torchrun_lives:  # it is stopped and passes nothing to the ranks
                mine += process.children(torchrun)
            for pid in [pid for pid in living if pid in mine] or living:
                self._signal(pid, signal.SIGTERM)
        else:
            return
        self._state.term_sent = True
        self._send(link.TERM_SENT)

    def _kill(self, now: float) -> None:
        """Sends KILL to torchrun and to processes with the token; repeats this while any lives."""
        if self._torchrun_lives:  # first, because a scan over a process in state D may take long
            os.kill(self._state.torchrun_pid, signal.SIGKILL)
        living = self._living()
        for pid in living:
            self._signal(pid, signal.SIGKILL)
        if living:
            self._scan_at, self._scan_s = now + self._scan_s, min(2 * self._scan_s, POLL_S)
        else:
            self._kill_at, self._scan_s = math.inf, SCAN_EVERY_S

    def _signal(self, pid: int, number: int) -> None:
        """Sends a signal to a process if the process with this pid has the token."""
        handle = process.open_process(pid, self._token)
        if handle is not None:
            handle.send(number)
            handle.close()
