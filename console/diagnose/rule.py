"""The type of a watch rule: bounds, duration, action, and functions that measure and confirm it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from console.diagnose.readings import History, Readings
from console.model import Level
from console.plan import Watch

PURE_NUMBERS = ("limits", "ratio")
"""Units of plain ratios; `Rule.bound` does not show them."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A measured value with its sentence.

    For a stall, `limit_s` is the stall limit, and `lasted_s` is the time without progress.
    `acts_at` is the value for a strong action, or None if it is `value`.
    """

    value: float
    text: str = ""
    limit_s: float = 0.0
    lasted_s: float = 0.0
    acts_at: float | None = None


Measure = Callable[[Readings, History, Watch], Measured | None]
"""Measures the value of a rule. None ("not measured") neither raises nor clears the rule."""
Corroborate = Callable[[Readings, History], str]
"""Reads the second source of a rule. Returns why this source does not confirm the rule, or ""."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table of watch rules.

    A strong action interrupts or ends the run. It needs a value that reaches `severe` (`threshold`
    if `severe` is None). The second source, `corroborate`, must confirm the rule. A rule without
    `corroborate` can only warn or dump. `watchdog --halt` can halt a run by a rule with an
    `anomaly`, which it writes to `.anomaly_type`; the plan need not give the rule an action.
    """

    name: str
    help: str
    unit: str
    threshold: float
    clear: float
    for_s: float
    measure: Measure
    corroborate: Corroborate | None = None
    level: Level = "warn"
    action: str = "warn"
    severe: float | None = None
    anomaly: str = ""
    again_s: float = 0.0
    """Shortest time between two alerts of a rising value; 0 if a rise raises no further alert."""

    def is_breached(self, value: float) -> bool:
        return self._reaches(value, self.threshold)

    def bound(self, value: float) -> str:
        """Returns a bound with its sign and unit, if any: "≤ 70 %", "≥ 3 consecutive records"."""
        sign = "≥" if self.threshold >= self.clear else "≤"
        if self.unit == "share":
            return f"{sign} {100 * value:g} %"
        if self.unit in PURE_NUMBERS:
            return f"{sign} {value:g}"
        unit = self.unit.removesuffix("s") if value == 1 else self.unit
        return f"{sign} {value:g} {unit}"

    def is_severe(self, measured: Measured) -> bool:
        """Returns whether a value is bad enough for a strong action."""
        value = measured.value if measured.acts_at is None else measured.acts_at
        return self._reaches(value, self.threshold if self.severe is None else self.severe)

    def is_cleared(self, value: float) -> bool:
        return value <= self.clear if self.threshold >= self.clear else value >= self.clear

    def clear_for(self, threshold: float) -> float:
        """Returns the value that clears the rule with another threshold.

        The value changes in proportion to the threshold. But if it lies between the threshold and
        the healthy value 1 of a share or ratio, it changes in proportion to their distance.
        """
        lies_between = self.threshold < self.clear < 1 or self.threshold > self.clear > 1
        is_same_side = (threshold < 1) == (self.threshold < 1)
        if self.unit in ("share", "ratio") and lies_between and is_same_side:
            return 1 - (1 - threshold) * (1 - self.clear) / (1 - self.threshold)
        return self.clear * threshold / self.threshold

    def _reaches(self, value: float, bound: float) -> bool:
        return value >= bound if self.threshold >= self.clear else value <= bound
