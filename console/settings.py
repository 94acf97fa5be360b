"""The operator's own settings: one YAML file of this user, read when a launch begins.

It names a program that is run, so nobody else may be able to write it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from trainers.contract import environ, plan, yamlfile
from trainers.contract.errors import UsageError

LEVELS = ("info", "warn", "crit")
MAX_WORDS = 64


@dataclass(frozen=True, slots=True)
class Settings:
    """`hook` is a program that the supervisor runs on alerts, () for none.

    `hook_every_s` seconds lie at least between two starts; only alerts of `hook_levels` are told.
    """

    hook: tuple[str, ...] = ()
    hook_every_s: float = 30.0
    hook_levels: tuple[str, ...] = ("crit",)


KEYS = tuple(each.name for each in fields(Settings))


def path() -> Path:
    """Returns where the settings file of this user is, or would be."""
    base = Path(environ.get("XDG_CONFIG_HOME"))
    folder = base if base.is_absolute() else Path.home() / ".config"
    return folder / "nsa-console" / "settings.yaml"


def load() -> Settings:
    """Returns what the settings file says, the defaults without one.

    Raises UsageError for wrong words and for a file that somebody else can write.
    """
    file = path()
    if not file.exists():
        return Settings()
    for each in (file, file.parent):
        _check_private(each)
    return parse(yamlfile.load(file), str(file))


def parse(document: Mapping[str, Any], where: str) -> Settings:
    """Returns the settings in parsed YAML or JSON; `where` stands in the error."""
    found = plan.section(Settings, document, where)
    words, written = found.hook, document.get("hook")
    if not all(isinstance(word, str) for word in written or ()):  # YAML takes no for False
        raise UsageError(f"{where}: 'hook' is a list of words, [program, argument, …]; no shell")
    if not found.hook_levels or not set(found.hook_levels) <= set(LEVELS):
        raise UsageError(f"{where}: 'hook_levels' is a list of {', '.join(LEVELS)}")
    if len(words) > MAX_WORDS or any(plan.UNPRINTABLE.search(word) for word in words):
        raise UsageError(f"{where}: 'hook' is at most {MAX_WORDS} words without control characters")
    if words and ("/" in words[0] or not words[0]) and not Path(words[0]).is_absolute():
        raise UsageError(
            f"{where}: 'hook' starts with {words[0]!r}; it is a program's name in PATH or a "
            "path from / on (no shell expands ~)"
        )
    return found


def _check_private(place: Path) -> None:
    """Raises UsageError when others could write here what is then run as this user."""
    try:
        status = place.stat()
    except OSError as error:
        raise UsageError(f"cannot look at {place}: {error.strerror}") from error
    if status.st_uid not in (0, os.geteuid()):
        raise UsageError(
            f"{place} belongs to user id {status.st_uid}, and it names a program that is run as "
            "you; make it yours"
        )
    if stat.S_IMODE(status.st_mode) & 0o022:
        raise UsageError(
            f"others may write {place}, and it names a program that is run as you; "
            f"chmod go-w {place}"
        )
