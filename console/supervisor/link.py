"""The socket between the owner of a launch and its child, and the state that the owner passes on.

Each child gets a copy of that state by fork. Messages update the copy.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from trainers.contract import jsonl, rundir

ALIVE_EVERY_S = 2.0
HEAD = struct.Struct("!cI")
READ_BYTES, MAX_FDS = 1 << 16, 8

MAX_OBSERVER_DEATHS = 3
"""An observer is switched off after this many children in a row died in it."""
MAX_EXIT_CODES = 4096
SLOTS, SLOT_BYTES = 2, 64
MAIN, FILES = range(SLOTS)
"""The slots of the child's main thread, and of its thread that reads the run directory."""

# The kinds of messages from the child, with their contents or effects.
ALIVE = b"B"
CLOSING = b"C"
"""The child closes its files. A disk may delay this, so it may be silent for `CLOSING_S`."""
STORE = b"K"
"""A document for the next child: its path, a zero byte, its content."""
SPAWN = b"S"
"""A command as JSON, and the descriptor of its log."""
ADOPT = b"H"
"""Adopted processes: torchrun's pid, environment and grace time as JSON."""
KILL_AFTER = b"E"
"""The number of seconds after which the processes are killed."""
# The kinds of messages from the owner, with their contents.
SPAWNED = b"P"
"""A pid, and its pidfd."""
NOT_SPAWNED = b"N"
"""An errno."""
REAPED = b"X"
"""A pid and its exit code, as `Popen.returncode` has it."""
SIGNAL = b"A"
"""A signal that the owner received."""
TERM_SENT = b"T"
"""The owner sent TERM to the processes itself."""
PID_AND_CODE = struct.Struct("!qq")
KINDS_WITH_FD = frozenset((SPAWN, SPAWNED))


class Message(NamedTuple):
    """One message; the receiver closes `fd`."""

    kind: bytes
    data: bytes
    fd: int = -1


class Channel:
    """One end of a socket that transports messages.

    While the socket is full, for example because the other process is stopped, messages wait.
    """

    def __init__(self, end: socket.socket):
        self.socket = end
        self._data = bytearray()
        self._fds: deque[int] = deque()
        self._waiting: dict[object, bytes] = {}
        """The messages that wait to be sent, in order."""
        self._unsent = b""
        """The rest of a message that was sent in part."""

    @property
    def is_waiting(self) -> bool:
        """True if a message, or a part of a message, waits to be sent."""
        return bool(self._waiting or self._unsent)

    def send(self, kind: bytes, data: bytes = b"", key: object = None) -> None:
        """Sends a message when the socket has room; replaces a waiting message with the same `key`.

        Raises OSError, for example if the other end is closed.
        """
        self._waiting[key or object()] = HEAD.pack(kind, len(data)) + data
        self.flush()

    def flush(self) -> None:
        """Sends the waiting messages while the socket has room. Raises OSError as `send` does."""
        with suppress(BlockingIOError):
            self.send_waiting(socket.MSG_DONTWAIT)

    def send_waiting(self, flags: int = 0) -> None:
        """Sends the waiting messages. Raises OSError.

        Waits until the socket has room. With the flag MSG_DONTWAIT, raises BlockingIOError instead.
        The same applies to the owner's socket, which does not block.
        """
        while self.is_waiting:
            if not self._unsent:
                self._unsent = self._waiting.pop(next(iter(self._waiting)))
            self._unsent = self._unsent[self.socket.send(self._unsent, flags) :]

    def send_fd(self, kind: bytes, data: bytes, fd: int) -> None:
        """Sends the waiting messages, and then a message with a descriptor.

        Waits and raises as `send_waiting` does.
        """
        self.send_waiting()
        frame = HEAD.pack(kind, len(data)) + data
        sent = socket.send_fds(self.socket, [frame], [fd])
        if sent < len(frame):
            self.socket.sendall(frame[sent:])

    def receive(self) -> list[Message]:
        """Returns the messages that one read completes. Raises OSError, or EOFError at the end."""
        data, fds, _, _ = socket.recv_fds(self.socket, READ_BYTES, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
        self._fds.extend(fds)
        if not data:
            raise EOFError
        self._data += data
        found = []
        while len(self._data) >= HEAD.size:
            kind, size = HEAD.unpack_from(self._data)
            end = HEAD.size + size
            if len(self._data) < end:
                break
            fd = self._fds.popleft() if kind in KINDS_WITH_FD and self._fds else -1
            found.append(Message(kind, bytes(self._data[HEAD.size : end]), fd))
            del self._data[:end]
        return found

    def close(self) -> None:
        self.socket.close()
        while self._fds:
            os.close(self._fds.popleft())


class Activity:
    """Shared memory in which two threads of a child write the names of their running observers.

    The owner reads the names after a child has died.
    """

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, SLOTS * SLOT_BYTES)

    def write(self, slot: int, name: str) -> None:
        """Writes the name of an observer, or "" after the observer has returned."""
        at = slot * SLOT_BYTES
        self._map[at : at + SLOT_BYTES] = name.encode()[:SLOT_BYTES].ljust(SLOT_BYTES, b"\0")

    def read(self, slot: int) -> str:
        at = slot * SLOT_BYTES
        return self._map[at : at + SLOT_BYTES].rstrip(b"\0").decode("utf-8", "replace")

    def clear(self) -> None:
        self._map[:] = bytes(SLOTS * SLOT_BYTES)


