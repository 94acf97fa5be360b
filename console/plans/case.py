"""The launch that a preflight checks, and the result of one check."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from console.model import Gpu, Result
from console.plan import Plan
from console.settings_file import Settings
from console.sources import gpu_survey
from console.sources.gpu_survey import Card, Survey
from trainers.contract.errors import ContractError, UsageError

Found = tuple[Result, str]
CARDS_MIB: Mapping[str, int] = {"A100": 81_920, "A100-40": 40_960, "H100": 81_559, "H200": 143_771}
"""Memory of the GPUs that `--assume-gpus` knows, in MiB."""


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check: "fail" prevents the launch, and "unknown" is a warning."""

    name: str
    result: Result
    text: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    """The measured figures; the launch records them in run.json, in `measured` of `machine`."""


@dataclass(frozen=True)
class Case:
    """A plan to check, the directory that its launch would write to, and the options of the checks.

    `settings` has the resolved settings of each phase; for a foreign program they are {}. If
    `assumed` names GPUs, for example 2xA100, `survey` has these instead of this machine's GPUs.
    """

    plan: Plan
    directory: Path
    devices: str = ""
    operator: Settings = field(default_factory=Settings)
    settings: tuple[Mapping[str, Any], ...] = ()
    assumed: str = ""
    artifacts: Path = Path("artifacts")
    """The root directory of the launches."""
    git: Mapping[str, Any] = field(default_factory=dict)
    """The commit of the code, in the form of `git` in plan.json."""
    measure: bool = False
    """True to measure devices, data and attention, in separate processes."""
    root: Path = Path("/")
    """The root of most system files that the checks read, for example of /proc/PID."""
    driver_s: float = gpu_survey.LIMIT_S
    """Longest time to wait for the NVIDIA driver."""

    @property
    def nproc(self) -> int:
        return max(phase.nproc for phase in self.plan.phases)

    @cached_property
    def survey(self) -> Survey | str:
        """The GPUs, read once or assumed, or the reason why they cannot be read."""
        if self.assumed:
            return assume(self.assumed)
        try:
            return gpu_survey.survey(self.driver_s)
        except (TimeoutError, ContractError) as error:
            return str(error)

    def value(self, index: int, key: str) -> Any:
        """Returns the value of a phase's setting, or None for a foreign program."""
        return self.settings[index][key]["value"] if self.settings[index] else None


def assume(text: str) -> Survey:
    """Returns idle, healthy GPUs for a text like "2xA100". Raises UsageError for any other text."""
    found = re.fullmatch(r"([1-9]\d?)x(.+)", text, re.ASCII)
    if found is None or found[2] not in CARDS_MIB:
        known = ", ".join(CARDS_MIB)
        raise UsageError(f"--assume-gpus {text[:40]!r} is not NxNAME (like 2xA100); names: {known}")
    count, name = int(found[1]), found[2]
    gpus = (
        Gpu(i, name, "ok", util_pct=0.0, mem_used_mib=0.0, mem_total_mib=CARDS_MIB[name])
        for i in range(count)
    )
    return Survey(tuple(map(Card, gpus)))
