"""The child's end of the socket to the owner: what it asks for, and what it is told."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from console.supervisor import frames
from console.supervisor.child_state import DEATHS_OFF, Charge
from console.supervisor.frames import Frames, Message
from trainers.contract import jsonl, rundir

BEAT_EVERY_S = 2.0


class Link:
    """Owns what the owner told; every method but `spawn` returns at once.

    While the owner takes nothing (it is stopped) the newest content of each document waits. An
    owner that is gone has ended this process: the kernel sees to it.
    """

    def __init__(self, end: Frames, charge: Charge):
        self._end = end
        self.charge = charge
        """As the owner handed it over; what it told since is added."""
        del charge.asked[charge.forwarded :]  # a signal just before the fork: the owner tells of it
        self._waiting: dict[object, tuple[bytes, bytes]] = {}
        """Messages that wait to be sent; of each document (by its path) only the newest content."""
        self._beat = 0.0

    @property
    def fd(self) -> int:
        return self._end.socket.fileno()

    def off(self) -> list[str]:
        """Returns the observers in which former children ended again and again."""
        return [name for name, count in self.charge.deaths.items() if count >= DEATHS_OFF]

    # --- told ----------------------------------------------------------------------------------

    def kept(self, path: Path) -> dict[str, Any] | None:
        """Returns the document that a former child of this owner wrote last, None without."""
        data = self.charge.kept.get(str(path))
        return None if data is None else jsonl.decode(data)

    def holds(self, home: str, attempt: int) -> bool:
        """Says whether the owner holds the processes of an attempt since before this child."""
        return self.charge.held == (home, str(attempt))

    def began(self, run: Path, home: str, attempt: int) -> bool:
        """Says whether a former child began an attempt whose torchrun was never started."""
        return self.kept(run / rundir.RUN) is not None and not self.holds(home, attempt)

    def hear(self) -> None:
        """Takes what the owner has said so far."""
        while select.select([self.fd], [], [], 0)[0]:
            for message in self._end.receive():
                self._take(message)

    def _take(self, message: Message) -> None:
        if message.kind == frames.REAPED:
            pid, code = frames.PIDS.unpack(message.data)
            self.charge.reaped(pid, code)
        elif message.kind == frames.ASKED:
            self.charge.asked.append(int(message.data))
        elif message.kind == frames.TERMED:
            self.charge.termed = True

    # --- asked ---------------------------------------------------------------------------------

    def beat(self) -> None:
        """Says that this child works, every `BEAT_EVERY_S`; sends what waits."""
        now = time.monotonic()
        if now - self._beat >= BEAT_EVERY_S and not self._waiting:
            self._beat = now
            self._send(frames.BEAT)
        self._flush()

    def obeyed(self) -> None:
        """Says that every signal in `asked` was obeyed, and forgets them."""
        self._send(frames.OBEYED, str(len(self.charge.asked)).encode())
        self.charge.asked.clear()

    def close(self) -> None:
        """Says that from now on it may wait for a disk."""
        self._send(frames.CLOSING)

    def keep(self, path: Path, record: Mapping[str, Any]) -> None:
        """Gives the owner a document for the child that may follow."""
        self._send(frames.KEEP, os.fsencode(path) + b"\0" + jsonl.encode(record), path)

    def ending(self, grace_s: float) -> None:
        """Says how long the processes still have: the owner kills what a dead child cannot."""
        self._send(frames.ENDING, repr(grace_s).encode())

    def hold(self, agent: int, environment: Mapping[str, str], grace_s: float) -> None:
        """Gives the owner the processes of an attempt that was taken over."""
        self.charge.agent = agent
        named = {"agent": agent, "environment": dict(environment), "grace_s": grace_s}
        self._send(frames.HOLDS, jsonl.encode(named))

    def spawn(
        self, argv: Sequence[str], environment: Mapping[str, str], log_fd: int, grace_s: float
    ) -> tuple[int, int]:
        """Has the owner start a command in a session of its own; returns its pid and pidfd.

        Raises OSError where it cannot be started.
        """
        command = {"argv": list(argv), "environment": dict(environment), "grace_s": grace_s}
        self.charge.exits.clear()
        self.charge.termed = False
        self._flush(wait=True)
        self._end.send(frames.SPAWN, jsonl.encode(command), log_fd)
        answer = None
        while answer is None:
            for message in self._end.receive():
                if message.kind in (frames.SPAWNED, frames.NOT_SPAWNED):
                    answer = message
                else:
                    self._take(message)
        number = int(answer.data)
        if answer.kind == frames.NOT_SPAWNED:
            raise OSError(number, os.strerror(number), argv[0])
        if answer.fd < 0:
            raise RuntimeError("no descriptor to spare for torchrun")
        self.charge.agent = number
        return number, answer.fd

    def _send(self, kind: bytes, data: bytes = b"", key: object = None) -> None:
        self._waiting[key or object()] = kind, data
        self._flush()

    def _flush(self, wait: bool = False) -> None:
        """Sends what waits, in order, as far as the owner takes it."""
        while self._waiting and (wait or select.select([], [self.fd], [], 0)[1]):
            self._end.send(*self._waiting.pop(next(iter(self._waiting))))
