"""Names the object for which another process waits, for example a pipe or a socket.

The module also parses the text of the kernel's TCP tables into connections.
"""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from console.sources import procfs
from console.sources.procfs import TABLE_BYTES, link_of, number_after, read_text
from console.sources.sanitize import clean

MAX_CONNECTIONS = 256
SYN_SENT = "02"
_RETRANSMITS = "01"
_OPENING = re.compile(rf"^ *[0-9]+: \S+ \S+ {SYN_SENT} (?:\S+ +){{5}}([0-9]+) ", re.MULTILINE)
_LINE = re.compile(
    r"^ *[0-9]+: (\S+) (\S+) 01 ([0-9A-F]{8}):\S+ ([0-9A-F]{2}):\S+ ([0-9A-F]{8}) "
    r"+\S+ +\S+ ([0-9]+) ",
    re.MULTILINE,
)
MAX_POLLED = 64
Kind = Literal["lock", "pipe", "network", "child", "timer", "disk", "futex", "none"]
NO_PEER = "a socket whose peer is not available"


@dataclass(frozen=True, slots=True)
class BlockedOn:
    """The object for which a system call waits. `text` is a noun phrase, or "" for "none"."""

    kind: Kind
    text: str
    unsure: bool = False
    """True if the process may instead wait for another object."""
    holder: int = 0
    """The pid of the process that holds the lock, or 0 if it is not known."""


NOTHING = BlockedOn("none", "")
LOOP_TIMER = BlockedOn("timer", "a timer of its event loop")
LOOP_EVENT = BlockedOn("lock", "an event of its event loop, which has no timer", unsure=True)


def pipe_wait(link: str, is_full: bool) -> BlockedOn:
    """Returns the wait of a system call for a pipe, or for the FIFO at a path."""
    subject = f"the FIFO {link}, which" if link.startswith("/") else "a pipe that"
    return BlockedOn("pipe", f"{subject} is {'full' if is_full else 'empty'}")


def poll_wait(pid: int) -> BlockedOn:
    """Returns the process's only unfinished connection, or else its only socket, or `NOTHING`.

    The kernel does not show which descriptors a poll has, so all except 0 to 2 are considered.
    Without an unfinished connection, a socket is named only if there are at most `MAX_POLLED` of
    these descriptors, and no pipe among them.
    """
    links = {fd: link for fd, link in procfs.open_links(pid).items() if fd > 2}
    return _only(pid, len(links), set(links.values()))


def select_wait(pid: int, highest: int, reads: bool) -> BlockedOn:
    """Returns a select's highest descriptor if it is a socket, a pipe or a FIFO, else `NOTHING`."""
    link = link_of(pid, f"fd/{highest}")
    if link.startswith("socket:["):
        return replace(socket_wait(pid, link[8:-1], False), unsure=True)
    if link.startswith(("pipe:[", "/")) and not link.startswith(
        "/dev/"
    ):  # select does not block on a regular file, so a path outside /dev is probably a FIFO
        return replace(pipe_wait(link, not reads), unsure=True)
    return NOTHING


def epoll_wait(pid: int, fd: int, is_timed: bool) -> BlockedOn:
    """Returns the object for which an epoll waits, or `NOTHING` if fdinfo does not show one object.

    The wake-up sockets and the eventfds of an event loop are left out. If nothing else is left, and
    there is a wake-up socket, the loop waits for a timer or an event.
    """
    info = read_text(f"/proc/{pid}/fdinfo/{fd}", TABLE_BYTES)
    fds = [int(fd) for fd in re.findall(r"^tfd:\s*([0-9]{1,9})\s", info, re.MULTILINE)]
    targets = {fd: link_of(pid, f"fd/{fd}") for fd in fds[:MAX_POLLED]}
    for each, link in targets.items():
        if link == "anon_inode:[pidfd]":
            child = number_after(read_text(f"/proc/{pid}/fdinfo/{each}"), "Pid")
            return BlockedOn("child", f"child {child}" if child else "a child process", unsure=True)
    links = set(targets.values())
    sockets = inodes_of(links)
    own = _wake_ups(pid, sockets) if sockets else set[str]()
    links -= {f"socket:[{each}]" for each in own} | {"anon_inode:[eventfd]"}
    if links or not own:
        return _only(pid, len(fds), links)
    return LOOP_TIMER if is_timed else LOOP_EVENT


