"""Errors for the operator. A message says what failed, on what and why."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ContractError(Exception):
    """The base class of the errors below; `nsa-console` exits with the error's `exit_code`."""

    exit_code = 5


class UsageError(ContractError):
    """A command line, plan, configuration or environment variable is wrong."""

    exit_code = 2


class NotFoundError(ContractError):
    """A launch, a run or something else that is named does not exist or cannot be read."""

    exit_code = 3


class RefusedError(ContractError):
    """An action, or the start of a trainer, is rejected."""

    exit_code = 4


MOST_SHOWN = 12


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns `; did you mean X?`, where X is the most similar known word.

    If no word is similar, returns the list of the known words, or "" for more than `MOST_SHOWN`
    words.
    """
    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; known: {', '.join(names)}" if 0 < len(names) <= MOST_SHOWN else ""
