"""A real owner in a process of its own, for tests of a process tree without a supervisor."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from console.supervisor.__main__ import become_subreaper
from console.supervisor.child_state import ChildState
from console.supervisor.link import Channel, Link
from console.supervisor.owner import Owner


class Lent(Owner):
    """An owner whose child is the process at the other end of the socket; it ends with it."""

    def __init__(self, end: Channel):
        super().__init__(lambda channel, state: 0)
        self._test_end = end

    def _fork(self) -> None:
        self._attach(-1, self._test_end)

    def _kill_silent_child(self) -> None:
        if self._channel is None:
            self._result = 0


def begin() -> Link:
    """Starts an owner; returns this process's end of its socket."""
    ours, theirs = socket.socketpair()
    with theirs:
        owner = subprocess.Popen(
            [sys.executable, "-m", "tests.owners", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),), cwd=Path(__file__).parents[1],
        )  # fmt: skip
    return Link(Channel(ours), ChildState(identity={"pid": owner.pid}))


_others: list[socket.socket] = []


def absent() -> Link:
    """Returns a link to an owner that never answers."""
    ours, theirs = socket.socketpair()
    _others.append(theirs)
    return Link(Channel(ours), ChildState(identity={}))


def end(link: Link) -> None:
    """Ends the owner at the other end."""
    link._channel.close()


if __name__ == "__main__":
    become_subreaper()
    given = socket.socket(fileno=int(sys.argv[1]))
    given.setblocking(False)
    sys.exit(Lent(Channel(given)).run())
