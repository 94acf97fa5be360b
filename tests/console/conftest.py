"""A directory on a file system that does not answer."""

from __future__ import annotations

import subprocess

import pytest

from tests.console.sources import directory
from tests.mounts import ext4

LONGEST_FROZEN_S = 120


@pytest.fixture
def frozen(tmp_path):
    """A live launch on a frozen ext4, and a function that thaws the ext4.

    A guard process thaws the ext4 after `LONGEST_FROZEN_S`.
    """
    with ext4(tmp_path, 64) as mount:
        path = directory.launch(mount)
        directory.run(path / "0-first")
        guard = subprocess.Popen(["sh", "-c", f"sleep {LONGEST_FROZEN_S}; fsfreeze -u {mount}"])

        def thaw() -> None:
            subprocess.run(["fsfreeze", "-u", str(mount)], check=False)

        with directory.owned(path):
            subprocess.run(["fsfreeze", "-f", str(mount)], check=True)
            try:
                yield path, thaw
            finally:
                if guard.poll() is None:
                    thaw()
                guard.kill()
                guard.wait()
