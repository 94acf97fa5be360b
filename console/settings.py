"""The operator's own settings: one YAML file of this user, read when a launch begins.

It names a program that is run, so nobody else may be able to write it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainers.contract import environ, yamlfile
from trainers.contract.errors import UsageError, did_you_mean
from trainers.contract.plan import UNPRINTABLE

LEVELS = ("info", "warn", "crit")
LEAST_EVERY_S, MOST_EVERY_S = 1.0, 86_400.0
HOOK, EVERY, HOOK_LEVELS = KEYS = ("hook", "hook_every_s", "hook_levels")
MAX_WORDS = 64


@dataclass(frozen=True, slots=True)
class Hook:
    """A program that the supervisor runs on alerts; there is none without `argv`.

    `every_s` seconds lie at least between two starts; only alerts of `levels` are told.
    """

    argv: tuple[str, ...] = ()
    every_s: float = 30.0
    levels: tuple[str, ...] = ("crit",)

    def as_dict(self) -> dict[str, Any]:
        """Returns the hook as it stands in the settings file."""
        return {HOOK: list(self.argv), EVERY: self.every_s, HOOK_LEVELS: list(self.levels)}


def path() -> Path:
    """Returns where the settings file of this user is, or would be."""
    base = Path(environ.get("XDG_CONFIG_HOME"))
    folder = base if base.is_absolute() else Path.home() / ".config"
    return folder / "nsa-console" / "settings.yaml"


def load() -> Hook:
    """Returns what the settings file says, the defaults without one.

    Raises UsageError for wrong words and for a file that somebody else can write.
    """
    file = path()
    if not file.exists():
        return Hook()
    for each in (file, file.parent):
        _check_private(each)
    return parse(yamlfile.load(file), str(file))


def parse(document: Mapping[str, Any], where: str) -> Hook:
    """Returns the hook in parsed YAML or JSON; `where` stands in the error."""
    for key in document:
        if key not in KEYS:
            raise UsageError(f"{where}: there is no key {key!r}{did_you_mean(str(key), KEYS)}")
    default = Hook()
    every = document.get(EVERY, default.every_s)
    number = isinstance(every, int | float) and not isinstance(every, bool)
    if not number or not LEAST_EVERY_S <= every <= MOST_EVERY_S:
        raise UsageError(
            f"{where}: {EVERY!r} cannot be {every!r}; it is {LEAST_EVERY_S:g} to "
            f"{MOST_EVERY_S:g} seconds between two starts"
        )
    levels = document.get(HOOK_LEVELS, list(default.levels))
    if not isinstance(levels, list) or not levels or any(x not in LEVELS for x in levels):
        raise UsageError(f"{where}: {HOOK_LEVELS!r} is a list of {', '.join(LEVELS)}")
    return Hook(_argv(document.get(HOOK, []), where), float(every), tuple(levels))


def _argv(words: Any, where: str) -> tuple[str, ...]:
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise UsageError(f"{where}: {HOOK!r} is a list of words, [program, argument, …]; no shell")
    if len(words) > MAX_WORDS or any(UNPRINTABLE.search(word) for word in words):
        raise UsageError(
            f"{where}: {HOOK!r} is at most {MAX_WORDS} words without control characters"
        )
    if words and ("/" in words[0] or not words[0]) and not Path(words[0]).is_absolute():
        raise UsageError(
            f"{where}: {HOOK!r} starts with {words[0]!r}; it is a program's name in PATH or a "
            "path from / on (no shell expands ~)"
        )
    return tuple(words)


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
