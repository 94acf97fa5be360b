"""Formats numbers, ages and durations for the screen, with few digits."""

from __future__ import annotations

import math

from console.status_text import DASH, age

EIGHTHS = " ▏▎▍▌▋▊▉█"


def eta(seconds: float | None) -> str:
    """Returns a remaining time, rounded so that the text rarely changes: `20s`, `1m30`, `19h04`."""
    if seconds is None or not math.isfinite(seconds):
        return DASH
    seconds = max(0.0, seconds)
    if seconds < 60:
        return f"{math.ceil(seconds / 5) * 5}s"
    if seconds < 600:
        tens = round(seconds / 10) * 10
        return f"{tens // 60}m{tens % 60:02d}"
    return age(seconds)


def whole(value: float | None, suffix: str = "") -> str:
    """Returns a whole number with thousands separators: `41,208`, `98%`, `612W`."""
    return DASH if value is None or not math.isfinite(value) else f"{value:,.0f}{suffix}"


def short(value: float | None) -> str:
    """Returns a number in few characters: `0.91`, `812`, `41.2k`, `7.5e-4`."""
    if value is None:
        return DASH
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    for scale, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= scale and size >= 1e4:
            scaled = value / scale
            return f"{scaled:.0f}{unit}" if abs(scaled) >= 100 else f"{scaled:.1f}{unit}"
    if size >= 100 or value == int(value):
        return f"{value:.0f}"
    if size >= 10:
        return f"{value:.1f}"
    if size >= 0.095:
        return f"{value:.2f}"
    text = f"{value:.1e}".replace("e-0", "e-")
    return text if len(text) <= 6 else f"{value:.0e}".replace("e-0", "e-")


def figure(value: float, unit: str) -> str:
    """Returns a figure as text; only shares, percentages, sizes and durations have their unit."""
    if not math.isfinite(value):
        return str(value)
    if unit in ("nats", "nats/token"):
        return f"{value:.3f}"
    if unit == "tokens":
        return short(value)
    if unit == "share":
        return "100 %" if 0.9995 <= value <= 1 else f"{value * 100:.1f} %"
    if unit == "%":
        return f"{value:.0f} %"
    if unit in ("MiB", "GiB"):
        return gib(value * (1024 if unit == "GiB" else 1))
    if unit == "s":
        return duration(value)
    return whole(value) if abs(value) >= 1000 else short(value)


def duration(seconds: float) -> str:
    """Returns a measured duration as text: `0.80 s`, `12 ms`, `74 s`."""
    if seconds >= 90:
        return age(seconds)
    if seconds >= 10:
        return f"{seconds:.0f} s"
    if seconds >= 0.095:
        return f"{seconds:.2f} s"
    return f"{seconds * 1000:.0f} ms" if seconds >= 0.0095 else f"{seconds * 1000:.1f} ms"


def gib(mib: float | None) -> str:
    """Returns a number of MiB as text: `812 MiB`, `61.4 GiB`, `812 GiB`."""
    if mib is None or not math.isfinite(mib):
        return DASH
    digits = 1 if mib < 100 * 1024 else 0
    return f"{mib:.0f} MiB" if mib < 1000 else f"{mib / 1024:.{digits}f} GiB"


def short_gib(mib: float | None) -> str:
    """Returns a number of MiB as short text: `812M`, `1.2G`, `61G`."""
    if mib is not None and 10 * 1024 <= mib < math.inf:
        return f"{mib / 1024:.0f}G"
    return gib(mib).replace(" MiB", "M").replace(" GiB", "G")


def bar(share: float | None, width: int) -> tuple[str, str]:
    """Returns two values: the filled part and the empty part of a bar of `width` cells."""
    if share is None or not math.isfinite(share):
        return "", " " * width
    full, rest = divmod(round(min(1.0, max(0.0, share)) * width * 8), 8)
    filled = EIGHTHS[8] * full + (EIGHTHS[rest] if rest else "")
    return filled, "·" * (width - len(filled))
