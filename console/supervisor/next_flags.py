"""The flags that an operator has set for the next phase of a launch, or for all later phases."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from console.action_table import Phases
from console.model import OPERATOR
from console.supervisor.launch_spec import FlagValue, LaunchSpec, check_in_use
from trainers.contract import flags
from trainers.contract.errors import UsageError

MAY_IGNORE = "; it starts a foreign program, which may ignore this flag"


def set_words(name: str, value: str, phase: str, phases: Phases) -> str:
    """Returns the answer to a request that set a flag; an adoption looks for this text."""
    return f"{name}={value} for {phase} {'and all later phases' if phases == 'all' else 'only'}"


class NextFlags:
    """Owns the flags that an operator set, for the next phase or for all later phases."""

    def __init__(self, spec: LaunchSpec):
        self._spec = spec
        self.pending: Mapping[str, dict[str, Any]] = {}
        """The value of the key `next_flags` of plan_state.json."""

    def values(self) -> dict[str, FlagValue]:
        """Returns the flags with their origin, for the phase that starts now."""
        return {
            name: FlagValue(flag["value"], f"{OPERATOR}{flag['by']}")
            for name, flag in self.pending.items()
        }

    def started(self) -> None:
        """Removes the flags of the phase that has started; flags for all later phases remain."""
        self.pending = {
            name: flag for name, flag in self.pending.items() if flag.get("phases") == "all"
        }

    def set(self, index: int, args: Mapping[str, Any], by: str) -> tuple[bool, str]:
        """Sets or resets a flag for the phase `index`, or also for all later phases.

        `args` has the arguments of the request. Returns two values: success, and a sentence. A
        request for another phase is rejected, and a flag that is not valid with the settings of a
        phase, or that they override. If a flag is set for all later phases, a change for only the
        next phase is rejected.
        """
        name, value, planned = args["name"], args.get("value"), self._spec.plan.phases
        phases: Phases = args.get("phases", "next")
        if index >= len(planned):
            return False, "there is no next phase: the flag would have no effect"
        phase, last = planned[index].name, len(planned) if phases == "all" else index + 1
        if (wanted := args.get("phase", phase)) != phase:
            return False, f"the next phase is {phase!r}, not {wanted!r}; nothing was changed"
        changed = {key: flag for key, flag in self.pending.items() if key != name}
        if phases == "next" and self.pending.get(name, {}).get("phases") == "all":
            return False, f"{name} is set for all later phases; pass phases=all to change it"
        try:
            if value is not None:
                value = flags.format_value(flags.parse(name, value))
                check_in_use({name: value}, planned[index:last], runs=True)
                changed[name] = {"value": value, "by": by, "ts": time.time(), "phases": phases}
            pending = {key: FlagValue(flag["value"], "operator") for key, flag in changed.items()}
            for each in range(index, last):
                self._spec.settings(each, self._spec.flags(each, pending))
        except UsageError as error:
            return False, str(error)
        self.pending = changed
        if value is None:
            rest = " and all later phases" if phases == "all" else ""
            return True, f"{name} is reset to the value of the plan for {phase}{rest}"
        is_read = not flags.lookup(name).setting or any(x.is_ours for x in planned[index:last])
        return True, set_words(name, value, phase, phases) + MAY_IGNORE * (not is_read)
