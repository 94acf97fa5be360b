"""Errors that a person reads: one sentence that says what, to what, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ContractError(Exception):
    """Something failed; `exit_code` is what `nsa-console` returns for it."""

    exit_code = 5


class UsageError(ContractError):
    """The words of a command, a plan, a config or a flag are wrong."""

    exit_code = 2


class NotFoundError(ContractError):
    """There is no such run."""

    exit_code = 3


class RefusedError(ContractError):
    """The request is understood and refused; nothing was changed."""

    exit_code = 4


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns `; did you mean X?` or, without a near match, the known words."""
    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]!r}?"
    shown = ", ".join(names[:12]) + (", …" if len(names) > 12 else "")
    return f"; known: {shown}"
