"""Asks systemd-logind for the settings that end processes when their user logs out."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

RUNS, LINGER = "run/systemd/system", "var/lib/systemd/linger"
PROPERTIES = ("KillUserProcesses", "RemoveIPC", "KillOnlyUsers", "KillExcludeUsers")
ASK = (
    "busctl", "get-property", "org.freedesktop.login1", "/org/freedesktop/login1",
    "org.freedesktop.login1.Manager", *PROPERTIES,
)  # fmt: skip
ANSWER_S = 5.0
YES = ["b", "true"]
LEAST_UID = 1000
"""logind leaves the shared memory of system users alone."""
SESSION = re.compile(r"/session-[^/]+\.scope")
USER_MANAGER = re.compile(r"/user@\d+\.service")


def dangers(root: Path, uid: int, user: str) -> tuple[str, ...] | None:
    """Returns a sentence for each way in which a logout of this user ends or blinds a run of this
    process.

    None where systemd does not run. `root` is the root of the file system.
    """
    if not (root / RUNS).is_dir():
        return None
    held = _properties()
    if held is None:
        return ("not known: systemd-logind does not answer busctl",)
    lingers = (root / LINGER / user).exists()
    found = []
    place = (root / "proc/self/cgroup").read_text(errors="replace")
    if USER_MANAGER.search(place):
        if not lingers:
            found.append(
                f"the run ends when {user} logs out: it belongs to the user manager, which "
                f"stops then; run loginctl enable-linger {user}"
            )
    elif SESSION.search(place) and _kills(held, user):
        found.append(
            f"logind has KillUserProcesses=yes: the run is killed when {user} logs out; run "
            f"loginctl enable-linger {user} and launch with systemd-run --user --scope, or "
            "set KillUserProcesses=no in /etc/systemd/logind.conf"
        )
    if held["RemoveIPC"] == YES and not lingers and uid >= LEAST_UID:
        found.append(
            f"logind has RemoveIPC=yes: when {user} logs out it removes the shared memory of "
            f"the ranks' pulses, and stalls are not seen; run loginctl enable-linger {user}, "
            "or set RemoveIPC=no in /etc/systemd/logind.conf"
        )
    return tuple(found)


def _kills(held: Mapping[str, Sequence[str]], user: str) -> bool:
    """Says whether logind kills what is left of a session of this user."""
    only = held["KillOnlyUsers"][2:]
    left_alone = user in held["KillExcludeUsers"][2:] or (only and user not in only)
    return held["KillUserProcesses"] == YES and not left_alone


def _properties() -> dict[str, list[str]] | None:
    """Returns type and words of each property, as `b true` or `as 1 "root"`; None without them."""
    try:
        done = subprocess.run(ASK, capture_output=True, text=True, timeout=ANSWER_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return dict(zip(PROPERTIES, map(shlex.split, done.stdout.splitlines()), strict=False))
