"""Errors for the operator: one sentence with what failed, on what, why, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ContractError(Exception):
    """Base class of all errors here; `nsa-console` exits with its `exit_code`."""

    exit_code = 5


class UsageError(ContractError):
    """A command line, plan, configuration or flag is wrong."""

    exit_code = 2


class NotFoundError(ContractError):
    """A run does not exist."""

    exit_code = 3


class RefusedError(ContractError):
    """A valid request is rejected; nothing was changed."""

    exit_code = 4


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns `; did you mean X?`, or the known words if none is similar."""
    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]!r}?"
    shown = ", ".join(names[:12]) + (", …" if len(names) > 12 else "")
    return f"; known: {shown}" if names else ""
