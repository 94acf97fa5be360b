"""Converts values of flags, settings and plans, and describes the accepted values.

A kind is bool, int, float, str, or a tuple of choices.
"""

from __future__ import annotations

import math
from typing import Any

from trainers.contract.errors import UsageError

TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
Kind = type | tuple[str, ...]


def convert(value: Any, kind: Kind, low: float = -math.inf, high: float = math.inf) -> Any:
    """Returns `value`, which may also be a text, converted to `kind`.

    Raises ValueError, also for a number that is not finite or outside of the limits.
    """
    try:
        found = _convert(value, kind)
    except (KeyError, OverflowError, TypeError) as error:
        raise ValueError(value) from error
    if kind in (int, float) and not (low <= found <= high and abs(found) != math.inf):
        raise ValueError(value)
    return found


def read(value: Any, kind: Kind, low: float, high: float, what: str, unit: str = "") -> Any:
    """Converts like `convert`. Raises UsageError with the accepted values of `what`."""
    try:
        return convert(value, kind, low, high)
    except ValueError:
        raise UsageError(
            f"{what} cannot be {value!r}; it takes {accepted_values(kind, low, high)}{unit}"
        ) from None


def _convert(value: Any, kind: Kind) -> Any:
    text = str(value).lower()
    if isinstance(kind, tuple):
        return {choice.lower(): choice for choice in kind}[text]
    if kind is bool and text in (*TRUE, *FALSE):
        return text in TRUE
    if kind is str and isinstance(value, str) and all(ord(c) >= 32 for c in value):
        return value
    # The values of flags are text, and YAML 1.1 reads 1e-3 as text.
    if kind is int and not isinstance(value, bool | float):
        return int(value)
    if kind is float and not isinstance(value, bool):
        return float(value)
    raise ValueError(value)


def accepted_values(kind: Kind, low: float = -math.inf, high: float = math.inf) -> str:
    """Returns a short description of the values that `convert` accepts."""
    if isinstance(kind, tuple):
        return " or ".join(kind) if len(kind) == 2 else "one of " + ", ".join(kind)
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}[kind]
    if kind in (bool, str) or low == -math.inf:
        return words
    bits = math.frexp(high)[1] - 1
    least, top = (str(int(x)) if kind is int and x < math.inf else f"{x:g}" for x in (low, high))
    top = f"2^{bits}" if bits >= 20 and high == 1 << bits else top
    return f"{words} from {least} to {top}"
