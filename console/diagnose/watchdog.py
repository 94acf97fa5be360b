"""The watchdog: evaluates all watch rules at each update; returns alerts and due actions.

An alert is raised when its condition has lasted for the rule's `for_s`. A strong action also needs
a severe value, a condition that has lasted at least three times this long, and a confirmation by
the rule's second source. Until the confirmation, the action is withheld. Until a raised rule is
cleared, its action is returned at most once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from console.diagnose.readings import History, Readings
from console.diagnose.rules import STRONG, STRONG_TIMES, THROUGHPUT_DROP, Measured, Rule, with_plan
from console.model import STALL, Level
from console.plan import Watch

LONGEST_GAP_S = 5.0
"""Longest time between two updates that counts as observed; at least twice the intended
interval."""
REPORT_WITHHELD_AT = 2
"""Number of the unconfirmed update at which a due action is reported as withheld. The first
unconfirmed update is not reported, because a record may be late."""
Kind = Literal["raise", "clear", "act", "withhold"]


@dataclass(frozen=True, slots=True)
class Change:
    """A change of one rule. The kind `act` says that `action` is due and not withheld.

    The kind `withhold` says that `action` is due, but not confirmed; `text` says why.
    """

    kind: Kind
    rule: Rule
    text: str
    value: float
    level: Level = "info"
    action: str = ""


@dataclass(slots=True)
class _State:
    raised: bool = False
    acted: bool = False
    unconfirmed: int = 0
    """Number of updates at which an action was due and the second source did not confirm it."""
    breached_s: float | None = None
    """Observed duration of the breach until the rule is raised; None without a breach."""
    raised_value: float = math.inf
    """The value above which the alert is raised again, infinite if none is known."""
    raised_at: float = 0.0
    """Time at which the rule was last raised or raised again."""
    severe_s: float = 0.0
    """Observed time for which the value of the raised rule has been severe."""


class Watchdog:
    """Watches one attempt.

    `actions` is as in `with_plan`, and `settings` as in `History`. `interval_s` is the intended
    time between two updates.
    """

    def __init__(
        self, watch: Watch, actions: Mapping[str, str] | None = None, interval_s: float = 1.0,
        settings: Mapping[str, Any] | None = None,
    ):  # fmt: skip
        self.rules = with_plan(watch, actions or {})
        self.watch, self._interval_s = watch, interval_s
        slow = [rule.clear for rule in self.rules if rule.name == THROUGHPUT_DROP]
        self._history = History(settings, min([1.0, *slow]))
        self._states = {rule.name: _State() for rule in self.rules}
        self._mono: float | None = None

    def update(self, now: Readings) -> Sequence[Change]:
        """Evaluates the rules and returns their changes, in the order of the table."""
        gap_s = 0.0 if self._mono is None else now.mono - self._mono
        gap_s = min(max(0.0, gap_s), max(LONGEST_GAP_S, 2 * self._interval_s))
        self._mono = now.mono
        self._history.update(now)
        changes: list[Change] = []
        for rule in self.rules:
            measured = rule.measure(now, self._history, self.watch)
            if measured is not None:
                changes += self._apply(rule, measured, gap_s, now)
        return changes

    def restore(self, raised: Iterable[str]) -> None:
        """Marks the rules with these names as raised; ignores other names."""
        for name in self._states.keys() & set(raised):
            self._states[name] = _State(raised=True)

    def raised(self) -> tuple[str, ...]:
        """Returns the names of the rules that are raised."""
        return tuple(name for name, state in self._states.items() if state.raised)

    def _apply(
        self, rule: Rule, measured: Measured, gap_s: float, now: Readings
    ) -> Iterator[Change]:  # fmt: skip
        """Yields the changes of one rule at an update."""
        state = self._states[rule.name]
        if state.raised and rule.is_cleared(measured.value):
            self._states[rule.name] = _State()
            yield Change("clear", rule, f"{rule.name} cleared", measured.value)
        elif not rule.is_breached(measured.value):
            state.breached_s, state.severe_s = None, 0.0
        elif state.raised:
            yield from self._raise_again(rule, state, measured, now.mono)
            state.severe_s = state.severe_s + gap_s if rule.is_severe(measured) else 0.0
            yield from self._act(rule, state, measured, now)
        else:
            state.breached_s = 0.0 if state.breached_s is None else state.breached_s + gap_s
            if state.breached_s >= rule.for_s:
                state.raised, state.raised_value = True, measured.value
                state.raised_at = now.mono
                yield Change("raise", rule, measured.text, measured.value, rule.level)
                yield from self._act(rule, state, measured, now)

    def _raise_again(
        self, rule: Rule, state: _State, measured: Measured, mono: float
    ) -> Iterator[Change]:  # fmt: skip
        """Raises the alert of a raised rule again if its value rose and `again_s` has passed."""
        if not rule.again_s or measured.value <= state.raised_value:
            state.raised_value = measured.value
        elif mono - state.raised_at >= rule.again_s:
            state.raised_value, state.raised_at = measured.value, mono
            yield Change("clear", rule, "replaced by the next alert", measured.value)
            yield Change("raise", rule, measured.text, measured.value, rule.level)

    def _act(
        self, rule: Rule, state: _State, measured: Measured, now: Readings
    ) -> Iterator[Change]:  # fmt: skip
        """Yields the due action of a raised rule; reports once that the action is withheld."""
        if state.acted or rule.action == "warn":
            return
        doubt = ""
        if rule.action in STRONG:
            if not self._lasted(rule, state, measured):
                return
            confirm = rule.corroborate
            doubt = confirm(now, self._history) if confirm else "the rule has no second source"
        if not doubt:
            state.acted = True
            yield Change("act", rule, measured.text, measured.value, rule.level, rule.action)
            return
        state.unconfirmed += 1
        if state.unconfirmed == REPORT_WITHHELD_AT:
            text = f"{rule.action} withheld, no second source confirms it: {doubt}"
            yield Change("withhold", rule, text, measured.value, "crit", rule.action)

    def _lasted(self, rule: Rule, state: _State, measured: Measured) -> bool:
        """Returns whether a value is severe and has lasted long enough for a strong action."""
        # The time before the alert counts once. A value in `acts_at` may become severe only later.
        times = STRONG_TIMES - 1 if measured.acts_at is None else STRONG_TIMES
        observed_s = times * max(rule.for_s, measured.limit_s)
        act_s = self._act_s(measured.limit_s) if measured.limit_s else 0.0
        long_enough = state.severe_s >= observed_s and measured.lasted_s >= act_s
        return rule.is_severe(measured) and long_enough

    def _act_s(self, limit_s: float) -> float:
        """Returns the duration of a stall after which a strong action is due."""
        return max(STRONG_TIMES * limit_s, self.watch.stall_act_s)

    @property
    def stall_action(self) -> str:
        """The name of the action on a stall."""
        return next(rule.action for rule in self.rules if rule.name == STALL)

    def stall_policy(self) -> str:
        """Returns the action on a stall in words; for a strong action, also when it is due."""
        limit_s, action = self.watch.stall_floor_s, self.stall_action
        text = f"on stall ({limit_s:g} s): alert"
        if action in STRONG:
            return f"{text}, and {self._act_s(limit_s) - limit_s:g} s later {action}"
        return f"{text} only" if action == "warn" else f"{text}, then {action}"
