"""Checks the owner and the mode of directories, and sets a safe umask."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from trainers.contract.errors import NotFoundError, RefusedError
from trainers.contract.rundir import check_owner


def set_safe_umask() -> None:
    """Removes the owner's bits from the umask; if no other bit is left, sets the umask to 022."""
    mask = os.umask(0o077) & 0o077
    os.umask(mask or 0o022)


def check_working_directory() -> None:
    """Raises RefusedError if the working directory does not exist."""
    try:
        Path.cwd()
    except OSError:
        raise RefusedError("the working directory does not exist: cd to one that exists") from None


def check_listable(root: Path) -> None:
    """Raises NotFoundError if `root` exists and cannot be listed; it would look empty."""
    try:
        os.scandir(root).close()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise NotFoundError(f"cannot list the launches in {root}: {error.strerror}") from error


def check_ours(path: Path) -> None:
    """Raises RefusedError unless `path` is this user's directory and not writable for all users."""
    if check_owner(path).st_mode & stat.S_IWOTH:
        raise RefusedError(
            f"every user can write into {path}, so its content may be forged; chmod go-w {path}"
        )


def check_parents(path: Path) -> None:
    """Raises RefusedError if every user can rename files in a parent of `path`.

    Also raises RefusedError if the parents cannot be read.
    """
    try:
        resolved = path.absolute().parent.resolve()
        for parent in (resolved, *resolved.parents):
            mode = parent.stat().st_mode if parent.exists() else 0
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                raise RefusedError(
                    f"every user can rename files in {parent}; chmod o-w {parent}, or pass "
                    "another directory with --root or --run-dir"
                )
    except (OSError, RuntimeError) as error:
        raise RefusedError(f"cannot read the parents of {path}: {error}") from error
