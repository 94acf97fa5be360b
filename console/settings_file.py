"""Reads the operator's settings file (hooks, charts of the Dashboard), and changes the charts.

The file is YAML. A launch uses the hooks that the file has when the launch starts or is adopted.
The file names programs that run as this user, so only this user and root may be able to write it.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from console import plan
from trainers.contract import environ, rundir, yamlfile
from trainers.contract.errors import UsageError

LEVELS = ("info", "warn", "crit")


@dataclass(frozen=True, slots=True)
class Settings:
    """The operator's settings: two programs that the supervisor runs, and when it runs them.

    `hook` runs on an alert or a crit state whose level is in `hook_levels`. `hook_every_s` is the
    shortest time between two starts of `hook`, except at the end of a launch. A working supervisor
    also starts `alive` every `alive_every_s`. It skips a start while `alive` still runs. An empty
    `hook` or `alive` means no program.
    """

    hook: tuple[str, ...] = ()
    hook_every_s: float = 30.0
    hook_levels: tuple[str, ...] = ("crit",)
    alive: tuple[str, ...] = ()
    alive_every_s: float = 60.0


KEYS = tuple(each.name for each in fields(Settings))
ANOTHER_HOME = "set HOME or XDG_CONFIG_HOME to a directory of this user"
CHARTS = "charts"
"""The key that only the screen reads: the charts of the Dashboard, in their order."""
CHARTS_LINES = re.compile(rf"^{CHARTS}:.*\n?(?:[ \t-].*\n?)*", re.MULTILINE)


def path() -> Path:
    """Returns the path of this user's settings file. Raises UsageError if no home is known."""
    base = Path(environ.get("XDG_CONFIG_HOME"))
    try:
        folder = base if base.is_absolute() else Path.home() / ".config"
    except RuntimeError as error:
        raise UsageError(f"this user has no home directory; {ANOTHER_HOME}") from error
    return folder / "nsa-console" / "settings.yaml"


def load() -> Settings:
    """Returns the operator's settings, or the defaults if there is no file.

    Raises UsageError, for example for a wrong value or a file that another user can write.
    """
    held = _read(path())
    return parse({key: held[key] for key in held if key != CHARTS}, str(path()))


def _read(file: Path) -> dict[str, Any]:
    try:
        for each in (file, file.parent):
            _check_private(each)
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        if is_missing and not os.path.lexists(file):  # a link whose target is missing is an error
            return {}
        raise UsageError(f"cannot read {file}: {error.strerror}; {ANOTHER_HOME}") from error
    return yamlfile.load(file)


def charts() -> tuple[str, ...]:
    """Returns the charts that the file names, or () for the default charts. Raises UsageError."""
    found = _read(path()).get(CHARTS) or []
    if not isinstance(found, list):
        raise UsageError(f"{path()}: '{CHARTS}' must be a list of charts")
    return tuple(str(title) for title in found)


def save_charts(titles: Sequence[str]) -> Path:
    """Replaces only the charts in the settings file; returns the path of the file.

    Raises UsageError, for example if the file cannot be read. Raises OSError if it cannot be
    written.
    """
    file = path().resolve()
    _read(file)
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    text = CHARTS_LINES.sub("", text)
    gap = "\n" if text and not text.endswith("\n") else ""
    named = f"{CHARTS}: [{', '.join(titles)}]\n" if titles else ""
    yamlfile.parse(text + gap + named, str(file))
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    rundir.write_atomic(file, text + gap + named)
    return file


def parse(document: Mapping[str, Any], where: str) -> Settings:
    """Returns the settings in parsed YAML or JSON; `where` names the file in an error."""
    found = plan.section(Settings, document, where)
    if not found.hook_levels or not set(found.hook_levels) <= set(LEVELS):
        raise UsageError(f"{where}: 'hook_levels' must be a list of {', '.join(LEVELS)}")
    for key, words in (("hook", found.hook), ("alive", found.alive)):
        if any(plan.UNPRINTABLE.search(word) for word in words):
            raise UsageError(f"{where}: '{key}' has control characters")
        if words and ("/" in words[0] or not words[0]) and not Path(words[0]).is_absolute():
            raise UsageError(
                f"{where}: '{key}' starts with {words[0]!r}; pass a program in PATH or an "
                "absolute path (no shell expands ~)"
            )
    return found


def _check_private(place: Path) -> None:
    """Raises UsageError if a user other than root and this user can write `place`."""
    status = place.stat()
    if status.st_uid not in (0, os.geteuid()):
        raise UsageError(
            f"{place} belongs to user id {status.st_uid}, and the settings name programs that run "
            f"as you; as root, run chown {os.geteuid()} {place}"
        )
    if stat.S_IMODE(status.st_mode) & 0o022:
        raise UsageError(
            f"other users can write {place}, and the settings name programs that run as you; run "
            f"chmod go-w {place}"
        )
