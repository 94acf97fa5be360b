"""The choices of an operator for a launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from console.sources import launches


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """The choices of an operator for a launch; an empty choice leaves the plan as it is.

    `plan` is the name or the YAML file of a plan. A `config` or a `resume` replaces the plan. With
    a `config`, `trainer` trains in a single phase. `resume` is the path of an ended launch or of a
    run in it; the remaining phases are launched. With a `digest`, only the plan with this digest is
    launched.
    """

    plan: str = ""
    config: Path | None = None
    resume: Path | None = None
    again: bool = False
    """True to resume a launch that another launch already continues, or that is unsupervised."""
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
    """The plan is checked for these GPUs, for example 2xA100, not for those of this machine."""
    digest: str = ""
    measure: bool | None = None
    """True to measure devices, data and attention; None for the choice of the plan."""
