"""Distinguishes typed keys from pasted text if the terminal does not mark a paste.

In a burst, nobody can read what one key opened before the next key arrives; so the next key has no
effect.
"""

from __future__ import annotations

from textual.events import Key

from console.tui.keys import BOUND, TABLE

APART_S = 0.03
"""A key that follows another within this time was not typed after looking at the screen."""
PASTE_S, PASTE_KEYS = 0.005, 100
"""More keys in a row than this, each within this time after the last, are a paste."""
QUIET_S = 0.25
"""A paste has ended when no input has come for this long."""
_ASKING = (name for key in TABLE if key.asks for name in key.keys)
ACTING = frozenset(("y", "Y", "q", "enter", "space", "o", "c", *_ASKING))
"""Keys that ask, answer a question, open a list of choices, change something, or leave."""
LEAVE = "ctrl+c"


class Bursts:
    """Filters the keys of one terminal. All times are monotonic."""

    def __init__(self) -> None:
        self._last = 0.0
        self._in_a_row = 0

    def is_pasting(self, now: float) -> bool:
        """Returns whether input at `now` belongs to a paste; if so, extends the paste."""
        if self._in_a_row <= PASTE_KEYS or now - self._last >= QUIET_S:
            return False
        self._last = now
        return True

    def accepts(self, key: Key, now: float, together: bool, in_field: bool) -> bool:
        """Returns whether a key counts; in a text field, all keys except enter count as text.

        `together` says that other keys came in the same read.
        """
        pasting, apart_s = self.is_pasting(now), now - self._last
        self._last = now
        if key.key == LEAVE or pasting:
            return key.key == LEAVE
        self._in_a_row = self._in_a_row + 1 if apart_s < PASTE_S else 0
        if in_field:
            harmless = key.key != "enter"
        else:
            unbound = key.is_printable and not {key.key, key.character} & BOUND
            harmless = key.key not in ACTING and not unbound
        return harmless or not (together or apart_s < APART_S)
