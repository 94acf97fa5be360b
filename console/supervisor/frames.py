"""Messages between the owner of a launch and its child: a kind, some bytes, maybe a descriptor."""

from __future__ import annotations

import os
import socket
import struct
from collections import deque
from typing import NamedTuple

HEAD = struct.Struct("!cI")
READ_BYTES, MAX_FDS = 1 << 16, 8

# From the child.
BEAT = b"B"
CLOSING = b"C"
"""The child closes its files, which may wait for a disk; its silence no longer counts."""
KEEP = b"K"
"""A document for the next child: its path, a zero byte, its content."""
SPAWN = b"S"
"""A command as JSON, and the descriptor of its log."""
HOLDS = b"H"
"""Processes that were taken over instead of spawned: as JSON, what SPAWN says of them."""
ENDING = b"E"
"""The processes have so many seconds left."""
OBEYED = b"O"
"""The number of signals that were obeyed."""
# From the owner.
SPAWNED = b"P"
"""A pid, and its pidfd."""
NOT_SPAWNED = b"N"
"""An errno."""
REAPED = b"X"
"""A pid and its exit code, as `Popen.returncode` has it."""
ASKED = b"A"
"""A signal that the owner got."""
TERMED = b"T"
"""The owner sent TERM to the processes itself."""
PIDS = struct.Struct("!qq")


class Message(NamedTuple):
    """One message; `fd` belongs to who received it."""

    kind: bytes
    data: bytes
    fd: int = -1


class Frames:
    """One end of a socket of messages. `WITH_FD` say which kinds bring a descriptor."""

    WITH_FD = frozenset((SPAWN, SPAWNED))

    def __init__(self, end: socket.socket):
        self.socket = end
        self._data = bytearray()
        self._fds: deque[int] = deque()

    def send(self, kind: bytes, data: bytes = b"", fd: int | None = None) -> None:
        """Sends a message as a whole. Raises OSError where nobody takes it.

        Where the socket does not block, the message has to be smaller than its buffer.
        """
        frame = HEAD.pack(kind, len(data)) + data
        sent = socket.send_fds(self.socket, [frame], [fd] if fd is not None else [])
        if sent < len(frame):
            self.socket.sendall(frame[sent:])

    def receive(self) -> list[Message]:
        """Returns the messages that one read completes. Raises OSError, EOFError at the end."""
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
            fd = self._fds.popleft() if kind in self.WITH_FD and self._fds else -1
            found.append(Message(kind, bytes(self._data[HEAD.size : end]), fd))
            del self._data[:end]
        return found

    def close(self) -> None:
        self.socket.close()
        while self._fds:
            os.close(self._fds.popleft())
