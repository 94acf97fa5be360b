"""A directory on a file system that does not answer."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from tests.console.sources import directory

TOOLS = ("fsfreeze", "mkfs.ext4", "mount", "umount")
LONGEST_FROZEN_S = 20


@pytest.fixture
def frozen(tmp_path):
    """A live launch on a frozen ext4, and what thaws it; it thaws by itself after a while."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"needs root and {', '.join(missing or TOOLS)} for a file system to freeze")
    image, mount = tmp_path / "image", tmp_path / "mount"
    mount.mkdir()
    with image.open("wb") as stream:
        stream.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    if subprocess.run(["mount", "-o", "loop", str(image), str(mount)]).returncode != 0:
        pytest.skip("this machine mounts no loop device")
    path = directory.launch(mount)
    directory.run(path / "0-first")
    guard = subprocess.Popen(["sh", "-c", f"sleep {LONGEST_FROZEN_S}; fsfreeze -u {mount}"])

    def thaw() -> None:
        subprocess.run(["fsfreeze", "-u", str(mount)], check=False)

    subprocess.run(["fsfreeze", "-f", str(mount)], check=True)
    try:
        yield path, thaw
    finally:
        if guard.poll() is None:
            thaw()
        guard.kill()
        guard.wait()
        subprocess.run(["umount", "-l", str(mount)], check=True)
