"""Draws a line chart as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from itertools import pairwise
from statistics import median

from console.sources.series import Point, bins
from console.status_text import age, number

WIDTH, HEIGHT, MARGIN = 720, 240, 56
GAP, GAP_S = 16, 60.0
BEGIN, END = '<polyline fill="none" stroke="#06c" stroke-linecap="round" points="', '"/>\n'


def svg(title: str, unit: str, points: Sequence[Point]) -> str:
    """Returns a line chart of points, or "" for fewer than two finite points.

    The points must be in order of time. The line joins the extremes of each column of one unit. It
    has a gap after more than `GAP` empty columns of at least `GAP_S`, unless the points are usually
    that far apart.
    """
    known = [(at, value) for at, value in points if math.isfinite(at) and math.isfinite(value)]
    if len(known) < 2:
        return ""
    begin, end = known[0][0], known[-1][0]
    low, high = min(v for _, v in known), max(v for _, v in known)
    across, up = max(end - begin, 1e-3), max(high - low, 1e-9)
    inner, tall = WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN
    bands = bins(known, begin, across * (inner + 1) / inner, inner + 1)
    columns = [(x, band) for x, band in enumerate(bands) if band]
    apart = [after - x for (x, _), (after, _) in pairwise(columns)]
    most, line = max(GAP, 4 * median(apart or [0]), GAP_S * inner / across), ""
    for since, (x, band) in zip([0, *apart], columns, strict=True):
        places = (f" {MARGIN + x},{HEIGHT - MARGIN - tall * (v - low) / up:.1f}" for v in band)
        line += (END + BEGIN) * (since > most) + "".join(places)
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
        f'stroke="#999"/>\n{BEGIN}{line}{END}{texts}\n</svg>\n'
    )
