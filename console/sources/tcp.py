"""Parses the text of the kernel's TCP tables into connections."""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import Collection
from dataclasses import dataclass

MAX_CONNECTIONS = 256
SYN_SENT = "02"
_RETRANSMITS = "01"
_LINE = re.compile(
    r"^ *[0-9]+: (\S+) (\S+) 01 ([0-9A-F]{8}):\S+ ([0-9A-F]{2}):\S+ ([0-9A-F]{8}) "
    r"+\S+ +\S+ ([0-9]+) ",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Connection:
    """An established connection; `is_unacked` means that the kernel resends unacknowledged data.

    A peer that does not read still acknowledges data, so a resend shows a fault of the network.
    """

    here: str
    peer: str
    is_unacked: bool


def connections(tables: str, inodes: Collection[str]) -> tuple[Connection, ...]:
    """Returns the established connections among these sockets."""
    found: list[Connection] = []
    for here, peer, queued, timer, sent_again, inode in _LINE.findall(tables):
        if inode in inodes and len(found) < MAX_CONNECTIONS:
            again = timer == _RETRANSMITS and int(queued, 16) > 0 and int(sent_again, 16) > 0
            found.append(Connection(address(here), address(peer), again))
    return tuple(found)


def entry(tables: str, inode: str) -> tuple[str, str, str]:
    """Returns local address, peer address and state of a TCP socket, or three times ""."""
    pattern = rf"^ *[0-9]+: (\S+) (\S+) (\S+) (?:\S+ +){{5}}{inode} "
    found = re.search(pattern, tables, re.MULTILINE)
    return (found[1], found[2], found[3]) if found else ("", "", "")


def address(field: str) -> str:
    """Returns "10.0.0.7:443" or "[::1]:443" for an address in the kernel's hexadecimal form."""
    if not re.fullmatch(r"([0-9A-F]{8}|[0-9A-F]{32}):[0-9A-F]{4}", field):
        return "an unknown address"
    host, _, port = field.partition(":")
    words = [int(host[at : at + 8], 16) for at in range(0, len(host), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    name = socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))
    name = name.removeprefix("::ffff:")
    return f"{name if '.' in name else f'[{name}]'}:{int(port, 16)}"
