"""Rules of systemd-logind that harm a run when its user logs out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDERS = ("etc/systemd", "run/systemd", "usr/local/lib/systemd", "usr/lib/systemd", "lib/systemd")
"""Folders of logind.conf and logind.conf.d; earlier ones override later ones."""
NAME = "logind.conf"
RUNS, LINGER = "run/systemd/system", "var/lib/systemd/linger"
TRUE = frozenset(("1", "yes", "y", "true", "t", "on"))
LEAST_UID = 1000
"""logind leaves the shared memory of system users alone."""
BUILT_IN = {"RemoveIPC": "yes", "KillExcludeUsers": "root"}
"""Defaults that are the same everywhere unless the shipped file says otherwise in a comment; that
of KillUserProcesses differs between distributions."""
SESSION = re.compile(r"/session-[^/]+\.scope")
USER_MANAGER = re.compile(r"/user@\d+\.service")


@dataclass(frozen=True, slots=True)
class User:
    """The user that the run belongs to."""

    uid: int
    name: str


def dangers(root: Path, user: User) -> tuple[str, ...] | None:
    """Returns a sentence for each way in which a logout ends or blinds a run of this process.

    None where systemd does not run. `root` is the root of the file system.
    """
    if not (root / RUNS).is_dir():
        return None
    settings = {**BUILT_IN, **_defaults(root), **_settings(root)}
    lingers = (root / LINGER / user.name).exists()
    found = []
    place = _read(root / "proc/self/cgroup")
    if USER_MANAGER.search(place):
        if not lingers:
            found.append(
                f"the run ends when {user.name} logs out: it belongs to the user manager, which "
                f"stops then; run loginctl enable-linger {user.name}"
            )
    elif _kills(settings, user, place, lingers):
        found.append(
            f"logind has KillUserProcesses=yes: the run is killed when {user.name} logs out; run "
            f"loginctl enable-linger {user.name} and launch with systemd-run --user --scope, or "
            f"set KillUserProcesses=no in /etc/systemd/{NAME}"
        )
    if settings["RemoveIPC"].lower() in TRUE and not lingers and user.uid >= LEAST_UID:
        found.append(
            f"logind has RemoveIPC=yes: when {user.name} logs out it removes the shared memory of "
            f"the ranks' pulses, and stalls are not seen; run loginctl enable-linger {user.name}, "
            f"or set RemoveIPC=no in /etc/systemd/{NAME}"
        )
    return tuple(found)


def _kills(settings: Mapping[str, str], user: User, place: str, lingers: bool) -> bool:
    """Says whether this process is killed at logout.

    Lingering does not save what is in the session's scope; where that is not known it counts.
    """
    if settings.get("KillUserProcesses", "").lower() not in TRUE:
        return False
    only = settings.get("KillOnlyUsers", "").split()
    if user.name in settings["KillExcludeUsers"].split() or (only and user.name not in only):
        return False
    return bool(SESSION.search(place)) if place else not lingers


def _settings(root: Path) -> dict[str, str]:
    """Returns what is configured: the strongest logind.conf, then all drop-ins by their names."""
    main = next((root / f / NAME for f in FOLDERS if (root / f / NAME).exists()), None)
    drop_ins: dict[str, Path] = {}
    for folder in FOLDERS:
        for path in (root / folder / f"{NAME}.d").glob("*.conf"):
            drop_ins.setdefault(path.name, path)
    found: dict[str, str] = {}
    for path in ([main] if main else []) + [path for _, path in sorted(drop_ins.items())]:
        for key, value in _assignments(_read(path)):
            found.pop(key, None)
            if value:
                found[key] = value
    return found


def _defaults(root: Path) -> dict[str, str]:
    """Returns the compiled-in defaults, which the shipped file holds as comments."""
    found: dict[str, str] = {}
    for folder in FOLDERS:
        lines = _read(root / folder / NAME).splitlines()
        comments = "\n".join(["[Login]", *(line[1:] for line in lines if line.startswith("#"))])
        found.update({key: value for key, value in _assignments(comments) if value})
    return found


def _assignments(text: str) -> list[tuple[str, str]]:
    """Returns the assignments of the section [Login] in their order."""
    section, found = "", []
    for line in map(str.strip, text.splitlines()):
        if line.startswith("["):
            section = line
        elif section == "[Login]" and "=" in line and not line.startswith(("#", ";")):
            key, _, value = line.partition("=")
            found.append((key.strip(), value.strip()))
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
