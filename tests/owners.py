"""A link to an owner that never answers, for tests without a supervisor."""

from __future__ import annotations

import socket

from console.supervisor.link import Channel, ChildState, Link

_others: list[socket.socket] = []


def absent() -> Link:
    ours, theirs = socket.socketpair()
    _others.append(theirs)
    return Link(Channel(ours), ChildState(identity={}))
