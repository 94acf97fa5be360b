"""The abilities of the terminal, read from the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from console.tui.chartmath import Mode


@dataclass(frozen=True, slots=True)
class Terminal:
    """The abilities that the screen uses. A `dumb` terminal cannot show the screen."""

    chart_mode: Mode = "braille"
    ascii_only: bool = False
    mouse: bool = False
    dumb: bool = False


def detect(environment: Mapping[str, str], mouse: bool | None) -> Terminal:
    """Returns the terminal that the environment describes; `mouse`, if not None, has precedence.

    By default the mouse is off over SSH, because a terminal that reattaches loses its mouse mode.
    While the mouse is on, many terminals do not select text when the mouse is dragged.
    """
    term = environment.get("TERM", "")
    locale = next(
        (v for name in ("LC_ALL", "LC_CTYPE", "LANG") if (v := environment.get(name))), ""
    )
    utf8 = "utf" in locale.lower() or not locale
    local = not environment.get("SSH_CONNECTION")
    return Terminal(
        chart_mode="block" if term == "linux" or not utf8 else "braille",
        ascii_only=not utf8,
        mouse=local if mouse is None else mouse,
        dumb=term in ("dumb", ""),
    )
