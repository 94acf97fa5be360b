"""Makes text safe for a terminal."""

from __future__ import annotations

import re

MAX_CHARS = 2000
_ESCAPES = re.compile(
    r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?"  # OSC, for example titles and the clipboard
    r"|\x1b[PX^_][^\x1b]*(?:\x1b\\)?"  # DCS, SOS, PM, APC
    r"|\x1b\[[0-?]*[ -/]*[@-~]?"  # CSI
    r"|\x1b[ -/]*[0-~]?"
)
_BIDI = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
_TABLE = dict.fromkeys((*range(0x20), *range(0x7F, 0xA0)), "�")
_TABLE |= dict.fromkeys(map(ord, _BIDI + "\u200b\u200c\u200d\u2060\ufeff\u2028\u2029"), "")
_TABLE[ord("\t")] = "    "


def clean(text: str, limit: int = MAX_CHARS) -> str:
    """Returns `text` as one line that is safe to print.

    Removes escape sequences, direction marks, zero-width spaces and joiners, Unicode line
    separators and trailing line breaks. Replaces a tab by spaces, and any other control character
    by "�". The result has at most `limit` characters; an ellipsis usually marks a cut. If carriage
    returns overwrite the line, as a progress bar does, only the last text remains. Of a longer text
    than 4 × `limit` characters, only this length is read.
    """
    if len(text) <= limit and text.isascii() and text.isprintable():
        return text
    text = text.rstrip("\r\n").rpartition("\r")[2][: 4 * limit]
    text = _ESCAPES.sub("", text) if "\x1b" in text else text
    text = text.translate(_TABLE)
    text = text.encode("utf-8", "replace").decode("utf-8") if not text.isascii() else text
    return text if len(text) <= limit else text[: limit - 1] + "…"
