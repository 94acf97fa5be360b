"""FUSE file systems that answer no request, or no request after a file was opened."""

from __future__ import annotations

import ctypes
import os
import select
import stat
import struct
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

MS_NOSUID, MS_NODEV, MNT_DETACH = 2, 4, 2
REQUEST = struct.Struct("<IIQQIIII")
LOOKUP, FORGET, GETATTR, OPEN, INIT, INTERRUPT = 1, 2, 3, 14, 26, 36
FOLDER_NODE, FILE_NODE, SIZE, KEPT_S = 1, 2, 1 << 20, 3600
MOST = 1 << 18
ENOSYS = 38


class Unavailable(Exception):
    """A case does not count; the text has the reason, for example that FUSE is missing."""


def mount(path: Path, stack: ExitStack) -> int:
    """Mounts a FUSE file system at a new folder; returns the descriptor of its requests."""
    path.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        fd = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        raise Unavailable(f"no FUSE: {error}") from None
    stack.callback(os.close, fd)  # ends every pending request
    data = f"fd={fd},rootmode=40000,user_id={os.geteuid()},group_id={os.getegid()}".encode()
    if libc.mount(b"files", bytes(path), b"fuse", MS_NOSUID | MS_NODEV, data) != 0:
        raise Unavailable(f"no FUSE mount: {os.strerror(ctypes.get_errno())}")
    stack.callback(libc.umount2, bytes(path), MNT_DETACH)
    return fd


def mount_stuck(folder: Path, stack: ExitStack) -> None:
    """Mounts `bucket`. One of its files can be opened; a read of the file waits."""
    fd, closing = mount(folder / "bucket", stack), threading.Event()
    serving = threading.Thread(target=_serve, args=(fd, closing), daemon=True)
    serving.start()
    stack.callback(serving.join)
    stack.callback(closing.set)


def _serve(fd: int, closing: threading.Event) -> None:
    """Answers until a file is open or `closing` is set; the kernel queues later requests."""
    opened = False
    while not (opened or closing.is_set()):
        if not select.select([fd], [], [], 0.2)[0]:
            continue
        with suppress(OSError):
            _, code, unique, node, *_ = REQUEST.unpack_from(os.read(fd, MOST))
            if code not in (FORGET, INTERRUPT):
                error, body = _answer(code, node)
                os.write(fd, struct.pack("<IiQ", 16 + len(body), -error, unique) + body)
            opened = code == OPEN


def _answer(code: int, node: int) -> tuple[int, bytes]:
    """Returns an error number and the body of an answer."""
    if code == INIT:
        return 0, struct.pack("<IIIIHHIIHHI7I", 7, 31, 1 << 16, 0, 8, 6, 1 << 16, 1, 16, 0, 0,
                              *7 * (0,))  # fmt: skip
    if code == LOOKUP:
        return 0, struct.pack("<QQQQII", FILE_NODE, 0, KEPT_S, KEPT_S, 0, 0) + _status(FILE_NODE)
    if code == GETATTR:
        return 0, struct.pack("<QII", KEPT_S, 0, 0) + _status(node)
    if code == OPEN:
        return 0, struct.pack("<QII", 1, 0, 0)
    return ENOSYS, b""


def _status(node: int) -> bytes:
    folder = node == FOLDER_NODE
    mode = stat.S_IFDIR | 0o755 if folder else stat.S_IFREG | 0o644
    owner = os.geteuid(), os.getegid()
    return struct.pack("<6Q10I", node, SIZE, SIZE // 512, 0, 0, 0, 0, 0, 0, mode, 1, *owner, 0,
                       4096, 0)  # fmt: skip
