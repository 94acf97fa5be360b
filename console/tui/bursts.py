"""Tells typed keys from pasted text where the terminal does not mark a paste.

Nobody reads what a burst of keys has opened before the rest of it arrives, so no key of one acts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from textual.events import Key

from console.tui.keys import BOUND, TABLE

APART_S = 0.03
"""A key that follows another within this time was not typed after looking at the screen."""
PASTE_KEYS, PASTE_S = 100, 1.0
"""More keys than this within this time are a paste; the fastest key repeat is about 70 a second."""
QUIET_S = 0.25
"""A paste has ended when no input has come for this long."""
TOLD_S = 1.0
ACTING = frozenset(
    ("y", "Y", "enter", "space", *(name for key in TABLE if key.asks for name in key.keys))
)
"""Keys that ask, answer a question, or change something."""
IN_A_FIELD = frozenset(("enter",))
"""Acting keys that also act while a text field has the focus; the others are text there."""
LEAVE = "ctrl+c"


@dataclass
class Bursts:
    """Filters the keys of one terminal. All times are monotonic."""

    _times: deque[float] = field(default_factory=lambda: deque(maxlen=PASTE_KEYS))
    _last: float = 0.0
    _told: float = 0.0
    pasted: int = 0
    """Characters of the paste that is being ignored; 0 while there is none."""

    def admit(self, keys: Sequence[Key], now: float, in_field: bool) -> tuple[list[Key], str]:
        """Returns which of the keys that came together count, and what to say of the others."""
        if self._is_paste(len(keys), now):
            self.count(len(keys), now)
            return [key for key in keys if key.key == LEAVE and len(keys) == 1], ""
        rushed = len(keys) > 1 or now - self._last < APART_S
        self._last = now
        ignored = [key for key in keys if rushed and self._acts_or_means_nothing(key, in_field)]
        said = f"{ignored[0].key} ignored: it came together with other input" if ignored else ""
        return [key for key in keys if key not in ignored], said

    def _acts_or_means_nothing(self, key: Key, in_field: bool) -> bool:
        if in_field:
            return key.key in IN_A_FIELD
        return key.key in ACTING or (key.is_printable and not {key.key, key.character} & BOUND)

    def _is_paste(self, count: int, now: float) -> bool:
        full = len(self._times) == PASTE_KEYS and now - self._times[0] < PASTE_S
        self._times.extend([now] * min(count, PASTE_KEYS))
        return count > PASTE_KEYS or full

    def count(self, characters: int, now: float) -> None:
        """Adds ignored characters to the paste."""
        self._told = self._told if self.pasted else now
        self.pasted += characters
        self._last = now

    def report(self, now: float) -> int:
        """Returns how many characters to say were ignored: at its end, and once a second."""
        if not self.pasted:
            return 0
        pasted, ended = self.pasted, now - self._last > QUIET_S
        if ended:
            self.pasted = 0
            self._times.clear()
        elif now - self._told < TOLD_S:
            return 0
        self._told = now
        return pasted
