"""The help of a view."""

from __future__ import annotations

from console.action_table import KEYS
from console.tui.keys import NAMES, for_view
from console.tui.rows import Row, fill, labelled, wrap

KEYS_WIDTH = 12
WORDS = (
    f"The keys {' '.join(KEYS)} are actions: they ask first, and No is the default. "
    "Leaving never stops a run. Buttons: Tab, then Enter."
)


def help_rows(view: str, width: int) -> list[Row]:
    """Returns the keys of a view; the last row names the document that explains the words."""
    rows: list[Row] = [((line, "dim"),) for line in wrap(WORDS, width)]
    for key in for_view(view):
        names = " ".join(NAMES.get(name, name) for name in key.keys)
        text = f"{key.help} (asks; {key.asks})" if key.asks else key.help
        rows += labelled((f"{fill(names, KEYS_WIDTH)} ", "key"), wrap(text, width - KEYS_WIDTH - 1))
    return [*rows, (("words: docs/words.md", "dim"),)]
