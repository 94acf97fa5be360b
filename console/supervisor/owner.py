"""The owner of a launch: the lock and the processes are its own, whatever becomes of the rest.

It touches no file of the run, beside the program that it starts, and understands nothing that a
rank wrote. All that reads, writes, judges and
decides runs in one child, which is forked from here. A child that ends, or says nothing for
`SILENT_S`, is replaced; the next one goes on with the documents that are kept here. The owner
itself acts where no child does: on TERM it ends the ranks within the grace time.
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
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from console.sources import process
from console.supervisor import frames
from console.supervisor.child_state import FILES, MAIN, Charge
from console.supervisor.frames import Frames, Message
from trainers.contract import environ

PR_SET_PDEATHSIG = 1
SILENT_S, FIRST_S, CLOSING_S = 10.0, 60.0, 3700.0
"""A child may say nothing for so long: while it works, before its first word, while it closes."""
WAITS_S = (0.0, 2.0, 10.0, 60.0)
"""Before a child is replaced for the first, second, third and each further time in a row."""
SETTLED_S = 60.0
"""A child that has lived for so long begins a new row."""
OBEY_S = 0.5
"""A signal that the child has not taken after this time is obeyed here."""
LATE_S = 0.5
"""The owner waits this long for the child to send KILL, and then sends it itself."""
SCAN_EVERY_S, PATIENT_S, LOOK_S = 0.2, 0.1, 2.5


Child = Callable[[Frames, Charge], int]
"""Runs in the child; returns its exit code."""


class Owner:
    """Owns the processes of a launch; `run` returns when the launch has ended."""

    def __init__(self, child: Child):
        self._main = child
        self._charge = Charge()
        self._pid = 0
        self._link: Frames | None = None
        self._unsent: deque[tuple[bytes, bytes]] = deque()
        self._heard = self._born = self._again_at = 0.0
        self._limit_s, self._failures, self._killed_as = FIRST_S, 0, ""
        self._token, self._grace_s, self._is_ours = "", 0.0, False
        self._obey_at = self._kill_at = math.inf
        self._scan_at = self._judged = 0.0
        self._scan_s = SCAN_EVERY_S
        self._result: int | None = None
        self._wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wakes[1], warn_on_full_buffer=False)

    def ask(self, number: int) -> None:
        """Takes a signal that ends the launch; called from its handler."""
        self._charge.asked.append(number)

    def run(self) -> int:
        """Returns the exit code of the supervisor."""
        while self._result is None:
            try:
                self._look()
            except Exception:  # no descriptor, process or memory to spare: tried again
                time.sleep(SCAN_EVERY_S)
        return self._result

    def _look(self) -> None:
        if not self._pid and time.monotonic() >= self._again_at:
            self._fork()
        self._wait()
        self._reap()
        self._pass_on()
        self._judge()
        self._guard()

    # --- the child -----------------------------------------------------------------------------

    def _fork(self) -> None:
        ours, theirs = socket.socketpair()
        owner = os.getpid()
        self._charge.notes.clear()
        # What comes from here on is told to the child, not forked into it.
        self._charge.forwarded = len(self._charge.asked)
        with theirs:
            pid = os.fork()
            if pid == 0:
                ours.close()
                self._become_child(owner, Frames(theirs))
        ours.setblocking(False)
        self._attach(pid, Frames(ours))

    def _attach(self, pid: int, end: Frames) -> None:
        self._pid, self._link, self._limit_s = pid, end, FIRST_S
        self._unsent.clear()
        self._heard = self._born = time.monotonic()
        self._killed_as = ""

    def _drop_link(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def _become_child(self, owner: int, link: Frames) -> None:
        """Never returns. The kernel ends this process with its owner."""
        code = 1
        try:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.set_wakeup_fd(-1)
            for fd in self._wakes:
                os.close(fd)
            for number in (signal.SIGTERM, signal.SIGINT):  # whoever means the supervisor
                signal.signal(number, lambda got, _frame: os.kill(owner, got))
            if os.getppid() == owner:
                code = self._main(link, self._charge)
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _wait(self) -> None:
        """Waits for a signal, a word of the child, or until something is due."""
        now = time.monotonic()
        silent_at = math.inf if self._killed_as else self._heard + self._limit_s
        due = [
            silent_at if self._pid else self._again_at, self._obey_at,
            max(self._kill_at, self._scan_at), now + (PATIENT_S if self._unsent else LOOK_S),
        ]  # fmt: skip
        poller = select.poll()
        poller.register(self._wakes[0], select.POLLIN)
        if self._link is not None:
            poller.register(self._link.socket, select.POLLIN)
        for fd, _ in poller.poll(math.ceil(max(0.0, min(due) - now) * 1000)):
            if fd == self._wakes[0]:
                with suppress(BlockingIOError):
                    os.read(fd, 4096)
            else:
                self._hear()

    def _hear(self) -> bool:
        """Takes what the child says; False when there is nothing more."""
        if self._link is None:
            return False
        try:
            messages = self._link.receive()
        except BlockingIOError:
            return False
        except (EOFError, OSError):  # its exit follows
            self._drop_link()
            return False
        self._heard = time.monotonic()
        if self._limit_s == FIRST_S:
            self._limit_s = SILENT_S
        for message in messages:
            self._take(message)
        return True

    def _take(self, message: Message) -> None:
        kind, data = message.kind, message.data
        if kind == frames.KEEP:
            path, _, content = data.partition(b"\0")
            self._charge.kept[os.fsdecode(path)] = content
        elif kind == frames.SPAWN:
            self._spawn(json.loads(data), message.fd)
        elif kind == frames.HOLDS:
            named = json.loads(data)
            self._hold(named, named["agent"], False)
        elif kind == frames.ENDING:
            self._kill_at = min(self._kill_at, time.monotonic() + float(data) + LATE_S)
        elif kind == frames.OBEYED:
            del self._charge.asked[: int(data)]
            self._charge.forwarded = max(0, self._charge.forwarded - int(data))
            self._obey_at = math.inf
        elif kind == frames.CLOSING:
            self._limit_s = CLOSING_S

    def _judge(self) -> None:
        """Ends a child that says nothing. One that cannot end (state D) is waited for.

        While this process was stopped itself nobody could hear the child.
        """
        before, self._judged = self._judged, time.monotonic()
        if self._judged - before > 2 * LOOK_S:
            self._heard = self._judged
        if self._pid and not self._killed_as:
            silent_s = self._judged - self._heard
            if silent_s >= self._limit_s:
                self._killed_as = f"said nothing for {silent_s:.0f} s"
                os.kill(self._pid, signal.SIGKILL)

    def _child_ended(self, code: int) -> None:
        closing = self._limit_s == CLOSING_S
        self._pid = 0
        self._drop_link()
        charge, now = self._charge, time.monotonic()
        if code == 0 and closing:
            self._result = 0
            return
        never_began = not charge.kept and not charge.agent
        if never_began and code > 0:
            self._result = code
            return
        if now - self._born >= SETTLED_S:
            self._failures = 0
            charge.deaths.clear()
        ended = f"exit {code}" if code >= 0 else process.signal_name(-code)
        name = charge.notes.read(MAIN) or charge.notes.read(FILES)
        charge.mishap = self._killed_as or f"ended with {ended}"
        if name:
            charge.mishap += f" in {name}"
        charge.deaths = {name: charge.deaths.get(name, 0) + 1} if name else {}
        self._again_at = now + WAITS_S[min(self._failures, len(WAITS_S) - 1)]
        self._failures += 1
        if self._failures > len(WAITS_S) and not self._killed_as and not self._left():
            self._result = 1

    def _pass_on(self) -> None:
        """Sends what waits, as far as the child takes it."""
        while self._unsent and self._link is not None:
            try:
                self._link.send(*self._unsent[0])
            except BlockingIOError:
                return
            except OSError:  # its end follows
                break
            self._unsent.popleft()
        self._unsent.clear()

    # --- the processes -------------------------------------------------------------------------

    def _spawn(self, command: Mapping[str, Any], log_fd: int) -> None:
        """Starts torchrun in its own session. SIGUSR1 is ignored here, and so in it."""
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
            self._unsent.append((frames.NOT_SPAWNED, str(number).encode()))
            return
        finally:
            if log_fd >= 0:
                os.close(log_fd)
        self._hold(command, pid, True)
        try:
            fd = os.pidfd_open(pid)
            try:
                if self._link is not None:
                    self._link.send(frames.SPAWNED, str(pid).encode(), fd)
            finally:
                os.close(fd)
        except OSError:  # a child that does not get it is replaced, and finds the process
            os.kill(self._pid, signal.SIGKILL)

    def _hold(self, named: Mapping[str, Any], agent: int, is_ours: bool) -> None:
        """Takes the processes of an attempt; `is_ours`: torchrun is a child of this process."""
        charge, born = self._charge, named["environment"]
        self._token, self._grace_s, self._is_ours = born[environ.TOKEN], named["grace_s"], is_ours
        self._kill_at = math.inf
        charge.agent, charge.termed = agent, False
        charge.held = born[environ.RUN_DIR], born[environ.ATTEMPT]
        charge.exits.clear()

    def _reap(self) -> None:
        """Collects every child that ended: the child, torchrun, and ranks that it left behind.

        What the child said last is taken before its pid may be another's.
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
            while pid == self._pid and self._hear():
                pass
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if pid == self._pid:
                self._child_ended(code)
                continue
            self._charge.reaped(pid, code)
            self._unsent.append((frames.REAPED, frames.PIDS.pack(pid, code)))

    def _left(self) -> list[int]:
        """Returns the processes of the newest attempt."""
        if not self._token:
            return []
        agent = [self._charge.agent] if self._agent_lives else []
        return sorted({*process.with_token(self._token, self._charge.held[0]), *agent})

    @property
    def _agent_lives(self) -> bool:
        """Says whether torchrun is a child of this process that was not reaped."""
        return self._is_ours and self._charge.agent not in self._charge.exits

    def _guard(self) -> None:
        """Does what a child should have done: obeys TERM, kills what has outlived its grace."""
        now, charge = time.monotonic(), self._charge
        for number in charge.asked[charge.forwarded :]:
            self._unsent.append((frames.ASKED, str(number).encode()))
            charge.forwarded += 1
            self._obey_at = min(self._obey_at, now + OBEY_S)
            self._again_at = min(self._again_at, now)
        if now >= self._obey_at:
            self._kill_at = min(self._kill_at, self._obey_at - OBEY_S + self._grace_s)
            self._obey_at = math.inf
            self._terminate()
        if now >= max(self._kill_at, self._scan_at):
            self._kill(now)

    def _terminate(self) -> None:
        """Sends TERM to torchrun; where it is gone, to the ranks that it left behind."""
        self._charge.termed = True
        self._unsent.append((frames.TERMED, b""))
        if self._agent_lives:
            os.kill(self._charge.agent, signal.SIGTERM)
            return
        left, mine = self._left(), process.children(os.getpid())
        for pid in [pid for pid in left if pid in mine] or left:
            self._signal(pid, signal.SIGTERM)

    def _kill(self, now: float) -> None:
        """Sends KILL to all that is left, and looks again, more and more rarely."""
        if self._agent_lives:  # first: a look at a process in state D may take long
            os.kill(self._charge.agent, signal.SIGKILL)
        left = self._left()
        for pid in left:
            self._signal(pid, signal.SIGKILL)
        if left:
            self._scan_at, self._scan_s = now + self._scan_s, min(2 * self._scan_s, LOOK_S)
        else:
            self._kill_at, self._scan_s = math.inf, SCAN_EVERY_S

    def _signal(self, pid: int, number: int) -> None:
        """Sends a signal to a process with the token, unless it is another one by now."""
        handle = process.hold(pid, self._token)
        if handle is not None:
            handle.send(number)
            handle.close()
