"""Draws a chart of a series as SVG, without a library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from console.status_text import age, number

WIDTH, HEIGHT, MARGIN = 720, 240, 56
MOST_POINTS = 1000


def svg(title: str, unit: str, points: Sequence[tuple[float, float]]) -> str:
    """Returns a line chart of points (unix s, value), or "" for fewer than two finite points.

    The points must be in order of time.
    """
    known = [(at, value) for at, value in points if math.isfinite(at) and math.isfinite(value)]
    known = known[:: max(1, math.ceil(len(known) / MOST_POINTS))]
    if len(known) < 2:
        return ""
    begin, end = known[0][0], known[-1][0]
    low, high = min(v for _, v in known), max(v for _, v in known)
    across, up = max(end - begin, 1e-9), max(high - low, 1e-9)
    inner, tall = WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN
    places = ((inner * (at - begin) / across, tall * (v - low) / up) for at, v in known)
    line = " ".join(f"{MARGIN + x:.1f},{HEIGHT - MARGIN - y:.1f}" for x, y in places)
    labels = (
        (MARGIN, MARGIN / 2, "start", f"{title} ({unit})" if unit else title),
        (MARGIN - 6, MARGIN + 4, "end", number(high)),
        (MARGIN - 6, HEIGHT - MARGIN + 4, "end", number(low)),
        (MARGIN, HEIGHT - MARGIN / 2, "start", "0"),
        (WIDTH - MARGIN, HEIGHT - MARGIN / 2, "end", age(end - begin)),
    )
    texts = "\n".join(
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'
        for x, y, anchor, text in labels
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="#fff"/>\n'
        f'<rect x="{MARGIN}" y="{MARGIN}" width="{inner}" height="{tall}" fill="none" '
        f'stroke="#999"/>\n<polyline fill="none" stroke="#06c" points="{line}"/>\n{texts}\n</svg>\n'
    )
