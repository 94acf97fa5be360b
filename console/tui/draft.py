"""The launch that the operator prepares, and the planned flag values of a launch's next phase."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from console.action_table import ACTIONS
from console.model import LaunchState, RunState
from console.status_text import counted
from console.tui.confirmations import CannotAsk, Choice, Question


def next_phase_values(launch: LaunchState) -> Mapping[str, str]:
    """Returns the planned values of flags in the next phase, or {} if no phase is left.

    The values come from the settings of the phase, or else from its flags. Raises ContractError if
    the plan of the launch cannot be read.
    """
    if not launch.rest:
        return {}
    from console.sources.json_documents import flag_settings
    from console.supervisor import launch_spec

    index = launch.rest[0].index
    given = launch_spec.load(Path(launch.path))
    flags = given.flags(index, {})
    held = flag_settings(given.settings(index, flags))
    return {**{name: flag.value for name, flag in flags.items()}, **held}


DEFAULT_PLAN = "cpu_smoke"
BETWEEN = {"ask": "waits for L after each phase", "go": "continues after each passed phase"}
"""What a launch does between two phases."""


class Draft:
    """A launch in preparation: a plan with the operator's flags, and the result of its preflight.

    A launch of the draft waits for confirmation between phases unless the operator chooses `go`.
    `trouble` is the error of the newest check, or ""; `checked` has the options of that check.
    `prepared` is the result of the newest check of this plan without an error, or None.
    """

    def __init__(self, plan_name: str, root: Path):
        self.plan_name, self.root = plan_name, root
        self.is_chosen = plan_name != DEFAULT_PLAN
        self.flags: dict[str, str] = {}
        self.between = "ask"
        self.prepared: Any = None
        self.planned: Mapping[str, str] = {}
        """The values of flags in the first phase without the operator's flags."""
        self.trouble = ""
        self.checked: Any = None

    def choose(self, plan_name: str) -> None:
        """Selects a plan for the draft; another plan begins without flags."""
        self._select(plan_name)
        self.is_chosen = True

    def offer(self, plan_name: str) -> None:
        """Selects the plan of the displayed run, unless the operator chose a plan or flags."""
        if plan_name and not self.is_chosen and not self.flags:
            self._select(plan_name)

    def _select(self, plan_name: str) -> None:
        if plan_name != self.plan_name:
            self.plan_name, self.flags, self.trouble = plan_name, {}, ""
            self.prepared = self.checked = None
            self.planned = {}

    def options(self) -> Any:
        """Returns the options of the launch; the preflight then measures nothing."""
        from console.launch_options import LaunchOptions  # imported after the first picture

        return LaunchOptions(
            plan=self.plan_name, flags=dict(self.flags), between=self.between, root=self.root,
            measure=False,
        )  # fmt: skip

    @property
    def is_checked(self) -> bool:
        """True if the result of the check belongs to the options that are chosen now."""
        return self.checked is not None and self.checked == self.options()

    def take(self, options: Any, prepared: Any, trouble: str) -> None:
        """Stores the result of a check; after an error, the former `prepared` remains."""
        self.checked, self.trouble = options, trouble
        self.prepared = prepared if prepared is not None else self.prepared
        if prepared is not None and not (options.flags and self.planned):
            # imported after the first picture
            from console.sources.json_documents import flag_settings

            plan, settings = prepared.plan, prepared.phases[0]["settings"]
            found = {**plan.env, **plan.phases[0].flags, **flag_settings(settings)}
            self.planned = {name: found[name] for name in found.keys() - options.flags.keys()}

    @property
    def plan(self) -> Any:
        return self.prepared.plan if self.prepared is not None else None

    @property
    def checks(self) -> tuple[Any, ...]:
        return self.prepared.checks if self.prepared is not None else ()

    def question(self, host: str, shown: RunState | None = None) -> Question:
        """Returns the confirmation of the launch. Raises CannotAsk if no launch is possible now.

        If the `shown` run could be resumed, a fact says that this launch does not resume that run.
        """
        if not self.is_checked:
            raise CannotAsk("the plan is still being checked; press L again in a moment")
        failed = [f"not launched: {check.text}" for check in self.checks if check.result == "fail"]
        if self.trouble or failed:
            raise CannotAsk(self.trouble or failed[0])
        from console.plans import catalog

        plan, file = self.plan, catalog.files().get(self.plan_name, self.plan_name)
        ranks = counted(max(phase.nproc for phase in plan.phases), "rank")
        where = f"{self.prepared.directory.parent}/<UTC time>"
        begins: tuple[tuple[str, str], ...] = ()
        if shown is not None and shown.can_resume:
            unused = f"without the checkpoint of step {shown.saved_step:,} of {shown.id}"
            unused += "; R resumes from it"
            has_passed = shown.launch is not None and shown.launch.has_passed
            phase = shown.launch.rest[0] if shown.launch and has_passed else shown.own_phase
            if phase and (has_passed or phase.sweep):
                named = f"the sweep {phase.sweep}" if phase.sweep else phase.name
                unused = f"not with {named}; R starts it"
            begins = (("begins", f"{plan.phases[0].name} at step 1, {unused}"),)
        flags = [
            f"{name}={plan.phases[0].flags[name]}{' of the shell' * (origin == 'shell')}"
            for name, origin in self.prepared.spec.flag_origins.items()
        ]
        facts = (
            ("plan", f"{file}: {', '.join(phase.name for phase in plan.phases)}"),
            ("host", host),
            *begins,
            ("starts", f"{ranks} with torchrun; {BETWEEN[self.between]}"),
            ("flags", ", ".join(flags) or "none changed"),
            ("writes", where),
            ACTIONS["launch"].cost,
        )
        return Question(f"Launch {plan.name}?", facts, where, (Choice("Launch", "launch"),))
