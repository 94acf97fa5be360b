"""The watchdog: holds every rule against every moment, and says what was raised, cleared, done.

An alert needs its condition for the rule's `for_s`. An action that ends or interrupts a run needs
it three times as long in all, and the rule's second source has to agree; until then the action is
withheld, which is said once. Only time counts that the watchdog looked at: one that was frozen, or
comes late, looks first. An action is said once a raise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from console.diagnose.readings import Past, Readings
from console.diagnose.rules import STRONG, STRONG_TIMES, Found, Rule, chosen
from console.model import STALL, Level
from trainers.contract.plan import Watch

LONGEST_GAP_S = 5.0
"""Of the time between two looks so much counts as looked at, more where looks are rarer."""
DOUBTED_LOOKS = 2
"""An action that was due is said to be withheld at the second such look: a record may be late."""
AGAIN_S = 10.0
"""A rule that is raised is told again at most so often."""
Kind = Literal["raise", "clear", "act", "withhold"]


@dataclass(frozen=True, slots=True)
class Change:
    """Something that a rule did: `act` names the action that is due.

    `withhold` names one that would be due if the second source agreed; the text says why not.
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
    doubted: int = 0
    """Looks at which an action was due and the second source did not agree."""
    held_s: float | None = None
    """For how long the condition was looked at, before it was raised; None: it does not hold."""
    counts: Mapping[int, int] | None = field(default_factory=dict)
    """The parts of the condition by GPU, as in `Found.counts`; None: not known."""
    told_at: float = 0.0
    """When the rule was last raised or raised again."""
    grave_s: float = 0.0
    """For how long it has been breached, or bad enough for a strong action where that is more."""


@dataclass(slots=True)
class Watchdog:
    """Watches one attempt. `actions` are asked for beside the plan's, as by --halt.

    `interval_s` is the time between two looks that is meant.
    """

    watch: Watch
    actions: Mapping[str, str] = field(default_factory=dict)
    interval_s: float = 1.0
    rules: tuple[Rule, ...] = ()
    _past: Past = field(default_factory=Past)
    _states: dict[str, _State] = field(default_factory=dict)
    _mono: float | None = None

    def __post_init__(self) -> None:
        self.rules = chosen(self.watch, self.actions)
        self._states = {rule.name: _State() for rule in self.rules}

    def look(self, now: Readings) -> Sequence[Change]:
        """Returns what changed since the last look, in the order of the table."""
        gap_s = 0.0 if self._mono is None else now.mono - self._mono
        gap_s = min(max(0.0, gap_s), max(LONGEST_GAP_S, 2 * self.interval_s))
        self._mono = now.mono
        self._past.take(now)
        changes: list[Change] = []
        for rule in self.rules:
            found = rule.measure(now, self._past, self.watch)
            if found is not None:
                changes += self._take(rule, found, gap_s, now)
        return changes

    def restore(self, raised: Iterable[str]) -> None:
        """Takes rules as raised that a former watchdog of the same attempt raised."""
        for name in self._states.keys() & set(raised):
            self._states[name] = _State(raised=True, counts=None)

    def open(self) -> tuple[str, ...]:
        """Returns the names of the rules that are raised."""
        return tuple(name for name, state in self._states.items() if state.raised)

    def _take(self, rule: Rule, found: Found, gap_s: float, now: Readings) -> Iterator[Change]:
        """Yields what one rule did at a look that measured `found`."""
        state = self._states[rule.name]
        if state.raised and rule.over(found.value):
            self._states[rule.name] = _State()
            yield Change("clear", rule, f"{rule.name} is over", found.value)
        elif not rule.breached(found.value):
            state.held_s = None
        elif state.raised:
            yield from self._tell_again(rule, state, found, now.mono)
            state.grave_s = state.grave_s + gap_s if rule.grave(found.value) else 0.0
            yield from self._act(rule, state, found, now)
        else:
            state.held_s = 0.0 if state.held_s is None else state.held_s + gap_s
            if state.held_s >= rule.for_s:
                state.raised, state.counts, state.told_at = True, found.counts, now.mono
                yield Change("raise", rule, found.text, found.value, rule.level)
                yield from self._act(rule, state, found, now)

    def _tell_again(
        self, rule: Rule, state: _State, found: Found, mono: float
    ) -> Iterator[Change]:  # fmt: skip
        """Replaces the alert of a raised rule when something was added to its condition."""
        known = found.counts if state.counts is None else state.counts
        if not any(count > known.get(key, 0) for key, count in found.counts.items()):
            state.counts = found.counts
        elif mono - state.told_at >= AGAIN_S:
            state.counts, state.told_at = found.counts, mono
            yield Change("clear", rule, "there is more, see the next alert", found.value)
            yield Change("raise", rule, found.text, found.value, rule.level)

    def _act(self, rule: Rule, state: _State, found: Found, now: Readings) -> Iterator[Change]:
        """Yields the action of a raised rule once it is due, or that it is withheld."""
        strong = rule.action in STRONG
        if state.acted or rule.action == "warn":
            return
        if strong and not self._long_enough(rule, state, found):
            return
        doubt = ""
        if strong:
            doubt = rule.second(now, self._past) if rule.second else "it has no second source"
        if not doubt:
            state.acted = True
            yield Change("act", rule, found.text, found.value, rule.level, rule.action)
            return
        state.doubted += 1
        if state.doubted == DOUBTED_LOOKS:
            text = f"{rule.action} withheld: the second source does not agree: {doubt}"
            yield Change("withhold", rule, text, found.value, "crit", rule.action)

    def _long_enough(self, rule: Rule, state: _State, found: Found) -> bool:
        """Says whether a strong action is due: bad enough, long enough, and looked at so long."""
        looked_s = (STRONG_TIMES - 1) * max(rule.for_s, found.limit_s)
        act_s = self._act_s(found.limit_s) if found.limit_s else 0.0
        return rule.grave(found.value) and state.grave_s >= looked_s and found.stood_s >= act_s

    def _act_s(self, limit_s: float) -> float:
        """Returns how long a stall lasts before a strong action answers it."""
        return max(STRONG_TIMES * limit_s, self.watch.stall_act_s)

    @property
    def stall_action(self) -> str:
        """The action that answers a stall."""
        return next(rule.action for rule in self.rules if rule.name == STALL)

    def stall_words(self) -> str:
        """Says what a stall is answered with, and when."""
        limit_s, action = self.watch.stall_floor_s, self.stall_action
        text = f"if it stalls for {limit_s:g} s: alert"
        if action in STRONG:
            return f"{text}, after {self._act_s(limit_s) - limit_s:g} s more {action}"
        return f"{text} only" if action == "warn" else f"{text}, then {action}"
