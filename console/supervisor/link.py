"""The child's end of the socket to the owner: what it asks for, and what it is told."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from console.supervisor import frames
from console.supervisor.frames import Frames, Message
from console.supervisor.owner import DEATHS_OFF, Charge, Notes
from trainers.contract import jsonl

BEAT_EVERY_S = 2.0


class Link:
    """Owns what the owner told; every method but `spawn` returns at once.

    An owner that is gone has ended this process: the kernel sees to it.
    """

    def __init__(self, end: Frames, charge: Charge):
        self._end, self._charge = end, charge
        self.identity, self.mishap, self.agent = charge.identity, charge.mishap, charge.agent
        self._spawned = charge.spawned
        self.exits = dict(charge.exits)
        """The exit codes of processes that the owner reaped, by pid; whoever takes one removes it.
        """
        self._asked = list(charge.asked)
        self._beat = 0.0

    @property
    def fd(self) -> int:
        return self._end.socket.fileno()

    @property
    def notes(self) -> Notes:
        return self._charge.notes

    def off(self) -> list[str]:
        """Returns the observers in which former children ended again and again."""
        return [name for name, count in self._charge.deaths.items() if count >= DEATHS_OFF]

    # --- told ----------------------------------------------------------------------------------

    def kept(self, path: Path) -> dict[str, Any] | None:
        """Returns the document that a former child of this owner wrote last, None without."""
        data = self._charge.kept.get(str(path))
        return None if data is None else jsonl.decode(data)

    def take_asked(self) -> list[int]:
        """Returns the signals that the owner got, and says that they are obeyed."""
        asked, self._asked = self._asked, []
        if asked:
            self._end.send(frames.OBEYED, str(len(asked)).encode())
        return asked

    def hear(self) -> None:
        """Takes what the owner has said; call it when `fd` can be read."""
        for message in self._end.receive():
            self._take(message)

    def _take(self, message: Message) -> None:
        if message.kind == frames.REAPED:
            pid, code = frames.PIDS.unpack(message.data)
            self.exits[pid] = code
        elif message.kind == frames.ASKED:
            self._asked.append(int(message.data))

    def has_spawned(self, home: str, attempt: str) -> bool:
        """Says whether a former child of this owner had torchrun started for an attempt."""
        return self._spawned == (home, attempt)

    # --- asked ---------------------------------------------------------------------------------

    def beat(self) -> None:
        """Says that this child works, at most once a second."""
        now = time.monotonic()
        if now - self._beat >= BEAT_EVERY_S:
            self._beat = now
            self._end.send(frames.BEAT)

    def close(self) -> None:
        """Says that from now on it may wait for a disk."""
        self._end.send(frames.CLOSING)

    def hang_up(self) -> None:
        """Ends the socket; an owner that lost its child replaces it."""
        self._end.close()

    def refuse(self, code: int) -> None:
        """Says that the launch cannot begin, with the exit code."""
        self._end.send(frames.REFUSED, str(code).encode())

    def keep(self, path: Path, record: Mapping[str, Any]) -> None:
        """Gives the owner a document for the child that may follow."""
        self._end.send(frames.KEEP, os.fsencode(path) + b"\0" + jsonl.encode(record))

    def ending(self, grace_s: float) -> None:
        """Says how long the processes still have: the owner kills what a dead child cannot."""
        self._end.send(frames.ENDING, repr(grace_s).encode())

    def spawn(
        self, argv: Sequence[str], environment: Mapping[str, str], log_fd: int, token: str,
        home: str, grace_s: float,
    ) -> tuple[int, int]:  # fmt: skip
        """Has the owner start a command in a session of its own; returns its pid and pidfd.

        Raises OSError where it cannot be started.
        """
        command = {
            "argv": list(argv), "environment": dict(environment), "token": token, "home": home,
            "grace_s": grace_s,
        }  # fmt: skip
        self.exits.clear()
        self._end.send(frames.SPAWN, jsonl.encode(command), log_fd)
        while True:
            for message in self._end.receive():
                if message.kind == frames.SPAWNED and message.fd < 0:
                    raise RuntimeError("no descriptor to spare for torchrun")
                if message.kind == frames.SPAWNED:
                    self.agent = int(message.data)
                    return self.agent, message.fd
                if message.kind == frames.NOT_SPAWNED:
                    number = int(message.data)
                    raise OSError(number, os.strerror(number), argv[0])
                self._take(message)