@dataclass(slots=True)
class ChildState:
    """The state with which a child starts.

    The child gets a copy by fork; only `activity` stays shared with the owner.
    """

    identity: Mapping[str, Any] = field(default_factory=rundir.identity)
    """The identity of the owner; the documents contain it as the supervisor's identity."""
    documents: dict[str, bytes] = field(default_factory=dict)
    """The newest content of each document, by path."""
    torchrun_pid: int = 0
    """The pid of torchrun in the newest attempt, 0 before the first attempt."""
    attempt: tuple[str, str] = ("", "")
    """The run directory and the number of the newest attempt."""
    term_sent: bool = False
    """True if the owner itself sent TERM to the processes of the attempt."""
    exit_codes: dict[int, int] = field(default_factory=dict)
    """The exit codes of the processes that the owner reaped in the newest attempt, in order."""
    signals: list[int] = field(default_factory=list)
    """TERM and INT signals that the owner received. Each child ends the launch because of them."""
    former_end: str = ""
    """The end of the former child in words, "" for the first child."""
    observer_deaths: dict[str, int] = field(default_factory=dict)
    """The observers in which the last child died, each with the number of deaths in a row."""
    activity: Activity = field(default_factory=Activity)

    def add_exit_code(self, pid: int, code: int) -> None:
        """Stores an exit code; if there are too many, drops the oldest, but never torchrun's."""
        self.exit_codes[pid] = code
        while len(self.exit_codes) > MAX_EXIT_CODES:
            del self.exit_codes[next(old for old in self.exit_codes if old != self.torchrun_pid)]


class Link:
    """The child's end of the socket; only `spawn` and `closing` wait for the owner."""

    def __init__(self, channel: Channel, state: ChildState):
        self._channel = channel
        self.state = state
        """The state from the owner, updated by the messages of the owner."""
        self._alive_sent = 0.0

    @property
    def fd(self) -> int:
        return self._channel.socket.fileno()

    def observers_off(self) -> list[str]:
        """Returns the observers that are switched off because former children died in them."""
        deaths = self.state.observer_deaths
        return [name for name, count in deaths.items() if count >= MAX_OBSERVER_DEATHS]

    # --- the state from the owner --------------------------------------------------------------

    def stored(self, path: Path) -> dict[str, Any] | None:
        """Returns the version of a document that a former child stored last, or None."""
        data = self.state.documents.get(str(path))
        return None if data is None else jsonl.decode(data)

    def owns(self, home: str, attempt: int) -> bool:
        """Returns whether the owner owned the processes of an attempt before this child began."""
        return self.state.attempt == (home, str(attempt))

    def receive(self) -> None:
        """Handles the messages that have arrived."""
        while select.select([self.fd], [], [], 0)[0]:
            for message in self._channel.receive():
                self._handle(message)

    def _handle(self, message: Message) -> None:
        if message.kind == REAPED:
            self.state.add_exit_code(*PID_AND_CODE.unpack(message.data))
        elif message.kind == SIGNAL:
            self.state.signals.append(int(message.data))
        elif message.kind == TERM_SENT:
            self.state.term_sent = True

    # --- requests to the owner -----------------------------------------------------------------

    def send_alive(self) -> None:
        """Sends, every `ALIVE_EVERY_S`, that this child works; also sends the waiting messages."""
        now = time.monotonic()
        if now - self._alive_sent >= ALIVE_EVERY_S and not self._channel.is_waiting:
            self._alive_sent = now
            self._channel.send(ALIVE)
        self._channel.flush()

    def closing(self) -> None:
        """Reports to the owner that this child may wait for a disk from now on.

        Waits until the socket has taken all messages, because no later call sends the rest.
        """
        self._channel.send(CLOSING)
        self._channel.send_waiting()

    def store(self, path: Path, record: Mapping[str, Any]) -> None:
        """Sends a document that the owner will pass to the next child.

        A new version of a document replaces a version that waits to be sent.
        """
        self._channel.send(STORE, os.fsencode(path) + b"\0" + jsonl.encode(record), path)

    def kill_after(self, grace_s: float) -> None:
        """Asks the owner to kill the processes that are still alive after the grace time."""
        self._channel.send(KILL_AFTER, repr(grace_s).encode())

    def adopt(self, torchrun_pid: int, environment: Mapping[str, str], grace_s: float) -> None:
        """Passes to the owner the processes of an attempt that this supervisor did not start."""
        self.state.torchrun_pid = torchrun_pid
        named = {"agent": torchrun_pid, "environment": dict(environment), "grace_s": grace_s}
        self._channel.send(ADOPT, jsonl.encode(named))

    def spawn(
        self, argv: Sequence[str], environment: Mapping[str, str], log_fd: int, grace_s: float
    ) -> tuple[int, int]:
        """Asks the owner to start a command in a new session; returns the pid and the pidfd.

        Raises OSError if the command cannot be started, or RuntimeError if no descriptor is left.
        """
        command = {"argv": list(argv), "environment": dict(environment), "grace_s": grace_s}
        self.state.exit_codes.clear()
        self.state.term_sent = False
        self._channel.send_fd(SPAWN, jsonl.encode(command), log_fd)
        answer = self._receive_answer()
        number = int(answer.data)
        if answer.kind == NOT_SPAWNED:
            raise OSError(number, os.strerror(number), argv[0])
        if answer.fd < 0:
            raise RuntimeError("no descriptor to spare for torchrun")
        self.state.torchrun_pid = number
        return number, answer.fd

    def _receive_answer(self) -> Message:
        """Waits for the answer to SPAWN; handles the other messages that arrive with it."""
        answer = None
        while answer is None:
            for message in self._channel.receive():
                if message.kind in (SPAWNED, NOT_SPAWNED):
                    answer = message
                else:
                    self._handle(message)
        return answer
