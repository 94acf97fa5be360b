"""Faults of the second author between ranks: other collectives, connections, and the start.

Only the rank of the fault calls its function in `MECHANISMS`. All ranks call a function in
`TOGETHER`; its argument is True on the rank of the fault. If the kernel rejects an option of a
connection, the run continues.
"""

import contextlib
import ctypes
import datetime
import hashlib
import os
import socket
import struct
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from drilled_place import folder, rank, world

AN_HOUR = datetime.timedelta(hours=1)
SO_ATTACH_FILTER, SO_MAX_PACING_RATE, IP_MINTTL, IPV6_MINHOPCOUNT = 26, 47, 21, 73
RETURN, IF_GREATER, LOAD_LENGTH, LOAD_RANDOM = 0x06, 0x25, 0x80, 0x20
AT_RANDOM, ALL = 0xFFFFF000 + 56, 0xFFFFFFFF
LARGEST, ONE_IN = 140, 500


def one() -> torch.Tensor:
    return torch.ones(1)


# --- collectives of one rank ---------------------------------------------------------------------


def announce() -> None:
    dist.broadcast(one(), src=rank)


def take_over() -> None:
    dist.recv(one(), src=(rank + 1) % world)


def hand_over() -> None:
    dist.send(torch.ones(1 << 20), dst=(rank + 1) % world)


def gather_notes() -> None:
    dist.all_gather_object([None] * world, {"rank": rank})


def end_of_data() -> None:
    dist.barrier()


# --- collectives of all ranks --------------------------------------------------------------------


def collect(mine: bool) -> None:
    root = rank if mine else 0
    dist.gather(one(), [one() for _ in range(world)] if rank == root else None, dst=root)


def average(mine: bool) -> None:
    half = dist.new_group(timeout=AN_HOUR)
    dist.all_reduce(one(), group=half if mine else None)


def check_in(mine: bool) -> None:
    if not mine:
        dist.monitored_barrier(timeout=AN_HOUR)


def lengths(mine: bool) -> None:
    size = 0 if mine else 4
    dist.all_gather([torch.zeros(size) for _ in range(world)], torch.zeros(size))


def in_turns(mine: bool) -> None:
    """Broadcasts from each rank in turn; the rank of the fault uses the reverse order."""
    turns = [*range(world)]
    for source in reversed(turns) if mine else turns:
        dist.broadcast(torch.ones(1 << 18), src=source)


# --- connections ---------------------------------------------------------------------------------


def links() -> Iterator[socket.socket]:
    """Yields the connections to other ranks."""
    store = int(os.environ["MASTER_PORT"])
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            stream = socket.socket(fileno=os.dup(int(name)))
            ports = {stream.getpeername()[1], stream.getsockname()[1]}
            if stream.type == socket.SOCK_STREAM and store not in ports:
                yield stream


def attach(*instructions: tuple[int, int, int, int]) -> None:
    """Lets a classic BPF program decide on each packet that arrives from another rank."""
    code = b"".join(struct.pack("HBBI", *each) for each in instructions)
    kept = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HL", len(instructions), ctypes.addressof(kept))
    for stream in links():
        with contextlib.suppress(OSError):
            stream.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


def small_only() -> None:
    """Loses large packets, as a path with a smaller MTU does."""
    attach((LOAD_LENGTH, 0, 0, 0), (IF_GREATER, 0, 1, LARGEST), (RETURN, 0, 0, 0),
           (RETURN, 0, 0, ALL))  # fmt: skip


def worn_cable() -> None:
    """Loses nearly every packet."""
    attach((LOAD_RANDOM, 0, 0, AT_RANDOM), (IF_GREATER, 0, 1, ALL // ONE_IN), (RETURN, 0, 0, 0),
           (RETURN, 0, 0, ALL))  # fmt: skip


def nearby_only() -> None:
    """Accepts no packet that could have passed a router."""
    for stream in links():
        with contextlib.suppress(OSError):
            if stream.family == socket.AF_INET6:
                stream.setsockopt(socket.IPPROTO_IPV6, IPV6_MINHOPCOUNT, 255)
            stream.setsockopt(socket.IPPROTO_IP, IP_MINTTL, 255)


def share_fairly() -> None:
    """Limits the connections to one byte per second."""
    for stream in links():
        with contextlib.suppress(OSError):
            stream.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 1)


# --- the start -----------------------------------------------------------------------------------


def other_port() -> None:
    """Replaces the port of the store by a port on which no process listens."""
    kept = socket.socket()
    kept.bind(("127.0.0.1", 0))
    os.environ["MASTER_PORT"] = str(kept.getsockname()[1])
    kept.detach()


def one_more() -> None:
    os.environ["WORLD_SIZE"] = str(world + 1)


def read_settings() -> None:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    dist.TCPStore(host, port, is_master=False, timeout=AN_HOUR).get("settings")


def index_documents() -> None:
    seen: dict[int, int] = {}
    place = 1
    while True:
        place = (place * 48271) % 2147483647
        seen[place % 10_007] = place


def verify_weights() -> None:
    hashlib.pbkdf2_hmac("sha256", b"weights", b"salt", 2**31 - 1)


def build_once(mine: bool) -> None:
    """One rank builds an index for a long time; the others wait for its file."""
    while mine:
        hashlib.sha256(bytes(4096)).digest()
    while not (folder / "index.done").exists():
        time.sleep(0.2)


MECHANISMS = {
    "announce": announce, "takeover": take_over, "handover": hand_over, "notes": gather_notes,
    "uneven": end_of_data,
    "small": small_only, "worn": worn_cable, "nearby": nearby_only, "share": share_fairly,
    "port": other_port, "more": one_more, "settings": read_settings, "index": index_documents,
    "weights": verify_weights,
}  # fmt: skip
TOGETHER = {
    "collect": collect, "average": average, "check": check_in, "lengths": lengths,
    "turns": in_turns, "once": build_once,
}  # fmt: skip
