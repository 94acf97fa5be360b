"""The choices of an operator for a launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from console.sources import launches


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """The choices of an operator for a launch; an empty choice leaves the plan as it is.

    The plan has one of four sources: its name, a YAML file, a `config` with a trainer of `TRAINERS`
    (the plan then has a single phase), or the launch `resume` (its options and remaining phases).
    """

    plan: str = ""
    config: Path | None = None
    resume: Path | None = None
    trainer: str = ""
    phase: str = ""
    flags: Mapping[str, str] = field(default_factory=dict)
    sets: Mapping[str, str] = field(default_factory=dict)
    nproc: int | None = None
    devices: str = ""
    run_dir: Path | None = None
    between: str = ""
    root: Path = launches.ROOT
    assume_gpus: str = ""
    """GPUs for which the plan is checked instead of those of this machine, for example 2xA100."""
    measure: bool | None = None
    """True to measure devices, data and attention; None if the plan decides that."""
