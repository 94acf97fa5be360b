"""The flags that an operator has set for the next phase of a launch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from console.supervisor.launch_spec import FlagValue, LaunchSpec
from trainers.contract import flags
from trainers.contract.errors import UsageError


def set_words(name: str, value: str, phase: str) -> str:
    """Returns the answer to a request that set a flag: who takes over looks for it."""
    return f"{name}={value} for {phase} only"


class NextFlags:
    """Owns the flags that wait for the next phase; they hold for that phase only."""

    def __init__(self, given: LaunchSpec):
        self._orders = given
        self.held: Mapping[str, dict[str, Any]] = {}
        """`next_flags` of plan_state.json."""

    def values(self) -> dict[str, FlagValue]:
        """Returns the flags with their origin, for the phase that starts."""
        return {name: FlagValue(f["value"], f"operator {f['by']}") for name, f in self.held.items()}

    def set(self, index: int, name: str, value: str | None, by: str) -> tuple[bool, str]:
        """Sets a flag for the phase `index`, or unsets it for None. Returns success and a sentence.

        It is refused where it does not fit the settings of that phase.
        """
        phase = self._orders.plan.phases[index].name
        changed = {held: flag for held, flag in self.held.items() if held != name}
        try:
            if value is not None:
                value = flags.format_value(flags.parse(name, value))
                changed[name] = {"value": value, "by": by, "ts": time.time()}
            given = {held: FlagValue(flag["value"], "operator") for held, flag in changed.items()}
            self._orders.settings(index, self._orders.flags(index, given))
        except UsageError as error:
            return False, str(error)
        self.held = changed
        if value is None:
            return True, f"{name} is as the plan says again for {phase}"
        return True, set_words(name, value, phase)
