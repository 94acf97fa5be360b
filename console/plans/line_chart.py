"""Draws a line chart as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from console.sources.series import Point, bins
from console.status_text import age, number

WIDTH, HEIGHT, MARGIN = 720, 240, 56


def svg(title: str, unit: str, points: Sequence[Point]) -> str:
    """Returns a line chart of points, or "" for fewer than two finite points.

    The points must be in order of time. The line joins the extremes of each column of one unit.
    """
    known = [(at, value) for at, value in points if math.isfinite(at) and math.isfinite(value)]
    if len(known) < 2:
        return ""
    begin, end = known[0][0], known[-1][0]
    low, high = min(v for _, v in known), max(v for _, v in known)
    across, up = max(end - begin, 1e-3), max(high - low, 1e-9)
    inner, tall = WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN
    bands = bins(known, begin, across * (inner + 1) / inner, inner + 1)
    places = ((x, tall * (v - low) / up) for x, band in enumerate(bands) for v in band or ())
    line = " ".join(f"{MARGIN + x},{HEIGHT - MARGIN - y:.1f}" for x, y in places)
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
