"""Mounts small real file systems for tests, on machines where root may mount them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

TOOLS = ("fsfreeze", "mkfs.ext4", "mount", "umount")


@contextmanager
def ext4(folder: Path, mib: int) -> Iterator[Path]:
    """Yields the path of a sparse ext4 on a loop device; afterwards, thaws and unmounts it.

    Skips the test if none can be mounted here.
    """
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"needs root and {', '.join(missing or TOOLS)} for a file system to freeze")
    image, mount = folder / "image", folder / "mount"
    mount.mkdir()
    with image.open("wb") as stream:
        stream.truncate(mib << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    if subprocess.run(["mount", "-o", "loop", str(image), str(mount)]).returncode != 0:
        pytest.skip("this machine mounts no loop device")
    try:
        yield mount
    finally:
        subprocess.run(["fsfreeze", "-u", str(mount)], capture_output=True)
        subprocess.run(["umount", "-l", str(mount)], check=True)


@contextmanager
def tmpfs(folder: Path, mib: int, mode: str = "rw") -> Iterator[Path]:
    """Yields the path of a file system of this size in memory; afterwards, unmounts it.

    Skips the test if none can be mounted here.
    """
    mount = folder / "tmpfs"
    mount.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"{mode},size={mib}m,mode=0700", "tmpfs", str(mount)]
    if os.geteuid() != 0 or subprocess.run(words, capture_output=True).returncode != 0:
        pytest.skip("needs root and a small tmpfs")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)