def _wake_ups(pid: int, sockets: set[str]) -> set[str]:
    """Returns the unnamed sockets in `sockets` whose other end seems to be in the same process.

    The other end of a socket pair usually has the next or the previous inode.
    """
    mine = {int(each) for each in inodes_of(procfs.open_links(pid).values())}
    table = read_text(f"/proc/{pid}/net/unix", TABLE_BYTES)
    unnamed = set(re.findall(r"^(?:\S+ ){6} *([0-9]+)$", table, re.MULTILINE))
    return {each for each in sockets & unnamed if {int(each) - 1, int(each) + 1} & mine}


def _only(pid: int, count: int, links: set[str]) -> BlockedOn:
    """Returns the only unfinished connection, or else the only socket (see `poll_wait`)."""
    sockets = inodes_of(links)
    opening = sockets & {*_OPENING.findall(socket_tables(pid))} if sockets else set[str]()
    has_pipe = any(link.startswith("pipe:[") for link in links)
    named = [*(opening or (sockets if not has_pipe and count <= MAX_POLLED else ()))]
    return socket_wait(pid, named[0], False) if len(named) == 1 else NOTHING


def inodes_of(links: Iterable[str]) -> set[str]:
    """Returns the inodes of the sockets among the links of descriptors."""
    return {link[8:-1] for link in links if link.startswith("socket:[")}


def socket_tables(pid: int, known: dict[str, str] | None = None) -> str:
    """Returns the first `TABLE_BYTES` of each TCP table of a process; `known` caches them."""
    known, namespace = {} if known is None else known, link_of(pid, "ns/net")
    if not namespace or namespace not in known:
        texts = (read_text(f"/proc/{pid}/net/{name}", TABLE_BYTES) for name in ("tcp", "tcp6"))
        known[namespace] = "".join(texts)
    return known[namespace]


def socket_wait(pid: int, inode: str, accepts: bool) -> BlockedOn:
    """Returns the wait of a system call for a socket.

    The text names a local socket by its path, and a TCP socket by the address of its peer, if the
    kernel's tables contain the path or the address. With `accepts`, a TCP socket is named by its
    own address.
    """
    here, peer, state = tcp_entry(socket_tables(pid), inode)
    if not state:
        table = read_text(f"/proc/{pid}/net/unix", TABLE_BYTES)
        found = re.search(rf"^(?:\S+ ){{6}} *{inode}(?: (.*))?$", table, re.MULTILINE)
        path = clean(found[1] or "", procfs.MAX_PATH_CHARS) if found else ""
        name = f"the local socket {path}" if path else "a local socket"
        return BlockedOn("network", name if found else NO_PEER)
    if accepts:
        return BlockedOn("network", f"a connection to {address(here)}")
    suffix = " that is not connected yet" if state == SYN_SENT else ""
    return BlockedOn("network", f"a socket to {address(peer)}{suffix}")


# --- TCP ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connection:
    """An established connection; `is_unacked` means that the kernel resends unacknowledged data.

    A peer that does not read still acknowledges data. So a resend shows a fault of the network or
    of the peer's host.
    """

    here: str
    peer: str
    is_unacked: bool


def connections(tables: str, inodes: Collection[str]) -> tuple[Connection, ...]:
    """Returns at most `MAX_CONNECTIONS` established connections of the sockets with `inodes`."""
    found: list[Connection] = []
    for here, peer, queued, timer, sent_again, inode in _LINE.findall(tables):
        if inode in inodes and len(found) < MAX_CONNECTIONS:
            again = timer == _RETRANSMITS and int(queued, 16) > 0 and int(sent_again, 16) > 0
            found.append(Connection(address(here), address(peer), again))
    return tuple(found)


def tcp_entry(tables: str, inode: str) -> tuple[str, str, str]:
    """Returns local address, peer address and state of a TCP socket, or three times ""."""
    pattern = rf"^ *[0-9]+: (\S+) (\S+) (\S+) (?:\S+ +){{5}}{inode} "
    found = re.search(pattern, tables, re.MULTILINE)
    return (found[1], found[2], found[3]) if found else ("", "", "")


def address(field: str) -> str:
    """Returns an address as text, for example "10.0.0.7:443", from its hexadecimal form."""
    if not re.fullmatch(r"([0-9A-F]{8}|[0-9A-F]{32}):[0-9A-F]{4}", field):
        return "an unknown address"
    host, _, port = field.partition(":")
    words = [int(host[at : at + 8], 16) for at in range(0, len(host), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    name = socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))
    name = name.removeprefix("::ffff:")
    return f"{name if '.' in name else f'[{name}]'}:{int(port, 16)}"
